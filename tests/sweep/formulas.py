"""One policy update as the papers write it: plain loops over numbers in float64, derivatives by hand.

Written from the papers' formulas (GRPO arXiv 2402.03300, Dr.GRPO 2503.20783, DAPO 2503.14476, GSPO 2507.18071, CISPO
2506.13585, RLOO 2402.14740, Kimi k1.5 2501.12599, Schulman's KL note) and TRL 1.16's definitions of its denominators;
imports nothing of ``grpo_lab``. A row's numbers are lists over its tokens; ``logp`` is the policy now, ``old`` the
policy that made the completion, ``ref`` the reference, all log-probs in nats of the sampled tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INFINITE = float("inf")

#: preset → (advantage, surrogate, aggregation, ratio) by its paper
PAPER = {
    "grpo": ("group_zscore", "clipped", "sequence_mean", "token"),
    "dr_grpo": ("group_mean", "clipped", "fixed_budget", "token"),
    "dapo": ("group_zscore", "clipped", "token_mean", "token"),
    "bnpo": ("group_zscore", "clipped", "local_token_mean", "token"),
    "gspo": ("group_zscore", "clipped", "sequence_mean", "sequence"),
    "cispo": ("group_zscore", "cispo", "token_mean", "token"),
    "reinforce": ("group_mean", "reinforce", "fixed_budget", "token"),
    "mirror_descent": ("group_mean", "mirror_descent", "sequence_sum", "token"),
}


@dataclass
class Formula:
    """What an update is made of; numbers that a part does not read are ignored by it."""

    advantage: str
    surrogate: str
    aggregation: str
    ratio: str
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float = INFINITE
    tau: float = 0.1
    std_epsilon: float = 1e-4
    kl: str | None = None
    kl_in_reward: bool = False
    kl_weighted: bool = False
    beta: float = 0.0


@dataclass
class Row:
    """One completion in one update. ``counts`` says which tokens are the policy's own."""

    advantage: float
    logp: list[float]
    old: list[float]
    ref: list[float]
    counts: list[bool]
    micro_batch: int


@dataclass
class Update:
    """Loss, and for every row dloss/dlogp of each token. ``doubt``: how far float32 may be off in each derivative.

    ``clipped``: tokens whose ratio is beyond an end of the clip.
    """

    loss: float
    slopes: list[list[float]]
    doubt: list[list[float]]
    loss_doubt: float
    clipped: int = 0


def estimate(kind: str, x: float) -> tuple[float, float]:
    """Schulman's k1, k2, k3 at x = log π_ref − log π, and the derivative by log π."""
    if kind == "k1":
        return -x, 1.0
    if kind == "k2":
        return 0.5 * x * x, -x
    return math.exp(x) - x - 1.0, 1.0 - math.exp(x)


def advantages(
    rule: str, rewards: list[float | None], group: int, std_epsilon: float, error: float
) -> list[tuple[float, float]]:
    """(Â_i, how far it may be off if each reward is off by ``error``), rows of a group side by side."""
    usable = [r for r in rewards if r is not None]
    batch = deviation(usable)
    found: list[tuple[float, float]] = []
    for start in range(0, len(rewards), group):
        mine = [r for r in rewards[start : start + group] if r is not None]
        mean = math.fsum(mine) / len(mine) if mine else 0.0
        same = len(set(mine)) <= 1
        for r in rewards[start : start + group]:
            if r is None:
                found.append((0.0, 0.0))
            elif rule == "raw":
                found.append((r, error))
            elif rule == "group_max":
                found.append((r if r == max(mine) else 0.0, error))
            elif same:
                found.append((0.0, 0.0))
            elif rule == "group_mean":
                found.append((r - mean, 2 * error))
            elif rule == "leave_one_out":
                others = math.fsum(mine) - r
                found.append((r - others / (len(mine) - 1), 2 * error))
            else:
                spread = batch if rule == "batch_zscore" else deviation(mine)
                scaled = (r - mean) / (spread + std_epsilon)
                found.append((scaled, (2 * error + abs(scaled) * 2 * error) / (spread + std_epsilon)))
    return found


def deviation(values: list[float]) -> float:
    """Standard deviation with n − 1."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def penalised(formula: Formula, rewards: list[float | None], rows: list[Row]) -> list[float | None]:
    """r − β Σ_t k_t of the policy that made the completion, over its own tokens."""
    paid: list[float | None] = []
    for reward, row in zip(rewards, rows, strict=True):
        if reward is None or not formula.kl_in_reward:
            paid.append(reward)
            continue
        assert formula.kl is not None
        each = [estimate(formula.kl, b - a)[0] for a, b, own in zip(row.old, row.ref, row.counts, strict=True) if own]
        paid.append(reward - formula.beta * math.fsum(each))
    return paid


def token_weights(formula: Formula, rows: list[Row], batch_tokens: float, budget: int) -> list[float]:
    """Weight of a token of each row in the step's loss. ``batch_tokens``: TRL's count for ``token_mean``."""
    lengths = [sum(row.counts) for row in rows]
    per_batch: dict[int, int] = {}
    for row, length in zip(rows, lengths, strict=True):
        per_batch[row.micro_batch] = per_batch.get(row.micro_batch, 0) + length
    weights = []
    for row, length in zip(rows, lengths, strict=True):
        if formula.aggregation == "sequence_mean":
            weights.append(1.0 / (len(rows) * length) if length else 0.0)
        elif formula.aggregation == "sequence_sum":
            weights.append(1.0 / len(rows))
        elif formula.aggregation == "fixed_budget":
            weights.append(1.0 / (len(rows) * budget))
        elif formula.aggregation == "token_mean":
            weights.append(1.0 / batch_tokens)
        else:  # mean over a micro-batch's tokens, then over micro-batches
            weights.append(1.0 / (len(per_batch) * max(per_batch[row.micro_batch], 1)))
    return weights


def pushed(formula: Formula, ratio: float, logp: float, advantage: float) -> tuple[float, float, float, bool]:
    """(loss, its derivative by log π through the ratio, its derivative by log π beside the ratio, outside of the
    clip)."""
    if formula.surrogate == "reinforce":
        return -advantage * logp, 0.0, -advantage, False
    if formula.surrogate == "unclipped":
        return -ratio * advantage, -ratio * advantage, 0.0, False
    if formula.surrogate == "cispo":
        weight = min(ratio, formula.epsilon_high)
        return -weight * advantage * logp, 0.0, -weight * advantage, ratio > formula.epsilon_high
    free = min(ratio, formula.delta)
    held = min(max(ratio, 1.0 - formula.epsilon), 1.0 + formula.epsilon_high)
    moves = free * advantage <= held * advantage  # the smaller of the two gains counts
    if moves and ratio <= formula.delta:
        return -free * advantage, -ratio * advantage, 0.0, held != ratio
    return -min(free * advantage, held * advantage), 0.0, 0.0, True


def jump(formula: Formula, ratio: float, advantage: float, error: float) -> float:
    """|change of the derivative| at a clip's edge, where the ratio is nearer to one than ``error``; else 0."""
    edges = {"clipped": (1.0 - formula.epsilon, 1.0 + formula.epsilon_high, formula.delta), "cispo": ()}
    near = any(abs(ratio - edge) <= error * max(ratio, 1.0) for edge in edges.get(formula.surrogate, ()))
    return abs(ratio * advantage) if near else 0.0


