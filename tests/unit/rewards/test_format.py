"""ThinkFormatReward: R1's layout, each tag once, in order, nothing around."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.rewards import ThinkFormatReward

GOOD = [
    "<think>a</think><answer>b</answer>",
    "<think>\na\n</think>\n\n<answer>\nb\n</answer>",
    "  <think>a</think> <answer>b</answer>\n",
    "<think>x < y > z, </answer or <b></think><answer>\\boxed{5}</answer>",
]
#: orders of up to five tags are all tried below
BAD = [
    "18",
    "<think>a</think>b",
    "<think></think><answer>b</answer>",
    "<think> \n</think><answer>b</answer>",
    "<think>a</think><answer> </answer>",
    "<think>a</think><answer>b</answer> so",
    "so <think>a</think><answer>b</answer>",
    "<think>a</think> so <answer>b</answer>",
    "<think>a</think><think>a</think><answer>b</answer>",
    "<think>a</think><answer>b</answer><answer>b</answer>",
    "<Think>a</Think><Answer>b</Answer>",
    "<think>" * 20_000,
]


@pytest.mark.parametrize(("completion", "reward"), [*((text, 1.0) for text in GOOD), *((text, 0.0) for text in BAD)])
def test_by_hand(completion: str, reward: float) -> None:
    assert ThinkFormatReward()(completions=[completion]) == [reward]


def test_of_all_orders_of_the_four_tags_one_is_right() -> None:
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    right = [
        order
        for count in range(6)
        for order in itertools.product(tags, repeat=count)
        if ThinkFormatReward()(completions=[" ".join(o + ("x" if o in tags[::2] else "") for o in order)]) == [1.0]
    ]
    assert right == [tags]


#: without "<": tags inside have cases of their own
WORDS = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30)


@given(WORDS, WORDS)
def test_whatever_is_inside(thinking: str, answer: str) -> None:
    expected = bool(thinking.strip()) and bool(answer.strip())
    assert ThinkFormatReward()(completions=[f"<think>{thinking}</think><answer>{answer}</answer>"]) == [float(expected)]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("\n<think>a</think>\n\nThe answer is \\boxed{5}.", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("<think></think>b", 0.0),
        ("x<think>a</think>b", 0.0),
        ("<think>a</think>b</think>c", 0.0),
        ("<think>a</think><answer>b</answer>", 0.0),  # that is the other form: one layout per run
        ("a</think>b", 0.0),
    ],
)
def test_think_only_form(completion: str, reward: float) -> None:
    assert ThinkFormatReward(form="think")(completions=[completion]) == [reward]


@pytest.mark.parametrize(
    ("opened", "prompt", "completion", "reward"),
    [
        ("prompt", None, "a</think><answer>b</answer>", 1.0),
        ("prompt", None, "<think>a</think><answer>b</answer>", 0.0),
        ("completion", "User: q\nAssistant: <think>", "a</think><answer>b</answer>", 0.0),
    ],
)
def test_who_opens_the_thinking(opened: str, prompt: object, completion: str, reward: float) -> None:
    prompts = None if prompt is None else [prompt]
    assert ThinkFormatReward(think_opened=opened)(prompts, [completion]) == [reward]  # type: ignore[arg-type]


def test_bad_settings_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="form"):
        ThinkFormatReward(form="xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="think_opened"):
        ThinkFormatReward(think_opened="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="completions"):
        ThinkFormatReward()(["q"])
    with pytest.raises(ValueError, match="int"):
        ThinkFormatReward()(completions=[5])
