"""``update.dead_groups: resample``: what is thrown away by the rule in force, and advantages of what stays, against a
literal loop.

The loop knows the rewards of every round (the reward function writes them down) and the formulas, nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from parity.harness import arguments, problems, train

GROUP, WANTED, ROUNDS = 4, 3, 4
Rows = list[tuple[list[int], float]]


def raw(rewards: list[float]) -> list[float]:
    return rewards


def group_max(rewards: list[float]) -> list[float]:
    groups = [rewards[i : i + GROUP] for i in range(0, len(rewards), GROUP)]
    return [r if r == max(group) else 0.0 for group in groups for r in group]


def batch_zscore(rewards: list[float]) -> list[float]:
    std = statistics.stdev(rewards)
    groups = [rewards[i : i + GROUP] for i in range(0, len(rewards), GROUP)]
    return [(r - statistics.fmean(group)) / (std + 1e-4) for group in groups for r in group]


def regret(rewards: list[float]) -> list[float]:
    """A team's: what is missing to a full score. A group that is right throughout teaches nothing; one that is wrong
    does."""
    return [r - 1.0 for r in rewards]


class Watched(LabTrainer):
    """Keeps, for every generation batch, the rewards of each round and the batch that came out."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        rounds: list[Rows] = []
        self.reward_funcs[0].rounds = rounds
        output = super()._generate_and_score_completions(inputs)
        mask = output["completion_mask"].bool()
        ids = [row[kept].tolist() for row, kept in zip(output["completion_ids"], mask, strict=True)]
        logged = [list(self._logs[name]) for name in ("advantages",)] + [list(self._logs["rewards"]["Reward"])]
        seen = {"rounds": rounds, "ids": ids, "advantages": output["advantages"].tolist(), "logged": logged}
        self.__dict__.setdefault("seen", []).append(seen)
        return output


class Regretting(Watched):
    def compute_advantages(self, table: Any) -> torch.Tensor:
        self.__dict__.setdefault("tables", []).append(table.total.tolist())
        return table.total - 1.0


class Reward:
    """Groups right throughout (1), wrong throughout (0) and mixed ones, in eighths: exact in float32. Keeps what it
    gave."""

    __name__ = "Reward"
    rounds: list[Rows]

    def __call__(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        kinds = (1.0, 0.0, None, 1.0, None)
        values = [
            (sum(ids) % 8) / 8 if kinds[n % 5] is None else kinds[n % 5]
            for n, ids in zip(number, completion_ids, strict=True)
        ]
        self.rounds.append(list(zip(completion_ids, values, strict=True)))
        return values


def literal(rounds: list[Rows], rule: Callable[[list[float]], list[float]], dead: str) -> tuple[int, Rows, list[float]]:
    """Rounds needed, the rows that stay, their advantages."""
    kept: list[Rows] = []
    used = 0
    for rows in rounds:
        used += 1
        for start in range(0, len(rows), GROUP):
            group = rows[start : start + GROUP]
            values = [r for _, r in group]
            gone = len(set(values)) == 1 if dead == "equal" else all(a == 0 for a in rule(values))
            if not gone:
                kept.append(group)
        if len(kept) >= WANTED:
            break
    if len(kept) < WANTED:
        first = [rounds[0][i : i + GROUP] for i in range(0, len(rounds[0]), GROUP)]
        kept += [group for group in first if group not in kept]
    rows = [row for group in kept[:WANTED] for row in group]
    return used, rows, rule([r for _, r in rows])


CASES: dict[str, tuple[Any, str]] = {
    "batch_zscore": (batch_zscore, "equal"),
    "raw": (raw, "zero"),
    "group_max": (group_max, "zero"),
    "hook": (regret, "zero"),
}


@pytest.mark.not_fast
@pytest.mark.parametrize("name", CASES)
def test_against_a_literal_loop(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    rule, dead = CASES[name]
    objective = {"name": "dr_grpo"} if name == "hook" else {"name": "dr_grpo", "advantage": name}
    settings = arguments(tmp_path, max_steps=4, learning_rate=0.1)
    args = LabConfig(**settings, objective=objective, update={"dead_groups": "resample", "max_rounds": ROUNDS})
    kind = Regretting if name == "hook" else Watched
    run = train(kind, args, tiny_folder, reward=[Reward()], train_dataset=problems(40))
    rounds_of = [row["update/resample_rounds"] for row in run.history if "update/resample_rounds" in row]
    assert max(rounds_of) > 1, "nothing was drawn: nothing is compared"
    alike_and_live = 0
    for seen, rounds in zip(run.trainer.seen, rounds_of, strict=True):
        used, rows, advantages = literal(seen["rounds"], rule, dead)
        assert rounds == used == len(seen["rounds"])
        assert seen["ids"] == [ids for ids, _ in rows]
        assert seen["advantages"] == pytest.approx(advantages, rel=2**-22, abs=2**-24)  # float32 of numbers of size 1
        # the completions table shows what is trained on
        assert seen["logged"][0] == pytest.approx(advantages, rel=2**-22, abs=2**-24)
        assert seen["logged"][1] == [r for _, r in rows]
        groups = [[r for _, r in rows[i : i + GROUP]] for i in range(0, len(rows), GROUP)]
        alike_and_live += sum(len(set(group)) == 1 and any(rule(group)) for group in groups)
        assert math.isfinite(sum(advantages))
    assert (alike_and_live > 0) == (dead == "zero"), "a rule that learns from equal rewards got such groups"


@pytest.mark.not_fast
def test_a_hook_is_asked_on_what_is_kept(tiny_folder: Path, tmp_path: Path) -> None:
    """Never on a group that was thrown away before; and last, for the advantages, on just what is trained on."""
    args = LabConfig(
        **arguments(tmp_path, max_steps=1),
        objective="dr_grpo",
        update={"dead_groups": "resample", "max_rounds": ROUNDS},
    )
    trainer = train(Regretting, args, tiny_folder, reward=[Reward()], train_dataset=problems(40)).trainer
    (seen,), tables = trainer.seen, trainer.tables
    kept: list[float] = []
    for rows, table in zip(seen["rounds"], tables, strict=False):
        values = [r for _, r in rows]
        assert table == kept + values
        for start in range(0, len(values), GROUP):
            group = values[start : start + GROUP]
            kept += group if any(r != 1.0 for r in group) else []
    assert len(tables) == len(seen["rounds"]) + 1
    assert tables[-1] == kept[: WANTED * GROUP]
