"""A budget for thinking: cut it, insert the stop text, let the model answer. Independent of the engine.

Source: Qwen3 Technical Report (arXiv:2505.09388), section 4.3 "Thinking Mode Fusion" / thinking budget. There the
model's thinking is halted at inference only; here also while sampling for training, so the inserted tokens must carry no
loss: they are not the policy's. The default text is the one in Qwen's documentation; the report's differs slightly.

Two phases over a batch, `generate(prompt_ids, max_new_tokens)` being whatever engine there is:

    1. every prompt, at most `budget` tokens.
    2. every completion that is not finished goes on from prompt + completion. One that has no `</think>` yet gets the
       stop text first. What is left of `max_completion_length` is the limit.

A completion y then consists of      y_1 … y_budget | stop text | y' …      (cut)
or of                                y_1 … y_n                              (closed its thinking in time, or ended)

A prompt that ends in a closed thinking block (Qwen3's `/no_think`) does not think, and is never cut.

Since phase 1 ends at `budget`, whether and where text was inserted can be read off prompt and completion alone, given
the same settings: `inserted_mask` does so, and a trainer need not carry the mask next to the ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

QWEN3_STOP_TEXT = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)

# (prompts, most new tokens per prompt) -> (completions, their log-probs or None where the engine gives none)
Generate = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]


@dataclass(frozen=True)
class BudgetedCompletion:
    """One completion under a budget, all three lists of the same length T.

    ids         token ids, inserted ones included
    logprobs    the sampler's log-probs in nats; NaN at inserted positions (nobody sampled them); None: not recorded
    mask        1 = sampled by the policy, 0 = inserted
    """

    ids: list[int]
    logprobs: list[float] | None
    mask: list[int]

    @property
    def was_cut(self) -> bool:
        """True where the stop text was inserted."""
        return 0 in self.mask


@dataclass(frozen=True)
class ThinkingBudget:
    """Settings of a budget, in tokens, for one tokenizer.

    budget                   thinking tokens allowed; 0 = answer at once
    stop_ids                 the stop text as token ids; must close the thinking
    max_completion_length    all tokens of a completion, the inserted ones included
    eos_ids                  tokens that end a completion
    decode                   ids -> text with special tokens kept, to find `end_text` however the tokenizer cuts it
    end_text                 what closes the thinking
    """

    budget: int
    stop_ids: tuple[int, ...]
    max_completion_length: int
    eos_ids: Collection[int]
    decode: Callable[[list[int]], str]
    end_text: str = "</think>"

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise ValueError(f"thinking_budget must be 0 or more tokens, or null for no budget; got {self.budget}")
        if self.end_text not in self.decode(list(self.stop_ids)):
            raise ValueError(
                f"budget_text must contain {self.end_text!r}: after it the model is to answer; "
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
        cls,
        tokenizer: Any,
        budget: int,
        *,
        max_completion_length: int,
        eos_ids: Collection[int] | None = None,
        text: str = QWEN3_STOP_TEXT,
        end_text: str = "</think>",
    ) -> ThinkingBudget:
        """Settings for a Hugging Face tokenizer; `eos_ids=None`: the tokenizer's own end-of-text token."""
        stop_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        ends = {tokenizer.eos_token_id} if eos_ids is None else set(eos_ids)
        return cls(budget, stop_ids, max_completion_length, ends, tokenizer.decode, end_text)

    @property
    def answer_room(self) -> int:
        """Tokens left for the answer after a cut."""
        return self.max_completion_length - self.budget - len(self.stop_ids)

    def is_finished(self, ids: Sequence[int], limit: int) -> bool:
        """True where a completion generated under `limit` tokens ended by itself."""
        return len(ids) < limit or (len(ids) > 0 and ids[-1] in self.eos_ids)

    def has_closed(self, ids: Sequence[int]) -> bool:
        """True where the thinking is closed within these tokens."""
        return self.end_text in self.decode(list(ids))

    def thinks(self, prompt_ids: Sequence[int]) -> bool:
        """False for a prompt that ends in a closed thinking block: the completion is an answer from its first token."""
        tail = list(prompt_ids[-8 - len(self.stop_ids) :])
        return not self.decode(tail).rstrip().endswith(self.end_text)

    def must_cut(self, prompt_ids: Sequence[int], head: Sequence[int]) -> bool:
        """True where these first tokens of a completion use up the budget without ending or closing the thinking."""
        return self.thinks(prompt_ids) and not self.is_finished(head, self.budget) and not self.has_closed(head)


