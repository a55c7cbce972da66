"""One line a logging window on the main process: is it working? (``grpo_lab.diagnostics``). Reads the log, changes nothing of it."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from grpo_lab.diagnostics import Facts, Verdict, diagnose

logger = logging.getLogger("grpo_lab")

EVERY = 20
"""Windows after which a verdict is said again though nothing has changed. Ours."""


class HealthLine(TrainerCallback):  # type: ignore[misc]
    """Logs the verdict when it changes, every ``EVERY`` windows, and at the end; a warning where something looks wrong.

    ``LabTrainer`` adds it where `objective` is set. A drop-in run has it with ``callbacks=[HealthLine()]``. It reads
    ``state.log_history``, which checkpoints carry: a resumed run goes on where it stopped.

    Args:
        every: windows after which an unchanged verdict is said again.
    """

    def __init__(self, every: int = EVERY) -> None:
        self.every = every
        self.said: Verdict | None = None
        self._since = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        verdict = diagnose(
            [row for row in state.log_history if "loss" in row], facts_of(args, state, more.get("optimizer"))
        )
        self._since += 1
        ends = state.global_step >= state.max_steps
        if self.said is None or verdict.names != self.said.names or self._since >= self.every or ends:
            logger.log(logging.INFO if verdict.healthy else logging.WARNING, "%s", verdict.line)
            self.said, self._since = verdict, 0


def facts_of(args: Any, state: Any, optimizer: Any = None) -> Facts:
    """What the rules must know of a run."""
    micro_batches = args.steps_per_generation * args.num_iterations
    moves = None if optimizer is None else any(float(group["lr"]) != 0 for group in optimizer.param_groups)
    return Facts(micro_batches / args.gradient_accumulation_steps, int(state.max_steps), moves)


__all__ = ["EVERY", "HealthLine", "facts_of"]
