"""Settings that ``LabConfig`` adds to TRL's, as typed settings: its small mappings, and single values.

``LabSettings`` has one field for each setting; a mapping has a class of its own. ``objective``, ``advantage``, ``kl``,
``value``, ``update``, ``sampler`` and ``guard`` may also be a bare name. Unknown keys are refused with the nearest
match, and a setting without effect is an error. ``objective``, ``advantage`` and ``correction`` name a part with
settings of its own, such as ``objective: {name: grpo, epsilon: 0.1}``: these are collected in ``knobs``, and checked
where the part is built (``knobs.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.objectives.value_loss import CLIPRANGE
from grpo_lab.rewards.schedules import Schedule, schedule_from
from grpo_lab.settings import (
    NULL_IS_DEFAULT,
    Count,
    Hours,
    Number,
    OnlySwitch,
    Positive,
    Seconds,
    Switch,
    must_be,
    settings,
)
from grpo_lab.trainer.settings.sampler import SamplerSettings
from grpo_lab.trainer.settings.tasks import TaskSettings
from grpo_lab.trainer.settings.update import UpdateSettings, word
from grpo_lab.turns.turn_settings import TurnSettings


def reward_schedules(written: Any) -> dict[str, Schedule]:
    """Return the schedule of each reward's weight, by the reward's name, from the mapping that the user wrote (None:
    none). Raises ValueError, which names the reward, for a schedule that cannot be read."""
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise ValueError(
            f"`reward_schedules` is {written!r}; it must be a mapping of reward names to schedules, such as "
            "{accuracy_reward: {kind: warmup, start: 100, value: 1.0}}"
        )
    found = {}
    for name, spec in written.items():
        try:
            found[str(name)] = schedule_from(spec)
        except (ValueError, TypeError) as error:
            raise ValueError(f"`reward_schedules.{name}`: {error}") from error
    return found


def _digits(value: Any) -> Any:
    """Return text of digits, as command lines have it, as a whole number; any other value as it is."""
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    return value


def _path_of_a_file(value: Any) -> str:
    """Return ``value`` as the path of a file, there or not. Raises ValueError if it is no path, empty, or a folder."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or os.path.isdir(value):
        raise ValueError
    return os.fspath(value)


@settings(bare="name")
class GuardSettings:
    """``guard``: ``off``, or how to go on after a step whose loss, gradient, reward or engine log-prob is NaN or
    infinite.

    Such a step is skipped: the weights stay as they are.

    Args:
        max_bad_steps: number of skipped steps in a row after which the run stops; a bad generation batch counts once.
        save: save the batch of a skipped step under ``<output_dir>/bad_steps``.
    """

    name: Annotated[Literal["on", "off"], BeforeValidator(word)] = "on"
    max_bad_steps: Annotated[Positive, NULL_IS_DEFAULT] = 3
    save: Annotated[Switch, NULL_IS_DEFAULT] = True

    def __post_init__(self) -> None:
        for knob in ("max_bad_steps", "save"):
            if self.is_off and getattr(self, knob) != getattr(GuardSettings, knob):
                raise ValueError(f"`guard.{knob}` has no effect with `guard: off`; leave it out")

    @property
    def is_off(self) -> bool:
        return self.name == "off"


@settings(bare="name", rest="knobs")
class ObjectiveSettings:
    """``objective``: a preset, and what to change of it. ``None``: as the preset (or TRL's flat setting) says.

    Args:
        name: a preset, one that a team registered, or ``"module:name"``: the module is loaded first.
        advantage: overrides the preset's rule: a name, ``"module:attribute"``, a callable, or ``{name: …, …}``.
        ratio: ``token``, ``sequence``, ``sequence_token`` or ``product``.
        surrogate: a name, ``"module:attribute"``, a class or a callable.
        aggregation: a name, ``"module:attribute"``, a callable, or ``{name: …, …}``.
        knobs: every other key: a field of the chosen surrogate's dataclass (checked by ``algorithm``).
    """

    name: str | None = None
    advantage: Any = None
    ratio: str | None = None
    surrogate: Any = None
    aggregation: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)


