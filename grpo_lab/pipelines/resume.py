"""A run that is gone on with: what may differ from it, and the checkpoint that it goes on from."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console

from grpo_lab.pipelines.releases import other_releases
from grpo_lab.recipe.yaml import parsed
from grpo_lab.runs.differences import Difference, refuse_other_rows
from grpo_lab.runs.folder import read_marker
from grpo_lab.runs.metrics_file import cut_metrics
from grpo_lab.trainer.resume.going_on import newest_read
from grpo_lab.trainer.resume.state import read_state
from grpo_lab.trainer.resume.whole import SAVING, step_of

log = logging.getLogger(__name__)

#: where a rollout server is
ADDRESS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")

#: how far the run goes
LENGTH = ("max_steps", "num_train_epochs")

#: Settings that cannot change what a run has done so far: how far it goes, what is written, saved and measured on the
#: way, where its server is, how memory is used.
CANNOT_CHANGE_THE_PAST = frozenset(
    (
        *ADDRESS, *LENGTH, "name", "output_dir",
        "logging_steps", "logging_strategy", "logging_first_step", "log_completions", "num_completions_to_print",
        "log_unique_prompts", "log_level", "log_level_replica", "log_on_each_node", "report_to", "run_name", "project",
        "trackio_space_id", "disable_tqdm",
        "save_strategy", "save_steps", "save_total_limit", "enable_jit_checkpoint", "save_on_each_node",
        "save_checksums", "max_hours", "stop_file",
        "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
        "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push",
        "hub_revision",
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size",
        "num_generations_eval",
        "ddp_timeout", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "dataloader_persistent_workers", "torch_empty_cache_steps", "vllm_gpu_memory_utilization",
        "vllm_enable_sleep_mode",
    )
)  # fmt: skip
SECTIONS_AFTER = ("evaluation", "eval_dataset", "model.expected")
"""Measured beside the training, not part of it."""


def may_differ(found: Difference) -> bool:
    """Whether the setting cannot change what the run has done so far."""
    return found.name.partition(".")[0] in CANNOT_CHANGE_THE_PAST or found.of(*SECTIONS_AFTER)


def written_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in ``folder``; None where its ``recipe.yaml`` cannot be read."""
    try:
        old = parsed((folder / "recipe.yaml").read_text(encoding="utf-8"), "recipe.yaml")
    except (OSError, ValueError):
        return None
    return old if isinstance(old, dict) else None


def refuse_another_run(folder: Path, rows: Any, processes: int, max_steps: int) -> None:
    """A run that still has steps to train is gone on with on the same rows, by as many processes; nothing is written.

    Raises:
        ValueError: what it had, and what it would get.
    """
    record = read_marker(folder / "run.json")
    if 0 < max_steps <= (record.get("trained") or 0):
        return  # only the evaluation is left
    refuse_other_rows(folder, record.get("rows"), rows)
    before = record.get("processes")
    if before is not None and before != processes:
        raise ValueError(
            f"the run in {str(folder)!r} was trained by {before} process(es), and this is {processes}: its batches "
            "and random numbers "
            f"would be others. Start {before} (`accelerate launch --num_processes {before}`), or choose another "
            "`--output_dir`; "
            "trainer.train(resume_from_checkpoint=…) goes on with other batches, as TRL does"
        )


# -- checkpoints -------------------------------------------------------------------------------------------------------


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
        due = newest is not None and "evaluation_due" in read_state(newest).entries
        cut_metrics(folder / "metrics.jsonl", -1 if newest is None else step_of(newest), due)
    return newest


def check_length(folder: Path, newest: Path | None, max_steps: int) -> None:
    """ValueError where the checkpoint ``newest`` of the run in ``folder`` is beyond ``max_steps`` (≤ 0: epochs say
    it)."""
    if newest is not None and 0 < max_steps < step_of(newest):
        raise ValueError(
            f"`max_steps` is {max_steps}, and {folder} has done {step_of(newest)} steps ({newest.name}); give at "
            "least that"
        )
