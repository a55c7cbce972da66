"""The formulas as slow literal loops over Python floats (float64), with their gradients differentiated by hand.

Independent of ``grpo_lab``: nothing is imported from it, no tensor is used, no step is shared with it. Rows are lists
of their *selected* tokens only, so that masking cannot be wrong here. NaN is spelt ``None``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

Rewards = list[float | None]
CORRECTED = ("dppo_tv", "dppo_kl", "prime_rl", "vespo")
"""Surrogates whose ratio is against the sampler: no sampler weight on top."""


# -- advantages --------------------------------------------------------------------------------------------------------


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[float], std: str) -> float:
    """n − 1 in the denominator, n for the "population"; a single value has no spread."""
    if len(values) < 2:
        return 0.0
    centre, count = _mean(values), len(values) - (std == "sample")
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / count)


EPSILON = {"maxrl": 1e-6, "pass_at_k": 1e-6, "passk_margin": 1e-6, "reinforce_pp_baseline": 1e-8}
"""1e-4 elsewhere."""


def advantages(
    rule: str, rewards: Rewards, group_size: int, epsilon: float | None = None, std: str = "sample",
    lengths: list[int] | None = None, **knobs: float | str,
) -> list[float]:  # fmt: skip
    """Advantages of a batch of whole groups; unscorable rows get 0. ``lengths``: tokens of each completion."""
    epsilon = EPSILON.get(rule, 1e-4) if epsilon is None else epsilon
    if rule == "gdpo":
        return gdpo([[reward] for reward in rewards], [1.0], group_size, epsilon, std)
    if rule == "reinforce_pp_baseline":
        return _normalised_over_the_batch(rewards, group_size, lengths or [], epsilon, std, **knobs)  # type: ignore[arg-type]
    everything = [reward for reward in rewards if reward is not None]
    result: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        known = [reward for reward in group if reward is not None]
        tokens = [n for n, r in zip((lengths or [])[start : start + group_size], group) if r is not None]
        for index, reward in enumerate(group):
            if reward is None:
                result.append(0.0)
                continue
            others = [other for j, other in enumerate(group) if j != index and other is not None]
            if rule == "pass_at_k":
                result.append(_pass_at_k(reward, others, epsilon, **knobs))  # type: ignore[arg-type]
            elif rule == "opo":
                weights = tokens if sum(tokens) else [1] * len(known)
                result.append(reward - math.fsum(n * r for n, r in zip(weights, known)) / sum(weights))
            else:
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
    if rule == "passk_margin":
        return max(reward - max(others), 0.0) if others else 0.0  # what the best reward would lose without it
    centred = reward - _mean(group)
    if rule == "group_mean":
        return centred
    if rule == "maxrl":
        return centred / (_mean(group) + epsilon) if any(group) else 0.0
    if rule == "group_zscore":
        return centred / (_std(group, std) + epsilon)
    if rule == "batch_zscore":
        return centred / (_std(everything, std) + epsilon)
    raise KeyError(rule)


def _pass_at_k(reward: float, others: list[float], epsilon: float, k: int = 4, success: float = 1.0) -> float:
    """Every subset of k completions of the group passes or fails; the mean z-score of those that hold this one."""
    right = [r >= success for r in (reward, *others)]
    subsets = list(itertools.combinations(range(len(right)), k))
    passed = [float(any(right[i] for i in subset)) for subset in subsets]
    if len(set(passed)) < 2:
        return 0.0
    mean = _mean(passed)
    mine = _mean([p for p, subset in zip(passed, subsets) if 0 in subset])
    return (mine - mean) / (_std(passed, "population") + epsilon)


def gdpo(
    rows: list[Rewards], weights: list[float], group_size: int, epsilon: float, std: str = "sample"
) -> list[float]:
    """Rows of several rewards each: normalised one by one, weighted and summed, normalised over the batch."""
    summed: list[float | None] = [None if all(r is None for r in row) else 0.0 for row in rows]
    for column, weight in enumerate(weights):
        scores = advantages("group_zscore", [row[column] for row in rows], group_size, epsilon, std)
        summed = [None if s is None else s + weight * z for s, z in zip(summed, scores)]
    known = [s for s in summed if s is not None]
    return [0.0 if s is None else (s - _mean(known)) / (_std(known, std) + epsilon) for s in summed]


def token_baseline(rewards: Rewards, energies: list[list[float]], group_size: int) -> list[list[float]]:
    """Reward less the group's mean at each own token, weighted by the energies so far (``energies``, of own tokens)."""
    found = []
    for row, (reward, own) in enumerate(zip(rewards, energies)):
        start = row - row % group_size
        others = [i for i in range(start, start + group_size) if rewards[i] is not None]
        line = []
        for t in range(len(own)):
            there = [(rewards[i], math.fsum(energies[i][: t + 1])) for i in others if len(energies[i]) > t]
            total = math.fsum(w for _, w in there)
            mean = math.fsum(r * w for r, w in there if r is not None) / total if total else 0.0
            line.append(0.0 if reward is None else reward - mean)
        found.append(line)
    return found


