"""KL estimators: what each does to value and gradient, against exact enumeration, without sampling noise.

A policy π, its reference and the older policy μ that wrote the completions are tables over 4 tokens (one of which ends
a completion) and up to 3 positions. Everything is an expectation over all 40 completions; the estimates and the
gradients come from the objects that train (``KLTerm``, ``Objective``, ``reward_to_go``, corrections).

    loss               +β·k per token, differentiated; the weight is the ratio of `ratio_weighted`, not detached
    reward, sum        the reward of a completion is −Σ_t k_t, no gradient through it (REINFORCE, no baseline)
    reward, per token  the advantage of token t is −Σ_{s ≥ t} k_s
    off-policy         μ samples, π is trained. Weights by token: π/μ of each; by completion: their product.
    k at generation    k is computed with μ, as in a second update on one batch; else with π

A seed is a world: three tables. Source: arXiv 2510.01555 (placements), 2512.21852 (k1 in the reward, off-policy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from grpo_lab.advantages import reward_to_go
from grpo_lab.batch import TokenBatch
from grpo_lab.diagnostics.enumeration import Tree, one_thread
from grpo_lab.diagnostics.token_weights import token_weights
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Experiment, Found, Options, Record
from grpo_lab.labs.tables import draw, markdown
from grpo_lab.objectives import KLTerm, Objective, Reinforce, Unclipped, log_ratio, sampler_log_ratio, token_mean
from grpo_lab.objectives.corrections import SequenceTruncate, TokenTruncate

ESTIMATORS = ("k1", "k2", "k3")
PLACES = ("loss", "reward, sum", "reward, per token")
#: Standard deviations of the reference's logits, and of the sampler's, around the policy's.
TO_REFERENCE, TO_SAMPLER = 0.5, 0.3
DISTANCES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0)
NONE = "none"
TOKEN = "token"
COMPLETION = "completion"


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled (on-policy or by μ) and weighted, whether k in the reward is of μ, the places to
    measure."""

    on_policy: bool = False
    weights: str = NONE
    at_generation: bool = False
    places: tuple[str, ...] = PLACES


SAMPLINGS = {
    "on-policy": Sampling(on_policy=True),
    "on-policy, ratio in the loss": Sampling(on_policy=True, weights=TOKEN, places=("loss",)),
    "off-policy": Sampling(),
    "off-policy, by token": Sampling(weights=TOKEN),
    "off-policy, by completion": Sampling(weights=COMPLETION),
    "off-policy, by completion, k at generation": Sampling(
        weights=COMPLETION, at_generation=True, places=("reward, sum", "reward, per token")
    ),
}


@dataclass(frozen=True)
class World:
    """Tables of logits: of the policy, its reference, and the policy that wrote the completions (``sampler``)."""

    tree: Tree
    policy: Tensor
    reference: Tensor
    sampler: Tensor

    @staticmethod
    def of(seed: int, to_reference: float = TO_REFERENCE) -> World:
        tree = Tree.of()
        policy = tree.logits(3 * seed)
        moved = ((1, to_reference), (2, TO_SAMPLER))
        return World(tree, policy, *(policy + tree.logits(3 * seed + n, spread) for n, spread in moved))

    def gradient(self, next_tokens: bool = False) -> Tensor:
        """Compute the exact ∇KL(π‖π_ref) by the policy's logits, flattened. ``next_tokens``: that of each next token's
        KL."""
        logits = self.policy.clone().requires_grad_()
        if next_tokens:
            of = self.tree.divergence_of_next_tokens
        else:
            of = self.tree.divergence
        return torch.autograd.grad(of(logits, self.reference), logits)[0].flatten()


@dataclass(frozen=True)
class EstimatorErrors:
    """Errors of the estimate from one completion. Value: bias and standard deviation, in units of the KL. Gradient:
    both in lengths of the true one, and the bias against the gradient of each next token's KL."""

    value_bias: float
    value_std: float
    gradient_bias: float
    next_token_bias: float
    gradient_std: float


def measured(world: World, estimator: str, place: str, sampling: Sampling) -> EstimatorErrors:
    """Measure an estimator's errors by exact enumeration over all completions."""
    chances, values, gradients = estimates(world, estimator, place, sampling)
    divergence = float(world.tree.divergence(world.policy, world.reference))
    true = world.gradient()
    mean = chances @ gradients
    expected = float(chances @ values)
    length = float(true.norm())
    return EstimatorErrors(
        (expected - divergence) / divergence,
        math.sqrt(float(chances @ (values - expected).square())) / divergence,
        float((mean - true).norm()) / length,
        float((mean - world.gradient(next_tokens=True)).norm()) / length,
        math.sqrt(float(chances @ (gradients - mean).square().sum(1))) / length,
    )


