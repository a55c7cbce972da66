"""On-policy distillation with TRL's DistillationTrainer: the student writes, and learns at each of its tokens what the
teacher would have written there.

    β = 1   KL(student ‖ teacher), "reverse"      β = 0   KL(teacher ‖ student)      between: generalized JSD

arXiv 2306.13649; Qwen3's on-policy stage (arXiv 2505.09388, section 4.5). The loss is TRL's, unchanged. It is over the
whole vocabulary, so both models must share it. It needs no reward and no known answer.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from trl import DistillationTrainer

from grpo_lab.trainer.resume.going_on import EpochOrderMixin

LENGTH = "completions/mean_length"


class Distillation(EpochOrderMixin, DistillationTrainer):  # type: ignore[misc]
    """TRL's trainer; a resumed training goes on in the order of its epoch."""


class TokenBudget(TrainerCallback):  # type: ignore[misc]
    """Ends a training of TRL's that generates, at the first log by which its model has written ``tokens`` tokens (None:
    only counts them, in ``generated``). A recipe of `grpo-lab train` can use it, too: ``callbacks``. The learning-rate
    schedule does not know of it, and prompts that are sampled again (``dead_groups: resample``) do not count."""

    def __init__(self, tokens: int | None = None) -> None:
        self.tokens = tokens
        self.generated = 0

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        total, before = 0.0, 0
        for logged in state.log_history:  # a checkpoint has it, and a log the mean of the steps since the last one
            if LENGTH in logged:
                total += logged[LENGTH] * each * (logged["step"] - before)
                before = logged["step"]
        self.generated = round(total / getattr(args, "num_iterations", 1))
        control.should_training_stop |= self.tokens is not None and self.generated >= self.tokens
