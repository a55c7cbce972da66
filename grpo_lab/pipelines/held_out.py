"""A saved model measured on held-out rows: by a recipe's section, or as an earlier run was (`--like`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import EvaluationResult, EvaluationStopped, evaluate
from grpo_lab.recipe import parts
from grpo_lab.recipe.models import load_saved_model
from grpo_lab.recipe.rows import every_argument, load_rows
from grpo_lab.recipe.sections import EvaluationSection
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import read


def evaluate_saved_model(
    model: str,
    section: EvaluationSection,
    target: Path | None,
    *,
    use_cpu: bool,
    seed: int,
    max_new_tokens: int | None = None,
    tokenizer: str | None = None,
) -> EvaluationResult:
    """Held-out accuracy by a recipe's ``evaluation``, written to ``target`` (None: not written).

    Args: max_new_tokens: where ``section`` does not say.
    Raises: EvaluationStopped on Ctrl-C, with what was answered until then written as well.
    """
    rows = load_rows(section.data, "evaluation.data")
    reward = parts.build_reward(section.reward, "evaluation.reward")
    loaded, words = load_saved_model(model, use_cpu, tokenizer)
    stop: EvaluationStopped | None = None
    limit = section.max_new_tokens or max_new_tokens
    assert limit is not None, "neither the section nor the caller says how long completions may be"
    try:
        result = evaluate(
            loaded,
            words,
            rows,
            reward=reward,
            max_new_tokens=limit,
            batch_size=section.batch_size,
            n_samples=section.n_samples,
            temperature=section.temperature,
            seed=seed,
        )
    except EvaluationStopped as stopped:
        result, stop = stopped.result, stopped
    result = replace(result, settings={**about(model, section), **result.settings})
    if target is not None and result.outcomes:
        result.write(target)
    if stop is not None:
        raise EvaluationStopped(result) from None
    return result


def about(model: str, section: EvaluationSection) -> dict[str, Any]:
    """What a score depends on besides the generation, for `summary.json`: rows with every argument, template, judge."""
    arguments = every_argument(section.data)
    mode = getattr(parts.build_reward(section.reward, "evaluation.reward"), "mode", None)  # the default, too
    judge = {"name": section.reward.name, **({} if mode is None else {"mode": mode}), **section.reward.arguments}
    return {
        "model": model,
        "data": {"loader": section.data.loader, **arguments},
        "template": section.data.template,
        "limit": section.data.limit,
        "mode": mode,
        "judge": judge,
    }


_TRAINING = {"max_completion_length": 512, "seed": 42}


_LONG2SHORT = {"max_completion_length": 512, "seed": 0}


@dataclass(frozen=True)
class HeldOut:
    """An evaluation: its section, and what the section leaves to the run that it is of."""

    section: EvaluationSection
    max_new_tokens: int
    seed: int


def held_out_like(run: str | Path) -> HeldOut:
    """The evaluation of ``run``: an output folder with a `recipe.yaml`, or a recipe.

    Raises:
        ValueError: no such file, or a run without `evaluation`.
    """
    path = Path(run)
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"--like {str(run)!r}: {'it has no recipe.yaml' if path.is_dir() else 'no such folder or file'}; it "
            "takes the "
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
            f"--like {str(run)!r}: that run's `max_completion_length` is null and it has no "
            "`evaluation.max_new_tokens`, so nothing says "
            "how long its evaluation's completions were: write `evaluation.max_new_tokens` there"
        )
    seed = settings["seed"]
    return HeldOut(parsed, int(tokens), int(defaults["seed"] if seed is None else seed))


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