def estimates(world: World, estimator: str, place: str, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Return each completion's probability ``[C]``, its estimate of KL(π‖π_ref), nats ``[C]``, and its estimate of the
    gradient by the policy's logits, ``[C, D]``."""
    tree = world.tree
    mask = world.tree.mask
    by = world.policy if sampling.on_policy else world.sampler
    wrote = tree.logps(by)
    ref = tree.logps(world.reference)
    logps = tree.logps(world.policy).requires_grad_()
    values = _values(estimator, sampling, logps.detach(), wrote, ref, mask)
    push = _pushes(estimator, place, sampling, logps, wrote, ref, mask)
    return tree.chances(by), values, (push.unsqueeze(-1) * tree.scores(world.policy)).sum(1)


def _values(estimator: str, sampling: Sampling, logps: Tensor, wrote: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(π‖π_ref) from each completion, nats ``[C]``."""
    each = KLTerm(1.0, estimator, "reward").of_tokens(wrote if sampling.at_generation else logps, ref, mask)
    weights = _weights(sampling, logps, wrote, mask)
    return (each if weights is None else each * weights).sum(1)


def _weights(sampling: Sampling, logps: Tensor, wrote: Tensor, mask: Tensor) -> Tensor | None:
    """Return π/μ, ``[C, T]`` by token or ``[C, 1]`` by completion, not truncated; None without weights."""
    kinds = {TOKEN: TokenTruncate, COMPLETION: SequenceTruncate}
    kind = kinds.get(sampling.weights)
    if kind is None:
        return None
    return kind(high=None)(sampler_log_ratio(logps, wrote, mask), mask)


def _pushes(
    estimator: str, place: str, sampling: Sampling, logps: Tensor, wrote: Tensor, ref: Tensor, mask: Tensor
) -> Tensor:
    """Return the factors ``[C, T]`` of each ∇log π(y_t) in the estimated gradient of the loss. If the estimator is
    right, its expectation is ∇KL."""
    if place == "loss":
        term = KLTerm(1.0, estimator, ratio_weighted=sampling.weights != NONE)
        level = "product" if sampling.weights == COMPLETION else "token"
        objective = Objective("kl", Unclipped(), token_mean, level, term)
        advantages = torch.zeros(len(mask), 1, dtype=torch.float64)
        weights = None
    else:
        term = KLTerm(1.0, estimator, "reward", per="token" if place == "reward, per token" else "sequence")
        objective = Objective("kl", Reinforce(), token_mean)
        of = wrote if sampling.at_generation else logps.detach()
        weights = _weights(sampling, logps, wrote, mask)
        if term.per == "token":
            advantages = -reward_to_go(term.of_tokens(of, ref, mask), mask, term.gamma)
        else:
            advantages = -term.in_reward(of, ref, mask).unsqueeze(1)
    ratio = log_ratio(objective.ratio, logps, wrote, mask)
    batch = TokenBatch(logps, wrote, ratio, advantages, mask, ref, sampler_weights=weights)
    return -token_weights(objective.token_loss(batch).sum(), logps)


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    """Measure a sampling in a world: ``rows`` of estimator, place and the fields of ``EstimatorErrors``."""
    sampling = SAMPLINGS[arm]
    with one_thread():
        rows = [
            [estimator, place, *vars(measured(World.of(seed), estimator, place, sampling)).values()]
            for place in sampling.places
            for estimator in ESTIMATORS
        ]
        return {"rows": rows, "curves": curves(seed) if arm == "on-policy" else {}}


FIGURE = {
    "value: standard deviation, nats": [("k1", "loss"), ("k2", "loss"), ("k3", "loss")],
    "value: bias, nats": [("k1", "loss"), ("k2", "loss"), ("k3", "loss")],
    "gradient: relative bias": [("k1", "reward, sum"), ("k2", "loss"), ("k3", "loss"), ("k3", "reward, sum")],
}


def curves(seed: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Compute the figure's curves, on-policy: panel → line → points over the distance to the reference."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {panel: {} for panel in FIGURE}
    for distance in DISTANCES:
        world = World.of(seed, distance)
        nats = float(world.tree.divergence(world.policy, world.reference))
        for panel, lines in FIGURE.items():
            for estimator, place in lines:
                one = measured(world, estimator, place, SAMPLINGS["on-policy"])
                std = one.value_std * nats
                bias = one.value_bias * nats
                if "gradient" in panel:
                    y = one.gradient_bias
                elif "deviation" in panel:
                    y = std
                else:
                    y = bias
                if "gradient" in panel:
                    label = f"{estimator}, {place.partition(',')[0]}"
                else:
                    label = estimator
                found[panel].setdefault(label, []).append((distance, y))
    return found


HEADS = ("sampling", "estimator", "place", "value bias", "value std", "gradient bias", "of next token", "gradient std")


def rows_of(found: Found) -> Iterator[list[str]]:
    """Yield the rows of the table: one for each sampling, estimator and place, means over worlds."""
    for arm, records in found.items():
        for lines in zip(*(record["rows"] for record in records), strict=True):
            numbers = [fmean(values) for values in zip(*(line[2:] for line in lines), strict=True)]
            yield [arm, *lines[0][:2], *(written(number) for number in numbers)]


def written(number: float) -> str:
    if abs(number) < 1e-12:
        return "0"
    return f"{number:.3f}"


def report(found: Found, options: Options) -> str:
    """Write ``kl.md`` and ``kl.png``; return the text to print."""
    text = markdown(HEADS, [*rows_of(found)])
    write_whole_text(options.folder / "kl.md", f"{text}\n")
    drawn = [record["curves"] for record in found.get("on-policy", [])]
    if drawn:
        lines = {panel: {name: [one[panel][name] for one in drawn] for name in of} for panel, of in drawn[0].items()}
        draw(lines, options.folder / "kl.png", "distance to the reference, std of the logits' difference")
    worlds = max(len(records) for records in found.values())
    return f"{text}\n\n{worlds} worlds; {options.folder / 'kl.md'}, {options.folder / 'kl.png'}"


def settings(arm: str, seed: int, options: Options) -> Mapping[str, Any]:
    """Return the settings that determine the numbers of a sampling in a world."""
    spreads = {"to_reference": TO_REFERENCE, "to_sampler": TO_SAMPLER, "distances": DISTANCES}
    return {"sampling": asdict(SAMPLINGS[arm]), "estimators": ESTIMATORS, **spreads}


LAB = Experiment([*SAMPLINGS], run, report, seeds=range(10), in_process=True, settings=settings)
