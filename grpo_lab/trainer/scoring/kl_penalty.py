"""The KL penalty in the reward, charged per completion or per token, and its coefficient β.

    per: sequence    r_i ← r_i − β·Σ_t k_{i,t}, one more column of the reward table; normalised as rewards are
    per: token       Â_{i,t} ← Â_i − β·Σ_{s ≥ t} γ^{n(t,s)} k_{i,s}, after the advantage rule: not normalised, without a
                     baseline; a group whose rewards are all equal still learns from it

k_{i,t} estimates the KL, in nats, between the policy before the update and the reference at token t of completion i;
n(t,s) counts the policy's own tokens from t to the one before s. Only own tokens are charged (no tool output). A
completion that no reward could score is not charged: it carries no signal.

β is constant, or steered to ``kl.target``: batch t is charged with β_t, and its measured KL gives β_{t+1}. Every rank
has the same β, since all sum the same gathered values by ``math.fsum``, exactly rounded. Sources and estimators:
``objectives.kl_estimators``, docs/algorithms/kl.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.advantages import reward_to_go
from grpo_lab.batch import masked_sum
from grpo_lab.objectives import k1
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.critic import is_warming_up
from grpo_lab.trainer.ports import Collectives, StepPort, UpdatePort
from grpo_lab.trainer.resume.state import SavedState
from grpo_lab.trainer.row_table import Carried, loss_mask
from grpo_lab.trainer.scoring.carriers import Penalised, Scored, mask_cut, with_local_rows
from grpo_lab.trainer.step.log_probs import GenerationForwards, log_probs_in_bins, padded_log_probs


class KLController(TrainerCallback):  # type: ignore[misc]
    """Holds β, and updates it after each batch if ``kl.target`` is set. Otherwise β is the constant ``kl.coefficient``,
    and this object saves and logs nothing.

    Attributes:
        kl: the KL term that is charged in the reward; None if there is none.
        control: the rule by which β moves; None if it is constant.
        coefficient: β in force; None if no KL is charged in the reward.

    Raises:
        ValueError: the KL is charged per completion, and advantages are TRL's own, which are made before it is known.
    """

    holds = "with `kl.target` β of the next generation batch"

    def __init__(self, trainer: StepPort) -> None:
        objective = trainer.algorithm.objective
        self.kl = None if objective is None else objective.kl_in_reward
        self.trainer = trainer
        self.control = None if self.kl is None else self.kl.control
        self._start = None if self.kl is None else self.kl.coefficient
        self.coefficient = self._whole_step = self._start
        self._loaded = False
        if self.kl is not None and self.kl.per == "sequence" and not trainer.replaces_trls_advantages:
            raise ValueError(
                "`kl.placement` is 'reward', but advantages are left to TRL, which makes them before the penalty is "
                "known; set `objective` (e.g. 'reinforce') or `advantage` (e.g. 'leave_one_out'), override "
                "`compute_advantages`, or charge it after the advantages (`kl.per: token`)"
            )

    def charged(self, of_completions: Tensor) -> None:
        """Log the mean KL of the batch that was charged and β, then update β.

        Args:
            of_completions: float64 ``[N]``, Σ_t (log π − log π_ref) of each completion, in nats.

        β moves in training only, and not while a critic learns alone: β could not change the KL then. Does nothing if
        β is constant.
        """
        if self.control is None or self.coefficient is None:
            return
        number = of_completions.numel()
        measured = math.fsum(of_completions.tolist()) / number
        book = self.trainer.recorder.book()
        book.add_alike("kl/measured", of_completions.sum(), number)
        book.add_alike("kl/beta", of_completions.new_tensor(self.coefficient), 1)
        if self.trainer.recorder.mode() == "train" and not is_warming_up(self.trainer):
            self.coefficient = self.control.following(self.coefficient, measured, number)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with ``kl.coefficient``, or on a resume with the β of the checkpoint."""
        if not self._loaded:
            self.coefficient = self._start
        self._loaded = False
        self._whole_step = self.coefficient

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep β for checkpoints as of the last whole step: what was generated since is generated again on a resume."""
        self._whole_step = self.coefficient

    def save(self, _folder: Path) -> dict[str, float] | None:
        """Return the checkpoint entry, β, if it can move; else None."""
        if self.control is None or self._whole_step is None:
            return None
        return {"coefficient": self._whole_step}

    def load(self, saved: SavedState | None) -> None:
        """Restore β from the checkpoint, or report that the checkpoint has none."""
        if self.control is None or saved is None:
            return
        found = saved.entry("kl", _coefficient, "β then starts at `kl.coefficient`")
        self._loaded = True
        self.coefficient = self._start if found is None else found
        if found is None:
            self.trainer.recorder.say(
                f"`resume_from_checkpoint`: {saved.checkpoint} was written without `kl.target`: β starts at "
                f"`kl.coefficient`, {self._start:g}"
            )


def _coefficient(entry: Any) -> float:
    """Return β from a checkpoint's entry; raise ValueError if it is not positive and finite."""
    found = float(entry["coefficient"])
    if not (math.isfinite(found) and found > 0):
        raise ValueError(f"β is {found}")
    return found


