"""Supervised training with TRL's SFTTrainer: the cold start on worked solutions, and rows of prompt and completion.

The trainer saves, not the model: under FSDP and ZeRO each process holds a part of it, and all must join in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from grpo_lab.settings import refuse_unknown, typed
from grpo_lab.trainer.ranks import TRAINED, refuse_bad_weights
from grpo_lab.trainer.settings.limits import SUPERVISED_GONE, check_choices


def checked(config: Any, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``arguments`` in the types that ``config``, a configuration class of TRL's, declares.

    ``ValueError``, naming ``where``, for a setting that it does not have, and for a name or a number that cannot be.
    """
    refuse_unknown(arguments, config.__dataclass_fields__, f"`{where}`", SUPERVISED_GONE)
    found = typed(arguments, config, where)
    check_choices(found, where)
    return found


def check_cold_start(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As ``checked``, of ``cold_start``."""
    return checked(SFTConfig, arguments, "cold_start")


def check_rows(rows: Dataset) -> None:
    """``ValueError`` for rows that have no ``worked_solution``."""
    if "worked_solution" not in rows.column_names:
        raise ValueError(f"`cold_start.data` has no column 'worked_solution'; it has {rows.column_names}")


def cold_start(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    output_dir: Path,
    arguments: dict[str, Any],
    callbacks: list[Any] | None = None,
    train: Callable[[Any], None] | None = None,
) -> None:
    """``supervised`` on ``prompt`` → ``worked_solution``. ``ValueError`` without that column, too."""

    def as_pair(row: dict[str, Any]) -> dict[str, Any]:
        solution = row["worked_solution"]
        text = isinstance(row["prompt"], str)
        return {
            "prompt": row["prompt"],
            "completion": solution if text else [{"role": "assistant", "content": solution}],
        }

    check_rows(rows)
    pairs = rows.map(as_pair, remove_columns=rows.column_names)
    supervised(model, tokenizer, pairs, output_dir, arguments, callbacks, "cold_start", train)


def supervised(
    model: Any,
    tokenizer: Any,
    pairs: Dataset,
    output_dir: Path,
    arguments: dict[str, Any],
    callbacks: list[Any] | None = None,
    where: str = "training",
    train: Callable[[Any], None] | None = None,
) -> None:
    """Train ``model`` on ``prompt`` → ``completion`` (both text or both messages); loss on the completion only. Saved
    to ``output_dir``. ``train``: what trains the trainer; default: its ``train()``.

    Raises:
        ValueError: an unknown setting of ``trl.SFTConfig`` (with the nearest match), named as one of ``where``.
    """
    settings = checked(SFTConfig, arguments, where)
    rows, parts = pairs.select_columns(["prompt", "completion"]), {"callbacks": callbacks}
    train_and_save(SFTTrainer, SFTConfig, settings, model, tokenizer, rows, output_dir, train, **parts)


def train_and_save(
    trainer_class: Any,
    config: Any,
    settings: Mapping[str, Any],
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    output_dir: Path,
    train: Callable[[Any], None] | None,
    **parts: Any,
) -> None:
    """A trainer of TRL's on ``rows``; ``train`` (default: its own) trains it, and its model goes into ``output_dir``.

    Raises:
        NumbersError: what it has left is not finite; nothing is written.
    """
    args = config(**{"output_dir": str(output_dir), "report_to": "none", "save_strategy": "no", **settings})
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **parts)
    trainer.train() if train is None else train(trainer)
    refuse_bad_weights(trainer, TRAINED)
    trainer.save_model(str(output_dir))