@settings(bare="name", rest="knobs")
class AdvantageSettings:
    """``advantage``: an advantage rule and its knobs. The rule is given by its name, as ``"module:attribute"``, as a
    class or as a callable; every key but ``name`` is a knob, a field of the rule's dataclass."""

    name: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)


@settings(bare="name", rest="knobs")
class CorrectionSettings:
    """``correction``: a sampler correction and its knobs. The correction is given by its name, as
    ``"module:attribute"``, as a class or as a callable; every key but ``name`` is a knob, a field of the correction's
    dataclass."""

    name: Any = None
    knobs: dict[str, Any] = field(default_factory=dict)


@settings(bare="estimator")
class KLSettings:
    """``kl``: the KL penalty against the reference model.

    Args:
        estimator: ``k1``, ``k2`` or ``k3``; in the reward also ``k1_clamped``.
        placement: ``loss``: differentiated; ``reward``: subtracted from the reward, without a gradient.
        coefficient: β; ``None``: TRL's ``beta``.
        ratio_weighted: in the loss: multiply by the importance ratio, gradient included, as TRL's
            ``use_bias_correction_kl``; ``None``: no.
        per: in the reward: ``sequence`` charges a completion before the advantage rule, ``token`` each token after it;
            ``None``: ``sequence``.
        gamma: with ``per: token``: the discount; ``None``: 1.
        target: in the reward: the KL, in nats per completion, to which β is steered, beginning at ``coefficient``.
        rate: with ``target``: how fast β follows; at 0.1, the default, by at most 2% a generation batch.
        horizon: in place of ``rate``: the rate is then the completions of a generation batch divided by this number.
    """

    estimator: Annotated[str, Field(strict=True), must_be("a name, as in {estimator: k2, coefficient: 0.1}")] = "k3"
    placement: str = "loss"
    coefficient: Number | None = None
    ratio_weighted: Switch | None = None
    per: str | None = None
    gamma: Number | None = None
    target: Number | None = None
    rate: Number | None = None
    horizon: Number | None = None

    def __post_init__(self) -> None:
        if self.per is not None and self.placement == "loss":
            raise ValueError("`kl.per` has no effect with `kl.placement: loss`: every token pays anyway; leave it out")
        if self.gamma is not None and self.per != "token":
            raise ValueError("`kl.gamma` has an effect only with `kl.per: token`; leave it out")
        for name in ("rate", "horizon"):
            if getattr(self, name) is not None and self.target is None:
                raise ValueError(f"`kl.{name}` has an effect only with `kl.target`; leave it out, or set a target")


Above = Annotated[Number, Field(gt=0, allow_inf_nan=False), must_be("a finite number above 0")]


@settings(bare="model")
class ValueSettings:
    """``value``: the critic. Every field has a default, so that ``value: {}`` is a whole setting.

    Args:
        model: ``head``: a linear layer on the policy's last hidden states. ``copy``: a network of its own, which starts
            as a copy of the policy's. A folder or hub name: that network, with the policy's vocabulary.
        learning_rate: of the critic; ``None``: the policy's ``learning_rate``. The schedule is the same.
        vf_coef: c in policy loss + c · value loss.
        cliprange_value: how far a value may move from the one at generation; ``None``: no clipping.
        gamma: discount per generated token; ``None``: the advantage rule's, 1.
        lam: λ of GAE; ``None``: the advantage rule's, 0.95.
        whiten_rewards: divide the tokens' rewards by their standard deviation; their mean is kept.
        whiten_advantages: scale advantages to mean 0 and standard deviation 1, over all ranks' tokens.
        warmup_steps: number of optimizer steps at the start in which only the critic learns.
        missing_eos_penalty: a number above 0, subtracted from the reward of a completion that did not end by itself.
    """

    model: Annotated[str, Field(strict=True, min_length=1), must_be("head, copy, a folder or a hub name")] = "head"
    learning_rate: Above | None = None
    vf_coef: Annotated[Above, NULL_IS_DEFAULT] = 0.1
    cliprange_value: Above | None = CLIPRANGE
    gamma: Number | None = None
    lam: Number | None = None
    whiten_rewards: Annotated[Switch, NULL_IS_DEFAULT] = False
    whiten_advantages: Annotated[Switch, NULL_IS_DEFAULT] = True
    warmup_steps: Annotated[Count, NULL_IS_DEFAULT] = 0
    missing_eos_penalty: Above | None = None

    def in_words(self) -> str:
        """Return ``model`` and the settings that are not defaults as text, for ``Algorithm.describe``. The discounts
        are left out: the advantage rule shows them."""
        said = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("model", "gamma", "lam")
        }
        changed = [f"{name}={value}" for name, value in said.items() if value != getattr(ValueSettings, name)]
        return ", ".join([self.model, *changed])


