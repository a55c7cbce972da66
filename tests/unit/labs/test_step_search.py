"""Search over steps: what it generates, counts and answers, by a scripted policy and by a real tiny model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.engines.generators import Completion, render_prompt
from grpo_lab.rewards.token_classification import TokenClassificationSteps
from grpo_lab.stages.sample import LoadedGenerator, load_generator
from grpo_lab.stages.step_search import (
    FoundSolution,
    Judging,
    Question,
    StepJudge,
    StepWriter,
    Voting,
    beam_search,
    best,
    line_ends,
    sampled,
    steps_in,
    tree_search,
    voted,
    within,
)
from grpo_lab.stages.tree_search import nodes_below
from grpo_lab.testing import tiny_model

LINES = {0: [" 1\n", " 2\n", " 3\n"], 1: [" 4\n", " 5\n"], 2: ["#### 6", "#### 7"]}
"""Depth → the steps that the scripted policy writes, each equally often."""


@dataclass(frozen=True)
class Scripted:
    """A generator that writes `LINES`, one after the other, and counts the tokens of each prompt."""

    tokenizer: Any
    made: Counter[int] = field(default_factory=Counter)
    more_stops: Sequence[int] = ()

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        rng = random.Random(seed)
        return [[self._one(ids, temperature, rng) for _ in range(n)] for ids in prompts]

    def _one(self, ids: list[int], temperature: float, rng: random.Random) -> Completion:
        depth = self.tokenizer.decode(ids).count("\n")
        steps = list(range(depth, 3))
        if self.more_stops:
            steps = [depth]
        texts = [LINES[step][0] if temperature == 0 else rng.choice(LINES[step]) for step in steps]
        written = [token for text in texts for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        if steps[-1] == 2:
            written.append(self.tokenizer.eos_token_id)
        self.made[ids[0]] += len(written)
        return Completion(written, True)


def answer(text: str) -> str | None:
    return text.partition("####")[2].strip() or None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_model(hidden_size=16, num_heads=2)[1]


@pytest.fixture
def scripted(tokenizer: Any) -> Scripted:
    return Scripted(tokenizer)


def writer_of(generate: Any, tokenizer: Any) -> StepWriter:
    return StepWriter(LoadedGenerator(generate, tokenizer, None, [tokenizer.eos_token_id]), 40, 12, seed=3)


def questions_of(tokenizer: Any) -> list[Question]:
    """Two problems, told apart by the first token of their prompts."""
    return [Question(text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("9", "8")]


def liking(wanted: Sequence[str]) -> Any:
    """A judge: the share of the steps that are those wanted at their place, over the three that a solution has."""

    def judge(questions: Sequence[Question], texts: Sequence[str]) -> list[float]:
        return [sum(a == b for a, b in zip(steps_in(text), wanted, strict=False)) / 3 for text in texts]

    return judge


def test_tree_search_counts_its_tokens_and_finds_what_the_judge_likes(scripted: Scripted, tokenizer: Any) -> None:
    judge = liking(["3", "5", "#### 7"])
    writer = writer_of(scripted, tokenizer)
    trees = tree_search(writer, questions_of(tokenizer), Judging(writer, judge), width=6, tokens=400)
    for tree in trees:
        assert tree.spent == scripted.made[tree.question.ids[0]]
        assert tree.spent >= 400 or tree.rounds == 300
        assert [one.tokens for one in tree.found] == sorted(one.tokens for one in tree.found)
        assert steps_in(best(tree.found)) == ["3", "5", "#### 7"]
        for one in tree.found:
            assert one.value == judge([tree.question], [one.text])[0]
            assert [len(steps_in(one.text)), one.text.count("####")] == [3, 1]
        for node in nodes_below(tree.root):
            assert node.visits == sum(child.visits for child in node.children) + (
                node.visits if node.ended else bool(node.visits)
            )
    other = writer_of(scripted, tokenizer)
    again = tree_search(other, questions_of(tokenizer), Judging(other, judge), width=6, tokens=400)
    assert [tree.found for tree in again] == [tree.found for tree in trees]


def test_a_tree_that_visits_only_ends_stops(scripted: Scripted, tokenizer: Any) -> None:
    writer = writer_of(scripted, tokenizer)
    values = Judging(writer, liking([" "]))
    [tree] = tree_search(writer, questions_of(tokenizer)[:1], values, width=1, tokens=10**6, most_simulations=20)
    assert tree.rounds == 20


def test_votes_are_values_without_a_judge(scripted: Scripted, tokenizer: Any) -> None:
    writer = writer_of(scripted, tokenizer)
    for tree in tree_search(writer, questions_of(tokenizer), Voting(writer, answer), width=4, tokens=300):
        assert tree.spent == scripted.made[tree.question.ids[0]]
        counted = Counter(answer(one.text) for one in tree.found)
        assert counted == tree.votes
        share = {key: count / len(tree.found) for key, count in counted.items()}
        assert tree.root.total == pytest.approx(sum(share[key] for _, key in tree.visited))
        assert counted[answer(voted(tree.found, answer))] == max(counted.values())


def test_beams_keep_the_best_states(scripted: Scripted, tokenizer: Any) -> None:
    writer = writer_of(scripted, tokenizer)
    judge = liking(["2", "4", "#### 6"])
    for question, found in zip(
        questions_of(tokenizer), beam_search(writer, questions_of(tokenizer), judge, beam=2, width=8), strict=True
    ):
        assert found[-1].tokens == scripted.made[question.ids[0]]
        assert steps_in(best(found)) == ["2", "4", "#### 6"]
        assert len(found) <= 1 + 2 * 8


def test_answers_within_a_budget() -> None:
    found = [
        FoundSolution("a #### 1", 10, 0.2),
        FoundSolution("b #### 2", 20, 0.1),
        FoundSolution("c #### 2", 30, 0.9),
        FoundSolution("d", 40, 0.9),
    ]
    assert within(found, 5) == found[:1]
    assert within(found, 30) == found[:3]
    assert best(found) == "c #### 2"
    assert voted(found, answer) == "b #### 2"
    assert voted(found[:2], answer) == "a #### 1"
    assert voted(found[3:], answer) == "d"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> LoadedGenerator:
    from grpo_lab.recipe.sections import SamplingSettings

    model, words = tiny_model(hidden_size=32, num_heads=2, max_positions=128, initializer_range=0.3)
    folder: Path = tmp_path_factory.mktemp("search") / "policy"
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return load_generator(str(folder), SamplingSettings(batch_size=64), use_cpu=True, seed=0)


def test_a_real_model_writes_steps_and_a_token_classifier_judges_them(real: LoadedGenerator) -> None:
    from transformers import AutoModelForTokenClassification, Qwen2Config

    words = real.tokenizer
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, num_labels=2, initializer_range=0.5,
    )  # fmt: skip
    classifier = AutoModelForTokenClassification.from_config(config)
    scores = TokenClassificationSteps(classifier, words, device="cpu")
    prompts = [[{"role": "user", "content": text}] for text in ("1 + 2", "3 + 4 + 5")]
    questions = [Question(prompt, render_prompt(prompt, words).ids) for prompt in prompts]
    writer = StepWriter(real, 30, 10, seed=1)
    newline = set(line_ends(words))
    assert newline
    for group in writer.steps(questions, [[], []], 8):
        for step, ended in group:
            assert len(step) <= 10
            assert not newline & {*step[:-1]}
            assert ended or step[-1] in newline
    last = StepJudge(scores)
    least = StepJudge(scores, "least")
    text = "1\n2\n\n3\n"
    each = scores.score_texts(prompts[0], ["1", "2", "3"])
    assert last(questions[:1], [text]) == pytest.approx([each[2]])
    assert least(questions[:1], [text]) == pytest.approx([min(one for one in each if one is not None)])
    assert last(questions, ["", "\n"]) == [0.0, 0.0]
    for found in sampled(writer, questions, 3, last):
        assert len(found) == 4
    for tree in tree_search(writer, questions, Judging(writer, last), width=3, tokens=120):
        assert tree.spent >= 120 or tree.rounds == 300
        assert all(len(node.tokens()) <= 30 for node in nodes_below(tree.root))
