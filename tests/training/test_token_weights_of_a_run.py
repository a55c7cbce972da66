"""``token_weights_every``: a line of the weights that tokens really had, from both ways to make an update, and nothing
else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.guard_worker import EACH, STEPS, Plant, build
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.batch import TokenBatch
from grpo_lab.diagnostics.token_weights import FILE
from grpo_lab.evaluation import write_report
from grpo_lab.runs.metrics import MetricsFile
from grpo_lab.trainer.metrics.token_weight_log import pass_rates
from parity.harness import Run, arguments, train

ROWS, BUDGET = 12, 32


def right(prompts: list[str], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Every third question is right, all of its completions; of the others those with an even sum of tokens."""
    return [float(n % 3 == 0 or sum(ids) % 2 == 0) for n, ids in zip(number, completion_ids, strict=True)]


right.measures_correctness = True  # type: ignore[attr-defined]


class Weighed(LabTrainer):
    """A team's hook that keeps metrics: it must be asked once a bin, and no more for being looked at."""

    asked = 0

    def token_loss(self, batch: TokenBatch) -> torch.Tensor:
        type(self).asked += 1
        return 2.0 * super().token_loss(batch)


def run(folder: Path, model: Path, trainer: Any = LabTrainer, **changes: Any) -> tuple[Run, list[dict[str, Any]]]:
    args = LabConfig(**arguments(folder, max_steps=3, **changes))
    done = train(trainer, args, model, reward=right, callbacks=[MetricsFile(folder / "metrics.jsonl")])
    file = folder / FILE
    return done, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.not_fast
@pytest.mark.parametrize("update", [None, "off"], ids=["exact", "stock"])
def test_nothing_that_is_trained_changes(update: str | None, tmp_path: Path, tiny_folder: Path) -> None:
    """To the bit: losses, norms, what is logged, every weight."""
    same = {"objective": "dapo", "update": update, "num_iterations": 2}
    plain, none = run(tmp_path / "plain", tiny_folder, **same)
    seen, lines = run(tmp_path / "seen", tiny_folder, token_weights_every=2, **same)
    assert none == []
    assert [line["step"] for line in lines] == [1, 3]
    assert (plain.losses, plain.grad_norms) == (seen.losses, seen.grad_norms)
    assert all(torch.equal(plain.weights[name], seen.weights[name]) for name in plain.weights)
    timed = ("runtime", "per_second", "time")
    for then, now in zip(plain.history, seen.history, strict=True):
        untimed = {name for name in then if not any(word in name for word in timed)}
        assert {name: then[name] for name in untimed} == {name: now[name] for name in untimed}


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("objective", "column", "denominator"),
    [("grpo", "answer_advantage", ROWS), ("dr_grpo", "token_advantage", ROWS * BUDGET)],
)
def test_bins_and_trl_s_batches_say_the_formula(
    objective: str, column: str, denominator: int, tmp_path: Path, tiny_folder: Path
) -> None:
    """On-policy Σ|w| = Σ|Â|/rows under GRPO and Σ_t|Â|/(rows · budget) under Dr.GRPO, in every bucket, to float32's
    rounding (1e-5); the update that leaves dead rows out and the one that computes all agree."""
    found = {}
    for update in (None, "off"):
        folder = tmp_path / f"{objective}-{update}"
        _, lines = run(folder, tiny_folder, objective=objective, update=update, token_weights_every=1)
        assert len(lines) == 3
        for line in lines:
            buckets = [*line["by_length"], *line["by_pass_rate"]]
            for bucket in buckets:
                assert bucket["weight"] == pytest.approx(bucket[column] / denominator, rel=1e-5, abs=1e-12)
            assert sum(bucket["rows"] for bucket in line["by_length"]) <= ROWS  # cut ones may be masked
            assert sum(bucket["rows"] for bucket in line["by_pass_rate"]) <= ROWS
        found[update] = lines[0]["by_length"], lines[0]["by_pass_rate"]
    dead = sum(line["by_pass_rate"][5]["rows"] for line in lines)
    assert dead >= 4
    assert sum(line["by_pass_rate"][5]["weight"] for line in lines) == 0
    for binned, stock in zip(*(by for by in (found[None][0] + found[None][1], found["off"][0] + found["off"][1]))):
        assert binned == pytest.approx(stock, rel=1e-5, abs=1e-12)


@pytest.mark.not_fast
def test_the_hook_in_force_is_weighed_and_not_asked_again(tmp_path: Path, tiny_folder: Path) -> None:
    asked = []
    for every in (None, 1):
        Weighed.asked = 0
        _, lines = run(tmp_path / str(every), tiny_folder, Weighed, objective="grpo", token_weights_every=every)
        asked.append(Weighed.asked)
    assert asked[0] == asked[1] > 0
    for bucket in lines[0]["by_length"]:
        assert bucket["weight"] == pytest.approx(2 * bucket["answer_advantage"] / ROWS, rel=1e-5)


@pytest.mark.not_fast
def test_the_report_draws_them_beside_the_curves(tmp_path: Path, tiny_folder: Path) -> None:
    run(tmp_path, tiny_folder, objective="grpo", token_weights_every=1)
    page = write_report(tmp_path).read_text()
    assert "Weight of a token by the length of its answer" in page
    assert "Weight of an answer by its length" in page
    assert "Weight of an answer by its group" in page


def test_a_loss_that_is_left_to_trl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`token_weights_every` is set, but the loss is left to TRL"):
        LabConfig(**arguments(tmp_path, delta=1.1, token_weights_every=5))
    with pytest.raises(ValueError, match="token_weights_every"):
        LabConfig(**arguments(tmp_path, objective="grpo", token_weights_every=0))


def test_pass_rates_by_hand() -> None:
    """Right from 1 on; one of four could not be judged: 1 of 3; nobody could: unknown."""
    nan = float("nan")
    correct = torch.tensor([1.0, 0.0, nan, 0.5, nan, nan, nan, nan])
    found = pass_rates(correct, 8, 4)
    assert found[:4].tolist() == pytest.approx([1 / 3] * 4)
    assert found[4:].isnan().all()
    assert pass_rates(None, 8, 4).isnan().all()


@pytest.mark.not_fast
def test_a_step_that_is_left_out_has_no_line(tmp_path: Path, tiny_folder: Path) -> None:
    """By its loss, its gradient, a reward or a log-prob: no token weighed anything in it."""
    build(tiny_folder, tmp_path, Plant(EACH), token_weights_every=1).train()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in range(1, STEPS + 1) if step not in EACH]
