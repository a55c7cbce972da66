"""The thinking budget, with a scripted generator: every token is a letter, so what happens can be read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.engines.generators import Completion
from grpo_lab.engines.thinking_budget import QWEN3_STOP_TEXT, ThinkingBudget, budgeted_generate, tokens_of_thinking
from rollouts.thinking_oracle import inserted_mask

EOS = "$"
STOP = "!</think>"


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


def settings(budget: int, length: int = 40, stop: str = STOP) -> ThinkingBudget:
    return ThinkingBudget(budget, tuple(encode(stop)), length, {ord(EOS)}, decode)


class Scripted:
    """A policy that writes `thought` until the context holds </think>, then `answer`; log-prob -k for the k-th
    token."""

    def __init__(self, thoughts: dict[str, str], answer: str = "42$") -> None:
        self.thoughts, self.answer = thoughts, answer
        self.calls: list[tuple[int, int]] = []

    def __call__(self, prompts: list[list[int]], limit: int) -> list[Completion]:
        self.calls.append((len(prompts), limit))
        ids = [encode(self.after(decode(prompt))[:limit]) for prompt in prompts]
        return [Completion(row, row[-1:] == encode(EOS), [-float(k + 1) for k in range(len(row))]) for row in ids]

    def after(self, context: str) -> str:
        prompt, _, written = context.partition(":")
        whole = self.thoughts[prompt]
        if whole.startswith(written):
            return whole[len(written) :]
        return self.answer[len(written.partition("</think>")[2]) :]


def run(thought: str, budget: int, length: int = 40, answer: str = "42$") -> tuple[Completion, Scripted]:
    policy = Scripted({"q": thought}, answer)
    return budgeted_generate([encode("q:")], policy, settings(budget, length))[0], policy


def test_cut_completion_reads_thought_stop_text_answer() -> None:
    done, _ = run("abcdefgh" * 10, budget=8)
    assert decode(done.ids) == "abcdefgh" + STOP + "42$"
    assert done.mask == [1] * 8 + [0] * len(STOP) + [1] * 3
    assert done.was_cut
    # Sampled positions carry the sampler's value; inserted ones carry none.
    assert done.logprobs is not None
    assert done.logprobs[:8] == [-1, -2, -3, -4, -5, -6, -7, -8]
    assert all(math.isnan(value) for value in done.logprobs[8 : 8 + len(STOP)])
    assert done.logprobs[-3:] == [-1, -2, -3]


def test_budget_zero_answers_at_once_without_a_first_phase() -> None:
    done, policy = run("abc" * 20, budget=0)
    assert decode(done.ids) == STOP + "42$"
    assert policy.calls == [(1, 40 - len(STOP))]


def test_thinking_closed_in_time_is_left_alone() -> None:
    done, _ = run("ab</think>7$", budget=32, length=60)
    assert decode(done.ids) == "ab</think>7$"
    assert done.mask == [1] * len(done.ids)
    assert not done.was_cut


def test_answer_in_progress_at_the_budget_goes_on_without_insertion() -> None:
    # "a</think>" has 9 letters: closed before the budget of 10, the answer still running.
    done, policy = run("a</think>12345$", budget=10)
    assert decode(done.ids) == "a</think>12345$"
    assert done.mask == [1] * 15
    assert policy.calls == [(1, 10), (1, 30)]


def test_closing_tag_cut_in_two_by_the_budget_counts_as_open() -> None:
    done, _ = run("abc</think>7$", budget=6)
    assert decode(done.ids) == "abc</t" + STOP + "42$"


def test_completion_that_ends_exactly_at_the_budget_is_finished() -> None:
    done, policy = run("abcdefg$", budget=8)
    assert decode(done.ids) == "abcdefg$"
    assert len(policy.calls) == 1


def test_completion_length_is_the_limit_of_the_answer() -> None:
    done, _ = run("a" * 100, budget=8, length=8 + len(STOP) + 2)
    assert decode(done.ids) == "a" * 8 + STOP + "42"  # the $ does not fit


def test_prompt_with_closed_thinking_is_never_cut() -> None:
    def policy(prompts: list[list[int]], limit: int) -> list[Completion]:
        rest = ["answer answer$"[len(decode(p).split("\n\n")[-1]) :][:limit] for p in prompts]
        return [Completion(encode(text), text.endswith(EOS)) for text in rest]

    prompt = encode("q <think>\n\n</think>\n\n")
    done = budgeted_generate([prompt], policy, settings(4))[0]
    assert decode(done.ids) == "answer answer$"
    assert done.mask == [1] * 14
    assert done.logprobs is None
    assert inserted_mask(prompt, done.ids, settings(4)) == done.mask


def test_mixed_batch_keeps_its_order() -> None:
    policy = Scripted({"long": "x" * 50, "short": "y$", "closed": "z</think>" + "9" * 12 + "$", "long2": "w" * 50})
    prompts = [encode(f"{name}:") for name in policy.thoughts]
    done = budgeted_generate(prompts, policy, settings(12))
    assert [decode(c.ids) for c in done] == [
        "x" * 12 + STOP + "42$",
        "y$",
        "z</think>" + "9" * 12 + "$",
        "w" * 12 + STOP + "42$",
    ]
    assert policy.calls == [(4, 12), (2, 40 - 12 - len(STOP)), (1, 28)]


def test_empty_batch() -> None:
    assert budgeted_generate([], Scripted({}), settings(8)) == []


@given(
    budget=st.integers(0, 20),
    length=st.integers(0, 30),
    thoughts=st.lists(st.text(alphabet="ab<>/think$", max_size=60), min_size=1, max_size=6),
    answer=st.text(alphabet="01$", max_size=40),
)
def test_mask_can_be_read_off_the_ids(budget: int, length: int, thoughts: list[str], answer: str) -> None:
    """For any policy: lengths agree, the limit holds, NaN stands exactly where the mask is 0, and the mask is
    recovered."""
    limits = settings(budget, budget + len(STOP) + 1 + length)
    # What follows an end-of-text token is never generated.
    script = {str(i): text.partition(EOS)[0] + EOS for i, text in enumerate(thoughts)}
    policy = Scripted(script, answer.partition(EOS)[0] + EOS)
    prompts = [encode(f"{i}:") for i in range(len(thoughts))]
    for prompt, done in zip(prompts, budgeted_generate(prompts, policy, limits), strict=True):
        assert done.logprobs is not None
        assert len(done.ids) == len(done.mask) == len(done.logprobs) <= limits.max_completion_length
        assert [math.isnan(value) for value in done.logprobs] == [kept == 0 for kept in done.mask]
        assert inserted_mask(prompt, done.ids, limits) == done.mask
        thinking = decode(done.ids).partition("</think>")[0]
        assert len(thinking) <= budget + len(STOP) or not done.was_cut


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": -1}, "0 or more"),
        ({"stop": "stop now"}, "</think>"),
        ({"stop": "$</think>"}, "end-of-text"),
        ({"budget": 31}, "no room"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**{"budget": 8, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Completion([1] * 9, False, [0.0] * 9)], "9 tokens"),
        ([], r"zip\(\) argument"),
        ([Completion([1] * 4, True, [0.0] * 3)], "log-probs"),
    ],
)
def test_engine_that_does_not_keep_to_what_it_was_asked_is_refused(answer: list[Completion], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budgeted_generate([[1]], lambda prompts, limit: answer, settings(8))


def test_real_tokenizer_round_trip() -> None:
    from grpo_lab.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    limits = ThinkingBudget.for_tokenizer(tokenizer, 16, max_completion_length=256)
    assert tokenizer.decode(list(limits.stop_ids)) == QWEN3_STOP_TEXT
    assert limits.thinks(tokenizer("Tom has 3 apples.\n<think>\n")["input_ids"])
    assert not limits.thinks(tokenizer("<think>\n\n</think>\n\n")["input_ids"])


@pytest.mark.parametrize(
    ("prompt", "written", "tokens"),
    [
        ("q<think>", "abc</think>42$", 3),
        ("q<think>", "abc", 3),  # never closed: all of it
        ("q", "<think>ab</think>4", 9),  # the opening tag counts, as it does for the budget
        ("q", "abc</think>4", 3),
        ("q<think>", "</think>4", 0),
        ("q<think>\n\n</think>\n\n", "42$", None),
        ("q<think>\n\n</think>\n\n", "4</think>2$", None),
        ("<think>a</think> q", "42$", None),
        ("q", "42$", None),
    ],
)
def test_tokens_of_thinking_by_hand(prompt: str, written: str, tokens: int | None) -> None:
    assert tokens_of_thinking(prompt, Completion(encode(written), ended=True), decode) == tokens


def test_tokens_of_thinking_of_a_cut_one_are_the_budget() -> None:
    done, _ = run("abcdefgh" * 10, budget=8)
    assert tokens_of_thinking("q<think>", Completion(done.ids, True, mask=done.mask), decode) == 8
