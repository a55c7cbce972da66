"""A checkpoint is there whole, under its name, or not at all: whoever reads the folder never meets half of one.

transformers and TRL write file by file into ``checkpoint-N``. Here everything (theirs, ours, a critic, the shards of
every rank) goes into ``_saving/checkpoint-N``; when all ranks are done the list of files (``grpo_lab_checkpoint.json``)
is written, all of it brought to the disk, and the folder moved to its name: one rename. After that come the push to the
hub and the pruning of old ones. On nodes that share no file system each node's first process moves what lies on its own
disk.

A rank that cannot write stops all of them with ``CheckpointNotWritten``; the half goes, earlier checkpoints are as they
were. With FSDP or DeepSpeed, and where a best checkpoint is kept (``metric_for_best_model``), the others may be inside
a collective of the saving itself: there the rank's error ends its process, and the launcher ends the rest.

HF pickles ``args`` with every save. A part given as an object that cannot be pickled (a lambda, a closure) stands in
the file under its name (``picklable``); the script that resumes brings the part.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_lab.finite import NumbersError, not_finite
from grpo_lab.io import move_whole, write_whole_text
from grpo_lab.registry import address
from grpo_lab.trainer.ranks import TRAINED, at, is_of_lost_rank, refuse_bad_weights
from grpo_lab.trainer.resume.whole import MARK, SAVING, mark_of, newest_whole, step_of
from grpo_lab.trainer.settings.parse import OUR_FIELDS
from grpo_lab.trainer.trl_bridge.names import replaced


def picklable(args: Any) -> Any:
    """``args``, or where a part of ours cannot be pickled a copy in which its name stands in for it."""
    changed = {name: _picklable(getattr(args, name)) for name in OUR_FIELDS if getattr(args, name, None) is not None}
    changed = {name: value for name, value in changed.items() if value is not getattr(args, name)}
    if not changed:
        return args
    record = copy.copy(args)
    vars(record).update(changed)
    return record


def _picklable(value: Any) -> Any:
    if isinstance(value, dict):
        items = {key: _picklable(item) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own pickling raises
        return address(value, ":")
    return value


class CheckpointNotWritten(RuntimeError):
    """A checkpoint could not be saved: where, why, and which one is the newest that can be gone on from."""


def save_final(trainer: Any, folder: Path) -> None:
    """The trained model into ``folder``: transformers writes it there file by file.

    Raises:
        CheckpointNotWritten: of the rank that writes; the checkpoints are as they were.
        NumbersError: it is not finite.
    """
    if not trainer.lab_settings.keeps_nan:
        refuse_bad_weights(trainer, TRAINED)
    try:
        if trainer.args.should_save:
            _must_be_there(folder)
        trainer.save_model(str(folder))
    except (OSError, SafetensorError) as error:
        newest, _ = newest_whole(folder)
        kept = (
            "there is no checkpoint"
            if newest is None
            else f"all steps are in {newest}: `grpo-lab train … --resume` saves it again"
        )
        raise CheckpointNotWritten(
            f"the trained model could not be written to {folder}{_room(folder)}: {type(error).__name__}: {error}. "
            "Mend that (room on the "
            f"disk, the folder's permissions); {kept}"
        ) from error


@at("checkpoint")
def save_whole(trainer: Any, model: Any, trial: Any, stock: Callable[[Any, Any], None]) -> None:
    """What a checkpoint holds of ours, and ``stock(model, trial)``, TRL's own; whole or not at all. Called on every
    rank.

    Raises:
        CheckpointNotWritten: on every rank where one of them could not write.
        NumbersError: on every rank where NaN or infinities would be kept.
    """
    run = trainer._get_output_dir(trial=trial)
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    place, partial = Path(run) / name, Path(run) / SAVING / name
    best = trainer.state.best_model_checkpoint
    pushes: list[str] = []

    def together(act: Callable[[], None]) -> None:
        _together(trainer, place, act)

    with replaced(trainer, "args", picklable(trainer.args)):  # they travel into training_args.bin
        try:
            together(lambda: _empty(trainer, partial))
            together(lambda: _empty_own_disk(trainer, partial))
            _best_of_before(trainer, run)
            with (
                replaced(trainer, "_get_output_dir", lambda trial=None: str(partial.parent)),
                replaced(trainer, "_push_from_checkpoint", pushes.append),
            ):
                trainer.parts.save(str(partial), together)
                _together(trainer, place, lambda: stock(model, trial), alone=_has_collectives(trainer))
            if trainer.state.best_model_checkpoint == str(partial):
                trainer.state.best_model_checkpoint = os.path.join(run, name)
            _refuse_not_finite(trainer, partial, place, together)
            together(lambda: _settle(trainer, partial, place))
            together(lambda: _settle_own_disk(trainer, partial, place))
        except BaseException:
            trainer.state.best_model_checkpoint = best
            raise
        if pushes:
            trainer._push_from_checkpoint(os.path.join(run, name))
    if trainer.args.should_save:
        _prune(trainer, run)


def _has_collectives(trainer: Any) -> bool:
    """Whether stock's saving is one that a rank cannot leave in the middle: shards, or the barrier before the best one
    is named."""
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    return bool(trainer.accelerator.num_processes > 1 and (sharded or trainer.state.best_global_step))


def _refuse_not_finite(
    trainer: Any, partial: Path, place: Path, together: Callable[[Callable[[], None]], None]
) -> None:
    """Before it has its name, and before an earlier one goes: read back by one process of a node."""
    reads = trainer.args.local_process_index == 0 and not trainer.lab_settings.keeps_nan
    bad: list[str | None] = []
    together(lambda: bad.append(not_finite(partial) if reads else None))
    problem = next(filter(None, gather_object(bad)), None)
    if problem is None:
        return
    if trainer.args.local_process_index == 0:
        shutil.rmtree(partial.parent, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    raise NumbersError(
        f"the checkpoint of step {step_of(place)} is not kept: {problem}. Look at the optimizer (`learning_rate`, "
        "`adam_epsilon`, weights "
        f"in fp16), then `grpo-lab train … --resume`: earlier checkpoints are as they were, {_newest(place.parent)}"
    )


def _prune(trainer: Any, run: str) -> None:
    """Old checkpoints go once the new one is whole; each leaves its name in one move first, for half of one could look
    whole."""
    best, step = trainer.state.best_model_checkpoint, trainer.state.global_step
    for going in surplus(run, trainer.args.save_total_limit, best, step):
        left = Path(run) / SAVING / going.name
        left.parent.mkdir(exist_ok=True)
        os.replace(going, left)
        shutil.rmtree(left.parent, ignore_errors=True)


def surplus(run: str, limit: int | None, best: str | None, step: int) -> list[Path]:
    """The checkpoints that transformers' ``rotate_checkpoints`` would remove: the oldest beyond ``limit``, never the
    newest or the best.

    It asks the clock, which may have been set back meanwhile. Here those beyond ``step``, the newest one's, are of an
    earlier training, and the oldest; the others are as old as their steps say.
    """
    found = [place for place in Path(run).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if place.is_dir() and step_of(place) >= 0]
    ordered = sorted(found, key=lambda place: (step_of(place) <= step, step_of(place))) if limit and limit > 0 else []
    spared = {*ordered[-1:], *([] if best is None else [Path(best)])}
    many = len(ordered) - max(limit or 0, len(spared))
    return [one for one in ordered if one not in spared][: max(many, 0)]


def _together(trainer: Any, place: Path, act: Callable[[], None], alone: bool = False) -> None:
    """``act`` on every rank; an error of one is an error of all (``alone``: at once, of this rank)."""
    fault: Exception | None = None
    try:
        act()
    except Exception as error:  # OSError, safetensors' and torch's own, a team's: all mean that there is no checkpoint
        if is_of_lost_rank(error):
            raise  # nobody is left to be told
        fault = error
    own = None if fault is None else f"{type(fault).__name__}: {fault}"
    if alone and own is not None:
        raise CheckpointNotWritten(_said(place, own)) from fault
    told = gather_object([own])
    problems = [f"rank {rank}: {words}" if len(told) > 1 else words for rank, words in enumerate(told) if words]
    if problems:
        if trainer.args.local_process_index == 0:
            shutil.rmtree(place.parent / SAVING, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()  # whoever has the error finds nothing half written
        raise CheckpointNotWritten(_said(place, problems[0])) from fault


def _said(place: Path, problem: str) -> str:
    return (
        f"the checkpoint {place} could not be written{_room(place.parent)}: {problem}. Nothing of it is left under "
        "that name, earlier checkpoints are "
        f"as they were; {_newest(place.parent)}. Mend that (room on the disk, the folder's permissions, "
        "`output_dir`, `save_total_limit`) and go on: "
        "`grpo-lab train … --resume`"
    )


def _newest(run: Path) -> str:
    newest, _ = newest_whole(run)
    return "there is no earlier one" if newest is None else f"the newest whole one is {newest}"


def _room(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there)"
    except OSError:
        return ""


def _empty(trainer: Any, partial: Path) -> None:
    if trainer.accelerator.is_main_process:
        _must_be_there(Path(trainer.args.output_dir))
        shutil.rmtree(partial.parent, ignore_errors=True)  # what a killed run left
        partial.mkdir(parents=True, exist_ok=True)


def _must_be_there(folder: Path) -> None:
    """A folder that is made anew would hold the end of a run without its beginning."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is gone: it was removed while the run wrote into it")


