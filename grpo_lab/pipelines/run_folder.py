"""The folder of `grpo-lab train`: whose it is, what may differ when it is gone on with, and from which checkpoint.

    RunFolder.open(recipe)    new, gone on with or finished: asked once, by the main process, before anything is loaded
    claimed(folder, job)      locked and marked as this run's for a block (``pipelines.open_run``)

``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl``, ``evaluation/before`` and ``/after``,
``cold_start/`` (the model RL started from), ``report.html``; the final model in the folder itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_lab.evaluation import EvaluationResult
from grpo_lab.evaluation.run_record import gone_from
from grpo_lab.pipelines.same_run import LENGTH, changed_since, fingerprint
from grpo_lab.recipe.job import Job
from grpo_lab.recipe.sections import Recipe
from grpo_lab.runs.differences import Difference, plain_settings, refuse_other_rows, rows_fingerprint
from grpo_lab.runs.folder import RUN, check_writable, record_of
from grpo_lab.trainer.resume.going_on import newest_read
from grpo_lab.trainer.resume.whole import broken_weights, step_of

Answer = TypeVar("Answer")
MEASURED = "evaluation/"
"""How the names of files begin that belong to evaluations."""


class State(Enum):
    """How an output folder was found."""

    NEW = "new"
    GOES_ON = "goes on"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunFolder:
    """What the output folder of a recipe holds, and what is asked for now.

    Attributes:
        settings: the recipe as plain values; ``fingerprint``: its hash.
        starts_from: folders of the models that the recipe begins with.
        written: `when_written` at the look.
        record: what ``run.json`` said of the run that is gone on with, or is finished; empty for a new one.
        has_begun: whether that run has made something that its settings decided.
        changed: settings that are not as they were; none of them can change the run's past.
        gone: files that the run had left when it was done, and that are not there any more.
        start_is_whole: whether the model that RL starts from was saved to its end.
        is_measured: whether that model's evaluation is whole.
    """

    place: Path
    settings: Mapping[str, Any]
    fingerprint: str
    starts_from: Sequence[Path] = ()
    written: tuple[int, ...] | None = None
    overwrite: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    changed: Sequence[Difference] = ()
    gone: Sequence[str] = ()
    start_is_whole: bool = False
    is_measured: bool = False

    @classmethod
    def open(cls, recipe: Recipe, overwrite: bool = False, resume: bool = False) -> RunFolder:
        """Look at the output folder of ``recipe``, its numbers read: the same command goes on with a run that has
        begun, with ``resume`` or without. The main process looks, every process has its answer; nothing is written.
        ValueError: the folder holds something else, a run of another recipe, or cannot be written."""
        if overwrite and resume:
            raise ValueError("--overwrite and --resume contradict each other; give one of them")
        return told_by_main(lambda: _look_at(recipe, overwrite))

    @property
    def state(self) -> State:
        """How the folder was found."""
        if not self.record:
            return State.NEW
        if self.record.get("finished") and not self.is_opened_again:
            return State.FINISHED
        return State.GOES_ON

    @property
    def trained(self) -> int | None:
        """Steps of the training where it is over; None where there is something left to train."""
        without_model = any(not one.startswith(MEASURED) for one in self.gone)
        if self.is_longer or without_model:
            return None
        return self.record.get("trained")

    @property
    def is_longer(self) -> bool:
        """Return whether the run is to go further, or less far, than it was."""
        return any(one.of(*LENGTH) for one in self.changed)

    @property
    def is_measured_anew(self) -> bool:
        """Return whether another evaluation is asked for."""
        return any(one.of("evaluation") for one in self.changed)

    @property
    def is_opened_again(self) -> bool:
        """Return whether there is something left to do in a finished run."""
        return bool(self.is_longer or self.is_measured_anew or self.gone)

    def newest_checkpoint(self, max_steps: int, read: bool = True) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint that is whole on every node, and say why newer ones are not. ``read``: by content,
        too, where there are steps left. ValueError: it is beyond ``max_steps`` (≤ 0: epochs say it), or there is none,
        and what is asked for cannot be made without."""
        if self.state is State.NEW:
            return None, []
        reads = read and self.trained is None
        newest, passed = newest_read(self.place, PartialState().is_local_main_process, reads)
        check_length(self.place, newest, max_steps)
        if self.record.get("finished") and not self.is_measured_anew:
            refuse_lost(self.place, self.gone, newest)
        if self.is_longer and self.record.get("trained") is not None and newest is None:
            raise ValueError(
                f"`output_dir` {str(self.place)!r} holds a trained run without a checkpoint (`save_strategy`): it "
                "cannot be trained further"
            )
        return newest, passed

    def rows_to_train(self, job: Job, processes: int) -> dict[str, Any] | None:
        """Return the fingerprint of the rows; None where nothing is left to train. ValueError where a run with steps
        still to train would go on with other rows, or another number of processes."""
        if self.trained is not None:
            return None
        rows = rows_fingerprint(job.rows)
        if not self.has_begun or 0 < job.config.max_steps <= (self.record.get("trained") or 0):
            return rows
        refuse_other_rows(self.place, self.record.get("rows"), rows)
        before = self.record.get("processes")
        if before is not None and before != processes:
            raise ValueError(
                f"the run in {str(self.place)!r} was trained by {before} process(es), and this is {processes}: its "
                f"batches and random numbers would be others. Start {before} (`accelerate launch --num_processes "
                f"{before}`), or choose another `--output_dir`; trainer.train(resume_from_checkpoint=…) goes on with "
                "other batches, as TRL does"
            )
        return rows