def _normalised_over_the_batch(
    rewards: Rewards, group_size: int, lengths: list[int], epsilon: float, std: str, over: str = "tokens"
) -> list[float]:
    centred = advantages("group_mean", rewards, group_size)
    counts = [n if over == "tokens" else 1 for n in lengths]
    tokens = [c for c, r, n in zip(centred, rewards, counts) if r is not None for _ in range(n)]
    mean = _mean(tokens) if tokens else 0.0
    deviation = math.sqrt(_std(tokens, std) ** 2 + epsilon)
    return [0.0 if r is None else (c - mean) / deviation for c, r in zip(centred, rewards)]


# -- loss and its gradient ---------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The selected tokens of one completion: log-probs, advantages and weights, lists of the same length."""

    logps: list[float]
    old: list[float]
    ref: list[float]
    advantages: list[float]
    weights: list[float]
    sampler: list[float] = field(default_factory=list)
    chosen: dict[str, list[bool]] = field(default_factory=dict)


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
    neg: float = 1.05,
    pos: float = 1.0,
) -> Push:
    ratio = math.exp(log_ratio)
    if name == "sapo":
        steep = pos if advantage > 0 else neg
        gate = 1 / (1 + math.exp(-steep * (ratio - 1)))
        return Push(-4 / steep * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, 0.0)
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


def within_region(
    row: Row, t: int, name: str, low: float, high: float, truncate: float = math.inf, kl_tau: float = 0.0
) -> Push:
    """DPPO and prime-rl: the ratio is against the sampler, whose log-probs are constants."""
    new, was, advantage = math.exp(row.logps[t]), math.exp(row.sampler[t]), row.advantages[t]
    far = abs(new - was)
    if name == "dppo_kl":
        far = was * math.log(was / new) + (1 - was) * math.log((1 - was) / (1 - new))
    outside = new < was and far > low if advantage < 0 else new > was and far > high
    push = 0.0 if outside else -min(new / was, truncate) * advantage
    log_ratio = row.logps[t] - row.sampler[t]
    return Push(push + kl_tau * log_ratio**2, 0.0, push + 2 * kl_tau * log_ratio)


def kl_cov(row: Row, t: int, log_ratio: float, coefficient: float) -> Push:
    push = -math.exp(log_ratio) * row.advantages[t]
    if not row.chosen["kl_cov"][t]:
        return Push(push, push, 0.0)
    moved = row.logps[t] - row.old[t]
    return Push(push + coefficient * abs(moved), push, coefficient * (1 if moved > 0 else -1 if moved < 0 else 0))


def geometric_mean(row: Row, t: int, low: float, high: float) -> tuple[float, list[float]]:
    """Value of token t and its derivatives by the log-probs of all tokens of the row."""
    steps = [(new - old, advantage > 0) for new, old, advantage in zip(row.logps, row.old, row.advantages)]
    free = [step < high if up else step > -low for step, up in steps]
    counted = [step if is_free else (high if up else -low) for (step, up), is_free in zip(steps, free)]
    value = -row.advantages[t] * math.exp(sum(counted) / len(counted))
    return value, [value / len(counted) if is_free else 0.0 for is_free in free]


