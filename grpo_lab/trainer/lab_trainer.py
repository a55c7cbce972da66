"""``LabTrainer``: TRL's GRPOTrainer with methods overridden, in the order in which a step calls them.

    prompts           ``_get_train_sampler``, ``get_batch_samples``, ``_tokenize_prompts``
    a batch           ``_generate_and_score_completions`` calls all of the next four:
      generate          ``_generate``, which calls ``_generate_single_turn`` and, with tools, ``_tool_call_loop``
      score             ``_calculate_rewards``
      advantages        select groups, charge the KL, estimate values, compute advantages (``scoring/``)
      record            metrics; then TRL cuts the batch into micro-batches and buffers them
    update            ``compute_loss`` collects the micro-batches of the step, and with the last one computes all
                      (``step/exact_update.py``); or ``_compute_loss``, for one micro-batch as TRL cut it
    take the step     ``_get_grad_norm``; or skip it (``step/guard.py``)
    after the step    ``log``, ``_save_checkpoint``

``arguments.py`` checks the constructor's arguments, ``step_components.py`` builds the objects that act in a step, and
``docs/design.md`` follows one reward through all files. Public hooks for subclasses are ``compute_advantages`` and
``token_loss``.
"""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from trl.trainer import grpo_trainer

from grpo_lab.advantages import level_of
from grpo_lab.batch import RewardTable, TokenBatch
from grpo_lab.rewards.steps import StepScores
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.arguments import resolve_arguments
from grpo_lab.trainer.critic import save_beside, take_up, with_critics_groups
from grpo_lab.trainer.generation.in_step import by_groups
from grpo_lab.trainer.generation.prompt_fit import check_room
from grpo_lab.trainer.generation.server_across_ranks import checkpoint_if_server_gone, record_returns
from grpo_lab.trainer.generation.trl_engine import engine_class
from grpo_lab.trainer.generation.turns import tool_turns
from grpo_lab.trainer.metrics.book import MetricBook, TrlBook
from grpo_lab.trainer.metrics.model_card import in_our_words
from grpo_lab.trainer.ports import Recorder
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.resume.checkpoint import picklable, save_final, save_whole
from grpo_lab.trainer.resume.state import load_state
from grpo_lab.trainer.resume.stop import StopOnRequest
from grpo_lab.trainer.row_table import Carried
from grpo_lab.trainer.scoring.advantages import (
    add_token_energies,
    add_value_estimates,
    row_advantages,
    to_advantages_and_returns,
    trl_advantages,
    write_advantages,
)
from grpo_lab.trainer.scoring.carriers import Scored
from grpo_lab.trainer.scoring.kl_penalty import penalise
from grpo_lab.trainer.scoring.reward_table import correctness, rewards_of_all
from grpo_lab.trainer.scoring.scored import record, score
from grpo_lab.trainer.settings.inputs import check_conversations, turns_of
from grpo_lab.trainer.settings.silenced import seen
from grpo_lab.trainer.step.log_probs import rows_in_place
from grpo_lab.trainer.step.micro_batch import micro_batch_loss
from grpo_lab.trainer.step_components import ComponentTrainer, StepComponents, prove


