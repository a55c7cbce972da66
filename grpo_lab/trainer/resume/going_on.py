"""Where a training goes on: in the order of its epoch, with the checkpoint's random numbers, and not beyond its last
step.

TRL 1.16 shuffles by a generator of the sampler's own, one permutation an epoch after the other, and a resumed run
begins with the first of them: from a checkpoint in the second epoch on it sees rows again that this epoch has had, and
others not at all. Here as many are drawn as epochs are over.

transformers 5.17 makes one step more where a checkpoint has all steps already (its data loader begins before it
counts). Here nothing is trained then: a finished run that is resumed stays where it is, to the bit. Callbacks hear of a
beginning and an end, and ``train_loss`` is that of the log.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import safe_open
from trl.trainer.utils import RepeatSampler

from grpo_lab.trainer.ranks import RankAwareTrainer
from grpo_lab.trainer.resume.which import chosen, load_other_names, refuse_lacking
from grpo_lab.trainer.trl_bridge import is_critics


class ResumableTrainer(RankAwareTrainer):
    """``GRPOTrainer`` whose resumed training makes up the evaluation that was due, and ends where it had ended."""

    _at_its_end: str | None = None
    _order: Any = None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._order = super()._get_train_sampler(dataset)
        return self._order

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        given = (max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
        epochs, batches = super()._init_training_state(*given)
        done = resume_from_checkpoint is not None and 0 < max_steps <= self.state.global_step
        self._at_its_end = resume_from_checkpoint if done else None
        if resume_from_checkpoint is not None and not self.args.ignore_data_skip:
            pass_epochs(self._order, epochs)
        return (num_train_epochs, 0) if done else (epochs, batches)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(chosen(self, resume_from_checkpoint), *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        policy: Any = self.model
        adapter = Path(resume_from_checkpoint) / "adapter_model.safetensors"
        if model is None and getattr(policy, "peft_config", None) and adapter.is_file():  # not wrapped by FSDP
            wanted = get_peft_model_state_dict(
                policy, adapter_name=policy.active_adapters[0], save_embedding_layers=False
            )
            with safe_open(adapter, framework="pt") as stored:
                there = set(stored.keys())
            refuse_lacking(wanted.keys() - there, there - wanted.keys(), len(wanted))
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

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """transformers warns of a missing tensor in the middle of a log."""
        state, missing = self.model.state_dict(), set(load_result.missing_keys)
        there = {one.data_ptr() for name, one in state.items() if name not in missing}  # of what is tied one is saved
        lacking = {name for name in missing if state[name].data_ptr() not in there and not is_critics(name)}
        refuse_lacking(lacking, load_result.unexpected_keys, len(state))
        super()._issue_warnings_after_load(load_result)

    def _load_rng_state(self, checkpoint: Any) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            parts: Any = self.parts  # LabTrainer's
            parts.due_evaluation.make_up()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        if self._at_its_end is not None:
            self.say(f"all {self.state.max_steps} steps are done: nothing to train")
            self._load_rng_state(self._at_its_end)
            self._total_loss_scalar += logged_loss(self.state.log_history)
        return super()._finalize_training(trial, num_train_samples, start_time)


def mismatch(error: RuntimeError) -> str:
    """torch's list of tensors that do not fit, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
    return f"{lines[0]}{f' And {len(lines) - 1} more' if lines[1:] else ''}" if lines else str(error).replace("\n", " ")


def pass_epochs(sampler: Any, epochs: int) -> None:
    """TRL's sampler as it is after so many epochs; any other is left alone (ours save where they are)."""
    if isinstance(sampler, RepeatSampler) and sampler.shuffle:
        for _ in range(epochs):
            torch.randperm(sampler.num_samples, generator=sampler.generator)


def logged_loss(history: list[dict[str, Any]]) -> float:
    """Σ of the steps' losses, from logs that hold the mean since the one before."""
    total, last = 0.0, 0
    for row in history:
        if "loss" in row:
            lost = math.isnan(row["loss"])  # to HF, which filters NaN, its loss was 0
            total, last = total + (0.0 if lost else row["loss"]) * (row["step"] - last), row["step"]
    return total
