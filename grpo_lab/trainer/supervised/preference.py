"""Training on pairs with TRL: DPO, SimPO through TRL's CPOTrainer, and reward models. The losses are TRL's, untouched.

    DPO     −log σ(r̂(y⁺) − r̂(y⁻))       r̂ = β log π(y|x)/π₀(y|x)       arXiv 2305.18290, eq. 7
    SimPO   −log σ(r̂(y⁺) − r̂(y⁻) − γ)   r̂ = β log π(y|x)/|y|           arXiv 2405.14734, eq. 6
    reward  −log σ(r(x, y⁺) − r(x, y⁻))   r: one number, of a head at the last token

SimPO needs no reference model and divides by the length, so a long answer is not dispreferred for being long but for
being in the second place. TRL's CPO adds a likelihood term to it by default (`cpo_alpha` 1): off here, as in SimPO's
paper, unless it is set. TRL's `simpo_gamma` is γ itself (TRL divides it by β before multiplying by β). γ = 0 is the
form in which lecture notes write it.

The first two log ``rewards/weight``, how strongly each pair pulls: the mean of w(θ) = σ(r̂(y⁻) − r̂(y⁺)), with γ added
inside of σ for SimPO (section 2.3). It is the weight in DPO's gradient, ∇L = −β E[w (∇log π(y⁺) − ∇log π(y⁻))]: near 1
where the model's own reward has the pair the wrong way round, ½ where it is undecided, near 0 where it is learned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from datasets import Dataset
from trl import SFTConfig

from grpo_lab.trainer.supervised.cold_start import checked, train_and_save

Method = Literal["dpo", "simpo", "reward"]
PAIR = ["prompt", "chosen", "rejected"]
WEIGHT = "rewards/weight"


def prefer(
    method: Method,
    model: Any,
    tokenizer: Any,
    pairs: Dataset,
    output_dir: Path,
    arguments: dict[str, Any],
    callbacks: list[Any] | None = None,
    reference: Any = None,
    train: Callable[[Any], None] | None = None,
) -> None:
    """Train ``model`` to prefer ``chosen`` to ``rejected``; saved to ``output_dir`` (all processes join in).

    Args:
        model: a language model; of ``reward`` the folder or hub name, to which TRL adds the head, drawn by the seed.
        pairs: columns ``prompt``, ``chosen``, ``rejected``, all text or all messages; others are not read.
        arguments: fields of ``trl.DPOConfig``, of TRL's ``CPOConfig`` or ``trl.RewardConfig``.
        reference: DPO's π₀, a model; None: the model that training begins with.
        train: what trains the trainer; None: its ``train()``.

    Raises:
        ValueError: a reference for SimPO, no pairs, a missing column, or an unknown setting.
    """
    if missing := [name for name in PAIR if name not in pairs.column_names]:
        raise ValueError(f"pairs have no column {missing[0]!r}; they have {pairs.column_names}")
    if reference is not None and method != "dpo":
        raise ValueError(f"`method: {method}` has no reference model; got one")
    config, trainer_class = _trl(method)
    fixed: dict[str, dict[str, Any]] = {
        "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "remove_unused_columns": False},
        "reward": {"max_length": None},  # TRL leaves out longer pairs, and says nothing
    }
    settings = {**fixed.get(method, {}), **check_training(method, arguments)}
    parts = {"callbacks": callbacks} | ({} if reference is None else {"ref_model": reference})
    rows = pairs.select_columns(PAIR)
    train_and_save(trainer_class, config, settings, model, tokenizer, rows, output_dir, train, **parts)


def check_training(method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``checked`` for the trainer of ``method`` (dpo, simpo, reward; others are SFT's); trains nothing."""
    config: Any = _trl(method)[0] if method in get_args(Method) else SFTConfig  # type: ignore[arg-type]
    found = checked(config, arguments, "training")
    if method == "simpo" and found.get("loss_type", "simpo") != "simpo":
        raise ValueError(f"`training.loss_type` is {found['loss_type']!r}; `method: simpo` means 'simpo'")
    return found


def implicit_weight(chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0) -> torch.Tensor:
    """w of each pair, [pairs], in (0, 1).

    Args:
        chosen, rejected: implicit rewards r̂, [pairs].
        margin: SimPO's γ.
    """
    return torch.sigmoid(rejected - chosen + margin)


@cache
def _trl(method: Method) -> tuple[Any, Any]:
    """The configuration and the trainer of a method; those of DPO and SimPO log ``rewards/weight``."""
    if method == "dpo":
        return _weighted_dpo()
    if method == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardConfig, RewardTrainer
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


def _weighted_dpo() -> tuple[Any, Any]:
    from trl import DPOConfig, DPOTrainer

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

    return DPOConfig, WeightedDPOTrainer
