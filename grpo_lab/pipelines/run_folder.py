"""The folder of `grpo-lab train`: whose it is, what may differ when it is gone on with, and from which checkpoint.

``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl``, ``evaluation/before`` and ``/after``,
``cold_start/`` (the model RL started from), ``report.html``; the final model in the folder itself."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from rich.console import Console

from grpo_lab.diagnostics.token_weights import FILE as TOKEN_WEIGHTS
from grpo_lab.evaluation.run_record import gone_from, in_few_words
from grpo_lab.io import write_whole_text
from grpo_lab.reading import read_text
from grpo_lab.recipe.sections import Recipe
from grpo_lab.recipe.yaml import parsed, written
from grpo_lab.runs.differences import (
    Difference,
    differing,
    other_releases,
    plain_settings,
    refuse_other_rows,
    refuse_other_settings,
)
from grpo_lab.runs.folder import RUN, check_writable, read_marker, record_of, write_run
from grpo_lab.runs.metrics import cut_metrics
from grpo_lab.trainer.resume.going_on import newest_read
from grpo_lab.trainer.resume.state import read_state
from grpo_lab.trainer.resume.whole import SAVING, newest_whole, step_of
from grpo_lab.trainer.scoring.preference_training import FOLDER

log = logging.getLogger(__name__)

ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
"""Where a rollout server is."""
LENGTH = ("max_steps", "num_train_epochs")
"""How far the run goes."""
MEASURED = "evaluation/"
"""How the names of files begin that belong to evaluations."""

CANNOT_CHANGE_THE_PAST = frozenset(
    (
        *ADDRESS, *LENGTH, "name", "output_dir", "logging_steps", "logging_strategy", "logging_first_step",
        "log_completions", "num_completions_to_print", "log_unique_prompts", "log_level", "log_level_replica",
        "log_on_each_node", "report_to", "run_name", "project", "trackio_space_id", "disable_tqdm", "save_strategy",
        "save_steps", "save_total_limit", "enable_jit_checkpoint", "save_on_each_node", "save_checksums", "max_hours",
        "stop_file", "profile", "token_weights_every", "load_best_model_at_end", "metric_for_best_model",
        "greater_is_better", "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo",
        "hub_always_push", "hub_revision", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start",
        "per_device_eval_batch_size", "num_generations_eval", "ddp_timeout", "dataloader_num_workers",
        "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
        "torch_empty_cache_steps", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode",
    )
)  # fmt: skip
"""Settings that cannot change what a run has done so far: how far it goes, what is written, saved and measured on the
way, where its server is, how memory is used."""


def fingerprint(recipe: Recipe) -> str:
    """Short hash of everything the recipe says about the run; equal recipes are the same run."""
    said = asdict(recipe)
    said["arguments"] = {name: value for name, value in said["arguments"].items() if name not in ADDRESS}
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_begun(recipe: Recipe, overwrite: bool, resume: bool) -> bool:
    """Return whether the output folder holds a run to go on with: the same command does, with ``resume`` or without.
    Every process asks here, and has the main one's answer."""
    if overwrite and resume:
        raise ValueError("--overwrite and --resume contradict each other; give one of them")
    here = not overwrite and is_to_go_on_with(recipe)
    return bool(gather_object([here])[0])  # the main process's answer


def has_begun(folder: Path) -> bool:
    """Return whether the run in ``folder`` has made something that its settings decided: a checkpoint, whole or not, a
    step in its metrics, a model. One that failed before has not, and leaves the folder to any recipe."""
    record = read_marker(folder / RUN)
    metrics = folder / "metrics.jsonl"
    return bool(
        record.get("trained")
        or record.get("finished")
        or next(folder.glob("*checkpoint-*"), None)
        or (folder / "config.json").is_file()
        or (metrics.is_file() and metrics.stat().st_size)
    )


def is_to_go_on_with(recipe: Recipe) -> bool:
    """Return whether the output folder holds a run that has begun, or one of this recipe that failed before it had:
    what that has made, such as its cold start, stays."""
    folder = recipe.output_dir
    return (folder / RUN).is_file() and (has_begun(folder) or _is_of(folder, recipe))


