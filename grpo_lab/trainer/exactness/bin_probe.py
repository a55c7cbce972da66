"""Probes that ask the model itself two questions before the first update: may rows be put into bins, and may they be
under dropout?

``BinProbe``: has a row the same log-probs in a bin as in TRL's batch? A bin pads a row on the right and passes its
positions, but no attention mask; TRL pads on both sides, with a mask and without positions. For some models (BERT's and
RoBERTa's families, Doge) the results differ, and lists of names are never complete. So two short rows are forwarded
both ways, in float32 if the weights are. How far rounding may take them apart is measured by comparing TRL's batch with
each of its rows alone.

``MaskProbe``: is dropout all that a forward draws, and has every row its own masks? Only then rows may be left out and
put into other batches (``update.randomness: same_distribution``). Copies of one row are forwarded in training mode,
first two and then four, while every call of torch's dropout is replaced by one that drops nothing and reports its size.
If random numbers are drawn all the same, they have another cause (a router, an adapter that drops whole modules). A
mask whose size does not grow with the rows is shared by them. In the first optimizer step the real forwards are watched
likewise, calls of dropout excepted (``apart_from_dropout``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.model_conditions import RandomnessWatch, position_limit
from grpo_lab.trainer.ports import Collectives, UpdatePort
from grpo_lab.trainer.row_table import RowTable

#: Prompt and completion tokens of the two toy rows. Both tensors are 8 wide, so the first row is padded and the second
#: is not.
PROMPTS = (3, 8)
COMPLETIONS = (4, 8)
#: mean |difference| in nats per token that is always taken for rounding: float32, and coarser arithmetic, where a
#: log-prob of −15 is a difference of logits that bfloat16 rounds by up to 0.03 each
FLOOR, COARSE_FLOOR = 5e-5, 0.1
#: A difference of up to this many times the model's own rounding is allowed, too, but no more than can be rounding.
TIMES = 10.0
MOST = 1e-3
MOST_COARSE = 0.25
#: copies of one row for which the sizes of dropout's masks are compared
FEW, MANY = 2, 4
#: Answers, the strictest last. The strictest answer of all ranks holds.
_REASONS = (
    None,
    "the model's forward draws random numbers beside torch's dropout, so it may depend on the micro-batches' layout",
    "a dropout mask of the model is shared by the rows of a micro-batch, so rows in other batches are random together "
    "in another way",
)


class _Question:
    """A question to the model that is asked once a run. Its answer is the same on every rank."""

    def __init__(self, trainer: UpdatePort) -> None:
        self._trainer = trainer
        self._answered: tuple[str | None] | None = None

    def why_stock(self) -> str | None:
        """Return why batches must stay as TRL cut them, or ``None``. The first call is a collective."""
        self._answered = self._answered or (self._answer(),)
        return self._answered[0]

    def _answer(self) -> str | None:
        """Ask the model; return why batches must stay as TRL cut them, or None. A collective."""
        raise NotImplementedError

    def _weights_spread_by(self) -> str | None:
        """Return FSDP or DEEPSPEED if it shards the weights, so that a probe's forward would need all ranks; else
        None."""
        found = self._trainer.accelerator.distributed_type
        kind = str(getattr(found, "value", found))
        if kind in ("FSDP", "DEEPSPEED"):
            return kind
        return None


class BinProbe(_Question):
    """Asks the model whether a row has the same log-probs in a bin as in TRL's batch."""

    def _answer(self) -> str | None:
        trainer = self._trainer
        kind = self._weights_spread_by()
        skipped = None
        limit = position_limit(trainer.accelerator.unwrap_model(trainer.model))
        if kind is not None:
            skipped = f"weights are spread over ranks ({kind})"
        elif trl_bridge.is_compiled(trainer.accelerator, trainer.model):
            skipped = "the model is compiled, and would be once more"
        elif limit is not None and limit < max(PROMPTS) + max(COMPLETIONS):
            skipped = f"it knows {limit} positions only"
        if skipped is not None:
            trainer.recorder.say(
                f"not asked: whether the model's log-probs are the same in bins as in TRL's batches ({skipped}); known "
                "kinds of models for which they are not are looked at by structure"
            )
            return None
        gathered = trainer.accelerator.gather(torch.tensor([self._measured()], device=trainer.accelerator.device))
        apart, bound = max(gathered.tolist(), key=lambda pair: pair[0] / pair[1])
        if apart <= bound:
            return None
        return (
            "the model's log-probs of a row depend on how it is padded or on the attention mask (two toy rows: "
            f"{apart:.2g} nats per token apart from TRL's batch, where rounding makes at most {bound:.2g}; no setting "
            "changes that)"
        )

    @torch.no_grad()
    def _measured(self) -> tuple[float, float]:
        """Return two numbers in nats per token: the mean |difference| of log-probs between a bin and TRL's batch, and
        the largest that rounding may explain."""
        trainer = self._trainer
        rows = two_rows(self._trainer)
        mask = rows["completion_mask"].bool()
        single = [{name: values[i : i + 1] for name, values in rows.items()} for i in range(mask.size(0))]
        with _evaluation_mode(trainer):
            theirs = trl_bridge.stock_forward(trainer, trainer.model, rows)[0]
            alone = torch.cat([trl_bridge.stock_forward(trainer, trainer.model, row)[0] for row in single])
            part = RowTable.of([rows]).bin(list(range(mask.size(0))))
            scored, _ = trl_bridge.completion_log_probs(trainer.accelerator, trainer.model, *part.inputs)
        ours = scored.gather(1, part.take)
        least, most = (FLOOR, MOST) if _in_float32(trainer) else (COARSE_FLOOR, MOST_COARSE)
        rounding = TIMES * _mean_difference(theirs, alone, mask)
        return _mean_difference(theirs, ours, mask), max(least, min(rounding, most))


