"""A tool loop (``tools``, environments): TRL's own turns, with ranks in step and prompts within the server's context.

In TRL each rank asks for its own turns only. But an engine that ranks share (a server, tensor parallel) assigns rows to
ranks by their place and expects the same number from each, and sharded weights are gathered by all ranks together. So
each rank passes as many rows as it must (``rows_in_step``). A rank without turns passes filler rows until no rank has a
turn left.

A prompt grows with every turn. TRL does not continue a row whose prompt fills the context of an engine in the process.
For a server it takes the model's number of positions as the context; here it is the server's own context. A server also
refuses a prompt that leaves no room for ``max_completion_length`` tokens. Here such a *tight* row may have as many
tokens as there is room for, which is what an engine in the process does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from trl import GRPOTrainer

from grpo_lab.trainer.generation.in_step import rows_in_step
from grpo_lab.trainer.generation.trl_engine import SyncProof
from grpo_lab.trainer.trl_bridge import replaced


def tool_turns(
    trainer: GRPOTrainer, proof: SyncProof, stock: Callable[..., Any], prompts: Any, prompt_ids: Any, *rest: Any
) -> Any:
    """Run TRL's ``_tool_call_loop`` on the rows of this rank, and return what it returns. Every rank calls this.

    Args:
        proof: the check of the weight sync, which is paused meanwhile.
        stock: TRL's method; the arguments that follow are its own.
    """
    turns = Turns(trainer, list(prompt_ids[0]))
    with (
        replaced(trainer, "_generate_single_turn", turns.ask),
        proof.paused(),  # the first turn was proven; of later ones, some ranks may have none
        within_context(trainer),
    ):
        made = stock(prompts, prompt_ids, *rest)
        turns.keep_in_step()
    return made


class Turns:
    """Asks for the turns of one tool loop, with ranks in step. ``filler`` is a prompt (token ids) that this rank
    completes, and then drops, if it has fewer rows than it must pass to the engine."""

    def __init__(self, trainer: GRPOTrainer, filler: list[int]) -> None:
        self.trainer = trainer
        self.filler = filler
        self._single_turn = trainer._generate_single_turn
        self._served = trainer.use_vllm and trainer.vllm_mode == "server"
        self._together = trainer.accelerator.num_processes > 1 and shares_engine_or_weights(trainer)

    def ask(self, prompt_ids: Any, images: Any, fields: Any, **options: Any) -> tuple[Any, Any]:
        """Return completions and log-probs of this rank's prompts, at least one; called in place of
        ``_generate_single_turn``, with its arguments. Log-probs are None if the engine returns none."""
        made: dict[int, tuple[Any, Any]] = {}
        for tight in self._kinds():
            rows = [row for row, ids in enumerate(prompt_ids) if self._is_tight(ids) is tight]
            of_rows = None
            if images is not None:
                of_rows = [images[row] for row in rows]
            found = self._asked([prompt_ids[row] for row in rows], of_rows, fields, tight, options)
            made.update(zip(rows, found or [], strict=True))
        in_order = [made[row] for row in range(len(prompt_ids))]
        completions = [ids for ids, _ in in_order]
        if in_order[0][1] is None:  # an engine that scores nothing
            return completions, None
        return completions, [logprobs for _, logprobs in in_order]

    def keep_in_step(self) -> None:
        """Take part in the turns of other ranks, with filler rows, until no rank has any."""
        while self._together:
            took_part = [
                self._asked([], None, {}, tight, {"num_generations": 1}) is not None for tight in self._kinds()
            ]
            if not any(took_part):
                return

    def _kinds(self) -> tuple[bool, ...]:
        """Return the kinds of rows, False: not tight, True: tight, in the order in which every rank asks for them."""
        if self._served:
            return False, True
        return (False,)

    def _is_tight(self, ids: list[int]) -> bool:
        """Return whether a server would refuse this prompt: with the longest completion it exceeds the context."""
        if not self._served or self.trainer.max_completion_length is None:
            return False
        return bool(len(ids) + self.trainer.max_completion_length > self.trainer.vllm_generation.context)

    def _asked(
        self, prompts: list[list[int]], images: Any, fields: Any, tight: bool, options: dict[str, Any]
    ) -> list[tuple[Any, Any]] | None:
        """Return (completion, log-probs) for each of these prompts of one kind; None if no rank has any. A collective
        if ranks share an engine or weights."""
        rows = len(prompts)
        if self._together:
            rows = rows_in_step(self.trainer, rows)
        missing = rows - len(prompts)
        if rows == 0:
            return None
        longest: AbstractContextManager[None] = contextlib.nullcontext()
        filler = self.filler
        if tight:  # as much as there is room for: of the filler, one token
            context = self.trainer.vllm_generation.context
            filler = (filler * context)[: context - 1]
            longest = replaced(self.trainer.vllm_generation, "max_completion_length", None)
        if images is not None:
            images = images + [None] * missing
        with longest:
            ids, logprobs = self._single_turn(prompts + [filler] * missing, images, fields, **options)
        if logprobs is None:
            logprobs = [None] * rows
        return list(zip(ids, logprobs, strict=True))[: len(prompts)]


def shares_engine_or_weights(trainer: GRPOTrainer) -> bool:
    """Return whether one rank's turn needs all ranks: with a server, a tensor-parallel engine or a sharded model."""
    if trainer.use_vllm:
        return bool(trainer.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1)
    plugin = trainer.accelerator.state.deepspeed_plugin
    return bool(trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3))


@contextlib.contextmanager
def within_context(trainer: GRPOTrainer) -> Iterator[None]:
    """Return a context in which TRL does not continue rows whose prompts would fill the server's context. TRL reads
    that number from the model's configuration, which is changed for the block."""
    if not trainer.use_vllm or trainer.vllm_mode != "server":
        yield
        return
    config = trainer.model.config
    if trainer._is_vlm:
        config = config.text_config
    positions = config.max_position_embeddings
    config.max_position_embeddings = min(positions, trainer.vllm_generation.context)
    try:
        yield
    finally:
        config.max_position_embeddings = positions