def budgeted_generate(
    prompt_ids: Sequence[Sequence[int]], generate: Generate, settings: ThinkingBudget, *, in_step: bool = False
) -> list[BudgetedCompletion]:
    """Complete every prompt under the budget: one call of `generate` for the first phase, at most two for the second.

    `generate` may return completions shorter than asked for where they ended with an end-of-text token. Equal
    neighbouring prompts stay neighbours, so that an engine can fold them. With `in_step` all three calls are made,
    also for no rows: ranks that generate together must call together, and which rows go on differs between them.
    """
    prompts = [list(ids) for ids in prompt_ids]
    first, first_logprobs = _first_phase(prompts, generate, settings, in_step)
    cut = [settings.must_cut(prompt, ids) for prompt, ids in zip(prompts, first, strict=True)]
    kept = [ids + list(settings.stop_ids) if is_cut else ids for ids, is_cut in zip(first, cut, strict=True)]
    going_on = [row for row, ids in enumerate(first) if not settings.is_finished(ids, settings.budget)]
    second, second_logprobs = _second_phase(prompts, kept, going_on, generate, settings, in_step)

    completions = []
    for row, ids in enumerate(first):
        inserted = len(settings.stop_ids) if cut[row] else 0
        tail = second.get(row, [])
        logprobs = None
        if first_logprobs is not None and second_logprobs is not None:
            logprobs = first_logprobs[row] + [math.nan] * inserted + second_logprobs.get(row, [])
        mask = [1] * len(ids) + [0] * inserted + [1] * len(tail)
        completions.append(BudgetedCompletion(kept[row] + tail, logprobs, mask))
    return completions


def _first_phase(
    prompts: list[list[int]], generate: Generate, settings: ThinkingBudget, in_step: bool
) -> tuple[list[list[int]], list[list[float]] | None]:
    """At most `budget` tokens for each prompt; nothing is generated under a budget of 0."""
    if settings.budget == 0 or not (prompts or in_step):
        return [[] for _ in prompts], [[] for _ in prompts]
    ids, logprobs = generate(prompts, settings.budget)
    _check_lengths(ids, logprobs, len(prompts), settings.budget)
    return ids, logprobs


def _second_phase(
    prompts: list[list[int]],
    kept: list[list[int]],
    rows: list[int],
    generate: Generate,
    settings: ThinkingBudget,
    in_step: bool,
) -> tuple[dict[int, list[int]], dict[int, list[float]] | None]:
    """Continue the unfinished rows, each within what it has left: a call for the cut rows and one for the others."""
    ids_by_row: dict[int, list[int]] = {}
    logprobs_by_row: dict[int, list[float]] | None = {}
    for room in (settings.answer_room, settings.answer_room + len(settings.stop_ids)):
        chosen = [row for row in rows if settings.max_completion_length - len(kept[row]) == room]
        if not (chosen or in_step):
            continue
        ids, logprobs = generate([prompts[row] + kept[row] for row in chosen], room)
        _check_lengths(ids, logprobs, len(chosen), room)
        ids_by_row.update(zip(chosen, ids, strict=True))
        if logprobs is None or logprobs_by_row is None:
            logprobs_by_row = None
        else:
            logprobs_by_row.update(zip(chosen, logprobs, strict=True))
    return ids_by_row, logprobs_by_row


def _check_lengths(ids: list[list[int]], logprobs: list[list[float]] | None, rows: int, limit: int) -> None:
    """ValueError where an engine answers with another number of rows or tokens than it was asked for."""
    if len(ids) != rows or (logprobs is not None and len(logprobs) != rows):
        raise ValueError(f"the engine returned {len(ids)} completions for {rows} prompts")
    for row, completion in enumerate(ids):
        if len(completion) > limit:
            raise ValueError(f"completion {row} has {len(completion)} tokens; the engine was asked for {limit}")
        if logprobs is not None and len(logprobs[row]) != len(completion):
            raise ValueError(f"completion {row}: {len(completion)} tokens, {len(logprobs[row])} log-probs")


def inserted_mask(prompt_ids: Sequence[int], ids: Sequence[int], settings: ThinkingBudget) -> list[int]:
    """The mask of a completion made under these settings, from the ids alone: 1 = sampled, 0 = inserted.

    Text was inserted exactly where the first `budget` tokens neither end the completion nor close the thinking, and
    then directly after them.
    """
    start, stop = settings.budget, len(settings.stop_ids)
    is_stop_text = list(ids[start : start + stop]) == list(settings.stop_ids)
    if not is_stop_text or not settings.must_cut(prompt_ids, ids[:start]):
        return [1] * len(ids)
    return [1] * start + [0] * stop + [1] * (len(ids) - start - stop)


def cut_share(completions: Sequence[BudgetedCompletion]) -> float:
    """Share of completions whose thinking was cut; 0 for none."""
    return sum(c.was_cut for c in completions) / len(completions) if completions else 0.0
