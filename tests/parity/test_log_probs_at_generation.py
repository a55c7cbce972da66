"""Old and reference log-probs at generation: TRL's numbers from bins, and no forward for rows that nothing reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.update import live_rows
from parity.harness import arguments, assert_same_movement, mixed_reward, movement_difference, train
from tolerance import log_prob_gap, loss_gap

TWICE = {"num_iterations": 2, "max_steps": 2, "loss_type": "dr_grpo", "scale_rewards": "none"}


class Recorder:
    """The first generation batch of a run as the loss left it, and what no-grad forwards compute."""

    def __init__(self) -> None:
        self.left: list[dict[str, Any]] = []
        self.positions = 0

    def __call__(self, trainer: Any) -> None:
        if isinstance(trainer, LabTrainer):
            # asked once a run; its forwards are not those of a generation batch
            trainer.exact_update.verdict.probe.why_stock()

        def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                self.positions += kwargs["input_ids"].numel()

        trainer.model.register_forward_pre_hook(count, with_kwargs=True)


def both(
    tmp_path: Path, model: Path, dead_every: int = 3, lab: dict[str, Any] | None = None, **changes: Any
) -> tuple[Recorder, Recorder]:
    found = []
    for kind, config, own in ((GRPOTrainer, GRPOConfig, {}), (LabTrainer, LabConfig, lab or {})):
        recorder = Recorder()
        args = config(**arguments(tmp_path, **{**TWICE, **changes, **own}))
        run = train(kind, args, model, reward=mixed_reward(dead_every), prepare=recorder)
        recorder.left = run.trainer._buffered_inputs  # two steps: the only batch
        found.append(recorder)
    return found[0], found[1]


#: log-probs of about 6 nats over a width of 32, computed twice
FLOAT32 = log_prob_gap(torch.float32, nats=6.0, width=32)


@pytest.mark.not_fast
@pytest.mark.parametrize("changes", [{}, {"steps_per_generation": 6, "num_iterations": 1}], ids=["twice", "outlives"])
def test_old_log_probs_are_trls_on_live_rows_and_not_computed_on_dead_ones(
    tmp_path: Path, tiny_folder: Path, changes: dict[str, Any]
) -> None:
    """A second pass takes those of the first's forward; micro-batches that wait for a later step get theirs before the
    update."""
    # a first shared bin would be compared, by forwards of its own
    stock, ours = both(tmp_path, tiny_folder, lab={"update": {"share_prompts": "off"}}, **changes)
    lengths = checked = 0
    for place, (batch, reference) in enumerate(zip(ours.left, stock.left, strict=True)):
        assert batch["grpo_lab.policy_version"].eq(0).all()  # written before the first of the two steps
        if changes and place < 3:  # trained on before any update: by the forward's own
            assert "old_per_token_logps" not in batch
            continue
        mask = batch["completion_mask"].bool()
        assert torch.equal(batch["completion_ids"], reference["completion_ids"])
        live = live_rows(batch["advantages"], mask)
        found, theirs = batch["old_per_token_logps"], reference["old_per_token_logps"]
        assert torch.allclose(found[live][mask[live]], theirs[live][mask[live]], rtol=0, atol=FLOAT32)
        assert (found[~live] == 0).all()
        assert (found[~mask] == 0).all()
        checked += int(live.sum())
        lengths += int((batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1))[live].sum())
    assert checked > 0
    assert any((~live_rows(batch["advantages"], batch["completion_mask"])).any() for batch in ours.left), "a dead row"
    if changes:
        assert lengths <= ours.positions < 0.6 * stock.positions
    else:
        assert ours.positions == 0, "the first pass has all numbers"


@pytest.mark.not_fast
def test_with_a_kl_term_all_rows_are_computed_without_padding(tmp_path: Path, tiny_folder: Path) -> None:
    stock, ours = both(tmp_path, tiny_folder, beta=0.1)
    for batch, theirs in zip(ours.left, stock.left, strict=True):
        mask = batch["completion_mask"].bool()
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            assert torch.allclose(batch[name][mask], theirs[name][mask], rtol=0, atol=FLOAT32)
    assert ours.positions == 0  # the policy's; the reference is a model of its own


@pytest.mark.not_fast
def test_no_live_row_is_no_trouble(tmp_path: Path, tiny_folder: Path) -> None:
    """With an objective of ours: a drop-in computes these rows once for stock TRL's ``entropy``."""
    lab = {"objective": "dr_grpo"}
    _, ours = both(tmp_path, tiny_folder, dead_every=1, lab=lab, steps_per_generation=6, num_iterations=1)
    assert all((batch["old_per_token_logps"] == 0).all() for batch in ours.left[3:])
    assert ours.positions <= 4, "one stand-in of two tokens at most"


