"""TRL's own shaping rewards by a recipe's name: used from there, not rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl import rewards

#: recipe name → what builds the reward from its arguments
SHAPING: dict[str, Callable[..., Any]] = {
    "soft_overlong": rewards.get_soft_overlong_punishment,  # DAPO, arXiv 2503.14476, eq. 13
    "repetition": rewards.get_repetition_penalty_reward,
    "cosine_scaled": rewards.get_cosine_scaled_reward,
}
