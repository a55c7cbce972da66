"""Decide what the exact update may do: may TRL's batches be re-cut, may rows be left out, and if not, why.

The verdict follows from the loss in force (``part_questions``), the run's settings and the model's properties
(``model_conditions``, ``grpo_lab.update.live``). If none of these forbids other batches, the model itself is tested
(``bin_probe``). The verdict is made once per generation batch, before its forwards, and made anew for

    the next generation batch         a callback may have changed the model or the run meanwhile
    the next optimizer step           if a part of the loss is a team's, whose answer may follow a schedule
    a forward that draws numbers      seen in the first optimizer step, whatever drew the random numbers
    a resume                          the batch that is taken up was judged by another process

An optimizer step keeps the verdict that it began with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from grpo_lab.trainer.exactness import model_conditions
from grpo_lab.trainer.exactness.bin_probe import BinProbe, MaskProbe, apart_from_dropout
from grpo_lab.trainer.exactness.model_conditions import RandomnessWatch
from grpo_lab.trainer.exactness.part_questions import answers, has_team_parts
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.settings.algorithm import name_of
from grpo_lab.trainer.trl_bridge import hf_runs_the_step, may_bring_images, teams
from grpo_lab.update import LiveConditions, why_all_rows, why_stock_batches

#: method → (what a team's override does with TRL's micro-batches, what keeps the exact update instead). It would see
#: no bin: all bins of a step are made inside its last ``compute_loss``
AROUND: dict[str, tuple[str, str]] = {
    "_compute_loss": ("makes the loss of", "`token_loss` is the hook that"),
    "compute_loss": ("stands around the loss of each of", "`token_loss` is the hook that"),
    "_get_per_token_logps_and_entropies": ("makes the log-probs of", "`token_loss` is the hook that"),
    "training_step": ("runs by itself the backward of", "around `super().training_step` it"),
}


@dataclass(frozen=True)
class UpdateVerdict:
    """A verdict: what may be done exactly, and why not if it may not.

    Attributes:
        stock: why batches stay as TRL cut them; None if they may be re-cut.
        all_rows: why no row is left out; None if rows may be left out.
        chosen: the reason is a setting that says just this (``update: off``, ``dead_groups: keep``), so no warning is
            due.
        draws: the forward is random (dropout, …), so that no two forwards have the same log-probs.
        rejects: a row whose sampler weight is 0 has no loss and no gradient.
    """

    stock: str | None
    all_rows: str | None
    chosen: bool = False
    draws: bool = False
    rejects: bool = False

    @staticmethod
    def as_trl(reason: str, chosen: bool = False) -> UpdateVerdict:
        """Return the verdict that everything stays as in TRL, for ``reason``."""
        return UpdateVerdict(reason, reason, chosen)


class StandingVerdict:
    """Keeps the verdict on the current generation batch; it is the same on every rank."""

    def __init__(self, trainer: StepPort) -> None:
        self._trainer = trainer
        self.probe = BinProbe(trainer)
        self.masks = MaskProbe(trainer)
        self.saw_randomness = False
        self._watch: RandomnessWatch | None = RandomnessWatch(trainer.accelerator.device)
        self._found: UpdateVerdict | None = None
        self._asked_at: tuple[int, int | None] | None = None

    def now(self) -> UpdateVerdict:
        """Return the verdict. If it no longer holds it is made anew, which is a collective, so every rank must call
        this."""
        at = self._trainer.phase.start, self._trainer.state.global_step if has_team_parts(self._trainer) else None
        if self._found is None or at != self._asked_at:
            self._found = self._asked(ask_model=True)
            self._asked_at = at
        return self._found

    def so_far(self) -> UpdateVerdict:
        """Return the verdict in force or, before there is one, what is known without testing the model itself; for
        display."""
        return self._found or self._asked(ask_model=False)

    def forget(self) -> None:
        """Drop the verdict, so that the next call of ``now`` makes it anew."""
        self._found = None

    @property
    def _model(self) -> nn.Module:
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block whether the forwards of the first step draw random numbers other than those of known
        dropout."""
        if self._watch is None:
            yield
            return
        dropout: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if model_conditions.dropout_rate(self._model) > 0:
            dropout = apart_from_dropout(self._watch)
        self._watch.start()
        with dropout:
            yield
        self._watch.stop()

    def after_first_step(self) -> None:
        """Make the verdict anew if a forward of the first step drew random numbers; TRL's batches are kept from then
        on. The first call is a collective."""
        if self._watch is not None and self._watch.drawn_anywhere(self._trainer.accelerator):
            self.saw_randomness = True
            self.forget()
        self._watch = None

    def _asked(self, ask_model: bool) -> UpdateVerdict:
        """Return the verdict by what is known now; ``ask_model``: also by testing the model itself."""
        random = {
            "dropout": model_conditions.dropout_rate(self._model),
            "shared_dropout": model_conditions.shared_dropout_rate(self._model),
            "layer_drop": model_conditions.layer_drop_rate(self._model),
            "router_noise": model_conditions.router_noise(self._model),
            "embedding_noise": self._trainer.args.neftune_noise_alpha or 0.0,
            "random_forward": self.saw_randomness,
        }
        return replace(self._judged(ask_model, random), draws=any(random.values()))

    def _judged(self, ask_model: bool, random: dict[str, Any]) -> UpdateVerdict:
        """Return the verdict but for ``draws``. ``random``: the conditions of ``LiveConditions`` that concern random
        numbers."""
        trainer = self._trainer
        if trainer.lab_settings.update.is_off:
            return UpdateVerdict.as_trl("update is 'off'", chosen=True)
        for method, (does, instead) in AROUND.items():
            home = teams(trainer, method)
            if home is not None and not (method == "training_step" and (hf_runs_the_step() or not ask_model)):
                return UpdateVerdict.as_trl(f"`{home}` {does} TRL's micro-batches; {instead} keeps the exact update")
        objective = trainer.algorithm.objective
        if objective is None:
            return UpdateVerdict.as_trl(f"the loss is left to TRL ({trainer.algorithm.left_to_trl})")
        parts = answers(trainer, objective)
        if parts.stock is not None:
            return UpdateVerdict.as_trl(parts.stock)
        conditions = LiveConditions(
            kl_in_loss=0.0 if objective.kl_in_loss is None else objective.kl_in_loss.coefficient,
            value_loss=0.0 if trainer.algorithm.value is None else trainer.algorithm.value.vf_coef,
            entropy_bonus="" if objective.entropy is None else objective.entropy.in_words(),
            pull=parts.pull,
            moe_aux_loss=trainer.router_aux_loss_coef if trainer.aux_loss_enabled else 0.0,
            same_draws=trainer.lab_settings.randomness == "same_draws",
            mixed_rows=model_conditions.mixes_rows(self._model, trainer.accelerator.mixed_precision),
            moved_positions=model_conditions.moves_positions(self._model),
            state_reads_padding=model_conditions.padding_reaches_state(self._model),
            local_average=name_of(objective.aggregate) if objective.local_denominator else "",
            multimodal=may_bring_images(trainer),
            **random,
        )
        stock = why_stock_batches(conditions)
        all_rows = why_all_rows(conditions)
        if stock is not None and trainer.lab_settings.update.randomness == "same_draws":
            chosen = why_stock_batches(replace(conditions, same_draws=False)) is None
            return UpdateVerdict(stock, all_rows, chosen)
        if stock is None and ask_model:
            differs = self.probe.why_stock() or (self.masks.why_stock() if conditions.dropout > 0 else None)
            if differs is not None:
                return UpdateVerdict.as_trl(differs)
        if stock is None and objective.selecting and any(random.values()):
            return UpdateVerdict.as_trl(
                f"{name_of(objective.selecting[0])} chooses tokens by a forward of its own, which would draw another "
                "dropout than the one that trains; disable_dropout=True, lora_dropout=0 switch it off"
            )
        if all_rows is None and trainer.lab_settings.update.dead_groups == "keep":
            return UpdateVerdict(stock, "update.dead_groups is 'keep'", chosen=True)
        return UpdateVerdict(stock, all_rows, rejects=parts.rejects)
