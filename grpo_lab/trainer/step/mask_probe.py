"""A question to the model itself: is dropout all that its forward draws, and has every row its own masks?

Only then rows may be left out and re-cut under dropout (``update.randomness: same_distribution``): the distribution of what a row adds
is then its own. Names do not tell: a mask may be drawn once and spread over the rows, or over a weight. So copies of one row are
forwarded in training mode, two and then four, with every call of torch's dropout passing its input through:

    a random number is drawn all the same      something else is random (a router, noise, adapters that drop whole modules)
    a call whose input is not twice as large   its mask does not grow with the rows: they share it

In the first optimizer step the real forwards are looked at likewise, every call of dropout apart (``apart_from_dropout``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.step.bin_probe import two_rows
from grpo_lab.trainer.step.model_conditions import RandomnessWatch, position_limit
from grpo_lab.trainer.step.row_table import RowTable

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

FEW, MANY = 2, 4
_REASONS = (
    "",
    "the model's forward draws random numbers beside torch's dropout, so it may depend on the layout of the micro-batches",
    "a dropout mask of the model is shared by the rows of a micro-batch, so rows in other batches are random together in another way",
)


class MaskProbe:
    """Asked once a run, where dropout is active; the same answer on every rank."""

    def __init__(self, trainer: StepPort) -> None:
        self._trainer = trainer
        self._asked = False
        self._reason: str | None = None

    def why_stock(self) -> str | None:
        """Why batches must stay as TRL cut them under dropout, or ``None``. A collective, the first time."""
        if not self._asked:
            self._asked, trainer = True, self._trainer
            kind = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
            if trl_bridge.is_compiled(trainer, trainer.model):
                self._reason = (
                    "dropout is active and the model is compiled, where it cannot be seen whether anything else draws random numbers; "
                    "`disable_dropout=True` and `lora_dropout=0`, or no torch_compile"
                )
            elif kind in ("FSDP", "DEEPSPEED"):
                trainer.recorder.say(
                    f"not asked: whether every row has its own dropout masks (weights are spread over ranks: {kind}); known kinds "
                    "of shared masks are looked at by structure, and other random numbers in the first step"
                )
            else:
                self._reason = self._answer()
        return self._reason

    def _answer(self) -> str | None:
        few, many = self._sizes(FEW), self._sizes(MANY)
        if few is None or many is None:
            code = 1
        else:
            code = 0 if [size * MANY // FEW for size in few] == many else 2
        flag = torch.tensor([code], device=self._trainer.accelerator.device)
        return _REASONS[int(self._trainer.accelerator.gather(flag).max())] or None

    @torch.no_grad()
    def _sizes(self, copies: int) -> list[int] | None:
        """Values that each call of dropout in one training forward had a draw for; ``None`` where anything else drew."""
        trainer, rows = self._trainer, RowTable.of([two_rows(self._trainer)])
        limit = position_limit(trainer.accelerator.unwrap_model(trainer.model))
        part, device, sizes = rows.bin([1] * copies, limit), trainer.accelerator.device, []
        devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)

        def passed_through(size: int, _draw: Callable[[], Tensor], without: Callable[[], Tensor]) -> Tensor:
            sizes.append(size)
            return without()

        watch = RandomnessWatch(device)
        with torch.random.fork_rng(devices=devices, device_type=kind), trl_bridge.without_checkpointing(trainer):
            watch.start()
            with _DropoutCalls(passed_through):
                trl_bridge.completion_log_probs(trainer, trainer.model, *part.inputs)
            watch.stop()
        return None if watch.drawn else sizes


@contextlib.contextmanager
def apart_from_dropout(watch: RandomnessWatch) -> Iterator[None]:
    """Inside the block ``watch``, which was started, does not see what torch's dropout draws."""

    def unseen(_size: int, draw: Callable[[], Tensor], _without: Callable[[], Tensor]) -> Tensor:
        watch.stop()
        found = draw()
        watch.start()
        return found

    with _DropoutCalls(unseen):
        yield


class _DropoutCalls(TorchFunctionMode):
    """Inside the block ``instead(size, draw, without)`` answers every call of torch's dropout, and of its attention with dropout.

    ``size``: how many values have a draw. ``draw()``: the call as it is. ``without()``: the same without dropping anything.
    """

    def __init__(self, instead: Callable[[int, Callable[[], Tensor], Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            given = signature(functional.dropout).bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["p"] > 0:
                values = given.arguments["input"]
                return self._instead(values.numel(), lambda: func(*args, **kwargs), lambda: values)
        if func is functional.scaled_dot_product_attention:
            named = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)), **kwargs}
            if named.get("dropout_p", 0.0) > 0:
                query, key = named["query"], named["key"]
                pairs = query.numel() // query.size(-1) * key.size(-2)
                return self._instead(pairs, lambda: func(*args, **kwargs), lambda: func(**{**named, "dropout_p": 0.0}))
        return func(*args, **kwargs)


__all__ = ["MaskProbe", "apart_from_dropout"]