class LabTrainer(trl_bridge.PlainNames, ComponentTrainer):
    """Trainer for group-relative policy optimisation with our objectives. Its constructor takes the arguments of
    ``trl.GRPOTrainer``; ``args`` is a ``LabConfig``, or a ``trl.GRPOConfig``.

    There are three ways to change the algorithm, the last two in a subclass:

    (a) configuration: ``LabConfig(objective={"name": "dr_grpo", "surrogate": "team.losses:Mine"})``;
    (b) class attributes: ``objective``, ``advantage``, ``surrogate``, ``aggregation`` hold a name or an object;
    (c) one public hook: ``compute_advantages(table)`` or ``token_loss(batch)``.

    With ``objective`` unset TRL's own settings (``loss_type``, ``scale_rewards``, …) are in force, so that changing the
    import changes nothing else. See ``docs/design.md`` for what is overridden and why.
    """

    objective: ClassVar[Any] = None
    advantage: ClassVar[Any] = None
    surrogate: ClassVar[Any] = None
    aggregation: ClassVar[Any] = None
    reset_optimizer: ClassVar[bool] = False
    #: Whether a subclass in this package generates completions itself and returns their log-probs, as an engine does.
    samples_itself: ClassVar[bool] = False

    @trl_bridge.reference_model_in_full()
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        data_sets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        check_conversations(turns_of(tools, environment_factory), data_sets)
        given = (train_dataset, eval_dataset, environment_factory, rollout_func)
        resolved = resolve_arguments(type(self), LabTrainer, model, reward_funcs, args, *given)
        self.lab_settings = resolved.settings
        self.algorithm = resolved.algorithm
        self.recorder = Recorder(
            TrlBook if self.lab_settings.objective is None else MetricBook,
            self._mode,
            speaks=lambda: bool(self.accelerator.is_main_process),
            trls=lambda: (self._metrics, self._logs),
        )
        self.step_scores: dict[int, list[StepScores]] = {}
        fp32_head = trl_bridge.fp32_head_in_words(resolved.args.cast_lm_head_to_fp32)
        offers = trl_bridge.offers_hidden(resolved.settings.rollout.turns is not None)
        engine = engine_class(resolved.settings.rollout, resolved.args)
        with fp32_head, offers, trl_bridge.replaced(grpo_trainer, "VLLMGeneration", engine):
            super().__init__(
                model=model,
                reward_funcs=resolved.reward_funcs,
                args=resolved.args,
                train_dataset=resolved.train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=resolved.environment_factory,
            )
        self.parts = StepComponents(self, resolved)
        prove(self)

    @classmethod
    def declared_rewards(cls, given: list[Any]) -> list[Any]:
        """Return the run's rewards, given those that the caller passed. A subclass may add rewards of its algorithm."""
        return given

    def compute_advantages(self, table: RewardTable) -> Tensor:
        """Compute the advantages of a generation batch from the rewards of all ranks; a hook for subclasses.

        Args:
            table: the rewards, the same on every rank except for ``table.local``: the places of this rank's rows in
                the table, their loss mask and lengths.

        Returns:
            ``[N]``, one per completion over all ranks; or ``[B, T]``, one per token of this rank's rows. Which of the
            two must be the same on every rank and in every batch. ``[N, T]`` is never gathered: compute statistics of
            the table, then spread them over the local rows.

        Called only if an advantage rule of ours is in force or this hook is overridden. Without a rule of ours it
        returns TRL's own advantages for this table (``scale_rewards``, ``multi_objective_aggregation``). With
        ``update.dead_groups: resample`` it is also called to find groups that would contribute nothing, on a table of
        the groups kept so far and those of one more round, with rewards only; then once on the groups that stay.
        """
        rule: Any = self.algorithm.advantage
        if rule is None:
            return trl_advantages(table, self.scale_rewards, self.multi_objective_aggregation)
        if level_of(rule) == "row":
            return rule(table.total, table.group_size)
        return rule(table)

    def token_loss(self, batch: TokenBatch) -> Tensor:
        """Compute the loss per token ``[B, T]`` of the rows in ``batch``, 0 where ``batch.mask`` is False; a hook for
        subclasses. Raise ValueError if the loss is left to TRL, which has no loss per token."""
        if self.algorithm.objective is None:
            raise ValueError(
                f"`token_loss` was called, but the loss is left to TRL ({self.algorithm.left_to_trl}): set `objective`"
            )
        return self.algorithm.objective.token_loss(batch)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Train as TRL does. A signal, ``stop_file`` or ``max_hours`` ends the training after a checkpoint."""
        with self.parts.stop.in_force(), self.parts.trajectories.tools_in_use():
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make HF's training step for one micro-batch, with attention that takes bins of any shape."""
        device = self.accelerator.device
        with trl_bridge.small_tiles(device), self.parts.update.attention(device), self.parts.update.memory_in_words():
            return super().training_step(*args, **kwargs)

    @seen
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return the sampler of prompts: the one that ``sampler`` or ``tasks`` asks for, else TRL's."""
        sampler = self.parts.prompts.built(self.train_dataset if dataset is None else dataset)
        if sampler is None:
            return super()._get_train_sampler(dataset)
        return sampler

    @seen
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the micro-batches of an optimizer step, and read further ones if their prompts are needed early."""
        micro_batches = self.parts.ahead.read(epoch_iterator, num_batches, self._step)
        return super().get_batch_samples(micro_batches, num_batches, device)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        """Tokenize prompts as TRL does; raise ValueError if one leaves no room for a completion."""
        ids, images, fields = super()._tokenize_prompts(prompts)
        check_room(self, ids)
        return ids, images, fields

    @seen
    def _generate(self, prompts: list[Any]) -> Any:
        """Generate completions in all their turns; with ``rollout.turns`` add the column ``turns``."""
        with self.parts.trajectories.batch():
            return self.parts.trajectories.with_column(super()._generate(prompts))

    @seen
    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        """Generate completions, or take those generated before; prove the weight sync; request the next batch."""
        generated_before = self.parts.partial.take(prompt_ids)
        if generated_before is not None:
            return generated_before
        training = self.model.training
        with by_groups(self), self.parts.overlap.handing_over(), self.parts.trajectories.whole_ones():
            generated = super()._generate_single_turn(prompt_ids, *rest, **options)
        if self.model.training is not training:  # transformers' continuous batching leaves training mode
            self.model.train(training)
        if self.use_vllm and self.model.training and self.parts.sync_proof.is_due():
            self.parts.sync_proof.prove(self.parts.partial.asked or prompt_ids)
        self.parts.overlap.begin_next()
        return generated

    @seen
    def _tool_call_loop(self, *rows: Any) -> Any:
        """Complete the turns with tools: as trajectories (``rollout.turns``), or as TRL does with ranks in step."""
        stock = functools.partial(tool_turns, self, self.parts.sync_proof, super()._tool_call_loop)
        return self.parts.trajectories.finish(stock, *rows)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Return the rewards ``[N, F]`` of all ranks' completions, checked and with those of whole groups."""
        stock = super()._calculate_rewards
        return rewards_of_all(self, stock, inputs, prompts, completions, completion_ids_list)

    @seen
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return this rank's rows of a new generation batch, with all that the update needs of them."""
        with checkpoint_if_server_gone(self, self.parts.stop):
            self.parts.before_generation(self.model.training)
            scored = self._generate_and_score(self.parts.partial.choose(inputs))
            if self.model.training:
                scored = self.parts.resampler.select(scored, self._generate_and_score)
                self.parts.prompts.record(self.recorder.book())
            penalised = penalise(self, scored, self.parts.kl)
            penalised = add_value_estimates(self, penalised)
            penalised = add_token_energies(self, penalised)
            of_rows = row_advantages(self, penalised)
            advantages, returns = to_advantages_and_returns(self, penalised, of_rows)
            batch = write_advantages(self, penalised, advantages, returns)
            record_returns(self)
            return record(self, scored, batch)

    def _generate_and_score(self, inputs: Any) -> Scored:
        """Generate and score completions by TRL's method. In training, also update the token count, the sampler and the
        preference model."""
        scored = score(self, super()._generate_and_score_completions, inputs)
        if self._mode() == "train":
            if self.parts.partial.cut is None:  # with `cut_after` they are counted when generated
                self.parts.generated.count += int(scored.rewarded.lengths.sum())
            self.parts.prompts.learn(scored.rewarded.rows, correctness(scored.rewarded.table, self.reward_funcs))
            self.parts.preference.learn(scored.rewarded.table)
        return scored

    def _mode(self) -> str:
        """Return the run's current mode: ``train`` or ``eval``."""
        if self.model.training:
            return "train"
        return "eval"

    @named_place("update")
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the loss of a micro-batch; with the exact update the step's last one has that of all, the others 0."""
        stock = functools.partial(super().compute_loss, model, inputs, return_outputs, num_items_in_batch)
        if return_outputs or not self.model.training:
            return stock()  # type: ignore[no-any-return]
        return self.parts.guard.watch_loss(self.parts.update.loss(model, inputs, stock), inputs)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss of one micro-batch as TRL cut it: with ``update: off``, in evaluation, or if bins are not
        exact for the model."""
        objective = self.algorithm.objective
        with rows_in_place(self, model, inputs):
            # TRL computes the loss of an evaluation without the reference log-probs that our KL reads
            if objective is None or (objective.kl_in_loss is not None and Carried(inputs).ref_logps is None):
                return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
            return micro_batch_loss(self, model, inputs, objective)

    @seen
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient's norm, after which the step is left out if a number is not finite (``guard``)."""
        return self.parts.guard.check_gradient(super()._get_grad_norm(model, grad_norm))

    def metric_book(self, mode: str) -> MetricBook:
        """Return the metrics of ``mode`` (``train`` or ``eval``), to which a subclass may add its own."""
        return self.recorder.book(mode)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log ``logs`` and the means of the metrics since the last log."""
        means = self.recorder.book().read()
        self._metrics[self._mode()].update({name: [value] for name, value in means.items()})
        if "loss" in logs and means.get("guard/loss") == 1.0:  # no step had a finite loss, which HF logs as 0
            logs = {**logs, "loss": math.nan}
        super().log(logs, start_time)

    def say(self, message: str, key: str | None = None, level: int = logging.INFO) -> None:
        """Log ``message`` on the main process, unless its ``key`` (by default the message) was logged before."""
        self.recorder.say(message, key, level)

    def save_final(self, folder: Path) -> None:
        """Save the trained model to ``folder`` and, if a preference model was trained along, that model beside it.
        Called on every rank."""
        save_final(self, folder, self.parts.preference.save)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the README beside the model, with what was trained."""
        with in_our_words(self):
            super().create_model_card(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint completely or not at all, with the state of the components."""
        with trl_bridge.optimizer_saved_as_it_is(self.accelerator):
            save_whole(self, model, trial, super()._save_checkpoint, self.parts.save)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        """Save the policy and, beside it, the critic."""
        with trl_bridge.replaced(self, "args", picklable(self.args)):  # HF pickles them into training_args.bin
            super()._save(output_dir, state_dict)
        save_beside(self, self.parts.critic, output_dir, state_dict)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load optimizer, critic and components from ``checkpoint``; None: the training does not resume."""
        saved = None
        without_moments = set[str]()
        if checkpoint is not None:
            saved = load_state(checkpoint)
            without_moments = saved.without_moments
        as_it_was = trl_bridge.optimizer_loaded_as_it_was(self.accelerator, self.model, self.optimizer, without_moments)
        with trl_bridge.plain_cpu(self.args), as_it_was:
            super()._load_optimizer_and_scheduler(checkpoint)
        take_up(self, self.parts.critic, checkpoint)
        self.parts.load(saved)

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Load the random numbers of a checkpoint, then make the evaluation that was still due there."""
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.parts.due_evaluation.make_up()

    def _load_best_model(self) -> None:
        """Load policy and critic of the best checkpoint."""
        super()._load_best_model()
        take_up(self, self.parts.critic, self.state.best_model_checkpoint, "load_best_model_at_end")

    @seen
    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimizer, with the critic's parameters in groups of their own."""
        optimizer = super().create_optimizer(model)
        if self.algorithm.value is None:
            return optimizer
        return with_critics_groups(optimizer, self.parts.critic, self.algorithm.value.learning_rate)

    # what code that runs a training may read

    @property
    def stop_request(self) -> StopOnRequest:
        """The callback that stops the training on request: ``reason`` says why it stopped, ``signals`` which signals
        stop it."""
        return self.parts.stop

    @property
    def generated_tokens(self) -> int:
        """Number of tokens that the policy has generated in training, over all ranks and resumes."""
        return self.parts.generated.count
