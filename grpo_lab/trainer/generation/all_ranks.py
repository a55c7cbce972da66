"""Share a server's answer to the main process with every rank: its value, or its error, raised at the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import RequestRefused, ServerGone, TokenRefused
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong

#: Name → class of the errors that keep their class when they are raised on other ranks; others become RuntimeErrors.
FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ServerGone, EngineFault, WeightSyncError, PromptTooLong, RequestRefused, TokenRefused, ValueError)
}


def from_main(accelerator: Any, value: Any) -> Any:
    """Return the main process's ``value`` on every rank. A collective."""
    box = [value]
    if accelerator.num_processes > 1:
        broadcast_object_list(box, from_process=0)
    return box[0]


def raise_together(accelerator: Any, failure: Exception | None) -> None:
    """Raise the main process's ``failure`` on every rank, marked as common to all; do nothing if it is None. A failure
    of another rank is raised on that rank alone, without the mark. Every rank must call this."""
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


def raise_of_any(accelerator: Any, failure: Exception | None) -> None:
    """Raise the first rank's ``failure`` on every rank, marked as common to all; do nothing if no rank has one. Every
    rank must call this."""
    own = None
    if failure is not None:
        own = (accelerator.process_index, type(failure).__name__, str(failure))
    found = [one for one in gather_object([own]) if one is not None]
    if not found:
        return
    rank, kind, message = found[0]
    if failure is None or rank != accelerator.process_index:
        failure = FAULTS.get(kind, RuntimeError)(message)
    vars(failure)["of_all_ranks"] = True
    raise failure


def of_all_ranks(fault: BaseException | None) -> bool:
    """Return whether ``fault``, or an error that caused it, was raised on every rank (by ``raise_together`` or
    ``raise_of_any``). Only then can the ranks still do work that takes all of them, such as writing a checkpoint."""
    return fault is not None and (getattr(fault, "of_all_ranks", False) or of_all_ranks(fault.__cause__))


def on_main(accelerator: Any, call: Callable[[], Any]) -> Any:
    """Call ``call`` on the main process; return its result, or raise its error, on every rank. A collective."""
    value = None
    failure = None
    if accelerator.is_main_process:
        try:
            value = call()
        except Exception as caught:
            failure = caught
    raise_together(accelerator, failure)
    return from_main(accelerator, value)
