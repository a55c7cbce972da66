"""Step rewards: the protocol, token ends by decoding, and the checker of written equations on real solutions.

What it reads of how people write: ``tests/unit/verifiers/test_equation_writing.py``."""

from __future__ import annotations

import functools
import json
import math
import pickle
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lab.rewards import EquationSteps, SplitStepReward, StepReward, step_reward, steps_as_outcome
from grpo_lab.rewards.arithmetic import NotArithmetic, value_of
from grpo_lab.rewards.steps import by_line, token_ends
from grpo_lab.testing import tiny_tokenizer


@step_reward
def thirds(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[list[tuple[int, float]]]:
    """A step every three tokens, worth its place."""
    return [[(end, float(end)) for end in range(2, len(ids), 3)] for ids in completion_ids]


def call(reward: StepReward, ids: list[list[int]], texts: list[str] | None = None) -> Any:
    texts = texts or ["x"] * len(ids)
    return reward(prompts=["p"] * len(ids), completions=texts, completion_ids=ids)


def test_decorated() -> None:
    assert thirds.scope == "step"
    assert thirds.name == "thirds"
    assert call(thirds, [[1] * 7, [], [1] * 2]) == [[(2, 2.0), (5, 5.0)], [], []]
    assert pickle.loads(pickle.dumps(thirds)) is thirds
    outcome = steps_as_outcome(thirds)
    assert outcome(["p"] * 2, ["a", "b"], completion_ids=[[1] * 7, [1]]) == [3.5, None]
    assert outcome.__name__ == "thirds"
    for other in (len, EquationSteps):
        with pytest.raises(ValueError, match=r"`steps_as_outcome` was given .*; it takes a step reward"):
            steps_as_outcome(other)  # type: ignore[arg-type]


def ends_of(prompts: Any, completions: Any, completion_ids: Any, *, worth: float, **_: Any) -> Any:
    return [[(len(ids) - 1, worth)] for ids in completion_ids]


class Ends:
    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> Any:
        return ends_of(prompts, completions, completion_ids, worth=1.0)


def test_what_has_no_name_of_its_own() -> None:
    """A partial has that of its function (and is pickled whole), an object that of its class."""
    reward = step_reward(functools.partial(ends_of, worth=0.5))
    assert (reward.name, step_reward(Ends()).name) == ("ends_of", "Ends")
    assert call(pickle.loads(pickle.dumps(reward)), [[1] * 3]) == call(reward, [[1] * 3]) == [[(2, 0.5)]]
    assert call(step_reward(Ends()), [[1] * 3]) == [[(2, 1.0)]]


def test_nan_is_not_scored_and_counted_once_a_completion() -> None:
    @step_reward
    def odd(completion_ids: Any, **_: Any) -> Any:
        return [[(0, math.nan), (1, math.nan)], [(0, 1.0)], [(0, None), (1, math.nan)]]

    for times in (1, 2):
        assert call(odd, [[1] * 2] * 3) == [[(0, None), (1, None)], [(0, 1.0)], [(0, None), (1, None)]]
        assert odd.not_numbers == 2 * times


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([(5, 1.0)], "ascend within the completion's 3 tokens"),
        ([(1, 1.0), (1, 0.0)], "ascend"),
        ([(0.5, 1.0)], "token 0.5"),
        ([(1, float("inf"))], "inf"),
        (None, "returned 0 lists for 1 completions"),
        ([(True, 1.0)], "token True"),
        ([(1, "good")], "a step is \\(end_token, score\\)"),
        ([(1, "0.5")], "a step is \\(end_token, score\\)"),
        ([(1, 1j)], "a step is \\(end_token, score\\)"),
        ([(1, 10**400)], "gave inf to a step of completion 0; allowed are finite numbers"),
        ([(1, 2, 3)], "a step is"),
        ([0.5], "a step is"),
        (0.5, "returned 0.5 for completion 0"),
    ],
)
def test_a_bad_step_reward_is_named(steps: Any, words: str) -> None:
    @step_reward
    def bad(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> Any:
        return [] if steps is None else [steps]

    with pytest.raises(ValueError, match=r"step reward 'bad'.*" + words):
        call(bad, [[1, 2, 3]])


def test_no_list_at_all_is_named_and_numbers_of_numpy_and_torch_are_taken() -> None:
    with pytest.raises(ValueError, match=r"step reward 'nothing' returned None; a step reward returns \[\["):
        call(step_reward(nothing), [[1, 2, 3]])
    taken = step_reward(
        lambda prompts, completions, completion_ids, **_: [[(np.int64(0), np.float32(1)), (torch.tensor(2), math.nan)]]
    )
    assert call(taken, [[1, 2, 3]]) == [[(0, 1.0), (2, None)]]


def nothing(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> Any:
    return None


class Ones(SplitStepReward):
    """1 for every step, and as many as it is told."""

    count: int | None = None

    def score_texts(self, prompt: Any, steps: list[str]) -> list[float]:
        return [1.0] * (len(steps) if self.count is None else self.count)


def test_a_last_step_that_stops_before_the_text_does_ends_there() -> None:
    tokenizer = tiny_tokenizer()
    text = "3 + 4 = 7. And so on, for a while"
    ids = tokenizer.encode(text, add_special_tokens=False)
    reward = Ones(split=lambda text: [text.index(".") + 1], tokenizer=tokenizer)
    ((end, _),) = call(reward, [ids], [text])[0]
    assert tokenizer.decode(ids[: end + 1]).strip() == "3 + 4 = 7."


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda text: [5, 3], r"`split` of Ones gave \[5, 3\]"),
        (lambda text: [99], r"gave \[99\] for a text of 9 characters"),
        (str.split, "gave .*index behind its last character"),
    ],
)
def test_a_splitter_that_gives_no_ends_is_named(split: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(Ones(split=split, tokenizer=tiny_tokenizer()), [[1, 2, 3]], ["3 + 4 = 7"])


def test_a_wrong_number_of_scores_is_named() -> None:
    reward = Ones(tokenizer=tiny_tokenizer())
    reward.count = 3
    with pytest.raises(ValueError, match="Ones scored 3 of a completion's 1 steps"):
        call(reward, [[1, 2, 3]], ["3 + 4 = 7"])


def test_token_ends_by_decoding() -> None:
    tokenizer = tiny_tokenizer()
    text = "First 3 + 4 = 7.\n\n  Then 7 * 2 = 14.  \nÄ half: ½ × 6 = 3"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    ends = token_ends(ids, by_line(text), tokenizer)
    assert len(ends) == 3
    assert ends[-1] == len(ids) - 1, "the last step takes the end token along"
    for end, line in zip(ends, ("First 3 + 4 = 7.", "14.", "= 3"), strict=True):
        assert line in tokenizer.decode(ids[: end + 1])
        assert end == len(ids) - 1 or line not in tokenizer.decode(ids[:end])
    assert token_ends([], [3], tokenizer) == []


def test_equation_steps_in_tokens() -> None:
    tokenizer = tiny_tokenizer()
    text = "3 + 4 = 7\nnow we double it\n7 * 2 = 15"
    ids = tokenizer.encode(text, add_special_tokens=False)
    reward = EquationSteps()
    with pytest.raises(ValueError, match="tokenizer"):
        call(reward, [ids], [text])
    reward.tokenizer = tokenizer
    ((first, right), (last, wrong)) = call(reward, [ids], [text])[0]
    assert (right, wrong, last) == (1.0, 0.0, len(ids) - 1)
    assert tokenizer.decode(ids[: first + 1]).strip() == "3 + 4 = 7"
    assert call(reward, [[]], [""]) == [[]]


def grown(rng: random.Random, depth: int) -> tuple[str, Fraction]:
    """A random expression and its value by Python's own arithmetic on fractions."""
    if depth == 0 or rng.random() < 0.25:
        number = rng.randrange(0, 20)
        return str(number), Fraction(number)
    (a, x), (b, y) = grown(rng, depth - 1), grown(rng, depth - 1)
    sign = rng.choice("+-*/")
    if sign == "/" and y == 0:
        sign = "+"
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else x}[sign]
    return f"({a}) {sign} [{b}]", value


