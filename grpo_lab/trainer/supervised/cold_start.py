"""The cold start: supervised training on worked solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from grpo_lab.trainer.supervised.methods import check_training, train_by


def check_cold_start(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As ``check_training``, of ``cold_start``."""
    return check_training("sft", arguments, "cold_start")


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
    """``train_by`` SFT on ``prompt`` → ``worked_solution``. ``ValueError`` without that column, too."""

    def as_pair(row: dict[str, Any]) -> dict[str, Any]:
        solution = row["worked_solution"]
        text = isinstance(row["prompt"], str)
        return {
            "prompt": row["prompt"],
            "completion": solution if text else [{"role": "assistant", "content": solution}],
        }

    check_rows(rows)
    pairs = rows.map(as_pair, remove_columns=rows.column_names)
    train_by("sft", model, tokenizer, pairs, output_dir, arguments, callbacks, train, "cold_start")
