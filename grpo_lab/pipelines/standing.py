"""Standing of each stage of a pipeline: what has to be done with it now, and why.

`run`, `--only`, `--dry-run`, `status`, `show` and the report all take it from here. The states are:

    new       the stage has never begun
    again     what the stage is made from has changed, or an output that others can take is gone
    goes on   the stage was broken off or has failed, or one of its results that nobody takes (an evaluation) is gone
    waits     the stage is done, but one that it takes inputs from is not
    done      nothing has to be done

A stage that waits is done again only if its inputs come out differently. An output that somebody has edited counts as
it is now: the stages that take it are done again, and the stage that made it reports the edit.

How the pieces work together: `Asked` is what the recipe wants of a stage, ``StageRecord`` what the stage has recorded.
`look_at` reads from the disk what has changed since (`Look`), and `standing` decides by these three.
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
"""States of a stage, beside ``NEW``, ``AGAIN`` and ``GOES_ON`` of ``stage_record``."""
TO_DO_AGAIN = "done, to do again"
"""Status that is shown of a stage which is done and has to be done again."""
LOCK_OF_STAGE = "{}.stage.lock"
"""Lock file in the pipeline's folder. The process that does the stage holds it."""


class Standing(NamedTuple):
    """What has to be done with a stage (``state``), and why. ``edited``: files of its results that somebody has changed
    since it was done."""

    state: str
    why: str
    edited: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """Everything that a pipeline's recipe asks of a stage now, as ``pipeline.json`` keeps it.

    Attributes:
        settings: settings that the stage's results depend on, and its ``inputs``.
        takes: input, as stage.thing → its place in the pipeline's folder.
        named: files and folders that the settings name.
        leaves: places in the stage's own folder of what other stages can take.
        keeps: places in the stage's own folder of results that no stage takes.
    """

    settings: Mapping[str, Any]
    takes: Mapping[str, str]
    named: Sequence[str] = ()
    leaves: Sequence[str] = ()
    keeps: Sequence[str] = ()

    @property
    def before(self) -> list[str]:
        """The stages that inputs are taken from, each once."""
        return list(dict.fromkeys(one.partition(".")[0] for one in self.takes))

    def places(self, folder: Path) -> dict[str, Path]:
        """Return name → place of everything that the stage is made from: its inputs in the pipeline's ``folder``, and
        what its settings name."""
        return {name: folder / place for name, place in self.takes.items()} | {one: Path(one) for one in self.named}


@dataclass(frozen=True)
class Look:
    """What was found on the disk about a stage.

    Attributes:
        digests: name of what the stage is made from → digest of what it holds now.
        gone: missing files and folders of the stage that other stages can take.
        lost: missing files of results that no stage takes.
        edited: files of its results that somebody has changed since it was done.
    """

    digests: Mapping[str, str]
    gone: Sequence[str] = ()
    lost: Sequence[str] = ()
    edited: Sequence[str] = ()


def standing(record: StageRecord, asked: Asked, look: Look, before: Mapping[str, Standing]) -> Standing:
    """Decide what has to be done with a stage, without reading the disk.

    Args:
        record: what the stage has recorded.
        asked: what the recipe asks for now.
        look: what was found on the disk.
        before: stage → standing of the stages that come before it.
    """
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
    """Read the inputs and results of stage ``name`` in the pipeline's ``folder``, for ``standing``."""
    digests = digests_at(asked.places(folder))
    place = folder / name
    gone = [one for one in asked.leaves if not (place / one).exists()]
    edited: list[str] = []
    lost: list[str] = []
    for file, then in record.left.items() if record.status == DONE else ():
        if (place / file).is_file():
            if not is_as_seen(place / file, then):
                edited.append(file)
        elif any(file == kept or file.startswith(f"{kept}/") for kept in asked.keeps):
            lost.append(file)
        else:
            gone.append(file)
    if record.status == DONE and (place / RUN).is_file():  # the stage is a whole command, which makes them again
        lost += [one for one in _gone_by_its_run(place) if one not in (*gone, *lost)]
    return Look(digests, gone, lost, edited)