Budget = Annotated[int, Field(ge=0, strict=True), must_be("a number of tokens, 0 or more, or null for no budget")]
Segment = Annotated[int, BeforeValidator(_digits), Field(ge=1, strict=True), must_be("a number of tokens (at least 1)")]
Ahead = Annotated[Literal[0, 1], BeforeValidator(_digits), must_be("0, or 1: one generation batch ahead")]
Text = Annotated[str, Field(strict=True), must_be("a text that closes the thinking")]
FileName = Annotated[str, Field(strict=True, min_length=1), must_be("the name of a file")]
Gone = Annotated[
    None,
    must_be("left out: whoever runs the server (systemd, Slurm, …) starts it again, and `return_timeout` waits for it"),
]


@settings()
class ServerSettings:
    """``rollout.server``: the connection to the vLLM server, beside TRL's settings ``vllm_server_*``.

    Args:
        weights: how weights are sent: ``nccl``, ``shared_memory``, or ``auto``: NCCL between two GPUs, else shared
            memory.
        request_timeout: seconds without an answer after which a request counts as failed. A generation is one request:
            it must be longer than the longest generation.
        silence_timeout: seconds without a sign of work after which a wait ends. A generation shows none while the
            server counts no new token or sleeps; any other request shows none until its answer.
        retries: how often a failed request is sent again (not after ``request_timeout``).
        backoff: seconds before the second repetition; doubled each time.
        token_file: file with the server's token; null: ``GRPO_LAB_SERVER_TOKEN`` in the environment, else the file that
            ``grpo-lab serve`` makes for the address. The token itself is never a setting.
        return_timeout: seconds within which a server that was lost must answer again; null: a lost server ends the run.
    """

    weights: Literal["auto", "nccl", "shared_memory"] = "auto"
    request_timeout: Seconds = 1800.0
    silence_timeout: Seconds = 180.0
    retries: Count = 4
    backoff: Seconds = 1.0
    token_file: FileName | None = None
    restart: Gone = None
    return_timeout: Seconds | None = None


@settings()
class RolloutSettings:
    """``rollout``: how completions are made, beside TRL's ``use_vllm``, ``vllm_mode`` and sampling settings.

    Args:
        verify_every: optimizer steps between checks of the weight sync, after the first two syncs; 0: never.
        sync: which weights are sent: ``merged``: all, LoRA merged; ``adapter``: LoRA's adapter alone.
        tolerance: largest mean |engine − trainer| of log-probs in that check, in nats per token; ``None``: float32 1e-4
            (on a GPU 1e-3), float16 0.02, bfloat16 0.1.
        engine: options of the engine (``dtype``, ``max_model_len``, ``kv_cache_gib``, ``block_size``, ``seed``, …).
        server: the connection to a server (``ServerSettings``).
        thinking_budget: tokens of thinking after which ``budget_text`` is inserted, with any engine; ``None``: none.
        budget_text: what is inserted; ``None``: the text of Qwen's documentation (``QWEN3_STOP_TEXT``).
        generate: how the model generates without an engine: ``groups``: each prompt is computed once and finished rows
            leave the batch; ``compiled``: the same in compiled forwards, for a GPU; ``stock``: TRL's own call;
            ``auto``: ``groups`` if ``objective`` is set and the model's cache allows it.
        overlap: generation batches that a vLLM server (``vllm_mode: server``) generates ahead of the training: 0 or 1.
            With 1 the sampler correction is required (by default ``token_truncate``).
        cut_after: with ``use_vllm``: tokens after which an unfinished completion is put aside, to be continued with the
            next generation batch. The sampler correction is required. ``None``: the whole batch is waited for.
        turns: with ``tools`` or an environment: every trajectory goes on as soon as its own tools have answered, within
            the limits of ``TurnSettings``; ``{}``: with their defaults; ``None``: TRL's loop, in which all wait.
    """

    verify_every: Count = 50
    sync: Literal["merged", "adapter"] = "merged"
    tolerance: Number | None = None
    engine: Mapping[str, Any] | None = None
    server: Annotated[ServerSettings, NULL_IS_DEFAULT] = field(default_factory=ServerSettings)
    thinking_budget: Budget | None = None
    budget_text: Text | None = None
    generate: Literal["auto", "groups", "compiled", "stock"] = "auto"
    overlap: Annotated[Ahead, NULL_IS_DEFAULT] = 0
    cut_after: Segment | None = None
    turns: TurnSettings | None = None

    def __post_init__(self) -> None:
        EngineOptions.from_mapping(self.engine or {})
        if self.budget_text is not None and self.thinking_budget is None:
            raise ValueError("`rollout.budget_text` has an effect only with `rollout.thinking_budget`; leave it out")

    @property
    def earlier_policy(self) -> Literal["overlap", "cut_after"] | None:
        """``cut_after`` or ``overlap``, whichever lets the run train on completions of an earlier policy; else None."""
        if self.cut_after is not None:
            return "cut_after"
        return "overlap" if self.overlap else None


