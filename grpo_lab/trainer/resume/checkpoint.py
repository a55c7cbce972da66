"""Write checkpoints atomically: under its name a checkpoint is complete, or it is not there at all.

transformers and TRL write file by file into ``checkpoint-N``. Here all files (theirs, ours, a critic's, every rank's
shards) go into ``_saving/checkpoint-N``. When all ranks are done, the list of files is written, everything is flushed
to the disk, and one rename gives the folder its name. Then come the push to the hub and the pruning of old checkpoints.
On nodes without a common file system, each node's first process moves what is on its own disk.

If a rank cannot write, all ranks raise ``CheckpointNotWritten``; the partial checkpoint is removed, and earlier ones
stay. With FSDP or DeepSpeed, and if a best checkpoint is kept (``metric_for_best_model``), the other ranks may be
inside a collective of the saving itself and cannot be told. There the rank's error ends its process, and the launcher
ends the rest.

HF pickles ``args`` with every save. A setting of ours that holds an object that cannot be pickled (a lambda, a closure)
is replaced by the object's name in the file (``picklable``); the script that resumes provides the object again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from grpo_lab.finite import NumbersError, not_finite
from grpo_lab.io import saving
from grpo_lab.registry import address
from grpo_lab.trainer.ports import UpdatePort
from grpo_lab.trainer.ranks import TRAINED, is_of_lost_rank, named_place, refuse_bad_weights
from grpo_lab.trainer.resume.whole import SAVING, all_in, keep, newest_whole, step_of
from grpo_lab.trainer.settings.parse import OUR_FIELDS
from grpo_lab.trainer.trl_bridge.names import replaced

#: Runs the function that it gets on every rank, and raises an error of one rank on all.
Together = Callable[[Callable[[], None]], None]


def picklable(args: Any) -> Any:
    """Return ``args`` if all values of our settings can be pickled; else a copy in which those that cannot are replaced
    by their names."""
    ours = {name: value for name in OUR_FIELDS if (value := getattr(args, name, None)) is not None}
    changed = {name: new for name, value in ours.items() if (new := _picklable(value)) is not value}
    if changed:
        args = copy.copy(args)
        vars(args).update(changed)
    return args


def _picklable(value: Any) -> Any:
    """Return ``value``, with what cannot be pickled in it replaced by its name; the same object if nothing was."""
    if isinstance(value, dict):
        items = {key: _picklable(item) for key, item in value.items()}
        if all(items[key] is value[key] for key in value):
            return value
        return items
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own pickling raises
        return address(value, ":")
    return value


class CheckpointNotWritten(RuntimeError):
    """Raised if a checkpoint could not be saved. The message says where, why, and which checkpoint is the newest."""


def save_final(trainer: GRPOTrainer, folder: Path, beside: Callable[[Path], Any]) -> None:
    """Save the trained model to ``folder``, file by file as transformers does, and then call ``beside(folder)``, which
    writes further files.

    Raises:
        CheckpointNotWritten: the writing rank cannot write; the checkpoints stay as they were.
        NumbersError: the model has NaN or infinities.
    """
    if not trainer.lab_settings.keeps_nan:
        refuse_bad_weights(trainer, TRAINED)
    try:
        if trainer.args.should_save:
            _must_be_there(folder)
        with saving(folder):
            trainer.save_model(str(folder))
            beside(folder)
    except OSError as error:
        newest, _ = newest_whole(folder)
        again = f"all steps are in {newest}: `grpo-lab train … --resume` saves it again"
        raise CheckpointNotWritten(
            f"the trained model could not be written to {folder}{_room(folder)}: {type(error).__name__}: {error}. "
            f"Mend that (room on the disk, the folder's permissions); {again if newest else 'there is no checkpoint'}"
        ) from error


@named_place("checkpoint")
def save_whole(
    trainer: GRPOTrainer,
    model: Any,
    trial: Any,
    stock: Callable[[Any, Any], None],
    ours: Callable[[Path, Together], None],
) -> None:
    """Write the checkpoint of the current step completely, or not at all. Called on every rank.

    Args:
        trainer: whose run it is.
        model, trial: what transformers passes to ``_save_checkpoint``.
        stock: TRL's own ``_save_checkpoint``, called as ``stock(model, trial)``.
        ours: writes our files: ``ours(folder, together)``, where ``together`` runs a function on every rank.

    Raises:
        CheckpointNotWritten: on every rank if one could not write.
        NumbersError: on every rank if the checkpoint has NaN or infinities.
    """
    state = trainer.state
    run = Path(trainer._get_output_dir(trial=trial))
    name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    place = run / name
    partial = run / SAVING / name
    best = state.best_model_checkpoint
    pushes: list[str] = []
    together = functools.partial(_together, trainer, place)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    # saving shards takes all ranks, and so does HF's barrier where the best checkpoint is named
    collective = trainer.accelerator.num_processes > 1 and (sharded or state.best_global_step)
    with replaced(trainer, "args", picklable(trainer.args)):  # HF pickles them into training_args.bin
        try:
            together(lambda: _empty(trainer, partial, main=True))
            together(lambda: _empty(trainer, partial, main=False))
            _best_of_before(state, run)
            with (
                replaced(trainer, "_get_output_dir", lambda trial=None: str(partial.parent)),
                replaced(trainer, "_push_from_checkpoint", pushes.append),
            ):
                ours(partial, together)
                together(lambda: stock(model, trial), alone=bool(collective))
            if state.best_model_checkpoint == str(partial):
                state.best_model_checkpoint = str(place)
            _refuse_not_finite(trainer, partial, place, together)
            together(lambda: _settle(trainer, partial, place, main=True))
            together(lambda: _settle(trainer, partial, place, main=False))
        except BaseException:
            state.best_model_checkpoint = best
            raise
        if pushes:
            trainer._push_from_checkpoint(str(place))
    if trainer.args.should_save:
        _prune(trainer, run)


def _refuse_not_finite(trainer: UpdatePort, partial: Path, place: Path, together: Callable[..., None]) -> None:
    """Raise NumbersError on every rank if the files in ``partial`` hold NaN or infinities. It is called before the
    checkpoint gets its name, ``place``, and before earlier ones are pruned. One process of each node reads the
    files."""
    first = trainer.args.local_process_index == 0
    bad: list[str | None] = []
    together(lambda: bad.append(not_finite(partial) if first and not trainer.lab_settings.keeps_nan else None))
    if problem := next(filter(None, gather_object(bad)), None):
        if first:
            shutil.rmtree(partial.parent, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        raise NumbersError(
            f"the checkpoint of step {step_of(place)} is not kept: {problem}. Look at the optimizer (`learning_rate`, "
            "`adam_epsilon`, weights in fp16), then `grpo-lab train … --resume`: earlier checkpoints are as they were, "
            f"{_newest(place.parent)}"
        )


def _prune(trainer: UpdatePort, run: Path) -> None:
    """Remove the checkpoints that are too many (``surplus``). Each is moved into ``_saving`` first: if the removal is
    interrupted, no half of a checkpoint stands under a checkpoint's name."""
    best = trainer.state.best_model_checkpoint
    step = trainer.state.global_step
    for going in surplus(run, trainer.args.save_total_limit, best, step):
        left = run / SAVING / going.name
        left.parent.mkdir(exist_ok=True)
        os.replace(going, left)
        shutil.rmtree(left.parent, ignore_errors=True)


