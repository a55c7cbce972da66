"""On-policy distillation with TRL's DistillationTrainer: the student writes, and learns at each of its tokens what the
teacher would have written there.

    β = 1   KL(student ‖ teacher), "reverse"      β = 0   KL(teacher ‖ student)      between: generalized JSD

Sources: arXiv 2306.13649; Qwen3's on-policy stage (arXiv 2505.09388, section 4.5). The loss is TRL's, unchanged. It
compares the two models over the whole vocabulary, which they must share. It needs no reward and no known answer.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from trl import DistillationTrainer

from grpo_lab.trainer.resume.going_on import EpochOrderMixin

LENGTH = "completions/mean_length"


class Distillation(EpochOrderMixin, DistillationTrainer):  # type: ignore[misc]
    """TRL's DistillationTrainer, except that a resumed training continues its epoch in the order it began with."""


class TokenBudget(TrainerCallback):  # type: ignore[misc]
    """Callback that ends a training with TRL's generation (distillation, GRPO) once its model has written ``tokens``
    tokens; None: it only counts them. Recipes of `grpo-lab train` can name it under ``callbacks``.

    The number is estimated at each log from the logged mean length of completions, so the training ends at a log. The
    learning-rate schedule does not know of the limit. Prompts sampled in place of others (``dead_groups: resample``) do
    not count.

    Attributes:
        generated: tokens written so far, in the whole training (also before a resume).
    """

    def __init__(self, tokens: int | None = None) -> None:
        self.tokens = tokens
        self.generated = 0

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        total, before = 0.0, 0
        for logged in state.log_history:  # resumed with a checkpoint; a log has the mean since the one before
            if LENGTH in logged:
                total += logged[LENGTH] * each * (logged["step"] - before)
                before = logged["step"]
        self.generated = round(total / getattr(args, "num_iterations", 1))
        control.should_training_stop |= self.tokens is not None and self.generated >= self.tokens