def _is_of(folder: Path, recipe: Recipe) -> bool:
    """Return whether the run in ``folder`` is of ``recipe``, but for what cannot change its past."""
    then = _recipe_of(folder)
    if then is None:
        return bool(read_marker(folder / RUN).get("fingerprint") == fingerprint(recipe))
    return all(map(may_differ, differing(then, plain_settings(recipe))))


def _recipe_of(folder: Path) -> dict[str, Any] | None:
    """Read what the run in ``folder`` was asked for; None where that cannot be read."""
    try:
        then = parsed(read_text(folder / "recipe.yaml"), "recipe.yaml")
    except (OSError, ValueError):
        return None
    if isinstance(then, dict):
        return then
    return None


def _put_aside(recipe: Recipe) -> None:
    """Put aside, as `<name>.before-<n>`, what a run of another recipe that failed before its first step has made."""
    folder = recipe.output_dir
    for place in (folder / "cold_start", folder / "evaluation"):
        if place.is_dir() and not any(one.is_relative_to(place.resolve()) for one in _starts_from(recipe)):
            beside = (place.with_name(f"{place.name}.before-{number}") for number in itertools.count(1))
            place.rename(next(one for one in beside if not one.exists()))


def _starts_from(recipe: Recipe) -> list[Path]:
    """Folders of the model, and of the critic, that ``recipe`` begins with."""
    value = recipe.arguments.get("value")
    critic = value.get("model") if isinstance(value, Mapping) else value
    return [Path(one).resolve() for one in (recipe.model.path, critic) if isinstance(one, str | Path)]


def claim(recipe: Recipe, overwrite: bool) -> Path:
    """The output folder, made and marked as this run's; what differs from an earlier run of it is logged."""
    folder = recipe.output_dir
    begun = not overwrite and is_to_go_on_with(recipe)
    changed = refuse_folder(recipe, overwrite)
    measured, longer = (any(one.of(*names) for one in changed) for names in (("evaluation",), LENGTH))
    found = {}
    if begun:
        found = read_marker(folder / RUN)
    gone = gone_from(folder, found)
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:  # what a resumed run, or a report of it, would take for its own; what this one starts from stays
        needed = _starts_from(recipe)
        earlier = [*folder.glob("checkpoint-*"), *folder.glob("broken-checkpoint-*"), folder / SAVING]
        for stale in (*earlier, folder / "cold_start", folder / "evaluation", folder / "critic", folder / FOLDER):
            if not any(one.is_relative_to(stale.resolve()) for one in needed):
                shutil.rmtree(stale, ignore_errors=True)
    if not begun:
        if not overwrite:
            _put_aside(recipe)
        for name in ("metrics.jsonl", TOKEN_WEIGHTS):
            (folder / name).unlink(missing_ok=True)
        write_run(folder, {"name": recipe.name, "fingerprint": fingerprint(recipe), "finished": False})
    elif measured or longer or gone:  # there is something left to do in a finished run
        without_model = any(not one.startswith(MEASURED) for one in gone)
        trained = None
        if longer or without_model:
            trained = found.pop("trained", None)
        if longer and trained is not None and newest_whole(folder)[0] is None:
            raise ValueError(
                f"`output_dir` {str(folder)!r} holds a trained run without a checkpoint (`save_strategy`): it cannot "
                "be trained further"
            )
        write_run(folder, {**found, "left": [], "finished": False})
    if measured:
        shutil.rmtree(folder / "evaluation", ignore_errors=True)
    for name in {"/".join(one.split("/")[:2]) for one in gone if one.startswith(MEASURED)}:
        shutil.rmtree(folder / name, ignore_errors=True)  # half an evaluation is none
    write_whole_text(folder / "recipe.yaml", written(plain_settings(recipe)))
    for one in changed:
        log.warning("resumed with another setting: %s", one)
    if gone:
        log.warning("%s: %s gone since the run was finished, and made again", folder, in_few_words(gone))
    return folder


