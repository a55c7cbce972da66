"""The page about a run of rounds: accuracy over rounds and over generated tokens, what was kept, how long answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.charts import Chart, Line, draw
from grpo_lab.evaluation.files import encodable, write_text
from grpo_lab.evaluation.page import page
from grpo_lab.evaluation.report import summary_groups

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Figure:
    """As `figure.html.j2` wants it; without a chart nothing of it was recorded."""

    title: str
    meaning: str
    chart: Chart | None
    looked_for: str


def write_rounds_page(path: str | Path, lines: Lines, run: Mapping[str, Any]) -> Path:
    """Write the page. ``lines``: `rounds.jsonl`; ``run``: `run.json`."""
    path = Path(path)
    write_text(path, encodable(rounds_page(lines, run)))
    return path


def rounds_page(lines: Lines, run: Mapping[str, Any]) -> str:
    """The page as text; see `write_rounds_page`."""
    about = {"method": run.get("method"), "seconds": run.get("seconds") or {}, **dict(run.get("recipe") or {})}
    about["rounds"] = {"count": run.get("count"), **(about.get("rounds") or {})}
    measured = [line for line in lines if line.get("accuracy") is not None]
    return page(
        "rounds.html.j2",
        title=str(run.get("name") or "rounds"),
        method=str(run.get("method")),
        first=measured[0] if measured else None,
        last=measured[-1] if measured else None,
        tokens=lines[-1].get("tokens_total", 0) if lines else 0,
        figures=figures(lines),
        lines=lines,
        weighted=any("weight_first" in line for line in lines),
        summary=summary_groups({key: _said(value) for key, value in about.items() if value and key != "model_files"}),
    )


def _said(value: Any) -> Any:
    """A section of the recipe without what it leaves open."""
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, Mapping) else value


def figures(lines: Lines) -> list[Figure]:
    """Accuracy over rounds, accuracy over tokens, shares, lengths, and for pairs the weight w(θ)."""
    accuracy = _series(lines, "accuracy", "held-out, greedy", errors=("accuracy_low", "accuracy_high"))
    over_tokens = _series(
        lines, "accuracy", "held-out, greedy", over="tokens_total", errors=("accuracy_low", "accuracy_high")
    )
    shares = [
        _series(lines, "right_share", "samples that are right"),
        _series(lines, "kept_share", "samples that are kept"),
    ]
    lengths = [_series(lines, "sample_length", "samples"), _series(lines, "length", "held-out answers")]
    weights = [_series(lines, "weight_first", "first log of the round"), _series(lines, "weight_last", "last log")]
    found = [
        _figure("Held-out accuracy", "With its 95% interval; round 0 is the start model.", [accuracy], "accuracy", share=True),
        _figure(
            "Accuracy over generated tokens", "What the gain cost in samples.", [over_tokens], "accuracy", "tokens generated", True
        ),
        _figure("What the model's own samples gave", "Kept: after one for each way of solving, and at most k a problem.", shares,
                "share of samples", share=True),
        _figure("Length", "In tokens; answers with their end.", lengths, "tokens per completion"),
    ]  # fmt: skip
    if any(line.points for line in weights):
        found.append(
            _figure(
                "Weight of a pair, w(θ)",
                "1: the implicit reward has it wrong; ½: undecided; 0: learned.",
                weights,
                "mean over pairs",
            )
        )
    return found


def _figure(title: str, meaning: str, lines: list[Line], unit: str, x: str = "round", share: bool = False) -> Figure:
    there = any(line.points for line in lines)
    return Figure(
        title, meaning, draw(lines, unit=unit, share=share, from_zero=True, x_unit=x) if there else None, "rounds.jsonl"
    )


def _series(lines: Lines, key: str, label: str, over: str = "round", errors: tuple[str, str] | None = None) -> Line:
    kept = [line for line in lines if line.get(key) is not None]
    bars = [(float(line[errors[0]]), float(line[errors[1]])) for line in kept] if errors else []
    return Line(label, [(float(line[over]), float(line[key])) for line in kept], bars, markers=True)
