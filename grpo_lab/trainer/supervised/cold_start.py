"""Supervised training with TRL's SFTTrainer: the cold start on worked solutions, and rows of prompt and completion."""

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


def cold_start(
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    output_dir: Path,
    arguments: dict[str, Any],
    callbacks: list[Any] | None = None,
    train: Callable[[Any], None] | None = None,
) -> None:
    """Train ``model`` on ``prompt`` → ``worked_solution``; loss on the solution's tokens only. Saved to ``output_dir``.

    The trainer saves, not the model: under FSDP and ZeRO each process holds a part of it, and all must join in.

    Raises:
        ValueError: no column ``worked_solution``, or an unknown setting of ``trl.SFTConfig`` (with the nearest match).
    """
    check_rows(rows)
    pairs = rows.map(_as_pair, remove_columns=rows.column_names)
    supervised(model, tokenizer, pairs, output_dir, arguments, callbacks, "cold_start", train)


def check_rows(rows: Dataset) -> None:
    """``ValueError`` for rows that have no ``worked_solution``."""
    if "worked_solution" not in rows.column_names:
        raise ValueError(f"`cold_start.data` has no column 'worked_solution'; it has {rows.column_names}")


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
    """Train ``model`` on ``prompt`` → ``completion`` (both text or both messages); loss on the completion only. The
    trainer saves to ``output_dir``, as in ``cold_start``. ``train``: what trains the trainer; default: its ``train()``.

    Raises:
        ValueError: an unknown setting of ``trl.SFTConfig``, named as one of ``where``.
    """
    read = checked(SFTConfig, arguments, where)
    settings = {"output_dir": str(output_dir), "report_to": "none", "save_strategy": "no", **read}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings),
        train_dataset=pairs.select_columns(["prompt", "completion"]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    train_and_save(trainer, output_dir, train)


def train_and_save(trainer: Any, output_dir: Path, train: Callable[[Any], None] | None) -> None:
    """``train`` (default: the trainer's own), and its model into ``output_dir``.

    Raises:
        NumbersError: what it has left is not finite; nothing is written.
    """
    trainer.train() if train is None else train(trainer)
    refuse_bad_weights(trainer, TRAINED)
    trainer.save_model(str(output_dir))


def _as_pair(row: dict[str, Any]) -> dict[str, Any]:
    """TRL's prompt-completion form, as text or as messages, whichever the prompt is."""
    if isinstance(row["prompt"], str):
        return {"prompt": row["prompt"], "completion": row["worked_solution"]}
    return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["worked_solution"]}]}
