"""Prompt templates: the published wording, one slot for the question, clear refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.data import TEMPLATES, ChatTemplate, TextTemplate, apply_template, find_template


def test_the_published_wording() -> None:
    prompt = apply_template("How many?", "r1")
    assert isinstance(prompt, str)
    assert prompt.startswith("A conversation between User and Assistant. The user asks a question")
    # the model opens <think> itself, so that the format reward can see it
    end = "<think> reasoning process here </think> <answer> answer here </answer>. User: How many? Assistant:"
    assert prompt.endswith(end)
    assert apply_template("How many?", "qwen_math") == (
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert apply_template("How many?", "none") == "How many?"


def test_chat_is_a_message_list_with_an_optional_system_turn() -> None:
    user = {"role": "user", "content": "How many?"}
    assert apply_template("How many?", "chat") == [user]
    assert apply_template("How many?", "chat", system_prompt="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        user,
    ]


@given(question=st.text())
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_question_is_put_in_as_it_is(name: str, question: str) -> None:
    """Braces, percent signs and backslashes in a question are text, not slots."""
    prompt = apply_template(question, name)
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    assert question in text


def test_a_template_of_ones_own_passes_through() -> None:
    mine = TextTemplate("mine", before="Q: ", after="\nA:")
    assert find_template(mine) is mine
    assert apply_template("2+2?", mine) == "Q: 2+2?\nA:"
    assert find_template("chat", "S") == ChatTemplate("chat", "S")


def test_what_is_refused() -> None:
    allowed = r"`template` is 'r2'\. Allowed: \['r1', 'qwen_math', 'none', 'chat', 'oat_r1'"
    with pytest.raises(ValueError, match=allowed):
        apply_template("How many?", "r2")
    with pytest.raises(ValueError, match=r"system_prompt has no effect with template 'r1'"):
        apply_template("How many?", "r1", system_prompt="Be brief.")


def test_message_templates_take_a_system_prompt_and_keep_their_instruction() -> None:
    prompt = apply_template("2+2?", "verl_gsm8k", system_prompt="S")
    assert prompt == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": '2+2? Let\'s think step by step and output the final answer after "####".'},
    ]
    assert isinstance(apply_template("2+2?", "verl_gsm8k"), list)
