"""A training run in its folder, which is locked and marked as this run's for a block.

What an earlier run left and this one would mistake for its own is removed or set aside first, and ``run.json`` is kept
up to date.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from grpo_lab.diagnostics.token_weights import FILE as TOKEN_WEIGHTS
from grpo_lab.evaluation.run_record import in_few_words
from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.run_folder import MEASURED, RunFolder, State, ask_main_process, when_written
from grpo_lab.recipe.job import Job
from grpo_lab.recipe.yaml import written
from grpo_lab.runs.differences import other_releases
from grpo_lab.runs.folder import one_writer, write_run
from grpo_lab.runs.metrics import cut_metrics
from grpo_lab.runs.stage import console
from grpo_lab.runs.stop_requests import heed_stop_file
from grpo_lab.trainer.resume.state import read_state
from grpo_lab.trainer.resume.turn_journals import JOURNALS
from grpo_lab.trainer.resume.whole import SAVING, step_of
from grpo_lab.trainer.scoring.preference_training import FOLDER as PREFERENCE

log = logging.getLogger(__name__)


@dataclass
class OpenRun:
    """A training run that holds the lock of its folder.

    Attributes:
        folder: what its folder held when the run began.
        record: the content of ``run.json``.
        rows: fingerprint of the rows to train on; None if nothing is left to train.
        checkpoint: checkpoint that the training resumes from; None: it begins at the first step.
    """

    folder: RunFolder
    record: dict[str, Any]
    rows: dict[str, Any] | None
    checkpoint: Path | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Stage → seconds that it has taken, over all resumes; part of ``record``."""
        found: dict[str, float] = self.record.setdefault("seconds", {})
        return found

    def write(self, **more: Any) -> None:
        """Update ``run.json`` with ``more``, on the main process."""
        self.record |= more
        if PartialState().is_main_process:
            write_run(self.folder.place, self.record)


@contextmanager
def claimed(folder: RunFolder, job: Job) -> Iterator[OpenRun]:
    """Hold the folder for the block, on every process: the main one locks it and marks it as this run's.

    Raises, before anything of the earlier run is changed:
        ValueError: another process holds the folder or has written into it, the run there was on other rows or another
            number of processes, or its checkpoint is beyond ``max_steps``, or is needed and missing.
        Interrupted: a stop file is there when a run is resumed.
    """
    with ExitStack() as lock:
        rows = ask_main_process(lambda: _lock(folder, job, lock))
        if folder.state is State.GOES_ON:
            heed_stop_file(job.config, folder.place)
        newest, passed = folder.newest_checkpoint(job.config.max_steps)
        run = OpenRun(folder, ask_main_process(lambda: _mark(folder)), rows)
        if folder.state is State.GOES_ON and folder.trained is None:
            run.checkpoint = newest
            if PartialState().is_main_process:
                _clear_after(folder, newest, passed)
        yield run


def _lock(folder: RunFolder, job: Job, lock: ExitStack) -> dict[str, Any] | None:
    """Lock the folder until ``lock`` is closed, and return its `rows_to_train`; called on the main process. Raises
    ValueError if ``run.json`` has been written since the folder was looked at."""
    rows = folder.rows_to_train(job, PartialState().num_processes)
    lock.enter_context(one_writer(folder.place))
    if when_written(folder.place) != folder.written:
        raise ValueError(
            f"another process wrote into `output_dir` {str(folder.place)!r} while this one looked at it and loaded "
            "its rows; give the same command again, which then sees what is there"
        )
    return rows