@pytest.mark.not_fast
def test_a_loss_of_the_teams_own_gets_what_trl_would_give_it(tmp_path: Path, tiny_folder: Path) -> None:
    """A subclass that replaces ``_compute_loss`` may read any row."""

    class Team(LabTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            assert (inputs["old_per_token_logps"] != 0).any(dim=1).all()
            return GRPOTrainer._compute_loss(self, model, inputs)

    train(Team, LabConfig(**arguments(tmp_path, **TWICE)), tiny_folder)


def literal_log_probs(model: Any, prompt: list[int], completion: list[int]) -> list[float]:
    """One row alone, in float64: no padding, no bins."""
    row = torch.tensor([prompt + completion])
    with torch.no_grad():
        scores = copy.deepcopy(model).double()(input_ids=row).logits[0].log_softmax(-1)
    return [float(scores[len(prompt) + t - 1, token]) for t, token in enumerate(completion)]


@pytest.mark.not_fast
def test_kl_in_the_reward_reads_all_rows(tmp_path: Path, tiny_folder: Path) -> None:
    """The penalty comes before the advantages, so no row can be left out: of each it is −0.1·Σ_t (log π − log π_ref),
    row by row from the models themselves."""
    seen: list[tuple[list[float], list[float]]] = []

    class Team(LabTrainer):
        def compute_advantages(self, table: Any) -> torch.Tensor:
            self.column = table.values[:, table.names.index("kl")].tolist()
            return super().compute_advantages(table)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            expected = []
            for i in range(output["prompt_ids"].size(0)):
                prompt = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
                completion = output["completion_ids"][i][output["completion_mask"][i].bool()].tolist()
                policy, reference = (literal_log_probs(m, prompt, completion) for m in (self.model, self.ref_model))
                expected.append(-0.1 * (sum(policy) - sum(reference)))
            seen.append((self.column, expected))
            return output

    settings = {"objective": "reinforce", "kl": {"estimator": "k1", "coefficient": 0.1, "placement": "reward"}}
    args = LabConfig(**arguments(tmp_path, max_steps=2, per_device_train_batch_size=4, **settings))
    train(Team, args, tiny_folder)
    assert len(seen) == 2
    assert max(map(abs, seen[0][1])) == 0.0, "the policy is the reference"
    assert min(map(abs, seen[1][1])) > 1e-4, "it has moved, on rows of dead groups as well"
    gap = 0.1 * 30 * FLOAT32  # 30 tokens at most, each off by as much as a log-prob may be
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=0, abs=gap)


@pytest.mark.not_fast
def test_a_subclass_that_moves_advantages_afterwards(tmp_path: Path, tiny_folder: Path) -> None:
    """Rows that had no advantage when log-probs were computed may have one when the loss reads them."""

    class Team(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            output["advantages"] = output["advantages"] + 0.5
            return output

    settings = arguments(tmp_path, **TWICE)
    ours, stock = (train(Team, LabConfig(**settings, update=update), tiny_folder) for update in (None, "off"))
    bound = loss_gap(
        torch.float32, terms=1.5, additions=12 * 30, steps=len(stock.losses)
    )  # mean |Â| ≤ 1, and 0.5 on top
    assert ours.losses == pytest.approx(stock.losses, rel=0, abs=bound)
    assert_same_movement(ours, stock)
    without = train(LabTrainer, LabConfig(**settings, update=None), tiny_folder)
    assert movement_difference(without, stock) > 0.1, "rows of dead groups weigh nothing here: nothing was proven"


@pytest.mark.not_fast
def test_kl_in_the_reward_leaves_an_on_policy_ratio_at_one(tmp_path: Path, models: dict[str, Path]) -> None:
    """Log-probs for the penalty come from a forward with other dropout masks; with one update a batch the loss must not
    read them."""
    seen: list[float] = []

    class Team(LabTrainer):
        def token_loss(self, batch: Any) -> torch.Tensor:
            if batch.logps.dtype == torch.float32:
                seen.append(batch.log_ratio.abs().max().item())
            return super().token_loss(batch)

    kl = {"estimator": "k1", "coefficient": 0.1, "placement": "reward"}
    train(Team, LabConfig(**arguments(tmp_path, max_steps=2), objective="dr_grpo", kl=kl), models["dropout"])
    assert seen
    assert max(seen) == 0.0
