"""Allowed names, ranges and batch sizes for settings of TRL and transformers. The libraries check these only when they
use them: at the first step, or never.

``check_choices`` reads ``CHOICES`` and ``RANGES``, ``check_loss`` reads ``OF_THE_LOSS``, ``check_batch_sizes`` checks
that generation batches hold whole groups. All raise ValueError.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Any

from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, trainer_log_levels

from grpo_lab.settings import one_of


def _values(kind: type[Enum]) -> list[str]:
    return [str(member.value) for member in kind]


#: Prefix of the name of a loss or correction of ours that is written into TRL's field for it. TRL refuses to compute a
#: loss of such a name.
NOT_TRLS = "grpo_lab:"

#: Setting → the names that it may have.
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


#: What a number must be: in words, and as a function that returns whether a number is so.
Range = tuple[str, Callable[[Any], bool]]
_FINITE: Range = "a finite number of at least 0", lambda value: 0 <= value < math.inf
_ABOVE_0: Range = "a finite number above 0", lambda value: 0 < value < math.inf
_BELOW_1: Range = "a number of at least 0 and below 1", lambda value: 0 <= value < 1
_SHARE: Range = "a number from 0 to 1", lambda value: 0 <= value <= 1
_PART: Range = "a number above 0 and at most 1", lambda value: 0 < value <= 1
_COUNT: Range = "a whole number of at least 1", lambda value: value >= 1
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
            "max_completion_length",
            "max_length",
            "num_iterations",
            "ref_model_sync_steps",
            "save_total_limit",
            "steps_per_generation",
            "generation_batch_size",
            "num_generations_eval",
            "gradient_accumulation_steps",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "vllm_tensor_parallel_size",
            "vllm_max_model_length",
        ),
        _COUNT,
    ),
    "seed": (f"a whole number from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32),  # as numpy, beside torch
    "eval_steps": _FINITE,  # 0: as `logging_steps`
    "max_steps": ("at least 1, or -1 where `num_train_epochs` says it", lambda value: value >= 1 or value == -1),
}
#: Settings of TRL's loss and of sampling, each with the kind of value that it must have, in words.
OF_THE_LOSS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("beta", "epsilon", "entropy_coef", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
            *("entropy_target", "top_entropy_quantile", "sapo_temperature_neg", "sapo_temperature_pos"),
            *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "temperature"),
        ),
        "a number",
    ),
    **dict.fromkeys(
        (
            *("epsilon_high", "delta", "off_policy_mask_threshold"),
            *("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max", "top_p", "min_p"),
        ),
        "a number, or left out",
    ),
    "top_k": "a whole number, or left out",
    **dict.fromkeys(
        ("cast_lm_head_to_fp32", "use_adaptive_entropy", "use_bias_correction_kl", "mask_truncated_completions"),
        "true or false",
    ),
    **dict.fromkeys(
        ("loss_type", "importance_sampling_level", "vllm_importance_sampling_mode", "multi_objective_aggregation"),
        "a name",
    ),
}
#: Setting that is read only if another one, its strategy, is `steps` → that strategy.
BY_STRATEGY = {"logging_steps": "logging_strategy", "save_steps": "save_strategy", "eval_steps": "eval_strategy"}

#: Hint for an unknown setting, which an earlier release may have had.
EARLIER = "settings of earlier releases that were renamed or removed: release notes of trl and transformers"


def check_loss(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of TRL's loss or of sampling is of another kind than ``OF_THE_LOSS`` says (null,
    text, NaN), or if the entropy coefficient's bounds are the wrong way round. ``values``: all settings by name."""
    for name, words in OF_THE_LOSS.items():
        value = values[name]
        if words == "true or false":
            fits = isinstance(value, bool)
        elif words == "a name":
            fits = isinstance(value, str)
        else:
            is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
            if words.startswith("a whole number"):
                is_number = is_number and isinstance(value, Integral)
            fits = is_number or (value is None and words != "a number")
        if not fits:
            raise ValueError(f"`{name}` is {value!r}; it must be {words}")
    low = values["entropy_coef_min"]
    high = values["entropy_coef_max"]
    if low > high:
        raise ValueError(f"`entropy_coef_min` is {low} and `entropy_coef_max` is {high}: the first must not be above")


MOST_KEPT = 64
"""Largest ``top_k`` with which log-probs are computed among the kept tokens."""


def kept_by_engine(args: Any) -> int:
    """Return ``top_k`` if the trainer computes log-probs among the tokens that the engine kept, as the engine does;
    else 0, if it computes them over the whole vocabulary.

    It computes them so if ``top_k`` is at most ``MOST_KEPT``, the sampler correction compares them with the engine's,
    and the loss is ours. ``args``: the configuration; None for an engine without a trainer.
    """
    if args is None:  # an engine without a trainer
        return 0
    top_k = args.top_k or 0
    corrects = args.use_vllm and args.vllm_importance_sampling_correction
    if not corrects or getattr(args, "objective", None) is None or not 0 < top_k <= MOST_KEPT:
        return 0
    return int(top_k)


