"""``ddp_timeout`` on CPU ranks, too: transformers 5.17 hands it to torch where there is an accelerator and nowhere else."""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d


def hold_time_limit(args: Any) -> None:
    """Let ``args.ddp_timeout`` be the limit of gloo's collectives; accelerators' have it from transformers.

    Raises:
        ValueError: a limit that is no positive number of seconds.
    """
    if not isinstance(args.ddp_timeout, (int, float)) or args.ddp_timeout <= 0:
        raise ValueError(
            f"`ddp_timeout` is {args.ddp_timeout!r}; it must be a positive number of seconds (how long ranks wait for each other)"
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta)


__all__ = ["hold_time_limit"]
