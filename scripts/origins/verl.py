"""How losses of verl are called (``verl/trainer/ppo/core_algos.py``), and of the repositories that grew out of it."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from origins.frame import Config, Origin

PATH = "verl/trainer/ppo/core_algos.py"


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Stand in for verl's function of this name; the same for ``masked_mean``, whose 1e-8 is left out."""
    return torch.where(mask.bool(), values, 0.0).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    return masked_sum(values, mask, axis) / mask.sum(axis)


NAMES = {
    "verl_F": types.SimpleNamespace(masked_sum=masked_sum, masked_mean=masked_mean),
    "ActorConfig": Config,
    "AlgoConfig": type("AlgoConfig", (), {}),
    "DictConfig": Config,
}


def loss(function: str, *beside: str, repository: str = "volcengine/verl") -> Origin:
    """Return the policy loss called ``function``; what it averages by is verl's own ``agg_loss``."""
    return Origin(repository, PATH, function, ("agg_loss", *beside), NAMES)


def config(**settings: Any) -> Config:
    """Return verl's ``ActorConfig`` with these settings."""
    defaults = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}}
    return Config(**{**defaults, **settings})
