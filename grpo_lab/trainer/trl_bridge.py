"""Everything private of TRL (and of the Trainer below it) that this room relies on, in one place.

``tests/contract/test_trl_bridge.py`` pins each name, signature and behaviour listed here. When TRL moves, this file and
that test are what changes; nothing outside ``grpo_lab/trainer/`` imports ``trl``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

SUPPORTED_TRL = "1.16."

_found = version("trl")
if not _found.startswith(SUPPORTED_TRL):
    raise ImportError(
        f"grpo_lab was tested with trl {SUPPORTED_TRL}* and found trl {_found}: its trainer overrides private methods that "
        f"may have moved. Install a matching one: pip install 'trl=={SUPPORTED_TRL}*'"
    )

#: Methods of ``trl.GRPOTrainer`` that we override or call, with their parameters as of 1.16.
METHODS: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
        "pixel_values",
        "image_grid_thw",
        "num_images",
        "pixel_attention_mask",
        "spatial_shapes",
        "num_tiles",
        "image_sizes",
        "token_type_ids",
        "mm_token_type_ids",
        "image_position_ids",
    ),
    "_tokenize_prompts": ("self", "prompts"),
    "_generate_single_turn": (
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ),
    "_get_train_sampler": ("self", "dataset"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_save": ("self", "output_dir", "state_dict"),
    "_get_output_dir": ("self", "trial"),
    "log": ("self", "logs", "start_time"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
}

#: Attributes that exist on a constructed ``trl.GRPOTrainer``.
ATTRIBUTES: tuple[str, ...] = (
    "_metrics",
    "_name",
    "_paper",
    "_logs",
    "_step",
    "_buffered_inputs",
    "_current_train_step_time",
    "_pending_extra_logs",
    "_pending_metrics",
    "environments",
    "multi_objective_aggregation",
    "scale_rewards",
    "reward_func_names",
    "reward_funcs",
    "reward_weights",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "max_completion_length",
    "mask_truncated_completions",
    "aux_loss_enabled",
    "router_aux_loss_coef",
    "eos_token_ids",
    "_tokenizer",
    "_is_vlm",
    "tools",
    "environment_factories",
    "ref_model",
    "beta",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)

#: Per-row tensors ``[B, T]`` of TRL's micro-batch that follow the completion.
COMPLETION_FIELDS: tuple[str, ...] = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)

#: Keyword inputs of a multimodal forward, handed through to TRL untouched.
MULTIMODAL_FIELDS: tuple[str, ...] = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def is_multimodal(inputs: dict[str, Any]) -> bool:
    """Whether a micro-batch carries anything besides text."""
    return any(inputs.get(name) is not None for name in MULTIMODAL_FIELDS)


def may_bring_images(trainer: Any) -> bool:
    """Whether any batch of the run may carry images, the same on every rank and in every micro-batch.

    In a mixed data set one rank's (or one generation's) batch has images where another's is text only: whoever looks at
    a batch alone lets ranks part. Only prompts that are text by their type, without tools, are sure to bring none.
    """
    if not trainer._is_vlm:
        return False
    columns = getattr(trainer.train_dataset, "features", None) or {}
    prompt = columns.get("prompt")
    message = getattr(prompt, "feature", prompt)  # a conversation is a list of messages
    content = message.get("content") if isinstance(message, dict) else message
    is_text = getattr(content, "dtype", None) == "string"
    return bool(not is_text or {"image", "images"} & set(columns) or trainer.tools or trainer.environment_factories)


def completion_log_probs(
    trainer: Any,
    model: torch.nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    position_ids: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies (None where the head makes none: TRL's reference model) ``[B, L - 1]`` of ``labels`` (−100 = not scored, 0 there) by TRL's fused LM head.

    Position t scores token t + 1, at the trainer's sampling temperature. ``position_ids`` are explicit, because TRL feeds
    left-padded rows without any, so a row's rotary angles depend on its padding; handing in the positions that it would
    have had makes the same numbers from a differently padded row. Rows are padded on the right, where a causal model cannot
    look, so there is no attention mask and the kernels take their causal path.

    On a CPU TRL's head projects every position onto the vocabulary, prompts and padding too, and drops most of it (with Triton it
    picks them itself). There only scored positions leave the backbone, as one row of ``shift_labels``; not under
    ``torch.compile``, for which it is a setting of torch whether a changed hook is noticed.
    """
    if input_ids.device.type != "cpu" or is_compiled(trainer, model):
        with trainer.accelerator.autocast():
            output = model(input_ids=input_ids, position_ids=position_ids, labels=labels, fused_lm_head=True)
        return output.log_probs, output.entropy
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    scored = following != -100
    places = scored.flatten().nonzero().squeeze(1)
    chosen = following.flatten()[places].unsqueeze(0)
    with trainer.accelerator.autocast(), _states_at(backbone(trainer, model), places):
        output = model(input_ids=input_ids, position_ids=position_ids, shift_labels=chosen, fused_lm_head=True)

    def spread(values: Tensor) -> Tensor:
        flat: Tensor = values.new_zeros(scored.numel()).index_put((places,), values.squeeze(0))
        return flat.view_as(scored)[:, :-1]

    return spread(output.log_probs), None if output.entropy is None else spread(output.entropy)


