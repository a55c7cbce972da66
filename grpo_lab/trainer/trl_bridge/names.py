"""Names of TRL that this package overrides, calls or reads, as of the release that it was tested with.

A name stands for something else inside a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

#: Methods of ``trl.GRPOTrainer`` that we override or call, with their parameters as of 1.16.
METHODS: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
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
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_issue_warnings_after_load": ("self", "load_result"),
    "_load_best_model": ("self",),
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_load_rng_state": ("self", "checkpoint"),
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
    "_evaluate": ("self", "trial", "ignore_keys_for_eval", "skip_scheduler"),
    "_determine_best_metric": ("self", "metrics", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "create_optimizer": ("self", "model"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
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

#: Attributes that transformers' loop (the first three), TRL with vLLM, and TRL's SFT set while a training runs.
WHILE_TRAINING: tuple[str, ...] = (
    "_tr_loss",
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "_last_loaded_step",
    "_total_train_tokens",
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
