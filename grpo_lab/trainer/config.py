"""``LabConfig``: TRL's flat configuration plus our small mappings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trl import GRPOConfig

from grpo_lab.registry import address
from grpo_lab.settings import from_json, read, refuse_unknown
from grpo_lab.trainer.ranks import hold_time_limit
from grpo_lab.trainer.settings.algorithm import Algorithm, agree_with_trl, algorithm_from, clip_in_force
from grpo_lab.trainer.settings.conflicts import AFTER, AHEAD, BEFORE, Case, refuse, refuse_sampling_keys
from grpo_lab.trainer.settings.knobs import with_registered, written
from grpo_lab.trainer.settings.limits import EARLIER, check_batch_sizes, check_choices
from grpo_lab.trainer.settings.parse import OUR_FIELDS, LabSettings

CORRECTION = "vllm_importance_sampling_mode"
NameOrMapping = dict[str, Any] | str | None


def _with_help(config: type) -> type:
    """Give each field its words of the docstring as help, for a script's ``--help``."""
    described = re.finditer(r"^ {8}(\w+): (.+?)(?=^ {8}\w|^$)", config.__doc__ or "", re.MULTILINE | re.DOTALL)
    for setting in described:
        help = " ".join(setting[2].replace("``", "").split())
        config.__dataclass_fields__[setting[1]].metadata = MappingProxyType({"help": help})  # type: ignore[attr-defined]
    return config


