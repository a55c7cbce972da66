"""Class attributes of a trainer → configuration, so that there is one road to the algorithm."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from trl import GRPOConfig

from grpo_lab.trainer.config import LabConfig


def with_class_parts(cls: Any, model: Any, args: Any) -> LabConfig:
    """``args`` as a ``LabConfig`` in which the class attributes of ``cls`` stand.

    A plain ``GRPOConfig`` is copied field by field. The caller's object is not changed.

    Raises:
        TypeError: ``args`` is no ``GRPOConfig``.
        ValueError: configuration and class attribute both name the same part and differ.
    """
    if args is None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or type(model).__name__
        args = LabConfig(f"{str(name).rstrip('/').split('/')[-1]}-{cls.__name__.removesuffix('Trainer')}")
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` is a {type(args).__name__}; it must be a grpo_lab.LabConfig or trl.GRPOConfig")
    config = args if isinstance(args, LabConfig) else _promoted(args)
    parts = {name: getattr(cls, name) for name in ("surrogate", "aggregation") if getattr(cls, name) is not None}
    objective, advantage = _merged(cls, "objective", config.objective), _merged(cls, "advantage", config.advantage)
    if parts:
        objective = {"name": objective} if isinstance(objective, str) or objective is None else dict(objective)
        for name, part in parts.items():
            if objective.get(name) not in (None, part):
                raise ValueError(
                    f"`{cls.__name__}.{name}` and `objective.{name}` are both set and differ; leave one out"
                )
            objective[name] = _bound(part)
    reset = cls.reset_optimizer if config.reset_optimizer is None else config.reset_optimizer
    if objective is config.objective and advantage is config.advantage and reset is config.reset_optimizer:
        return config
    config = copy.copy(config)
    config.objective, config.advantage, config.reset_optimizer = objective, advantage, reset
    config.agree()
    return config


def with_declared_rewards(cls: Any, given: Any, args: LabConfig) -> tuple[list[Any], LabConfig]:
    """The rewards in force: what the caller gave, completed by what ``cls`` declares; new ones have weight 1."""
    given = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    rewards = cls.declared_rewards(given)
    if args.reward_weights is not None and len(args.reward_weights) == len(given) < len(rewards):
        args = copy.copy(args)
        args.reward_weights = [*args.reward_weights, *[1.0] * (len(rewards) - len(given))]
    return rewards, args


def _merged(cls: Any, name: str, configured: Any) -> Any:
    declared = getattr(cls, name)
    if declared is None:
        return configured
    if configured is None:
        return _bound(declared)
    named = configured.get("name", declared) if isinstance(configured, dict) else configured
    if named != declared:
        raise ValueError(
            f"`{cls.__name__}` declares {name}={declared!r}, but the configuration says {name}={configured!r}: use "
            f"LabTrainer, or leave `{name}` out of the configuration"
        )
    return {**configured, "name": declared} if isinstance(configured, dict) else configured


def _bound(part: Any) -> Any:
    return part.__func__ if isinstance(part, staticmethod) else part


def _promoted(args: GRPOConfig) -> LabConfig:
    """The same values in a ``LabConfig``, without running TRL's derived settings a second time."""
    config = object.__new__(LabConfig)
    config.__dict__.update(copy.copy(args.__dict__))
    for field in dataclasses.fields(LabConfig):
        if field.name not in config.__dict__:
            setattr(config, field.name, None)
    config._written = frozenset()
    return config
