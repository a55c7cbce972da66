"""Random points of the whole space: parts, their numbers, batch shapes, masks, rewards. Everything follows from a
number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from sweep.formulas import PAPER, Formula

VOCABULARY = range(20, 90)
BUDGET = 24
RULES = ("raw", "group_mean", "group_zscore", "batch_zscore", "leave_one_out", "group_max")
SURROGATES = ("reinforce", "unclipped", "clipped", "cispo")
AGGREGATIONS = ("sequence_mean", "token_mean", "local_token_mean", "fixed_budget", "sequence_sum")
#: (micro-batch rows, accumulation, generations a prompt, micro-batches a generation batch in accumulation windows)
SHAPES = (
    (4, 3, 4, 1),
    (3, 4, 4, 1),
    (6, 1, 3, 1),
    (12, 1, 4, 1),
    (4, 2, 4, 2),
    (2, 3, 3, 2),
    (6, 1, 4, 2),
    (1, 8, 4, 1),
)


@dataclass
class Case:
    """One run: what is asked of the trainer (``settings``), and the same said to the formulas."""

    number: int
    formula: Formula
    settings: dict[str, Any]
    accumulation: int
    group: int
    windows: int
    iterations: int
    temperature: float
    completions: list[list[int]]
    own: list[list[int]]
    rewards: list[float | None]
    mask_truncated: bool
    words: str = field(default="")


def draw(number: int) -> Case:
    """Case ``number``: a preset, up to four of its parts replaced, a KL term or none, and a generation batch."""
    rng = random.Random(f"sweep/{number}")
    formula, objective = _parts(rng, list(PAPER)[number % len(PAPER)])  # every preset as often as any other
    size, accumulation, group, windows = rng.choice(SHAPES)
    iterations = rng.choice((1, 2, 2))
    settings: dict[str, Any] = {
        "objective": objective,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * windows,
        "num_generations": group,
        "num_iterations": iterations,
        "max_steps": windows * iterations,
        "max_completion_length": BUDGET,
        "temperature": rng.choice((1.0, 1.0, 0.7)),
    }
    if formula.advantage in ("group_zscore", "batch_zscore") and rng.random() < 0.3:
        formula.std_epsilon = 0.05
        settings["advantage"] = {"name": formula.advantage, "epsilon": 0.05}
    _kl(rng, formula, settings)
    settings["update"] = rng.choice(
        (None, None, "off", {"dead_groups": "keep"}, {"dead_groups": "skip", "max_tokens": 64})
    )
    rows = size * accumulation * windows
    completions, own = _completions(rng, rows)
    case = Case(
        number, formula, settings, accumulation, group, windows, iterations, settings["temperature"], completions, own,
        _rewards(rng, rows, group), mask_truncated=not formula.kl_in_reward and rng.random() < 0.3,
    )  # fmt: skip
    settings["mask_truncated_completions"] = case.mask_truncated
    case.words = f"case {number}: {settings} → {formula}"
    return case


def _parts(rng: random.Random, name: str) -> tuple[Formula, dict[str, Any]]:
    """A preset with up to four of its parts replaced, for the formulas and as ``objective``."""
    rule, push, average, ratio = PAPER[name]
    objective: dict[str, Any] = {"name": name}
    if name != "mirror_descent":
        if rng.random() < 0.35:
            push = objective["surrogate"] = rng.choice(SURROGATES)
        if rng.random() < 0.4:
            average = objective["aggregation"] = rng.choice(AGGREGATIONS)
        if push != "reinforce" and rng.random() < 0.3:
            ratio = objective["ratio"] = rng.choice(("token", "sequence"))
    if rng.random() < 0.6:
        rule = objective["advantage"] = rng.choice(RULES)
    formula = Formula(rule, push, average, ratio)
    _knobs(rng, formula, objective)
    return formula, objective


def _knobs(rng: random.Random, formula: Formula, objective: dict[str, Any]) -> None:
    """Clips so narrow that they act after one step; a coarse pull for mirror descent."""
    if formula.surrogate == "clipped":
        formula.epsilon = formula.epsilon_high = objective["epsilon"] = rng.choice((0.01, 0.05, 0.2))
        if rng.random() < 0.5:
            formula.epsilon_high = objective["epsilon_high"] = rng.choice((0.02, 0.1, 0.28))
        if rng.random() < 0.3:
            formula.delta = objective["delta"] = 1.0 + formula.epsilon_high + 0.05
    elif formula.surrogate == "cispo":
        formula.epsilon_high = objective["epsilon_high"] = rng.choice((0.9, 1.02, 5.0))
    elif formula.surrogate == "mirror_descent":
        formula.tau = objective["tau"] = rng.choice((0.1, 1.0))


def _kl(rng: random.Random, formula: Formula, settings: dict[str, Any]) -> None:
    """None; TRL's flat ``beta``; or one of ours in the loss or in the reward."""
    kind = rng.choice(("none", "none", "flat", "loss", "loss", "reward", "reward"))
    if kind == "none":
        return
    formula.beta = rng.choice((0.05, 0.5))
    if kind == "flat":
        formula.kl, formula.kl_weighted = "k3", rng.random() < 0.5
        settings |= {"beta": formula.beta, "use_bias_correction_kl": formula.kl_weighted}
        return
    formula.kl = rng.choice(("k1", "k2", "k3"))
    formula.kl_in_reward = kind == "reward"
    settings["kl"] = {"estimator": formula.kl, "placement": kind, "coefficient": formula.beta}
    if kind == "loss" and rng.random() < 0.5:
        formula.kl_weighted = settings["kl"]["ratio_weighted"] = True


def _completions(rng: random.Random, rows: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids (an end is put on later: −1), and 1 where the policy made the token. The first token names the row."""
    completions, own = [], []
    for first in rng.sample(VOCABULARY, rows):
        length = rng.choice((1, 2, 4, 7, 11, 16, BUDGET))
        ids = [first] + [rng.choice(VOCABULARY) for _ in range(length - 1)]
        mine = [1] * length
        if length > 3 and rng.random() < 0.3:  # a tool's words in the middle
            start = rng.randrange(1, length - 1)
            stop = min(start + rng.randrange(1, 6), length)
            mine[start:stop] = [0] * (stop - start)
        if length > 1 and rng.random() < 0.75:
            ids[-1] = -1
        completions.append(ids)
        own.append(mine)
    return completions, own


def _rewards(rng: random.Random, rows: int, group: int) -> list[float | None]:
    """Quarters, exact in float32. The first group is always alive; a later one may be dead; a row may be unscorable."""
    found: list[float | None] = []
    for start in range(0, rows, group):
        values: list[float | None] = [rng.randrange(-2, 5) / 4 for _ in range(group)]
        if start and rng.random() < 0.4:
            values = [values[0]] * group
        if not start:
            values[0], values[1] = 1.0, 0.0
        found += values
    if rng.random() < 0.3:
        found[rng.randrange(2, rows)] = None
    return found
