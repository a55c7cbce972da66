"""What every reward must do in stock TRL, whatever the model wrote. A new reward costs one row in ``ROWS``."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_lab import rewards
from grpo_lab.rewards import (
    AccuracyReward,
    BoxedReward,
    CodeReward,
    CountdownReward,
    FlippedReward,
    GroupReward,
    HashesReward,
    KimiLengthReward,
    LanguageConsistencyReward,
    ModeFollowingReward,
    ProofReward,
    SortingReward,
    ThinkFormatReward,
    WrongLabelReward,
)

LIMIT_S = 600.0
"""For all hostile texts together, on a machine that is busy with something else. Each comparison of answers has a limit
of its own."""


@dataclass(frozen=True)
class Row:
    """One reward as a run would use it.

    Args:
        make: builds it.
        good, bad: a text with a higher value than the other (``solution`` is 18; texts are in English).
    """

    make: Callable[[], Any]
    good: str = "<think>Nine times two is eighteen.</think>\n<answer>18</answer>"
    bad: str = "谁知道呢，我也不知道"


ROWS: dict[str, Row] = {
    "accuracy strict": Row(lambda: AccuracyReward(timeout_s=0.5, workers=1)),
    "accuracy lenient": Row(lambda: AccuracyReward(mode="lenient", timeout_s=0.5, workers=1)),
    "boxed": Row(lambda: BoxedReward(unreadable=-1.0, timeout_s=0.5, workers=1), good=r"So it is \boxed{18}."),
    "hashes": Row(HashesReward, good="Nine times two is 18.\n#### 18"),
    "sorting": Row(SortingReward, good="1 8"),
    "countdown": Row(CountdownReward, good="<answer>8 + 1</answer>"),
    "proof": Row(ProofReward, good="1. p & q [premise]\n2. p [&e 1]"),
    "code": Row(lambda: CodeReward(timeout_s=2.0, workers=2), good="```python\ndef f(x):\n    return 2 * x\n```"),
    "think_answer": Row(ThinkFormatReward),
    "think": Row(lambda: ThinkFormatReward(form="think"), good="<think>Nine twos.</think> 18"),
    "modes": Row(lambda: ThinkFormatReward(form="modes"), good="<think>\n\n</think>\n\n18"),
    "mode following": Row(ModeFollowingReward),
    "flipped": Row(lambda: FlippedReward(HashesReward(), false_negatives=1e-9), good="Nine times two is 18.\n#### 18"),
    "wrong label": Row(lambda: WrongLabelReward(HashesReward(), share=0.0), good="Nine times two is 18.\n#### 18"),
    "language": Row(LanguageConsistencyReward),
    "kimi length": Row(lambda: KimiLengthReward(correctness=ThinkFormatReward()), bad="I do not know. " * 20),
}

HOSTILE: dict[str, str] = {
    "empty": "",
    "white space": " \n\t\r\u00a0\u200b",
    "100 kB of one letter": "a" * 100_000,
    "100 kB of words": "the answer is " * 7_200,
    "100 kB of digits": "#### " + "9" * 100_000,
    "a power tower": "<answer>" + "9^" * 200 + "9</answer>",
    "a factorial": r"\boxed{99999999999!}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 2_000 + "2" + "}" * 2_001,
    "nested roots that never close": r"\boxed{" + r"\sqrt{" * 5_000,
    "boxes all the way": r"\boxed{" * 10_000,
    "open tags": "<think>" * 10_000,
    "closing tags": "</think></answer>" * 5_000,
    "half a tag": "<think>ok</think><answ",
    "half a tag at the front": "hink>ok</think><answer>18</answer>",
    "tags in tags": "<answer><answer>18</answer></answer>",
    "an evil integral": r"\boxed{\int_0^\infty e^{-x^{x^{x}}} \, dx}",
    "Arabic": "الجواب هو ١٨",
    "Chinese": "所以答案是十八。",
    "Hindi, Hebrew, Thai": "उत्तर १८ תשובה คำตอบ",
    "emoji and joiners": "👩‍👩‍👧‍👦🇩🇪1️⃣8️⃣" * 500,
    "combining marks": "Z" + "\u0301" * 20_000,
    "control characters": "\x00\x01\x1b[31m18\x7f\ufeff\u202e81",
    "a lone surrogate": "18 \ud800 18",
    "code": "__import__('os').system('true')",
    "format braces": "{0} {solution} %s %d ${HOME} `id`",
}


@pytest.fixture(scope="module", params=list(ROWS))
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture(scope="module")
def reward(row: Row) -> Iterator[Any]:
    made = row.make()
    yield made
    if hasattr(made, "close"):
        made.close()


def call(reward: Any, texts: list[Any], **columns: Any) -> list[float | None]:
    """As TRL calls it: rows of one prompt, every column, keyword arguments only."""
    lengths = [len(t) if isinstance(t, str) else len(t[-1]["content"]) for t in texts]
    given = {
        "prompts": ["What is 9 times 2?"] * len(texts),
        "completions": texts,
        "completion_ids": [list(range(min(length, 500))) for length in lengths],
        "solution": ["18"] * len(texts),
        "numbers": [[8, 1]] * len(texts),
        "target": [9] * len(texts),
        "sequent": ["p & q |- p"] * len(texts),
        "tests": ["assert f(9) == 18"] * len(texts),
    }
    return list(reward(**{**given, **columns}))


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_every_public_reward_has_a_row() -> None:
    not_here = {
        "GroupReward",
        "StepReward",
        "SplitStepReward",
        "CoinReward",
        "PreferenceReward",
    }  # bases, the control that knows no good from bad, and one that needs a model (training/test_preference_reward.py)
    public = {name for name in rewards.__all__ if name.endswith("Reward")} - not_here
    assert {type(row.make()).__name__ for row in ROWS.values()} == public


def test_has_a_name_that_trl_can_log(reward: Any) -> None:
    assert isinstance(reward.__name__, str)
    assert reward.__name__.isidentifier()


@pytest.mark.not_fast(cases=["code", "language"])
def test_pickles_before_and_after_use(row: Row, reward: Any) -> None:
    texts = [row.good, row.bad]
    for original in (row.make(), reward):
        values = call(original, texts)
        again = pickle.loads(pickle.dumps(original))
        assert again.__name__ == original.__name__
        assert call(again, texts) == values
        for made in (again, original):
            if hasattr(made, "close") and made is not reward:
                made.close()


def test_tells_good_from_bad(row: Row, reward: Any) -> None:
    """In plain numbers, not tensors or numpy scalars: TRL makes a tensor of the list."""
    good, bad = call(reward, [row.good, row.bad])
    assert type(good) in (float, int)
    assert type(bad) in (float, int)
    assert good > bad


@pytest.mark.not_fast(cases="code")
def test_plain_strings_and_message_lists_give_the_same(row: Row, reward: Any) -> None:
    texts = [row.good, row.bad, "", "18"]
    prompts = [[{"role": "user", "content": "What is 9 times 2?"}]] * 4
    assert call(reward, texts) == call(reward, messages(texts)) == call(reward, messages(texts), prompts=prompts)


@pytest.mark.not_fast(cases=["accuracy lenient", "code"])
def test_one_value_for_each_completion(row: Row, reward: Any) -> None:
    for count in (2, 3, 8):
        assert len(call(reward, [row.good, row.bad, row.good, "", "1", "2", "x", "y"][:count])) == count


def test_no_rows(reward: Any) -> None:
    if isinstance(reward, GroupReward):
        pytest.skip("a group has at least one completion")
    assert call(reward, []) == []


def test_accepts_columns_it_does_not_know(row: Row, reward: Any) -> None:
    texts = [row.good, row.bad]
    extra = {"difficulty": [1, 2], "source": ["a", "b"], "trainer_state": None, "log_extra": None, "environments": None}
    assert call(reward, texts, **extra) == call(reward, texts)


@pytest.mark.not_fast(cases="code")
def test_deterministic(row: Row, reward: Any) -> None:
    texts = [row.good, row.bad, *list(HOSTILE.values())[-8:]]
    assert call(reward, texts) == call(reward, texts)


def test_neighbours_do_not_matter_unless_it_is_a_group_reward(row: Row, reward: Any) -> None:
    if isinstance(reward, GroupReward):
        pytest.skip("neighbours are the point of it")
    assert call(reward, [row.bad, row.good]) == [call(reward, [text])[0] for text in (row.bad, row.good)]


@pytest.mark.thorough(cases=["accuracy *", "boxed"])
@pytest.mark.slow
def test_hostile_texts_give_finite_values_in_time(reward: Any) -> None:
    """``tests/stress/test_hostile_text.py`` has those that take long."""
    start = time.monotonic()
    values = call(reward, list(HOSTILE.values()))
    assert time.monotonic() - start < LIMIT_S
    assert len(values) == len(HOSTILE)
    for name, value in zip(HOSTILE, values):
        assert value is None or (isinstance(value, float | int) and math.isfinite(value)), f"{name}: {value!r}"


@pytest.mark.parametrize("name", list(HOSTILE))
def test_no_hostile_text_is_praised_as_a_right_answer_in_the_right_form(name: str) -> None:
    assert call(ThinkFormatReward(), [HOSTILE[name]]) == [0.0]