def is_compiled(trainer: Any, model: torch.nn.Module) -> bool:
    """Whether ``model`` or the layers below its head run through ``torch.compile``."""
    inner = trainer.accelerator.unwrap_model(model)
    modules = (inner, backbone(trainer, model))
    return any(is_compiled_module(module) or module._compiled_call_impl is not None for module in modules)


def backbone(trainer: Any, model: torch.nn.Module) -> torch.nn.Module:
    """The layers below the LM head, which TRL's fused forward calls as ``base_model``, inside every wrapper."""
    inner: Any = trainer.accelerator.unwrap_model(model)
    if hasattr(inner, "get_base_model"):  # PEFT
        inner = inner.get_base_model()
    found: torch.nn.Module = inner.base_model
    return found


@contextlib.contextmanager
def _states_at(layers: torch.nn.Module, places: Tensor) -> Iterator[None]:
    """Inside the block ``layers`` returns its last hidden states ``[1, K, H]`` at K ``places`` of the flattened ``[B × L]``."""

    def pick(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1).index_select(0, places).unsqueeze(0)
        return output

    hook = layers.register_forward_hook(pick)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def replaced(obj: Any, name: str, value: Any) -> Iterator[None]:
    """``obj.name`` is ``value`` inside the block, as it was before afterwards (also after an error)."""
    had = name in vars(obj)
    before = getattr(obj, name)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if had:
            setattr(obj, name, before)
        else:
            delattr(obj, name)


@contextlib.contextmanager
def forwards_replaced(
    trainer: Any, forward: Callable[[Any, Tensor, Tensor, int], Tensor], without_policy: bool = False
) -> Iterator[list[str]]:
    """Inside the block ``forward(model, input_ids, attention_mask, T)`` answers TRL's no-grad forwards at generation.

    Args:
        without_policy: the forward of the *policy* (old log-probs) is not run, TRL gets zeros: it asks before it knows the
            rewards, over all rows. The caller drops what TRL made of the zeros and computes real values where needed.

    Forwards of the reference model are always answered: with PEFT they run through the same model object, under an adapter context,
    which is how they are told apart: TRL asks for the policy once, and before the reference. Multimodal forwards stay TRL's.

    Yields a list that holds ``"policy"`` once its forward was left out.
    """
    original = trainer._get_per_token_logps_and_entropies
    left_out: list[str] = []

    @functools.wraps(original)
    def answered(
        model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs.get("compute_entropy") or kwargs.get("compute_aux_loss") or is_multimodal(kwargs):
            return original(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        if without_policy and model is trainer.model and not left_out:
            left_out.append("policy")
            return torch.zeros(input_ids.size(0), logits_to_keep, device=input_ids.device), None, None
        return forward(model, input_ids, attention_mask, logits_to_keep), None, None

    with replaced(trainer, "_get_per_token_logps_and_entropies", answered):
        yield left_out


@contextlib.contextmanager
def positions_given(trainer: Any, model: torch.nn.Module, position_ids: Tensor | None) -> Iterator[None]:
    """Inside the block TRL's forward of ``model``, which hands over no positions, gets ``position_ids`` ``[B, L]`` (None: as is)."""
    if position_ids is None:
        yield
        return

    def give(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "position_ids": position_ids}

    hook = trainer.accelerator.unwrap_model(model).register_forward_pre_hook(give, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def without_autocast(trainer: Any) -> Iterator[None]:
    """Inside the block the policy's forward is the one that accelerate wrapped for mixed precision (or was not: no change)."""
    inner = trainer.accelerator.unwrap_model(trainer.model)
    plain = getattr(inner, "_original_forward", None) if trainer.accelerator.mixed_precision != "no" else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(trainer.accelerator, "autocast", contextlib.nullcontext))
        if plain is not None:
            stack.enter_context(replaced(inner, "forward", plain))
        yield


def without_checkpointing(trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """Context for forwards without gradient: no gradient checkpointing (TRL's own context around such forwards)."""
    manager: contextlib.AbstractContextManager[Any] = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    return manager


def wants_old_log_probs(trainer: Any) -> tuple[bool, bool]:
    """``(misaligned, corrected)``: why TRL would run the policy once more at generation.

    ``misaligned``: completions outlive an optimizer step, so log-probs at generation differ from those in training.
    ``corrected``: the sampler correction wants them.
    """
    generate_every = trainer.args.steps_per_generation * trainer.num_iterations
    misaligned = trainer.args.gradient_accumulation_steps % generate_every != 0
    return misaligned, bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


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


#: TRL's own metrics of the sampler correction; a team's may stand under the same prefix.
SAMPLING_METRICS: tuple[str, ...] = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)


def forget_sampling_metrics(trainer: Any, mode: str) -> None:
    """Drop what TRL has just appended to its own ``sampling/*`` metrics (values computed from deferred zeros)."""
    seen = trainer._metrics[mode]
    for name in SAMPLING_METRICS:
        if name in seen:
            seen[name].pop()
            if not seen[name]:
                del seen[name]


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


def replace_logged_advantages(trainer: Any, advantages: Tensor) -> None:
    """Put the advantages in force where TRL keeps those of its own for the completions table."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(logged), advantages.size(0))):
        logged.pop()
    logged.extend(advantages.tolist())
