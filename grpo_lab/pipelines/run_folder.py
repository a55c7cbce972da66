"""What a run leaves on disk, and whose folder it is.

``run.json`` (what was run), ``recipe.yaml`` (the settings), ``metrics.jsonl`` (one line per log), ``evaluation/before`` and
``/after``, ``cold_start/`` (the model RL started from), the final model and tokenizer in the folder itself, ``report.html``.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback

from grpo_lab.evaluation.files import write_json
from grpo_lab.pipelines.recipe import Recipe

PACKAGES = ("grpo_lab", "torch", "transformers", "trl", "accelerate", "peft", "datasets", "math-verify", "vllm")

#: where a rollout server is: a run may go on with another one
ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")


def fingerprint(recipe: Recipe) -> str:
    """Short hash of everything the recipe says about the run; equal recipes are the same run."""
    said = asdict(recipe)
    said["arguments"] = {name: value for name, value in said["arguments"].items() if name not in ADDRESS}
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def claim(recipe: Recipe, overwrite: bool, resume: bool) -> Path:
    """The output folder, made and marked as this run's. ``overwrite`` removes what an earlier run would be resumed from.

    Raises:
        ValueError: the folder belongs to another run, or this run is there already and neither flag is given.
    """
    folder = recipe.output_dir
    marker = folder / "run.json"
    if marker.is_file() and not overwrite:
        found = read_marker(marker)
        if found.get("fingerprint") != fingerprint(recipe):
            raise ValueError(
                f"`output_dir` {str(folder)!r} holds another run ({found.get('name')!r}, other settings); choose another "
                "`--output_dir`, or give --overwrite"
            )
        if not resume:
            raise ValueError(f"`output_dir` {str(folder)!r} holds this run already; give --resume or --overwrite")
    elif folder.is_dir() and any(folder.iterdir()) and not marker.is_file() and not overwrite:
        raise ValueError(
            f"`output_dir` {str(folder)!r} exists, is not empty and is no run of ours; choose another, or --overwrite"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not resume:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    if overwrite:
        start = Path(recipe.model.path or "").resolve()
        for stale in (*folder.glob("checkpoint-*"), folder / "cold_start"):
            if start != stale.resolve():  # what this very run starts from stays
                shutil.rmtree(stale, ignore_errors=True)
    if overwrite or not marker.is_file():
        write_run(folder, {"name": recipe.name, "fingerprint": fingerprint(recipe), "finished": False})
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(json.loads(json.dumps(asdict(recipe), default=str)), sort_keys=False)
    )
    return folder


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
        raise ValueError(f"{file} is damaged ({error}); remove it, or choose another `--output_dir`") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__} and no mapping; choose another `--output_dir`")
    return found


def versions() -> dict[str, str]:
    """Of Python, the machine and the packages that numbers depend on."""
    found = {"python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class MetricsFile(TrainerCallback):  # type: ignore[misc]
    """Appends every log of the main process to ``metrics.jsonl``, with its step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:  # HF's totals repeat the last step
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}, default=str) + "\n")
