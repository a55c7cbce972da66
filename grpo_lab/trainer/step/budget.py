"""``update.max_tokens``: how many tokens one forward of the update may have.

    a number     that
    nothing      as many as the largest micro-batch that TRL cut has: memory does not rise
    ``auto``     likewise at first; once a step has shown what a token takes, as many as the device's free memory holds:
                 one number for all ranks, the least of theirs, from the next generation batch on (the old log-probs of
                 a batch are made in the bins of its steps)

Measured is one bin of the first optimizer step that is taken: the second, since with the first one gradients come, too;
the only one of a step that has no second. What its forward and backward add at their peak, by its tokens, is what a
token takes. Free is what the device and its allocator have left after that step, when the optimizer's state is there,
less the gradients, of which ``SHARE`` is used. A bin that runs out of memory all the same halves the number
(``step.out_of_memory``). A checkpoint holds it, so that a resumed run plans as the run would have.

One more forward costs more where its kernels are launched one by one than on a CPU: with the measured number bins are
planned with ``LAUNCHES`` tokens for it, so that a step of some 10⁴ tokens is one to three forwards where they fit.

A device without memory statistics (a CPU) has nothing to measure: there ``auto`` is the stock micro-batch's footprint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.resume.state import SavedState
from grpo_lab.update import DEFAULT_OVERHEAD_TOKENS

#: of the free memory: the allocator cuts it into pieces, and longer rows may take more a token
SHARE = 0.8
#: what launching one more forward and backward takes, in tokens: some 0.1 s, in which a GPU computes 1,000 (7B) to
#: 16,000 (0.5B). Written, not measured.
LAUNCHES = 2048
#: moments of AdamW
MOMENTS = 2
UNKNOWN = 2**62


class DeviceMemory:
    """Reads what a device's allocator says of its bytes; the host keeps these books, and nothing waits for the
    device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Make one for a device; None: the device has no such statistics."""
        if not hasattr(torch.get_device_module(device), "mem_get_info"):
            return None
        return DeviceMemory(device)

    def taken(self) -> int:
        return int(self._module.memory_allocated(self._device))

    def peak(self) -> int:
        """The most that was taken since ``forget_peak``."""
        return int(self._module.max_memory_allocated(self._device))

    def forget_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._device)

    def free(self) -> int:
        """Bytes that are free on the device and in the allocator's own unused pieces."""
        held = self._module.memory_reserved(self._device) - self.taken()
        return int(self._module.mem_get_info(self._device)[0]) + int(held)

    def give_back(self) -> None:
        """Unused pieces go back to the device: what they were cut into is no use to bins of another size."""
        self._module.empty_cache()


