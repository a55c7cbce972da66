"""What the commands `curate`, `rounds` and `long2short` share: each samples a saved model, as a list of stages.

Each command describes its own part by a ``StagedCommand``. ``resolve`` checks a recipe and loads what it names, for the
run and for its dry run (``plan_of``). ``running`` then holds the output folder and keeps ``run.json`` up to date while
``stage_engine.carry_out`` does the command's stages.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.run_record import gone_from, in_few_words
from grpo_lab.pipelines.stage_engine import Caller, Stage, make_again
from grpo_lab.pipelines.stage_record import StageRecord
from grpo_lab.pipelines.standing import again_in_words
from grpo_lab.recipe.job import Questions, questions
from grpo_lab.runs.differences import earlier_run, refuse_other_rows, rows_fingerprint, settings_of, versions
from grpo_lab.runs.folder import RUN, one_writer, write_run
from grpo_lab.runs.stage import Facts, Words, console
from grpo_lab.runs.stop_requests import StopRequests


@dataclass(frozen=True)
class Resolved:
    """What a recipe names, loaded.

    Attributes:
        asked: rows, the reward that judges answers, and held-out rows.
        more: what only this command loads (``StagedCommand.load``).
        fingerprint: `rows_fingerprint` of the rows; None if the command does not record it, or without rows.
    """

    asked: Questions
    more: Any = None
    fingerprint: Facts | None = None


@dataclass(frozen=True)
class StagedCommand:
    """The functions and names in which one command differs from the others.

    Args:
        name: name of the command, which ``run.json`` has under ``pipeline``.
        check: ``check(recipe, overwrite)``, called before anything is loaded. Raises ValueError for settings, or for
            an earlier run's samples, that do not fit.
        load: ``load(recipe, questions, overwrite, here_only)`` returns what else the command loads, and raises
            ValueError if that does not fit.
        words: ``words(recipe, resolved, overwrite)`` returns the lines of the dry run's plan.
        settings: ``settings(recipe)`` returns the settings that two runs of one folder must have in common.
        rows: key in ``run.json`` of the rows' fingerprint; empty: the fingerprint is not recorded there.
        marker: file that says which run the folder holds.
        follow: ``follow(recipe, record)`` raises ValueError if the recipe cannot continue the run with that record.
    """

    name: str
    check: Callable[[Any, bool], None]
    load: Callable[[Any, Questions, bool, bool], Any]
    words: Callable[[Any, Resolved, bool], Words]
    settings: Callable[[Any], Facts] = settings_of
    rows: str = ""
    marker: str = RUN
    follow: Callable[[Any, Facts], None] = lambda recipe, earlier: None

    def earlier(self, recipe: Any, overwrite: bool) -> Facts:
        """Return what an earlier run in the recipe's folder has recorded (``earlier_run``). Raises ValueError if this
        recipe cannot continue it."""
        found = earlier_run(recipe, self.name, overwrite, self.settings, self.marker)
        self.follow(recipe, found)
        return found


def resolve(command: StagedCommand, recipe: Any, overwrite: bool, here_only: bool = False) -> Resolved:
    """Check ``recipe`` and load what it names; nothing is written. Raises ValueError for what would stop the run.

    ``here_only``: a dry run, which need not reach the hub: rows that are not on this machine are None (`rows_here`).
    """
    command.check(recipe, overwrite)
    then = command.earlier(recipe, overwrite).get(command.rows)
    asked = questions(recipe.data, recipe.reward, getattr(recipe, "evaluation", None), here_only)
    fingerprint = None
    if command.rows and asked.rows is not None:
        fingerprint = rows_fingerprint(asked.rows)
        refuse_other_rows(recipe.output_dir, then, fingerprint)
    return Resolved(asked, command.load(recipe, asked, overwrite, here_only), fingerprint)


def plan_of(command: StagedCommand, recipe: Any, overwrite: bool = False) -> Words:
    """Describe what the command will do, for ``--dry-run``. Raises ValueError for what would stop it."""
    words = command.words(recipe, resolve(command, recipe, overwrite, here_only=True), overwrite)
    return {**words, **again_in_words(recipe.output_dir, overwrite), "output folder": str(recipe.output_dir)}


@contextmanager
def locked_run(recipe: Any, earlier: Callable[[], Facts]) -> Iterator[tuple[StopRequests, Facts]]:
    """Hold the lock of a command's folder for the block, and listen for requests to stop.

    ``earlier``: function that returns the record of an earlier run that is continued, or `{}` for a new run; it is
    called when the lock is held. Yields the requests and that record. Raises Interrupted on a stop, here (a stop file
    that was waiting for a run which is continued) or in the block.
    """
    folder = recipe.output_dir
    with one_writer(folder), StopRequests(folder, recipe.max_hours, recipe.stop_file) as stop:
        found = earlier()
        stop.heed_waiting(new=not found)
        yield stop, found


@dataclass
class CommandRun(Caller):
    """A run of a command in its folder: prints a heading before each stage, and keeps ``run.json`` up to date.

    Attributes:
        folder: the output folder.
        stop: requests to stop.
        about: the content of ``run.json``.
    """

    folder: Path
    stop: StopRequests
    about: dict[str, Any]

    @property
    def finished(self) -> bool:
        return bool(self.about["finished"])

    def write(self, **more: Any) -> None:
        """Update ``run.json`` with ``more``."""
        self.about |= more
        write_run(self.folder, self.about)

    def begins(self, stage: Stage, record: StageRecord) -> None:
        console.rule(self._called(stage))

    def ends(self, stage: Stage, seconds: float) -> None:
        self.about["seconds"][self._called(stage)] = round(seconds, 1)
        self.write()

    def _called(self, stage: Stage) -> str:
        """Return a stage's name as headings and ``run.json`` have it, with that of its own folder: "round 1, train"."""
        if stage.folder == self.folder:
            return stage.name
        return f"{stage.folder.name.replace('-', ' ')}, {stage.name}"


@contextmanager
def running(
    command: StagedCommand,
    recipe: Any,
    stages: Sequence[Stage],
    about: Mapping[str, Any],
    forget: Iterable[Path] | None = None,
) -> Iterator[CommandRun]:
    """Hold the recipe's folder for the block (``locked_run``), and keep its ``run.json``.

    If files of a finished run are missing, the markers of the stages that made them are removed, so that they are made
    again.

    Args:
        command: the command that runs.
        recipe: its recipe.
        stages: all stages of the run, which the block is to do.
        about: what ``run.json`` says of the run, besides name, versions, seconds and whether it is finished.
        forget: files and folders of an earlier run to remove, since this run replaces it; None: that run is continued.
    """
    folder = recipe.output_dir
    with locked_run(recipe, lambda: command.earlier(recipe, overwrite=forget is not None)) as (stop, found):
        gone = gone_from(folder, found)
        if gone:
            console.print(f"{folder}: {in_few_words(gone)} gone, and made again", soft_wrap=True)
            make_again(stages, [folder / one for one in gone])
        for place in forget or ():
            shutil.rmtree(place, ignore_errors=True)
            if place.is_file():
                place.unlink()
        finished = bool(found.get("finished")) and not gone
        run = CommandRun(folder, stop, {"name": recipe.name, "pipeline": command.name, **about, "versions": versions()})
        left = any(stage.due(stage.record()) for stage in stages)
        run.write(seconds=dict(found.get("seconds", {})), finished=finished and not left)
        yield run
