"""The golden trainings: one row a setting, each some optimizer steps on scripted completions.

A row says what a user would write (class, configuration, rewards); everything else is alike, so that a difference
between two recordings is a difference of the library. ``record.py`` runs them, ``trajectories.json`` holds what they
gave, ``test_golden.py`` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peft import LoraConfig

from grpo_lab import DrGRPOTrainer, KimiTrainer, LabTrainer, PPOTrainer, R1ZeroTrainer
from grpo_lab.rewards import KimiLengthReward, group_reward, step_reward
from grpo_lab.rewards.protocol import Group
from parity.harness import mixed_reward

STEPS = 6
PROCESS: dict[str, Any] = {"objective": {"name": "grpo", "advantage": "process"}}
#: one generation batch serves two optimizer steps
REUSED = {"num_iterations": 2, "max_steps": STEPS}
SCHEDULE = {"kind": "linear", "initial": 1.0, "value": 0.2, "start": 0, "end": 4}


def accuracy_reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Right, wrong or (one in eleven) unscorable, by the token ids."""
    return [None if sum(ids) % 11 == 0 else float(sum(ids) % 3 == 0) for ids in completion_ids]


def brevity_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0 / len(ids) if ids else 0.0 for ids in completion_ids]


@group_reward(requires=("accuracy_reward",))
def rare_and_right(group: Group) -> list[float | None]:
    """A right answer counts the more, the fewer of its group are right; a wrong one costs its rank by length."""
    right = [value == 1.0 for value in group.rewards["accuracy_reward"]]
    places = [sum(other < length for other in group.lengths) / len(group) for length in group.lengths]
    return [1.0 / sum(right) if ok else -place for ok, place in zip(right, places)]


@step_reward
def thirds_reward(completion_ids: list[list[int]], **_: Any) -> list[list[tuple[int, float]]]:
    """A step every seven tokens (none in a short completion), right or wrong by the token it ends with."""
    return [[(end, float(ids[end] % 3 == 0)) for end in range(6, len(ids), 7)] for ids in completion_ids]