def test_the_reader_against_python() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        text, value = grown(rng, 4)
        assert value_of(text) == value
        assert value_of(f"-{rng.randrange(9)}^2") <= 0
    with pytest.raises(NotArithmetic):
        value_of("9^9^9^9")


def test_first_wrong_step_of_real_solutions(grpo_lab_data: Path) -> None:
    """Which rows it applies to was fixed before looking: the arithmetic task of BIG-Bench Mistake (three human
    raters)."""
    rows = [json.loads(line) for line in (grpo_lab_data / "process_reward" / "steps.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "multistep_arithmetic" in row["source"]]
    assert len(rows) == 38
    found = 0
    for row in rows:
        scores = EquationSteps().score_texts("", row["steps"])
        first = scores.index(0.0) + 1 if 0.0 in scores else None
        found += first == row["first_error_step_1based"]
    print(f"first wrong step found in {found} of n = {len(rows)} ({found / len(rows):.1%})")
    assert found >= 0.9 * len(rows), f"{found} of {len(rows)}"


@pytest.mark.not_fast
def test_right_solutions_are_hardly_ever_called_wrong(grpo_lab_data: Path) -> None:
    """GSM8K's reference solutions: at most 2 in 1,000 judged lines (some of them do hold a slip, as in "$32 - $20 =
    $300")."""
    rows = [json.loads(line)["answer"] for line in (grpo_lab_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    scores = [score for row in rows for score in EquationSteps().score_texts("", row.split("\n")) if score is not None]
    assert len(scores) > 4000
    assert scores.count(0.0) <= 0.002 * len(scores), f"{scores.count(0.0)} of {len(scores)}"