def _empty_own_disk(trainer: Any, partial: Path) -> None:
    """On a node with a disk of its own; on a common one there is no file left to remove."""
    if trainer.args.local_process_index == 0 and not trainer.accelerator.is_main_process:
        if any(path.is_file() for path in partial.parent.rglob("*")):
            shutil.rmtree(partial.parent, ignore_errors=True)
        partial.mkdir(parents=True, exist_ok=True)


def _best_of_before(trainer: Any, run: str) -> None:
    """As transformers: an evaluation after a checkpoint may have found that one the best; it looks where it writes."""
    best, state = trainer.state.best_global_step, trainer.state
    place = os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{best}")
    if best and best != state.global_step and os.path.exists(place):
        state.best_model_checkpoint = place


def _mark(trainer: Any, partial: Path) -> dict[str, Any]:
    looked = not trainer.lab_settings.keeps_nan
    return mark_of(partial, trainer.state.global_step, checksums=trainer.args.save_checksums, finite=looked)


def _settle(trainer: Any, partial: Path, place: Path) -> None:
    """The main process moves the folder to its name."""
    if not trainer.accelerator.is_main_process:
        return
    if (
        trainer.state.best_global_step == trainer.state.global_step
    ):  # of this very step: written with the folder that it was in
        trainer.state.save_to_json(str(partial / "trainer_state.json"))
    write_whole_text(partial / MARK, json.dumps(_mark(trainer, partial)))
    move_whole(partial, place)
    shutil.rmtree(partial.parent, ignore_errors=True)


def _settle_own_disk(trainer: Any, partial: Path, place: Path) -> None:
    """On a node with a disk of its own: its files (random numbers, shards) are still where they were written."""
    if trainer.args.local_process_index == 0 and not trainer.accelerator.is_main_process and partial.is_dir():
        with contextlib.suppress(FileNotFoundError):  # one file system after all, whose client has not looked again
            write_whole_text(partial / MARK, json.dumps(_mark(trainer, partial)))
            move_whole(partial, place)
            shutil.rmtree(partial.parent, ignore_errors=True)
