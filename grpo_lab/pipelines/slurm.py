"""`grpo-lab pipeline run FILE --submit slurm`: write a batch script for each stage, and one that submits them.

Each job waits for those whose outputs it takes (`--dependency=afterok`). Slurm does the waiting; there is no scheduler
of ours.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.entries import PipelineFiles, entries_of
from grpo_lab.pipelines.pipeline_recipe import PipelineRecipe
from grpo_lab.pipelines.runner import words_of_stage

ASKED_EARLIER = {"open-mode": "append", "requeue": True, "signal": "B:TERM@600"}
"""Options of ``sbatch`` by which a job can be continued: ten minutes before its time is over it gets a signal, on which
its stage saves its work (docs/resume.md)."""
JOB = """#!/bin/bash
{options}
cd "${{SLURM_SUBMIT_DIR:-.}}"
{command} &
running=$!
trap 'kill -TERM $running 2>/dev/null' TERM
code=0; wait $running || code=$?
while kill -0 $running 2>/dev/null; do code=0; wait $running || code=$?; done  # a signal ended the wait
if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
"""Batch script of a stage. If the stage stops on request (`io.EXIT_INTERRUPTED`), the job goes back into the queue, and
the same command resumes it."""


def write_batch_scripts(recipe: PipelineRecipe) -> Path:
    """Write `slurm/<stage>.sbatch` for each stage and `slurm/submit.sh` into the output folder; return the latter. A
    recipe's `slurm` options replace ours, and a stage's replace those."""
    folder = recipe.output_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    PipelineFiles(recipe, entries_of(recipe)).begin()
    lines = ["#!/bin/bash", "# Submits the stages, each after those that it reads: bash slurm/submit.sh", "set -eu"]
    for stage in recipe.in_order():
        script = folder / f"{stage.name}.sbatch"
        log = str(folder / f"{stage.name}-%j.log")
        ours = {"job-name": f"{recipe.name}-{stage.name}", "output": log, **ASKED_EARLIER}
        options = {**ours, **recipe.slurm, **stage.slurm}.items()
        said = "\n".join(f"#SBATCH --{name}{'' if value is True else f'={value}'}" for name, value in options)
        command = shlex.join([sys.executable, *words_of_stage(recipe, stage.name)])
        write_whole_text(script, JOB.format(options=said, command=command))
        waits = []
        if stage.before:
            jobs = ":".join(f"${{{_variable(name)}}}" for name in stage.before)
            waits = [f'"--dependency=afterok:{jobs}"', "--kill-on-invalid-dep=yes"]
        words = ["sbatch", "--parsable", *waits, shlex.quote(str(script))]
        job = _variable(stage.name)
        lines += [f"{job}=$({' '.join(words)})", f'echo "{stage.name}: job ${{{job}}}"']
    submit = folder / "submit.sh"
    write_whole_text(submit, "\n".join(lines) + "\n")
    return submit


def _variable(stage: str) -> str:
    """Return the name of the shell variable that holds the id of a stage's job."""
    return f"job_{stage.replace('-', '_')}"
