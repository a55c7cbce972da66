"""The critic as a module: a linear head on hidden states, its own network's or the policy's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class ValueHead(nn.Linear):
    """``V = w·h + b``, computed in float32 or better whatever the hidden states come in; starts at V = 0, and draws no random number."""

    def __init__(self, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(hidden, 1, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """``[…, H]`` → ``[…]`` in units of the reward."""
        with torch.autocast(states.device.type, enabled=False):
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            weight, bias = self.weight.to(wide), self.bias.to(wide)
            return functional.linear(states.to(weight.device, wide), weight, bias).squeeze(-1)


class Critic(nn.Module):
    """Values of the states in which tokens are chosen.

    Args:
        hidden: width of the hidden states.
        trunk: a network without LM head, called with the policy's inputs; ``None``: the policy's own states are read.
    """

    def __init__(self, hidden: int, trunk: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(hidden, dtype)

    def forward(self, states: Tensor, inputs: dict[str, Any]) -> Tensor:
        """``[B, L - 1]``: place t holds the value before token t + 1, as log-probs have it."""
        if self.trunk is not None:
            states = self.trunk(**{**inputs, "use_cache": False}).last_hidden_state
        values: Tensor = self.head(states)[:, :-1]
        return values


__all__ = ["Critic", "ValueHead"]
