"""TRL's DPO and CPO trainers, which also log how strongly each pair pulls: the implicit reward's weight. Losses are TRL's, untouched.

    w(θ) = σ(r̂(x, y⁻) − r̂(x, y⁺))            DPO, arXiv 2305.18290, the gradient of eq. 7: ∇L = −β E[w (∇log π(y⁺) − ∇log π(y⁻))]
    DPO     r̂ = β log π(y|x)/π₀(y|x)
    SimPO   r̂ = β log π(y|x)/|y|, and γ is added inside of σ: σ(r̂(y⁻) − r̂(y⁺) + γ)       arXiv 2405.14734, section 2.3

w is near 1 where the model's own reward has the pair the wrong way round, ½ where it is undecided, near 0 where it is learned.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

WEIGHT = "rewards/weight"


def implicit_weight(chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0) -> torch.Tensor:
    """w of each pair, [pairs], in (0, 1).

    Args:
        chosen, rejected: implicit rewards r̂, [pairs].
        margin: SimPO's γ.
    """
    return torch.sigmoid(rejected - chosen + margin)


@cache
def weighted_dpo() -> type:
    """``trl.DPOTrainer`` that logs ``rewards/weight``, for the implicit reward β log π/π₀ (reverse KL) with whole log-ratios."""
    from trl import DPOTrainer

    class WeightedDPOTrainer(DPOTrainer):  # type: ignore[misc]
        """TRL averages the rewards before it logs them, and a mean of σ is no σ of means: log-probs are taken where TRL computes
        them, on the models' way out.
        """

        def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
            seen: list[torch.Tensor] = []
            models = [self.accelerator.unwrap_model(self.model)]
            models += [] if self.ref_model is None else [self.accelerator.unwrap_model(self.ref_model)]
            hooks = [one.register_forward_hook(lambda _, __, out: _note(seen, out)) for one in models]
            mode = "train" if self.model.training else "eval"
            try:
                loss = super()._compute_loss(model, inputs, return_outputs)
            finally:
                for hook in hooks:
                    hook.remove()
            if self.f_divergence_type == "reverse_kl" and self.ld_alpha is None:
                chosen, rejected = self._implicit_rewards(seen, inputs)
                weights = self.accelerator.gather(implicit_weight(chosen, rejected))
                self._metrics[mode][WEIGHT].append(weights.mean().item())
            return loss

        def _implicit_rewards(self, seen: list[torch.Tensor], inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """β (log π − log π₀) of the chosen and the rejected, [pairs] each; TRL's batch is all chosen, then all rejected."""
            length = inputs["completion_mask"].shape[1] - 1
            reference: Any
            policy = seen[0][:, -length:].sum(dim=1).chunk(2)
            if self.precompute_ref_logps:
                reference = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
            else:
                reference = seen[1][:, -length:].sum(dim=1).chunk(2)
            chosen, rejected = (self.beta * (own - other) for own, other in zip(policy, reference, strict=True))
            return chosen, rejected

    return WeightedDPOTrainer


def _note(seen: list[torch.Tensor], out: Any) -> None:
    found = getattr(out, "log_probs", None)
    if found is not None:
        seen.append(found.detach())


@cache
def weighted_cpo() -> type:
    """TRL's ``CPOTrainer`` that logs ``rewards/weight`` where its reward is the log-prob itself (``alpha`` 0)."""
    from trl.experimental.cpo import CPOTrainer

    class WeightedCPOTrainer(CPOTrainer):  # type: ignore[misc]
        """The margin γ counts for ``loss_type: simpo`` alone, as in TRL's loss."""

        def cpo_loss(self, policy_chosen_logps: torch.Tensor, policy_rejected_logps: torch.Tensor) -> Any:
            found = super().cpo_loss(policy_chosen_logps, policy_rejected_logps)
            if self.alpha == 0.0:
                margin = float(self.simpo_gamma) if self.loss_type == "simpo" else 0.0
                weights = self.accelerator.gather_for_metrics(implicit_weight(found[1], found[2], margin))
                self.store_metrics({WEIGHT: weights.mean().item()}, "train" if self.model.training else "eval")
            return found

    return WeightedCPOTrainer


__all__ = ["WEIGHT", "implicit_weight", "weighted_cpo", "weighted_dpo"]
