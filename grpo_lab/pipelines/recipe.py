"""A recipe: one short YAML that says everything a run is.

Our sections are ``model``, ``data``, ``rewards``, ``cold_start``, ``evaluation``, ``eval_dataset``, ``callbacks``, ``tools``,
``environment_factory``, plus ``name`` and ``trainer``; every other key is a field of ``LabConfig``, flat, as TRL users write it.
A recipe is arguments, not a program.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.recipe_file import read_yaml

SECTIONS = (
    "name", "trainer", "model", "data", "rewards", "cold_start", "evaluation", "eval_dataset", "callbacks", "tools",
    "environment_factory",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSection:
    """``model``: where the policy comes from.

    Args:
        path: local folder or hub name. Exactly one of ``path`` and ``tiny``.
        tiny: arguments of ``grpo_lab.testing.tiny_model``: a small random model of a real architecture.
        tokenizer: another tokenizer's folder (default: the model's own).
        lora: arguments of ``peft.LoraConfig``; ``None`` trains all weights.
        expected: the public before/after number of this model, for ``--dry-run`` and the report.
    """

    path: str | None = None
    tiny: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    lora: Mapping[str, Any] | None = None
    expected: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.tiny is None):
            raise ValueError(
                "`model` needs exactly one of `path` (folder or hub name) and `tiny` (a model built from config)"
            )

    @property
    def name(self) -> str:
        return self.path or f"tiny {(self.tiny or {}).get('architecture', 'qwen2')}"


@dataclass(frozen=True)
class DataSection:
    """Rows: ``loader`` (``file``, ``gsm8k``, ``math``, ``word_problems``) with the loader's own arguments.

    Args:
        loader: which loader of ``grpo_lab.data``.
        template: prompt template (``r1``, ``qwen_math``, ``none``, ``chat``); scores move by tens of points with it.
        limit: keep the first ``limit`` rows.
        arguments: everything else, handed to the loader (``source``, ``split``, ``n``, ``seed``, ``steps``, …).
    """

    loader: str
    template: str
    limit: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardSection:
    """One reward: registered name, ``"module:attribute"`` or a reward model's folder or hub name; its weight, its arguments."""

    name: str
    weight: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


STRICT_ACCURACY = RewardSection("accuracy", arguments={"mode": "strict"})
"""What judges answers where a recipe does not say."""


@dataclass(frozen=True)
class PartSection:
    """Something of a team's, ``"module:attribute"``, with its arguments: a callback, a tool, an environment."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ColdStartSection:
    """``cold_start``: supervised start on worked solutions with TRL's SFTTrainer.

    Args:
        data: rows with a column ``worked_solution``.
        arguments: fields of ``trl.SFTConfig`` (``max_steps``, ``learning_rate``, …).
    """

    data: DataSection
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationSection:
    """``evaluation``: held-out rows, greedy (and sampled) accuracy before and after.

    Args:
        data: held-out rows.
        reward: how answers are judged, as in ``rewards`` (default: strict accuracy).
        max_new_tokens, batch_size, n_samples, temperature: of the generation; tokens, rows, completions a problem.
        before: also evaluate the model that RL starts from.
    """

    data: DataSection
    reward: RewardSection = STRICT_ACCURACY
    max_new_tokens: int | None = None
    batch_size: int = 128
    n_samples: int = 0
    temperature: float = 1.0
    before: bool = True

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("n_samples", 0)):
            if name != "max_new_tokens" or self.max_new_tokens is not None:
                require_whole(f"evaluation.{name}", getattr(self, name), least)
        heat = self.temperature
        if isinstance(heat, bool) or not isinstance(heat, int | float) or not 0 < heat < math.inf:
            raise ValueError(f"`evaluation.temperature` is {heat!r}; it must be a finite number above 0")
        if not isinstance(self.before, bool):
            raise ValueError(f"`evaluation.before` is {self.before!r}; it must be true or false")


@dataclass(frozen=True)
class Recipe:
    """A whole run. ``arguments`` are ``LabConfig``'s.

    Args:
        eval_dataset: rows that TRL evaluates on during training, by the training rewards (``eval_strategy``).
        callbacks, tools, environment_factory: as the arguments of these names of ``trl.GRPOTrainer``.
    """

    name: str
    model: ModelSection
    data: DataSection
    rewards: tuple[RewardSection, ...]
    trainer: str = "LabTrainer"
    cold_start: ColdStartSection | None = None
    evaluation: EvaluationSection | None = None
    eval_dataset: DataSection | None = None
    callbacks: tuple[PartSection, ...] = ()
    tools: tuple[PartSection, ...] = ()
    environment_factory: PartSection | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output_dir(self) -> Path:
        return Path(str(self.arguments.get("output_dir") or f"runs/{self.name}"))


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in ``path`` with ``--key value`` overrides (dotted keys reach into sections).

    Raises:
        ValueError: no such file, not a mapping, unknown or misspelt key (with the nearest match), missing section.
    """
    written = read_yaml(path, overrides)
    return recipe_from(written, default_name=Path(path).stem)


