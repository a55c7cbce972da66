"""Samplers that decide round by round, in the shape of TRL's `RepeatSampler`.

A round is one generation batch: `batch_size` different prompts. Its indices come out as

    repeat_count times:  p₁ … p₁ (mini_repeat_count times)  p₂ … p₂  …  p_batch_size …

An epoch has ⌊N / batch_size⌋ rounds. A round is drawn when the data loader first asks for one of its indices, one batch before the
trainer uses it (accelerate prefetches one), so a draw sees the updates received *until then*.

Resume. A trainer iterates the epoch from its start and throws away what was trained on already. Draws may depend on the run, so the
rounds drawn in the current epoch are part of the state and are replayed first, the prefetched one included. The generator of a round is
seeded by (seed, epoch, round) alone.

Ranks. Every rank runs its own copy; they agree if they get the same updates at the same steps. `fingerprint` is compared over ranks.

The epoch is set by `set_epoch` or, where nobody calls it, counted: the iterator after one that was used up begins the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class RoundSampler(Sampler[int]):
    """Base of the samplers here; a subclass says which prompts make up a round (`draw`).

    Args:
        data_source: the dataset, for its length N.
        mini_repeat_count: copies of every index in a row (TRL: the group size, `num_generations`).
        batch_size: different prompts in a round (TRL: `generation_batch_size // num_generations`).
        repeat_count: times a round is served (TRL: `num_iterations * steps_per_generation`).
        seed: the same on every rank.
    Raises: ValueError for counts below 1, a seed that is no integer, or fewer prompts than one round needs.
    """

    def __init__(
        self, data_source: Sized, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1, seed: int = 0
    ) -> None:
        counts = {"mini_repeat_count": mini_repeat_count, "batch_size": batch_size, "repeat_count": repeat_count}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}; an integer of at least 1 is needed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}; an integer is needed, the same on every rank")
        if len(data_source) < batch_size:
            raise ValueError(f"the data has {len(data_source)} rows and a round needs batch_size={batch_size}")
        self.num_samples = len(data_source)
        self.mini_repeat_count, self.batch_size, self.repeat_count = mini_repeat_count, batch_size, repeat_count
        self.seed = seed
        self.epoch = 0
        self._drawn: list[list[int]] = []
        self._used_up = False

    def draw(self, epoch: int, number: int, generator: torch.Generator) -> list[int]:
        """The `batch_size` different indices of round `number` of an epoch."""
        raise NotImplementedError

    @property
    def rounds_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def __len__(self) -> int:
        return self.rounds_per_epoch * self.batch_size * self.mini_repeat_count * self.repeat_count

    def __iter__(self) -> Iterator[int]:
        if self._used_up:
            self._begin_epoch(self.epoch + 1)
        return self._indices(self.epoch, self._drawn)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the current one keeps its rounds and is replayed from its start."""
        if epoch != self.epoch:
            self._begin_epoch(epoch)
        self._used_up = False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists (JSON or `torch.save`): the epoch and the rounds drawn in it so far."""
        return {
            "sampler": type(self).__name__,
            "shape": self._shape(),
            "epoch": self.epoch,
            "used_up": self._used_up,
            "drawn": [list(indices) for indices in self._drawn],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved. Iterate from the start of the epoch afterwards, as a resuming trainer does.

        Raises: ValueError if the state belongs to another sampler, data of another length or other counts.
        """
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
        """A number below 2⁵³ that differs if anything in the state differs; compare it over ranks."""
        text = json.dumps(self.state_dict(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def _begin_epoch(self, epoch: int) -> None:
        self.epoch, self._drawn, self._used_up = epoch, [], False

    def _indices(self, epoch: int, drawn: list[list[int]]) -> Iterator[int]:
        for number in range(self.rounds_per_epoch):
            if number == len(drawn):
                drawn.append(self.draw(epoch, number, seeded(self.seed, epoch, number)))
                assert len(set(drawn[-1])) == self.batch_size, "a round repeats a prompt"
            for _ in range(self.repeat_count):
                for index in drawn[number]:
                    for _ in range(self.mini_repeat_count):
                        yield index
        if drawn is self._drawn:
            self._used_up = True

    def _shape(self) -> dict[str, int]:
        names = ("num_samples", "mini_repeat_count", "batch_size", "repeat_count", "seed")
        return {name: getattr(self, name) for name in names}


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on these integers only."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator
