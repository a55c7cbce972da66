"""A Qwen2 and TRL's LM head wholly in float64, so that a recorded number does not depend on the CPU that made it.

transformers computes RMSNorm and rotary angles, and TRL the log-probs, in float32 whatever the model's dtype. On
another CPU their last bits differ (6e-8), and six steps of a random network make 1e-5 of that. Inside
``everything_in_double`` they follow the model's dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2
from trl.trainer import utils as trl_utils


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _angles(self: Any, x: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    theta = position_ids[:, :, None].double() * self.inv_freq[None, None, :].double()
    theta = torch.cat([theta, theta], dim=-1)
    return theta.cos().to(x.dtype), theta.sin().to(x.dtype)


class Head:
    """TRL's chunked log-probs in one piece: log-prob of the label, and the entropy where it is asked for."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float,
        _chunk: int, softcap: float | None, scale: float, outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        assert bias is None
        assert softcap is None
        assert scale == 1.0
        assert set(outputs) <= {"log_probs", "entropy"}
        logp = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).detach() if "entropy" in outputs else None
        return logp.gather(-1, labels[:, None]).squeeze(-1), entropy, None, None, None


@contextlib.contextmanager
def everything_in_double() -> Iterator[None]:
    with (
        mock.patch.object(modeling_qwen2.Qwen2RMSNorm, "forward", _norm),
        mock.patch.object(modeling_qwen2.Qwen2RotaryEmbedding, "forward", _angles),
        mock.patch.object(trl_utils, "_ChunkedLogProbFunction", Head),
    ):
        yield
