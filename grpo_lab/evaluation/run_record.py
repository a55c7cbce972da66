"""What a run left in its folder, finished or not. A missing or damaged piece never stops a report.

    run.json                  what was run: pipeline, model, template, objective, settings, versions, seed, seconds;
                              of a finished run also the names of the files that it has left (``gone_from``)
    metrics.jsonl             one JSON object a logged step, with `step`; keys as in TRL's log_history
    rounds.jsonl              one JSON object a round of `grpo-lab rounds`
    evaluation/before, after  written by EvaluationResult.write; evaluation/step_<n>: during training
    outcomes.jsonl            if the folder is one evaluation
    curation.json             if the folder is a curation
    token_weights.jsonl       a line each n-th optimizer step: `grpo_lab.diagnostics.token_weights`
    pipeline.json             the stages of a pipeline, each with a folder of its name

`read_run` reads all of this into a `RunRecord`. Whatever could not be read is named in its ``notices``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.statistics import is_number
from grpo_lab.reading import json_lines, read_record

Series = list[tuple[int, float]]
"""Pairs (optimizer step, value), steps rising."""

EVALUATE = "evaluate"
"""Kind of the stage of a pipeline that evaluates the model of another stage."""
TRAINING = "training"
LONG2SHORT = "long2short"
ROUNDS = "rounds"
EVALUATION = "evaluation"
CURATION = "curation"
PIPELINE = "pipeline"
"""What a folder can hold."""
STAGES = "pipeline.json"
"""File of a pipeline that lists its stages."""
WAITING = "waiting"
RUNNING = "running"
FAILED = "failed"
BROKEN_OFF = "broken off"
DONE = "done"
"""The states of a stage: not begun, running, ended by an error, ended by a stop or a kill, done."""
_JUDGED = ("judge", "mode", "reward", "template", "thinking")
"""Settings that evaluations have in common if they are compared within a pipeline."""
_NUMBERED_LINES = 5
"""Number of damaged lines of a file that are named one by one."""


@dataclass
class PipelineStage:
    """A stage as `pipeline.json` lists it.

    Attributes:
        name: its name, also that of its folder.
        kind: what the stage does, such as `train` or `evaluate`.
        status: ``WAITING``, ``RUNNING``, ``FAILED``, ``BROKEN_OFF`` or ``DONE``, or a sentence that says why a done
            stage has to be repeated.
        why: why it is or was to be run.
        error: what ended it, or what is odd about it; empty: nothing.
        settings: its settings.
        inputs: setting → {"from": "stage.thing"}, what the setting takes from another stage.
        before: names of the stages that it takes something from.
        seconds: wall-clock seconds that it took; None: unknown.
        results: its facts, by name.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]+$")]
    kind: str
    status: str = WAITING
    why: str = ""
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    seconds: float | None = None
    results: dict[str, Any] = field(default_factory=dict)


StagesOf = Callable[[Path], Sequence[PipelineStage]]
"""Function from a pipeline's folder to its stages as they are now. If it returns none, `pipeline.json` counts."""


def as_left(folder: Path) -> Sequence[PipelineStage]:
    """Return no stages, so that a page shows a pipeline as its last run left it."""
    return ()


@dataclass
class RunRecord:
    """A run, as far as it could be read. A field is empty or None if nothing was found for it.

    Attributes:
        folder: its output folder.
        summary: contents of `run.json`; for a pipeline also of `pipeline.json`.
        metrics: name → series of (optimizer step, value).
        before: evaluation before training. Of a pipeline: the first model's, on the problems on which most of its
            models were evaluated.
        after: evaluation after training. Of a pipeline: the last model's, on the same problems. Of a folder that is one
            evaluation: that one.
        during: (optimizer step, evaluation) during training, steps rising.
        rounds: numbers in each line of `rounds.jsonl`.
        token_weights: lines of `token_weights.jsonl`.
        stages: a pipeline's stages, in their order.
        notices: sentences about what could not be read, or is odd.
        kinds: what the folder holds, such as ``TRAINING``; the page is about the first.
        name: how a comparison calls the run.
    """

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    during: list[tuple[int, EvaluationResult]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)
    token_weights: list[dict[str, Any]] = field(default_factory=list)
    stages: list[PipelineStage] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    name: str = ""

    @property
    def kind(self) -> str:
        """Return what the page is about; empty if the folder holds nothing of ours."""
        return self.kinds[0] if self.kinds else ""

    @property
    def last_step(self) -> int:
        """Return the last optimizer step with a logged metric; 0 without metrics."""
        return max((series[-1][0] for series in self.metrics.values()), default=0)

    def first_of(self, *names: str) -> Series:
        """Return the series of the first of these metrics that was recorded; empty if none was."""
        return next((self.metrics[name] for name in names if name in self.metrics), [])


