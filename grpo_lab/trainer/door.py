"""What the constructor was given: completed by what a trainer class declares, parsed and checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from grpo_lab.rewards import AccuracyReward, CodeReward
from grpo_lab.trainer.config import LabConfig
from grpo_lab.trainer.named_parts import with_class_parts, with_declared_rewards
from grpo_lab.trainer.prompts.sampler import with_row_numbers
from grpo_lab.trainer.scoring.environments import with_environment_rewards, without_environment_rewards
from grpo_lab.trainer.scoring.resample import check_resample
from grpo_lab.trainer.settings.algorithm import Algorithm, algorithm_from
from grpo_lab.trainer.settings.inputs import check_budget, check_hooks, check_inputs, check_loss_type, check_weights
from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.settings.sampling import check_sampling_correction

_FIRST_ROWS = 64


@dataclass(frozen=True)
class Given:
    """What goes on to TRL's constructor, and what was read from it."""

    reward_funcs: list[Any]
    args: LabConfig
    train_dataset: Any
    environment_factory: Any
    algorithm: Algorithm
    settings: LabSettings


def given(
    cls: type,
    base: type,
    model: Any,
    reward_funcs: Any,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any,
    environment_factory: Any,
    rollout_func: Any,
) -> Given:
    """Everything that can be refused before a model is loaded is refused here.

    Args:
        cls: the class that is constructed, ``base`` (``LabTrainer``) or a subclass.

    Raises:
        ValueError: what was seen, what is allowed, which setting governs it. TypeError: ``args`` is no configuration.
    """
    args = with_class_parts(cls, model, args)
    completes = any("declared_rewards" in vars(kind) for kind in cls.__mro__ if kind is not base)
    reward_funcs, environment_factory = with_environment_rewards(cls, reward_funcs, environment_factory, completes)
    reward_funcs, args = with_declared_rewards(cls, reward_funcs, args)
    reward_funcs = without_environment_rewards(reward_funcs)
    if environment_factory is None and args.reward_weights is not None:  # what an environment owns, TRL adds and counts
        check_weights(args.reward_weights, reward_funcs)
    check_inputs(model, reward_funcs, train_dataset, eval_dataset, environment_factory, rollout_func)
    settings = args.lab_settings
    if settings.update.dead_groups == "resample":
        check_resample(train_dataset)
    algorithm = algorithm_from(args, settings).with_hooks(cls)
    check_hooks(cls, algorithm, base)
    check_loss_type(cls, args, algorithm)
    check_budget(algorithm.objective, args.max_completion_length)
    check_sampling_correction(args)
    warm_up(reward_funcs, train_dataset)
    rows = with_row_numbers(settings.sampler, train_dataset, reward_funcs)
    return Given(reward_funcs, args, rows, environment_factory, algorithm, settings)


def warm_up(reward_funcs: Any, rows: Any) -> None:
    """Before the model loads: the accuracy reward's worker begins to import sympy, if the first golds say that it will be needed; the code
    reward says which walls stand here. ValueError where they are too few."""
    for reward in reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]:
        if isinstance(reward, CodeReward):
            reward.warm_up()
        if isinstance(reward, AccuracyReward) and isinstance(rows, Dataset) and "solution" in rows.column_names:
            reward.warm_up(rows[:_FIRST_ROWS]["solution"])


__all__ = ["Given", "given"]