def penalise(trainer: UpdatePort, scored: Scored, controller: KLController) -> Penalised:
    """Charge the selected rows with their KL, log it, and move β; then mask truncated completions out of the loss
    (``mask_cut``). Without a KL in the reward only the masking remains. A collective."""
    kl = controller.kl
    beta = controller.coefficient
    table = scored.rewarded.table
    to_go = None
    charged = None
    if kl is not None and beta is not None:
        mask = loss_mask(scored.batch)
        carried = Carried(scored.batch)
        own = carried.proximal_logps
        if own is None:  # the loss does not read these: it takes its own forward's (``step.log_probs``)
            own = _log_probs_at_generation(trainer, scored.batch)
        log_probs = (own.double(), carried.ref_logps.double())
        of_tokens = _finite(trainer, kl.of_tokens(*log_probs, mask))
        penalty = trainer.accelerator.gather(of_tokens.sum(-1))
        trainer.recorder.book().add_alike("kl/reward_penalty", penalty.sum(), penalty.numel())
        if kl.per == "sequence":
            unscorable = table.values.isnan().all(dim=1, keepdim=True)
            column = (-beta * penalty).unsqueeze(1).to(table.values).masked_fill(unscorable, float("nan"))
            table = replace(
                table,
                values=torch.cat([table.values, column], dim=1),
                names=(*table.names, "kl"),
                weights=torch.cat([table.weights, torch.ones_like(table.weights[:1])]),
                penalties=table.penalties + 1,
            )
        else:
            charged = -beta * of_tokens
            to_go = -beta * reward_to_go(of_tokens, mask, kl.gamma)
        if controller.control is not None:
            measured = _finite(trainer, masked_sum(k1(*log_probs), mask, dim=-1))
            controller.charged(trainer.accelerator.gather(measured))
    mask_cut(trainer, scored)
    made = Penalised(scored, with_local_rows(trainer, scored, table), to_go, charged)
    if to_go is not None:
        scorable = ~table.values.isnan().all(dim=1)[made.local.rows]
        made = replace(made, to_go=to_go * scorable.unsqueeze(1).to(to_go))
    return made


def _finite(trainer: Collectives, kl: Tensor) -> Tensor:
    """Return ``kl``, with 0 for values that are not finite if a guard is in force, and mark the batch as bad then. As a
    reward NaN would mean that the completion cannot be scored."""
    faults = trainer.recorder.faults_in_training
    if faults is None or bool(kl.isfinite().all()):
        return kl
    faults.found("reward", "the KL in the reward is not finite: log-probs of the policy or the reference are not")
    return kl.where(kl.isfinite(), 0.0)


@torch.no_grad()
def _log_probs_at_generation(trainer: UpdatePort, batch: dict[str, Any]) -> Tensor:
    """Compute the log-probs ``[B, T]`` of the policy as it is now, in nats: in bins if these are exact, else as TRL
    does."""
    if GenerationForwards.of(trainer).in_bins and not trl_bridge.is_multimodal(batch):
        return log_probs_in_bins(trainer, trainer.model, batch)
    return padded_log_probs(trainer, batch)
