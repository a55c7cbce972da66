"""The structure of our HTML pages: the result, sections with figures, answers and tables; settings last, folded.

Text of models, data and files is not trusted: all of it is made visible and escaped. No page has scripts or loads
anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_lab.evaluation.charts import Figure
from grpo_lab.evaluation.result import EvaluationResult, Outcome
from grpo_lab.evaluation.terminal import duration
from grpo_lab.evaluation.transcript import turns_in
from grpo_lab.io import write_whole_text
from grpo_lab.visible import visible

LONGEST_SHOWN = 4_000

_SHOWN: dict[tuple[bool | None, bool | None], tuple[str, int]] = {
    (False, True): ("became correct", 3),
    (True, False): ("became wrong", 2),
    (False, False): ("still wrong", 2),
    (True, True): ("stayed correct", 2),
}
"""(right before, right after) → heading of such examples, and how many of them are shown. Failures are shown on
purpose, next to the gains."""
SHOWN_OF_ONE_SIDE = 4


class ShownSample(NamedTuple):
    """A problem with what the model wrote before and after; a side that was not evaluated is None."""

    kind: str
    before: Outcome | None
    after: Outcome | None

    @property
    def asked(self) -> Outcome:
        """The outcome that shows the problem: ``after``, or else ``before``."""
        assert self.before or self.after
        return self.after or self.before  # type: ignore[return-value]


class Card(NamedTuple):
    """A number of the result in large print, with its unit, and a note under it."""

    name: str
    value: str
    unit: str = ""
    note: str = ""
    strong: bool = False


class Bar(NamedTuple):
    """A bar of kept and dropped rows. ``full``: how many rows a bar of full length has. ``label``: in a histogram."""

    kept: int
    dropped: int
    full: int
    label: str = ""


@dataclass(frozen=True)
class Table:
    """A table of texts (or a `Bar`). A row's first cell is its heading; the last cell of a short row spans the rest.

    words: columns of running text. stacked: on a phone each row is a list; packed: its cells follow in one line.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    words: Collection[int] = ()
    stacked: bool = True
    packed: bool = False