def read_run(folder: str | Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Read all that can be read from ``folder``.

    Args:
        folder: the output folder of a command.
        summary: the contents of its `run.json`, if they are known already.

    Raises:
        ValueError: there is no such folder, or it is one evaluation and damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; the output folder of a run is needed")
    record = RunRecord(folder)
    record.summary = _read_summary(folder / "run.json", record.notices) if summary is None else dict(summary)
    for step, row in _read_numbers(folder / "metrics.jsonl", "step", record.notices):
        for name, value in row.items():
            record.metrics.setdefault(name, []).append((step, value))
    record.token_weights = _read_token_weights(folder / "token_weights.jsonl", record.notices)
    evaluations = folder / "evaluation"
    record.before = _read_evaluation(evaluations / "before", record.notices)
    record.after = _read_evaluation(evaluations / "after", record.notices)
    inside = list[Path]()
    if evaluations.is_dir():
        inside = [*evaluations.iterdir()]
    named = [(re.fullmatch(r"step[-_]?(\d{1,12})", path.name, re.ASCII), path) for path in inside]
    for step, path in sorted((int(match[1]), path) for match, path in named if match):
        if (result := _read_evaluation(path, record.notices)) is not None:
            record.during.append((step, result))
    rounds = _read_numbers(folder / "rounds.jsonl", "round", record.notices)
    record.rounds = [{"round": number, **row} for number, row in rounds]
    record.kinds = _kinds_of(record)
    if record.kind == PIPELINE:
        read_stages(record)
        _read_answers(record)
    if record.summary.get("finished") is False:
        record.notices.insert(0, "the run is not finished: this is what it has written so far")
    elif gone := gone_from(folder, record.summary):
        record.notices.insert(0, f"{in_few_words(gone)} gone since the run was finished: its command makes it again")
    if record.kind == EVALUATION:
        try:
            record.after = EvaluationResult.read(folder)
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{folder} holds an evaluation that cannot be read: {error}") from error
    return record


def gone_from(folder: Path, summary: Mapping[str, Any]) -> list[str]:
    """List the files that a finished run has left, by ``left`` in its `run.json`, and that no longer exist."""
    left = summary.get("left")
    names = left if isinstance(left, list) else []
    return [str(name) for name in names if not (folder / str(name)).is_file()]


def in_few_words(gone: Sequence[str]) -> str:
    """Name the first missing file and how many more there are, with the verb: `x is`, `x and 2 more are`."""
    more = f" and {len(gone) - 1} more are" if len(gone) > 1 else " is"
    return f"{gone[0]}{more}"


def _kinds_of(record: RunRecord) -> list[str]:
    """Return what the folder holds: by the command that `run.json` names, or else by files that only one command
    writes."""
    folder = record.folder
    pipeline = record.summary.get("pipeline")
    anything = record.summary or record.metrics or record.before or record.after or record.during or record.notices
    has_rounds = (folder / "rounds.jsonl").is_file()
    if (folder / STAGES).is_file():
        found = [PIPELINE]
    elif pipeline == ROUNDS or (has_rounds and not record.summary):
        found = [ROUNDS]
    else:
        found = []
        if anything:
            found = [LONG2SHORT if pipeline == LONG2SHORT else TRAINING]
        found += [ROUNDS] if has_rounds else []
    others = {CURATION: "curation.json", EVALUATION: "outcomes.jsonl"}
    return found + [kind for kind, name in others.items() if (folder / name).is_file()]


def _read_summary(path: Path, notices: list[str]) -> dict[str, Any]:
    """Read a file of settings. Empty if it is missing or damaged; a notice says so if it is damaged."""
    if not path.is_file():
        return {}
    try:
        return read_record(path)
    except (OSError, ValueError) as error:
        notices.append(f"{path.name} could not be read: {error}; it was left out")
        return {}


def read_stages(record: RunRecord) -> None:
    """Read `pipeline.json` into ``record``: its stages, and settings that `run.json` does not have."""
    summary = _read_summary(record.folder / STAGES, record.notices)
    try:
        listed = TypeAdapter(list[PipelineStage]).validate_python(summary.pop("stages", []))
    except ValidationError as error:
        first = error.errors()[0]
        listed = []
        place = ".".join(map(str, ("stages", *first["loc"])))
        record.notices.append(f"{STAGES}: the stages were left out, for {place}: {first['msg']}")
    record.summary = {**summary, **record.summary}
    known: dict[str, PipelineStage] = {}
    for one in listed:
        one.before = [other for other in one.before if other in known]
        known.setdefault(one.name, one)
    record.stages = list(known.values())


def _read_answers(record: RunRecord) -> None:
    """Read a pipeline's ``before`` and ``after``, on the problems on which most of its models were evaluated.

    ``before`` is the evaluation of the model that all the others come from, ``after`` that of the model that comes from
    them. If the pipeline ends in several models (arms), none is its result, and a notice says so.
    """
    alike: dict[Any, dict[str, EvaluationResult]] = {}
    for stage in record.stages:
        for place in ("evaluation", "evaluation/before", "evaluation/after"):
            folder = record.folder / stage.name / place
            if (folder / "outcomes.jsonl").is_file():
                result = _read_evaluation(folder, record.notices, f"{stage.name}/{place}")
                if result and result.greedy:
                    judged = str([result.settings.get(key) for key in _JUDGED])
                    problems = tuple((one.problem, one.question) for one in result.greedy)
                    alike.setdefault((judged, problems), {})[_model_of(stage, place)] = result
    if not alike:
        return
    found = max(alike.values(), key=len)
    come_from = {model: _come_from(model, record.stages) & found.keys() for model in found}
    first = [model for model, earlier in come_from.items() if not earlier]
    last = [model for model in found if not any(model in earlier for earlier in come_from.values())]
    if len(last) > 1:
        named = ", ".join(model or "the start model" for model in last)
        record.notices.append(
            f"the pipeline ends in {len(last)} models that were evaluated on the same problems ({named}): none of them "
            "is its result; the table stage × task has them side by side"
        )
    else:
        record.after = found[last[0]]
        if len(first) == 1 and first != last:
            record.before = found[first[0]]
        else:
            record.before = None


def _model_of(stage: PipelineStage, place: str) -> str:
    """Name the model of an evaluation by the stage that made it.

    The model that a stage began with is called `<stage> before`. A model that no stage made is named by its path.
    """
    if place.endswith("before"):
        return f"{stage.name} before"
    if stage.kind != EVALUATE:
        return stage.name
    taken = stage.inputs.get("model", {}).get("from", "").partition(".")[0]
    return taken or str(stage.settings.get("model", ""))


def _come_from(model: str, stages: list[PipelineStage]) -> set[str]:
    """Return the names (``_model_of``) of all models that a model was made from, through all earlier stages."""
    known = {one.name: one for one in stages}
    found: set[str] = set()
    left = [name for name in [model.removesuffix(" before")] if name in known]
    while left:
        one = known[left.pop()]
        named = one.settings.get("model")
        path = named.get("path") if isinstance(named, dict) else named
        found |= {*one.before, f"{one.name} before", str(path)}
        left += one.before
    return found - {model}


def _read_numbers(path: Path, key: str, notices: list[str]) -> list[tuple[int, dict[str, float]]]:
    """Read the numbers of a file with one JSON object a line.

    Of two values of one name at the same ``key`` the later counts. Notices name what is left out: damaged lines, values
    that are not finite.

    Returns:
        (``key``, name → number) of each line, by rising ``key``.
    """
    rows: dict[int, dict[str, float]] = {}
    damaged: list[str] = []
    not_finite: Counter[str] = Counter()
    repeated = 0
    for number, row in json_lines(path) if path.is_file() else ():
        at = row if isinstance(row, str) else row.pop(key, None)
        if isinstance(row, str) or not is_number(at):
            if isinstance(row, str):
                why = row
            else:
                why = f"no usable `{key}` (saw {str(at)[:40]!r})"
            damaged.append(f"{path.name}, line {number}: {why}; the line was left out")
            continue
        for name, value in row.items():
            if is_number(value):
                repeated += name in rows.setdefault(int(at), {})
                rows[int(at)][name] = float(value)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                not_finite[name] += 1
    notices += damaged[:_NUMBERED_LINES]
    if len(damaged) > _NUMBERED_LINES:
        notices.append(f"{path.name}: {len(damaged) - _NUMBERED_LINES} further lines were left out")
    if repeated:
        notices.append(
            f"{path.name}: {repeated} values were logged twice for one {key} (a resumed run?); the later ones are shown"
        )
    for name, count in not_finite.items():
        in_rows = f"{count} row{'s' * (count > 1)}"
        notices.append(f"{path.name}: {name} was NaN, infinite or beyond 1e100 in {in_rows}, not drawn")
    return sorted(rows.items())


def _read_token_weights(path: Path, notices: list[str]) -> list[dict[str, Any]]:
    """Read the lines of `token_weights.jsonl` from which weights can be drawn, the last one of each step. Notices name
    what is left out."""
    if not path.is_file():
        return []
    from grpo_lab.diagnostics.token_weights import over_steps  # loads torch

    found: dict[int, dict[str, Any]] = {}
    for number, row in json_lines(path):
        try:
            for by in ("by_length", "by_pass_rate"):
                over_steps([row], by)  # type: ignore[list-item]
            found[int(row["step"])] = row  # type: ignore[index, assignment]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(row, str):
                why = row
            else:
                why = f"no weights of a step ({type(error).__name__}: {error})"
            notices.append(f"{path.name}, line {number}: {why}; the line was left out")
    return [found[step] for step in sorted(found)]


def _read_evaluation(folder: Path, notices: list[str], name: str = "") -> EvaluationResult | None:
    """Read the evaluation in ``folder``. None if there is none, or if it is damaged; a notice then says so, and calls
    it ``name``."""
    if not folder.is_dir():
        return None
    try:
        return EvaluationResult.read(folder)
    except (OSError, ValueError, RecursionError) as error:
        notices.append(f"{name or f'evaluation/{folder.name}'} could not be read: {error}")
        return None
