"""Train on rows: supervised on answers (SFT), or on pairs of a better and a worse one (DPO, SimPO), by TRL's trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.trainer.supervised.stoppable import StoppableTraining

PREFERENCES = ("dpo", "simpo")


def columns(method: str) -> tuple[str, ...]:
    """What a row of ``method`` consists of; everything but `PREFERENCES` is imitation."""
    return ("prompt", "chosen", "rejected") if method in PREFERENCES else ("prompt", "completion")


def training_rows(method: str, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what no training reads."""
    return [{name: row[name] for name in columns(method)} for row in rows]


def train_on(
    method: Any,
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    arguments: dict[str, Any],
    training: StoppableTraining,
    callbacks: Sequence[Any] = (),
    reference: Any = None,
) -> None:
    """``model`` trained on ``rows`` (`training_rows`) with TRL's ``arguments``, saved in ``folder``.

    Args:
        training: asked after each step whether to stop; a training that was stopped is gone on with from its checkpoint.
        reference: DPO's; default: the model as it begins.
    """
    from datasets import Dataset

    data, heard = Dataset.from_list(list(rows)), list(callbacks) or None
    if method in PREFERENCES:
        from grpo_lab.trainer.supervised.preference import prefer

        prefer(method, model, tokenizer, data, folder, arguments, heard, reference, training)
    else:
        from grpo_lab.trainer.supervised.cold_start import supervised

        supervised(model, tokenizer, data, folder, arguments, heard, train=training)