def _mark(folder: RunFolder) -> dict[str, Any]:
    """Mark the folder as this run's, and return the new content of ``run.json``; called on the main process.

    Evaluations, models and metrics that no longer hold are removed or set aside. Settings that differ from those of
    the run that is resumed are logged.
    """
    record = dict(folder.record)
    if folder.overwrite:
        _clear(folder)
    if folder.state is State.NEW:
        if not folder.overwrite:
            _put_aside(folder)
        for name in ("metrics.jsonl", TOKEN_WEIGHTS):
            (folder.place / name).unlink(missing_ok=True)
        record = {"name": folder.settings["name"], "fingerprint": folder.fingerprint, "finished": False}
        write_run(folder.place, record)
    elif folder.is_opened_again:
        if folder.trained is None:
            record.pop("trained", None)
        record |= {"left": [], "finished": False}
        write_run(folder.place, record)
    if folder.is_measured_anew:
        shutil.rmtree(folder.place / "evaluation", ignore_errors=True)
    incomplete = {"/".join(one.split("/")[:2]) for one in folder.gone if one.startswith(MEASURED)}
    for name in incomplete:  # such as evaluation/before
        shutil.rmtree(folder.place / name, ignore_errors=True)  # half of an evaluation is of no use
    write_whole_text(folder.place / "recipe.yaml", written(folder.settings))
    for one in folder.changed:
        log.warning("resumed with another setting: %s", one)
    if folder.gone:
        log.warning("%s: %s gone since the run was finished, and made again", folder.place, in_few_words(folder.gone))
    return record


def _clear(folder: RunFolder) -> None:
    """Remove what an overwritten run has left and this run, or its report, would mistake for its own: checkpoints, the
    start model, evaluations, the critic, the preference model. A model that this run starts from stays."""
    place = folder.place
    earlier = [*place.glob("checkpoint-*"), *place.glob("broken-checkpoint-*"), place / SAVING, place / JOURNALS]
    for stale in (*earlier, place / "cold_start", place / "evaluation", place / "critic", place / PREFERENCE):
        if not _is_needed(stale, folder):
            shutil.rmtree(stale, ignore_errors=True)


def _put_aside(folder: RunFolder) -> None:
    """Rename the start model and the evaluations of another recipe's run, which failed before its first step, to
    `<name>.before-<n>`. A model that this run starts from stays."""
    for place in (folder.place / "cold_start", folder.place / "evaluation"):
        if place.is_dir() and not _is_needed(place, folder):
            beside = (place.with_name(f"{place.name}.before-{number}") for number in itertools.count(1))
            place.rename(next(one for one in beside if not one.exists()))


def _is_needed(place: Path, folder: RunFolder) -> bool:
    """Return whether a model that the run starts from stands in the folder ``place``."""
    return any(one.is_relative_to(place.resolve()) for one in folder.starts_from)


def _clear_after(folder: RunFolder, newest: Path | None, passed: Sequence[str]) -> None:
    """Remove what a run left of the steps after its checkpoint ``newest``, which will be done again, and print where it
    resumes. ``passed``: why newer checkpoints were passed over."""
    for why in passed:
        console.print(f"passed over {why}; set aside as broken-…", soft_wrap=True)
    set_aside(folder.place, newest)
    shutil.rmtree(folder.place / SAVING, ignore_errors=True)
    if newest is not None:
        console.print(f"going on from {newest.name}")
        others = other_releases(folder.record)
        if others:
            said = "resumed with other releases, so numbers need not be those of a whole run to the bit: %s"
            log.warning(said, "; ".join(others))
    elif "parameters" in folder.record:  # written when the training began
        said = f"{folder.place} has no whole checkpoint: training starts again at its first step"
        console.print(said, soft_wrap=True)
    step = -1 if newest is None else step_of(newest)
    evaluation_due = newest is not None and "evaluation_due" in read_state(newest).entries
    for name in ("metrics.jsonl", TOKEN_WEIGHTS):
        cut_metrics(folder.place / name, step, evaluation_due)


def set_aside(folder: Path, newest: Path | None) -> None:
    """Rename the checkpoints that are newer than ``newest`` (None: all) to `broken-checkpoint-<step>`, so that nothing
    finds them: their steps will be done, and saved, again."""
    last = -1 if newest is None else step_of(newest)
    for checkpoint in folder.glob("checkpoint-*"):
        if step_of(checkpoint) > last:
            places = (folder / f"broken-{checkpoint.name}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            checkpoint.rename(next(place for place in places if not place.exists()))
