"""``update.max_tokens``: how many tokens one forward of the update may have.

    a number     that many
    not set      as many as the largest micro-batch that TRL cut, so that memory does not rise
    ``auto``     at first as many as that; once a step has shown what a token takes, as many as the device's free memory
                 holds. All ranks take the least of their numbers. It is in force from the next generation batch on,
                 because the old log-probs of a batch are made in the bins of its steps

One bin of the first optimizer step that is taken is measured: the largest of those after the first bin (which also
allocates the gradients), or the only one. What its forward and backward add at their peak, divided by its tokens, is
the memory of a token. Free memory is what device and allocator have left after that step, with the optimizer's state,
less the gradients; ``SHARE`` of it is used. A bin that still runs out of memory halves the number
(``step.out_of_memory``). A checkpoint holds the number, so that a resumed run plans the same bins.

On a GPU one more forward costs more than on a CPU, since its kernels are launched one by one. So with the measured
number the plan counts ``LAUNCHES`` tokens for each forward. A step of some 10⁴ tokens is then one to three forwards, if
they fit.

A device without memory statistics (a CPU) has nothing to measure: there ``auto`` is the stock micro-batch's size.
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

#: Share of the free memory that is used. The allocator fragments it, and longer rows may take more per token.
SHARE = 0.8
#: Cost of launching one more forward and backward, in tokens: some 0.1 s, in which a GPU computes 1,000 (7B) to 16,000
#: (0.5B). It is chosen, not measured.
LAUNCHES = 2048
#: Number of moments per weight of AdamW.
MOMENTS = 2
UNKNOWN = 2**62


class DeviceMemory:
    """Reads a device allocator's statistics, in bytes. They are kept on the host, so reading them does not wait for the
    device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    @staticmethod
    def of(device: torch.device) -> DeviceMemory | None:
        """Return an instance for ``device``, or None if it has no such statistics."""
        if not hasattr(torch.get_device_module(device), "mem_get_info"):
            return None
        return DeviceMemory(device)

    def taken(self) -> int:
        """Return the bytes that are allocated now."""
        return int(self._module.memory_allocated(self._device))

    def peak(self) -> int:
        """Return the most bytes that were allocated since ``forget_peak``."""
        return int(self._module.max_memory_allocated(self._device))

    def forget_peak(self) -> None:
        """Begin to measure the peak anew."""
        self._module.reset_peak_memory_stats(self._device)

    def free(self) -> int:
        """Return the bytes that are free on the device or unused in its allocator."""
        held = self._module.memory_reserved(self._device) - self.taken()
        return int(self._module.mem_get_info(self._device)[0]) + int(held)

    def give_back(self) -> None:
        """Return the allocator's unused pieces to the device, since bins of another size could not use them."""
        self._module.empty_cache()


class ForwardBudget(TrainerCallback):  # type: ignore[misc]
    """Number of tokens that one forward of the update may have. A trainer has one budget. It is also a callback of the
    trainer, which with ``auto`` measures memory in the first step.

    Attributes:
        asked: the setting ``update.max_tokens``.
        tokens: the number in force with ``auto``. None means that of the stock micro-batch: until one is measured, or
            for good if memory cannot be measured.
        memory: reads the device's memory for ``auto``; None if not ``auto``, or without memory statistics.
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
        self._measured: int | None = None  # comes into force when the generation batch ends
        self._bins: list[tuple[int, int]] = []  # bins of the current step: tokens, bytes that they took
        self._open: tuple[int, int] | None = None  # current bin: its tokens, bytes allocated before it
        self._taken = True

    @property
    def is_auto(self) -> bool:
        return bool(self.asked == "auto")

    @property
    def number(self) -> int | None:
        """Budget in force, in tokens; None means the size of the stock micro-batch."""
        if self.is_auto:
            return self.tokens
        return self.asked

    def of(self, footprint: int) -> int:
        """Return the budget in tokens; ``footprint``, the tokens of the stock micro-batch, if no number is in force."""
        return self.number or footprint

    @property
    def overhead(self) -> int:
        """Cost of one more forward in the plan, in tokens."""
        is_measured = self.memory is not None and self.tokens is not None
        if is_measured:
            return LAUNCHES
        return DEFAULT_OVERHEAD_TOKENS

    def described(self) -> dict[str, Any]:
        """Return the number in force with ``auto``, for ``run.json``; else nothing."""
        if not self.is_auto:
            return {}
        return {"max_tokens": self.tokens or "auto: as a stock micro-batch"}

    def bin_begins(self, tokens: int) -> None:
        """Note that a bin of ``tokens`` tokens (0 for a dummy) is about to be computed, so the bin before it is
        done."""
        self._bin_ends()
        if self.memory is not None and self.tokens is None and tokens > 0:
            self.memory.forget_peak()
            self._open = tokens, self.memory.taken()

    def _bin_ends(self) -> None:
        """Note the memory that the current bin has taken at its peak."""
        if self.memory is not None and self._open is not None:
            tokens, before = self._open
            self._bins.append((tokens, self.memory.peak() - before))
        self._open = None

    def halve(self, tokens: int) -> None:
        """Halve the budget after a bin of ``tokens`` tokens did not fit. Every rank calls this with the same number."""
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
        """Forget what was measured, and take up the number of the checkpoint."""
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
        """Note whether the optimizer took its step (the guard resets this flag later)."""
        self._taken = not self._trainer.accelerator.optimizer_step_was_skipped

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Measure the budget after a step that was taken, and put it into force at the end of the generation batch. A
        collective until the number is known."""
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
        """Return the tokens that this rank has memory for, but no fewer than what has just fitted; ``UNKNOWN`` if no
        bin was measured."""
        if not bins:
            return UNKNOWN
        tokens, bytes_taken = max(bins[1:] or bins)
        room = SHARE * (memory.free() - to_come(self._trainer.model, self._trainer.optimizer))
        return max(int(room * tokens / max(bytes_taken, 1)), *(size for size, _ in bins), 1)

    def _say(self, what: str) -> None:
        self._trainer.recorder.say(f"`update.max_tokens: auto`: {what}")

    def save(self, _folder: Path) -> dict[str, int | None] | None:
        """Return the checkpoint entry, or None if there is nothing to save."""
        if not self.is_auto or (self.tokens is None and self._measured is None):
            return None
        return {"tokens": self.tokens, "measured": self._measured}

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` returned."""
        self._loaded = {}
        if saved is not None and self.is_auto:
            self._loaded = saved.entry("budget", _checked, "the number is then measured anew") or {}


def to_come(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes, on this rank, of gradients and optimizer state that are not allocated yet."""
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
