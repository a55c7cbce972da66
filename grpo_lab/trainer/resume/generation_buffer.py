"""Resume in the middle of a generation batch, bit for bit: a checkpoint holds what TRL keeps only in memory between
optimizer steps.

A generation batch serves ``steps_per_generation · num_iterations`` micro-batches, and an optimizer step takes
``gradient_accumulation_steps`` of them, so a checkpoint can fall inside a batch. TRL 1.16 saves neither the completions
that are still to be trained on (``_buffered_inputs``) nor the number of micro-batches so far (``_step``). So a resumed
run generates the prompts again with a newer policy and trains on all of them, and every later generation is shifted.

Here a checkpoint's record (``state.py``) gets the entry ``generation``: ``_step``, the settings on which the place
inside a batch depends, and metrics and loss since the last log. Inside a batch each rank also writes its micro-batches
to ``grpo_lab_generation_<rank>.safetensors``: a flat table of tensors, and a description in JSON (``flattened``).

What a resume finds, and what it does:

    the entry fits the run       it goes on where the checkpoint was written: same weights, losses and metrics
    no entry                     (stock TRL, an early version) one warning if it is inside a batch; then as TRL does
    the batch's shape changed    (world size, batch sizes, …) likewise: Trainer warns of changed arguments, and goes on
    a damaged or missing file    ``ValueError`` on every rank: nothing else is left of that batch
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.io import write_whole
from grpo_lab.trainer.resume.state import STATE, SavedState, plain_metrics
from grpo_lab.trainer.settings.correction import correction_in_force
from grpo_lab.trainer.settings.limits import kept_by_engine
from grpo_lab.trainer.trl_bridge import send_weights_again

#: What a rank may find in a checkpoint, from best to worst; the worst of all ranks counts.
VERDICTS = ("fits", "absent", "changed", "broken")


def flattened(value: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take nested ``value`` apart into a description for ``json.dumps`` and its tensors, on the CPU, by key.

    A tensor that occurs several times (``num_items_in_batch``) is stored once, and is one object again after
    ``rebuilt``: the exact update asks by ``is`` whether micro-batches come from the same generation batch.

    Args:
        value: made of lists, tuples, dicts with string keys, numbers, bools, strings, None and plain tensors.
        path: name of ``value`` in error messages.

    Raises:
        ValueError: there is something else in it; the message says what and where.
    """
    tensors: dict[str, Tensor] = {}
    keys: dict[int, str] = {}

    def walk(item: Any, place: str) -> Any:
        if item is None or type(item) in (bool, int, float, str):
            return {"value": item}
        if type(item) is Tensor and item.layout is torch.strided and not item.is_quantized:
            if id(item) not in keys:
                keys[id(item)] = f"{len(keys):06d}"
                tensors[keys[id(item)]] = item.detach().to("cpu", copy=True).contiguous()
            return {"tensor": keys[id(item)], "on": "cpu" if item.device.type == "cpu" else "device"}
        if type(item) in (list, tuple):
            return {type(item).__name__: [walk(part, f"{place}[{i}]") for i, part in enumerate(item)]}
        if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
            return {"dict": {name: walk(part, f"{place}[{name!r}]") for name, part in item.items()}}
        raise ValueError(f"{place} is a {type(item).__module__}.{type(item).__name__}")

    return walk(value, path), tensors


