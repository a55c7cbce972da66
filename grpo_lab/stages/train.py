"""Train on rows: supervised on answers (SFT), or on pairs of a better and a worse one (DPO, SimPO), by TRL's
trainers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_lab.io import whole_folder
from grpo_lab.runs.metrics_file import MetricsFile, cut_metrics
from grpo_lab.runs.stop import StopRequests, identity_of
from grpo_lab.stages.sample import read_lines
from grpo_lab.trainer.supervised.stoppable import StoppableTraining

PREFERENCES = ("dpo", "simpo")
MODEL = "model"
"""Folder of the model that a training leaves."""
STOPPED = "stopped"
"""A training that was asked to stop: its checkpoint, until it has come to its end."""
WEIGHT = "rewards/weight"


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
        training: asked after each step whether to stop; a training that was stopped is gone on with from its
            checkpoint.
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


@contextmanager
def trained(
    folder: Path, tokenizer: Any, rows: Any, made_from: Any, stop: StopRequests
) -> Iterator[tuple[Path, StoppableTraining, TrainingFacts]]:
    """Where the model of a training goes (`model/` in ``folder``), what trains it, and what is counted of it.

    A training that was stopped is gone on with from `stopped/`, where it is of the same ``rows`` and ``made_from``.
    """
    counted = TrainingFacts(folder / "metrics.jsonl")
    with stop.training(folder / STOPPED, identity_of(rows, made_from)) as training:
        counted.begin(training.step)
        with whole_folder(folder / MODEL) as place:
            yield place, training, counted
            finish(place, tokenizer)
    training.done()


class TrainingFacts(MetricsFile):
    """`metrics.jsonl` of one training, begun anew or gone on with, and what its stage's marker says of it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.steps, self.loss = 0, None
        self.weights: list[float] = []

    def begin(self, step: int) -> None:
        """After ``step`` steps: the lines up to there stay."""
        if step:
            cut_metrics(self.path, step)
            self.weights = [line[WEIGHT] for line in read_lines(self.path) if WEIGHT in line]
        else:
            self.path.unlink(missing_ok=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        super().on_log(args, state, control, logs, **more)
        self.loss = (logs or {}).get("train_loss", self.loss)
        if WEIGHT in (logs or {}):
            self.weights.append((logs or {})[WEIGHT])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps = state.global_step

    def facts(self) -> dict[str, Any]:
        """Optimizer steps, mean loss; of pairs also w(θ) in the first and the last log."""
        found: dict[str, Any] = {"steps": self.steps, "loss": self.loss}
        return found | ({"weight_first": self.weights[0], "weight_last": self.weights[-1]} if self.weights else {})


def finish(folder: Path, tokenizer: Any) -> None:
    """The tokenizer, and without the pickled arguments of the trainer, which name this machine."""
    tokenizer.save_pretrained(folder)
    (folder / "training_args.bin").unlink(missing_ok=True)


def free() -> None:
    """The accelerator's memory, after a model that nobody holds any more."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