def surplus(run: Path, limit: int | None, best: str | None, step: int) -> list[Path]:
    """Return the checkpoints in ``run`` to remove, so that at most ``limit`` stay: the oldest ones, never the newest or
    ``best``. None, 0 or a negative ``limit`` removes none.

    transformers' ``rotate_checkpoints`` orders them by the clock, which may have been set back meanwhile. Here they are
    ordered by their steps. Those of a later step than ``step``, at which the run is now, are left from an earlier
    training, and count as the oldest.
    """
    if not limit or limit < 0:
        return []
    ordered = sorted(all_in(run), key=lambda place: (step_of(place) <= step, step_of(place)))
    spared = {*ordered[-1:], *([] if best is None else [Path(best)])}
    many = len(ordered) - max(limit, len(spared))
    return [one for one in ordered if one not in spared][: max(many, 0)]


def _together(trainer: UpdatePort, place: Path, act: Callable[[], None], alone: bool = False) -> None:
    """Run ``act`` on every rank, and raise CheckpointNotWritten on all if it fails on one. ``alone``: each rank raises
    its own error at once, without asking the others. ``place`` is the checkpoint that is being written."""
    fault: Exception | None = None
    try:
        act()
    except Exception as error:  # OSError, safetensors' and torch's own, a team's: all mean that there is no checkpoint
        if is_of_lost_rank(error):
            raise  # the ranks cannot exchange anything any more
        fault = error
    own = None
    if fault is not None:
        own = f"{type(fault).__name__}: {fault}"
    reports = [own] if alone else gather_object([own])
    problem = next(
        (f"rank {rank}: {why}" if len(reports) > 1 else why for rank, why in enumerate(reports) if why), None
    )
    if problem is None:
        return
    if not alone:
        if trainer.args.local_process_index == 0:
            shutil.rmtree(place.parent / SAVING, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()  # until all half-written files are gone
    raise CheckpointNotWritten(
        f"the checkpoint {place} could not be written{_room(place.parent)}: {problem}. Nothing of it is left under "
        f"that name, earlier checkpoints are as they were; {_newest(place.parent)}. Mend that (room on the disk, the "
        "folder's permissions, `output_dir`, `save_total_limit`) and go on: `grpo-lab train … --resume`"
    ) from fault


def _newest(run: Path) -> str:
    """Say which whole checkpoint of the run is the newest, for error messages."""
    newest = newest_whole(run)[0]
    if newest is None:
        return "there is no earlier one"
    return f"the newest whole one is {newest}"


def _room(folder: Path) -> str:
    """Say how much space is free on the folder's disk, for error messages; "" if that is unknown."""
    try:
        return f" ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free there)"
    except OSError:
        return ""


def _writes(trainer: UpdatePort, main: bool) -> bool:
    """Return whether this process acts in one of two turns: in the first (``main``) the main process does, in the
    second the first process of each other node, which may have a disk of its own."""
    return trainer.args.local_process_index == 0 and bool(trainer.accelerator.is_main_process) is main


def _empty(trainer: UpdatePort, partial: Path, main: bool) -> None:
    """Make the folder ``partial``, empty, in this process's turn (``_writes``)."""
    if _writes(trainer, main):
        if main:
            _must_be_there(Path(trainer.args.output_dir))
        if main or any(path.is_file() for path in partial.parent.rglob("*")):  # none on a common disk
            shutil.rmtree(partial.parent, ignore_errors=True)  # left by a killed run
        partial.mkdir(parents=True, exist_ok=True)


def _must_be_there(folder: Path) -> None:
    """Raise FileNotFoundError if ``folder`` is gone. It is not made anew, since it would hold only the end of a run."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is gone: it was removed while the run wrote into it")


def _best_of_before(state: Any, run: Path) -> None:
    """Set ``state.best_model_checkpoint`` to an earlier checkpoint of ``run`` if its step is the best one, as
    transformers does when it saves: the evaluation of that step may have come after its checkpoint."""
    place = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if state.best_global_step and state.best_global_step != state.global_step and place.exists():
        state.best_model_checkpoint = str(place)


def _settle(trainer: UpdatePort, partial: Path, place: Path, main: bool) -> None:
    """Move the finished checkpoint from ``partial`` to its name, ``place``, in this process's turn (``_writes``): the
    main process's, and then the files that another node wrote to its own disk."""
    if _writes(trainer, main):
        if main and trainer.state.best_global_step == trainer.state.global_step:  # the file names `partial`
            trainer.state.save_to_json(str(partial / "trainer_state.json"))
        with contextlib.nullcontext() if main else contextlib.suppress(FileNotFoundError):  # none left on a common disk
            keep(partial, place, trainer.args.save_checksums, finite=not trainer.lab_settings.keeps_nan)