def rebuilt(description: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Put together what ``flattened`` took apart. Tensors that were not on the CPU are moved to ``device``. Raises
    ValueError if the description is not one of ours, and KeyError if a tensor that it names is missing."""

    @functools.cache
    def tensor(key: str, on: str) -> Tensor:
        if on == "cpu":
            return tensors[key]
        return tensors[key].to(device)

    def walk(node: Any) -> Any:
        match node:
            case {"value": value}:
                return value
            case {"tensor": str(key), "on": ("cpu" | "device") as on}:
                return tensor(key, on)
            case {"list": list(parts)}:
                return [walk(part) for part in parts]
            case {"tuple": list(parts)}:
                return tuple(walk(part) for part in parts)
            case {"dict": dict(parts)}:
                return {name: walk(part) for name, part in parts.items()}
        raise ValueError(f"{str(node)[:80]!r} is no part of a description of tensors")

    return walk(description)


def rows_file(rank: int) -> str:
    """Return the name of the file in a checkpoint with the micro-batches of a rank."""
    return f"grpo_lab_generation_{rank}.safetensors"


class GenerationBuffer(TrainerCallback):  # type: ignore[misc]
    """Saves and restores the open generation batch. It is a callback, since the loss since the last log can be restored
    only when training begins: HF clears it just before."""

    holds = (
        "how far the generation batch is, metrics and loss since the last log; inside a batch the micro-batches of "
        "each rank are in `grpo_lab_generation_<rank>.safetensors`"
    )

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer: Any = trainer  # TRL's annotations say that the buffer is None
        self._done = 0  # micro-batches up to the last whole optimizer step
        self._loss: tuple[float, int] | None = None
        self._begun: Any = None  # HF's state object of the training for which memory was cleared
        self._ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        if self._begun is not state:
            self._begin(resumed=False)
        self._ended = False
        self._done = trainer._step
        if self._loss is not None:
            trainer._tr_loss += self._loss[0]
            trainer._globalstep_last_logged = self._loss[1]
            self._loss = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._done = self.trainer._step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = True

    def _begin(self, resumed: bool) -> None:
        """Clear what an earlier training of this trainer left in memory. With ``objective`` unset one thing is done as
        TRL does: a training that follows a finished one continues the generation batch that was open."""
        trainer = self.trainer
        self._begun = trainer.state
        self._loss = None
        trainer.exact_update.forget()
        if resumed or not self._ended or trainer.lab_settings.objective is not None:
            trainer._step, trainer._buffered_inputs = 0, None
        trainer._current_train_step_time = 0.0
        for pending in (*trainer._metrics.values(), trainer._pending_metrics, trainer._pending_extra_logs):
            pending.clear()
        for mode in ("train", "eval"):
            trainer.recorder.book(mode).forget()
        if trainer.use_vllm:
            send_weights_again(trainer)  # the engine may hold an earlier training's weights of the same step

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Write this rank's micro-batches into a checkpoint, and return the entry for the record; None if the
        checkpoint holds the model only. Every rank calls this. If the micro-batches cannot be written, a warning says
        so, and the checkpoint goes without them."""
        trainer = self.trainer
        if trainer.args.save_only_model or not trainer.is_in_train:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        gathered = gather_object([(self._save_rows(folder), float(trainer._tr_loss))])
        problem = next((words for words, _ in gathered if words is not None), None)
        if problem is not None:
            trainer.recorder.say(
                f"{folder} is inside a generation batch that could not be written ({problem}): a resume from this "
                "checkpoint generates the batch again and trains the rest of its micro-batches on that",
                key=f"generation buffer: {problem}",
                level=logging.WARNING,
            )
        window = {  # metrics and loss since the last log
            "losses": [loss for _, loss in gathered],
            "last_logged": trainer._globalstep_last_logged,
            "metrics": plain_metrics(trainer._metrics["train"]),
            "pairs": trainer.recorder.book("train").pending(),
        }
        return {
            "settings": self._settings(),
            "step": self._done,
            "left_out": problem,
            "random_forward": trainer.exact_update.verdict.saw_randomness,
            "window": window if trainer._step == self._done else None,  # else a resumed run repeats the open step
            "completions": self._completions(),
        }

    def _save_rows(self, place: Path) -> str | None:
        """Write this rank's micro-batches if the checkpoint is inside a generation batch. Returns why that failed, or
        None."""
        trainer = self.trainer
        every = self.trainer.phase.every
        file = place / rows_file(trainer.accelerator.process_index)
        file.unlink(missing_ok=True)
        if self._done % every == 0:
            return None
        if trainer._step > (self._done // every + 1) * every:
            return "later ones were generated since the optimizer step that the checkpoint is of"
        try:
            description, tensors = flattened(trainer._buffered_inputs, "micro-batch ")
            words = {"description": json.dumps(description)}
            write_whole(file, lambda partial: save_file(tensors, partial, metadata=words))
        except (ValueError, OSError, SafetensorError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _settings(self) -> dict[str, Any]:
        """Return the settings on which it depends which rows and which tensors a micro-batch holds."""
        trainer = self.trainer
        args = self.trainer.args
        of_args = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
        return {
            "optimizer step": trainer.state.global_step,
            "number of processes": trainer.accelerator.num_processes,
            **{name: getattr(args, name) for name in of_args},
            "num_iterations": trainer.num_iterations,
            "num_generations": trainer.num_generations,
            "beta > 0": trainer.beta != 0.0,
            "sampler correction": correction_in_force(trainer) is not None,
            "top_k of its log-probs": kept_by_engine(args) or None,
        }

    def _completions(self) -> dict[str, Any] | None:
        """Return the rows collected for the next table of ``log_completions``; None without such tables, or if a row
        holds something that JSON cannot."""
        logs = self.trainer._logs
        if not self.trainer.log_completions:
            return None
        table = {name: list(logs[name]) for name in ("prompt", "completion", "advantages")}
        columns = {name: {key: list(column) for key, column in logs[name].items()} for name in ("rewards", "extra")}
        try:
            return dict(json.loads(json.dumps({**table, **columns})))
        except (TypeError, ValueError):
            return None

    def load(self, saved: SavedState | None) -> None:
        """Restore the state of the checkpoint, or warn why it cannot be. Every rank calls this, and all do the same.
        Raises ValueError if the entry is damaged, or if the micro-batches of a rank are damaged or missing."""
        if saved is None:
            return
        self._begin(resumed=True)
        try:
            verdict, text, rows = self._found(saved)
        except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            verdict, rows = "broken", None
            text = f"{saved.checkpoint} cannot be resumed inside its generation batch: {error!r}"
        worst, why = max(gather_object([(verdict, text)]), key=lambda pair: VERDICTS.index(pair[0]))
        if worst == "broken":
            raise ValueError(
                f"`resume_from_checkpoint`: {why}; take another checkpoint, or take the entry `generation` out of its "
                f"{STATE} to resume as TRL does, which generates that batch again"
            )
        if worst == "fits":
            self._take(saved.entries["generation"], rows, saved.checkpoint)
        elif why:
            self.trainer.recorder.say(f"`resume_from_checkpoint`: {why}", level=logging.WARNING)

    def _found(self, saved: SavedState) -> tuple[str, str, list[dict[str, Any]] | None]:
        """Return what this rank finds in the checkpoint: a verdict (``VERDICTS``), the reason in words, and this rank's
        micro-batches, or None if none are left to train on or they cannot be used."""
        entry = saved.entries.get("generation")
        if entry is None:
            missing = f"does not hold it (no {STATE}: stock TRL, or an early version)"
            return "absent", self._shift(saved.checkpoint, missing), None
        then = entry["settings"]
        now = self._settings()
        changed = [f"{name} {then.get(name)} → {now[name]}" for name in now if then.get(name) != now[name]]
        if changed:
            inside = int(entry["step"]) % int(then["steps_per_generation"] * then["num_iterations"]) != 0
            other = f"is of another run ({', '.join(changed)})"
            return "changed", self._shift(saved.checkpoint, other, inside), None
        if int(entry["step"]) % self.trainer.phase.every == 0 or entry["left_out"] is not None:
            return "fits", "", None
        return "fits", "", self._load_rows(saved.checkpoint)

    def _load_rows(self, checkpoint: Path) -> list[dict[str, Any]]:
        """Read this rank's micro-batches. Raises ValueError if the file does not hold as many as a batch has."""
        accelerator = self.trainer.accelerator
        file = checkpoint / rows_file(accelerator.process_index)
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
            description = json.loads(stored.metadata()["description"])
        rows = rebuilt(description, tensors, accelerator.device)
        if not isinstance(rows, list) or len(rows) != self.trainer.args.steps_per_generation:
            raise ValueError(f"{file.name} holds no list of micro-batches")
        return rows

    def _shift(self, checkpoint: Path, why: str, inside: bool = False) -> str:
        """Return a sentence about what a resume without the open batch means: from where on the run differs. It is ""
        if the checkpoint was written at the end of a batch, where nothing is lost.

        Args:
            checkpoint: which one.
            why: why the batch cannot be used, in words.
            inside: whether the checkpoint's own settings say that it was written inside a batch.
        """
        of_step = self.trainer.args.gradient_accumulation_steps
        every = self.trainer.phase.every
        past = self.trainer.state.global_step * of_step % every
        if past == 0 and not inside:
            return ""
        return (
            f"{checkpoint} was written inside a generation batch and {why}. As in stock TRL, that batch's prompts are "
            f"generated again and trained on for {every} micro-batches, and generations after it come {past} "
            f"micro-batches late; a checkpoint at a multiple of {math.lcm(every, of_step) // of_step} optimizer steps "
            "has no such loss"
        )

    def _take(self, entry: dict[str, Any], rows: list[dict[str, Any]] | None, checkpoint: Path) -> None:
        """Restore the trainer's state from an ``entry`` that fits, and this rank's micro-batches ``rows``, if any."""
        trainer = self.trainer
        window = entry["window"]
        trainer._step = entry["step"]
        trainer._buffered_inputs = rows
        if entry["left_out"] is not None:
            trainer.recorder.say(
                f"`resume_from_checkpoint`: {checkpoint} was written without its generation batch "
                f"({entry['left_out']}): the batch is generated again, and the rest of its micro-batches are trained "
                "on that",
                level=logging.WARNING,
            )
        trainer.exact_update.verdict.saw_randomness |= entry["random_forward"]
        if window is not None:
            self._loss = (window["losses"][trainer.accelerator.process_index], window["last_logged"])
            trainer._metrics["train"].clear()
            trainer._metrics["train"].update(window["metrics"])
            trainer.recorder.book("train").take_up(window["pairs"], trainer.accelerator.device)
        for name, values in (entry["completions"] or {}).items():
            shown = trainer._logs[name]
            if isinstance(values, dict):
                columns = [(shown[key], values[key]) for key in values]
            else:
                columns = [(shown, values)]
            for held, entries in columns:
                held.clear()
                held.extend(entries)
