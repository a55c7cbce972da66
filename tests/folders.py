"""A training's folder claimed as `grpo-lab train` does it, without a training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset

from grpo_lab.pipelines.open_run import claimed
from grpo_lab.pipelines.run_folder import RunFolder
from grpo_lab.recipe.sections import Recipe

ROWS = Dataset.from_dict({"prompt": ["a", "b"], "solution": ["1", "2"]})


def job_in(folder: Path, max_steps: int = -1, rows: Any = ROWS) -> Any:
    """What the folder asks of a training that is resolved."""
    config = SimpleNamespace(max_steps=max_steps, stop_file=None, output_dir=str(folder))
    return SimpleNamespace(config=config, rows=rows)


def claim(recipe: Recipe, overwrite: bool = False) -> Path:
    """The folder of ``recipe``, looked at, marked as its own and left again."""
    folder = RunFolder.open(recipe, overwrite)
    with claimed(folder, job_in(folder.place, int(recipe.arguments.get("max_steps") or -1))):
        return folder.place