AUTHORS = {
    "gmpo": {"low": 0.4, "high": 0.4},
    "dppo_tv": {"low": 0.15, "high": 0.15},
    "dppo_kl": {"low": 0.05, "high": 0.05},
    "prime_rl": {"low": 0.2, "high": 0.2, "kl_tau": 1e-3},
    "kl_cov": {"coefficient": 1.0},
    "vespo": {"pos": (2.0, 3.0), "neg": (3.0, 2.0)},
}


def push_of(name: str, row: Row, t: int, log_ratio: float, clip: dict[str, Any]) -> Push:
    """One token, by the surrogate's name."""
    if name == "vespo":
        return vespo(row, t, **clip)
    if name in CORRECTED:
        return within_region(row, t, name, **clip)
    if name == "kl_cov":
        return kl_cov(row, t, log_ratio, **clip)
    if name == "clip_cov" and row.chosen["clip_cov"][t]:
        return Push(0.0, 0.0, 0.0)
    known = "clipped" if name == "clip_cov" else name
    return surrogate(known, log_ratio, row.advantages[t], row.logps[t], **clip)


def mirror_descent(row: Row, t: int, tau: float) -> Push:
    """Token t's share of −Â·log π(y) + (τ/2)·R²; its derivative by R is added by the caller."""
    response = sum(new - old for new, old in zip(row.logps, row.old))
    moved = row.logps[t] - row.old[t]
    value = -row.advantages[t] * row.logps[t] + tau / 2 * response * moved
    return Push(value, 0.0, -row.advantages[t] + tau / 2 * response)


def vespo(row: Row, t: int, pos: tuple[float, float], neg: tuple[float, float], weights_once: bool = False) -> Push:
    """−φ(w)·Â·log π of token t, φ a constant; the sampler's weights are factors of w, a row's weight is one factor."""
    weights = row.weights[:1] if weights_once else row.weights
    log_w = sum(new - old for new, old in zip(row.logps, row.old)) + sum(map(math.log, weights))
    k, decay = pos if row.advantages[t] >= 0 else neg
    push = math.exp(k * log_w + decay * (1 - math.exp(log_w))) * row.advantages[t]
    return Push(-push * row.logps[t], 0.0, -push)


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


def token_weight(aggregation: str, length: int, total: int, counts: dict[str, float]) -> float:
    """What one token's loss is multiplied by; ``total``: tokens of the micro-batch."""
    divisor = {
        "sequence_mean": length * counts["rows"],
        "token_mean": counts["tokens"],
        "local_token_mean": total * counts["micro_batches"],
        "fixed_budget": counts["rows"] * counts["budget"],
        "sequence_sum": counts["rows"],
        "prompt_mean": counts["prompts"] * counts["group_tokens"],
    }
    return 1 / divisor[aggregation]


def loss_and_gradient(
    rows: list[Row],
    *,
    surrogate_name: str,
    ratio: str,
    aggregation: str,
    denominators: dict[str, float],
    beta: float = 0.0,
    estimator: str = "k3",
    ratio_weighted: bool = False,
    tau: float = 0.1,
    **clip: Any,
) -> tuple[float, list[list[float]]]:
    """The scalar loss and d loss / d log π of every selected token."""
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
        each = token_weight(aggregation, length, total, denominators)
        for t in range(length):
            by_all = [0.0] * length
            if surrogate_name == "mirror_descent":
                push = mirror_descent(row, t, tau)
            elif surrogate_name == "gmpo":
                mean, by_all = geometric_mean(row, t, **clip)
                push = Push(mean, 0.0, 0.0)
            else:
                push = push_of(surrogate_name, row, t, steps[t], clip)
            weight = 1.0 if surrogate_name in CORRECTED else row.weights[t]
            value, by_log_ratio, by_logp = (weight * part for part in (push.value, push.by_log_ratio, push.by_logp))
            if beta:
                estimate, slope = kl(estimator, row.logps[t], row.ref[t])
                factor = math.exp(steps[t]) if ratio_weighted else 1.0
                value += beta * factor * estimate
                by_logp += beta * factor * slope
                by_log_ratio += beta * factor * estimate if ratio_weighted else 0.0
            loss += each * value
            gradient[t] += each * by_logp
            for u in range(length):
                gradient[u] += each * weight * by_all[u]
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
