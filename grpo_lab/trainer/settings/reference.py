"""``reference_every``: what it may be, and where it would do nothing; what of ``kl`` depends on batch sizes."""

from __future__ import annotations

from typing import Any

from grpo_lab.objectives import KLTerm

GENERATION = "generation"


def reference_every(written: Any) -> int | str | None:
    """A number of optimizer steps, ``"generation"`` or ``None``; digits are a number (command lines).

    Raises:
        ValueError: anything else.
    """
    value = int(written) if isinstance(written, str) and written.strip().isdigit() else written
    if value is None or value == GENERATION or (type(value) is int and value >= 1):
        return value
    raise ValueError(
        f"`reference_every` is {written!r}; it must be a number of optimizer steps (at least 1), or {GENERATION!r}: before every "
        "generation batch"
    )


def check_kl(args: Any, kl: KLTerm | None) -> None:
    """Refuse a moving reference that there is none of, that two settings move, or whose KL would always be 0; and a horizon too short.

    Args:
        kl: the KL term of an objective of ours, where there is one.

    Raises:
        ValueError: names both settings.
    """
    if kl is not None and kl.control is not None:
        kl.control.rate_of(args.generation_batch_size)
    every = args.reference_every
    if every is None:
        return
    if args.beta == 0.0:
        raise ValueError(
            f"`reference_every` is {every!r}, but nothing reads a reference (`beta` is 0 and `kl` is not set): set one of them, or leave "
            "it out"
        )
    if args.sync_ref_model:
        raise ValueError(
            f"`reference_every`={every!r} and `sync_ref_model` both move the reference (TRL's with `ref_model_mixup_alpha`="
            f"{args.ref_model_mixup_alpha}): leave one out"
        )
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if not _is_fresh(every, updates):
        return
    if kl is not None and kl.placement == "reward":
        raise ValueError(
            f"`reference_every`={every!r} makes the reference the policy that generates ({updates:g} updates a generation batch), so a KL in "
            "the reward is always 0: raise `reference_every`, or put the KL in the loss (`kl.placement: loss`)"
        )
    if updates <= 1:
        raise ValueError(
            f"`reference_every`={every!r} has no effect but to switch the KL off: a generation batch gets {updates:g} updates, and the "
            "reference is the policy itself; raise it, or raise `steps_per_generation` or `num_iterations`"
        )


def _is_fresh(every: int | str, updates: float) -> bool:
    """Whether the reference is the policy whenever a batch is generated."""
    if every == GENERATION or not isinstance(every, int):
        return True
    return every == 1 if updates < 1 else updates % every == 0


__all__ = ["GENERATION", "check_kl", "reference_every"]
