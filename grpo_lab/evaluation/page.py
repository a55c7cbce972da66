"""The structure of our HTML pages: the result, sections with figures, answers and tables; settings last, folded.

A `Page` is made of cards and sections, and `page.html.j2` renders it. Text of models, data and files is not trusted:
all of it is made visible and escaped. A page has no scripts and loads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_lab.evaluation.charts import Figure
from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.terminal import duration
from grpo_lab.evaluation.transcript import turns_in
from grpo_lab.io import write_whole_text
from grpo_lab.visible import visible

LONGEST_SHOWN = 4_000
"""Number of characters of an answer that a page shows."""

_SHOWN: dict[tuple[bool | None, bool | None], tuple[str, int]] = {
    (False, True): ("became correct", 3),
    (True, False): ("became wrong", 2),
    (False, False): ("still wrong", 2),
    (True, True): ("stayed correct", 2),
}
"""(right before, right after) → heading of such examples, and how many are shown: failures beside the gains."""
SHOWN_OF_ONE_SIDE = 4
"""Number of examples of each verdict, if there are no two evaluations of the same problems."""


class ShownSample(NamedTuple):
    """A problem that a page shows, with what the model wrote before and after training.

    Attributes:
        kind: heading of the example, such as "became correct"; empty where one side alone was evaluated.
        before: the outcome before training; None: not evaluated.
        after: the outcome after training; None: not evaluated.
    """

    kind: str
    before: Outcome | None
    after: Outcome | None

    @property
    def asked(self) -> Outcome:
        """Return the outcome that shows the problem: ``after``, or ``before`` where that is missing."""
        assert self.before or self.after
        return self.after or self.before  # type: ignore[return-value]


class Card(NamedTuple):
    """A number of the result in large print.

    Attributes:
        name: what the number is.
        value: the number, as text.
        unit: text behind it, with its own space.
        note: a line under it.
        strong: whether it stands out among the cards.
    """

    name: str
    value: str
    unit: str = ""
    note: str = ""
    strong: bool = False


class Bar(NamedTuple):
    """A bar of kept and dropped rows, in a histogram or a table.

    Attributes:
        kept: rows in its first part.
        dropped: rows in its second part.
        full: rows of a bar of full length.
        label: what stands under it in a histogram.
    """

    kept: int
    dropped: int
    full: int
    label: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose cells are texts or bars.

    Attributes:
        head: headings of the columns.
        rows: cells; the first one is the row's heading, and the last one of a short row spans the columns that are
            left.
        words: indices of the columns of running text.
        stacked: on a narrow screen each row becomes a list.
        packed: the cells of such a list follow each other in one line.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Bar]]
    words: Collection[int] = ()
    stacked: bool = True
    packed: bool = False


@dataclass(frozen=True)
class Section:
    """A section of a page. Its parts appear in the order of these attributes, but ``counts`` above ``lead``.

    Attributes:
        title: its heading.
        lead: a paragraph under the heading.
        counts: (name, number) pairs in a line.
        points: lines of a list.
        figures: charts.
        drawing: a pipeline's stages as boxes and arrows (`pipeline_sections.drawing`).
        legend: names of the two parts of a bar.
        bars: a histogram.
        samples: problems with answers.
        table: a table.
        groups: lists of (name, text), each with its heading.
        foot: a note in small print.
        folded: words that stand for the section until the reader opens it; empty: it is open.
    """

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
        """Return whether there is nothing to show. Such a section is left out."""
        rows = self.table.rows if self.table else ()
        return not any((self.points, self.figures, self.drawing, self.bars, self.samples, rows, self.groups))


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        kind: what sort of page it is, such as "training report".
        title: its heading.
        about: texts in a line under the heading that say what was run.
        cards: the result in large print.
        notices: sentences that a reader has to know first.
        sections: the body.
        missing: names of what was not recorded, for the end of the page.
        runs: JSON list of the folders of a comparison's runs; empty on other pages.
    """

    kind: str
    title: str
    about: Sequence[str]
    cards: Sequence[Card]
    notices: Sequence[str]
    sections: Sequence[Section]
    missing: Sequence[str] = ()
    runs: str = ""

    def html(self) -> str:
        """Render the page. Every text in it is escaped, with invisible characters shown."""
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
        """Write the page to ``path``, and return the path.

        Raises:
            ValueError: ``path`` cannot be written.
            OSError: the disk is full.
        """
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
    """Make a folded section of the settings in `run.json`: its plain values first, then a list for each mapping and
    each list of mappings."""
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
    """Yield (dotted name, value) for each value in nested mappings; an empty mapping counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def text_of(key: object, value: Any, inside: bool = False) -> str:
    """Format a value of `run.json` for a reader.

    Args:
        key: its dotted name, whose last part decides on a unit.
        value: the value; a list of mappings or lists gets a line for each.
        inside: the value is part of another one, so it has to fit into a line.
    """
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
    """Return the values of these keys as texts that say what was run. A key without a plain value is left out; of a
    mapping its loader, its own key or its name is taken."""
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
    """Choose the problems that a page shows.

    Of problems in both evaluations, the first of each kind are shown, kind by kind: became correct, became wrong, ….
    If the evaluations share no problem, or their questions differ, the first of each verdict of one side are shown, in
    the order of the rows. That side is ``after`` if questions differ, else ``before`` if it has answers.

    Returns:
        The problems to show; the number of problems of each kind, where there are kinds; False if the two evaluations
        have different questions, else True.
    """
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
    """Return the first ``SHOWN_OF_ONE_SIDE`` samples of each verdict, in the order of the rows."""
    seen: dict[bool | None, list[ShownSample]] = {}
    for sample in samples:
        seen.setdefault(sample.asked.correct, []).append(sample)
    shown = [one for alike in seen.values() for one in alike[:SHOWN_OF_ONE_SIDE]]
    return sorted(shown, key=lambda sample: sample.asked.problem)
