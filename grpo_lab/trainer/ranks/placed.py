"""TRL's trainer with a name for each part of a step, so that a rank which waits in vain can say where, and for whom."""

from __future__ import annotations

from typing import Any

from trl import GRPOTrainer

from grpo_lab.finite import NumbersError, not_finite_scores
from grpo_lab.trainer.ranks.places import at
from grpo_lab.trainer.ranks.watch import RankWatch


class Placed(GRPOTrainer):
    """``GRPOTrainer``; what it does and returns is unchanged. Raises ``NumbersError`` for torch's word on scores that are not finite."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with RankWatch(self), at("training"):
            return super().train(*args, **kwargs)

    @at("step")
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)

    @at("generation")
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._generate(*args, **kwargs)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise NumbersError(not_finite_scores(self.model)) from error

    @at("rewards")
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return super()._calculate_rewards(*args, **kwargs)

    @at("evaluation")
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return super().evaluate(*args, **kwargs)


__all__ = ["Placed"]