def told_by_main(ask: Callable[[], Answer]) -> Answer:
    """Ask on the main process alone; every process has its answer, or raises its ValueError."""
    answer: Any = None
    refused: ValueError | None = None
    if PartialState().is_main_process:
        try:
            answer = ask()
        except ValueError as error:
            refused = error
            answer = ValueError(str(error))
    told: Any = gather_object([answer])[0]
    if isinstance(told, ValueError):
        raise told from refused
    return told  # type: ignore[no-any-return]


def _look_at(recipe: Recipe, overwrite: bool) -> RunFolder:
    """Look at the folder, on the main process."""
    place = recipe.output_dir
    when = when_written(place)
    settings = plain_settings(recipe)
    new = RunFolder(place, settings, fingerprint(settings), _starts_from(recipe), when, overwrite)
    if overwrite:
        check_writable(place)
        return new
    record = record_of(place, None)
    if not record:
        return new
    begun = has_begun(place, record)
    try:
        changed = changed_since(place, record, settings, new.fingerprint)
    except ValueError:
        if begun:
            raise
        return new  # one that failed before its first step leaves the folder to any recipe
    gone = gone_from(place, record)
    found = replace(new, record=record, has_begun=begun, changed=changed, gone=gone)
    stays = not found.is_measured_anew and not any(one.startswith(f"{MEASURED}before") for one in gone)
    return replace(found, start_is_whole=start_is_whole(place), is_measured=stays and is_measured(place))


def when_written(folder: Path) -> tuple[int, ...] | None:
    """Return what tells one ``run.json`` in ``folder`` from the next; None: there is none."""
    try:
        found = (folder / RUN).stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def has_begun(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether the run in ``folder`` has made something that its settings decided: a checkpoint, whole or not, a
    step in its metrics, a model."""
    metrics = folder / "metrics.jsonl"
    return bool(
        record.get("trained")
        or record.get("finished")
        or next(folder.glob("*checkpoint-*"), None)
        or (folder / "config.json").is_file()
        or (metrics.is_file() and metrics.stat().st_size)
    )


def start_is_whole(folder: Path) -> bool:
    """Return whether the model that RL starts from was saved to its end: the tokenizer is written after the weights."""
    start = folder / "cold_start"
    return (start / "tokenizer_config.json").is_file() and broken_weights(start) is None


def is_measured(folder: Path) -> bool:
    """Return whether the evaluation of the start model is whole (Ctrl-C leaves a part)."""
    try:
        return EvaluationResult.read(folder / "evaluation" / "before").stopped is None
    except (OSError, ValueError, RecursionError):
        return False


def _starts_from(recipe: Recipe) -> list[Path]:
    """Folders of the model, and of the critic, that ``recipe`` begins with."""
    value = recipe.arguments.get("value")
    critic = value.get("model") if isinstance(value, Mapping) else value
    return [Path(one).resolve() for one in (recipe.model.path, critic) if isinstance(one, str | Path)]


def refuse_lost(folder: Path, gone: Sequence[str], newest: Path | None) -> None:
    """ValueError where one of the files that are ``gone`` from a finished run cannot be made again: what was measured
    on the way, or a model of which no checkpoint (``newest``) is left."""
    for one in gone:
        if one.startswith(f"{MEASURED}step_"):
            why = "it was measured in the training, which is over"
        elif not one.startswith(MEASURED) and newest is None:
            why = "no whole checkpoint is left to make it of"
        else:
            continue
        raise ValueError(
            f"{one} is gone from the finished run in `output_dir` {str(folder)!r}, and {why}; put a copy back, choose "
            "another `--output_dir`, or give --overwrite"
        )


def check_length(folder: Path, newest: Path | None, max_steps: int) -> None:
    """ValueError where the checkpoint ``newest`` is beyond ``max_steps`` (≤ 0: epochs say it)."""
    if newest is not None and 0 < max_steps < step_of(newest):
        done = f"{folder} has done {step_of(newest)} steps ({newest.name})"
        raise ValueError(f"`max_steps` is {max_steps}, and {done}; give at least that")
