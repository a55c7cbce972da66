"""``LabConfig``: TRL's flat configuration plus our small mappings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from grpo_lab.settings import refuse_unknown
from grpo_lab.trainer.ranks.watch import hold_time_limit
from grpo_lab.trainer.settings.algorithm import NOT_TRLS, algorithm_from
from grpo_lab.trainer.settings.conflicts import (
    agree_on_advantages,
    agree_with_trl,
    check_batch_sizes,
    check_choices,
    clip_in_force,
    refuse_contradictions,
    refuse_token_weights,
)
from grpo_lab.trainer.settings.gone import GONE
from grpo_lab.trainer.settings.knobs import with_registered
from grpo_lab.trainer.settings.parse import LabSettings, lab_settings, max_hours, named_by, stop_file
from grpo_lab.trainer.settings.rollout import check_sampling_correction
from grpo_lab.trainer.settings.value import check_kl, reference_every


@dataclass
class LabConfig(GRPOConfig):
    """Configuration of ``LabTrainer``: every argument of ``trl.GRPOConfig``, and these.

    Args:
        objective: name of a preset (``grpo_lab.objectives.PRESETS``), ``"module:name"`` of one that a team's module registers, or a
            mapping ``{name: …, surrogate: …, aggregation: …, ratio: …, …}`` in which every other key is a knob of the surrogate, a field
            of its dataclass. ``None``: TRL's own ``loss_type``, ``scale_rewards``, ``importance_sampling_level`` … are in force.
        advantage: name of a rule, or a mapping of its name and knobs ``{name: …, epsilon: …}``; overrides the preset's.
        kl: ``{estimator: k1|k2|k3, placement: loss|reward, coefficient: …, ratio_weighted: …}``, in the reward also
            ``{per: sequence|token, gamma: …, estimator: k1_clamped}`` and β steered to ``{target: …, rate: …}``; ``None``: TRL's ``beta``
            with k3 in the loss (``use_bias_correction_kl``).
        value: the critic of PPO: ``{model: head|copy|<folder or hub name>, learning_rate: …, vf_coef: …, cliprange_value: …, gamma: …,
            lam: …, whiten_rewards: …, whiten_advantages: …, warmup_steps: …, missing_eos_penalty: …}``, all of them optional
            (``settings/value.py``). With ``objective`` unset it means ``objective: ppo``; ``None`` beside that: all defaults.
        rollout: ``{verify_every: …, tolerance: …, engine: {dtype: …, kv_cache_gib: …}}``: the proof of the weight sync and
            the engine's options, with ``use_vllm``; ``{server: {request_timeout: …}}`` with ``vllm_mode: server``;
            ``{thinking_budget: …, budget_text: …}``: a budget for thinking, with any engine.
        reward_schedules: ``{reward name: schedule}``: a reward's weight as a function of the optimizer step, a number or
            ``{kind: constant|warmup|linear|cosine|piecewise, …}`` (``rewards/schedules.py``); in place of its entry in
            ``reward_weights``; logged as ``reward_weights/<name>``.
        reset_optimizer: empty the optimizer's state after every generation batch (Kimi k1.5); ``None``: as the trainer
            class declares (``KimiTrainer``: yes; else no).
        reference_every: the reference becomes the policy after every so many optimizer steps, or before every generation batch
            (``generation``); ``None``: it stays the start model (or TRL's ``sync_ref_model`` moves it).
        sampler: which prompt comes next: ``prioritized``, ``curriculum``, ``uniform_then_hard``, or a mapping ``{name: …,
            pass_rate_column: …, floor: …, decay: …, uniform_rounds: …, hard_below: …}``; ``None``: TRL's shuffling.
        update: ``"off"`` for stock, or ``{dead_groups: skip|keep|resample, max_tokens: …, randomness: same_distribution|same_draws}``;
            ``None``: exact, ``skip``; under dropout exact in distribution with ``objective``, draw by draw without.
        guard: ``"off"``, or ``{max_bad_steps: …, save: …}``: an optimizer step with a loss, gradient, reward or engine log-prob that is
            not finite is left out on every rank, and so many in a row stop the run; ``None``: on with ``objective``, off without.
        max_hours: hours of this process (from its start: loading counts, an earlier process of the run does not) after which the optimizer
            step under way is the last: a checkpoint, and the end, to be gone on with. Leave room for one step and its checkpoint.
        stop_file: a file whose presence stops the run likewise (it is looked for once a step, and removed); ``None``: ``STOP`` in
            ``output_dir``. One that is older than the process of a training from its first step is of an earlier run, and goes.
        save_checksums: every file of a checkpoint is read once after it was written, and its SHA-256 kept; a resume compares them.

    Raises:
        ValueError: an unknown key (with the nearest match), an unknown name, a TRL setting beside ``objective`` that it
            does not honour or that says the same thing differently (both settings are named).
    """

    objective: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Preset name or mapping; None keeps TRL's own settings."}
    )
    advantage: dict[str, Any] | str | None = field(default=None, metadata={"help": "Advantage rule: name or mapping."})
    kl: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "KL term: mapping with estimator, placement, coefficient."}
    )
    value: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "The critic of PPO: mapping with model, learning_rate, vf_coef, lam and more."}
    )
    rollout: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How completions are made: mapping with verify_every, tolerance, engine, thinking_budget, budget_text."
        },
    )
    reward_schedules: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Reward name to schedule of its weight over optimizer steps."}
    )
    reset_optimizer: bool | None = field(
        default=None, metadata={"help": "Empty the optimizer's state after every generation batch."}
    )
    reference_every: int | str | None = field(
        default=None, metadata={"help": "Reference := policy every n optimizer steps, or 'generation'."}
    )
    sampler: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Which prompt comes next: name or mapping; None shuffles as TRL does."}
    )
    update: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "'off' or a mapping with dead_groups, max_tokens, randomness."}
    )
    guard: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "'off' or a mapping with max_bad_steps, save: steps that are not finite."}
    )
    max_hours: float | None = field(
        default=None, metadata={"help": "Stop with a checkpoint after so many hours of this process."}
    )
    stop_file: str | None = field(
        default=None, metadata={"help": "Stop with a checkpoint when this file is there; None: STOP in output_dir."}
    )

    save_checksums: bool = field(
        default=True, metadata={"help": "A checksum of each file of a checkpoint, compared before a resume."}
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> LabConfig:
        """Remember which settings were written down: a default that was chosen can contradict, a mere default cannot."""
        names = [f.name for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else list(kwargs)
        refuse_unknown(kwargs, names, f"`{cls.__name__}`", GONE)
        config = super().__new__(cls)
        config._written = frozenset() if set(kwargs) >= set(names) else frozenset(kwargs)  # a parser writes them all
        return config

    def __post_init__(self) -> None:
        check_choices(vars(self))
        if self.reset_optimizer is not None and not isinstance(self.reset_optimizer, bool):
            raise ValueError(f"`reset_optimizer` is {self.reset_optimizer!r}; it must be true, false or left out")
        if not isinstance(self.save_checksums, bool):
            raise ValueError(f"`save_checksums` is {self.save_checksums!r}; it must be true or false")
        self.reference_every = reference_every(self.reference_every)
        self.max_hours, self.stop_file = max_hours(self.max_hours), stop_file(self.stop_file)
        check_batch_sizes(self)
        super().__post_init__()
        hold_time_limit(self)
        self.agree()

    def agree(self) -> None:
        """Check our settings against TRL's and against each other; write the objective into TRL's fields too."""
        if self.value is not None and self.objective is None and self.advantage is None:
            self.objective = "ppo"  # nothing else here has a critic
        settings = self.lab_settings
        if settings.objective is not None:
            refuse_contradictions(self, settings)
            agree_with_trl(self, settings)
        elif self.loss_type.startswith(NOT_TRLS):
            raise ValueError(
                f"`loss_type`={self.loss_type!r} is what a run with `objective` wrote there, and TRL has no such loss: set "
                "`objective` as in that run, or a `loss_type` of TRL's"
            )
        elif settings.advantage is not None and settings.advantage.name is not None:
            agree_on_advantages(self, settings.advantage.name)
        if settings.kl is not None:
            self._agree_on_beta(settings)
        check_sampling_correction(self)
        algorithm = algorithm_from(self, settings)  # a wrong name raises before the model is loaded
        refuse_token_weights(self, algorithm)
        check_kl(self, None if algorithm.objective is None else algorithm.objective.kl)
        if settings.objective is not None:
            clip_in_force(self, algorithm)

    @property
    def lab_settings(self) -> LabSettings:
        return with_registered(lab_settings(self))

    def _agree_on_beta(self, settings: LabSettings) -> None:
        assert settings.kl is not None
        coefficient = settings.kl.coefficient
        if coefficient is not None:
            if self.beta not in (0.0, coefficient):
                raise ValueError(
                    f"`kl.coefficient` is {coefficient} and `beta` is {self.beta}: two names for one number; set one"
                )
            self.beta = coefficient  # TRL builds the reference model by `beta`

    def to_dict(self) -> dict[str, Any]:
        """As ``TrainingArguments.to_dict``; parts that were given as objects are written by name."""
        return {key: _plain(value) for key, value in super().to_dict().items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> LabConfig:
        """What ``to_dict`` (``to_json_string``, a YAML of it) wrote, as a configuration again.

        TRL derives one of ``generation_batch_size`` and ``steps_per_generation`` from the other and refuses both: the second stays,
        which holds for any number of processes. Tokens are not in the record.
        """
        given = {name: value for name, value in written.items() if not _is_hidden(value)}
        if given.get("steps_per_generation") is not None:
            given.pop("generation_batch_size", None)
        return cls(**given)


def _is_hidden(value: Any) -> bool:
    """``to_dict`` writes ``<HUB_TOKEN>`` in the place of a secret."""
    return isinstance(value, str) and value.startswith("<") and value.endswith("_TOKEN>")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return named_by(value) if callable(value) else value
