"""``--resume``: what may differ from the run that is gone on with, and the checkpoint that it goes on from."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from grpo_lab.evaluation.files import write_text
from grpo_lab.pipelines.releases import other_releases
from grpo_lab.recipe.sections import Recipe
from grpo_lab.recipe.yaml import parsed
from grpo_lab.trainer.resume.stop import FILE as EVALUATION_DUE
from grpo_lab.trainer.resume.which import newest_read
from grpo_lab.trainer.resume.whole import SAVING, step_of

log = logging.getLogger(__name__)

#: where a rollout server is
ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")

#: how far the run goes
LENGTH = ("max_steps", "num_train_epochs")

#: Settings that cannot change what a run has done so far: how far it goes, what is written, saved and measured on the way,
#: where its server is, how memory is used.
CANNOT_CHANGE_THE_PAST = frozenset(
    (
        *ADDRESS, *LENGTH, "name", "output_dir",
        "logging_steps", "logging_strategy", "logging_first_step", "log_completions", "num_completions_to_print",
        "log_unique_prompts", "log_level", "log_level_replica", "log_on_each_node", "report_to", "run_name", "project",
        "trackio_space_id", "disable_tqdm",
        "save_strategy", "save_steps", "save_total_limit", "enable_jit_checkpoint", "save_on_each_node", "max_hours", "stop_file", "save_checksums",
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size", "num_generations_eval",
        "ddp_timeout", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "dataloader_persistent_workers", "torch_empty_cache_steps", "vllm_gpu_memory_utilization",
        "vllm_enable_sleep_mode",
    )
)  # fmt: skip
SECTIONS_AFTER = ("evaluation", "eval_dataset", "model.expected")
"""Measured beside the training, not part of it."""


@dataclass(frozen=True)
class Difference:
    """One setting, as it was and as it is asked for now."""

    name: str
    old: Any
    new: Any

    @property
    def allowed(self) -> bool:
        flat = self.name.partition(".")[0]
        return flat in CANNOT_CHANGE_THE_PAST or self.of(*SECTIONS_AFTER)

    def of(self, *names: str) -> bool:
        """Whether it is one of these settings, or inside one of these sections."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.old)} → {_shown(self.new)}"


def as_written(recipe: Recipe) -> dict[str, Any]:
    """``recipe`` as ``recipe.yaml`` in its folder says it: plain values only."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str))
    return plain


def differences(folder: Path, recipe: Recipe) -> list[Difference] | None:
    """What differs between the run in ``folder`` and ``recipe``; None where its ``recipe.yaml`` cannot be read."""
    try:
        old = parsed((folder / "recipe.yaml").read_text(encoding="utf-8"), "recipe.yaml")
    except (OSError, ValueError):
        return None
    if not isinstance(old, dict):
        return None
    before, now = dict(_flat(old)), dict(_flat(as_written(recipe)))
    names = sorted({*before, *now})
    changed = [Difference(name, before.get(name), now.get(name)) for name in names]
    return [found for found in changed if found.old != found.new]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name → value. Flat settings have no section; what is empty or unset does not appear."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            inside = f"{name}.{key}" if name else str(key)
            yield from _flat(item, "" if inside == "arguments" else inside)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for place, item in enumerate(value):
            yield from _flat(item, f"{name}.{place}")
    elif value is not None and value != []:
        yield name.replace(".arguments.", "."), value


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else str(value)


# -- checkpoints ---------------------------------------------------------------------------------------------------------


def set_aside(folder: Path, newest: Path | None) -> None:
    """Checkpoints newer than ``newest`` are no longer found as such: their steps will be done, and saved, again."""
    for checkpoint in folder.glob("checkpoint-*"):
        if step_of(checkpoint) > (-1 if newest is None else step_of(newest)):
            place = checkpoint.with_name(f"broken-{checkpoint.name}")
            number = 1
            while place.exists():
                number += 1
                place = checkpoint.with_name(f"broken-{checkpoint.name}-{number}")
            checkpoint.rename(place)


def going_on(folder: Path, max_steps: int, record: Mapping[str, Any], console: Console) -> Path | None:
    """The checkpoint that every process goes on from, None for the first step; the main one tidies up what is after it.

    Args:
        max_steps: of the run as it is asked for now; ≤ 0 where epochs say it.
        record: what ``run.json`` says.

    Raises:
        ValueError: the run is beyond ``max_steps`` already.
    """
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
                log.warning(
                    "resumed with other releases, so numbers need not be those of a whole run to the bit: %s",
                    "; ".join(other),
                )
        elif "parameters" in record:  # written when the training began
            console.print(f"{folder} has no whole checkpoint: training starts again at its first step", soft_wrap=True)
        due = newest is not None and (newest / EVALUATION_DUE).is_file()
        cut_metrics(folder / "metrics.jsonl", -1 if newest is None else step_of(newest), due)
    return newest


def check_length(folder: Path, newest: Path | None, max_steps: int) -> None:
    """ValueError where the checkpoint ``newest`` of the run in ``folder`` is beyond ``max_steps`` (≤ 0: epochs say it)."""
    if newest is not None and 0 < max_steps < step_of(newest):
        raise ValueError(
            f"`max_steps` is {max_steps}, and {folder} has done {step_of(newest)} steps ({newest.name}); give at least that"
        )


def cut_metrics(file: Path, step: int, evaluation_due: bool = False) -> None:
    """Leave the lines of ``metrics.jsonl`` up to ``step``: those after it will be written again. Half a line goes, too.

    Args:
        evaluation_due: the one after ``step`` will be made, and written, again.
    """
    if file.is_file():
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_text(file, "".join(line for line in lines if _is_before(line, step, evaluation_due)))


def _is_before(line: str, step: int, evaluation_due: bool) -> bool:
    try:
        row = json.loads(line)
        again = evaluation_due and row["step"] == step and any(name.startswith("eval_") for name in row)
        return line.endswith("\n") and bool(row["step"] <= step) and not again
    except (ValueError, KeyError, TypeError):
        return False
