"""A recipe of `grpo-lab long2short`: which model, which way, which problems to sample on.

The names in `SECTIONS` are sections; every other key is one of `SamplingSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.recipe import (
    STRICT_ACCURACY,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    data_section,
    evaluation_section,
    reward_section,
    section_of,
)
from grpo_lab.pipelines.recipe_file import read_yaml
from grpo_lab.pipelines.sampler import SamplingSettings

METHODS = ("shortest_sft", "dpo", "simpo", "merge")
SECTIONS = (
    "name",
    "method",
    "model",
    "short_model",
    "alpha",
    "data",
    "reward",
    "pairs",
    "samples",
    "training",
    "evaluation",
    "output_dir",
)


@dataclass(frozen=True)
class PairSettings:
    """``pairs``: of `preference_pairs`, for ``dpo`` and ``simpo``."""

    ratio: float = 1.5
    wrong_must_be_longer: bool = False
    pairs_per_problem: int | None = None


@dataclass(frozen=True)
class Long2ShortRecipe:
    """A whole long2short run.

    Args:
        method: one of ``METHODS``.
        model: the long-winded one, a saved model.
        short_model, alpha: for ``merge``: the other model, and the share of ``model`` in the average.
        data: problems to sample on; not for ``merge``.
        samples: file of the samples, which several methods may share; default: ``samples.jsonl`` in the folder.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``.
    """

    name: str
    method: str
    model: ModelSection
    data: DataSection | None = None
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(n_samples=8))
    pairs: PairSettings | None = None
    samples: str | None = None
    short_model: str | None = None
    alpha: float = 0.5
    training: Mapping[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` is {self.method!r}; it must be one of {METHODS}")
        if self.model.path is None:
            raise ValueError("`model` is a saved one: give `path`, a folder or hub name")
        if (self.method == "merge") != (self.short_model is not None):
            raise ValueError("`short_model` is needed with `method: merge`, and has an effect there only")
        if (self.method == "merge") == (self.data is not None):
            raise ValueError("`data` is needed to sample on, and has no effect with `method: merge`")
        if self.method == "merge" and self.training:
            raise ValueError("`training` has no effect with `method: merge`, which trains nothing; leave it out")
        if self.pairs is not None and self.method not in ("dpo", "simpo"):
            raise ValueError(f"`pairs` has no effect with `method: {self.method}`; leave it out")

    @property
    def output_dir(self) -> Path:
        return Path(self.output or f"runs/{self.name}")


def read_long2short_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Long2ShortRecipe:
    """The recipe in ``path`` with ``--key value`` overrides. ValueError as `long2short_recipe_from`."""
    return long2short_recipe_from(read_yaml(path, overrides), Path(path).stem)


def long2short_recipe_from(written: Mapping[str, Any], default_name: str = "long2short") -> Long2ShortRecipe:
    """A recipe from a plain mapping. ValueError for an unknown key or a missing section."""
    for name in ("method", "model"):
        if name not in written:
            raise ValueError(f"the recipe has no `{name}`; long2short needs method and model")
    rest = {key: value for key, value in written.items() if key not in SECTIONS}
    parsed: dict[str, Any] = {
        "name": str(written.get("name", default_name)),
        "method": str(written["method"]),
        "model": section_of(ModelSection, written["model"], "model"),
        "sampling": section_of(SamplingSettings, {"n_samples": 8, **rest}, "the recipe"),
        "training": dict(written.get("training") or {}),
        "output": written.get("output_dir"),
    }
    readers: dict[str, Any] = {
        "data": lambda value: data_section(value, "data"),
        "reward": reward_section,
        "pairs": lambda value: section_of(PairSettings, value, "pairs"),
        "evaluation": evaluation_section,
        "samples": str,
        "short_model": str,
        "alpha": float,
    }
    parsed |= {name: read(written[name]) for name, read in readers.items() if written.get(name) is not None}
    return Long2ShortRecipe(**parsed)
