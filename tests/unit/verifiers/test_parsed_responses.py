"""Completions whose reasoning TRL's response parsing has taken out of the text, judged as the text would be."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_lab.rewards import ThinkFormatReward
from grpo_lab.rewards.arithmetic import worked_out
from grpo_lab.rewards.completion import ModeFollowingReward, whole_text
from grpo_lab.rewards.language import LanguageConsistencyReward
from grpo_lab.rewards.steps import SplitStepReward
from grpo_lab.trainer.scoring.reward_table import check_steps


class Letters:
    """A tokenizer with a token for each character."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def parsed(reasoning: str | None, content: str) -> list[dict[str, str]]:
    message = {"role": "assistant", "content": content}
    return [message if reasoning is None else {**message, "reasoning_content": reasoning}]


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
@pytest.mark.parametrize(
    ("form", "reasoning", "content", "reward"),
    [
        ("think", "a", "b", 1.0),
        ("think_answer", "a", "<answer>b</answer>", 1.0),
        ("modes", "a", "b", 1.0),
        ("think", "a", "", 0.0),
        ("think", " ", "b", 0.0),
        ("think", "a<think>", "b", 0.0),
        ("think", "a", "b</think>c", 0.0),
        ("think_answer", "a", "b", 0.0),
        ("think", None, "b", 0.0),
    ],
)
def test_the_layout_of_a_parsed_response(
    key: str, form: Any, reasoning: str | None, content: str, reward: float
) -> None:
    message = {"role": "assistant", "content": content} | ({} if reasoning is None else {key: reasoning})
    for opened in ("completion", "prompt"):
        assert ThinkFormatReward(form, think_opened=opened)(completions=[[message]]) == [reward]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "completion", "modes"),
    [
        ("<think>\n\n</think>\n\n5", parsed(None, "5"), 1.0),  # TRL leaves no sign of an empty block,
        ("5", parsed(None, "5"), 0.0),
        ("<think>a</think><think>b</think>5", parsed("b", "5"), 0.0),  # nor of the first of two
        ("<think>a</think>5", parsed("a", "5"), 1.0),
        ("so <think>a</think>5", parsed("a", "5"), 0.0),
    ],
)
def test_with_tokens_the_layout_is_what_was_written(written: str, completion: Any, modes: float) -> None:
    reward = ThinkFormatReward("modes")
    said = repr(reward)
    check_steps([reward], None, False, Letters())
    assert repr(reward) == said
    assert reward(completions=[completion], completion_ids=[[ord(letter) for letter in written]]) == [modes]


def test_what_reads_the_reasoning_reads_it_where_it_is() -> None:
    completion = parsed("We add 2 + 3 = 5 apples and then we stop", "5")
    assert worked_out([completion]) == [1.0]
    assert worked_out([parsed("we guess", "5")]) == [0.0]
    assert LanguageConsistencyReward("en")(completions=[completion]) == [1.0]
    assert ModeFollowingReward()(["q /think"], [completion]) == [1.0]
    assert whole_text(completion) == "<think>We add 2 + 3 = 5 apples and then we stop</think>5"


class EveryLine(SplitStepReward):
    def score_texts(self, prompt: Any, steps: list[str]) -> list[float]:
        return [float(len(step.strip())) for step in steps]


def test_steps_end_at_the_tokens_that_were_written() -> None:
    written = "<think>a\nbb</think>\n\n5"
    ids = [[ord(letter) for letter in written]]
    reward = EveryLine(tokenizer=Letters())
    as_text = reward(["q"], [written], completion_ids=ids)
    assert reward(["q"], [parsed("a\nbb", "5")], completion_ids=ids) == as_text
    assert [end for end, _ in as_text[0]] == [7, 18, 21]
