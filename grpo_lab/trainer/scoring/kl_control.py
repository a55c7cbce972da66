"""β of the KL in the reward, from one generation batch to the next: constant, or steered to ``kl.target``, and carried through a resume.

The KL of a generation batch is known once it is charged, so batch t pays β_t, and what it measured makes β_{t+1}. One number, the same on
every rank: all of them sum the same gathered table, exactly rounded.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import TrainerCallback

from grpo_lab.atomic import write_whole_text
from grpo_lab.trainer.critic.optimizer import is_warming_up

if TYPE_CHECKING:
    from grpo_lab.trainer.ports import StepPort

STATE_FILE = "grpo_lab_kl.json"


class KLController(TrainerCallback):  # type: ignore[misc]
    """Holds β. Without ``kl.target`` it is the constant ``kl.coefficient``, and nothing is written or logged.

    Attributes:
        coefficient: β in force; None where no KL is charged in the reward.
    """

    def __init__(self, trainer: StepPort) -> None:
        objective = trainer.algorithm.objective
        kl = None if objective is None else objective.kl_in_reward
        self.trainer = trainer
        self.control = None if kl is None else kl.control
        self._start = None if kl is None else kl.coefficient
        self.coefficient = self._whole_step = self._start
        self._loaded = False

    def charged(self, of_completions: Tensor) -> None:
        """What the batch at hand had; β moves on, in training only, and not while a critic learns alone: no β could move the KL.

        Args:
            of_completions: float64 ``[N]`` over all ranks, Σ_t (log π − log π_ref) of each completion, nats.
        """
        if self.control is None or self.coefficient is None:
            return
        number = of_completions.numel()
        measured = math.fsum(of_completions.tolist()) / number
        book = self.trainer.recorder.book()
        book.add_alike("kl/measured", of_completions.sum(), number)
        book.add_alike("kl/beta", of_completions.new_tensor(self.coefficient), 1)
        if self.trainer.recorder.mode() == "train" and not is_warming_up(self.trainer):
            self.coefficient = self.control.following(self.coefficient, measured, number)

    # -- HF's events, checkpoints ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A training begins with the coefficient as written, a resumed one with that of its checkpoint."""
        if not self._loaded:
            self.coefficient = self._start
        self._loaded, self._whole_step = False, self.coefficient

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A checkpoint is of the last whole step: what was generated since is generated again on a resume."""
        self._whole_step = self.coefficient

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write β into a checkpoint folder."""
        if self.control is None or not self.trainer.args.should_save:
            return
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        write_whole_text(place / STATE_FILE, json.dumps({"format": 1, "coefficient": self._whole_step}))

    def load(self, checkpoint: str | None) -> None:
        """β as it was when the checkpoint was written; a warning where the checkpoint does not say.

        Raises:
            ValueError: the file is damaged.
        """
        if self.control is None or checkpoint is None:
            return
        self._loaded, self.coefficient = True, self._start
        file = Path(checkpoint) / STATE_FILE
        if not file.is_file():
            self.trainer.recorder.say(
                f"`resume_from_checkpoint`: {checkpoint} was written without `kl.target` (no {STATE_FILE}): β starts at "
                f"`kl.coefficient`, {self._start:g}"
            )
            return
        try:
            found = float(json.loads(file.read_text(encoding="utf-8"))["coefficient"])
            if not (math.isfinite(found) and found > 0):
                raise ValueError(f"β is {found}")
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ValueError(
                f"`resume_from_checkpoint`: {file} cannot be read ({error!r}); take another checkpoint, or delete the file to start "
                "again at `kl.coefficient`"
            ) from error
        self.coefficient = found


__all__ = ["KLController"]