class ForwardBudget(TrainerCallback):  # type: ignore[misc]
    """Number of tokens that one forward of the update may have. A trainer has one budget; with ``auto`` it is also a
    callback of the trainer, which measures memory in the first step.

    Attributes:
        asked: the setting ``update.max_tokens``.
        tokens: the number in force with ``auto``. None: that of the stock micro-batch, until there is a measured one,
            or for good where memory cannot be measured.
        memory: reads the device's memory for ``auto``; None: not ``auto``, or the device has no memory statistics.
    """

    holds = "with `update.max_tokens: auto` the tokens of a forward, so that the resumed run has the same bins"

    def __init__(self, trainer: UpdatePort) -> None:
        self._trainer = trainer
        self.asked: Any = trainer.lab_settings.update.max_tokens
        self.memory: DeviceMemory | None = None
        if self.is_auto:
            self.memory = DeviceMemory.of(trainer.accelerator.device)
        self._loaded: dict[str, int | None] = {}
        self._forget()

    def _forget(self) -> None:
        self.tokens: int | None = None
        self._measured: int | None = None  # until the generation batch ends
        self._bins: list[tuple[int, int]] = []  # of the step at hand: tokens, bytes that they took
        self._open: tuple[int, int] | None = None  # of the bin at hand: tokens, bytes that were taken before it
        self._taken = True

    @property
    def is_auto(self) -> bool:
        return bool(self.asked == "auto")

    @property
    def number(self) -> int | None:
        """The budget in force, in tokens; None: the stock micro-batch's footprint."""
        if self.is_auto:
            return self.tokens
        return self.asked

    def of(self, footprint: int) -> int:
        """Tokens of a forward; ``footprint``: those of the stock micro-batch."""
        return self.number or footprint

    @property
    def overhead(self) -> int:
        """Cost of one more forward in the plan, in tokens."""
        is_measured = self.memory is not None and self.tokens is not None
        if is_measured:
            return LAUNCHES
        return DEFAULT_OVERHEAD_TOKENS

    def described(self) -> dict[str, Any]:
        """Describe the budget for ``run.json``: with ``auto`` the number in force."""
        if not self.is_auto:
            return {}
        return {"max_tokens": self.tokens or "auto: as a stock micro-batch"}

    def bin_begins(self, tokens: int) -> None:
        """A bin of so many tokens (0: a stand-in) is about to be computed, and the one before it is done."""
        self._bin_ends()
        if self.memory is not None and self.tokens is None and tokens > 0:
            self.memory.forget_peak()
            self._open = tokens, self.memory.taken()

    def _bin_ends(self) -> None:
        if self.memory is not None and self._open is not None:
            tokens, before = self._open
            self._bins.append((tokens, self.memory.peak() - before))
        self._open = None

    def halve(self, tokens: int) -> None:
        """A bin of so many tokens did not fit; every rank says the same of it."""
        self.tokens = max(1, tokens // 2)
        self._open = None
        self._bins = []
        if self.memory is not None:
            self.memory.give_back()
        self._trainer.recorder.say(
            f"`update.max_tokens: auto`: out of memory in a bin of {tokens} tokens: the step is planned anew with "
            f"{self.tokens}, and nothing of it is lost",
            level=logging.WARNING,
        )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._forget()
        self.tokens = self._loaded.get("tokens")
        self._measured = self._loaded.get("measured")
        self._loaded = {}
        if self.memory is None:
            device = self._trainer.accelerator.device.type
            self._say(f"a {device} has no statistics of its memory: a forward has the tokens of a stock micro-batch")
        elif self.tokens is not None:
            self._say(f"{self.tokens} tokens a forward, as the checkpoint says")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._bin_ends()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._taken = not self._trainer.accelerator.optimizer_step_was_skipped  # the guard takes the mark back after it

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A collective, until the number is known."""
        bins = self._bins
        self._bins = []
        if self.memory is None or self.tokens is not None:
            return
        if self._measured is None and self._taken:
            with named_place("tokens of a forward"):
                own = torch.tensor([self._fits(self.memory, bins)], device=self._trainer.accelerator.device)
                least = int(self._trainer.accelerator.gather(own).min())
            if least != UNKNOWN:
                self._measured = least
        if self._measured is not None and self._trainer.phase.at_end:
            self.tokens = self._measured
            self._measured = None
            self._say(f"{self.tokens} tokens a forward from here on, by the memory that the first step left free")

    def _fits(self, memory: DeviceMemory, bins: list[tuple[int, int]]) -> int:
        """Tokens that this rank has memory for; never fewer than what has just fit. ``UNKNOWN``: it had stand-ins."""
        if not bins:
            return UNKNOWN
        tokens, bytes_taken = max(bins[1:] or bins)
        room = SHARE * (memory.free() - to_come(self._trainer.model, self._trainer.optimizer))
        return max(int(room * tokens / max(bytes_taken, 1)), *(size for size, _ in bins), 1)

    def _say(self, what: str) -> None:
        self._trainer.recorder.say(f"`update.max_tokens: auto`: {what}")

    def save(self, _folder: Path) -> dict[str, int | None] | None:
        """Checkpoint entry; None where there is nothing to go on with."""
        if not self.is_auto or (self.tokens is None and self._measured is None):
            return None
        return {"tokens": self.tokens, "measured": self._measured}

    def load(self, saved: SavedState | None) -> None:
        """Go on with what ``save`` said."""
        self._loaded = {}
        if saved is not None and self.is_auto:
            self._loaded = saved.entry("budget", _checked, "the number is then measured anew") or {}


def to_come(model: nn.Module, optimizer: Any) -> int:
    """Bytes, on this rank, of gradients and of the optimizer's state that are not there."""
    states = optimizer.state
    stateful = any(states.values())
    missing = 0
    for weights in model.parameters():
        if not weights.requires_grad:
            continue
        if hasattr(weights, "to_local"):  # of sharded weights, this rank's part
            own: Any = weights.to_local()
        else:
            own = weights
        if weights.grad is None:
            missing += own.nbytes
        if stateful and not states.get(weights):
            missing += MOMENTS * own.nbytes
    return missing


def _checked(state: Mapping[str, Any]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in ("tokens", "measured"):
        number = state[name]
        if number is not None:
            number = int(number)
            if number < 1:
                raise ValueError(f"a forward of {number} tokens")
        found[name] = number
    return found