def _gone_by_its_run(place: Path) -> list[str]:
    """List the files that the command which worked in ``place`` left there when it finished, and that are gone."""
    try:
        return gone_from(place, read_record(place / RUN))
    except ValueError:
        return [f"readable {RUN}"]  # the reason reads "its readable run.json is gone"; the command says what is wrong


def survey(folder: Path, asked: Mapping[str, Asked], records: Mapping[str, StageRecord]) -> dict[str, Standing]:
    """Return stage → standing for the pipeline in ``folder``. In ``asked`` each stage must come after those that it
    takes inputs from."""
    found: dict[str, Standing] = {}
    for name, one in asked.items():
        found[name] = standing(records[name], one, look_at(folder, name, records[name], one), found)
    return found


def state_of(folder: Path, record: StageRecord) -> str:
    """Return the status in a stage's record; "broken off" if that says "running" and no process holds its lock."""
    locked = record.status == RUNNING and is_locked(folder / LOCK_OF_STAGE.format(record.name))
    if record.status == RUNNING and not locked:
        return BROKEN_OFF
    return record.status


def stages_now(folder: Path) -> list[PipelineStage]:
    """Return the stages of the pipeline in ``folder`` as they stand now, to be shown to a user.

    The list is empty if ``pipeline.json`` cannot be read (``read_stages`` reports that), or if nothing is left of the
    stages themselves. A stage of which ``pipeline.json`` does not say what is asked gets that as its error.
    """
    try:
        listed = read_record(folder / STAGES, {"stages": list})["stages"]
        listed = [checked_object(one, {"name": str, "kind": str, "inputs": dict, "before": list}) for one in listed]
    except (OSError, ValueError):
        return []
    asked = {str(one["name"]): _asked(one) for one in listed}
    if not any(asked.values()) and not any((folder / name / STAGE).is_file() for name in asked):
        return []  # only `pipeline.json` was kept, which is shown as it is
    records = {str(one["name"]): _record(folder, one) for one in listed}
    stands = survey(folder, {name: one for name, one in asked.items() if one is not None}, records)
    return [_shown(record, state_of(folder, record), stands.get(name)) for name, record in records.items()]


def _shown(record: StageRecord, status: str, stands: Standing | None) -> PipelineStage:
    """Return a stage as it is shown: with what has to be done with it, if that is more than its ``status`` says, and
    with its edited files as its error. ``stands`` is None if it is not known what is asked of the stage."""
    if stands is None:
        said = f"{STAGES} does not say what is asked of it, so that it cannot be known whether it stands"
        return replace(record, status=status, error=record.error or said)
    why = record.why
    if record.status == DONE and stands.state == WAITS:
        status = f"{DONE}, {stands.why}"
        why = stands.why
    elif record.status == DONE and stands.state in (AGAIN, GOES_ON):
        status = TO_DO_AGAIN
        why = stands.why
    elif stands.state == AGAIN:
        why = stands.why
    error = ""
    if record.status == FAILED:
        error = record.error
    elif stands.edited:
        error = f"{', '.join(stands.edited)} edited since"
    return replace(record, status=status, why=why, error=error)


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
    """Print a drawing of the stages, and how far each of them is. Raises ValueError if there is no pipeline."""
    pipeline_sections.show(folder, console, stages_now(folder))


def report(place: Path) -> Path:
    """Write the report page of ``place``; for a pipeline, with its stages as they stand now."""
    return write_report(place, stages_now)


def left_in(folder: Path, places: Sequence[str]) -> list[str]:
    """Return the names of a finished run's files, which its ``run.json`` keeps as ``left``: those of the model in
    ``folder``, and those at ``places`` in it. ``gone_from`` lists which of them are missing later."""
    files = [*files_of_model(folder), *(file for place in places for file in files_of(folder / place))]
    return sorted({file.relative_to(folder).as_posix() for file in files})


def again_in_words(folder: Path, overwrite: bool) -> dict[str, str]:
    """Return the line of a dry run's plan that names files which are missing from the finished run in ``folder``; `{}`
    if none are, or with ``overwrite``."""
    gone = []
    if not overwrite:
        gone = gone_from(folder, read_marker(folder / RUN))
    if gone:
        return {"to make again": ", ".join(gone)}
    return {}
