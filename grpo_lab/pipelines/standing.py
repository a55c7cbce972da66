"""Standing of each stage of a pipeline: what has to be done with it now, and why.

The answer is the same for `run`, `--only`, `--dry-run`, `status`, `show` and the report:

    new       it has not begun
    again     what it is made from has changed, or an output that others take is gone
    goes on   it was broken off, has failed, or a result that nobody takes (an evaluation) is gone
    waits     it is done, and a stage that it reads is not
    done      nothing has to be done

A stage that waits is done again only if what it reads comes out differently. An output that was edited counts as it is
now: stages that take it are done again, and its own stage reports the edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from grpo_lab.evaluation import pipeline_sections, write_report
from grpo_lab.evaluation.run_record import BROKEN_OFF, DONE, FAILED, RUNNING, STAGES, PipelineStage, gone_from
from grpo_lab.locks import is_locked
from grpo_lab.pipelines.stage_record import AGAIN, GOES_ON, StageRecord, digests_at, files_of
from grpo_lab.reading import checked_object, read_record
from grpo_lab.recipe.digests import is_as_seen
from grpo_lab.recipe.models import files_of_model
from grpo_lab.runs.folder import RUN, STAGE, read_marker

WAITS, NOTHING = "waits", "done"
TO_DO_AGAIN = "done, to do again"
LOCK_OF_STAGE = "{}.stage.lock"
"""Lock file in the pipeline's folder. The process that does the stage holds it."""


class Standing(NamedTuple):
    """What has to be done with a stage (``state``), and why. ``edited`` names files of its results that were changed
    after it had left them."""

    state: str
    why: str
    edited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """Everything that a pipeline asks of a stage now, as ``pipeline.json`` keeps it.

    settings: those that its results depend on, and its ``inputs``. takes: stage.thing → place in the pipeline's folder.
    named: files and folders that the settings name. leaves: places in its own folder that others can take; keeps:
    places of results that nobody takes.
    """

    settings: Mapping[str, Any]
    takes: Mapping[str, str]
    named: Sequence[str] = ()
    leaves: Sequence[str] = ()
    keeps: Sequence[str] = ()

    @property
    def before(self) -> list[str]:
        """The stages from which it takes inputs."""
        return list(dict.fromkeys(one.partition(".")[0] for one in self.takes))

    def places(self, folder: Path) -> dict[str, Path]:
        """Return the places of everything that the stage is made from, in a pipeline's ``folder``."""
        return {name: folder / place for name, place in self.takes.items()} | {one: Path(one) for one in self.named}


@dataclass(frozen=True)
class Look:
    """What was found on the disk about a stage: digests of its inputs, and which of its results are gone or edited."""

    digests: Mapping[str, str]
    gone: Sequence[str] = ()
    lost: Sequence[str] = ()
    edited: Sequence[str] = ()


def standing(record: StageRecord, asked: Asked, look: Look, before: Mapping[str, Standing]) -> Standing:
    """Decide what has to be done with a stage; nothing is read. ``before``: the standing of the stages that it takes
    inputs from."""
    edited = tuple(look.edited)
    why = record.reason(asked.settings, look.digests, look.gone)
    if why:
        return Standing(why.partition(":")[0], why, edited)
    if look.lost:
        return Standing(GOES_ON, f"{GOES_ON}: its {look.lost[0]} is gone", edited)
    left = [name for name in asked.before if name in before and before[name].state != NOTHING]
    if left:
        return Standing(WAITS, f"waits for {', '.join(left)}", edited)
    return Standing(NOTHING, record.why, edited)


def look_at(folder: Path, name: str, record: StageRecord, asked: Asked) -> Look:
    """Read from the pipeline's ``folder`` what ``standing`` needs to know."""
    digests = digests_at(asked.places(folder))
    place = folder / name
    gone = [one for one in asked.leaves if not (place / one).exists()]
    edited: list[str] = []
    lost: list[str] = []
    for file, then in record.left.items() if record.status == DONE else ():
        if not (place / file).is_file():
            inside = any(file == kept or file.startswith(f"{kept}/") for kept in asked.keeps)
            (lost if inside else gone).append(file)
        elif not is_as_seen(place / file, then):
            edited.append(file)
    if record.status == DONE and (place / RUN).is_file():  # a command that works by itself: it goes on there
        lost += [one for one in _gone_by_its_run(place) if one not in (*gone, *lost)]
    return Look(digests, gone, lost, edited)


def _gone_by_its_run(place: Path) -> list[str]:
    """List the files that the command in ``place`` left there when it finished, and that are gone."""
    try:
        return gone_from(place, read_record(place / RUN))
    except ValueError:
        return [f"readable {RUN}"]  # the command says what is wrong with it


