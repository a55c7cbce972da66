"""Backwards and models as HF's loop, accelerate and DeepSpeed want them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_lab.trainer.trl_bridge.replace import replaced


def without_gradient_sync(trainer: Any, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Context for a backward that is not the last one of the optimizer step: gradients accumulate, nobody talks.

    DeepSpeed decides by ``sync_gradients`` alone (accelerate hands it on as the accumulation boundary).
    """
    stack = contextlib.ExitStack()
    state = trainer.accelerator.gradient_state
    stack.callback(state._set_sync_gradients, state.sync_gradients)
    state._set_sync_gradients(False)
    if trainer.accelerator.distributed_type != "DEEPSPEED":
        stack.enter_context(trainer.accelerator.no_sync(model=model))
    return stack


def backward(trainer: Any, loss: Tensor) -> None:
    """HF's backward of one loss, as its ``training_step`` calls it: the loss is scaled for accumulation already, and DeepSpeed
    would divide it by ``gradient_accumulation_steps`` once more."""
    deepspeed = trainer.accelerator.distributed_type == "DEEPSPEED"
    trainer.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))


def put_aside(trainer: Any) -> Tensor:
    """The loss of a micro-batch that is only put aside: a constant 0.

    Under DeepSpeed HF's backward of it is left out: ZeRO-1 and 2 make their gradient buckets when a gradient arrives and read them at
    the end of every backward (0.19.8: ``IndexError`` in ``reduce_ipg_grads``), and offloaded gradients of the step before would be
    taken for this step's.
    """
    accelerator = trainer.accelerator
    nothing = torch.zeros((), device=accelerator.device, requires_grad=True)
    if accelerator.distributed_type == "DEEPSPEED":
        before = vars(accelerator).get("backward")  # usually none: it is a method

        def once(loss: Tensor, **_: Any) -> None:
            del accelerator.backward
            if before is not None:
                accelerator.backward = before

        accelerator.backward = once
    return nothing.clone()  # a loss has a grad_fn


def leave_out_step(optimizer: Any) -> None:
    """HF's next ``optimizer.step()`` does nothing and counts as skipped: accelerate says so, and HF leaves the schedule as it is.

    Weights and moments are not touched, gradients go with HF's ``zero_grad``. With fp16's scaler, which has unscaled the gradients,
    its own end of the step is made up for; without one ``step_was_taken`` takes the mark back.

    Args:
        optimizer: accelerate's wrapper.
    """
    before = vars(optimizer).get("step")  # usually none: it is a method

    def nothing(*_: Any, **__: Any) -> None:
        del optimizer.step
        if before is not None:
            optimizer.step = before
        if optimizer.scaler is not None:
            optimizer.scaler.update()
        optimizer._is_overflow = True

    optimizer.step = nothing


def step_was_taken(optimizer: Any) -> None:
    """Take back the mark of ``leave_out_step``, which nobody else does without a scaler."""
    if optimizer.scaler is None:
        optimizer._is_overflow = False


def overflow_of_scaler(accelerator: Any) -> bool:
    """Whether a gradient that is not finite may be fp16's scaling: a scaler leaves such a step out and halves its scale, down to 1."""
    scaler = accelerator.scaler
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1.0


@contextlib.contextmanager
def reference_model_in_full() -> Iterator[None]:
    """While a trainer is built: TRL's reference model gets the weights of rank 0 on every rank before it is sharded.

    With FSDP2 and ``fsdp_cpu_ram_efficient_loading`` transformers loads weights on one process of a machine and leaves zeros on the
    others. accelerate broadcasts the policy when it wraps it; TRL 1.16 wraps the reference model itself and does not, so that
    with ``beta`` > 0 all but the first rank's share of it is zero, without any error.
    """
    from trl.trainer import grpo_trainer

    original = grpo_trainer.prepare_fsdp

    @functools.wraps(original)
    def in_full(model: Any, accelerator: Any) -> Any:
        if accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            for tensor in itertools.chain(model.parameters(), model.buffers()):
                whole = tensor.detach().to(accelerator.device)
                torch.distributed.broadcast(whole, src=0)
                tensor.data.copy_(whole)
        return original(model, accelerator)

    with replaced(grpo_trainer, "prepare_fsdp", in_full):
        yield


@contextlib.contextmanager
def plain_cpu(args: Any) -> Iterator[None]:
    """Inside the block ``args.device`` of a CPU rank is "cpu", not "cpu:0".

    With several processes transformers 5.17 loads an optimizer's tensors to ``args.device``, and torch 2.13 knows no "cpu:0" there.
    """
    if args.device.type != "cpu":
        yield
        return
    with replaced(args, "_setup_devices", torch.device("cpu")):
        yield
