"""A recipe of `grpo-lab long2short`: which model, which way, which problems to sample on.

The fields of `Long2ShortRecipe` are sections; every other key is one of `SamplingSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lab.recipe.sections import (
    STRICT_ACCURACY,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    with_name,
)
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, Number, Positive, Switch, read, settings


@settings()
class PairSettings:
    """``pairs``: of `preference_pairs`, for ``dpo`` and ``simpo``."""

    ratio: Number = 1.5
    wrong_must_be_longer: Switch = False
    pairs_per_problem: Positive | None = None


@settings(rest="sampling")
class Long2ShortRecipe:
    """A whole long2short run.

    Args:
        method: ``shortest_sft``, ``dpo``, ``simpo`` or ``merge``.
        model: the long-winded one, a saved model.
        short_model, alpha: for ``merge``: the other model, and the share of ``model`` in the average.
        data: problems to sample on; not for ``merge``.
        samples: file of the samples, which several methods may share; default: ``samples.jsonl`` in the folder.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``.
        max_hours, stop_file: as in a recipe of `grpo-lab train`: what asks the run to stop (docs/resume.md).
    """

    name: str
    output_dir: Path
    method: Literal["shortest_sft", "dpo", "simpo", "merge"]
    model: ModelSection
    data: DataSection | None = None
    reward: Annotated[RewardSection, NULL_IS_DEFAULT] = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(n_samples=8))
    pairs: PairSettings | None = None
    samples: str | None = None
    short_model: str | None = None
    alpha: Annotated[Number, NULL_IS_DEFAULT] = 0.5
    training: Annotated[Mapping[str, Any], NULL_IS_DEFAULT] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None
    max_hours: Hours | None = None
    stop_file: str | None = None

    def __post_init__(self) -> None:
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


def read_long2short_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Long2ShortRecipe:
    """The recipe in ``path`` with ``--key value`` overrides. ValueError as `long2short_recipe_from`."""
    return long2short_recipe_from(read_yaml(path, overrides), Path(path).stem)


def long2short_recipe_from(written: Mapping[str, Any], default_name: str = "long2short") -> Long2ShortRecipe:
    """A recipe from a plain mapping. ValueError for an unknown key or a missing section."""
    check_command(written, "long2short")
    return read(Long2ShortRecipe, {"n_samples": 8, **with_name(written, default_name)})
