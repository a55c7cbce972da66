"""The numbers guard: an optimizer step with a NaN or an infinity in it is left out, on every rank, and counted.

    loss        of a micro-batch of the step, on any rank
    gradient    its norm over all ranks and parameters, which HF computes anyway
    reward      a reward, or a team's ``_calculate_rewards``, returned an infinity (NaN: cannot be scored, as in TRL)
    log_prob    the engine's log-prob of a sampled token is NaN or infinite (None: not scored, as in TRL)
    advantage   the rule made of finite rewards something that is not finite

The last three concern a generation batch: all steps on it are left out. HF's loop computes the norm just before the
optimizer's step. There the ranks agree (one small gather if there are several, one scalar read). The optimizer's next
``step`` then does nothing: weights, moments and learning-rate schedule stay, and gradients are dropped. A step whose
numbers are finite is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import OF_BATCH, Faults, UpdatePort
from grpo_lab.trainer.ranks import TO_START_FROM, NumbersError, named_place, names_of_bad, refuse_bad_weights
from grpo_lab.trainer.resume.state import SavedState
from grpo_lab.trainer.resume.whole import damaged, step_of, what_is_broken
from grpo_lab.trainer.step.bad_step import FOLDER, keep_bad_step

OF_STEP = ("loss", "gradient")
KINDS = (*OF_STEP, *OF_BATCH)


class NumbersGuard(TrainerCallback):  # type: ignore[misc]
    """Leaves out steps with a number that is not finite. A trainer has one. It does nothing if ``guard`` is not in
    force (``faults`` is None).

    Attributes:
        in_a_row: bad steps since the last one that was taken; a bad generation batch counts once.
        taken: number of the last optimizer step that was taken.

    Raises:
        ValueError: ``guard`` is asked for with DeepSpeed, whose engine steps inside the backward.
    """

    holds = "once `guard` left a step out: how many in a row, the last good step, whether the open batch is bad"

    def __init__(self, trainer: UpdatePort) -> None:
        settings = trainer.lab_settings.guard_in_force
        if settings is not None and trainer.is_deepspeed_enabled:
            if trainer.lab_settings.guard is not None:
                raise ValueError(
                    "`guard` is on with DeepSpeed, whose engine takes the optimizer's step inside the backward, before "
                    "anyone has seen the gradient norm: use DDP or FSDP2 (recipes/accelerate), or set `guard: off`"
                )
            trainer.recorder.say("DeepSpeed takes its steps itself: the guard against NaN (`guard`) is off")
            settings = None
        self.trainer = trainer
        self.settings = settings
        self.faults = trainer.recorder.faults = None if settings is None else Faults()
        self._loaded: dict[str, Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self.in_a_row = 0
        self.taken = 0
        self._counted = 0  # number of the bad generation batch that was counted last
        self._seen = False  # whether any step was bad
        self._loss_is_bad: Tensor | None = None
        self._left_out = False  # the current step
        self._finite_at = 0  # step after which the weights were last seen to be finite

    def watch_loss(self, loss: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Note whether a micro-batch's loss is finite, and return it unchanged; nothing is read from the device."""
        if self.faults is not None:
            self.faults.trained_on(inputs)
            bad = ~loss.detach().isfinite().all()
            if self._loss_is_bad is None:
                self._loss_is_bad = bad
            else:
                self._loss_is_bad = self._loss_is_bad | bad
        return loss

    def before_generation(self) -> None:
        """Raise NumbersError if the weights are not finite, before an engine gets them or a training ends with them. A
        collective."""
        if self.faults is not None and self.trainer.state.global_step != self._finite_at:
            self._refuse_broken_weights()

    def _refuse_broken_weights(self) -> None:
        """Raise NumbersError if weights are not finite. A finite gradient can break them (in fp16 Adam's ε is 0)."""
        done = self.trainer.state.global_step
        if bad := names_of_bad(self.trainer):
            raise NumbersError(
                f"after step {done} the weights hold NaN or infinities, {bad}, though all numbers of the steps taken "
                "were finite: look at the optimizer (weights in fp16, `adam_epsilon`, `learning_rate`). After step "
                f"{self._finite_at} they were finite. {last_good(str(self.trainer.args.output_dir), done)}"
            )
        self._finite_at = done

    def engine_fault(self, fault: Exception) -> None:
        """Mark the batch as bad, because a log-prob of vLLM is not finite. In an evaluation raise ``fault``, that
        error."""
        faults = self.trainer.recorder.faults_in_training
        if faults is None:
            raise fault
        faults.found("log_prob", str(fault))

    def check_gradient(self, norm: Any) -> Any:
        """Leave out the coming step if a number is not finite; return the gradient norm unchanged. A collective.

        Raises NumbersError after ``max_bad_steps`` bad steps in a row.
        """
        if self.faults is None:
            return norm
        if hasattr(norm, "full_tensor"):
            whole = norm.full_tensor()
        else:
            whole = norm
        whole = torch.as_tensor(0.0 if whole is None else whole, device=self.trainer.accelerator.device)
        found = self._agreed(self.faults, whole)
        self.faults.bad.update(kind for kind in OF_BATCH if found[kind] == self.faults.batch)
        bad = [kind for kind in KINDS if found[kind]]
        if bad == ["gradient"] and trl_bridge.overflow_of_scaler(self.trainer.accelerator):
            bad = []
        self._count(bad)
        if bad:
            self._leave_out(self.faults, bad, max(found[kind] for kind in OF_BATCH), whole)
        else:
            self.in_a_row = 0
            self.taken = self.trainer.state.global_step + 1
        self.faults.end_step()
        return norm

    def _agreed(self, faults: Faults, found: Tensor) -> dict[str, int]:
        """Return kind → 0 if the kind is finite on all ranks; else 1, or the number of the latest bad generation batch.
        ``found`` is the gradient norm. A collective."""
        accelerator = self.trainer.accelerator
        fine = torch.zeros_like(found, dtype=torch.bool)
        loss = self._loss_is_bad
        self._loss_is_bad = None
        flags = torch.stack([fine if loss is None else loss.to(fine.device), ~found.isfinite()])
        of_batch = torch.tensor([faults.of_step.get(kind, 0) for kind in OF_BATCH], device=accelerator.device)
        local = torch.cat([flags.long(), of_batch])
        if accelerator.num_processes > 1:
            with named_place("whether all numbers are finite"):
                local = accelerator.gather(local.unsqueeze(0)).amax(0)
        return dict(zip(KINDS, local.tolist(), strict=True))

    def _count(self, bad: list[str]) -> None:
        """Log ``guard/*`` for every step from the first bad one on. With the first bad one, the steps before it in its
        logging window are counted, too."""
        if not bad and not self._seen:
            return
        trainer = self.trainer
        fine = 0
        if not self._seen:
            fine = trainer.state.global_step - trainer.last_logged_step
        self._seen = True
        counted = {"left_out": bool(bad)} | {kind: kind in bad for kind in KINDS}
        for name, counts in counted.items():
            one = torch.tensor(float(counts), device=trainer.accelerator.device)
            trainer.recorder.book("train").add_alike(f"guard/{name}", one, fine + 1)

    def _leave_out(self, faults: Faults, bad: list[str], batch: int, norm: Tensor) -> None:
        """Leave out the coming step. A generation batch that was counted as bad before is not counted again.

        Args:
            faults: what was not finite.
            bad: kinds that are not finite.
            batch: number of the bad generation batch; 0 if none is bad.
            norm: the gradient norm.
        """
        of_step = bool(set(bad) & set(OF_STEP))
        if of_step:
            self._refuse_broken_weights()
        counts = of_step or batch != self._counted
        self._counted = batch
        if counts:
            self._tell(faults, bad, norm)
        # last, so that after an error no step of a later training is left out
        trl_bridge.leave_out_step(self.trainer.optimizer)
        self._left_out = True

    def _tell(self, faults: Faults, bad: list[str], norm: Tensor) -> None:
        """Keep the bad step's batch, if ``guard.save`` asks for it, and report it. Raise NumbersError if it is bad step
        number ``guard.max_bad_steps`` in a row."""
        assert self.settings is not None
        self.in_a_row += 1
        step = self.trainer.state.global_step + 1
        limit = self.settings.max_bad_steps
        kinds = ", ".join(bad)
        facts = {"step": step, "not_finite": bad, "grad_norm": str(float(norm))}
        facts |= {"in_a_row": self.in_a_row, "max_bad_steps": limit}
        kept = None
        if self.settings.save:
            kept = keep_bad_step(self.trainer, faults, facts)
        said = f"step {step} is left out: {kinds} not finite ({self.in_a_row} in a row, {limit} stop the run)"
        self.trainer.recorder.say(said if kept is None else f"{said}; {kept}", level=logging.WARNING)
        if self.in_a_row >= limit:
            folder = str(self.trainer.args.output_dir)
            batches = ""
            if self.settings.save:
                batches = f" The batches are in {folder}/{FOLDER}."
            raise NumbersError(
                f"{limit} optimizer steps in a row could not be taken, the last one {step}: {kinds} not finite "
                f"(`guard.max_bad_steps`). The weights are as after step {self.taken}.{batches} "
                f"{last_good(folder, self.taken)}"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse weights that are not finite, and start the counts at 0 or where the checkpoint left them."""
        if self.faults is None:
            return
        self._forget()
        self.faults.forget()
        refuse_bad_weights(self.trainer, TO_START_FROM)
        self.taken = self._finite_at = state.global_step
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return
        self.in_a_row = loaded["in_a_row"]
        self.taken = loaded["taken"]
        self._seen = loaded["seen"]
        if loaded["bad_batch"] and not self.trainer.phase.at_end:  # the open generation batch was taken up, too
            self.faults.bad.update(loaded["bad_batch"])
            self._counted = self.faults.batch = 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the mark that a left-out step has put on the optimizer."""
        if self._left_out:
            trl_bridge.step_was_taken(self.trainer.optimizer)
            self._left_out = False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.before_generation()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Reset HF's running loss after a bad step: HF's own ``tr_loss -= tr_loss`` keeps a NaN."""
        if self._seen and logs and "loss" in logs:
            trl_bridge.forget_running_loss(self.trainer)

    def save(self, _folder: Path) -> dict[str, Any] | None:
        """Return the checkpoint entry: the bad steps in a row, the last step taken, and which kinds of values of the
        open generation batch are bad. None if no step was ever bad."""
        if self.faults is None or not self._seen:
            return None
        bad = []
        if not self.trainer.phase.at_end:
            bad = sorted(self.faults.bad)
        return {"in_a_row": self.in_a_row, "taken": self.taken, "seen": True, "bad_batch": bad}

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` returned."""
        self._loaded = None
        if self.faults is not None and saved is not None:
            self._loaded = saved.entry("guard", _checked, "the count of bad steps then starts at 0")


def last_good(folder: str, taken: int) -> str:
    """Return a sentence that names the checkpoint to go back to: the newest whole one with the weights of step
    ``taken``, the last step taken, or of an earlier step."""
    places = sorted((place for place in Path(folder).glob("checkpoint-*") if step_of(place) >= 0), key=step_of)
    wanted = [place for place in reversed(places) if step_of(place) <= taken]
    later = [place for place in places if step_of(place) > taken]  # written while steps were left out: the same weights
    good = next((place for place in (*wanted, *later) if not (what_is_broken(place) or damaged(place))), None)
    if good is None:
        return f"There is no checkpoint in {folder} to go back to (`save_strategy`, `save_steps`)."
    return (
        f"Last good checkpoint: {good}; once the cause is mended: `grpo-lab train … --resume` (from the newest one), "
        f"or trainer.train(resume_from_checkpoint={str(good)!r})"
    )


def _checked(state: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := set(state["bad_batch"]) - set(OF_BATCH):
        raise ValueError(f"kinds {sorted(unknown)}")
    found = {"in_a_row": int(state["in_a_row"]), "taken": int(state["taken"]), "seen": bool(state["seen"])}
    return {**found, "bad_batch": list(state["bad_batch"])}
