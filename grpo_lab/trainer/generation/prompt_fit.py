"""Prompts that do not fit the engine: found in the data before the first step if possible, else when they are used.

vLLM refuses a request with a prompt that is too long, together with the rest of its batch. On a server a prompt must
leave room for ``max_completion_length`` tokens. An engine in the process needs room for one token only, and ends
completions where its context ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from grpo_lab.trainer.settings.inputs import check_prompt_lengths, completion_limit

#: Number of prompts that are tokenized at once.
BATCH = 256
#: Number of rows that an error names.
NAMED = 5
#: Number of requests that are sent to a server at the same time.
AT_ONCE = 32


class PromptTooLong(ValueError):
    """Raised if a prompt leaves no room for its completion in the engine's context."""


def _no_room(who: str, context: int, room: int) -> str:
    """Return the error's message: ``who`` (with a verb) leaves no room for ``room`` tokens in ``context`` tokens."""
    return (
        f"{who} no room for {room} tokens of completion in the engine's context of {context} tokens: drop or shorten "
        f"prompts of more than {context - room} tokens, lower `max_completion_length`, or give the engine a larger "
        "context (`grpo-lab serve --max-model-len`, `rollout.engine.max_model_len`)"
    )


def refuse_long(
    prompts: Sequence[Sequence[int]], context: int, room: int, decode: Callable[[list[int]], str] | None = None
) -> None:
    """Raise ``PromptTooLong`` for the first prompt (token ids) with more than ``context`` − ``room`` tokens. With the
    tokenizer's ``decode`` the message quotes its beginning."""
    for ids in prompts:
        if len(ids) > context - room:
            text = ""
            if decode is not None:
                text = f" (it begins {decode(list(ids[:60]))[:160]!r})"
            raise PromptTooLong(_no_room(f"a prompt of {len(ids)} tokens{text} leaves", context, room))


def fill_rooms(
    ask: Callable[..., dict[str, Any]], prompts: list[list[int]], context: int, features: Any = None, **sampling: Any
) -> dict[str, Any]:
    """Ask a server for completions that may each be as long as their prompt leaves room in ``context``, which is what
    an engine in the process does. Return one answer, as if all rows had been one request.

    A request has one ``max_tokens`` for all its prompts, so each row is a request of its own; up to ``AT_ONCE`` are
    sent at a time, and the server batches them.

    Args:
        ask: TRL's ``VLLMClient.generate``.
        prompts: token ids.
        features: image features of each row, or None.
        sampling: further arguments of ``ask``.
    """

    def row(number: int) -> dict[str, Any]:
        shown = None
        if features is not None:
            shown = features[number : number + 1]
        room = context - len(prompts[number])
        return ask([prompts[number]], features=shown, **{**sampling, "max_tokens": room})

    with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(prompts))) as pool:
        answers = list(pool.map(row, range(len(prompts))))
    joined: dict[str, Any] = {}
    for name, value in answers[0].items():
        joined[name] = None
        if value is not None:
            joined[name] = [of_row for answer in answers for of_row in answer[name]]
    return joined


def check_room(trainer: GRPOTrainer, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ``ValueError`` if one of this rank's prompts (token ids) is empty, or fills the context of the engine or of
    the model; warn if one leaves little room."""
    if any(len(ids) == 0 for ids in prompts):
        raise ValueError(
            "a prompt has no token: it is an empty text, and the tokenizer puts no beginning-of-text token in front, "
            "so nothing says how likely a completion's first token is. Take such rows out of `train_dataset` (and "
            "`eval_dataset`), or give them a prompt"
        )
    if trainer.use_vllm:
        refuse_long(prompts, trainer.vllm_generation.context, 1, trainer._tokenizer.decode)
    limit = None
    if trainer.use_vllm:
        limit = trainer.args.vllm_max_model_length
    config = trainer.accelerator.unwrap_model(trainer.model).config
    risk = check_prompt_lengths([len(ids) for ids in prompts], config, completion_limit(trainer.args), limit)
    if risk is not None:
        trainer.recorder.say(risk, key="context", level=logging.WARNING)


def check_training_prompts(trainer: GRPOTrainer, tokenizes_itself: bool = False) -> None:
    """Raise ``ValueError`` if rows of the data sets leave no room for a completion in vLLM's context; name the rows.

    Not checked here: streamed data, images, environments (which make or extend prompts), a rollout function of a team,
    and a subclass that tokenizes prompts itself (``tokenizes_itself``). Every rank checks all rows, so all of them fail
    together.
    """
    own_rollout = trainer.rollout_func is not None and not getattr(trainer.rollout_func, "drives_trls_engine", False)
    if not trainer.use_vllm or trainer.environment_factories is not None or own_rollout or tokenizes_itself:
        return
    generation = trainer.vllm_generation
    if generation.mode == "server" and trainer.max_completion_length:
        room = trainer.max_completion_length
    else:
        room = 1
    for setting, rows in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        if not isinstance(rows, Dataset) or {"prompt", "image", "images"} & {*rows.column_names} != {"prompt"}:
            continue
        found = too_long(trainer, rows["prompt"], generation.context - room)
        if found:
            named = ", ".join(f"row {row} ({length} tokens)" for row, length in found[:NAMED])
            more = ""
            if len(found) > NAMED:
                more = f" and {len(found) - NAMED} more"
            raise ValueError(_no_room(f"`{setting}`: {named}{more} leave", generation.context, room))


def too_long(trainer: GRPOTrainer, prompts: Any, limit: int) -> list[tuple[int, int]]:
    """Return (index, number of tokens) of the prompts with more than ``limit`` tokens.

    A token stands for at least one byte, so only prompts with enough bytes are tokenized. A chat template is taken to
    add no more tokens than the whole first prompt has.
    """
    if len(prompts) == 0:
        return []

    def tokens(some: list[Any]) -> list[int]:
        return [len(ids) for ids in GRPOTrainer._tokenize_prompts(trainer, some)[0]]

    def size(prompt: Any) -> int:
        text = prompt
        if not isinstance(prompt, str):
            text = json.dumps(prompt, ensure_ascii=False)
        return len(text.encode())

    (added,) = tokens([prompts[0]])
    maybe = [row for row, prompt in enumerate(prompts) if size(prompt) + added > limit]
    found = []
    for start in range(0, len(maybe), BATCH):
        rows = maybe[start : start + BATCH]
        lengths = tokens([prompts[row] for row in rows])
        found += [(row, length) for row, length in zip(rows, lengths, strict=True) if length > limit]
    return found