def survey(folder: Path, asked: Mapping[str, Asked], records: Mapping[str, StageRecord]) -> dict[str, Standing]:
    """Return the standing of each stage. ``asked`` must name each after those that it takes inputs from."""
    found: dict[str, Standing] = {}
    for name, one in asked.items():
        found[name] = standing(records[name], one, look_at(folder, name, records[name], one), found)
    return found


def state_of(folder: Path, record: StageRecord) -> str:
    """Return a stage's status. If it says that it runs, and nobody holds its lock, it was broken off."""
    locked = record.status == RUNNING and is_locked(folder / LOCK_OF_STAGE.format(record.name))
    if record.status == RUNNING and not locked:
        return BROKEN_OFF
    return record.status


def stages_now(folder: Path) -> list[PipelineStage]:
    """Return the stages of the pipeline in ``folder`` with their standing now, to be shown.

    Empty if its file cannot be read, which ``read_stages`` reports. A stage of which the file does not say what is
    asked gets that as its error.
    """
    try:
        listed = read_record(folder / STAGES, {"stages": list})["stages"]
        listed = [checked_object(one, {"name": str, "kind": str, "inputs": dict, "before": list}) for one in listed]
    except (OSError, ValueError):
        return []
    asked = {str(one["name"]): _asked(one) for one in listed}
    if not any(asked.values()) and not any((folder / name / STAGE).is_file() for name in asked):
        return []  # the file alone was kept: it says what there was
    records = {str(one["name"]): _record(folder, one) for one in listed}
    shown = list[PipelineStage]()
    stand = survey(folder, {name: one for name, one in asked.items() if one is not None}, records)
    for name, record in records.items():
        if asked[name] is None:
            said = f"{STAGES} does not say what is asked of it, so that it cannot be known whether it stands"
            shown.append(replace(record, status=state_of(folder, record), error=record.error or said))
            continue
        stands = stand[name]
        status = state_of(folder, record)
        why = record.why
        if stands.state in (AGAIN, GOES_ON, WAITS) and record.status == DONE:
            if stands.state == WAITS:
                status = f"{DONE}, {stands.why}"
            else:
                status = TO_DO_AGAIN
            why = stands.why
        elif stands.state == AGAIN:
            why = stands.why
        edited = ""
        if stands.edited:
            edited = f"{', '.join(stands.edited)} edited since"
        error = record.error if record.status == FAILED else edited
        shown.append(replace(record, status=status, why=why, error=error))
    return shown


def _asked(said: Mapping[str, Any]) -> Asked | None:
    """Read what `pipeline.json` says is asked of a stage; None if that is damaged, or an earlier release's."""
    try:
        needs = {"settings": dict, "takes": dict, "named": list, "leaves": list, "keeps": list}
        return Asked(**checked_object(said.get("asked"), needs))
    except (ValueError, TypeError):
        return None


def _record(folder: Path, said: Mapping[str, Any]) -> StageRecord:
    """Read the record in a stage's own file. A damaged file becomes a failed stage, with the reason as its error."""
    name = str(said["name"])
    kind = str(said.get("kind"))
    try:
        found = StageRecord.read(folder / name, name, kind)
    except ValueError as error:
        return StageRecord(name, kind, FAILED, error=str(error))
    found.inputs = {key: {**one, **found.inputs.get(key, {})} for key, one in said.get("inputs", {}).items()}
    found.before = list(said.get("before", ()))
    return found


def status(folder: Path, console: Console | None = None) -> None:
    """Print how far every stage is. Raises ValueError if there is no pipeline in ``folder``."""
    pipeline_sections.status(folder, console, stages_now(folder))


def show(folder: Path, console: Console | None = None) -> None:
    """Draw the stages, and how far each of them is."""
    pipeline_sections.show(folder, console, stages_now(folder))


def report(place: Path) -> Path:
    """Write the report page of ``place``; for a pipeline, with its stages as they stand now."""
    return write_report(place, stages_now)


def left_in(folder: Path, places: Sequence[str]) -> list[str]:
    """Return the names that a finished run's ``run.json`` keeps as ``left``: of the model in its ``folder``, and of
    every file at ``places`` in it. ``gone_from`` says which of them are gone."""
    files = [*files_of_model(folder), *(file for place in places for file in files_of(folder / place))]
    return sorted({file.relative_to(folder).as_posix() for file in files})


def again_in_words(folder: Path, overwrite: bool) -> dict[str, str]:
    """Say for the dry run of a command which files its finished run in ``folder`` has lost."""
    gone = []
    if not overwrite:
        gone = gone_from(folder, read_marker(folder / RUN))
    if gone:
        return {"to make again": ", ".join(gone)}
    return {}
