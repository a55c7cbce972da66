"""Batch sizes that do not divide meet an error here that names the numbers which would."""

from __future__ import annotations

import math
import os
from typing import Any


def check_batch_sizes(args: Any) -> None:
    """Check what TRL will derive its generation batch from, before it does.

    generation batch = per_device_train_batch_size × processes × steps_per_generation completions; it must hold whole
    groups of ``num_generations``. The number of processes is the launcher's (``WORLD_SIZE``).

    Raises:
        ValueError: with the sizes seen, and for each setting the nearest values that would divide.
    """
    group = args.num_generations
    if group < 2:
        raise ValueError(f"`num_generations` is {group}; a group needs at least 2 completions to be compared")
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"`{name}` is {getattr(args, name)}; it must be ≥ 1")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.steps_per_generation is not None and args.generation_batch_size == (
        args.per_device_train_batch_size * world * args.steps_per_generation
    ):
        args.generation_batch_size = (
            None  # TRL derives it again, and refuses both also where they agree (``dataclasses.replace``)
        )
    if args.generation_batch_size is not None:
        _check_given(args.generation_batch_size, args.per_device_train_batch_size * world, group, args, world)
    else:
        _check_derived(args, world, group)
    _check_eval(args, world)


def _check_given(batch: int, micro: int, group: int, args: Any, world: int) -> None:
    if args.steps_per_generation is not None:
        raise ValueError(
            f"`generation_batch_size`={batch} and `steps_per_generation`={args.steps_per_generation} are both set; one "
            "follows from the other: leave one out (`dataclasses.replace`: set it to None)"
        )
    if batch % micro or batch % group:
        unit = math.lcm(micro, group)
        raise ValueError(
            f"`generation_batch_size` is {batch}; it must be divisible by `per_device_train_batch_size` × processes = "
            f"{args.per_device_train_batch_size} × {world} = {micro} and by `num_generations` = {group}. "
            f"`generation_batch_size` {_nearest(batch, unit)} would do"
        )


def _check_derived(args: Any, world: int, group: int) -> None:
    own = args.steps_per_generation is not None
    steps_name = "steps_per_generation" if own else "gradient_accumulation_steps"
    size, steps = args.per_device_train_batch_size, getattr(args, steps_name)
    batch = size * world * steps
    if batch % group == 0:
        return
    groups = [str(divisor) for divisor in range(2, batch + 1) if batch % divisor == 0]
    raise ValueError(
        f"`per_device_train_batch_size` × processes × `{steps_name}` = {size} × {world} × {steps} = {batch} completions per "
        f"generation, which is not divisible by `num_generations` = {group}. What would do: "
        f"`{steps_name}` {_nearest(steps, group // math.gcd(group, size * world))}, or "
        f"`per_device_train_batch_size` {_nearest(size, group // math.gcd(group, steps * world))}"
        + (f", or `num_generations` {', '.join(groups[-8:])}" if groups else "")
    )


def _check_eval(args: Any, world: int) -> None:
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
        return
    setting = "num_generations" if args.num_generations_eval is None else "num_generations_eval"
    group = getattr(args, setting)
    if group < 1:
        raise ValueError(f"`{setting}` is {group}; it must be ≥ 1")
    size = args.per_device_eval_batch_size
    if size * world % group:
        raise ValueError(
            f"`per_device_eval_batch_size` × processes = {size} × {world} = {size * world} is not divisible by `{setting}` = "
            f"{group}. What would do: `per_device_eval_batch_size` {_nearest(size, group // math.gcd(group, world))}, or "
            f"`num_generations_eval` {', '.join(str(d) for d in range(1, size * world + 1) if size * world % d == 0)}"
        )


def _nearest(value: int, unit: int) -> str:
    """The multiples of ``unit`` around ``value``."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
