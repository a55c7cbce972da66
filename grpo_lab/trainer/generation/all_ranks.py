"""Answers of a server to the main process, on every rank: its value, or its error, raised at the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import RequestRefused, ServerGone, TokenRefused
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong

FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ServerGone, EngineFault, WeightSyncError, PromptTooLong, RequestRefused, TokenRefused, ValueError)
}


def from_main(accelerator: Any, value: Any) -> Any:
    box = [value]
    if accelerator.num_processes > 1:
        broadcast_object_list(box, from_process=0)
    return box[0]


def raise_together(accelerator: Any, failure: Exception | None) -> None:
    """Raise ``failure`` of the main process on every rank, marked as one of all; nothing where it is None. Another
    rank's own is raised there alone, and not marked. Every rank must call this."""
    own = None
    if failure is not None:
        own = (type(failure).__name__, str(failure))
    of_main = from_main(accelerator, own)
    if of_main is None:
        if failure is not None:
            raise failure
        return
    kind, message = of_main
    fault = failure or FAULTS.get(kind, RuntimeError)(message)
    vars(fault)["of_all_ranks"] = True
    raise fault


def of_all_ranks(fault: BaseException | None) -> bool:
    """Return whether ``raise_together`` raised it, or what it comes ``from``, so that what takes all ranks may
    follow."""
    return fault is not None and (getattr(fault, "of_all_ranks", False) or of_all_ranks(fault.__cause__))


def on_main(accelerator: Any, call: Callable[[], Any]) -> Any:
    """The result of ``call``, made on the main process, on every rank; its error likewise."""
    value = None
    failure = None
    if accelerator.is_main_process:
        try:
            value = call()
        except Exception as caught:
            failure = caught
    raise_together(accelerator, failure)
    return from_main(accelerator, value)
