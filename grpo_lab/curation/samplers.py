"""Samplers that choose prompts round by round, in the shape of TRL's `RepeatSampler`.

A round is one generation batch: `batch_size` different prompts. Its indices are yielded as

    repeat_count times:  p₁ … p₁ (mini_repeat_count times)  p₂ … p₂  …  p_batch_size …

An epoch has ⌊N / batch_size⌋ rounds of a data set of N rows. A round is drawn when the data loader first asks for one
of its indices. That is one batch before the trainer uses it (accelerate prefetches one), so a draw sees the updates
received *until then*.

Resume. A trainer iterates the epoch from its start and skips what it has already trained on. Draws may depend on the
results of the run, so they cannot be repeated later. Therefore the rounds drawn in the current epoch, the prefetched
one included, are part of the state, and are replayed first. The random generator of a round is seeded by (seed, epoch,
round) alone. Every rank runs its own copy; the copies agree if they get the same updates at the same steps
(`fingerprint`). The epoch is set by `set_epoch`, or counted if nobody calls it.

**Curricula by pass rate** (Kimi k1.5, arXiv 2501.12599, section 2.3.3): easy problems first; or all first and then the
hard ones (section 3.5). Which problems are hard, when to switch and the floor for easy problems are settings of ours.

**Prioritised sampling** (same section: proportional to 1 − s_i): problems that the model still gets wrong are drawn
more often. s_i is the success rate of problem i, estimated from the run's own rollouts. Floor and estimate are ours.

    P(i) ∝ w_i = max(1 − s_i, floor)     a solved problem keeps the floor, so that forgetting is noticed
    S_i ← λ·S_i + successes,  T_i ← λ·T_i + trials,  s_i = S_i / T_i     (λ = `decay`: old policies fade)

A round needs `batch_size` *different* problems. If they were drawn one after the other, large weights would count for
less. So a round is a systematic sample: problem i is in it with probability exactly π_i = min(1, k · w_i), where k is
such that Σπ_i = batch_size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

_CERTAIN = 1 - 1e-9
#: FLOOR is the least weight of a problem (the hardest has 1). DECAY is the factor of the earlier counts when a problem
#: is sampled again.
FLOOR = 0.05
DECAY = 0.8


class RoundSampler(Sampler[int]):
    """Base class of samplers that choose prompts round by round; a subclass implements `draw`, the choice of a round.

    Args:
        data_source: the dataset, of which only the length N is read.
        mini_repeat_count: consecutive copies of every index (TRL: the group size, `num_generations`).
        batch_size: different prompts in a round (TRL: `generation_batch_size // num_generations`).
        repeat_count: how often a round is repeated (TRL: `num_iterations * steps_per_generation`).
        seed: must be the same on every rank.

    Raises ValueError if a count is not a positive integer, the seed is no integer, or `batch_size` exceeds N.
    """

    def __init__(
        self, data_source: Sized, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1, seed: int = 0
    ) -> None:
        counts = {"mini_repeat_count": mini_repeat_count, "batch_size": batch_size, "repeat_count": repeat_count}
        for name, value in {**counts, "seed": seed}.items():
            if type(value) is not int or (name != "seed" and value < 1):
                raise ValueError(f"{name}={value!r}; an integer is needed, and a count is at least 1")
        if len(data_source) < batch_size:
            raise ValueError(f"the data has {len(data_source)} rows and a round needs batch_size={batch_size}")
        self.num_samples = len(data_source)
        self.mini_repeat_count = mini_repeat_count
        self.batch_size = batch_size
        self.repeat_count = repeat_count
        self.seed = seed
        self.epoch = 0
        self._drawn: list[list[int]] = []
        self._used_up = False

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        """Return the `batch_size` different indices of round `number` of an epoch, in order. `generator` is seeded for
        this round alone."""
        raise NotImplementedError

    @property
    def rounds_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def __len__(self) -> int:
        return self.rounds_per_epoch * self.batch_size * self.mini_repeat_count * self.repeat_count

    def __iter__(self) -> Iterator[int]:
        if self._used_up:
            self.set_epoch(self.epoch + 1)
        return self._indices(self.epoch, self._drawn)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. If it is the current one, its rounds are kept and replayed."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._drawn = []
        self._used_up = False

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the rounds drawn in it so far, as plain numbers and lists."""
        return {
            "sampler": type(self).__name__,
            "shape": self._shape(),
            "epoch": self.epoch,
            "used_up": self._used_up,
            "drawn": [list(indices) for indices in self._drawn],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. The next iteration begins at the start of its epoch. Raises ValueError if the state is
        of another kind of sampler, or of other data, batch settings or seed."""
        if state.get("sampler") != type(self).__name__:
            raise ValueError(f"the state is of a {state.get('sampler')}, this is a {type(self).__name__}")
        if dict(state["shape"]) != self._shape():
            raise ValueError(
                f"the state was saved with {dict(state['shape'])} and the sampler has {self._shape()}; "
                "resume with the same data, batch settings and seed"
            )
        self.epoch = int(state["epoch"])
        self._used_up = bool(state["used_up"])
        self._drawn = [[int(index) for index in indices] for indices in state["drawn"]]

    def fingerprint(self) -> int:
        """Return a number below 2⁵³ that changes with any part of the state; it must be equal on all ranks."""
        text = json.dumps(self.state_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def _indices(self, epoch: int, drawn: list[list[int]]) -> Iterator[int]:
        """Yield the indices of an epoch. Rounds that are in `drawn` are replayed; further ones are drawn and added to
        it."""
        for number in range(self.rounds_per_epoch):
            if number == len(drawn):
                drawn.append(self.draw(epoch, number, seeded(self.seed, epoch, number)))
                assert len(set(drawn[-1])) == self.batch_size, "a round repeats a prompt"
            yield from self.repeat_count * [i for i in drawn[number] for _ in range(self.mini_repeat_count)]
        if drawn is self._drawn:
            self._used_up = True

    def _shape(self) -> dict[str, int]:
        """Return the settings that must be the same when a state is restored."""
        names = ("num_samples", "mini_repeat_count", "batch_size", "repeat_count", "seed")
        return {name: getattr(self, name) for name in names}


def seeded(*numbers: int) -> torch.Generator:
    """Return a random generator seeded by these integers only."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


class CurriculumSampler(RoundSampler):
    """Sampler from easy to hard: every epoch visits the problems by falling pass rate, ties in random order.

    If N is no multiple of `batch_size`, every epoch leaves out random rows. If it left out the last ones, the hardest
    problems would never be visited.

    Args:
        data_source: the dataset, of which only the length is read.
        pass_rates: one per row, in [0, 1].
        shape: the other arguments of `RoundSampler`, in order; ``more``: the same by name.
    """

    def __init__(self, data_source: Sized, pass_rates: Sequence[float], *shape: int, **more: int) -> None:
        super().__init__(data_source, *shape, **more)
        self._rates = checked_rates(pass_rates, self.num_samples)

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        shuffled = torch.randperm(self.num_samples, generator=seeded(self.seed, epoch))
        taken = shuffled[: self.rounds_per_epoch * self.batch_size]
        by_difficulty = taken[torch.sort(self._rates[taken], descending=True, stable=True).indices]
        return by_difficulty[number * self.batch_size : (number + 1) * self.batch_size].tolist()


class UniformThenHardSampler(RoundSampler):
    """Sampler of all problems, shuffled, for the first `uniform_rounds` rounds of the run; after that, only of problems
    with a pass rate below `hard_below`, shuffled again and again.

    Args:
        data_source: the dataset, of which only the length is read.
        pass_rates: one per row, in [0, 1].
        shape: the other arguments of `RoundSampler`, in order; ``more``: the same by name.
        uniform_rounds: number of rounds (generation batches) of the first phase, counted over epochs.
        hard_below: problems with a smaller pass rate are hard; there must be at least `batch_size` of them.
        floor: weight of an easy problem in the hard phase, in [0, 1]; a hard one has 1. With 0 the hard problems are
            visited pass by pass; otherwise every round is drawn by these weights (`systematic_sample`).
    """

    def __init__(
        self,
        data_source: Sized,
        pass_rates: Sequence[float],
        *shape: int,
        uniform_rounds: int,
        hard_below: float = 0.5,
        floor: float = 0.0,
        **more: int,
    ) -> None:
        super().__init__(data_source, *shape, **more)
        if uniform_rounds < 0:
            raise ValueError(f"uniform_rounds={uniform_rounds} is negative")
        if not 0 <= floor <= 1:
            raise ValueError(f"floor={floor} is not in [0, 1]")
        self.uniform_rounds = uniform_rounds
        self.floor = floor
        self._hard = torch.nonzero(checked_rates(pass_rates, self.num_samples) < hard_below).flatten()
        if len(self._hard) < self.batch_size:
            raise ValueError(
                f"{len(self._hard)} problems have a pass rate below hard_below={hard_below}; "
                f"a round needs batch_size={self.batch_size}"
            )
        self._weights = torch.full((self.num_samples,), floor, dtype=torch.float64)
        self._weights[self._hard] = 1.0

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        position = epoch * self.rounds_per_epoch + number
        if position < self.uniform_rounds:
            return self._shuffled(torch.arange(self.num_samples), position, phase=0)
        if self.floor > 0:
            return systematic_sample(inclusion_probabilities(self._weights, self.batch_size), generator)
        return self._shuffled(self._hard, position - self.uniform_rounds, phase=1)

    def _shuffled(self, pool: torch.Tensor, position: int, phase: int) -> list[int]:
        """Return round `position`, counted from the start of the phase, of a pool that is shuffled anew for every full
        pass."""
        lap, place = divmod(position, len(pool) // self.batch_size)
        order = pool[torch.randperm(len(pool), generator=seeded(self.seed, phase, lap))]
        return [int(index) for index in order[place * self.batch_size : (place + 1) * self.batch_size]]


def checked_rates(pass_rates: Sequence[float], rows: int, name: str = "pass_rates") -> torch.Tensor:
    """Return pass rates as a tensor, `[N]` float64. Raises ValueError, naming the argument `name`, unless there are
    `rows` of them, all in [0, 1]."""
    if len(pass_rates) != rows:
        raise ValueError(f"{name} needs {rows} pass rates, one a row; got {len(pass_rates)}")
    if wrong := [rate for rate in pass_rates if rate is None or not 0 <= rate <= 1]:
        raise ValueError(f"a pass rate is {wrong[0]} ({name}); numbers in [0, 1] are needed (leave unscorable out)")
    return torch.tensor([float(rate) for rate in pass_rates], dtype=torch.float64)


class PrioritizedSampler(RoundSampler):
    """Sampler that draws problems with probability ∝ max(1 − s_i, floor), where s_i is the success rate of problem i in
    this run so far (formulas: at the top of this module).

    Args:
        data_source: the dataset, of which only the length is read.
        shape: the other arguments of `RoundSampler`, in order; ``more``: the same by name.
        initial: s_i before the first update, one number or one per problem; with 0 unseen problems have the largest
            weight.
        floor: least weight, in (0, 1]; 1 is uniform sampling.
        decay: λ in [0, 1]; with 0 only the last update counts, with 1 no update fades.
    """

    def __init__(
        self,
        data_source: Sized,
        *shape: int,
        initial: float | Sequence[float] = 0.0,
        floor: float = FLOOR,
        decay: float = DECAY,
        **more: int,
    ) -> None:
        super().__init__(data_source, *shape, **more)
        if not 0 < floor <= 1:
            raise ValueError(f"floor={floor} is not in (0, 1]; without a floor a solved problem would starve")
        if not 0 <= decay <= 1:
            raise ValueError(f"decay={decay} is not in [0, 1]")
        if isinstance(initial, int | float):
            rates: Sequence[float] = [initial] * self.num_samples
        else:
            rates = initial
        self._initial = checked_rates(rates, self.num_samples, "initial")
        self.floor = floor
        self.decay = decay
        self._successes = torch.zeros(self.num_samples, dtype=torch.float64)
        self.trials = torch.zeros_like(self._successes)  # T_i, 0 before the first update

    def update(self, index: int, successes: float, trials: float) -> None:
        """Record that of `trials` scorable completions of problem `index`, `successes` were right. Every rank must make
        the same call."""
        if not 0 <= index < self.num_samples:
            raise ValueError(f"index={index} is not a row of the data (0 … {self.num_samples - 1})")
        if not 0 <= successes <= trials:
            raise ValueError(f"successes={successes} of trials={trials}: 0 ≤ successes ≤ trials is needed")
        if trials > 0:
            self._successes[index] = self.decay * self._successes[index] + successes
            self.trials[index] = self.decay * self.trials[index] + trials

    @property
    def success_rates(self) -> torch.Tensor:
        """Success rates s_i, [N] float64."""
        return torch.where(self.trials > 0, self._successes / self.trials, self._initial)

    @property
    def weights(self) -> torch.Tensor:
        """Weights w_i = max(1 − s_i, floor), [N] float64."""
        return (1 - self.success_rates).clamp(min=self.floor)

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        return systematic_sample(inclusion_probabilities(self.weights, self.batch_size), generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the decayed counts S and T of every problem."""
        return {**super().state_dict(), "successes": self._successes.tolist(), "trials": self.trials.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._successes = torch.tensor(state["successes"], dtype=torch.float64)
        self.trials = torch.tensor(state["trials"], dtype=torch.float64)


def inclusion_probabilities(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Return π_i = min(1, k·w_i), `[N]` float64, with k such that Σπ_i = `count`.

    The weights `[N]` must be positive, and `count` at most N. k is found by repeating: spread what is left of `count`
    over the problems below 1 by their weights, and fix those at 1 that exceed it.
    """
    certain = torch.zeros_like(weights, dtype=torch.bool)
    while True:
        rest = count - int(certain.sum())
        free_weight = torch.where(certain, 0.0, weights).sum()
        chance = torch.where(certain, 1.0, rest * weights / free_weight.clamp(min=torch.finfo(weights.dtype).tiny))
        over = ~certain & (chance >= _CERTAIN)
        if not over.any():
            return chance
        certain |= over


def systematic_sample(chance: torch.Tensor, generator: torch.Generator) -> list[int]:
    """Draw Σπ different indices, in random order, so that i is among them with probability exactly π_i = `chance[i]`.

    The indices are laid out in random order as intervals of length π_i. The points u, u + 1, u + 2, … with u uniform in
    [0, 1) pick an interval each; none is picked twice, as π_i ≤ 1.
    """
    certain = torch.nonzero(chance >= _CERTAIN).flatten()
    free = torch.nonzero(chance < _CERTAIN).flatten()
    free = free[torch.randperm(len(free), generator=generator)]
    count = round(float(chance[free].sum()))
    ends = torch.cumsum(chance[free], dim=0)
    points = torch.rand((), generator=generator, dtype=torch.float64) + torch.arange(count, dtype=torch.float64)
    picked = torch.searchsorted(ends, points, right=True).clamp(max=max(len(free) - 1, 0))
    chosen = torch.cat([certain, free[picked]])
    return [int(index) for index in chosen[torch.randperm(len(chosen), generator=generator)]]