@_with_help
@dataclass
class LabConfig(GRPOConfig):
    """Configuration of ``LabTrainer``: every argument of ``trl.GRPOConfig``, and these.

    Args:
        objective: name of a preset (``grpo_lab.objectives.PRESETS``), ``"module:name"`` of one that a team's module
            registers, or a mapping ``{name: …, surrogate: …, aggregation: …, ratio: …, …}`` in which every other key is
            a knob of the surrogate. ``None``: TRL's ``loss_type``, ``scale_rewards``, … are in force.
        advantage: name of a rule, or a mapping of its name and knobs ``{name: …, epsilon: …}``; overrides the preset's.
        kl: ``{estimator: k1|k2|k3, placement: loss|reward, coefficient: …, ratio_weighted: …}``, in the reward also
            ``{per: sequence|token, gamma: …, estimator: k1_clamped}`` and β steered to ``{target: …, rate: …}``;
            ``None``: TRL's ``beta`` with k3 in the loss (``use_bias_correction_kl``).
        value: the critic of PPO (``ValueSettings``; ``{}``: all defaults). With ``objective`` unset it means
            ``objective: ppo``; ``None`` beside that: all defaults.
        rollout: the weight sync (all weights, or LoRA's adapter alone), its proof and the engine's options, with
            ``use_vllm``; the talk with a server; a budget for thinking, with any engine (``RolloutSettings``).
        reward_schedules: ``{reward name: schedule}``: a reward's weight as a function of the optimizer step, a number
            or ``{kind: constant|warmup|linear|cosine|piecewise, …}`` (``rewards/schedules.py``); in place of its entry
            in ``reward_weights``; logged as ``reward_weights/<name>``.
        reset_optimizer: empty the optimizer's state after every generation batch (Kimi k1.5); ``None``: as the trainer
            class declares (``KimiTrainer``: yes; else no).
        reference_every: the reference becomes the policy after so many optimizer steps, or before each generation batch
            (``generation``); ``None``: it stays the start model (or TRL's ``sync_ref_model`` moves it).
        sampler: which prompt comes next: a name, or a mapping (``SamplerSettings``); ``None``: TRL's shuffling.
        update: ``"off"`` for stock, or a mapping (``UpdateSettings``); ``None``: exact, ``skip``; under dropout exact
            in distribution with ``objective``, draw by draw without.
        guard: ``"off"``, or ``{max_bad_steps: …, save: …}``: an optimizer step with a loss, gradient, reward or engine
            log-prob that is not finite is left out on every rank, and so many in a row stop the run; ``None``: on with
            ``objective``, off without.
        max_hours: hours of this process, loading included, after which the optimizer step under way is the last: a
            checkpoint, and the end, to be gone on with. Leave room for one step and its checkpoint.
        stop_file: a file whose presence stops the run likewise; it is looked for once a step, and removed. ``None``:
            ``STOP`` in ``output_dir``.
        profile: write ``profile.md``, the time of an optimizer step by part (``--profile``).
        token_weights_every: in every n-th optimizer step, from the first on, write the weight that tokens had in the
            gradient, by length and by pass rate, as a line of ``token_weights.jsonl``; the report draws them.
        save_checksums: keep the SHA-256 of every file of a checkpoint; a resume compares them.

    Raises:
        ValueError: an unknown key (with the nearest match), an unknown name, a TRL setting beside ``objective`` that it
            does not honour or that says the same thing differently (both settings are named).
    """

    objective: NameOrMapping = None
    advantage: NameOrMapping = None
    kl: NameOrMapping = None
    value: NameOrMapping = None
    rollout: NameOrMapping = None
    reward_schedules: NameOrMapping = None
    reset_optimizer: bool | None = None
    reference_every: int | str | None = None
    sampler: NameOrMapping = None
    update: NameOrMapping = None
    guard: NameOrMapping = None
    max_hours: float | None = None
    stop_file: str | None = None
    profile: bool | None = None
    token_weights_every: int | None = None
    save_checksums: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> LabConfig:
        """Remember which settings were written down: a default that was chosen can contradict, a mere one cannot."""
        if dataclasses.is_dataclass(cls):
            names = [f.name for f in dataclasses.fields(cls) if f.init]
        else:
            names = list(kwargs)
        refuse_unknown(kwargs, names, f"`{cls.__name__}`", EARLIER)
        config = super().__new__(cls)
        if set(kwargs) >= set(names):  # a parser writes them all
            config._written = frozenset()
        else:
            config._written = frozenset(kwargs)
        return config

    def __post_init__(self) -> None:
        check_choices(vars(self))
        check_batch_sizes(self)
        super().__post_init__()
        hold_time_limit(self)
        self.agree()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value, and forget what was parsed from the settings before it."""
        if not name.startswith("_"):
            vars(self).pop("_parsed", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_parsed"}

    def agree(self) -> None:
        """Parse our settings, check them against TRL's and against each other, build the algorithm, and write it into
        TRL's fields; nothing, where no setting was changed since."""
        if "_parsed" in vars(self):
            return
        if self.value is not None and self.objective is None and self.advantage is None:
            self.objective = "ppo"  # nothing else here has a critic
        given = {name: from_json(getattr(self, name), name) for name in OUR_FIELDS}
        ours = with_registered(read(LabSettings, given))
        self.reference_every = ours.reference_every
        self.max_hours = ours.max_hours
        self.stop_file = ours.stop_file
        if ours.rollout.earlier_policy and not written(self, CORRECTION):
            setattr(self, CORRECTION, "token_truncate")
        refuse(AHEAD[ours.rollout.earlier_policy], Case(self, ours))
        refuse(BEFORE, Case(self, ours))
        refuse_sampling_keys(self)
        agree_with_trl(self, ours)
        if ours.kl is not None and ours.kl.coefficient is not None:
            self.beta = ours.kl.coefficient  # TRL builds the reference model by `beta`
        algorithm = algorithm_from(self, ours)  # a wrong name raises before the model is loaded
        refuse(AFTER, Case(self, ours, algorithm))
        kl = None
        if algorithm.objective is not None:
            kl = algorithm.objective.kl
        if kl is not None and kl.control is not None:
            kl.control.rate_of(self.generation_batch_size)
        if ours.objective is not None:
            clip_in_force(self, algorithm)
        self._parsed = ours, algorithm

    @property
    def lab_settings(self) -> LabSettings:
        """Settings that this package adds, parsed."""
        self.agree()
        return self._parsed[0]

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that these settings and TRL's come to: the advantage rule, the objective, the critic."""
        self.agree()
        return self._parsed[1]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``TrainingArguments.to_dict`` does, with parts that were given as objects written by name."""
        return {key: _plain(value) for key, value in super().to_dict().items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> LabConfig:
        """Make a configuration of what ``to_dict`` (``to_json_string``, a YAML of it) wrote; tokens are not in the
        record.

        TRL derives one of ``generation_batch_size`` and ``steps_per_generation`` from the other and refuses both: the
        second stays, which holds for any number of processes.
        """
        given = dict(written)
        for name, value in written.items():
            if isinstance(value, str) and value.startswith("<") and value.endswith("_TOKEN>"):  # in a secret's place
                del given[name]
        if given.get("steps_per_generation") is not None:
            given.pop("generation_batch_size", None)
        return cls(**given)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if callable(value):
        return address(value, ":")
    return value
