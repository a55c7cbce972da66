"""Trainers named after published algorithms. Each declares an objective and perhaps rewards; a declared reward is added
unless the caller passed one of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from grpo_lab.rewards import AccuracyReward, KimiLengthReward, LanguageConsistencyReward, ThinkFormatReward
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.trainer.trl_bridge.rewards import measures_correctness, reward_name


class DrGRPOTrainer(LabTrainer):
    """Dr.GRPO (arXiv 2503.20783): advantages are not divided by the group's standard deviation, and a completion's loss
    is divided by a constant, not by its length."""

    objective = "dr_grpo"


class PPOTrainer(LabTrainer):
    """PPO with a value model (arXiv 1707.06347): GAE, and clipped losses of policy and critic. ``LabConfig.value`` sets
    the critic."""

    objective = "ppo"


class KimiTrainer(LabTrainer):
    """Kimi k1.5 (arXiv 2501.12599): mirror descent with an optimizer reset, and the length reward after a warm-up.

    Without ``reward_funcs`` the accuracy reward is used, or the environment's own. The length reward is added unless a
    ``KimiLengthReward`` is given. It takes correctness from the one reward that measures it (``accuracy_reward``), or
    from the only reward given. Its weight, its warm-up and τ were not published, so these values are ours. τ is set by
    ``objective={"name": "mirror_descent", "tau": …}``. One iteration is one generation batch: give it several updates
    by ``steps_per_generation`` or ``num_iterations``.
    """

    objective = "mirror_descent"
    reset_optimizer = True
    #: Weight of the length reward: a number or a schedule.
    length_weight: ClassVar[float | Mapping[str, Any] | Schedule] = 0.5
    #: Number of optimizer steps without the length reward.
    length_warmup_steps: ClassVar[int] = 100

    @classmethod
    def declared_rewards(cls, given: list[Any]) -> list[Any]:
        """Add the length reward to ``given``, and the accuracy reward if that is empty. Raise ValueError if it is not
        plain which of the given rewards measures correctness."""
        given = given or [AccuracyReward()]
        if any(isinstance(reward, KimiLengthReward) for reward in given):
            return given
        judges = [reward for reward in given if measures_correctness(reward)]
        if len(judges) != 1 and (judges or len(given) != 1):
            raise ValueError(
                f"KimiTrainer cannot tell which of the rewards {[reward_name(reward) for reward in given]} says what "
                "is correct; pass KimiLengthReward(weight=…, correctness='<its name>') among `reward_funcs`"
            )
        correctness = reward_name((judges or given)[0])
        return [*given, KimiLengthReward(cls.length_weight, cls.length_warmup_steps, correctness=correctness)]


class R1ZeroTrainer(LabTrainer):
    """DeepSeek-R1-Zero (arXiv 2501.12948): GRPO with accuracy and format rewards of equal weight.

    Without ``reward_funcs`` the rewards are accuracy and ``<think>…</think>`` format; an environment's own reward
    counts as given. R1 adds the language-consistency reward in its first RL stage. For that, set ``language`` in a
    subclass (``"en"``, or ``"prompt"`` for the prompt's language), or pass ``LanguageConsistencyReward`` yourself. The
    authors used lr 3e-6, β 0.001, temperature 1, 16 completions a question, 32 questions a step, and replaced the
    reference every 400 steps (``reference_every``).
    """

    objective = "grpo"
    #: Target of the language-consistency reward. ``None``: the reward is not used, as in R1-Zero.
    language: ClassVar[str | None] = None

    @classmethod
    def declared_rewards(cls, given: list[Any]) -> list[Any]:
        """Return ``given``, or accuracy and format if that is empty; with ``language`` also the language reward."""
        given = given or [AccuracyReward(), ThinkFormatReward()]
        if cls.language is None or any(isinstance(reward, LanguageConsistencyReward) for reward in given):
            return given
        return [*given, LanguageConsistencyReward(target=cls.language)]
