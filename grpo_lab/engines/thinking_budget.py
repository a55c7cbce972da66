"""A budget of thinking tokens: cut what exceeds it, insert the stop text, let the model answer. Works with any engine.

Source: Qwen3 Technical Report (arXiv:2505.09388), section 4.3 "Thinking Mode Fusion" / thinking budget. There thinking
is halted at inference only; here also while sampling for training, so the inserted tokens must carry no loss: they are
not the policy's. The default text is the one in Qwen's documentation; the report's differs slightly.

A batch is completed in two phases, by an engine's `generate(prompt_ids, max_new_tokens)`:

    1. every prompt, at most `budget` tokens.
    2. every completion that is not finished goes on from prompt + completion. One that has no `</think>` yet gets the
       stop text first. What is left of `max_completion_length` is the limit.

A completion then is  y_1 … y_budget | stop text | y' …  (cut)  or  y_1 … y_n  (closed its thinking in time, or ended).
A prompt that ends in a closed thinking block (Qwen3's `/no_think`) does not think, and is never cut.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab.engines.generators import Completion, CompletionGenerator, GenerationStopped

START_TEXT = "<think>"
END_TEXT = "</think>"
QWEN3_STOP_TEXT = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)

Continue = Callable[[list[list[int]], int], list[Completion]]
"""Function ``(prompts, most new tokens)`` that returns one completion per prompt, in the order of the prompts."""


@dataclass(frozen=True)
class ThinkingBudget:
    """Settings of a budget, in tokens, for one tokenizer.

    budget                   thinking tokens allowed; 0 = answer at once
    stop_ids                 the stop text as token ids; must close the thinking
    max_completion_length    all tokens of a completion, the inserted ones included
    eos_ids                  tokens that end a completion
    decode                   ids -> text with special tokens kept, to find `</think>` however the tokenizer cuts it
    """

    budget: int
    stop_ids: tuple[int, ...]
    max_completion_length: int
    eos_ids: Collection[int]
    decode: Callable[[list[int]], str]

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"thinking_budget must be 0 or more tokens, or null for no budget; got {self.budget}")
        if END_TEXT not in self.decode(list(self.stop_ids)):
            raise ValueError(
                f"budget_text must contain {END_TEXT!r}: after it the model is to answer; "
                f"as tokens it reads {self.decode(list(self.stop_ids))!r}"
            )
        if set(self.stop_ids) & set(self.eos_ids):
            raise ValueError("budget_text contains an end-of-text token: nothing would follow it")
        if self.answer_room < 1:
            raise ValueError(
                f"thinking_budget {self.budget} + {len(self.stop_ids)} tokens of budget_text leave no room for an "
                f"answer in max_completion_length {self.max_completion_length}; raise it or lower the budget"
            )

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Any, budget: int, *, max_completion_length: int, eos_ids: Collection[int] = (), text: Any = None
    ) -> ThinkingBudget:
        """Make a budget for a Hugging Face tokenizer. Defaults: its own end-of-text token, and Qwen's documented stop
        text."""
        stop_ids = tuple(tokenizer(QWEN3_STOP_TEXT if text is None else text, add_special_tokens=False)["input_ids"])
        return cls(budget, stop_ids, max_completion_length, {*eos_ids} or {tokenizer.eos_token_id}, tokenizer.decode)

    @property
    def answer_room(self) -> int:
        """Return how many tokens are left for the answer after a cut."""
        return self.max_completion_length - self.budget - len(self.stop_ids)

    def is_finished(self, ids: Sequence[int]) -> bool:
        """Return whether ``ids``, the tokens of the first phase, ended by themselves within the budget."""
        return len(ids) < self.budget or (len(ids) > 0 and ids[-1] in self.eos_ids)

    def thinks(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether completions of this prompt begin with thinking; False if it ends in a closed thinking
        block."""
        tail = list(prompt_ids[-8 - len(self.stop_ids) :])
        return not self.decode(tail).rstrip().endswith(END_TEXT)

    def must_cut(self, prompt_ids: Sequence[int], head: Sequence[int]) -> bool:
        """Return whether the first phase's tokens ``head`` use up the budget without ending or closing the thinking."""
        closed = END_TEXT in self.decode(list(head))
        return self.thinks(prompt_ids) and not self.is_finished(head) and not closed


