"""Training by TRL's trainers that are not RL's: on rows (SFT, the cold start), on pairs (DPO, SimPO, reward models), by
a teacher. The losses are TRL's, untouched.

The trainer saves, not the model: under FSDP and ZeRO each process holds a part of it, and all must join in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import DistillationConfig, DPOConfig, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from grpo_lab.engines.sampler import in_form_of
from grpo_lab.settings import refuse_unknown, typed
from grpo_lab.trainer.ranks import TRAINED, refuse_bad_weights
from grpo_lab.trainer.settings.limits import SUPERVISED_GONE, check_choices
from grpo_lab.trainer.supervised.distillation import Distillation
from grpo_lab.trainer.supervised.preference import WeightedDPOTrainer, weighted_cpo

PAIR = ("prompt", "chosen", "rejected")
COLUMNS = {"sft": ("prompt", "completion"), "distill": ("prompt",), **dict.fromkeys(("dpo", "simpo", "reward"), PAIR)}
FIXED: dict[str, dict[str, Any]] = {
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "remove_unused_columns": False},
    "reward": {"max_length": None},  # TRL leaves out longer pairs, and says nothing
}
"""Of the configuration, where it is not set."""


def train_by(
    method: str,
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    output_dir: Path,
    arguments: Mapping[str, Any],
    callbacks: list[Any] | None = None,
    train: Callable[[Any], None] | None = None,
    where: str = "training",
    **parts: Any,
) -> None:
    """Train ``model``; saved to ``output_dir`` (all processes join in).

    Args:
        method: one of `COLUMNS`; the loss of ``sft`` is on the completion only.
        model: a language model; of ``reward`` the folder or hub name, to which TRL adds the head, drawn by the seed.
        rows: with the method's columns, all text or all messages; others are not read.
        arguments: fields of TRL's configuration, named in messages as of ``where``.
        train: what trains the trainer; None: its ``train()``.
        parts: the trainer's: DPO's ``ref_model`` (default: the model as it begins), a distillation's ``teacher_model``.

    Raises:
        ValueError: a missing column, or an unknown setting.
        NumbersError: what it has left is not finite; nothing is written.
    """
    config, trainer_class = trl_of(method)
    columns = list(COLUMNS[method])
    if missing := [name for name in columns if name not in rows.column_names]:
        raise ValueError(f"rows have no column {missing[0]!r}; they have {rows.column_names}")
    settings = {**FIXED.get(method, {}), **check_training(method, arguments, where)}
    args = config(**{"output_dir": str(output_dir), "report_to": "none", "save_strategy": "no", **settings})
    parts |= {"train_dataset": rows.select_columns(columns), "processing_class": tokenizer, "callbacks": callbacks}
    trainer = trainer_class(model=model, args=args, **parts)
    trainer.train() if train is None else train(trainer)
    refuse_bad_weights(trainer, TRAINED)
    trainer.save_model(str(output_dir))


def cold_start(model: Any, tokenizer: Any, rows: Dataset, output_dir: Path, *how: Any) -> None:
    """`train_by` SFT on ``prompt`` → ``worked_solution``."""
    train_by("sft", model, tokenizer, Dataset.from_list(worked_pairs(rows)), output_dir, *how, where="cold_start")


def worked_pairs(rows: Dataset) -> list[dict[str, Any]]:
    """Rows of SFT out of problems. ``ValueError`` where they have no ``worked_solution``."""
    check_rows(rows)
    return [{"prompt": row["prompt"], "completion": in_form_of(row["prompt"], row["worked_solution"])} for row in rows]


def check_rows(rows: Dataset) -> None:
    """``ValueError`` for rows that have no ``worked_solution``."""
    if "worked_solution" not in rows.column_names:
        raise ValueError(f"`cold_start.data` has no column 'worked_solution'; it has {rows.column_names}")


def check_training(method: str, arguments: Mapping[str, Any], where: str = "training") -> dict[str, Any]:
    """``arguments`` in the types that the configuration of ``method`` declares (of others than `COLUMNS`: SFT's).

    ``ValueError``, naming ``where``, for a setting that it does not have, and for a name or a number that cannot be.
    """
    config = trl_of(method)[0]
    refuse_unknown(arguments, config.__dataclass_fields__, f"`{where}`", SUPERVISED_GONE)
    found: dict[str, Any] = typed(arguments, config, where)
    check_choices(found, where)
    if method == "simpo" and found.get("loss_type", "simpo") != "simpo":
        raise ValueError(f"`{where}.loss_type` is {found['loss_type']!r}; `method: simpo` means 'simpo'")
    if method == "distill" and not 0 <= found.get("beta", 1) <= 1:
        raise ValueError(f"`{where}.beta` is {found['beta']}; it is a number from 0, KL(teacher ‖ student), to 1")
    return found


@cache
def trl_of(method: str) -> tuple[Any, Any]:
    """The configuration and the trainer of a method."""
    if method == "simpo":
        return weighted_cpo()
    of = {"dpo": (DPOConfig, WeightedDPOTrainer), "reward": (RewardConfig, RewardTrainer)}
    return {**of, "distill": (DistillationConfig, Distillation)}.get(method, (SFTConfig, SFTTrainer))
