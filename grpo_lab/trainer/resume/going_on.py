"""Resume a training from the newest checkpoint that is whole and finite on every node, or from a given one. It goes on
in the order of its epoch, with the checkpoint's random numbers, and not beyond its last step.

TRL 1.16 shuffles by the sampler's own random generator, one permutation for each epoch. A resumed run of TRL's begins
with the first permutation again. So if it resumes in a later epoch, it repeats some rows of this epoch and never sees
others. Here a permutation is drawn and dropped for each epoch that is over (``EpochOrderMixin``).

transformers 5.17 makes one step more if a checkpoint already has all steps (its data loader begins before it counts).
Here nothing is trained then: a finished run that is resumed stays the same, to the bit. Callbacks still get a beginning
and an end, and the ``train_loss`` that is returned is computed from the log.

transformers saves some models (LLaVA and other vision models) under the tensor names of their first release.
``Trainer`` looks for the model's present names, finds none, warns, and would go on from the run's start weights. Here
the tensors are loaded under the other names (``load_other_names``).
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import get_peft_model_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel
from trl.trainer.utils import RepeatSampler

from grpo_lab.reading import read_record
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.ranks import RankAwareTrainer
from grpo_lab.trainer.resume.whole import MARK, broken_pickles, damaged, lacking, newest_whole, step_of
from grpo_lab.trainer.trl_bridge import is_critics


class VerifiedCheckpoint(str):
    """The path of a checkpoint that was verified by its checksums just now, and is not verified a second time."""


def chosen(trainer: UpdatePort, given: Any) -> Any:
    """Return the checkpoint that the argument ``given`` of ``resume_from_checkpoint`` means. ``True`` is the newest
    *whole* one in the output folder, or stays ``True`` if the folder has no checkpoint. Raises ValueError if there are
    checkpoints but none is whole, or if the given one is damaged. Every rank calls this."""
    reads = trainer.args.local_process_index == 0
    if given is True:
        newest, passed = newest_read(Path(trainer.args.output_dir), reads)
        if newest is None and passed:
            none = f"`resume_from_checkpoint` is True, and no checkpoint in {trainer.args.output_dir} is whole"
            raise ValueError(f"{none}: {'; '.join(passed)}")
        for why in passed:
            trainer.recorder.say(f"`resume_from_checkpoint`: passed over {why}", level=logging.WARNING)
        if newest is not None:
            given = VerifiedCheckpoint(newest)
    if isinstance(given, str | os.PathLike):
        if not isinstance(given, VerifiedCheckpoint):
            _refuse_damaged(Path(given), reads)
        _say_what_starts_anew(trainer, Path(given))
    return given


def _say_what_starts_anew(trainer: UpdatePort, checkpoint: Path) -> None:
    """Warn if a checkpoint lacks optimizer, schedule or random numbers; transformers does not."""
    rank = ""
    if trainer.accelerator.num_processes != 1:
        rank = f"_{trainer.accelerator.process_index}"
    own = [name for name in lacking(checkpoint) if name != "rng_state.pth"]
    own += [] if (checkpoint / f"rng_state{rank}.pth").is_file() else [f"rng_state{rank}.pth"]
    if missing := sorted(set(gather_object(own if checkpoint.is_dir() else []))):
        trainer.recorder.say(
            f"`resume_from_checkpoint`: {checkpoint} holds no {', '.join(missing)} (`save_only_model`, another number "
            "of processes, or it was removed): that starts anew, and the run is no longer the one that was saved",
            level=logging.WARNING,
        )


def newest_read(folder: Path, reads: bool, content: bool = True) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint in ``folder`` that is whole on every node, or None, and why newer ones were passed
    over. Every rank calls this and gets the same answer; one process of each node reads the files (``reads``). With
    ``content`` the content of the files is verified, too."""
    own = None
    if reads:
        own = newest_whole(folder, read=content)
    answers = [one for one in gather_object([own]) if one is not None]
    passed = list(dict.fromkeys(why for _, words in answers for why in words))
    found = min((place for place, _ in answers if place is not None), key=step_of, default=None)
    return None if any(place is None for place, _ in answers) else found, passed


def _refuse_damaged(checkpoint: Path, reads: bool) -> None:
    """Raise ValueError on every rank if a process that ``reads`` finds the checkpoint damaged."""
    own = None
    if reads:
        own = broken_pickles(checkpoint) or damaged(checkpoint)
    if why := next(filter(None, gather_object([own])), None):
        despite = ""
        if (checkpoint / MARK).is_file():
            despite = f"; to go on from this one all the same, remove {MARK} in it"
        raise ValueError(f"`resume_from_checkpoint`: {checkpoint}: {why}. Take another checkpoint{despite}")


