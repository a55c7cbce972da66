"""Backwards and steps as HF, accelerate and DeepSpeed want them; FSDP2's optimizer; TRL's reference model; TRL's logs.

In this order: the backward of one of several losses of an optimizer step; a step that is left out; the reference model,
its weights and adapters; TRL's metrics and its table of completions; an optimizer in FSDP2's checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as torchs

from grpo_lab.trainer.trl_bridge.names import replaced
from grpo_lab.trainer.trl_bridge.values import without_critic


def without_gradient_sync(accelerator: Any, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a backward that is not the last one of the optimizer step: gradients are added up on this
    rank, and ranks do not communicate. For DeepSpeed it is enough to set ``sync_gradients``, which accelerate passes on
    as the boundary of the accumulation."""
    stack = contextlib.ExitStack()
    state = accelerator.gradient_state
    stack.callback(state._set_sync_gradients, state.sync_gradients)
    state._set_sync_gradients(False)
    if accelerator.distributed_type != "DEEPSPEED":
        stack.enter_context(accelerator.no_sync(model=model))
    return stack


def backward(accelerator: Any, loss: Tensor) -> None:
    """Run the backward of one loss as HF's ``training_step`` does. The loss is scaled for accumulation already, so
    DeepSpeed is kept from dividing it by ``gradient_accumulation_steps`` once more."""
    deepspeed = accelerator.distributed_type == "DEEPSPEED"
    accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))


def put_aside(accelerator: Any) -> Tensor:
    """Return the loss of a micro-batch that is only collected for a later update: 0, with a backward that reaches no
    weight.

    Under DeepSpeed HF's backward of this loss is skipped. ZeRO-1 and 2 make their gradient buckets when a gradient
    arrives, and read them at the end of every backward, where they would be missing (0.19.8: ``IndexError`` in
    ``reduce_ipg_grads``). Also, offloaded gradients of the step before would be taken for this step's.
    """
    nothing = torch.zeros((), device=accelerator.device, requires_grad=True)
    if accelerator.distributed_type == "DEEPSPEED":
        _leave_out_next(accelerator, "backward", lambda: None)
    return nothing.clone()  # backward needs a grad_fn, which a leaf does not have


def _leave_out_next(owner: Any, method: str, instead: Callable[[], None]) -> None:
    """Make the next call of ``owner.method`` call ``instead()`` only; after it the method is as it was before."""
    before = vars(owner).get(method)  # usually None: the method is the class's

    def once(*_: Any, **__: Any) -> None:
        delattr(owner, method)
        if before is not None:
            setattr(owner, method, before)
        instead()

    setattr(owner, method, once)


def leave_out_step(optimizer: Any) -> None:
    """Make the next ``step()`` of ``optimizer`` (accelerate's wrapper) do nothing and count as skipped, so that HF does
    not advance the learning-rate schedule.

    Weights and moments are not touched; HF's ``zero_grad`` drops the gradients. If there is an fp16 scaler, it has
    unscaled the gradients, and is updated here as the step would do. Without a scaler the mark of a skipped step stays
    until ``step_was_taken`` removes it.
    """

    def nothing() -> None:
        if optimizer.scaler is not None:
            optimizer.scaler.update()
        optimizer._is_overflow = True

    _leave_out_next(optimizer, "step", nothing)


def step_was_taken(optimizer: Any) -> None:
    """Remove the mark of a skipped step that ``leave_out_step`` has set; with a scaler accelerate removes it itself."""
    if optimizer.scaler is None:
        optimizer._is_overflow = False


def forget_running_loss(trainer: Any) -> None:
    """Set HF's running sum of losses, which its next log reports, to 0."""
    trainer._tr_loss.zero_()


def overflow_of_scaler(accelerator: Any) -> bool:
    """Return whether a gradient that is not finite may come from fp16's loss scaling: there is a scaler, and its scale
    is above 1. The scaler skips such steps by itself, and halves its scale."""
    scaler = accelerator.scaler
    return scaler is not None and scaler.is_enabled() and scaler.get_scale() > 1.0


