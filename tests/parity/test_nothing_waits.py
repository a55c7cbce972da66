"""Between the bins of a step nothing is read from the device: it computes a bin while the host makes the next one.

A step of a run on the CPU is computed once more on torch's device ``meta``, whose tensors have no values: whatever
would wait for a device (``item``, ``nonzero``, a mask as an index, a copy to the host) is an error there.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.row_table import RowTable
from grpo_lab.trainer.step import exact_update
from grpo_lab.trainer.step.exchange import Exchange
from parity.harness import arguments, train

META = torch.device("meta")
SETTINGS: dict[str, dict[str, Any]] = {
    "rows": {"update": {"max_tokens": 60, "share_prompts": "off"}},
    "prompts once": {"update": {"max_tokens": 60, "share_prompts": "on"}},
    "a budget of its own": {"update": {"max_tokens": "auto"}},
    "checkpointing": {"gradient_checkpointing": True, "update": {"max_tokens": 60, "share_prompts": "on"}},
    "several generation batches": {"steps_per_generation": 1, "objective": "dapo"},
    "old log-probs": {"num_iterations": 2, "objective": "gspo"},
    "drop-in": {"objective": None, "loss_type": "dapo"},
    "reference": {"beta": 0.1, "objective": "grpo"},
    "critic": {"objective": "ppo", "value": {}, "advantage": "gae"},
}


def on_meta(rows: Exchange) -> None:
    """As an exchange is on another device, once it is made: what the host knows is there."""
    table = rows.held
    moved = RowTable({name: one.to(META) for name, one in table.fields.items()}, table.offset.to(META), table.per_token)
    vars(moved).update(on_host=table.on_host, _layout=table, lengths=tuple(one.to(META) for one in table.lengths))
    rows.held, rows._device = moved, META
    numbers = rows.numbers
    of_device = {name: getattr(numbers, name).to(META) for name in ("scored", "micro_batch", "token_count")}
    rows.numbers = replace(numbers, **of_device)
    rows._sent = {key: tuple(one.to(META) for one in sent) for key, sent in rows._sent.items()}


def without_values(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on the bins of the second step are computed on ``meta`` in the place of the CPU; gives how many."""
    done: list[int] = []
    backwards = exact_update.ExactUpdate._backwards

    def looked_at(self: Any, model: Any, rows: Exchange, bins: Any, denominators: Any, kept: Any) -> Any:
        if trainer.state.global_step != 1:
            return backwards(self, model, rows, bins, denominators, kept)
        on_meta(rows)
        model.to(META)
        monkeypatch.setattr(type(trainer.accelerator), "device", property(lambda _: META))
        tokens = torch.as_tensor(denominators.tokens)
        backwards(self, model, rows, rows.bins, replace(denominators, tokens=tokens.to(META)), kept)
        done.append(len(rows.bins))
        raise Done

    asked = torch.is_autocast_enabled  # it knows no device of this name
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind != "meta" and asked(kind))
    autocast = torch.autocast
    without = contextlib.nullcontext
    monkeypatch.setattr(torch, "autocast", lambda kind, **how: without() if kind == "meta" else autocast(kind, **how))
    monkeypatch.setattr(exact_update.ExactUpdate, "_backwards", looked_at)
    return done


class Done(Exception):
    pass


@pytest.mark.not_fast(but="rows")
@pytest.mark.parametrize("kind", SETTINGS, ids=str)
def test_no_value_is_read_between_bins(
    kind: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"max_steps": 2, "objective": "dr_grpo", **SETTINGS[kind]}
    lab = {name: changes.pop(name) for name in ("objective", "update", "value", "advantage") if name in changes}
    done: list[list[int]] = []
    with pytest.raises(Done):
        train(
            LabTrainer, LabConfig(**arguments(tmp_path, **changes), **lab), tiny_folder,
            prepare=lambda trainer: done.append(without_values(trainer, monkeypatch)),
        )  # fmt: skip
    assert done[0][0] >= 1
