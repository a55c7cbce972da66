"""Over-optimisation: a policy that only a proxy rewards gains on the proxy, but not always in truth (Gao's law).

The proxy is a preference model. It learns from comparisons of the start model's own answers, which a simulated judge
made (`grpo_lab.rewards.comparisons`). An arm is such a judge: one without noise (``none``), one with people's noise, or
one with a liking for length (``systematic``). Two arms have no proxy: ``form`` is rewarded for writing a calculation
down, right or not, ``truth`` for right answers.

A cell runs recipes/lab/overoptimisation/pipeline.yaml without its first stage, whose model all cells share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.diagnostics.laws import overoptimisation_law
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Experiment, Found, Options, Record, changes_asked
from grpo_lab.labs.tables import draw, table
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import entries_of, plan_of_pipeline, run_pipeline
from grpo_lab.reading import read_json_lines
from grpo_lab.recipe.yaml import read_yaml, shipped_recipe

JUDGES: Mapping[str, Any] = {"none": {}, "people": {"temperature": 1.0}, "systematic": {"longer": 0.4}}
"""Arm with a proxy → settings of the judge that taught it."""
PAID: Mapping[str, Any] = {"form": [{"name": "worked_out"}], "truth": []}
"""Arm without a proxy → its rewards besides accuracy. If there are any, accuracy is only watched (weight 0)."""
TRUTH = "rewards/accuracy_reward/mean"
PROXY = "rewards/preference_reward/mean"
KL = "kl/reward_penalty"
LAST = 10
"""Number of steps that a mean of the log covers."""


def stages_of(options: Options) -> list[dict[str, Any]]:
    """Return the stages of the lab's pipeline. Those after the first take its model from ``start/`` in the lab's
    folder."""
    recipe = read_yaml(shipped_recipe("lab/overoptimisation/pipeline.yaml"), changes_asked(options))
    place = str(options.folder / "start/start/model")
    for stage in recipe["stages"][1:]:
        of_start = [setting for setting, wanted in stage["inputs"].items() if wanted == "start.model"]
        for setting in of_start:
            del stage["inputs"][setting]
            stage["model"] = {"path": place} if setting == "model.path" else place
    return list(recipe["stages"])


def prepare(options: Options) -> None:
    """Make the start model that all cells share."""
    start = {"name": "start", "output_dir": str(options.folder / "start"), "stages": stages_of(options)[:1]}
    run_pipeline(pipeline_from(start))


def stages_of_cell(arm: str, seed: int, options: Options) -> list[dict[str, Any]]:
    """Return a cell's stages: samples of the start, comparisons of them, the proxy, the policy. Arms without a proxy
    have only the first and the last."""
    stages = {one["name"]: one for one in stages_of(options)[1:]}
    for name in ("samples", "proxy", "policy"):
        stages[name]["seed"] = seed
    for name in ("samples", "policy"):
        stages[name]["data"] = {**stages[name]["data"], "seed": stages[name]["data"]["seed"] + seed}
    if arm in PAID:
        accuracy = {**stages["policy"]["rewards"][0], "weight": 0.0 if PAID[arm] else 1.0}
        stages["policy"] |= {"inputs": {}, "rewards": [accuracy, *PAID[arm]]}
        del stages["pairs"], stages["proxy"]
    else:
        most = stages["pairs"]["judged"]["per_problem"]
        stages["pairs"]["judged"] = {"per_problem": most, "seed": seed, **JUDGES[arm]}
    return [*stages.values()]


def settings(arm: str, seed: int, options: Options) -> Mapping[str, Any]:
    """Return the settings that a cell is made from: its stages, and the stage that makes the start."""
    return {"start": stages_of(options)[0], "stages": stages_of_cell(arm, seed, options)}


def check(arms: Sequence[str], options: Options) -> dict[str, str]:
    """Check the pipeline, and the stages of these arms; return the facts of a dry run. Raises ValueError for an invalid
    stage."""
    asked = read_yaml(shipped_recipe("lab/overoptimisation/pipeline.yaml"), changes_asked(options))
    unused = options.folder / "pipeline"  # nothing is made there: the start and the cells have their own folders
    plan_of_pipeline(pipeline_from({**asked, "output_dir": str(unused)}), run=True)
    for arm in arms:
        entries_of(pipeline_from({"name": arm, "output_dir": str(unused), "stages": stages_of_cell(arm, 0, options)}))
    return {"lab": "over-optimisation, by who taught the proxy", "start": str(options.folder / "start")}


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    """Run the stages of a cell as a pipeline; return its record."""
    stages = stages_of_cell(arm, seed, options)
    whole = {"name": f"{arm}-{seed}", "output_dir": str(folder), "stages": stages}
    facts = run_pipeline(pipeline_from(whole))
    log = [row for _, row in read_json_lines(folder / "policy/metrics.jsonl") if KL in row]
    return measured(log, facts, {"form": "rewards/worked_out/mean", "truth": TRUTH}.get(arm, PROXY))


def measured(log: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], paid: str) -> Record:
    """Make the record of a cell: numbers of the start (``before``) and of the policy (``after``), and ``curves`` over
    √KL with a point for each step.

    An estimate of the KL below 0, as at the start, counts as 0. Gao's law is fitted to the truth, unless the policy
    never left the start. Its peak counts only if it lies within the distances that the policy reached.

    Args:
        log: rows of the policy's `metrics.jsonl` with the KL.
        facts: stage → its facts.
        paid: the metric that the policy was rewarded for.

    Raises:
        ValueError: there are too few steps to fit the law.
    """
    distances = [math.sqrt(max(row[KL], 0.0)) for row in log]
    start = facts["samples"]["right_share"]
    logged = {"truth": TRUTH, "proxy": paid, "tokens": "completions/mean_length"}
    values = {title: [row[metric] for row in log] for title, metric in logged.items()}
    fitted: list[float] = []
    alpha = beta = peak = gained_at_peak = math.nan
    if any(distances):  # the policy stays at the start if rewards never differ within a group
        law = overoptimisation_law([(d, value - start) for d, value in zip(distances, values["truth"], strict=True)])
        alpha = law.alpha
        beta = law.beta
        peak, gained_at_peak = law.peak or (math.nan, math.nan)
        fitted = [start + law.at(distance).value for distance in distances]
    means = [fmean(values["truth"][step : step + LAST]) for step in range(max(1, len(log) - LAST + 1))]
    pairs = facts.get("pairs", {"wrong": math.nan, "rows": 1, "ties": 0})
    if peak > max(distances):  # the fit says nothing beyond the distances that were reached
        peak = gained_at_peak = math.nan
    after = {
        "wrong labels": pairs["wrong"] / max(1, pairs["rows"] - pairs["ties"]),
        "proxy gained": fmean(values["proxy"][-LAST:]) - values["proxy"][0],
        "truth": means[-1],
        "most truth": max(means),
        "greedy": facts["policy"].get("accuracy", math.nan),
        "√KL": fmean(distances[-LAST:]),
        "α": alpha,
        "β": beta,
        "√KL at the law's peak": peak,
        "truth gained there": gained_at_peak,
    }
    values["truth, Gao's law"] = fitted
    curves = {title: [*zip(distances, of, strict=True)] if of else [] for title, of in values.items()}
    return {"before": {"truth": start}, "after": after, "curves": curves}


def report(found: Found, options: Options) -> str:
    """Write ``table.md`` and ``curves.png``; return the text to print."""
    text = table(found)
    place = options.folder / "table.md"
    write_whole_text(place, f"{text}\n")
    titles = next(iter(found.values()))[0]["curves"]
    lines = {
        title: {arm: [sorted(curve) for run in found[arm] if (curve := run["curves"][title])] for arm in found}
        for title in titles
    }
    draw(lines, place.with_name("curves.png"), "√KL to the start (nats a completion)")
    return f"{text}\n\n{place}, {place.with_name('curves.png')}"


LAB = Experiment(
    [*JUDGES, *PAID],
    run,
    report,
    prepare,
    result=lambda record: record["after"]["truth"],
    settings=settings,
    check=check,
)