def update(
    formula: Formula, rows: list[Row], batch_tokens: float, budget: int, error: float, advantage_error: list[float]
) -> Update:
    """Loss and slopes of one optimizer step. ``error``: how far a float32 log-prob may be off."""
    result = Update(0.0, [], [], 0.0)
    weights = token_weights(formula, rows, batch_tokens, budget)
    for row, weight, off in zip(rows, weights, advantage_error, strict=True):
        own = [t for t, counted in enumerate(row.counts) if counted]
        result.slopes.append([0.0] * len(row.logp))
        result.doubt.append([0.0] * len(row.logp))
        if formula.surrogate == "mirror_descent":
            _add_response(result, formula, row, own, weight, off, error)
        whole = math.exp(math.fsum(row.logp[t] - row.old[t] for t in own) / max(len(own), 1))
        for t in own:
            ratio = whole if formula.ratio == "sequence" else math.exp(row.logp[t] - row.old[t])
            reach = own if formula.ratio == "sequence" else [t]  # tokens that this ratio depends on
            if formula.surrogate != "mirror_descent":
                _add_token(result, formula, row, t, ratio, reach, weight, off, error)
            if formula.kl is not None and not formula.kl_in_reward:
                _add_kl(result, formula, row, t, ratio, reach, weight, error)
    return result


def _add_response(
    result: Update, formula: Formula, row: Row, own: list[int], weight: float, off: float, error: float
) -> None:
    """Kimi k1.5: −Â log π(y) + (τ/2) R², with R = log π(y)/π_i(y) of the whole response."""
    moved = math.fsum(row.logp[t] - row.old[t] for t in own)
    said = math.fsum(row.logp[t] for t in own)
    result.loss += weight * (-row.advantage * said + 0.5 * formula.tau * moved * moved)
    result.loss_doubt += weight * (abs(row.advantage) + formula.tau * abs(moved)) * error * len(own)
    result.loss_doubt += weight * (abs(said) * off + abs(row.advantage * said) * error)
    for t in own:
        result.slopes[-1][t] += weight * (-row.advantage + formula.tau * moved)
        result.doubt[-1][t] += weight * (off + formula.tau * error * len(own) + abs(row.advantage) * error)


def _add_token(
    result: Update, formula: Formula, row: Row, t: int, ratio: float, reach: list[int], weight: float, off: float,
    error: float,
) -> None:  # fmt: skip
    """The surrogate of one token; ``off``: how far its advantage may be off."""
    value, by_ratio, beside, outside = pushed(formula, ratio, row.logp[t], row.advantage)
    result.loss += weight * value
    result.clipped += outside
    result.slopes[-1][t] += weight * beside
    for u in reach:
        result.slopes[-1][u] += weight * by_ratio / len(reach)
    size = ratio if formula.surrogate != "reinforce" else 1.0
    size = min(size, formula.epsilon_high) if formula.surrogate == "cispo" else size
    unsure = size * (off + 4 * abs(row.advantage) * error)
    result.doubt[-1][t] += weight * (jump(formula, ratio, row.advantage, 10 * error) + unsure)
    deep = abs(row.logp[t]) if formula.surrogate in ("reinforce", "cispo") else 1.0
    result.loss_doubt += weight * deep * unsure


def _add_kl(
    result: Update, formula: Formula, row: Row, t: int, ratio: float, reach: list[int], weight: float, error: float
) -> None:
    """β·k of one token in the loss, times the ratio (which has a gradient of its own) where that is asked for."""
    assert formula.kl is not None
    value, slope = estimate(formula.kl, row.ref[t] - row.logp[t])
    paid = weight * formula.beta * (ratio if formula.kl_weighted else 1.0)
    result.loss += paid * value
    result.slopes[-1][t] += paid * slope
    for u in reach if formula.kl_weighted else ():
        result.slopes[-1][u] += paid * value / len(reach)
    away = math.exp(max(row.ref[t] - row.logp[t], 0.0)) + abs(row.ref[t] - row.logp[t])
    result.doubt[-1][t] += paid * 4 * away * error
    result.loss_doubt += paid * 4 * away * error