@contextlib.contextmanager
def reference_model_in_full() -> Iterator[None]:
    """Give TRL's reference model the weights of rank 0 on every rank before it is sharded, inside the block in which a
    trainer is built.

    With FSDP2 and ``fsdp_cpu_ram_efficient_loading`` transformers loads weights on one process of a machine and leaves
    zeros on the others. accelerate broadcasts the policy when it wraps it. TRL 1.16 wraps the reference itself and does
    not, so that with ``beta`` > 0 all but the first rank's share of it is zero, without any error.
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


def plain_cpu(args: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``args.device`` of a CPU rank is "cpu" in place of "cpu:0". With several processes
    transformers 5.17 loads an optimizer's tensors to that device, and torch 2.13 knows no "cpu:0" there."""
    if args.device.type != "cpu":
        return contextlib.nullcontext()
    return replaced(args, "_setup_devices", torch.device("cpu"))


#: TRL's names of two adapters: the reference, a copy of the adapter that the policy came with, and the policy's own.
REFERENCE_ADAPTER, POLICY_ADAPTER = "ref", "default"


def reference_tensors(policy: Any, reference: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return name → (the reference's tensor, the policy's tensor), for copying the policy into the reference.

    Without a ``reference`` model the pairs are the parameters of the policy's adapter and of TRL's copy of it; else all
    parameters and buffers of both models. Of sharded tensors it is this rank's part. Raises ValueError if there is
    neither model nor copy, or if the two models differ in shapes.
    """
    if reference is None:
        if REFERENCE_ADAPTER not in getattr(policy, "peft_config", {}):
            raise ValueError(
                "`reference_every` copies the policy into the reference, which under a new adapter (`peft_config`) is "
                "the base model, which cannot move: give the trainer a model that has its adapter already "
                "(`peft.get_peft_model`), of which TRL keeps a copy, or leave `reference_every` out"
            )
        values = dict(policy.named_parameters())
        own = f".{POLICY_ADAPTER}."
        copied = f".{REFERENCE_ADAPTER}."
        names = {name.replace(own, copied): name for name in values if own in name}
        return {copy: (values[copy], values[name]) for copy, name in names.items()}
    ours = [*reference.named_parameters(), *reference.named_buffers()]
    theirs = [*without_critic(policy.named_parameters()), *without_critic(policy.named_buffers())]
    if [value.shape for _, value in ours] != [value.shape for _, value in theirs]:
        raise ValueError(
            f"the policy has {len(theirs)} parameters and buffers and the reference {len(ours)}, or of other shapes: a "
            "copy of the one is not the other (`reference_every`, `sync_ref_model`)"
        )
    return {name: (value, source) for (name, value), (_, source) in zip(ours, theirs, strict=True)}


def load_policy_adapter(policy: Any, checkpoint: str) -> None:
    """Load the policy's adapter from a checkpoint that also holds TRL's reference adapter (folder ``ref``); do nothing
    for other checkpoints.

    transformers 5.17 (``Trainer._load_from_checkpoint``) loads either the adapters in sub-folders or the one beside
    them. From such a checkpoint it loads the reference alone, and the policy would start anew.
    """
    saved = Path(checkpoint)
    if REFERENCE_ADAPTER not in getattr(policy, "peft_config", {}) or not (saved / REFERENCE_ADAPTER).is_dir():
        return
    if any((saved / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        policy.load_adapter(checkpoint, POLICY_ADAPTER, is_trainable=True)
        policy.set_adapter(POLICY_ADAPTER)


def whole_by_names(accelerator: Any) -> str | None:
    """Return in words why a rank cannot read and write a model tensor by tensor, by their names; None if it can."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3, which keeps weights in partitions of its own"
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and not accelerator.is_fsdp2:
        return "FSDP 1, which keeps weights in flat pieces of its own"
    return None


#: TRL's own metrics of the sampler correction; a user's may begin with the same prefix.
SAMPLING_METRICS: tuple[str, ...] = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    *(f"sampling/importance_sampling_ratio/{what}" for what in ("min", "mean", "max")),
)


