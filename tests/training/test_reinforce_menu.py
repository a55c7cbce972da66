"""The menu's losses as inner updates on one rollout, and the small script's loss, against literal loops over rows in
float64.

Old log-probs are those of the rollout in every update, and so are the reference's. The oracle shares nothing with the
trainer but the model, the completions and the rewards.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import Denominators, TokenBatch
from grpo_lab.objectives import KLTerm, Objective, aggregation, surrogate
from grpo_lab.testing import ScriptedRollout
from metrics_oracle import in_float64
from parity.harness import LENGTHS, Run, arguments, mixed_reward, movement_bound, movement_difference, train

BETA, BUDGET, UPDATES = 0.3, 32, 3
SETTINGS = {"max_steps": UPDATES, "num_iterations": UPDATES, "learning_rate": 0.4, "max_completion_length": BUDGET}


class Watched(LabTrainer):
    """Keeps the prompts of the generation batch and the model that it was made by."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        ids, mask = output["prompt_ids"], output["prompt_mask"].bool()
        self.__dict__["prompts"] = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        self.__dict__["numbers"] = [row["number"] for row in inputs]
        self.__dict__["start"] = in_float64(self.model)
        return output


def log_probs(model: Any, prompt: list[int], ids: list[int]) -> Tensor:
    scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def trained(folder: Path, model: Path, **settings: Any) -> Run:
    return train(Watched, LabConfig(**arguments(folder, **{**SETTINGS, **settings})), model)


def literal(run: Run, per_row: Any, frozen: bool = True) -> Run:
    """The same updates by SGD in float64: loss = Σ_rows ``per_row(row, log π, log π_old, log π_ref)``.

    frozen: False takes the policy's own log-probs for the old ones in every update (what would be wrong).
    """
    trainer = run.trainer
    rollout, tokenizer = trainer.rollout_func, trainer._tokenizer
    assert rollout.calls == 1
    assert rollout.end_id == tokenizer.eos_token_id
    rows = [rollout.completion(0, row) for row in range(len(trainer.prompts))]
    model = copy.deepcopy(trainer.start)
    before = [log_probs(model, prompt, ids).detach() for prompt, ids in zip(trainer.prompts, rows, strict=True)]
    for _ in range(UPDATES):
        model.zero_grad()
        for i, (prompt, ids) in enumerate(zip(trainer.prompts, rows, strict=True)):
            new = log_probs(model, prompt, ids)
            per_row(i, new, before[i] if frozen else new.detach(), before[i]).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= trainer.args.learning_rate * weight.grad
    return Run([], [], model.state_dict(), run.start, run.history, None)


def rewards_of(run: Run) -> list[float]:
    trainer = run.trainer
    rows = [trainer.rollout_func.completion(0, row) for row in range(len(trainer.prompts))]
    return mixed_reward()(prompts=[], completion_ids=rows, number=trainer.numbers)


def centred(rewards: list[float]) -> list[float]:
    return [r - sum(rewards[i - i % 4 : i - i % 4 + 4]) / 4 for i, r in enumerate(rewards)]


def zscored(rewards: list[float]) -> list[float]:
    """(r − mean)/(σ + 1e-4), σ of the population, as numpy's ``std`` has it."""
    found = []
    for start in range(0, len(rewards), 4):
        group = rewards[start : start + 4]
        mean = sum(group) / 4
        sigma = math.sqrt(sum((r - mean) ** 2 for r in group) / 4)
        found += [(r - mean) / (sigma + 1e-4) for r in group]
    return found


def push(kind: str, advantage: float, new: Tensor, old: Tensor) -> Tensor:
    if kind == "reinforce":
        return -advantage * new
    ratio = (new - old).exp()
    if kind == "unclipped":
        return -ratio * advantage
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


