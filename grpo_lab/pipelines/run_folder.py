"""The output folder of `grpo-lab train`: which run it holds, what may differ on a resume, and from which checkpoint.

A run uses its folder in two steps:

    RunFolder.open(recipe)    look at the folder, once and on the main process, before anything is loaded: is it new, is
                              its run to be resumed, or is it finished?
    claimed(folder, job)      lock the folder and mark it as this run's for a block (``pipelines.open_run``)

The folder holds ``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl``, ``evaluation/before``
and ``/after``, ``cold_start/`` (the model RL started from), ``report.html``, and the final model in the folder itself.
"""

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
"""Beginning of the names, in a run's folder, of the files of its evaluations."""


class State(Enum):
    """State in which an output folder was found."""

    NEW = "new"
    GOES_ON = "goes on"
    FINISHED = "finished"


@dataclass(frozen=True)
class RunFolder:
    """What the output folder of a recipe holds, and what the recipe asks for now.

    Attributes:
        place: the folder.
        settings: the recipe as plain values.
        fingerprint: hash of these settings.
        starts_from: folders of the models that the recipe begins with.
        written: stamp of ``run.json`` when the folder was looked at (`when_written`).
        overwrite: whether an earlier run is to be replaced.
        record: ``run.json`` of the run that is to be resumed, or is finished; empty for a new run.
        has_begun: whether that run has made something that its settings decided.
        changed: settings that differ from that run's; none of them changes what it has done.
        gone: files that the run had left when it was finished, and that are missing now.
        start_is_whole: whether the model that RL starts from was saved completely.
        is_measured: whether the evaluation of that model is complete and can be kept.
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
        """Look at the output folder of ``recipe``, whose numbers were read by `numbers_read`; nothing is written.

        The main process looks, and every process gets its answer. A run that has begun is resumed, with ``resume`` or
        without it, unless ``overwrite`` replaces it. Raises ValueError if both are given, or the folder cannot be
        written; without ``overwrite`` also if it holds something else, or a run of another recipe that has begun.
        """
        if overwrite and resume:
            raise ValueError("--overwrite and --resume contradict each other; give one of them")
        return ask_main_process(lambda: _look_at(recipe, overwrite))

    @property
    def state(self) -> State:
        """State in which the folder was found."""
        if not self.record:
            return State.NEW
        if self.record.get("finished") and not self.is_opened_again:
            return State.FINISHED
        return State.GOES_ON

    @property
    def trained(self) -> int | None:
        """Number of optimizer steps if the training is over; None if something is left to train."""
        without_model = any(not one.startswith(MEASURED) for one in self.gone)
        if self.is_longer or without_model:
            return None
        return self.record.get("trained")

    @property
    def is_longer(self) -> bool:
        """Return whether the recipe asks for another length of training than the run had."""
        return any(one.of(*LENGTH) for one in self.changed)

    @property
    def is_measured_anew(self) -> bool:
        """Return whether the recipe asks for another evaluation than the run had."""
        return any(one.of("evaluation") for one in self.changed)

    @property
    def is_opened_again(self) -> bool:
        """Return whether a finished run has something left to do."""
        return bool(self.is_longer or self.is_measured_anew or self.gone)

    def newest_checkpoint(self, max_steps: int, read: bool = True) -> tuple[Path | None, list[str]]:
        """Return the newest checkpoint that is complete on every node (None: there is none), and a sentence for each
        newer one, which says why it was passed over.

        ``read``: also check the contents of its files, if steps are left to train. Raises ValueError if it is beyond
        ``max_steps`` (≤ 0: epochs decide), or if there is none and what is asked for needs one.
        """
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
        """Return the fingerprint of the rows to train on; None if nothing is left to train.

        ``processes``: how many take part now. Raises ValueError if a run with steps left would be resumed with other
        rows, or by another number of processes.
        """
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


def ask_main_process(ask: Callable[[], Answer]) -> Answer:
    """Call ``ask`` on the main process alone; return its answer, or raise its ValueError, on every process."""
    answer: Any = None
    refused: ValueError | None = None
    if PartialState().is_main_process:
        try:
            answer = ask()
        except ValueError as error:
            refused = error
            answer = ValueError(str(error))
    received: Any = gather_object([answer])[0]
    if isinstance(received, ValueError):
        raise received from refused
    return received  # type: ignore[no-any-return]


def _look_at(recipe: Recipe, overwrite: bool) -> RunFolder:
    """Look at the folder of ``recipe``, on the main process alone (``RunFolder.open``)."""
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
        return new  # a run that failed before its first step leaves the folder to any recipe
    gone = gone_from(place, record)
    found = replace(new, record=record, has_begun=begun, changed=changed, gone=gone)
    stays = not found.is_measured_anew and not any(one.startswith(f"{MEASURED}before") for one in gone)
    return replace(found, start_is_whole=start_is_whole(place), is_measured=stays and is_measured(place))


def when_written(folder: Path) -> tuple[int, ...] | None:
    """Return inode, time and size of ``run.json`` in ``folder``, which differ after each write; None if there is no
    such file."""
    try:
        found = (folder / RUN).stat()
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size)


def has_begun(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether the run in ``folder`` has made something that its settings decided: a checkpoint, complete or not,
    a line of metrics, or a model."""
    metrics = folder / "metrics.jsonl"
    return bool(
        record.get("trained")
        or record.get("finished")
        or next(folder.glob("*checkpoint-*"), None)
        or (folder / "config.json").is_file()
        or (metrics.is_file() and metrics.stat().st_size)
    )


def start_is_whole(folder: Path) -> bool:
    """Return whether the model that RL starts from was saved completely (the tokenizer is written after the
    weights)."""
    start = folder / "cold_start"
    return (start / "tokenizer_config.json").is_file() and broken_weights(start) is None


def is_measured(folder: Path) -> bool:
    """Return whether a run's ``folder`` holds a complete evaluation of the start model (``evaluation/before``). One
    that was stopped by Ctrl-C or cannot be read does not count."""
    try:
        return EvaluationResult.read(folder / "evaluation" / "before").stopped is None
    except (OSError, ValueError, RecursionError):
        return False


def _starts_from(recipe: Recipe) -> list[Path]:
    """Return the paths of the model, and of the critic if it has its own, that ``recipe`` begins with."""
    value = recipe.arguments.get("value")
    critic = value.get("model") if isinstance(value, Mapping) else value
    return [Path(one).resolve() for one in (recipe.model.path, critic) if isinstance(one, str | Path)]


def refuse_lost(folder: Path, gone: Sequence[str], newest: Path | None) -> None:
    """Raise ValueError if a file that is ``gone`` from a finished run cannot be made again: one of an evaluation during
    the training, or one of the model where no checkpoint (``newest``) is left."""
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
    """Raise ValueError if the checkpoint ``newest`` in ``folder`` is beyond ``max_steps`` (≤ 0: epochs decide)."""
    if newest is not None and 0 < max_steps < step_of(newest):
        done = f"{folder} has done {step_of(newest)} steps ({newest.name})"
        raise ValueError(f"`max_steps` is {max_steps}, and {done}; give at least that")
