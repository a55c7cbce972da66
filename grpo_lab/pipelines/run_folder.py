"""What a run leaves on disk, and whose folder it is.

``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl`` (one line per log), ``evaluation/before``
and ``/after``, ``cold_start/`` (the model RL started from), the final model and tokenizer in the folder itself,
``report.html``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from accelerate.utils import gather_object

from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.resume import ADDRESS, LENGTH, check_length, may_differ, written_settings
from grpo_lab.recipe.sections import Recipe
from grpo_lab.recipe.yaml import written
from grpo_lab.runs.differences import Difference, plain_settings, refuse_other_settings
from grpo_lab.runs.folder import RUN, check_writable, read_marker, record_of, write_run
from grpo_lab.trainer.resume.whole import SAVING, newest_whole

log = logging.getLogger(__name__)


def fingerprint(recipe: Recipe) -> str:
    """Short hash of everything the recipe says about the run; equal recipes are the same run."""
    said = asdict(recipe)
    said["arguments"] = {name: value for name, value in said["arguments"].items() if name not in ADDRESS}
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_begun(recipe: Recipe, overwrite: bool, resume: bool) -> bool:
    """Whether the output folder holds a run to go on with: the same command does, with ``resume`` or without. Every
    process asks here.

    Raises:
        ValueError: ``overwrite`` and ``resume`` at once.
    """
    if overwrite and resume:
        raise ValueError("--overwrite and --resume contradict each other; give one of them")
    here = not overwrite and (recipe.output_dir / RUN).is_file()
    return bool(gather_object([here])[0])  # the main process's answer


def claim(recipe: Recipe, overwrite: bool) -> Path:
    """The output folder, made and marked as this run's. ``overwrite`` removes what an earlier run would be gone on with
    from.

    What differs from an earlier run of it (``refuse_folder``) is logged.
    """
    folder = recipe.output_dir
    begun = not overwrite and (folder / RUN).is_file()
    changed = refuse_folder(recipe, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    if overwrite:
        _remove_earlier(recipe)
    if not begun:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        write_run(folder, {"name": recipe.name, "fingerprint": fingerprint(recipe), "finished": False})
    elif any(found.of(*LENGTH, "evaluation") for found in changed):
        _reopen(folder, longer=any(found.of(*LENGTH) for found in changed))
    if any(found.of("evaluation") for found in changed):
        shutil.rmtree(folder / "evaluation", ignore_errors=True)
    write_whole_text(folder / "recipe.yaml", written(plain_settings(recipe)))
    for one in changed:
        log.warning("resumed with another setting: %s", one)
    return folder


def refuse_folder(recipe: Recipe, overwrite: bool) -> list[Difference]:
    """What differs from the run in the output folder, all of it what cannot change its past; nothing is written.

    Raises:
        ValueError: the folder holds something else, or a run of another recipe, or one that is beyond ``max_steps``
            already.
    """
    folder = recipe.output_dir
    if overwrite:
        check_writable(folder)
        return []
    found = record_of(folder, None)
    if not found:
        return []
    then = written_settings(folder)
    if then is None and found.get("fingerprint") != fingerprint(recipe):
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds another run ({found.get('name')!r}, whose recipe.yaml cannot be "
            "read); choose "
            "another `--output_dir`, or give --overwrite"
        )
    changed = [] if then is None else refuse_other_settings(folder, then, plain_settings(recipe), may_differ)
    check_length(folder, newest_whole(folder)[0], int(recipe.arguments.get("max_steps") or -1))
    return changed


def _reopen(folder: Path, longer: bool) -> None:
    """There is something left to do in a finished run: a longer training, another evaluation."""
    found = read_marker(folder / "run.json")
    if longer and found.pop("trained", None) is not None and newest_whole(folder)[0] is None:
        raise ValueError(
            f"`output_dir` {str(folder)!r} holds a trained run without a checkpoint (`save_strategy`): it cannot be "
            "trained "
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


def kept(recipe: Recipe) -> str:
    """What is there after Ctrl-C."""
    folder = recipe.output_dir
    if not (folder / "run.json").is_file():
        return "nothing"
    steps = sorted(int(p.name.rpartition("-")[2]) for p in folder.glob("checkpoint-*") if p.name[11:].isdigit())
    found = [
        f"checkpoint-{steps[-1]}" if steps else "no checkpoint",
        *(["cold_start"] if (folder / "cold_start" / "config.json").is_file() else []),
        *(["evaluation/before"] if (folder / "evaluation" / "before" / "summary.json").is_file() else []),
        *(["metrics.jsonl"] if (folder / "metrics.jsonl").is_file() else []),
    ]
    return f"{', '.join(found)} in {folder} (the same command goes on)"
