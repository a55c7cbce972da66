"""Check and complete the arguments of a trainer's constructor before a model is loaded. What a trainer class declares
in its attributes is written into the configuration, so that the algorithm is read from there alone."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from grpo_lab.advantages import reads_steps
from grpo_lab.engines.generators import check_template_kwargs
from grpo_lab.rewards import AccuracyReward, CodeReward
from grpo_lab.rewards.for_task import ForTask
from grpo_lab.rewards.turn_scores import TurnRewards, of_environments
from grpo_lab.trainer.config import LabConfig
from grpo_lab.trainer.generation.prompt_order import with_row_numbers
from grpo_lab.trainer.settings.algorithm import Algorithm
from grpo_lab.trainer.settings.inputs import check_budget, check_hooks, check_inputs, check_loss_type, check_weights
from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.settings.tasks import check_enough, check_rewards, check_rows
from grpo_lab.trainer.trl_bridge import EnvironmentReward, environment_kinds


def with_class_parts(cls: Any, model: Any, args: Any) -> LabConfig:
    """Return ``args`` as a ``LabConfig`` to which the class attributes of the trainer class ``cls`` are added.

    A plain ``GRPOConfig`` is copied field by field; the caller's object is not changed. If ``args`` is None, a default
    ``LabConfig`` is made, with an output folder named after the model and the trainer class.

    Raises:
        TypeError: ``args`` is no ``GRPOConfig``.
        ValueError: the configuration and a class attribute choose different parts.
    """
    if args is None:
        args = _default_config(cls, model)
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` is a {type(args).__name__}; it must be a grpo_lab.LabConfig or trl.GRPOConfig")
    config = args if isinstance(args, LabConfig) else _promoted(args)
    config.agree()  # a setting may have changed since it was made
    objective = _with_declared_parts(cls, _merged(cls, "objective", config.objective))
    advantage = _merged(cls, "advantage", config.advantage)
    if config.reset_optimizer is None:
        reset = cls.reset_optimizer
    else:
        reset = config.reset_optimizer
    if objective is config.objective and advantage is config.advantage and reset is config.reset_optimizer:
        return config
    config = copy.copy(config)
    config.objective = objective
    config.advantage = advantage
    config.reset_optimizer = reset
    config.agree()
    return config


def _default_config(cls: Any, model: Any) -> LabConfig:
    """Return a default configuration, with an output folder named after the model and the trainer class."""
    if isinstance(model, str):
        name = model
    else:
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return LabConfig(f"{str(name).rstrip('/').split('/')[-1]}-{cls.__name__.removesuffix('Trainer')}")


def _promoted(args: GRPOConfig) -> LabConfig:
    """Copy a ``GRPOConfig`` into a ``LabConfig`` without running its ``__post_init__`` a second time."""
    config = object.__new__(LabConfig)
    unset = dict.fromkeys(field.name for field in dataclasses.fields(LabConfig))
    config.__dict__.update(unset | args.__dict__)
    config._written = frozenset()
    return config


def _merged(cls: Any, name: str, configured: Any) -> Any:
    """Return the setting ``name`` (``objective`` or ``advantage``): the value ``configured`` and the class attribute of
    ``cls``, of which either may be None. Knobs of a configured mapping are kept. Raise ValueError if the two differ."""
    declared = getattr(cls, name)
    if declared is None:
        return configured
    if configured is None:
        return declared
    if isinstance(configured, dict):
        named = configured.get("name", declared)
    else:
        named = configured
    if named != declared:
        raise ValueError(
            f"`{cls.__name__}` declares {name}={declared!r}, but the configuration says {name}={configured!r}: use "
            f"LabTrainer, or leave `{name}` out of the configuration"
        )
    if isinstance(configured, dict):
        return {**configured, "name": declared}
    return configured


def _with_declared_parts(cls: Any, objective: Any) -> Any:
    """Return the setting ``objective`` with the class attributes ``surrogate`` and ``aggregation`` of ``cls`` in it, if
    these are set. Raise ValueError if the setting names another part."""
    parts = {name: getattr(cls, name) for name in ("surrogate", "aggregation") if getattr(cls, name) is not None}
    if not parts:
        return objective
    if isinstance(objective, str) or objective is None:
        objective = {"name": objective}
    for name, part in parts.items():
        if objective.get(name) not in (None, part):
            raise ValueError(f"`{cls.__name__}.{name}` and `objective.{name}` are set and differ; leave one out")
    return {**objective, **parts}


def as_list(given: Any) -> list[Any]:
    """Return ``reward_funcs`` as a list; TRL accepts None, one reward or a list of rewards."""
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return list(given)
    return [given]


def with_declared_rewards(cls: Any, given: Any, args: LabConfig) -> tuple[list[Any], LabConfig]:
    """Return the run's rewards and its configuration: the rewards in ``given``, followed by those that the trainer
    class ``cls`` adds (``declared_rewards``), each of weight 1."""
    given = as_list(given)
    return with_weights(cls.declared_rewards(given), args, len(given))


def with_weights(rewards: list[Any], args: LabConfig, weighed: int) -> tuple[list[Any], LabConfig]:
    """Return ``rewards`` and the configuration. If its ``reward_weights`` cover the first ``weighed`` rewards, they are
    extended by a weight of 1 for each further reward, in a copy."""
    if args.reward_weights is not None and len(args.reward_weights) == weighed < len(rewards):
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, *[1.0] * (len(rewards) - weighed)]
    return rewards, args


def with_scores_of_turns(kinds: list[type], given: Any, args: LabConfig) -> tuple[list[Any], LabConfig]:
    """Return the run's rewards and its configuration, with a ``TurnRewards`` of weight 1 added if it is needed.

    That reward asks the environments for the scores of their turns (their method ``turn_rewards``). It is added if the
    environment classes ``kinds`` have such scores, the advantage rule reads them, and no reward in ``given`` asks for
    them already.
    """
    given = as_list(given)
    asked = any(isinstance(reward, TurnRewards) and reward.score is None for reward in given)
    found = of_environments(kinds)
    if asked or found is None or not reads_steps(args.algorithm.advantage):
        return given, args
    return with_weights([*given, found], args, len(given))


@dataclass(frozen=True)
class ResolvedArguments:
    """The constructor's arguments after all checks, and what was read from them.

    Attributes:
        reward_funcs: the rewards that TRL's constructor gets, without the environments' own, which TRL adds itself.
        args: the configuration, with what the trainer class declares.
        train_dataset: the data set, with a column of row numbers if the sampler needs it.
        environment_factory: the environments' factory, in the form that TRL takes.
        algorithm: advantage rule, objective and critic, with the names of methods that a team overrides.
        settings: the parsed settings of this package.
    """

    reward_funcs: list[Any]
    args: LabConfig
    train_dataset: Any
    environment_factory: Any
    algorithm: Algorithm
    settings: LabSettings


def resolve_arguments(
    cls: type,
    base: type,
    model: Any,
    reward_funcs: Any,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any,
    environment_factory: Any,
    rollout_func: Any,
) -> ResolvedArguments:
    """Check and complete the constructor's arguments, and refuse whatever can be refused before a model is loaded.

    Args:
        cls: the class that is constructed, ``base`` or a subclass of it.
        base: ``LabTrainer``, which this module cannot import.

    The other arguments are those of ``LabTrainer``'s constructor.

    Raises:
        ValueError: an argument does not fit; the message says what was found, what is allowed and which setting governs
            it.
        TypeError: ``args`` is no configuration.
    """
    args = with_class_parts(cls, model, args)
    declares_rewards = any("declared_rewards" in vars(kind) for kind in cls.__mro__ if kind is not base)
    if environment_factory is not None and (declares_rewards or args.lab_settings.rollout.turns is not None):
        kinds, environment_factory = environment_kinds(environment_factory)
        if args.lab_settings.rollout.turns is not None:
            reward_funcs, args = with_scores_of_turns(kinds, reward_funcs, args)
        # placeholders: `declared_rewards` sees the environments' own rewards, which TRL adds later
        owned = [EnvironmentReward(kind.__name__) for kind in kinds if callable(getattr(kind, "get_reward", None))]
        reward_funcs = [*as_list(reward_funcs), *owned]
    reward_funcs, args = with_declared_rewards(cls, reward_funcs, args)
    reward_funcs = [reward for reward in reward_funcs if not isinstance(reward, EnvironmentReward)]
    if environment_factory is None and args.reward_weights is not None:  # TRL adds and counts environments' rewards
        check_weights(args.reward_weights, reward_funcs)
    check_inputs(model, reward_funcs, train_dataset, eval_dataset, environment_factory, rollout_func)
    settings = args.lab_settings
    if settings.tasks:
        _check_tasks(args, reward_funcs, train_dataset, eval_dataset)
    if settings.update.dead_groups == "resample" and not isinstance(train_dataset, Dataset):
        raise ValueError(
            f"`update.dead_groups: resample` draws further prompts by index, but `train_dataset` is a "
            f"{type(train_dataset).__name__}; use a datasets.Dataset, or `dead_groups: skip`"
        )
    algorithm = args.algorithm.with_hooks(cls)
    check_hooks(cls, algorithm, base)
    check_loss_type(cls, args, algorithm)
    check_template_kwargs(args.chat_template_kwargs)
    check_budget(algorithm.objective, args.max_completion_length)
    warm_up(reward_funcs, train_dataset)
    rows = with_row_numbers(settings.sampler, train_dataset, reward_funcs)
    return ResolvedArguments(reward_funcs, args, rows, environment_factory, algorithm, settings)


def _check_tasks(args: LabConfig, reward_funcs: list[Any], train_dataset: Any, eval_dataset: Any) -> None:
    """Raise ValueError if the data sets or the rewards do not fit the setting ``tasks``."""
    tasks = args.lab_settings.tasks
    check_rows(tasks, train_dataset, "train_dataset")
    check_enough(tasks, train_dataset, args.generation_batch_size // args.num_generations)
    if isinstance(eval_dataset, dict):
        evaluated = {f"eval_dataset.{name}": rows for name, rows in eval_dataset.items()}
    else:
        evaluated = {"eval_dataset": eval_dataset}
    for name, rows in evaluated.items():
        if rows is not None:
            check_rows(tasks, rows, name)
    check_rewards(tasks, reward_funcs)


def warm_up(reward_funcs: Any, rows: Any) -> None:
    """Start the slow set-up of rewards while the model has yet to load, and check the sandbox.

    The accuracy reward's worker begins to import sympy if one of the first 64 gold answers needs it. The code reward
    logs which protections its sandbox has on this machine.

    Raises:
        ValueError: the sandbox has too few protections.
    """
    for reward in as_list(reward_funcs):
        if isinstance(reward, ForTask):
            reward = reward.reward
        if isinstance(reward, CodeReward):
            reward.warm_up()
        if isinstance(reward, AccuracyReward) and isinstance(rows, Dataset) and "solution" in rows.column_names:
            reward.warm_up(rows[:64]["solution"])