def two_rows(trainer: UpdatePort) -> dict[str, Tensor]:
    """Make two rows of ordinary tokens, padded as TRL pads them: prompts on the left, completions on the right."""
    tokenizer = trainer.text_tokenizer
    device = trainer.accelerator.device
    size = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.size(0)
    special = {*tokenizer.all_special_ids, *trainer.end_token_ids}
    ordinary = [i for i in range(min(len(tokenizer), size)) if i not in special] or list(range(size))
    tokens = iter(ordinary[(7 * i) % len(ordinary)] for i in range(sum(PROMPTS) + sum(COMPLETIONS)))

    def padded(lengths: tuple[int, int], left: bool) -> tuple[Tensor, Tensor]:
        ids = torch.full((2, max(lengths)), tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            if left:
                place = slice(max(lengths) - length, None)
            else:
                place = slice(length)
            ids[row, place] = torch.tensor([next(tokens) for _ in range(length)])
            mask[row, place] = 1
        return ids.to(device), mask.to(device)

    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return dict(zip(names, (*padded(PROMPTS, left=True), *padded(COMPLETIONS, left=False)), strict=True))


@contextlib.contextmanager
def _evaluation_mode(trainer: UpdatePort) -> Iterator[None]:
    """Put the model inside the block into evaluation mode, without gradient checkpointing and, if possible, in float32.
    Modes and random states are restored afterwards."""
    training = [module for module in trainer.model.modules() if module.training]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_states_kept(trainer.accelerator.device))
        stack.enter_context(trl_bridge.without_checkpointing(trainer.model, trainer.args))
        if _in_float32(trainer):
            stack.enter_context(trl_bridge.without_autocast(trainer.accelerator, trainer.model))
        try:
            trainer.model.eval()
            yield
        finally:
            for module in training:
                module.training = True