class EpochOrderMixin:
    """Mixin for TRL's trainers that use a `RepeatSampler`: a resumed training continues in its epoch's order."""

    _order: Any = None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._order = super()._get_train_sampler(dataset)  # type: ignore[misc]
        return self._order

    def _init_training_state(self: Any, max_steps: int, *more: Any) -> tuple[int, int]:
        """Return the epochs and batches that are over, and drop a permutation of the rows for each of these epochs."""
        epochs, batches = super()._init_training_state(max_steps, *more)  # type: ignore[misc]
        ordered = isinstance(self._order, RepeatSampler) and self._order.shuffle  # our own samplers save their place
        if ordered and not self.args.ignore_data_skip:
            for _ in range(epochs):
                torch.randperm(self._order.num_samples, generator=self._order.generator)
        return epochs, batches


class ResumableTrainer(EpochOrderMixin, RankAwareTrainer):
    """A ``GRPOTrainer`` that resumes as this module's docstring says: from a whole checkpoint, with all of its tensors,
    in its epoch's order, and without a further step if the run had ended."""

    _at_its_end: str | None = None

    def _init_training_state(
        self, max_steps: int, updates_per_epoch: int, num_epochs: int, checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Return the epochs and batches that are over; all epochs if the checkpoint has all steps."""
        epochs, batches = super()._init_training_state(max_steps, updates_per_epoch, num_epochs, checkpoint, trial)
        done = checkpoint is not None and 0 < max_steps <= self.state.global_step
        self._at_its_end = checkpoint if done else None
        if done:
            return (num_epochs, 0)
        return (epochs, batches)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(chosen(self, resume_from_checkpoint), *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint. Raises ValueError if it lacks tensors of the model or has other shapes."""
        policy: Any = self.model
        adapter = Path(resume_from_checkpoint) / "adapter_model.safetensors"
        if model is None and getattr(policy, "peft_config", None) and adapter.is_file():  # and not under FSDP
            name = policy.active_adapters[0]
            wanted = get_peft_model_state_dict(policy, adapter_name=name, save_embedding_layers=False).keys()
            there = _names_in(adapter)
            refuse_lacking(wanted - there, there - wanted, len(wanted))
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            said = f"`resume_from_checkpoint`: {resume_from_checkpoint} is of another model: {mismatch(error)}"
            raise ValueError(said) from error
        load_other_names(self, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        load_other_names(self, self.state.best_model_checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """End the training. If there was nothing to train, its loss is computed from the log."""
        if self._at_its_end is not None:
            self.say(f"all {self.state.max_steps} steps are done: nothing to train")
            self._load_rng_state(self._at_its_end)
            last = 0.0
            for row in self.state.log_history:  # its loss is the mean since the row before
                if "loss" in row:
                    lost = math.isnan(row["loss"])  # HF counts such a loss as 0
                    self._total_loss_scalar += 0.0 if lost else row["loss"] * (row["step"] - last)
                    last = row["step"]
        return super()._finalize_training(trial, num_train_samples, start_time)


def load_other_names(trainer: UpdatePort, checkpoint: str) -> None:
    """Load the tensors of a checkpoint by ``from_pretrained``, which knows their earlier names, if ``Trainer`` did not
    find some of them; else do nothing. Adapters, FSDP and DeepSpeed are left to transformers. Raises ValueError if the
    checkpoint lacks a tensor of the model under any name."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return  # adapters, FSDP and DeepSpeed have formats of their own
    state = model.state_dict()
    names = set[str]()
    index = Path(checkpoint) / "model.safetensors.index.json"
    if index.is_file():
        names = set(read_record(index, {"weight_map": dict})["weight_map"])
    elif (Path(checkpoint) / "model.safetensors").is_file():
        names = _names_in(Path(checkpoint) / "model.safetensors")
    there = {state[name].data_ptr() for name in names & state.keys()}  # tied tensors are saved once
    passed_over = [name for name, one in state.items() if one.data_ptr() not in there and not is_critics(name)]
    if names and passed_over:
        refuse_lacking(passed_over, names - state.keys(), len(state))
        read: Any = type(model).from_pretrained
        whole, found = read(checkpoint, dtype="auto", output_loading_info=True)
        refuse_lacking(found["missing_keys"], (), len(state))
        model.load_state_dict(whole.state_dict(), strict=False)


def refuse_lacking(missing: Collection[str], unexpected: Collection[str], of: int) -> None:
    """Raise ValueError if more tensors of the model are ``missing`` in a checkpoint than there are ``unexpected`` ones,
    so that not all can be the same tensors under other names. ``of``: number of the model's tensors."""
    if len(missing) > len(unexpected):
        raise ValueError(
            f"`resume_from_checkpoint`: the checkpoint lacks {len(missing)} of {of} tensors of the model "
            f"({min(missing)}, …): it is not whole, or of another model; take another one (renamed, this one is passed "
            "over)"
        )


def _names_in(file: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file."""
    with safe_open(file, framework="pt") as stored:
        return set(stored.keys())


def mismatch(error: RuntimeError) -> str:
    """Return one line of torch's error about tensors of another shape: the first tensor, and how many more there are.
    If the error names none, return all of it as one line."""
    lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
    if lines:
        return f"{lines[0]}{f' And {len(lines) - 1} more' if lines[1:] else ''}"
    return str(error).replace("\n", " ")
