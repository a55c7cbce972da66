"""`grpo-lab pipeline run FILE --submit slurm`: a batch script for each stage, and one that submits them, each after
those whose things it takes (`--dependency=afterok`). Slurm does the waiting; there is no scheduler of ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_lab.io import write_whole_text
from grpo_lab.pipelines.pipeline_recipe import PipelineRecipe, StageSection
from grpo_lab.pipelines.runner import prepare
from grpo_lab.pipelines.status import RECIPE

FOLDER, SUBMIT = "slurm", "submit.sh"
ASKED_EARLIER = {"open-mode": "append", "requeue": True, "signal": "B:TERM@600"}
"""Ten minutes before its end a job is told, and its stage keeps what it has (docs/resume.md)."""


def write_batch_scripts(recipe: PipelineRecipe) -> Path:
    """`slurm/<stage>.sbatch` and `slurm/submit.sh` in the output folder → the latter."""
    folder = recipe.output_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    prepare(recipe)
    lines = ["#!/bin/bash", "# Submits the stages, each after those that it reads: bash slurm/submit.sh", "set -eu"]
    for one in recipe.in_order():
        script = folder / f"{one.name}.sbatch"
        write_whole_text(script, batch_script(recipe, one))
        after = ":".join(f"${{{_variable(name)}}}" for name in one.before)
        waits = [f'"--dependency=afterok:{after}"', "--kill-on-invalid-dep=yes"] if after else []
        words = ["sbatch", "--parsable", *waits, shlex.quote(str(script))]
        lines += [f"{_variable(one.name)}=$({' '.join(words)})", f'echo "{one.name}: job ${{{_variable(one.name)}}}"']
    write_whole_text(folder / SUBMIT, "\n".join(lines) + "\n")
    return folder / SUBMIT


def batch_script(recipe: PipelineRecipe, one: StageSection) -> str:
    """One stage as a job: the pipeline's and the stage's own `slurm` options over ours. Asked to stop (exit code 75) it
    goes back into the queue, and the same command goes on."""
    log = str(recipe.output_dir / FOLDER / f"{one.name}-%j.log")
    options: Mapping[str, Any] = {
        "job-name": f"{recipe.name}-{one.name}", "output": log, **ASKED_EARLIER, **recipe.slurm, **one.slurm
    }  # fmt: skip
    words = ["-m", "grpo_lab", "pipeline", "run", str(recipe.output_dir / RECIPE), "--only", one.name]
    command = shlex.join([sys.executable, *words, "--output_dir", str(recipe.output_dir)])
    return "\n".join(
        [
            "#!/bin/bash",
            *[f"#SBATCH --{name}{'' if value is True else f'={value}'}" for name, value in options.items()],
            'cd "${SLURM_SUBMIT_DIR:-.}"',
            f"{command} &",
            "running=$!",
            "trap 'kill -TERM $running 2>/dev/null' TERM",
            "code=0; wait $running || code=$?",
            "while kill -0 $running 2>/dev/null; do code=0; wait $running || code=$?; done  # a signal ended the wait",
            'if [ $code = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            "exit $code",
            "",
        ]
    )


def _variable(name: str) -> str:
    return "job_" + name.replace("-", "_")
