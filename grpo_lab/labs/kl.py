"""KL estimators against exact enumeration: bias and spread of value and gradient, without sampling noise.

A policy π, its reference and the older policy μ that wrote the completions are tables over 4 tokens (one of which ends
a completion) and up to 3 positions. Everything is an expectation over all 40 completions. The estimates and the
gradients come from the objects that train (``KLTerm``, ``Objective``, ``reward_to_go``, corrections).

An estimator's k_t is put into one of three places:

    loss               +β·k per token, differentiated; the weight is the ratio of `ratio_weighted`, not detached
    reward, sum        the reward of a completion is −Σ_t k_t, no gradient through it (REINFORCE, no baseline)
    reward, per token  the advantage of token t is −Σ_{s ≥ t} k_s

An arm is a way to sample the completions (``SAMPLINGS``):

    on-policy          π samples, and is trained
    off-policy         μ samples, and π is trained. Weights by token: π/μ of each; by completion: their product.
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
TO_REFERENCE = 0.5
TO_SAMPLER = 0.3
"""Standard deviations of the reference's logits, and of the sampler's, around the policy's."""
DISTANCES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Standard deviations of the reference's logits around the policy's, in the figure."""
NONE = "none"
TOKEN = "token"
COMPLETION = "completion"


@dataclass(frozen=True)
class Sampling:
    """A way to sample completions, and the places of k that are measured with it.

    Attributes:
        on_policy: π samples; else μ.
        weights: importance weights π/μ: ``NONE``, by ``TOKEN``, or by ``COMPLETION``.
        at_generation: k in the reward is computed with μ, which sampled; else with π.
        places: the places of k, from ``PLACES``.
    """

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
    """Three tables of logits ``[rows, V]``, a row for each prefix of a completion.

    Attributes:
        tree: all completions.
        policy: of π, which is trained.
        reference: of the policy's reference.
        sampler: of μ, which writes the completions off-policy.
    """

    tree: Tree
    policy: Tensor
    reference: Tensor
    sampler: Tensor

    @staticmethod
    def of(seed: int, to_reference: float = TO_REFERENCE) -> World:
        """Draw the world of a seed. ``to_reference``: standard deviation of the reference's logits around the
        policy's."""
        tree = Tree.of()
        policy = tree.logits(3 * seed)
        moved = ((1, to_reference), (2, TO_SAMPLER))
        return World(tree, policy, *(policy + tree.logits(3 * seed + n, spread) for n, spread in moved))

    def gradient(self, next_tokens: bool = False) -> Tensor:
        """Compute the exact ∇KL(π‖π_ref) by the policy's logits, flattened to ``[D]``. ``next_tokens``: that of the KL
        of each next token."""
        logits = self.policy.clone().requires_grad_()
        if next_tokens:
            of = self.tree.divergence_of_next_tokens
        else:
            of = self.tree.divergence
        return torch.autograd.grad(of(logits, self.reference), logits)[0].flatten()


@dataclass(frozen=True)
class EstimatorErrors:
    """Errors of an estimate of the KL from one completion.

    Attributes:
        value_bias: bias of the value, in units of the KL.
        value_std: standard deviation of the value, in units of the KL.
        gradient_bias: length of the gradient's bias, in lengths of the true gradient.
        next_token_bias: the same, against the gradient of each next token's KL.
        gradient_std: standard deviation of the gradient, in lengths of the true one.
    """

    value_bias: float
    value_std: float
    gradient_bias: float
    next_token_bias: float
    gradient_std: float


def measured(world: World, estimator: str, place: str, sampling: Sampling) -> EstimatorErrors:
    """Measure an estimator's errors, with k at ``place``, by exact enumeration of all completions."""
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
    """Estimate KL(π‖π_ref) and its gradient from each completion.

    Returns:
        probability of each completion ``[C]``; its estimate of the KL in nats ``[C]``; its estimate of the gradient by
        the policy's logits ``[C, D]``.
    """
    tree = world.tree
    mask = world.tree.mask
    sampler = world.policy if sampling.on_policy else world.sampler
    wrote = tree.logps(sampler)
    ref = tree.logps(world.reference)
    logps = tree.logps(world.policy).requires_grad_()
    values = _values(estimator, sampling, logps.detach(), wrote, ref, mask)
    factors = _gradient_factors(estimator, place, sampling, logps, wrote, ref, mask)
    return tree.chances(sampler), values, (factors.unsqueeze(-1) * tree.scores(world.policy)).sum(1)


def _values(estimator: str, sampling: Sampling, logps: Tensor, wrote: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(π‖π_ref) from each completion, in nats ``[C]``."""
    each = KLTerm(1.0, estimator, "reward").of_tokens(wrote if sampling.at_generation else logps, ref, mask)
    weights = _weights(sampling, logps, wrote, mask)
    return (each if weights is None else each * weights).sum(1)


def _weights(sampling: Sampling, logps: Tensor, wrote: Tensor, mask: Tensor) -> Tensor | None:
    """Return the importance weights π/μ, not truncated: ``[C, T]`` by token, ``[C, 1]`` by completion, None without
    weights."""
    kinds = {TOKEN: TokenTruncate, COMPLETION: SequenceTruncate}
    kind = kinds.get(sampling.weights)
    if kind is None:
        return None
    return kind(high=None)(sampler_log_ratio(logps, wrote, mask), mask)


def _gradient_factors(
    estimator: str, place: str, sampling: Sampling, logps: Tensor, wrote: Tensor, ref: Tensor, mask: Tensor
) -> Tensor:
    """Return the factor ``[C, T]`` of each ∇log π(y_t) in the estimated gradient of the loss.

    If the estimator is right, the expectation of the sum of these products is ∇KL.
    """
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
    """Measure a sampling (``arm``) in the world of a seed: ``rows`` of estimator, place and the fields of
    ``EstimatorErrors``; on-policy also the figure's ``curves``."""
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
"""Panel → its lines, (estimator, place)."""


def curves(seed: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Compute the figure's curves, on-policy: panel → line → points (distance to the reference, error)."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {panel: {} for panel in FIGURE}
    for distance in DISTANCES:
        world = World.of(seed, distance)
        nats = float(world.tree.divergence(world.policy, world.reference))
        for panel, lines in FIGURE.items():
            for estimator, place in lines:
                errors = measured(world, estimator, place, SAMPLINGS["on-policy"])
                label = estimator
                if "gradient" in panel:
                    label = f"{estimator}, {place.partition(',')[0]}"
                    y = errors.gradient_bias
                elif "deviation" in panel:
                    y = errors.value_std * nats
                else:
                    y = errors.value_bias * nats
                found[panel].setdefault(label, []).append((distance, y))
    return found


HEADS = ("sampling", "estimator", "place", "value bias", "value std", "gradient bias", "of next token", "gradient std")


def rows_of(found: Found) -> Iterator[list[str]]:
    """Yield the rows of the table: means over worlds for each sampling, estimator and place."""
    for arm, records in found.items():
        for lines in zip(*(record["rows"] for record in records), strict=True):
            numbers = [fmean(values) for values in zip(*(line[2:] for line in lines), strict=True)]
            yield [arm, *lines[0][:2], *(written(number) for number in numbers)]


def written(number: float) -> str:
    """Format a number of the table; rounding errors count as 0."""
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