ReferenceEvery = Annotated[
    Literal["generation"] | Annotated[int, BeforeValidator(_digits), Field(ge=1, strict=True)],
    must_be("a number of optimizer steps (at least 1), or 'generation': before every generation batch"),
]
StopFile = Annotated[
    str,
    BeforeValidator(_path_of_a_file),
    must_be("the path of a file, there or not yet, or left out (STOP in `output_dir`)"),
]


@settings()
class LabSettings:
    """All settings that ``LabConfig`` adds to TRL's, parsed and checked. ``None``: not set."""

    objective: ObjectiveSettings | None = None
    advantage: AdvantageSettings | None = None
    correction: CorrectionSettings | None = None
    kl: KLSettings | None = None
    value: ValueSettings | None = None
    update: Annotated[UpdateSettings, NULL_IS_DEFAULT] = field(default_factory=UpdateSettings)
    rollout: Annotated[RolloutSettings, NULL_IS_DEFAULT] = field(default_factory=RolloutSettings)
    sampler: SamplerSettings | None = None
    tasks: Annotated[Mapping[str, TaskSettings], NULL_IS_DEFAULT] = field(default_factory=dict)
    guard: GuardSettings | None = None
    reward_schedules: Annotated[Mapping[str, Schedule], BeforeValidator(reward_schedules)] = field(default_factory=dict)
    reset_optimizer: OnlySwitch | None = None
    reference_every: ReferenceEvery | None = None
    max_hours: Hours | None = None
    stop_file: StopFile | None = None
    save_checksums: OnlySwitch | None = None
    profile: OnlySwitch | None = None
    token_weights_every: Positive | None = None

    @property
    def randomness(self) -> str:
        """``update.randomness`` in force, ``same_distribution`` or ``same_draws``: the latter by default without
        ``objective`` or with ``update: off``."""
        drop_in = self.objective is None or self.update.is_off
        return self.update.randomness or ("same_draws" if drop_in else "same_distribution")

    @property
    def guard_in_force(self) -> GuardSettings | None:
        """Settings of the guard if it is on, else None. It is on if it was set and not to ``off``; if it was not set,
        with ``objective`` alone, since stock TRL has no guard."""
        if self.guard is None:
            if self.objective is None:
                return None
            return GuardSettings()
        if self.guard.is_off:
            return None
        return self.guard

    @property
    def keeps_nan(self) -> bool:
        """Whether NaN and infinities may be saved in checkpoints: only if ``guard: off`` is set."""
        return self.guard is not None and self.guard.is_off


OUR_FIELDS: tuple[str, ...] = tuple(LabSettings.__dataclass_fields__)
"""Names of the fields that ``LabConfig`` adds to TRL's."""
