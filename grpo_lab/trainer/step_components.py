"""The components that act in a step beside TRL's trainer. ``LabTrainer`` builds them once, after TRL's constructor, and
calls them as ``self.parts``. Most are callbacks, too; ``stateful`` lists those whose state a checkpoint keeps."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo_lab.objectives import Correction
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.arguments import ResolvedArguments
from grpo_lab.trainer.critic import CriticAlone, with_critic
from grpo_lab.trainer.exactness.loss_proof import has_formula, prove_correction, prove_loss
from grpo_lab.trainer.generation.in_step import thinking_rollout
from grpo_lab.trainer.generation.overlap import Overlap
from grpo_lab.trainer.generation.partial import PartialRollouts
from grpo_lab.trainer.generation.prompt_fit import check_training_prompts
from grpo_lab.trainer.generation.prompt_order import PromptOrder
from grpo_lab.trainer.generation.read_ahead import ReadAhead, batches_ahead
from grpo_lab.trainer.generation.rollout_ports import EngineHooks
from grpo_lab.trainer.generation.trajectories import Trajectories
from grpo_lab.trainer.generation.trl_engine import SyncProof, hook_in
from grpo_lab.trainer.metrics.profile import Profile
from grpo_lab.trainer.metrics.progress import HealthLine, one_line_for
from grpo_lab.trainer.ports import Collectives, Numbers, Phase
from grpo_lab.trainer.resume.checkpoint import Together
from grpo_lab.trainer.resume.generation_buffer import GenerationBuffer
from grpo_lab.trainer.resume.going_on import ResumableTrainer
from grpo_lab.trainer.resume.state import GeneratedTokens, SavedState, Stateful, write_state
from grpo_lab.trainer.resume.stop import DueEvaluation, StopOnRequest
from grpo_lab.trainer.scoring.kl_penalty import KLController
from grpo_lab.trainer.scoring.preference_training import PreferenceInTraining
from grpo_lab.trainer.scoring.resample import Resampler
from grpo_lab.trainer.scoring.reward_table import WeightSchedules, check_steps
from grpo_lab.trainer.settings import knobs
from grpo_lab.trainer.settings.algorithm import Algorithm
from grpo_lab.trainer.settings.correction import correction_in_force, take_over_correction
from grpo_lab.trainer.settings.inputs import check_critic, check_requires, shared_names, uneven_evaluation
from grpo_lab.trainer.settings.silenced import SilencedSettings
from grpo_lab.trainer.step.exact_update import ExactUpdate
from grpo_lab.trainer.step.guard import NumbersGuard
from grpo_lab.trainer.step.iteration import MovingReference, OptimizerReset, idle_pull

#: Entries of ``stateful`` that a checkpoint of weights alone (``save_only_model``) leaves out.
BESIDE_WEIGHTS = ("reference", "kl", "preference", "without_moments")


class StepComponents:
    """Holds one object of each component. A component that the settings do not ask for does nothing; ``critic`` and
    ``optimizer_reset`` are None then. The constructor also adds callbacks to the trainer and, for a thinking budget,
    sets its rollout function.

    Attributes:
        prompts: which prompt comes next (``sampler``, ``tasks``).
        ahead: the prompts that are read before their turn.
        overlap: the request for the next generation batch, made while this one trains (``rollout.overlap``).
        partial: completions that are continued later (``rollout.cut_after``).
        trajectories: completions in several turns (``rollout.turns``).
        sync_proof: the comparison of the engine's weights with the trainer's.
        generated: the number of tokens that the policy has generated.
        weight_schedules: the weights of the rewards (``reward_schedules``).
        preference: the reward model that is trained during the run.
        resampler: prompts drawn in place of dead groups (``update.dead_groups: resample``).
        kl: β of the KL penalty in the reward.
        critic: the value network of PPO.
        update: the exact update.
        guard: steps that are left out because a number is not finite (``guard``).
        optimizer_reset: the reset of the optimizer after each generation batch (``reset_optimizer``).
        reference: moves the reference model (``reference_every``), and keeps a moved one in checkpoints.
        generation_buffer: the open generation batch, as a checkpoint keeps it.
        due_evaluation, stop: an evaluation still due after a resume; the stop on request.
        stateful: the components whose state a checkpoint keeps, by the names of its entries and in their order.
    """

    def __init__(self, trainer: GRPOTrainer, resolved: ResolvedArguments) -> None:
        check_requires(trainer)
        self._args = trainer.args
        algorithm = resolved.algorithm
        settings = resolved.settings
        take_over_correction(trainer)
        check_critic(algorithm.value, trl_bridge.teams(trainer, "_compute_loss"), (trainer.optimizer, None))
        self.critic = with_critic(trainer, algorithm.value)
        kl = None
        if algorithm.objective is not None:
            kl = algorithm.objective.kl_in_reward
        own_hook = trl_bridge.teams(trainer, "compute_advantages") is not None
        check_steps(trainer.reward_funcs, algorithm.advantage, own_hook, trainer._tokenizer, kl)
        trainer.rollout_func = thinking_rollout(trainer, settings.rollout, resolved.environment_factory)
        self.prompts = PromptOrder(settings, trainer.args, trainer.num_generations, trainer.phase.every)
        self.sync_proof = SyncProof(trainer, settings.rollout)
        self.trajectories = Trajectories(trainer, settings.rollout, self.sync_proof)
        batches = batches_ahead(settings.rollout, trainer.max_completion_length)
        self.ahead = ReadAhead(batches * trainer.phase.every)
        self.overlap = Overlap(trainer, settings.rollout, self.ahead)
        self.generated = GeneratedTokens()
        self.partial = PartialRollouts(trainer, settings.rollout, self.ahead, self.generated)
        self.weight_schedules = WeightSchedules(trainer, settings.reward_schedules)
        self.preference = PreferenceInTraining(trainer)
        self.resampler = Resampler(trainer)
        self.update = ExactUpdate(trainer)
        self.guard = NumbersGuard(trainer)
        self.optimizer_reset = OptimizerReset(trainer) if resolved.args.reset_optimizer else None
        self.reference = MovingReference(trainer, resolved.args.reference_every)
        self.kl = KLController(trainer)
        self.generation_buffer = GenerationBuffer(trainer)
        self.due_evaluation = DueEvaluation(trainer)
        self.stop = StopOnRequest(trainer, self.due_evaluation)
        self.stateful: dict[str, Stateful] = {
            "generated": self.generated,
            "sampler": self.prompts,
            "generation": self.generation_buffer,
            "waiting": self.partial,
            "guard": self.guard,
            "budget": self.update.budget,
            "silent_rows": self.update.silent,
            "evaluation_due": self.due_evaluation,
            "reference": self.reference,
            "kl": self.kl,
            "preference": self.preference,
            "without_moments": WithoutMoments(trainer),
        }
        self._add_callbacks(trainer)
        if trainer.use_vllm:
            hook_in(trainer.vllm_generation, self._engine_hooks(trainer))
            check_training_prompts(trainer, trl_bridge.teams(trainer, "_tokenize_prompts") is not None)

    def _engine_hooks(self, trainer: GRPOTrainer) -> EngineHooks:
        """Return the callbacks that the engine gets: for waits, for bytes sent, for faults and for proofs."""

        def record(moved: int) -> None:
            trainer.recorder.book().add_alike("rollout/sync_bytes", torch.tensor([moved]), 1)

        def prove(prompts: list[list[int]]) -> None:
            # for partial rollouts only the prompts: half a completion leaves no room
            self.sync_proof.prove(self.partial.asked or prompts, strict=True)

        on_fault = None
        if self.guard.faults is not None:
            on_fault = self.guard.engine_fault
        return EngineHooks(self.stop.wait, record, on_fault, prove)

    def _add_callbacks(self, trainer: GRPOTrainer) -> None:
        """Add the components' callbacks to the trainer: some before all others, in the order in which they must act."""
        trainer.add_callback(self.stop)
        trainer.add_callback(SilencedSettings(trainer))
        trainer.add_callback(self.trajectories.journals)
        if trainer.args.profile:
            trainer.add_callback(Profile(trainer))
        if trainer.lab_settings.token_weights_every is not None:
            trainer.add_callback(self.update.weights)
        if trainer.lab_settings.objective is not None:  # without it the run logs what stock TRL logs
            success = getattr(trainer.algorithm.advantage, "success", None)
            trainer.add_callback(HealthLine(own_loss=has_own_loss(trainer), success=success))
            one_line_for(trainer)
        # before all others: the due evaluation belongs to the step before, others may write a checkpoint with the
        # generation buffer in it, and they see an optimizer that was reset
        first: list[Any] = [self.due_evaluation, self.generation_buffer]
        if self.update.budget.is_auto:
            first.append(self.update.budget)
        if self.partial.cut is not None:
            first.append(self.partial)
        first += [self.guard, self.reference, self.kl, self.preference]
        if self.optimizer_reset is not None:
            first.append(self.optimizer_reset)
        trainer.callback_handler.callbacks[:0] = first
        if trainer.algorithm.value is not None and trainer.algorithm.value.warmup_steps > 0:
            trainer.add_callback(CriticAlone(trainer, trainer.algorithm.value))

    def before_generation(self, training: bool) -> None:
        """Prepare reward weights, guard and, in ``training``, reference and optimizer for the next generation batch.
        Called once per batch, also if the batch is drawn in several rounds (``resampler``)."""
        self.weight_schedules.apply()
        self.guard.before_generation()
        if training:
            self.reference.before_generation()
            if self.optimizer_reset is not None:
                self.optimizer_reset.before_generation()

    def save(self, folder: Path, together: Together) -> None:
        """Write the state of the components into a checkpoint's folder, beside TRL's files; called on every rank.
        ``together`` calls a function and turns its error on one rank into an error on all ranks."""
        entries = dict[str, Any]()

        def save_one(name: str) -> None:
            entry = self.stateful[name].save(folder)
            if entry is not None:
                entries[name] = entry

        def write_entries() -> None:
            if self._args.should_save:
                write_state(folder, entries)

        for name in self.stateful:
            if name not in BESIDE_WEIGHTS or not self._args.save_only_model:
                together(functools.partial(save_one, name))
        together(write_entries)

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` wrote; called on every rank before a training begins, with None without a resume."""
        for part in self.stateful.values():
            part.load(saved)


class ComponentTrainer(ResumableTrainer):
    """``ResumableTrainer`` with the attributes that other modules of this package read beside TRL's
    (``ports.StepPort``). ``LabTrainer`` derives from it, and sets ``algorithm`` and ``parts``."""

    algorithm: Algorithm
    parts: StepComponents

    @property
    def replaces_trls_advantages(self) -> bool:
        """Return whether advantages come from a rule of ours or a team's hook, and not from TRL."""
        return self.algorithm.advantage is not None or trl_bridge.teams(self, "compute_advantages") is not None

    @property
    def phase(self) -> Phase:
        """The position of the run in its current generation batch."""
        return Phase.of(self)

    def sampled_by(self, rows: int) -> Tensor:
        """Return the policy version that generated each of this rank's ``rows`` of the current batch, long ``[rows]``.
        A version is the number of optimizer steps taken. A completion that several policies wrote
        (``rollout.cut_after``) has the version of the first."""
        of_rows = self.parts.partial.versions()
        if of_rows is None:
            return torch.full((rows,), self.parts.overlap.version)
        return torch.tensor(of_rows)

    @property
    def correction(self) -> Correction | None:
        """The correction that weighs completions of another sampler; None without one."""
        return correction_in_force(self)

    @property
    def exact_update(self) -> ExactUpdate:
        """The component that computes the update."""
        return self.parts.update


class WithoutMoments:
    """Checkpoint entry that names the weights for which FSDP2's optimizer has no state (``trl_bridge.gradients``)."""

    holds = "the weights for which FSDP2's optimizer holds nothing"

    def __init__(self, trainer: Collectives) -> None:
        self._trainer = trainer

    def save(self, _folder: Path) -> dict[str, Any] | None:
        trainer = self._trainer
        return trl_bridge.without_moments(trainer.accelerator, trainer.model, trainer.optimizer)

    def load(self, saved: SavedState | None) -> None:
        """Do nothing: the entry is read while the optimizer is loaded (``SavedState.without_moments``)."""


def has_own_loss(trainer: Numbers) -> bool:
    """Return whether the loss is a team's: a method of its own, or a part for which this package has no formula."""
    objective = trainer.algorithm.objective
    overridden = any(trl_bridge.teams(trainer, hook) is not None for hook in ("token_loss", "_compute_loss"))
    return overridden or (objective is not None and not all(map(has_formula, objective.each)))


def prove(trainer: GRPOTrainer) -> None:
    """Check the loss in force on a toy batch (``prove_loss``) and log the result, with warnings about settings. Called
    once, when the trainer is built. If the loss is left to TRL, log only that."""
    objective = trainer.algorithm.objective
    if objective is None:
        said = f"the loss is left to TRL: {trainer.algorithm.left_to_trl}"
        trainer.say(said, key="left to trl", level=logging.WARNING)
        return
    of_team = trl_bridge.teams(trainer, "token_loss") is not None
    if trainer.algorithm.correction is not None:
        prove_correction(trainer.algorithm.correction)
    with trainer.recorder.unrecorded():
        for one in objective.each:
            trainer.say(prove_loss(trainer.token_loss, one, of_team))
    uneven = uneven_evaluation(trainer.args, trainer.eval_dataset, trainer.num_generations_eval)
    chosen = trainer.lab_settings.objective
    apart = None
    if chosen is not None:
        apart = knobs.other_than_the_paper(trainer.args, chosen, objective.surrogate)
    for warning in (idle_pull(trainer), shared_names(trainer.reward_func_names), uneven, apart):
        if warning is not None:
            trainer.say(warning, level=logging.WARNING)
