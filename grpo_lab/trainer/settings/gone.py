"""Settings that TRL's and transformers' configurations once had, and what to do now.

``GRPOConfig`` of TRL 0.14 to 1.15 on transformers 4.46 to 5.8, beside TRL 1.16 on transformers 5.17.
"""

from __future__ import annotations

_RENAMED = {
    "use_liger_loss": "use_liger_kernel",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "evaluation_strategy": "eval_strategy",
    "include_inputs_for_metrics": "include_for_metrics",
    "include_tokens_per_second": "include_num_input_tokens_seen",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "torchdynamo": "torch_compile_backend",
}
_WITHOUT = (
    "half_precision_backend fp16_backend fp16_opt_level jit_mode_eval use_ipex use_mps_device past_index mp_parameters "
)
_WITHOUT += "ray_scope tpu_num_cores tpu_metrics_debug use_legacy_prediction_loop save_safetensors"

GONE: dict[str, str] = {
    **{old: f"it is `{new}` now" for old, new in _RENAMED.items()},
    **dict.fromkeys(_WITHOUT.split(), "leave it out; nothing takes its place"),
    "max_prompt_length": "TRL cuts no prompts; leave rows with longer ones out of the data",
    "vllm_device": "`vllm_mode: colocate` has the engine on the trainer's GPU, `vllm_mode: server` where its server is",
    "vllm_dtype": "it is `rollout: {engine: {dtype: …}}` here, and `grpo-lab serve --dtype` with a server",
    "vllm_enable_prefix_caching": "it is `rollout: {engine: {prefix_caching: …}}` here",
    "vllm_sampling_params": "set `temperature`, `top_p`, `top_k`, `min_p`; others go into `generation_kwargs`",
    "adafactor": "it is `optim: adafactor` now",
    "dispatch_batches": "it is `accelerator_config: {dispatch_batches: …}` now",
    "split_batches": "it is `accelerator_config: {split_batches: …}` now",
    "fsdp_min_num_params": "it is `fsdp_config: {min_num_params: …}` now",
    "fsdp_transformer_layer_cls_to_wrap": "it is `fsdp_config: {transformer_layer_cls_to_wrap: […]}` now",
    "group_by_length": "it is `train_sampling_strategy: group_by_length` now",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR in the environment",
    "overwrite_output_dir": "give `--overwrite` to grpo-lab; a script's trainer writes into the folder as it is",
    "push_to_hub_organization": "it is `hub_model_id: organization/name` now",
    "tp_size": "it is `parallelism_config` now",
    "warmup_ratio": "`warmup_steps` takes a share of all steps, too: a number below 1",
}
SUPERVISED_GONE: dict[str, str] = {
    **GONE,
    **dict.fromkeys(("max_seq_length", "num_of_sequences"), "it is `max_length` now"),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"), "`max_length` is of prompt and completion together"
    ),
    **dict.fromkeys(("chars_per_token", "dataset_batch_size"), "leave it out; nothing takes its place"),
    "use_liger": "it is `use_liger_kernel` now",
}
"""Of ``SFTConfig`` and ``DPOConfig``, besides."""

__all__ = ["GONE", "SUPERVISED_GONE"]