def _random_states_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context after which the random states of CPU and device are what they were before."""
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    return torch.random.fork_rng(devices=devices, device_type=kind)


def _in_float32(trainer: Collectives) -> bool:
    """Return whether the model computes in float32: its weights are float32, its attention is one that keeps that
    precision, and TF32 is off."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    short = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    tf32 = trainer.accelerator.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    attention = getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager"
    return attention in ("eager", "sdpa", trl_bridge.SHARED_PROMPT) and not short and not tf32


def _mean_difference(one: Tensor, other: Tensor, mask: Tensor) -> float:
    """Return the mean |difference| over the tokens of ``mask``; infinite if something is not finite."""
    found: float = (one.double() - other.double()).abs()[mask].mean().item()
    return found if math.isfinite(found) else math.inf


class MaskProbe(_Question):
    """Asks the model whether dropout is all that a forward draws, and whether every row has its own masks."""

    def _answer(self) -> str | None:
        trainer = self._trainer
        kind = self._weights_spread_by()
        if trl_bridge.is_compiled(trainer.accelerator, trainer.model):
            return (
                "dropout is active and the model is compiled, where it cannot be seen whether anything else draws "
                "random numbers; `disable_dropout=True` and `lora_dropout=0`, or no torch_compile"
            )
        if kind is not None:
            trainer.recorder.say(
                f"not asked: whether every row has its own dropout masks (weights are spread over ranks: {kind}); "
                "known kinds of shared masks are looked at by structure, and other random numbers in the first step"
            )
            return None
        few = self._sizes(FEW)
        many = self._sizes(MANY)
        if few is None or many is None:
            code = 1
        else:
            code = 0
            if [size * MANY // FEW for size in few] != many:
                code = 2
        flag = torch.tensor([code], device=trainer.accelerator.device)
        return _REASONS[int(trainer.accelerator.gather(flag).max())]

    @torch.no_grad()
    def _sizes(self, copies: int) -> list[int] | None:
        """Return for how many values each call of dropout draws, in a training forward of ``copies`` copies of a row;
        None if anything else draws."""
        trainer = self._trainer
        rows = RowTable.of([two_rows(self._trainer)])
        limit = position_limit(trainer.accelerator.unwrap_model(trainer.model))
        part = rows.bin([1] * copies, limit)
        device = trainer.accelerator.device
        sizes = []

        def passed_through(size: int, _draw: Callable[[], Tensor], without: Callable[[], Tensor]) -> Tensor:
            sizes.append(size)
            return without()

        watch = RandomnessWatch(device)
        with _random_states_kept(device), trl_bridge.without_checkpointing(trainer.model, trainer.args):
            watch.start()
            with _DropoutCalls(passed_through):
                trl_bridge.completion_log_probs(trainer.accelerator, trainer.model, *part.inputs)
            watch.stop()
        return None if watch.drawn else sizes


@contextlib.contextmanager
def apart_from_dropout(watch: RandomnessWatch) -> Iterator[None]:
    """Hide from ``watch``, which was started, what torch's dropout draws inside the block."""

    def unseen(_size: int, draw: Callable[[], Tensor], _without: Callable[[], Tensor]) -> Tensor:
        watch.stop()
        found = draw()
        watch.start()
        return found

    with _DropoutCalls(unseen):
        yield


class _DropoutCalls(TorchFunctionMode):
    """Replaces the calls of torch's dropout inside the block that can drop something (in training, p > 0):
    ``functional.dropout`` and the dropout of ``scaled_dot_product_attention``. Other functions, such as ``dropout1d``,
    are called as they are.

    Args:
        instead: called as ``instead(size, draw, without)`` in place of dropout, and returns its result. ``size`` is the
            number of values that dropout draws for. ``draw()`` makes the call as it is; ``without()`` makes it with
            nothing dropped.
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
                query = named["query"]
                key = named["key"]
                pairs = query.numel() // query.size(-1) * key.size(-2)
                return self._instead(pairs, lambda: func(*args, **kwargs), lambda: func(**{**named, "dropout_p": 0.0}))
        return func(*args, **kwargs)
