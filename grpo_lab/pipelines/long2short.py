"""`grpo-lab long2short`: make a model right in fewer tokens, by one of four ways of Kimi k1.5 (section 2.4) and SimPO.

    shortest_sft   of n samples the shortest right one → SFT
    dpo            shortest right one against wrong ones and right ones ≥ 1.5 times as long → DPO
    simpo          the same pairs → SimPO (ours in this list: the report names DPO)
    merge          average of the weights with a shorter model, no training

model, data → samples (`samples.jsonl`, a killed run goes on) → rows (`rows.jsonl`) → training → the new model in the output
folder → `evaluation/before` and `/after`, where the numbers that count are accuracy *and* tokens of right answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from grpo_lab.curation import Sampled, average_weights, pass_rates, preference_pairs, sampled, shortest_correct
from grpo_lab.evaluation import EvaluationResult, evaluate
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.curate import told
from grpo_lab.pipelines.recipe import (
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    data_section,
    evaluation_section,
    reward_section,
    section_of,
)
from grpo_lab.pipelines.run_folder import versions, write_run
from grpo_lab.pipelines.sampler import ModelSampler, SamplingSettings
from grpo_lab.pipelines.train import load_for_evaluation

METHODS = ("shortest_sft", "dpo", "simpo", "merge")
_SECTIONS = (
    "name",
    "method",
    "model",
    "short_model",
    "alpha",
    "data",
    "reward",
    "pairs",
    "samples",
    "training",
    "evaluation",
)

console = Console()


@dataclass(frozen=True)
class PairSettings:
    """``pairs``: of `preference_pairs`, for ``dpo`` and ``simpo``."""

    ratio: float = 1.5
    wrong_must_be_longer: bool = False
    pairs_per_problem: int | None = None


@dataclass(frozen=True)
class Long2ShortRecipe:
    """A whole long2short run.

    Args:
        method: one of ``METHODS``.
        model: the long-winded one, a saved model.
        short_model, alpha: for ``merge``: the other model, and the share of ``model`` in the average.
        data: problems to sample on; not for ``merge``.
        samples: file of the samples, which several methods may share; default: ``samples.jsonl`` in the folder.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``.
    """

    name: str
    method: str
    model: ModelSection
    data: DataSection | None = None
    reward: RewardSection = field(default_factory=lambda: RewardSection("accuracy", arguments={"mode": "strict"}))
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(n_samples=8))
    pairs: PairSettings | None = None
    samples: str | None = None
    short_model: str | None = None
    alpha: float = 0.5
    training: Mapping[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"`method` is {self.method!r}; it must be one of {METHODS}")
        if self.model.path is None:
            raise ValueError("`model` is a saved one: give `path`, a folder or hub name")
        if (self.method == "merge") != (self.short_model is not None):
            raise ValueError("`short_model` is needed with `method: merge`, and has an effect there only")
        if (self.method == "merge") == (self.data is not None):
            raise ValueError("`data` is needed to sample on, and has no effect with `method: merge`")
        if self.method == "merge" and self.training:
            raise ValueError("`training` has no effect with `method: merge`, which trains nothing; leave it out")
        if self.pairs is not None and self.method not in ("dpo", "simpo"):
            raise ValueError(f"`pairs` has no effect with `method: {self.method}`; leave it out")

    @property
    def output_dir(self) -> Path:
        return Path(self.output or f"runs/{self.name}")


@dataclass(frozen=True)
class Shortened:
    """The new model's folder, rows that it was trained on, and both evaluations (None without the section)."""

    folder: Path
    rows: int
    before: EvaluationResult | None
    after: EvaluationResult | None


def long2short_recipe_from(written: Mapping[str, Any], default_name: str = "long2short") -> Long2ShortRecipe:
    """A recipe from a plain mapping. ValueError for an unknown key or a missing section."""
    for name in ("method", "model"):
        if name not in written:
            raise ValueError(f"the recipe has no `{name}`; long2short needs method and model")
    rest = {key: value for key, value in written.items() if key not in (*_SECTIONS, "output_dir")}
    parsed: dict[str, Any] = {
        "name": str(written.get("name", default_name)),
        "method": str(written["method"]),
        "model": section_of(ModelSection, written["model"], "model"),
        "sampling": section_of(SamplingSettings, {"n_samples": 8, **rest}, "the recipe"),
        "training": dict(written.get("training") or {}),
        "output": written.get("output_dir"),
    }
    readers: dict[str, Any] = {
        "data": lambda value: data_section(value, "data"),
        "reward": reward_section,
        "pairs": lambda value: section_of(PairSettings, value, "pairs"),
        "evaluation": evaluation_section,
        "samples": str,
        "short_model": str,
        "alpha": float,
    }
    parsed |= {name: read(written[name]) for name, read in readers.items() if written.get(name) is not None}
    return Long2ShortRecipe(**parsed)


def long2short(recipe: Long2ShortRecipe, overwrite: bool = False) -> Shortened:
    """Run ``recipe``. Samples that an earlier, killed run left in the folder are used.

    Raises:
        ValueError: a finished run or something else in the folder, no rows to train on, or a setting that does not fit.
    """
    began = time.perf_counter()
    folder, path = _claim(recipe, overwrite), str(recipe.model.path)
    wanted = recipe.evaluation is not None and recipe.evaluation.before
    before = _measure(recipe, path, folder / "evaluation" / "before") if wanted else None
    if recipe.method == "merge":
        rows: list[dict[str, Any]] = []
        _merge(recipe, path, folder)
    else:
        rows = build_rows(recipe, _samples(recipe, path, folder))
        _save_rows(rows, folder / "rows.jsonl")
        _train(recipe, path, rows, folder)
    after = _measure(recipe, str(folder), folder / "evaluation" / "after")
    write_run(folder, {**_summary(recipe, rows), "seconds": round(time.perf_counter() - began, 1), "finished": True})
    for name, result in (("before", before), ("after", after)):
        if result is not None:
            console.print(f"{name}: {length_line(result)}", highlight=False)
    console.print(f"model: {folder}", soft_wrap=True, highlight=False)
    return Shortened(folder, len(rows), before, after)


