"""Preference training with TRL's DPO, and SimPO through its CPO: the trainers of ``methods``, with the weight of pairs.

    DPO     −log σ(r̂(y⁺) − r̂(y⁻))       r̂ = β log π(y|x)/π₀(y|x)       arXiv 2305.18290, eq. 7
    SimPO   −log σ(r̂(y⁺) − r̂(y⁻) − γ)   r̂ = β log π(y|x)/|y|           arXiv 2405.14734, eq. 6

SimPO needs no reference model and divides by the length, so a long answer is not dispreferred for being long but for
being in the second place. TRL's CPO adds a likelihood term to it by default (`cpo_alpha` 1): off here, as in SimPO's
paper, unless it is set. TRL's `simpo_gamma` is γ itself (TRL divides it by β before multiplying by β). γ = 0 is the
form in which lecture notes write it.

Both log ``rewards/weight``, how strongly each pair pulls: the mean of w(θ) = σ(r̂(y⁻) − r̂(y⁺)), with γ added inside of σ
for SimPO (section 2.3). It is the weight in DPO's gradient, ∇L = −β E[w (∇log π(y⁺) − ∇log π(y⁻))]: near 1 where the
model's own reward has the pair the wrong way round, ½ where it is undecided, near 0 where it is learned.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from trl import DPOTrainer

WEIGHT = "rewards/weight"


def implicit_weight(chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0) -> torch.Tensor:
    """w of each pair, [pairs], in (0, 1).

    Args:
        chosen, rejected: implicit rewards r̂, [pairs].
        margin: SimPO's γ.
    """
    return torch.sigmoid(rejected - chosen + margin)


class WeightedDPOTrainer(DPOTrainer):  # type: ignore[misc]
    """For the implicit reward β log π/π₀ (reverse KL) with whole log-ratios. TRL averages the rewards before it
    logs them, and a mean of σ is no σ of means: log-probs are taken where TRL computes them, on the models' way
    out."""

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        seen: list[torch.Tensor] = []

        def note(_module: Any, _inputs: Any, out: Any) -> None:
            if (found := getattr(out, "log_probs", None)) is not None:
                seen.append(found.detach())

        models = [one for one in (self.model, self.ref_model) if one is not None]
        hooks = [self.accelerator.unwrap_model(one).register_forward_hook(note) for one in models]
        mode = "train" if self.model.training else "eval"
        try:
            loss = super()._compute_loss(model, inputs, return_outputs)
        finally:
            for hook in hooks:
                hook.remove()
        if self.f_divergence_type == "reverse_kl" and self.ld_alpha is None:
            length = inputs["completion_mask"].shape[1] - 1
            # the two halves of TRL's batch: chosen and rejected
            policy, *others = (one[:, -length:].sum(dim=1).chunk(2) for one in seen[:2])
            saved = self.precompute_ref_logps
            reference = (inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]) if saved else others[0]
            rewards = [self.beta * (own - other) for own, other in zip(policy, reference, strict=True)]
            weights = self.accelerator.gather(implicit_weight(*rewards))
            self._metrics[mode][WEIGHT].append(weights.mean().item())
        return loss


def weighted_cpo() -> tuple[Any, Any]:
    """Configuration and trainer."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    class WeightedCPOTrainer(CPOTrainer):  # type: ignore[misc]
        """Where its reward is the log-prob itself (``alpha`` 0). γ counts for ``simpo`` alone, as in TRL's loss."""

        def cpo_loss(self, policy_chosen_logps: torch.Tensor, policy_rejected_logps: torch.Tensor) -> Any:
            found = super().cpo_loss(policy_chosen_logps, policy_rejected_logps)
            if self.alpha == 0.0:
                margin = float(self.simpo_gamma) if self.loss_type == "simpo" else 0.0
                weights = self.accelerator.gather_for_metrics(implicit_weight(found[1], found[2], margin))
                self.store_metrics({WEIGHT: weights.mean().item()}, "train" if self.model.training else "eval")
            return found

    return CPOConfig, WeightedCPOTrainer
