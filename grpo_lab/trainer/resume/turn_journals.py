"""Journals of generation batches with turns (``rollout.turns.journal``): where they are and what they are of.

    output_dir/_turns/<step>-<number>-<rank>.jsonl

A journal records what happened in the turns of one generation batch on one rank. It stays from the beginning of its
batch until a checkpoint of a later step is whole. Until then, a run that was killed and resumed comes to the same batch
again, and takes the journal's answers in place of new ones. It does so only if step, prompts, settings and weights are
the same. After a resume from an older checkpoint the weights are the same if all batches in between were drawn again to
the bit; batches of an engine are, too, if their journals are whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.turns.journal import TurnJournal
from grpo_lab.turns.turn_settings import TurnSettings

JOURNALS = "_turns"
#: Settings of generation; a journal made with other values is not used.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "generation_kwargs",
    "max_completion_length",
)
#: Number of values of each weight from which the fingerprint of a model is made, about.
LOOKED_AT = 64


class TurnJournals(TrainerCallback):  # type: ignore[misc]
    """Callback that opens the journals of this rank, and removes them when they are no longer needed."""

    def __init__(self, trainer: GRPOTrainer, settings: TurnSettings | None) -> None:
        self.trainer = trainer
        self.settings = settings
        self._folder = Path(trainer.args.output_dir) / JOURNALS
        self._batch = (-1, 0)  # (optimizer step, number of the batch in it) of the last batch

    def open(self, prompts: Iterable[list[int]]) -> TurnJournal | None:
        """Return the journal of the generation batch that begins now, with what a killed run has left in it. None in an
        evaluation, or with ``rollout.turns.journal: false``. ``prompts``: the batch's token ids."""
        trainer = self.trainer
        if self.settings is None or not self.settings.journal or not trainer.model.training:
            return None
        step = int(trainer.state.global_step)
        number = 0
        if self._batch[0] == step:
            number = self._batch[1] + 1
        self._batch = (step, number)
        if trainer.args.save_strategy == "no" or trainer.args.save_only_model:
            self._remove_before(step)  # there will be no checkpoint that does it
        rank = trainer.accelerator.process_index
        header = {
            "step": step,
            "number": number,
            "rank": [rank, trainer.accelerator.num_processes],
            "prompts": hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest(),
            "weights": fingerprint(trainer.model),
            "sampling": {name: repr(getattr(trainer.args, name)) for name in SAMPLING},
            "engine": trainer.vllm_mode if trainer.use_vllm else None,
            "turns": asdict(self.settings),
        }

        def say(words: str) -> None:
            trainer.recorder.say(f"`rollout.turns.journal`: {words}", level=logging.WARNING)

        def draw_anew() -> None:
            if header["engine"] == "colocate":
                torch.manual_seed(zlib.crc32(f"{file} {file.stat().st_size}".encode()))

        file = self._folder / f"{step:08d}-{number}-{rank}.jsonl"
        return TurnJournal(file, header, trainer.environments, say, draw_anew)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not args.save_only_model:
            self._remove_before(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._remove_before(state.global_step + 1)

    def _remove_before(self, step: int) -> None:
        """Remove the journals of batches that were begun before ``step``."""
        for file in self._folder.glob("*-*-*.jsonl"):
            if int(file.name.split("-")[0]) < step:
                file.unlink(missing_ok=True)


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Return a digest of about ``LOOKED_AT`` values of each trainable weight, as this rank holds it. It tells whether a
    model was changed by steps of an optimizer; "" for a model without trainable weights."""
    looked_at = []
    for weight in model.parameters():
        if weight.requires_grad:
            own = weight.to_local() if isinstance(weight, DTensor) else weight
            flat = own.detach().flatten()
            looked_at.append(flat[:: max(1, len(flat) // LOOKED_AT)].float())
    if not looked_at:
        return ""
    return hashlib.sha256(torch.cat(looked_at).cpu().numpy().tobytes()).hexdigest()
