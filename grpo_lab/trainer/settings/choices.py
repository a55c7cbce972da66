"""Settings of TRL and transformers that take one of a few names, or a number of a range: what else is refused.

Neither of the two looks at them before they are used: at the first step, or never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels

from grpo_lab.nearest import one_of


def _values(kind: type[Enum]) -> list[str]:
    return [str(member.value) for member in kind]


CHOICES: dict[str, Sequence[str]] = {
    "lr_scheduler_type": _values(SchedulerType),
    "optim": _values(OptimizerNames),
    "save_strategy": _values(SaveStrategy),
    "logging_strategy": _values(IntervalStrategy),
    "eval_strategy": _values(IntervalStrategy),
    "hub_strategy": _values(HubStrategy),
    "log_level": list(trainer_log_levels),
    "log_level_replica": list(trainer_log_levels),
    "vllm_mode": ("server", "colocate"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_importance_sampling_mode": ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
}
SEEDS = 2**32
"""numpy's, which transformers seeds beside torch: 0 … 2³² − 1."""


class Range(NamedTuple):
    """What a number must be, in words and as a question."""

    words: str
    holds: Callable[[Any], bool]


_FINITE = Range("a finite number of at least 0", lambda value: 0 <= value < math.inf)
_ABOVE_0 = Range("a finite number above 0", lambda value: 0 < value < math.inf)
_BELOW_1 = Range("a number of at least 0 and below 1", lambda value: 0 <= value < 1)
_SHARE = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)
_PART = Range("a number above 0 and at most 1", lambda value: 0 < value <= 1)
_COUNT = Range("a whole number of at least 1", lambda value: value >= 1)

RANGES: dict[str, Range] = {
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "adam_epsilon", "warmup_steps", "dataloader_num_workers"), _FINITE
    ),
    **dict.fromkeys(("temperature", "repetition_penalty", "logging_steps", "save_steps"), _ABOVE_0),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _BELOW_1),
    **dict.fromkeys(("min_p", "ref_model_mixup_alpha", "top_entropy_quantile"), _SHARE),
    **dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), _PART),
    **dict.fromkeys(
        (
            *("max_completion_length", "max_length", "num_iterations", "ref_model_sync_steps", "save_total_limit"),
            *("steps_per_generation", "generation_batch_size", "num_generations_eval", "gradient_accumulation_steps"),
            *("per_device_train_batch_size", "per_device_eval_batch_size"),
            *("vllm_tensor_parallel_size", "vllm_max_model_length"),
        ),
        _COUNT,
    ),
    "seed": Range(f"a whole number from 0 to {SEEDS - 1}", lambda value: 0 <= value < SEEDS),
    "eval_steps": _FINITE,  # 0: as `logging_steps`
    "max_steps": Range("at least 1, or -1 where `num_train_epochs` says it", lambda value: value >= 1 or value == -1),
}
BY_STRATEGY = {"logging_steps": "logging_strategy", "save_steps": "save_strategy", "eval_steps": "eval_strategy"}
"""Read only where the strategy is `steps`."""


def check_choices(values: Mapping[str, Any], where: str = "") -> None:
    """``ValueError`` for a name that its setting does not know, or a number out of its setting's range.

    Args:
        where: the section, for messages (``"cold_start"``; empty for a flat setting).
    """
    prefix = f"{where}." if where else ""
    for name, known in CHOICES.items():
        value = values.get(name)
        if isinstance(value, str) and not isinstance(value, Enum) and value not in known:
            raise ValueError(f"`{prefix}{name}` is {value!r}{one_of(value, known)}")
    for name, allowed in _ranges(values).items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not allowed.holds(value):
            more = ", or `save_strategy: no` for no checkpoints" if name == "save_steps" else ""
            raise ValueError(f"`{prefix}{name}` is {value}; it must be {allowed.words}{more}")


def _ranges(values: Mapping[str, Any]) -> dict[str, Range]:
    """Those that are read beside the other settings."""
    ranges = {name: one for name, one in RANGES.items() if _by_steps(values, name)}
    if not (values.get("max_steps") or -1) > 0:
        ranges["num_train_epochs"] = _ABOVE_0
    off = -1 if values.get("use_vllm") else 0  # vLLM's word for it
    ranges["top_k"] = Range("a whole number of at least 1, or 0 for all tokens", lambda value: value >= off)
    return ranges


def _by_steps(values: Mapping[str, Any], name: str) -> bool:
    strategy = values.get(BY_STRATEGY.get(name, ""), "steps")
    return str(getattr(strategy, "value", strategy)) == "steps"


__all__ = ["check_choices"]