def recipe_from(written: Mapping[str, Any], default_name: str = "run") -> Recipe:
    """A recipe from a plain mapping; see ``read_recipe``."""
    for section in ("model", "data", "rewards"):
        if section not in written:
            raise ValueError(f"the recipe has no section `{section}`; it needs model, data and rewards")
    rewards = written["rewards"]
    evaluation, cold_start, environment, eval_rows = (
        written.get(name) for name in ("evaluation", "cold_start", "environment_factory", "eval_dataset")
    )
    if not isinstance(rewards, list | tuple):
        raise ValueError(
            f"`rewards` is {rewards!r}; it must be a list, each a name or a mapping {{name: …, weight: …, …}}"
        )
    return Recipe(
        name=str(written.get("name", default_name)),
        trainer=str(written.get("trainer", "LabTrainer")),
        model=section_of(ModelSection, written["model"], "model"),
        data=data_section(written["data"], "data"),
        rewards=tuple(reward_section(entry) for entry in rewards),
        cold_start=None if cold_start is None else _cold_start(cold_start),
        evaluation=None if evaluation is None else evaluation_section(evaluation),
        eval_dataset=None if eval_rows is None else data_section(eval_rows, "eval_dataset"),
        callbacks=_parts(written.get("callbacks"), "callbacks"),
        tools=_parts(written.get("tools"), "tools"),
        environment_factory=None if environment is None else part_section(environment, "environment_factory"),
        arguments={key: value for key, value in written.items() if key not in SECTIONS},
    )


def data_section(written: Any, where: str) -> DataSection:
    """Rows as a recipe describes them at ``where``. ValueError for another form."""
    if not isinstance(written, Mapping) or "loader" not in written:
        raise ValueError(
            f"`{where}` is {written!r}; it must be a mapping with a `loader` (file, gsm8k, math, word_problems)"
        )
    rest = {key: value for key, value in written.items() if key not in ("loader", "template", "limit")}
    if "steps" in rest:
        if not isinstance(rest["steps"], list | tuple):
            raise ValueError(f"`{where}.steps` is {rest['steps']!r}; it must be two numbers, [fewest, most]")
        rest["steps"] = tuple(rest["steps"])
    limit = whole(written.get("limit"))
    if limit is not None:
        require_whole(f"{where}.limit", limit, 1)
    return DataSection(str(written["loader"]), str(written.get("template", "chat")), limit, rest)


def reward_section(written: Any) -> RewardSection:
    """A reward, written as a name or as a mapping. ValueError for another form."""
    if isinstance(written, str):
        return RewardSection(written)
    if isinstance(written, Mapping) and "name" in written:
        rest = {key: value for key, value in written.items() if key not in ("name", "weight")}
        weight = written.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"`weight` of reward {written['name']!r} is {weight!r}; it must be a number")
        return RewardSection(str(written["name"]), float(weight), rest)
    raise ValueError(f"`rewards` holds {written!r}; each is a name or a mapping {{name: …, weight: …, …}}")


def part_section(written: Any, where: str) -> PartSection:
    """A callback, tool or environment, written as ``"module:attribute"`` or as a mapping. ValueError for another form."""
    section = {"name": written} if isinstance(written, str) else written
    if not isinstance(section, Mapping) or ":" not in str(section.get("name", "")):
        raise ValueError(
            f"`{where}` holds {written!r}; it must be 'module:attribute' or {{name: 'module:attribute', …}}"
        )
    return PartSection(str(section["name"]), {key: value for key, value in section.items() if key != "name"})


def _parts(written: Any, where: str) -> tuple[PartSection, ...]:
    if written is not None and not isinstance(written, list | tuple):
        raise ValueError(f"`{where}` is {written!r}; it must be a list")
    return tuple(part_section(entry, where) for entry in written or ())


def _cold_start(written: Mapping[str, Any]) -> ColdStartSection:
    _require_mapping(written, "cold_start")
    if "data" not in written:
        raise ValueError("`cold_start` has no `data`; it needs rows with worked solutions")
    rest = {key: value for key, value in written.items() if key != "data"}
    return ColdStartSection(data_section(written["data"], "cold_start.data"), rest)


def evaluation_section(written: Mapping[str, Any]) -> EvaluationSection:
    """``evaluation`` of a recipe. ValueError for a missing ``data`` or an unknown key."""
    _require_mapping(written, "evaluation")
    if "data" not in written:
        raise ValueError("`evaluation` has no `data`; it needs held-out rows")
    numbers = {name: whole(written[name]) for name in ("max_new_tokens", "batch_size", "n_samples") if name in written}
    changed = {**written, **numbers, "data": data_section(written["data"], "evaluation.data")}
    if "reward" in written:
        changed["reward"] = reward_section(written["reward"])
    section: EvaluationSection = section_of(EvaluationSection, changed, "evaluation")
    return section


def section_of(kind: Any, written: Any, where: str) -> Any:
    """``written`` as the dataclass ``kind``. ValueError for an unknown key, with the nearest known one."""
    _require_mapping(written, where)
    allowed = [f.name for f in fields(kind)]
    for key in written:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"`{where}` has no setting {key!r}{hint}; allowed: {allowed}")
    return kind(**written)


def whole(value: Any) -> Any:
    """``1e3`` as the whole number that it is; anything else as it was."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_whole(name: str, value: Any, least: int) -> None:
    """ValueError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` is {value!r}; it must be a whole number of at least {least}")


def _require_mapping(written: Any, where: str) -> None:
    if not isinstance(written, Mapping):
        raise ValueError(f"`{where}` is {written!r}; it must be a mapping of settings")
