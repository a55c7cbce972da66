"""A recipe of `grpo-lab curate`: which rows, which model measures them, which filters they go through.

`name`, `model`, `data`, `reward`, `filters` and `output_dir` are sections; every other key is one of
`SamplingSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from grpo_lab.curation.kinds import KINDS
from grpo_lab.recipe.sections import (
    STRICT_ACCURACY,
    DataSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    with_name,
)
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import NULL_IS_DEFAULT, Count, Hours, Number, Positive, must_be, read, settings


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@settings()
class KindFilter:
    """``kind``: keep these kinds of question (`question_kind`)."""

    keep: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ("open",)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.keep) - set(KINDS)):
            raise ValueError(f"`filters.kind.keep` holds {unknown}; kinds are {list(KINDS)}")


@settings()
class DuplicateFilter:
    """``duplicates``: least word similarity of a near duplicate (`deduplicate`)."""

    similarity: Number = 0.85


@settings()
class ContaminationFilter:
    """``contamination``: evaluation sets as data sections, and the rules of `find_contamination`."""

    against: Annotated[tuple[DataSection, ...], Field(min_length=1)]
    ngram: Positive = 13
    similarity: Number = 0.7


@settings()
class BandFilter:
    """``band``: low < pass rate < high, both ends out (`keep_band`)."""

    low: Number = 0.0
    high: Number = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(
                f"`filters.band` is low={self.low!r}, high={self.high!r}; two numbers with low < high are needed"
            )


@settings()
class GuessFilter:
    """``guessable``: out if right in one of ``tries`` answers without reasoning, of at most ``max_new_tokens``."""

    tries: Positive = 8
    max_new_tokens: Positive = 32


@settings()
class BalanceFilter:
    """``balance``: rows a value of the column ``by`` may keep (`balance`); None: as many as the smallest has."""

    by: str
    per_domain: Annotated[
        Count | dict[str, Count] | None, must_be("a whole number of at least 0, or one for each domain")
    ] = None


@settings()
class Filters:
    """Which filters run, in this order; None leaves one out."""

    kind: KindFilter | None = None
    duplicates: DuplicateFilter | None = None
    contamination: ContaminationFilter | None = None
    band: BandFilter | None = None
    guessable: GuessFilter | None = None
    balance: BalanceFilter | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _switched(cls, written: Any) -> Any:
        """`true` is a filter as it is by default, `false` leaves it out."""
        return {True: {}, False: None}[written] if isinstance(written, bool) else written


@settings(rest="sampling")
class CurationRecipe:
    """A whole curation. Without `model` only the filters that read text run, and no pass rate is measured.

    `max_hours` and `stop_file` ask it to stop, as in a recipe of `grpo-lab train` (docs/resume.md).
    """

    name: str
    output_dir: Path
    data: DataSection
    filters: Annotated[Filters, NULL_IS_DEFAULT] = field(default_factory=Filters)
    model: ModelSection | None = None
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    max_hours: Hours | None = None
    stop_file: str | None = None

    def __post_init__(self) -> None:
        if self.model is None and (self.filters.band or self.filters.guessable):
            raise ValueError("`filters.band` and `filters.guessable` need a `model` to measure with; add one")
        if self.model is not None and self.model.path is None:
            raise ValueError("`model` of a curation is a saved one: give `path`, a folder or hub name")


def read_curation_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> CurationRecipe:
    """The recipe in ``path`` with ``--key value`` overrides. ValueError as `curation_recipe_from`."""
    return curation_recipe_from(read_yaml(path, overrides), Path(path).stem)


def curation_recipe_from(written: Mapping[str, Any], default_name: str = "curation") -> CurationRecipe:
    """A recipe from a plain mapping.

    Raises: ValueError for an unknown or misspelt key (with the nearest match) or a missing section.
    """
    check_command(written, "curate")
    return read(CurationRecipe, with_name(written, default_name))
