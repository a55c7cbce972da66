"""Search: Monte Carlo tree search over steps, against samples and beams at equal generated tokens.

R1 reports two attempts that did not work (arXiv 2501.12948, §4.2). What it says of search is looked at in small:

    space     "token generation presents an exponentially larger search space" than chess
    limit     "a maximum extension limit for each node" can lead to "the model getting stuck in local optima"
    value     the value model "guides each step of the search process", and "is inherently difficult" to train
    rows      search helps at inference, but "iteratively boosting model performance through self-search remains a
              significant challenge"

An arm is a way to search, a look at the space or at the judges, or a round of expert iteration. A seed has held-out
problems of its own, and draws of its own. All cells share the models of recipes/lab/search/pipeline.yaml, so intervals
are over problems, with these models.

**Decided on 2026-11-28, before the first counted run** (seeds 0, 1, 2; 40 problems each). A pilot had made the start
and judges of less data, and no search:

    better         A method is better than another at 880 tokens if the 95% interval of the paired difference, over the
                   problems of all seeds, is above 0; else: not shown.
    space          seen if the paths of a tree at width 16 are more than a hundred times those at width 2.
    limit          seen if the share of problems whose right way is in the tree, at the width of the search (4), is
                   below that at 16, the intervals of both not overlapping.
    value misled   seen if tree search by the value model answers wrongly, at 880 tokens, in more than a tenth of the
                   problems for which it had found a right solution.
    rows           search teaches more than samples if the 95% interval of the paired difference in held-out greedy
                   accuracy is above 0; else: not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from grpo_lab.labs.experiment import Experiment, Options, Record, changes_asked
from grpo_lab.labs.search_cell import (
    SearchCell,
    SearchSizes,
    judges_measured,
    rows_measured,
    searches,
    space_measured,
)
from grpo_lab.labs.search_report import report
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import entries_of, run_pipeline
from grpo_lab.recipe.yaml import read_yaml, shipped_recipe

SEARCHES = ("samples", "beam search, PRM", "tree search, votes", "tree search, value", "tree search, PRM")
VIEWS = ("space", "judges")
TAUGHT = ("rows from samples", "rows from search")
IMPORTS = ("trl.trainer.sft_trainer", "grpo_lab.labs.search_cell")
MODELS = "models"
"""Folder of the pipeline, in the lab's."""


def sizes_of(options: Options) -> SearchSizes:
    """Return the sizes, with the changes of ``--set``."""
    changes = changes_asked(options)
    return SearchSizes(**{one.name: changes[one.name] for one in fields(SearchSizes) if one.name in changes})


def models_of(options: Options) -> dict[str, Any]:
    """Return the pipeline that makes the models. Changes of ``--set`` that name no size are its own."""
    names = {one.name for one in fields(SearchSizes)}
    changes = {key: value for key, value in changes_asked(options).items() if key not in names}
    recipe = read_yaml(shipped_recipe("lab/search/pipeline.yaml"), changes)
    return {**recipe, "output_dir": str(options.folder / MODELS)}


def prepare(options: Options) -> None:
    """Make the models that all cells share."""
    run_pipeline(pipeline_from(models_of(options)))


def settings_of_cell(arm: str, seed: int, options: Options) -> Mapping[str, Any]:
    """Return what a cell is made from: the models' stages, and the sizes."""
    return {"stages": models_of(options)["stages"], "sizes": asdict(sizes_of(options))}


def check(arms: Sequence[str], options: Options) -> dict[str, str]:
    """Check the sizes and the models' stages; return the facts of a dry run."""
    sizes_of(options)
    entries_of(pipeline_from(models_of(options)))
    return {"lab": "search over steps, against samples and beams", "models": str(options.folder / MODELS)}


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    """Measure an arm on the problems of a seed; return its record."""
    sizes = sizes_of(options)
    models = options.folder / MODELS
    if arm in TAUGHT:
        cell = SearchCell(models, "train", sizes.row_problems, 1000 + seed)
        return {"seed": seed, "rows": rows_measured(arm, cell, sizes, folder)}
    cell = SearchCell(models, "test", sizes.problems, seed)
    if arm == "space":
        return {"seed": seed, "space": space_measured(cell, sizes)}
    if arm == "judges":
        return {"seed": seed, "judges": judges_measured(cell, sizes)}
    return {"seed": seed, "budgets": sizes.budgets, "methods": searches(arm, cell, sizes)}


LAB = Experiment(
    [*SEARCHES, *VIEWS, *TAUGHT],
    run,
    report,
    prepare,
    imports=IMPORTS,
    settings=settings_of_cell,
    check=check,
)