@dataclass(frozen=True)
class BudgetedGenerator:
    """A ``CompletionGenerator`` that keeps completions within a thinking budget.

    Attributes:
        generator: makes the tokens of both phases.
        settings: the budget. A call's ``max_new_tokens`` replaces its ``max_completion_length``.
        in_step: see ``budgeted_generate``.
    """

    generator: CompletionGenerator
    settings: ThinkingBudget
    in_step: bool = False

    def __call__(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, max_new_tokens: int, seed: int | None
    ) -> list[list[Completion]]:
        calls = itertools.count()
        settings = replace(self.settings, max_completion_length=max_new_tokens)

        def generate(ids: list[list[int]], room: int) -> list[Completion]:
            if seed is None:  # no call draws what another has drawn
                own = None
            else:
                own = seed + 1_000_003 * next(calls)
            groups = self.generator(ids, n=1, temperature=temperature, max_new_tokens=room, seed=own)
            return [completion for (completion,) in groups]

        asked = [ids for ids in prompts for _ in range(n)]
        try:
            made = budgeted_generate(asked, generate, settings, in_step=self.in_step)
        except GenerationStopped:
            raise GenerationStopped([[None] * n for _ in prompts]) from None  # no completion of this call is whole
        return [made[start : start + n] for start in range(0, len(made), n)]


def tokens_of_thinking(prompt: str, completion: Completion, decode: Callable[[list[int]], str]) -> int | None:
    """Count the tokens that the model wrote before its thinking was closed, by itself or by a budget; all of them if it
    was never closed. None if it did not think: the prompt ends in a closed thinking block, or there is no tag.

    Args:
        prompt: text of the prompt.
        completion: the completion.
        decode: ids → text with special tokens kept.
    """
    if completion.mask is not None and completion.was_cut:
        return completion.mask.index(0)
    ids = completion.ids
    text = decode(completion.ids)
    opened = START_TEXT in prompt.rpartition(END_TEXT)[2] + text
    if prompt.rstrip().endswith(END_TEXT) or not (opened or END_TEXT in text):
        return None
    thinking, tag, _ = text.partition(END_TEXT)
    closed = bisect.bisect_left(range(len(ids)), True, key=lambda end: END_TEXT in decode(ids[: end + 1]))
    while tag and len(decode(ids[:closed])) > len(thinking):  # the tag may be several tokens
        closed -= 1
    return closed


def budgeted_generate(
    prompt_ids: Sequence[Sequence[int]], generate: Continue, settings: ThinkingBudget, *, in_step: bool = False
) -> list[Completion]:
    """Complete every prompt within the budget: one call of `generate` for the first phase, at most two for the second.

    Equal neighbouring prompts stay neighbours, so that an engine can fold them.

    Args:
        prompt_ids: tokens of each prompt.
        generate: makes one completion per prompt; it may be shorter than asked for if an end-of-text token ends it.
        settings: the budget.
        in_step: whether all three calls are made, even for no rows (all but the first call at budget 0). Ranks that
            generate together need this: they must make the same calls, and differ in which rows go on.

    Returns:
        One completion per prompt, with a ``mask`` that is 0 for the inserted text.
    """
    prompts = [list(ids) for ids in prompt_ids]
    nothing = Completion([], ended=False, logprobs=[])
    first = [nothing] * len(prompts)
    if settings.budget > 0 and (prompts or in_step):
        first = _checked(generate(prompts, settings.budget), settings.budget)
    stop = list(settings.stop_ids)
    inserted = [stop if settings.must_cut(p, one.ids) else [] for p, one in zip(prompts, first, strict=True)]
    kept = [one.ids + text for one, text in zip(first, inserted, strict=True)]
    going_on = [row for row, one in enumerate(first) if not settings.is_finished(one.ids)]
    tails = dict.fromkeys(range(len(prompts)), nothing)
    for room in (settings.answer_room, settings.answer_room + len(stop)):  # rows that were cut, and the others
        rows = [row for row in going_on if settings.max_completion_length - len(kept[row]) == room]
        if rows or in_step:
            found = generate([prompts[row] + kept[row] for row in rows], room)
            tails.update(zip(rows, _checked(found, room), strict=True))
    return [
        _joined(one, text, tails[row], settings) for row, (one, text) in enumerate(zip(first, inserted, strict=True))
    ]


def _joined(head: Completion, inserted: list[int], tail: Completion, settings: ThinkingBudget) -> Completion:
    """Return the completion made of the first phase's tokens, the inserted text and the second phase's tokens."""
    ids = head.ids + inserted + tail.ids
    logprobs = None
    if head.logprobs is not None and tail.logprobs is not None:
        logprobs = head.logprobs + [math.nan] * len(inserted) + tail.logprobs
    mask = [1] * len(head.ids) + [0] * len(inserted) + [1] * len(tail.ids)
    return Completion(ids, mask[-1:] == [1] and ids[-1] in settings.eos_ids, logprobs, mask=mask)


def _checked(found: list[Completion], limit: int) -> list[Completion]:
    """Return ``found``. Raises ValueError if a completion has more than ``limit`` tokens, or too few log-probs."""
    for row, one in enumerate(found):
        if len(one.ids) > limit:
            raise ValueError(f"completion {row} has {len(one.ids)} tokens; the engine was asked for {limit}")
        if one.logprobs is not None and len(one.logprobs) != len(one.ids):
            raise ValueError(f"completion {row}: {len(one.ids)} tokens, {len(one.logprobs)} log-probs")
    return found
