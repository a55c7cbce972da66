"""A recipe of `grpo-lab curate`: which rows, which model measures them, which filters they go through.

`name`, `model`, `data`, `reward`, `filters` and `output_dir` are sections; every other key is one of `SamplingSettings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_lab.curation.kinds import KINDS
from grpo_lab.pipelines.recipe import (
    STRICT_ACCURACY,
    DataSection,
    ModelSection,
    RewardSection,
    data_section,
    require_whole,
    reward_section,
    section_of,
)
from grpo_lab.pipelines.recipe_file import read_yaml
from grpo_lab.pipelines.sampler import SamplingSettings

_SECTIONS = ("name", "model", "data", "reward", "filters", "output_dir")


@dataclass(frozen=True)
class KindFilter:
    """``kind``: keep these kinds of question (`question_kind`)."""

    keep: tuple[str, ...] = ("open",)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.keep) - set(KINDS)):
            raise ValueError(f"`filters.kind.keep` holds {unknown}; kinds are {list(KINDS)}")


@dataclass(frozen=True)
class DuplicateFilter:
    """``duplicates``: least word similarity of a near duplicate (`deduplicate`)."""

    similarity: float = 0.85


@dataclass(frozen=True)
class ContaminationFilter:
    """``contamination``: evaluation sets as data sections, and the rules of `find_contamination`."""

    against: tuple[DataSection, ...]
    ngram: int = 13
    similarity: float = 0.7


@dataclass(frozen=True)
class BandFilter:
    """``band``: low < pass rate < high, both ends out (`keep_band`)."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (self.low, self.high))
        if not (numbers and self.low < self.high):
            raise ValueError(
                f"`filters.band` is low={self.low!r}, high={self.high!r}; two numbers with low < high are needed"
            )


@dataclass(frozen=True)
class GuessFilter:
    """``guessable``: out if right in one of ``tries`` answers without reasoning, of at most ``max_new_tokens``."""

    tries: int = 8
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("tries", "max_new_tokens"):
            require_whole(f"filters.guessable.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class BalanceFilter:
    """``balance``: rows a value of the column ``by`` may keep (`balance`); None: as many as the smallest has."""

    by: str
    per_domain: Any = None

    def __post_init__(self) -> None:
        shares = self.per_domain if isinstance(self.per_domain, Mapping) else {"": self.per_domain}
        for domain, share in shares.items():
            if self.per_domain is not None:
                require_whole(f"filters.balance.per_domain{domain and f'.{domain}'}", share, 0)


@dataclass(frozen=True)
class Filters:
    """Which filters run, in this order; None leaves one out."""

    kind: KindFilter | None = None
    duplicates: DuplicateFilter | None = None
    contamination: ContaminationFilter | None = None
    band: BandFilter | None = None
    guessable: GuessFilter | None = None
    balance: BalanceFilter | None = None


@dataclass(frozen=True)
class CurationRecipe:
    """A whole curation. Without `model` only the filters that read text run, and no pass rate is measured."""

    name: str
    data: DataSection
    filters: Filters
    model: ModelSection | None = None
    reward: RewardSection = STRICT_ACCURACY
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    output: str | None = None

    def __post_init__(self) -> None:
        if self.model is None and (self.filters.band or self.filters.guessable):
            raise ValueError("`filters.band` and `filters.guessable` need a `model` to measure with; add one")
        if self.model is not None and self.model.path is None:
            raise ValueError("`model` of a curation is a saved one: give `path`, a folder or hub name")

    @property
    def output_dir(self) -> Path:
        return Path(self.output or f"runs/{self.name}")


def read_curation_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> CurationRecipe:
    """The recipe in ``path`` with ``--key value`` overrides. ValueError as `curation_recipe_from`."""
    return curation_recipe_from(read_yaml(path, overrides), Path(path).stem)


def curation_recipe_from(written: Mapping[str, Any], default_name: str = "curation") -> CurationRecipe:
    """A recipe from a plain mapping.

    Raises: ValueError for an unknown or misspelt key (with the nearest match) or a missing section.
    """
    if "data" not in written:
        raise ValueError("the recipe has no section `data`; a curation needs rows")
    model, output = written.get("model"), written.get("output_dir")
    rest = {key: value for key, value in written.items() if key not in _SECTIONS}
    reward = {"reward": reward_section(written["reward"])} if "reward" in written else {}
    return CurationRecipe(
        name=str(written.get("name", default_name)),
        data=data_section(written["data"], "data"),
        filters=_filters(written.get("filters") or {}),
        model=None if model is None else section_of(ModelSection, model, "model"),
        sampling=section_of(SamplingSettings, rest, "the recipe"),
        output=None if output is None else str(output),
        **reward,
    )


def _filters(written: Any) -> Filters:
    if not isinstance(written, Mapping):
        raise ValueError(f"`filters` is {written!r}; it must be a mapping of filter to settings")
    kinds = {
        "kind": KindFilter,
        "duplicates": DuplicateFilter,
        "contamination": ContaminationFilter,
        "band": BandFilter,
        "guessable": GuessFilter,
        "balance": BalanceFilter,
    }
    assert set(kinds) == {f.name for f in fields(Filters)}
    given: dict[str, Any] = {}
    for name, value in written.items():
        if value is None or value is False:
            continue
        settings = {} if value is True else value
        where = f"filters.{name}"
        if name == "kind" and isinstance(settings, Mapping) and isinstance(settings.get("keep"), (str, list)):
            keep = settings["keep"]
            settings = {**settings, "keep": (keep,) if isinstance(keep, str) else tuple(keep)}
        if name == "contamination":
            settings = _against(settings, where)
        if name == "balance" and (not isinstance(settings, Mapping) or "by" not in settings):
            raise ValueError("`filters.balance` needs `by`, the column that names the domain")
        given[name] = section_of(kinds[name], settings, where) if name in kinds else settings
    filters: Filters = section_of(Filters, given, "filters")
    return filters


def _against(settings: Any, where: str) -> dict[str, Any]:
    sections = settings.get("against") if isinstance(settings, Mapping) else None
    if not isinstance(sections, list) or not sections:
        raise ValueError(
            f"`{where}.against` is {sections!r}; it must list evaluation sets, each a mapping with a `loader`"
        )
    parsed = tuple(data_section(one, f"{where}.against.{place}") for place, one in enumerate(sections))
    return {**settings, "against": parsed}
