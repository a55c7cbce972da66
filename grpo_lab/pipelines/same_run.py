"""Comparison of a recipe with an earlier run's: the same settings, but for those that cannot change its past."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lab.reading import read_text
from grpo_lab.recipe.yaml import parsed
from grpo_lab.runs.differences import Difference, refuse_other_settings

ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
"""Settings that say where a rollout server is."""
LENGTH = ("max_steps", "num_train_epochs")
"""Settings that say how far the run goes."""

CANNOT_CHANGE_THE_PAST = frozenset(
    (
        *ADDRESS, *LENGTH, "name", "output_dir", "logging_steps", "logging_strategy", "logging_first_step",
        "log_completions", "num_completions_to_print", "log_unique_prompts", "log_level", "log_level_replica",
        "log_on_each_node", "report_to", "run_name", "project", "trackio_space_id", "disable_tqdm", "save_strategy",
        "save_steps", "save_total_limit", "enable_jit_checkpoint", "save_on_each_node", "save_checksums", "max_hours",
        "stop_file", "profile", "token_weights_every", "load_best_model_at_end", "metric_for_best_model",
        "greater_is_better", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo",
        "hub_always_push", "hub_revision", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start",
        "per_device_eval_batch_size", "num_generations_eval", "ddp_timeout", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
        "torch_empty_cache_steps", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
    )
)  # fmt: skip
"""Settings that cannot change what a run has done so far: how far it goes, what is written, saved and measured on the
way, where its server is, how memory is used."""


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return a short hash of a recipe's settings, plain values, without the address of its rollout server. Two recipes
    with equal hashes describe the same run."""
    arguments = {name: value for name, value in settings["arguments"].items() if name not in ADDRESS}
    text = json.dumps({**settings, "arguments": arguments}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def changed_since(folder: Path, record: Mapping[str, Any], settings: Mapping[str, Any], now: str) -> list[Difference]:
    """Return how ``settings`` differ from those of the run in ``folder``, which its ``recipe.yaml`` has.

    If that file cannot be read, the fingerprint in the run's ``record`` must be equal to ``now``, the fingerprint of
    ``settings``. Raises ValueError if the folder holds another run: a setting differs that ``may_differ`` refuses.
    """
    try:
        then = parsed(read_text(folder / "recipe.yaml"), "recipe.yaml")
    except (OSError, ValueError):
        then = None
    if isinstance(then, dict):
        return refuse_other_settings(folder, then, settings, may_differ)
    if record.get("fingerprint") != now:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds another run ({record.get('name')!r}, whose recipe.yaml cannot be "
            "read); choose another `--output_dir`, or give --overwrite"
        )
    return []


def may_differ(found: Difference) -> bool:
    """Return whether a setting may differ when a run is resumed: it cannot change what the run has done so far, or it
    only says what is measured beside the training."""
    beside = found.of("evaluation", "eval_dataset", "model.expected")
    return beside or found.name.partition(".")[0] in CANNOT_CHANGE_THE_PAST