def forget_sampling_metrics(seen: dict[str, list[Any]]) -> None:
    """Drop the newest value of each of TRL's own ``sampling/*`` metrics in ``seen``, TRL's table of metrics. TRL
    computed it from the zeros that it was given in place of log-probs (``forwards_replaced``)."""
    for name in [name for name in SAMPLING_METRICS if name in seen]:
        seen[name].pop()
        if not seen[name]:
            del seen[name]


def logged_rows(logged: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """Return the last ``count`` rows of TRL's completions table ``logged`` by column, without columns that have fewer
    rows."""
    columns = {name: logged[name] for name in ("prompt", "completion", "advantages")}
    columns |= {f"{part}/{name}": rows for part in ("rewards", "extra") for name, rows in logged[part].items()}
    return {name: list(rows)[-count:] for name, rows in columns.items() if len(rows) >= count}


def replace_logged_rows(logged: dict[str, Any], columns: dict[str, list[Any]]) -> None:
    """Replace the last rows of TRL's completions table by ``columns`` (as ``logged_rows`` returns them)."""
    for name, rows in columns.items():
        part, _, column = name.partition("/")
        if column:
            held = logged[part][column]
        else:
            held = logged[part]
        for _ in range(min(len(held), len(rows))):
            held.pop()
        held.extend(rows)


def optimizer_saved_as_it_is(accelerator: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context for writing a checkpoint, in which torch makes up no optimizer moments under FSDP2.

    Some weights may have no moments, because they have made no step yet: the policy's during ``value.warmup_steps``,
    all if the guard skipped every step, an expert's without tokens. If the optimizer has no moments at all, torch 2.13
    makes them up when it saves, by a step with zero gradients, which AdamW's bias correction counts, also in the
    running training. And torch refuses to load a checkpoint in which some moments are missing. So our checkpoint names
    the weights without moments (``without_moments``); only they may lack them, and after the load they lack them again
    (``optimizer_loaded_as_it_was``).
    """
    if not accelerator.is_fsdp2:
        return contextlib.nullcontext()
    return replaced(torchs, "_init_optim_state", lambda optimizer: None)


def without_moments(accelerator: Any, model: torch.nn.Module, optimizer: Any) -> dict[str, Any] | None:
    """Return ``{"without_moments": names}``, the weights for which the optimizer holds no moments, as an entry for the
    checkpoint; None without FSDP2, or if all have moments. It is the same on every rank.

    A resumed run needs the names, since torch refuses a checkpoint that lacks moments (``optimizer_loaded_as_it_was``).
    """
    if not accelerator.is_fsdp2:
        return None
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, p in model.named_parameters() if id(p) in own and not optimizer.state.get(p)]
    if missing:
        return {"without_moments": missing}
    return None


@contextlib.contextmanager
def optimizer_loaded_as_it_was(
    accelerator: Any, model: torch.nn.Module, optimizer: Any, named: set[str]
) -> Iterator[None]:
    """Let a checkpoint's optimizer be loaded inside the block though the weights ``named`` have no moments in it. After
    the block they have none in ``optimizer``, either."""
    if not named or not accelerator.is_fsdp2:
        yield
        return
    split = torchs._split_optim_state_dict

    def lenient(whole: Any, theirs: Any, state: Any, info: Any) -> Any:
        lacking = {name for group in state["param_groups"] for name in group["params"]} - set(state["state"])
        return split(whole, theirs, state, dataclasses.replace(info, strict=not lacking <= named))

    with replaced(torchs, "_split_optim_state_dict", lenient):
        yield
    for name, parameter in model.named_parameters():
        if name in named:
            optimizer.state.pop(parameter, None)