@dataclass(frozen=True)
class Section:
    """A section of a page; its parts appear in the order of the fields. ``groups``: lists of (name, text), each with
    its heading. ``drawing``: a pipeline's stages as boxes and arrows. ``folded``: if given, the section is closed, and
    shows these words until it is opened."""

    title: str
    lead: str = ""
    counts: Sequence[tuple[str, int]] = ()
    points: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    drawing: SimpleNamespace | None = None
    legend: tuple[str, str] | None = None
    bars: Sequence[Bar] = ()
    samples: Sequence[ShownSample] = ()
    table: Table | None = None
    groups: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    foot: str = ""
    folded: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show; then the section is left out."""
        rows = self.table.rows if self.table else ()
        return not any((self.points, self.figures, self.drawing, self.bars, self.samples, rows, self.groups))


@dataclass(frozen=True)
class Page:
    """A page. ``about``: what it is about, in a line. ``missing``: what was not recorded. ``runs``: of a comparison."""

    kind: str
    title: str
    about: Sequence[str]
    cards: Sequence[Card]
    notices: Sequence[str]
    sections: Sequence[Section]
    missing: Sequence[str] = ()
    runs: str = ""

    def html(self) -> str:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda one: visible(one) if isinstance(one, str) and not isinstance(one, Markup) else one,
        )
        written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return environment.get_template("page.html.j2").render(
            page=self, written=written, longest=LONGEST_SHOWN, turns_in=turns_in
        )

    def write(self, path: str | Path) -> Path:
        """Write the page; return its path. Raises ValueError if ``path`` cannot be written, OSError if the disk is
        full."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole_text(path, self.html())
        except (PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            raise ValueError(f"{path} cannot be written ({error.strerror})") from error
        return path


_FIRST = ["model", "data", "template", "objective", "advantage", "steps", "seed", "seconds", "started", "device"]
_NAMES = {"seconds": "time"}
_UNITS = {
    **dict.fromkeys(["max_completion_length", "max_new_tokens", "max_length", "max_prompt_length"], "tokens"),
    **dict.fromkeys(["trained", "max_steps"], "steps"),
    "max_hours": "h",
}


def settings_section(summary: Mapping[str, Any]) -> Section:
    """Make a folded section of run.json: first its plain values, then a list for each mapping or list of mappings."""
    plain: list[tuple[str, str]] = []
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for key in sorted(summary, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        value = summary[key]
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            value = {str(place): text_of("", one) for place, one in enumerate(value, start=1)}
        if isinstance(value, Mapping) and value:
            said = [(name, text_of(key if key == "seconds" else name, one)) for name, one in flat(value)]
            groups.append((_NAMES.get(key, str(key).replace("_", " ")), said))
        elif key not in ("name", "finished", "left"):  # shown as the heading, or in notices
            plain.append((_NAMES.get(key, str(key).replace("_", " ")), text_of(key, value)))
    found = [*([("run", plain)] if plain else []), *groups]
    return Section("Settings", groups=found, folded="what was run, and with what")


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) from nested mappings; an empty mapping counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def text_of(key: object, value: Any, inside: bool = False) -> str:
    """Format a value of run.json for a reader, with the unit of the dotted ``key``. Each mapping of a list gets a
    line."""
    key = str(key).rpartition(".")[2]
    if isinstance(value, Mapping):
        said = ", ".join(f"{name}: {text_of(name, inner, True)}" for name, inner in value.items())
        if inside and said:
            return f"({said})"
        return said or "none"
    if isinstance(value, list):
        if inside or not any(isinstance(one, Mapping | list) for one in value):
            between = ", "
        else:
            between = "\n"
        return between.join(text_of("", one, between == ", ") for one in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if not isinstance(value, int | float):
        return str(value)
    if key == "seconds" and abs(value) < 1e12:
        return duration(value)
    if isinstance(value, float):
        said = f"{value:.6g}"
    elif "seed" in key:
        said = str(value)
    else:
        said = f"{value:,}"
    if key in _UNITS:
        return f"{said} {_UNITS[key]}"
    return said


def about(settings: Mapping[str, Any], *keys: str) -> list[str]:
    """Return the values of these keys in words, to say what was run."""
    found = []
    for key in keys:
        value = settings.get(key)
        if key == "seconds" and isinstance(value, Mapping):
            value = sum(one for one in value.values() if isinstance(one, int | float))
        elif isinstance(value, Mapping):
            value = value.get("loader", value.get(key, value.get("name")))
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            found.append(f"{text_of(key, value)}{' rows' if key == 'rows' else ''}")
    return found


def choose_samples(
    before: EvaluationResult | None, after: EvaluationResult | None
) -> tuple[list[ShownSample], list[tuple[str, int]], bool]:
    """Choose the problems to show. Return the first of each kind in the order of the rows, the number of each kind, and
    whether both evaluations are about the same problems. If they share none: the first of each verdict of one side."""
    old, new = ({} if one is None else {outcome.problem: outcome for outcome in one.greedy} for one in (before, after))
    shared = sorted(old.keys() & new.keys())
    if not shared:
        return _first_of_verdicts([ShownSample("", old.get(i), new.get(i)) for i in sorted(old or new)]), [], True
    if any(old[i].question != new[i].question for i in shared):
        return _first_of_verdicts([ShownSample("", None, new[i]) for i in sorted(new)]), [], False
    members: dict[str, list[ShownSample]] = {name: [] for name, _ in _SHOWN.values()}
    for i in shared:
        kind, _ = _SHOWN.get((old[i].correct, new[i].correct), ("unscorable", 1))
        members.setdefault(kind, []).append(ShownSample(kind, old[i], new[i]))
    most = dict(_SHOWN.values())
    samples = [one for kind, all_of in members.items() for one in all_of[: most.get(kind, 1)]]
    return samples, [(kind, len(all_of)) for kind, all_of in members.items()], True


def _first_of_verdicts(samples: Sequence[ShownSample]) -> list[ShownSample]:
    seen: dict[bool | None, list[ShownSample]] = {}
    for sample in samples:
        seen.setdefault(sample.asked.correct, []).append(sample)
    shown = [one for alike in seen.values() for one in alike[:SHOWN_OF_ONE_SIDE]]
    return sorted(shown, key=lambda sample: sample.asked.problem)
