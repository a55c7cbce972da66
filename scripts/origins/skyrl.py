"""How losses of SkyRL are called (``ppo_utils.py``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from origins.frame import Config, Origin
from origins.verl import masked_mean

PATH = "skyrl/backends/skyrl_train/utils/ppo_utils.py"


def safe_exp_delta(delta: Tensor, clip: float, out_dtype: Any) -> Tensor:
    """Stand in for SkyRL's function of this name, which rounds to float32."""
    return delta.clamp(-clip, clip).exp()


def uncorrected(loss: Tensor, old: Tensor, sampled: Tensor, mask: Tensor, config: Any) -> tuple[Tensor, Tensor, Any]:
    """Stand in for ``apply_off_policy_correction`` where none is configured."""
    return loss, mask, {}


def loss(function: str) -> Origin:
    """Return the policy loss called ``function``; it sums over tokens."""
    names = {
        "safe_exp_delta": safe_exp_delta,
        "apply_off_policy_correction": uncorrected,
        "masked_mean": lambda values, mask, dim=None: masked_mean(values, mask, dim),
        "AlgorithmConfig": Config,
    }
    return Origin("NovaSky-AI/SkyRL", PATH, function, ("reduce_loss",), names)
