"""The formulas as slow literal loops over Python floats (float64), with their gradients differentiated by hand.

Independent of ``grpo_lab``: nothing is imported from it, no tensor is used, no step is shared with it. Rows are lists
of their *selected* tokens only, so that masking cannot be wrong here. NaN is spelt ``None``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Rewards = list[float | None]


# -- advantages --------------------------------------------------------------------------------------------------------


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[float], std: str) -> float:
    """n − 1 in the denominator, n for the "population"; a single value has no spread."""
    if len(values) < 2:
        return 0.0
    centre, count = _mean(values), len(values) - (std == "sample")
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / count)


def advantages(rule: str, rewards: Rewards, group_size: int, epsilon: float = 1e-4, std: str = "sample") -> list[float]:
    """Advantages of a batch of whole groups; unscorable rows get 0."""
    everything = [reward for reward in rewards if reward is not None]
    result: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = [reward for reward in group if reward is not None]
        for index, reward in enumerate(group):
            if reward is None:
                result.append(0.0)
                continue
            others = [other for j, other in enumerate(group) if j != index and other is not None]
            result.append(_advantage(rule, reward, known, others, everything, epsilon, std))
    return result


def _advantage(
    rule: str, reward: float, group: list[float], others: list[float], everything: list[float], epsilon: float, std: str
) -> float:
    if rule == "raw":
        return reward
    if rule == "group_max":
        return reward if reward == max(group) else 0.0
    if rule == "leave_one_out":
        return reward - _mean(others) if others else 0.0
    centred = reward - _mean(group)
    if rule == "group_mean":
        return centred
    if rule == "group_zscore":
        return centred / (_std(group, std) + epsilon)
    if rule == "batch_zscore":
        return centred / (_std(everything, std) + epsilon)
    raise KeyError(rule)


# -- loss and its gradient ---------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The selected tokens of one completion: log-probs, advantages and weights, lists of the same length."""

    logps: list[float]
    old: list[float]
    ref: list[float]
    advantages: list[float]
    weights: list[float]


@dataclass
class Push:
    """A value with its partial derivatives by the token's log-ratio and, the ratio held, by its log-prob."""

    value: float
    by_log_ratio: float
    by_logp: float


def surrogate(
    name: str,
    log_ratio: float,
    advantage: float,
    logp: float,
    low: float = 0.2,
    high: float = 0.2,
    delta: float | None = None,
    bound: float = 5.0,
) -> Push:
    ratio = math.exp(log_ratio)
    if name == "reinforce":
        return Push(-advantage * logp, 0.0, -advantage)
    if name == "unclipped":
        return Push(-ratio * advantage, -ratio * advantage, 0.0)
    if name == "cispo":
        weight = min(ratio, bound)  # a constant: no derivative by the ratio
        return Push(-weight * advantage * logp, 0.0, -weight * advantage)
    if name == "clipped":
        free, free_slope = (ratio, ratio) if delta is None or ratio <= delta else (delta, 0.0)
        inside = 1 - low <= ratio <= 1 + high
        held = ratio if inside else (1 - low if ratio < 1 - low else 1 + high)
        held_slope = ratio if inside else 0.0
        first, second = free * advantage, held * advantage
        slope = free_slope if first < second else held_slope
        return Push(-min(first, second), -slope * advantage, 0.0)
    raise KeyError(name)


def mirror_descent(row: Row, t: int, tau: float) -> Push:
    """Token t's share of −Â·log π(y) + (τ/2)·R²; its derivative by R is added by the caller."""
    response = sum(new - old for new, old in zip(row.logps, row.old))
    moved = row.logps[t] - row.old[t]
    value = -row.advantages[t] * row.logps[t] + tau / 2 * response * moved
    return Push(value, 0.0, -row.advantages[t] + tau / 2 * response)


def kl(estimator: str, logp: float, ref: float) -> tuple[float, float]:
    """Value and derivative by ``logp``."""
    x = ref - logp
    if estimator == "k1":
        return -x, 1.0
    if estimator == "k2":
        return x * x / 2, -x
    if estimator == "k3":
        return math.exp(x) - x - 1, 1 - math.exp(x)
    raise KeyError(estimator)


def token_weight(
    aggregation: str, length: int, total: int, rows: float, tokens: float, budget: float, micro: float
) -> float:
    """What one token's loss is multiplied by."""
    if aggregation == "sequence_mean":
        return 1 / length / rows
    if aggregation == "token_mean":
        return 1 / tokens
    if aggregation == "local_token_mean":
        return 1 / total / micro
    if aggregation == "fixed_budget":
        return 1 / (rows * budget)
    if aggregation == "sequence_sum":
        return 1 / rows
    raise KeyError(aggregation)


def loss_and_gradient(
    rows: list[Row],
    *,
    surrogate_name: str,
    ratio: str,
    aggregation: str,
    denominators: tuple[float, float, float, float],
    beta: float = 0.0,
    estimator: str = "k3",
    ratio_weighted: bool = False,
    tau: float = 0.1,
    **clip: float | None,
) -> tuple[float, list[list[float]]]:
    """The scalar loss and d loss / d log π of every selected token. ``denominators`` = rows, tokens, budget,
    micro-batches."""
    total = sum(len(row.logps) for row in rows)
    loss, gradients = 0.0, []
    for row in rows:
        length = len(row.logps)
        gradient = [0.0] * length
        if length == 0:
            gradients.append(gradient)
            continue
        steps = [new - old for new, old in zip(row.logps, row.old)]
        if ratio in ("sequence", "sequence_token"):
            steps = [sum(steps) / length] * length
        held = ratio == "product" and sum(steps) >= 40  # e^40: from there on a constant
        if ratio == "product":
            steps = [min(sum(steps), 40.0)] * length
        each = token_weight(aggregation, length, total, *denominators)
        for t in range(length):
            if surrogate_name == "mirror_descent":
                push = mirror_descent(row, t, tau)
            else:
                push = surrogate(surrogate_name, steps[t], row.advantages[t], row.logps[t], **clip)  # type: ignore[arg-type]
            value, by_log_ratio, by_logp = (
                row.weights[t] * part for part in (push.value, push.by_log_ratio, push.by_logp)
            )
            if beta:
                estimate, slope = kl(estimator, row.logps[t], row.ref[t])
                weight = math.exp(steps[t]) if ratio_weighted else 1.0
                value += beta * weight * estimate
                by_logp += beta * weight * slope
                by_log_ratio += beta * weight * estimate if ratio_weighted else 0.0
            loss += each * value
            gradient[t] += each * by_logp
            if surrogate_name == "mirror_descent":  # the response's log-ratio, which every token moves by 1
                for u in range(length):
                    gradient[u] += each * row.weights[t] * tau / 2 * (row.logps[t] - row.old[t])
            if ratio in ("token", "sequence_token"):  # s_{i,t} = sg[s_i] · π/sg[π]: only its own token moves it
                gradient[t] += each * by_log_ratio
            elif ratio == "product":  # every token of the row moves Σ log ρ by 1
                for u in range(length):
                    gradient[u] += 0.0 if held else each * by_log_ratio
            else:  # every token of the row moves the row's mean log-ratio by 1/length
                for u in range(length):
                    gradient[u] += each * by_log_ratio / length
        gradients.append(gradient)
    return loss, gradients