def refuse_folder(recipe: Recipe, overwrite: bool) -> list[Difference]:
    """Return what differs from the run in the output folder, where none of it can change its past; nothing is written.
    ValueError: the folder holds something else, a run of another recipe, or one that is beyond ``max_steps``."""
    folder = recipe.output_dir
    if overwrite:
        check_writable(folder)
        return []
    found = record_of(folder, None)
    if not found:
        return []
    if not is_to_go_on_with(recipe):  # it failed before its first step
        return []
    then = _recipe_of(folder)
    if then is None and found.get("fingerprint") != fingerprint(recipe):
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds another run ({found.get('name')!r}, whose recipe.yaml cannot be "
            "read); choose another `--output_dir`, or give --overwrite"
        )
    changed = []
    if then is not None:
        changed = refuse_other_settings(folder, then, plain_settings(recipe), may_differ)
    newest = newest_whole(folder)[0]
    check_length(folder, newest, int(recipe.arguments.get("max_steps") or -1))
    if found.get("finished") and not any(one.of("evaluation") for one in changed):
        refuse_lost(folder, gone_from(folder, found), newest)
    return changed


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


def may_differ(found: Difference) -> bool:
    """Return whether the setting cannot change what the run has done so far, or is measured beside it."""
    beside = found.of("evaluation", "eval_dataset", "model.expected")
    return beside or found.name.partition(".")[0] in CANNOT_CHANGE_THE_PAST


def refuse_another_run(folder: Path, rows: Any, processes: int, max_steps: int) -> None:
    """ValueError where a run with steps still to train would go on with other rows, or another number of processes."""
    record = read_marker(folder / RUN)
    if not has_begun(folder) or 0 < max_steps <= (record.get("trained") or 0):
        return  # nothing was trained, or only the evaluation is left
    refuse_other_rows(folder, record.get("rows"), rows)
    before = record.get("processes")
    if before is not None and before != processes:
        raise ValueError(
            f"the run in {str(folder)!r} was trained by {before} process(es), and this is {processes}: its batches "
            f"and random numbers would be others. Start {before} (`accelerate launch --num_processes {before}`), or "
            "choose another `--output_dir`; trainer.train(resume_from_checkpoint=…) goes on with other batches, as "
            "TRL does"
        )


def set_aside(folder: Path, newest: Path | None) -> None:
    """Checkpoints newer than ``newest`` are no longer found as such: their steps will be done, and saved, again."""
    for checkpoint in folder.glob("checkpoint-*"):
        if step_of(checkpoint) > (-1 if newest is None else step_of(newest)):
            names = (f"broken-{checkpoint.name}{'' if n == 1 else f'-{n}'}" for n in itertools.count(1))
            checkpoint.rename(next(folder / name for name in names if not (folder / name).exists()))


def going_on(folder: Path, max_steps: int, record: Mapping[str, Any], console: Console) -> Path | None:
    """The checkpoint that every process goes on from, None for the first step; the main one tidies up what is after it.
    ``record``: what ``run.json`` says. ValueError: the run is beyond ``max_steps`` (≤ 0: epochs say it) already."""
    state = PartialState()
    newest, passed = newest_read(folder, state.is_local_main_process)
    state.wait_for_everyone()  # all have looked before one tidies up
    check_length(folder, newest, max_steps)
    if state.is_main_process:
        for why in passed:
            console.print(f"passed over {why}; set aside as broken-…", soft_wrap=True)
        set_aside(folder, newest)
        shutil.rmtree(folder / SAVING, ignore_errors=True)
        if newest is not None:
            console.print(f"going on from {newest.name}")
            if other := other_releases(record):
                said = "resumed with other releases, so numbers need not be those of a whole run to the bit: %s"
                log.warning(said, "; ".join(other))
        elif "parameters" in record:  # written when the training began
            console.print(f"{folder} has no whole checkpoint: training starts again at its first step", soft_wrap=True)
        due = newest is not None and "evaluation_due" in read_state(newest).entries
        for name in ("metrics.jsonl", TOKEN_WEIGHTS):
            cut_metrics(folder / name, -1 if newest is None else step_of(newest), due)
    return newest


def check_length(folder: Path, newest: Path | None, max_steps: int) -> None:
    """ValueError where the checkpoint ``newest`` is beyond ``max_steps`` (≤ 0: epochs say it)."""
    if newest is not None and 0 < max_steps < step_of(newest):
        done = f"{folder} has done {step_of(newest)} steps ({newest.name})"
        raise ValueError(f"`max_steps` is {max_steps}, and {done}; give at least that")
