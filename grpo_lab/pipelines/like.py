"""How an earlier run was evaluated: read back from its `recipe.yaml`, or from the recipe itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.recipe import EvaluationSection
from grpo_lab.pipelines.recipe_file import read_yaml
from grpo_lab.settings import read

_TRAINING = {"max_completion_length": 512, "seed": 42}
_LONG2SHORT = {"max_completion_length": 512, "seed": 0}


@dataclass(frozen=True)
class Like:
    """The evaluation of a run: its section, and what the section leaves to the run."""

    section: EvaluationSection
    max_new_tokens: int
    seed: int


def held_out_like(run: str | Path) -> Like:
    """The evaluation of ``run``: an output folder with a `recipe.yaml`, or a recipe.

    Raises:
        ValueError: no such file, or a run without `evaluation`.
    """
    path = Path(run)
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"--like {str(run)!r}: {'it has no recipe.yaml' if path.is_dir() else 'no such folder or file'}; it takes the "
            "output folder of `grpo-lab train`, or a recipe"
        )
    written = read_yaml(file)
    section = written.get("evaluation")
    if section is None:
        raise ValueError(f"--like {str(run)!r}: that run has no `evaluation`; describe the rows with --data")
    flat = written.get("arguments", written)  # a run's own copy keeps the trainer's settings apart
    defaults = _LONG2SHORT if "method" in written else _TRAINING
    settings = {name: flat.get(name, default) for name, default in defaults.items()}
    parsed = read(EvaluationSection, _as_written(section), "evaluation")
    tokens = parsed.max_new_tokens or settings["max_completion_length"]
    if tokens is None:
        raise ValueError(
            f"--like {str(run)!r}: that run's `max_completion_length` is null and it has no `evaluation.max_new_tokens`, so nothing says "
            "how long its evaluation's completions were: write `evaluation.max_new_tokens` there"
        )
    seed = settings["seed"]
    return Like(parsed, int(tokens), int(defaults["seed"] if seed is None else seed))


def _as_written(section: Any) -> Any:
    """The form of a recipe, out of a run's own copy, where the arguments of rows and reward stand apart."""
    if not isinstance(section, Mapping):
        return section
    flat = {name: value for name, value in section.items() if value is not None}
    for name in ("data", "reward"):
        part = flat.get(name)
        if isinstance(part, Mapping) and isinstance(part.get("arguments"), Mapping):
            rest = {key: value for key, value in part.items() if key != "arguments"}
            flat[name] = {**rest, **part["arguments"]}
    return flat