@dataclass(frozen=True)
class Setting:
    """One training.

    Args:
        settings: ``LabConfig`` arguments on top of ``parity.harness.arguments``.
        trainer: the class; its name is what the record shows.
        rewards: made anew for every run.
        processes: ranks (gloo); the rows of a step are those of one process.
        sampler: completions carry log-probs of a sampler that disagrees, as from vLLM.
        peft: adapter, or None.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: type[LabTrainer] = LabTrainer
    rewards: Callable[[], list[Any]] = lambda: [mixed_reward()]
    processes: int = 1
    sampler: bool = False
    peft: LoraConfig | None = None


def _ours(objective: Any, **settings: Any) -> dict[str, Any]:
    return {"objective": objective, **settings}


def _lora() -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])


def _groups() -> list[Any]:
    return [accuracy_reward, KimiLengthReward(weight=0.5, warmup_steps=2), rare_and_right]


SETTINGS: tuple[Setting, ...] = (
    # each preset
    Setting("grpo", _ours("grpo")),
    Setting("dr_grpo", {}, trainer=DrGRPOTrainer),
    Setting("dapo", _ours("dapo", epsilon_high=0.28)),
    Setting("bnpo", _ours("bnpo")),
    Setting("gspo", _ours("gspo", epsilon=3e-4, epsilon_high=4e-4, **REUSED)),
    Setting("cispo", _ours("cispo", epsilon_high=2.0, **REUSED)),
    Setting("reinforce", _ours("reinforce")),
    Setting("mirror_descent", _ours({"name": "mirror_descent", "tau": 0.5}, learning_rate=0.01, **REUSED)),
    # advantage rules
    Setting("leave_one_out", _ours("dr_grpo", advantage="leave_one_out")),
    Setting("batch_zscore", _ours("dapo", advantage="batch_zscore")),
    Setting("group_max", _ours("dr_grpo", advantage="group_max")),
    Setting("raw_unclipped", _ours({"name": "dr_grpo", "surrogate": "unclipped"}, advantage="raw", learning_rate=0.1)),
    # a critic
    Setting(
        "ppo_kl_tokens_reused",
        {
            "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.05},
            "value": {"model": "copy", "learning_rate": 0.05, "warmup_steps": 1, "missing_eos_penalty": 0.5},
            **REUSED,
        },
        trainer=PPOTrainer,
        rewards=lambda: [accuracy_reward],
    ),
    # KL
    Setting("kl_k3_loss", _ours("grpo", beta=0.04)),
    Setting("kl_k2_loss", _ours("dr_grpo", kl={"estimator": "k2", "placement": "loss", "coefficient": 0.1})),
    Setting("kl_k1_reward", _ours("reinforce", kl={"estimator": "k1", "placement": "reward", "coefficient": 0.05})),
    Setting(
        "kl_k3_reward_reused",
        _ours("dr_grpo", kl={"estimator": "k3", "placement": "reward", "coefficient": 0.05}, **REUSED),
    ),
    # phases of a generation batch
    Setting("reused", _ours("dr_grpo", **REUSED)),
    Setting("two_steps_a_generation", _ours("grpo", gradient_accumulation_steps=2, steps_per_generation=4)),
    Setting("two_generations_a_step", _ours("dapo", gradient_accumulation_steps=4, steps_per_generation=2)),
    Setting("update_off", _ours("grpo", update="off")),
    Setting("adamw", _ours("dr_grpo", optim="adamw_torch", learning_rate=1e-3, max_grad_norm=1.0)),
    Setting("masked_when_cut", _ours("dapo", mask_truncated_completions=True)),
    # the sampler disagrees
    Setting("correction_tokens", _ours("dapo", vllm_importance_sampling_mode="token_truncate"), sampler=True),
    Setting("correction_sequences_reused", _ours("dr_grpo", learning_rate=0.1, **REUSED), sampler=True),
    # data
    Setting("resample", _ours("dr_grpo", update={"dead_groups": "resample", "max_rounds": 3})),
    Setting("group_rewards", _ours("dr_grpo"), rewards=_groups),
    Setting(
        "schedules",
        _ours("grpo", reward_schedules={"brevity_reward": SCHEDULE}),
        rewards=lambda: [accuracy_reward, brevity_reward],
    ),
    Setting("process", PROCESS, rewards=lambda: [thirds_reward]),
    Setting("process_mixture_reused", {**PROCESS, **REUSED}, rewards=lambda: [thirds_reward, accuracy_reward]),
    # named trainers
    Setting(
        "kimi",
        {"optim": "adamw_torch", "learning_rate": 1e-3, **REUSED},
        trainer=KimiTrainer,
        rewards=lambda: [accuracy_reward],
    ),
    Setting("r1_zero", {"beta": 0.001}, trainer=R1ZeroTrainer, rewards=lambda: [accuracy_reward, brevity_reward]),
    # adapters
    Setting("lora", _ours("dr_grpo"), peft=_lora()),
    Setting("lora_beta", _ours("grpo", beta=0.04), peft=_lora()),
    # drop-in: TRL's own settings
    Setting("drop_in_grpo", {"loss_type": "grpo", "beta": 0.04}),
    Setting("drop_in_dapo", {"loss_type": "dapo"}),
    Setting("drop_in_dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Setting("drop_in_sapo", {"loss_type": "sapo"}),
    # two ranks
    Setting("ranks_dr_grpo", _ours("dr_grpo"), processes=2),
    Setting("ranks_grpo_beta_reused", _ours("grpo", beta=0.04, **REUSED), processes=2),
    Setting("ranks_group_rewards", _ours("dapo"), rewards=_groups, processes=2),
    Setting("ranks_process", PROCESS, rewards=lambda: [thirds_reward], processes=2),
    Setting("ranks_drop_in", {"loss_type": "dapo"}, processes=2),
)