@pytest.mark.not_fast
@pytest.mark.parametrize("kind", ["reinforce", "unclipped", "clipped"])
def test_inner_updates_on_one_rollout(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Three updates, the reference copied after each: neither old nor reference log-probs follow before the next
    rollout."""
    objective = {"name": "reinforce", "surrogate": kind}
    kl = {"estimator": "k3", "placement": "loss", "coefficient": BETA}
    run = trained(tmp_path, tiny_folder, objective=objective, kl=kl, reference_every=1)
    advantages = centred(rewards_of(run))
    rows = len(advantages)

    def per_row(i: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        x = ref - new
        return (push(kind, advantages[i], new, old) + BETA * (x.exp() - x - 1)).sum() / (rows * BUDGET)

    expected = literal(run, per_row)
    assert movement_difference(run, expected) <= movement_bound(expected)
    if kind != "reinforce":
        assert movement_difference(run, literal(run, per_row, frozen=False)) > 10 * movement_bound(expected)


@pytest.mark.not_fast
def test_the_small_scripts_loss_through_the_trainer(tiny_folder: Path, tmp_path: Path) -> None:
    """−log π·A + β·k3, summed over tokens, over the number of response tokens; ``beta`` alone is the plain k3."""
    run = trained(tmp_path, tiny_folder, objective="reinforce_token_mean", beta=BETA, learning_rate=0.05)
    advantages = zscored(rewards_of(run))
    tokens = sum(len(run.trainer.rollout_func.completion(0, row)) for row in range(len(advantages)))

    def per_row(i: int, new: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        x = ref - new
        return (-new * advantages[i] + BETA * (x.exp() - x - 1)).sum() / tokens

    expected = literal(run, per_row)
    assert movement_difference(run, expected) <= movement_bound(expected)
    assert run.trainer.args.use_bias_correction_kl is False
    first = next(row for row in run.history if "loss" in row)
    dead = sum(len({*rewards_of(run)[i : i + 4]}) == 1 for i in range(0, len(advantages), 4)) / (len(advantages) / 4)
    assert first["groups/dead_share"] == pytest.approx(dead)  # the script's zero-advantage share, by groups
    cut = sum(
        run.trainer.rollout_func.completion(0, row)[-1] != run.trainer.rollout_func.end_id
        for row in range(len(advantages))
    ) / len(advantages)
    assert first["completions/truncated_share"] == pytest.approx(cut)  # its non-stop rate
    assert first["entropy"] > 0


def test_the_small_scripts_loss_in_float64() -> None:
    """Loss and gradient of ragged rows, to rounding."""
    generator = torch.Generator().manual_seed(0)
    logps, ref = (-3 * torch.rand(8, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    lengths = [9, 1, 4, 7, 2, 9, 3, 5]
    mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    advantages = torch.tensor(zscored([1.0, 0.0, 0.0, 0.3, 0.5, 0.5, 0.5, 0.5]), dtype=torch.float64)
    logps.requires_grad_()
    objective = Objective(
        "reinforce_token_mean", surrogate("reinforce"), aggregation("token_mean"), kl=KLTerm(BETA, "k3")
    )
    batch = TokenBatch(
        logps=logps,
        proximal_logps=logps.detach(),
        log_ratio=logps - logps.detach(),
        advantages=advantages.unsqueeze(1),
        mask=mask,
        ref_logps=ref,
    )
    loss = objective.loss(batch, Denominators(rows=8.0, tokens=float(sum(lengths)), budget=9.0))
    (gradient,) = torch.autograd.grad(loss, logps)
    value, slopes = 0.0, torch.zeros(8, 9, dtype=torch.float64)
    for i, length in enumerate(lengths):
        for t in range(length):
            new, x = logps[i, t].item(), ref[i, t].item() - logps[i, t].item()
            value += (-new * advantages[i].item() + BETA * (math.exp(x) - x - 1)) / sum(lengths)
            slopes[i, t] = (-advantages[i].item() + BETA * (1 - math.exp(x))) / sum(lengths)
    assert loss.item() == pytest.approx(value, rel=1e-14)
    torch.testing.assert_close(gradient, slopes, rtol=1e-13, atol=1e-16)


def test_a_weighted_k3_beside_it_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`use_bias_correction_kl`=True contradicts `objective`='reinforce_token_mean'"
    ):
        LabConfig(
            output_dir="x",
            use_cpu=True,
            bf16=False,
            objective="reinforce_token_mean",
            beta=0.1,
            use_bias_correction_kl=True,
        )
    weighted = {"estimator": "k3", "coefficient": 0.1, "ratio_weighted": True}
    LabConfig(output_dir="x", use_cpu=True, bf16=False, objective="reinforce_token_mean", kl=weighted)


@pytest.mark.not_fast
def test_a_returns_rule_trains(tiny_folder: Path, tmp_path: Path) -> None:
    """γ per token by name: the advantages of the batch are the discounted deltas."""

    class Kept(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            self.__dict__.setdefault("seen", (output, [row["number"] for row in inputs]))
            return output

    advantage = {"name": "returns", "gamma": 0.9, "delta": "raw"}
    config = LabConfig(**arguments(tmp_path, max_steps=1), objective="reinforce", advantage=advantage)
    rollout = ScriptedRollout(range(20, 90), LENGTHS)
    run = train(Kept, config, tiny_folder, rollout=rollout)
    output, numbers = run.trainer.seen
    rows = [rollout.completion(0, row) for row in range(len(numbers))]
    rewards = mixed_reward()(prompts=[], completion_ids=rows, number=numbers)
    for ids, reward, found in zip(rows, rewards, output["advantages"].tolist(), strict=True):
        expected = [0.9 ** (len(ids) - 1 - t) * reward for t in range(len(ids))]
        assert found[: len(ids)] == pytest.approx(expected, rel=1e-6)
