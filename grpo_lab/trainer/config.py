"""``LabConfig``: TRL's configuration and the settings that this package adds to it."""

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
from grpo_lab.trainer.settings.agree import agree_with_trl, knobs_in_force
from grpo_lab.trainer.settings.algorithm import Algorithm, algorithm_from
from grpo_lab.trainer.settings.conflicts import AFTER, AHEAD, BEFORE, TURNS, Case, refuse, refuse_sampling_keys
from grpo_lab.trainer.settings.correction import MODE, agree_on_correction, check_correction
from grpo_lab.trainer.settings.knobs import with_registered, written
from grpo_lab.trainer.settings.limits import EARLIER, check_batch_sizes, check_choices, check_loss
from grpo_lab.trainer.settings.parse import OUR_FIELDS, LabSettings
from grpo_lab.trainer.settings.tasks import CONFLICTS

NameOrMapping = dict[str, Any] | str | None


def _with_help(config: type) -> type:
    """Set each field's help text, shown by a script's ``--help``, to what the class docstring says of it."""
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
        objective: name of a preset (``grpo_lab.objectives.PRESETS``), ``"module:name"`` of a preset that your own
            module registers, or a mapping ``{name: …, surrogate: …, aggregation: …, ratio: …, …}``. Every other key of
            the mapping is a knob of the surrogate. ``None``: TRL's own settings decide (``loss_type``,
            ``scale_rewards``, …).
        advantage: name of an advantage rule, or a mapping of its name and knobs ``{name: …, epsilon: …}``; overrides
            the preset's rule.
        correction: how to weight tokens sampled by another policy than the one before the update: a name
            (``grpo_lab.objectives.CORRECTIONS``), or a mapping of its name and knobs ``{name: icepop, low: …, high:
            …}``. It needs the log-probs of the sampler: with ``use_vllm``, or from a ``rollout_func``. ``None``: TRL's
            ``vllm_importance_sampling_*`` with ``use_vllm``, else nothing.
        kl: the KL penalty, a mapping (``KLSettings``). ``None``: TRL's ``beta`` with k3 in the loss
            (``use_bias_correction_kl``).
        value: the critic of PPO, a mapping (``ValueSettings``); ``{}`` takes all defaults. Setting it with
            ``objective`` and ``advantage`` unset means ``objective: ppo``. ``None`` with ``objective: ppo`` also takes
            all defaults.
        rollout: how completions are generated, a mapping (``RolloutSettings``). With ``use_vllm``: the weight sync (all
            weights, or LoRA's adapter alone), its check, options of engine and server. With any engine: a thinking
            budget.
        reward_schedules: ``{reward name: schedule}``, a reward's weight as a function of the optimizer step. A schedule
            is a number or ``{kind: constant|warmup|linear|cosine|piecewise, …}`` (``rewards/schedules.py``). It
            replaces the reward's entry in ``reward_weights`` and is logged as ``reward_weights/<name>``.
        reset_optimizer: clear the optimizer's state after every generation batch (Kimi k1.5). ``None``: as the trainer
            class declares (``KimiTrainer``: yes; others: no).
        reference_every: replace the reference model by the policy after so many optimizer steps, or before each
            generation batch (``generation``). ``None``: it stays the start model, unless TRL's ``sync_ref_model`` moves
            it.
        sampler: which prompt comes next: a name, or a mapping (``SamplerSettings``). ``None``: TRL's shuffled order.
        tasks: the tasks of a mixture, ``{name: {weight: …, objective: …, advantage: …, loss_weight: …, denominators:
            all|own}}`` (``TaskSettings``). Every generation batch holds them by their weights. The data set names the
            task of a row in its column ``task``.
        update: ``"off"`` computes the update as stock TRL does; a mapping (``UpdateSettings``) configures the exact
            update. ``None``: exact, without rows that contribute nothing (``dead_groups: skip``). Under dropout it is
            exact in distribution if ``objective`` is set, and draw by draw if not.
        guard: ``"off"``, or ``{max_bad_steps: …, save: …}``. An optimizer step whose loss, gradient, reward or engine
            log-prob is not finite is skipped on every rank. After ``max_bad_steps`` skipped steps in a row the run
            stops. ``None``: on if ``objective`` is set, else off.
        max_hours: hours after which the run stops, counted from the start of this process, loading included. The
            optimizer step under way is finished and a checkpoint written, from which the run can be resumed. Leave time
            for both.
        stop_file: path of a file whose presence stops the run in the same way. It is looked for once a step, and
            removed. ``None``: ``STOP`` in ``output_dir``.
        profile: write ``profile.md``, the time of an optimizer step split into its parts (``--profile``).
        token_weights_every: in every n-th optimizer step, the first included, append a line to ``token_weights.jsonl``:
            the weight that tokens had in the gradient, by length and by pass rate. The report plots these.
        save_checksums: save the SHA-256 of every file of a checkpoint; a resume compares them.

    Raises:
        ValueError: a key or a name is unknown (the message gives the nearest match). Or a TRL setting has no effect
            with ``objective`` or contradicts it (the message names both).
    """

    objective: NameOrMapping = None
    advantage: NameOrMapping = None
    correction: NameOrMapping = None
    kl: NameOrMapping = None
    value: NameOrMapping = None
    rollout: NameOrMapping = None
    reward_schedules: NameOrMapping = None
    reset_optimizer: bool | None = None
    reference_every: int | str | None = None
    sampler: NameOrMapping = None
    tasks: NameOrMapping = None
    update: NameOrMapping = None
    guard: NameOrMapping = None
    max_hours: float | None = None
    stop_file: str | None = None
    profile: bool | None = None
    token_weights_every: int | None = None
    save_checksums: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> LabConfig:
        """Refuse unknown settings, and note in ``_written`` which ones the caller passed: a default value contradicts
        another setting only if it was passed."""
        if dataclasses.is_dataclass(cls):
            names = [f.name for f in dataclasses.fields(cls) if f.init]
        else:
            names = list(kwargs)
        refuse_unknown(kwargs, names, f"`{cls.__name__}`", EARLIER)
        config = super().__new__(cls)
        if set(kwargs) >= set(names):  # an argument parser passes every field
            config._written = frozenset()
        else:
            config._written = frozenset(kwargs)
        return config

    def __post_init__(self) -> None:
        check_choices(vars(self))
        check_loss(vars(self))
        check_batch_sizes(self)
        super().__post_init__()
        hold_time_limit(self)
        self.agree()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value, and discard the parsed settings (``_parsed``), so that ``agree`` parses them anew."""
        if not name.startswith("_"):
            vars(self).pop("_parsed", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the values to pickle or copy, without the parsed settings."""
        return {name: value for name, value in vars(self).items() if name != "_parsed"}

    def agree(self) -> None:
        """Parse our settings, check them against TRL's and each other, build the algorithm, and set TRL's fields to
        agree with it. Do nothing if no setting has changed since the last call.

        Raises:
            ValueError: a setting is unknown, contradicts another or would have no effect.
        """
        if "_parsed" in vars(self):
            return
        if self.value is not None and self.objective is None and self.advantage is None:
            self.objective = "ppo"  # the preset that has a critic
        given = {name: from_json(getattr(self, name), name) for name in OUR_FIELDS}
        ours = with_registered(read(LabSettings, given))
        self.reference_every = ours.reference_every
        self.max_hours = ours.max_hours
        self.stop_file = ours.stop_file
        agree_on_correction(self, ours)
        if ours.rollout.earlier_policy and ours.correction is None and not written(self, MODE):
            setattr(self, MODE, "token_truncate")
        refuse(AHEAD[ours.rollout.earlier_policy], Case(self, ours))
        refuse(BEFORE, Case(self, ours))
        if ours.rollout.turns is not None:
            refuse(TURNS, Case(self, ours))
        if ours.tasks:
            refuse(CONFLICTS, Case(self, ours))
        refuse_sampling_keys(self)
        agree_with_trl(self, ours)
        if ours.kl is not None and ours.kl.coefficient is not None:
            self.beta = ours.kl.coefficient  # TRL builds a reference model if it is not 0
        algorithm = algorithm_from(self, ours)  # a wrong name raises before the model is loaded
        check_correction(self, algorithm)
        refuse(AFTER, Case(self, ours, algorithm))
        kl = None
        if algorithm.objective is not None:
            kl = algorithm.objective.kl
        if kl is not None and kl.control is not None:
            kl.control.rate_of(self.generation_batch_size)
        if ours.objective is not None:
            knobs_in_force(self, algorithm)
        self._parsed = ours, algorithm

    @property
    def lab_settings(self) -> LabSettings:
        """The settings that this package adds to TRL's, parsed and checked."""
        self.agree()
        return self._parsed[0]

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that these settings and TRL's define: the advantage rule, the objective, the critic."""
        self.agree()
        return self._parsed[1]

    def to_dict(self) -> dict[str, Any]:
        """Return ``TrainingArguments.to_dict()`` with every callable replaced by its address, ``module:name``."""
        return {key: _plain(value) for key, value in super().to_dict().items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> LabConfig:
        """Make a configuration from a mapping that ``to_dict`` wrote (directly, or read from its JSON or YAML).

        Access tokens are left unset, since the record holds only placeholders of them. TRL derives one of
        ``generation_batch_size`` and ``steps_per_generation`` from the other and refuses both. The second is kept,
        since it holds for any number of processes.
        """
        given = dict(written)
        for name, value in written.items():
            if isinstance(value, str) and value.startswith("<") and value.endswith("_TOKEN>"):  # a secret's placeholder
                del given[name]
        if given.get("steps_per_generation") is not None:
            given.pop("generation_batch_size", None)
        return cls(**given)


def _plain(value: Any) -> Any:
    """Return ``value`` with every callable in it, at any depth of mappings, replaced by its address."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if callable(value):
        return address(value, ":")
    return value