def check_choices(values: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError if one of ``values``, settings by name, has an unknown name (``CHOICES``) or a number out of
    range (``RANGES``). A setting that is missing or not read is not checked. ``where``: the section, for the
    message."""
    prefix = f"{where}." if where else ""
    for name, known in CHOICES.items():
        value = values.get(name)
        if isinstance(value, str) and not isinstance(value, Enum) and value not in known and not _ours(name, value):
            raise ValueError(f"`{prefix}{name}` is {value!r}{one_of(value, known)}")
    ranges = {name: one for name, one in RANGES.items() if _is_read(name, values)}
    if not (values.get("max_steps") or -1) > 0:
        ranges["num_train_epochs"] = _ABOVE_0
    off = -1 if values.get("use_vllm") else 0  # vLLM's value for off
    ranges["top_k"] = ("a whole number of at least 1, or 0 for all tokens", lambda value: value >= off)
    for name, (words, holds) in ranges.items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not holds(value):
            more = ""
            if name == "save_steps":
                more = ", or `save_strategy: no` for no checkpoints"
            raise ValueError(f"`{prefix}{name}` is {value}; it must be {words}{more}")


def _is_read(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a setting is read with the strategy that its values have (``BY_STRATEGY``)."""
    if name not in BY_STRATEGY:
        return True
    return _text(values.get(BY_STRATEGY[name], "steps")) == "steps"


def _ours(name: str, value: str) -> bool:
    """Return whether ``value`` is what a ``correction`` of ours wrote into TRL's field."""
    return name == "vllm_importance_sampling_mode" and value.startswith(NOT_TRLS)


def _text(strategy: Any) -> str:
    """Return a strategy, an enum's member or text, as text."""
    return str(getattr(strategy, "value", strategy))


def check_batch_sizes(args: Any) -> None:
    """Raise ValueError if the batch sizes in ``args`` give no generation batch of whole groups; the message names the
    nearest sizes that would.

    generation batch = per_device_train_batch_size × processes × steps_per_generation completions; it must be a multiple
    of ``num_generations``. The number of processes is the launcher's (``WORLD_SIZE``). If ``generation_batch_size`` and
    ``steps_per_generation`` are both set and agree, the former is set to None, since TRL refuses both.
    """
    group = args.num_generations
    size = args.per_device_train_batch_size
    if group < 2:
        raise ValueError(f"`num_generations` is {group}; a group needs at least 2 completions to be compared")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"`{name}` is {getattr(args, name)}; it must be ≥ 1")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    batch = args.generation_batch_size
    steps = args.steps_per_generation
    if batch is not None and steps is not None:
        if batch != size * world * steps:
            raise ValueError(
                f"`generation_batch_size`={batch} and `steps_per_generation`={steps} are both set; one follows from "
                "the other: leave one out (`dataclasses.replace`: set it to None)"
            )
        args.generation_batch_size = batch = None  # TRL derives it again, and refuses both also where they agree
    if batch is None:
        if steps is None:
            setting = "gradient_accumulation_steps"
        else:
            setting = "steps_per_generation"
        steps = getattr(args, setting)
        made = size * world * steps
        if made % group:
            groups = [str(divisor) for divisor in range(2, made + 1) if made % divisor == 0]
            raise ValueError(
                f"`per_device_train_batch_size` × processes × `{setting}` = {size} × {world} × {steps} = {made} "
                f"completions per generation, which is not divisible by `num_generations` = {group}. What would do: "
                f"`{setting}` {_nearest(steps, group // math.gcd(group, size * world))}, or "
                f"`per_device_train_batch_size` {_nearest(size, group // math.gcd(group, steps * world))}"
                + (f", or `num_generations` {', '.join(groups[-8:])}" if groups else "")
            )
    elif batch % (size * world) or batch % group:
        raise ValueError(
            f"`generation_batch_size` is {batch}; it must be divisible by `per_device_train_batch_size` × processes = "
            f"{size} × {world} = {size * world} and by `num_generations` = {group}. `generation_batch_size` "
            f"{_nearest(batch, math.lcm(size * world, group))} would do"
        )
    if _text(args.eval_strategy) != "no":
        _check_eval(args, world)


def _check_eval(args: Any, world: int) -> None:
    """Raise ValueError if an evaluation batch over ``world`` processes does not hold whole groups."""
    if args.num_generations_eval is None:
        setting = "num_generations"
    else:
        setting = "num_generations_eval"
    group = getattr(args, setting)
    size = args.per_device_eval_batch_size
    if group < 1:
        raise ValueError(f"`{setting}` is {group}; it must be ≥ 1")
    if size * world % group:
        fitting = ", ".join(str(divisor) for divisor in range(1, size * world + 1) if size * world % divisor == 0)
        raise ValueError(
            f"`per_device_eval_batch_size` × processes = {size} × {world} = {size * world} is not divisible by "
            f"`{setting}` = {group}. What would do: `per_device_eval_batch_size` "
            f"{_nearest(size, group // math.gcd(group, world))}, or `num_generations_eval` {fitting}"
        )


def _nearest(value: int, unit: int) -> str:
    """Return the multiples of ``unit`` around ``value``, as text."""
    below = value // unit * unit
    if below:
        return f"{below} or {below + unit}"
    return str(unit)