def build_rows(recipe: Long2ShortRecipe, samples: list[Sampled]) -> list[dict[str, Any]]:
    """SFT rows or pairs out of the samples, by the recipe's method."""
    if recipe.method == "shortest_sft":
        rows = shortest_correct(samples)
    else:
        settings = recipe.pairs or PairSettings()
        rows = preference_pairs(
            samples,
            settings.ratio,
            wrong_must_be_longer=settings.wrong_must_be_longer,
            pairs_per_problem=settings.pairs_per_problem,
        )
    if not rows:
        raise ValueError(
            f"no row for `method: {recipe.method}` out of {len(samples)} problems: the model has to be right on some, and for "
            "pairs also wrong or longer; raise `n_samples`, or take other `data`"
        )
    return rows


def length_line(result: EvaluationResult) -> str:
    """`greedy: 80.0% right, 31.2 tokens a right answer` and the same of the samples, where there are any."""
    pieces = []
    for kind, outcomes in (("greedy", result.greedy), ("sampled", result.sampled)):
        scored = [outcome for outcome in outcomes if outcome.correct is not None]
        right = [outcome.tokens for outcome in scored if outcome.correct]
        if scored:
            tokens = f"{fmean(right):.1f} tokens a right answer" if right else "none right"
            pieces.append(f"{kind}: {len(right) / len(scored):.1%} right, {tokens}")
    return "; ".join(pieces)


def _claim(recipe: Long2ShortRecipe, overwrite: bool) -> Path:
    folder = recipe.output_dir
    marker = folder / "run.json"
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        found = json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else {}
        if found.get("pipeline") != "long2short":
            raise ValueError(f"`output_dir` {str(folder)!r} holds something else; choose another `--output_dir`")
        if found.get("finished"):
            raise ValueError(f"`output_dir` {str(folder)!r} holds a finished run; choose another, or give --overwrite")
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, {**_summary(recipe, []), "finished": False})
    return folder


def _samples(recipe: Long2ShortRecipe, path: str, folder: Path) -> list[Sampled]:
    assert recipe.data is not None
    reward = parts.build_reward(recipe.reward, "reward")
    problems = [dict(row) for row in parts.load_rows(recipe.data)]
    sampler = ModelSampler(path, recipe.sampling)
    rates = pass_rates(
        problems,
        sampler,
        reward,
        recipe.sampling.n_samples,
        path=recipe.samples or folder / "samples.jsonl",
        settings={**sampler.identity(), "reward": told(recipe.reward)},
        batch_size=recipe.sampling.problems_per_save,
        label="samples",
    )
    return sampled(problems, rates, sampler.tokens)


def _save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")


def _train(recipe: Long2ShortRecipe, path: str, rows: list[dict[str, Any]], folder: Path) -> None:
    from datasets import Dataset

    model, tokenizer = parts.load_model(recipe.model, recipe.sampling.seed)
    columns = ("prompt", "completion") if recipe.method == "shortest_sft" else ("prompt", "chosen", "rejected")
    data = Dataset.from_list([{name: row[name] for name in columns} for row in rows])
    arguments = {"seed": recipe.sampling.seed, "use_cpu": recipe.sampling.use_cpu, **recipe.training}
    if recipe.method == "shortest_sft":
        from grpo_lab.trainer.cold_start import supervised

        supervised(model, tokenizer, data, folder, arguments)
    else:
        from grpo_lab.trainer.preference import prefer

        method: Any = recipe.method
        prefer(method, model, tokenizer, data, folder, arguments)
    tokenizer.save_pretrained(folder)


def _merge(recipe: Long2ShortRecipe, path: str, folder: Path) -> None:
    """`average_weights` wants an empty folder; the run's own has its marker and the first evaluation already."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(dir=folder) as place:
        merged = average_weights(path, str(recipe.short_model), Path(place) / "merged", recipe.alpha)
        for file in merged.iterdir():
            if file.name != "run.json":
                shutil.move(file, folder / file.name)


def _measure(recipe: Long2ShortRecipe, path: str, target: Path) -> EvaluationResult | None:
    section = recipe.evaluation
    if section is None:
        return None
    model, tokenizer = load_for_evaluation(path, recipe.sampling.use_cpu)
    result = evaluate(
        model,
        tokenizer,
        parts.load_rows(section.data, "evaluation.data"),
        reward=parts.build_reward(section.reward, "evaluation.reward"),
        max_new_tokens=section.max_new_tokens or recipe.sampling.max_completion_length,
        batch_size=section.batch_size,
        n_samples=section.n_samples,
        temperature=section.temperature,
        seed=recipe.sampling.seed,
    )
    result.write(target)
    return result


def _summary(recipe: Long2ShortRecipe, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "pipeline": "long2short",
        "method": recipe.method,
        "model": recipe.model.path,
        "short_model": recipe.short_model,
        "data": told(recipe.data),
        "rows": len(rows),
        "sampling": told(recipe.sampling),
        "training": dict(recipe.training),
        "versions": versions(),
    }
