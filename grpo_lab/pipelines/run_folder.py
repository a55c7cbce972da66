"""What a run leaves on disk, and whose folder it is.

``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl`` (one line per log), ``evaluation/before`` and
``/after``, ``cold_start/`` (the model RL started from), the final model and tokenizer in the folder itself, ``report.html``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_lab.evaluation.files import write_json, write_text
from grpo_lab.io import no_link
from grpo_lab.pipelines.one_writer import check_writable, is_empty
from grpo_lab.pipelines.resume import ADDRESS, LENGTH, Difference, as_written, check_length, differences
from grpo_lab.recipe.sections import Recipe
from grpo_lab.recipe.yaml import written
from grpo_lab.trainer.resume.whole import SAVING, newest_whole

log = logging.getLogger(__name__)


def fingerprint(recipe: Recipe) -> str:
    """Short hash of everything the recipe says about the run; equal recipes are the same run."""
    said = asdict(recipe)
    said["arguments"] = {name: value for name, value in said["arguments"].items() if name not in ADDRESS}
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def claim(recipe: Recipe, overwrite: bool, resume: bool) -> Path:
    """The output folder, made and marked as this run's. ``overwrite`` removes what an earlier run would be resumed from.

    A resumed run may differ in what cannot change its past (``CANNOT_CHANGE_THE_PAST``), and logs what differs.

    Raises:
        ValueError: the folder belongs to another run, or this run is there already and neither flag is given.
    """
    folder = recipe.output_dir
    marker = folder / "run.json"
    changed = refuse_folder(recipe, overwrite, resume)
    folder.mkdir(parents=True, exist_ok=True)
    if not resume:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    if overwrite:
        _remove_earlier(recipe)
    if overwrite or not marker.is_file():
        write_run(folder, {"name": recipe.name, "fingerprint": fingerprint(recipe), "finished": False})
    elif any(found.of(*LENGTH, "evaluation") for found in changed):
        _reopen(folder, longer=any(found.of(*LENGTH) for found in changed))
    if any(found.of("evaluation") for found in changed):
        shutil.rmtree(folder / "evaluation", ignore_errors=True)
    write_text(folder / "recipe.yaml", written(as_written(recipe)))
    for one in changed:
        log.warning("resumed with another setting: %s", one)
    return folder


def refuse_folder(recipe: Recipe, overwrite: bool, resume: bool) -> list[Difference]:
    """What differs from the run in the output folder, where that may differ; nothing is written.

    Raises:
        ValueError: as ``claim``, and where the run to resume is beyond ``max_steps`` already.
    """
    folder = recipe.output_dir
    marker = folder / "run.json"
    if overwrite and resume:
        raise ValueError("--overwrite and --resume contradict each other; give one of them")
    check_writable(folder)
    if marker.is_file() and not overwrite:
        changed = _changed(recipe, read_marker(marker), resume)
        check_length(folder, newest_whole(folder)[0], int(recipe.arguments.get("max_steps") or -1))
        return changed
    if folder.is_dir() and not is_empty(folder) and not marker.is_file() and not overwrite:
        raise ValueError(
            f"`output_dir` {str(folder)!r} exists, is not empty and is no run of ours; choose another, or --overwrite"
        )
    return []


def _changed(recipe: Recipe, found: dict[str, Any], resume: bool) -> list[Difference]:
    """What differs from the run in the folder, where that may differ. ValueError otherwise."""
    folder = recipe.output_dir
    changed = differences(folder, recipe)
    same = found.get("fingerprint") == fingerprint(recipe)
    refused = [] if same else [str(one) for one in changed or () if not one.allowed]
    if refused or (changed is None and not same):
        named = f": {'; '.join(refused)}. A resumed run cannot have these" if refused and resume else ""
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds another run ({found.get('name')!r}, other settings{named}); choose another "
            "`--output_dir`, or give --overwrite"
        )
    if not resume:
        raise ValueError(f"`output_dir` {str(folder)!r} holds this run already; give --resume or --overwrite")
    return changed or []


def _reopen(folder: Path, longer: bool) -> None:
    """There is something left to do in a finished run: a longer training, another evaluation."""
    found = read_marker(folder / "run.json")
    if longer and found.pop("trained", None) is not None and newest_whole(folder)[0] is None:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds a trained run without a checkpoint (`save_strategy`): it cannot be trained "
            "further"
        )
    write_run(folder, {**found, "finished": False})


def _remove_earlier(recipe: Recipe) -> None:
    """What a resumed run, or a report of it, would take for its own. What this very run starts from stays."""
    folder, value = recipe.output_dir, recipe.arguments.get("value")
    critic = value.get("model") if isinstance(value, Mapping) else value
    needed = [Path(one).resolve() for one in (recipe.model.path, critic) if isinstance(one, str | Path)]
    earlier = (*folder.glob("checkpoint-*"), *folder.glob("broken-checkpoint-*"))
    for stale in (*earlier, folder / SAVING, folder / "cold_start", folder / "evaluation", folder / "critic"):
        if not any(one.is_relative_to(stale.resolve()) for one in needed):
            shutil.rmtree(stale, ignore_errors=True)


def write_run(folder: Path, summary: dict[str, Any]) -> None:
    """``run.json``: what was run, and how far it has come."""
    write_json(folder / "run.json", summary)


def read_marker(file: Path) -> dict[str, Any]:
    """What marks a folder as ours; empty where there is no such file. ValueError for a damaged one."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged ({error}), and it says what this folder holds: put a copy back, or choose another `--output_dir` "
            "(its checkpoints can be read by trainer.train(resume_from_checkpoint=…))"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__} and no mapping; choose another `--output_dir`")
    return found


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends every log of the main process to ``metrics.jsonl``, with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:  # HF's totals repeat the last step
            with open(self.path, "a", encoding="utf-8", opener=no_link) as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=str) + "\n")
