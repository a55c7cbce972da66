"""Settings that act inside a method of ``LabTrainer``: refused if a team's code keeps that method from being called.

A team may override any method of TRL's trainer. An override that calls ``super()`` leaves every setting in force. One
that does not, or that replaces the only caller of a method, keeps our method from running. Its settings then do
nothing, though the run's record shows them. Only a run shows which methods are called. So ``seen`` notes each call, and
``SilencedSettings`` checks before the first training begins, and before the first optimizer step is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.trainer.settings.parse import LabSettings
from grpo_lab.trainer.trl_bridge import teams

Method = Callable[..., Any]


def seen(method: Method) -> Method:
    """Decorate a method of the trainer: each call puts its name into the trainer's ``_called``."""

    @functools.wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self).setdefault("_called", set()).add(method.__name__)
        return method(self, *args, **kwargs)

    return noted


@dataclass(frozen=True)
class Acting:
    """A method of ``LabTrainer`` in which settings act.

    Attributes:
        method: its name.
        settings: name of each setting that acts there → whether it is set.
        callers: methods that call it, or that lead to its call. A team that overrides one of them may be to blame.
        early: whether it is called before a training begins, and not only in the first step.
    """

    method: str
    settings: dict[str, Callable[[LabSettings], bool]]
    callers: tuple[str, ...] = ()
    early: bool = False


ACTING: tuple[Acting, ...] = (
    Acting(
        "_get_train_sampler",
        {"sampler": lambda s: s.sampler is not None, "tasks": lambda s: bool(s.tasks)},
        ("get_train_dataloader",),
        early=True,
    ),
    Acting(
        "create_optimizer", {"value": lambda s: s.value is not None}, ("create_optimizer_and_scheduler",), early=True
    ),
    Acting(
        "get_batch_samples",
        {
            "rollout.overlap": lambda s: s.rollout.overlap > 0,
            "rollout.cut_after": lambda s: s.rollout.cut_after is not None,
        },
    ),
    Acting(
        "_generate_and_score_completions",
        {
            "advantage": lambda s: s.advantage is not None,
            "kl.placement: reward": lambda s: s.kl is not None and s.kl.placement == "reward",
            "reward_schedules": lambda s: bool(s.reward_schedules),
            "reset_optimizer": lambda s: bool(s.reset_optimizer),
            "reference_every: generation": lambda s: s.reference_every == "generation",
            "sampler: prioritized": lambda s: s.sampler is not None and s.sampler.name == "prioritized",
            "update.dead_groups: resample": lambda s: s.update.dead_groups == "resample",
        },
        ("_prepare_inputs", "training_step"),
    ),
    Acting(
        "_generate_single_turn",
        {
            "rollout.generate: groups": lambda s: s.rollout.generate == "groups",
            "rollout.generate: compiled": lambda s: s.rollout.generate == "compiled",
            "rollout.thinking_budget": lambda s: s.rollout.thinking_budget is not None and s.rollout.turns is None,
            "rollout.overlap": lambda s: s.rollout.overlap > 0,
            "rollout.cut_after": lambda s: s.rollout.cut_after is not None,
        },
        ("rollout_func", "_generate", "_generate_and_score_completions", "_prepare_inputs", "training_step"),
    ),
    Acting(
        "_tool_call_loop",
        {"rollout.turns": lambda s: s.rollout.turns is not None},
        ("_generate", "_generate_and_score_completions", "_prepare_inputs", "training_step"),
    ),
    Acting("_get_grad_norm", {"guard": lambda s: s.guard is not None and not s.guard.is_off}),
)


class SilencedSettings(TrainerCallback):  # type: ignore[misc]
    """Callback that raises ValueError if the method in which a setting acts was not called (``ACTING``). The message
    names the setting and the team's method that is to blame."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        self._first = 0
        self._compared = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Check the methods that are called before a training begins."""
        self._first = self._trainer.phase.done
        self._compare(early=True)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Check the other methods, once, before the first step whose batch this process generated."""
        phase = self._trainer.phase
        taken_up = self._first % phase.every != 0  # an earlier process made the first generation batch
        if self._compared or (taken_up and phase.done - self._first < phase.every):
            return
        self._compared = True
        self._compare(early=False)

    def _compare(self, early: bool) -> None:
        """Refuse the settings of each method that should have been called by now and was not."""
        called = vars(self._trainer).get("_called", set())
        for one in ACTING:
            if one.early is early and one.method not in called:
                self._refuse(one)

    def _refuse(self, one: Acting) -> None:
        """Raise ValueError if one of the method's settings is set."""
        silent = [name for name, is_set in one.settings.items() if is_set(self._trainer.lab_settings)]
        if not silent:
            return
        places = [teams(self._trainer, method) for method in (one.method, *one.callers)]
        if getattr(self._trainer, "rollout_func", None) is not None and "rollout_func" in one.callers:
            places.append("rollout_func")
        home = next((place for place in places if place is not None), None)
        if home is None:
            found = "it is not called"
        else:
            found = f"`{home}` keeps it from being called"
        raise ValueError(
            f"`{silent[0]}` would have no effect in this run: it acts in `LabTrainer.{one.method}`, and {found}; "
            f"ask `super()` there, or leave `{silent[0]}` out"
        )
