"""Search over steps: Monte Carlo tree search against samples and beams, at equal generated tokens.

R1 reports two attempts that did not work (arXiv 2501.12948, §4.2). What it says of search is looked at in small:

    space     "token generation presents an exponentially larger search space" than chess
    limit     "a maximum extension limit for each node" can lead to "the model getting stuck in local optima"
    value     the value model "guides each step of the search process", and "is inherently difficult" to train
    loop      search helps at inference, but "iteratively boosting model performance through self-search remains a
              significant challenge"

An arm is a way to search (``SEARCHES``), a look at the space or at the judges (``VIEWS``), or a loop of search and
training (``LOOPS``). A seed has its own held-out problems and its own draws. All cells share the models of
recipes/lab/search/pipeline.yaml, so intervals are over problems, with these models. What a cell measures is in
``search_cell.py`` and ``search_loop.py``, the tables are in ``search_report.py``.

**Decided on 2026-11-28, before the first counted run** (seeds 0, 1, 2; 40 problems each). A pilot had made the start
and judges of less data, and no search:

    better         A method is better than another at 880 tokens if the 95% interval of the paired difference, over the
                   problems of all seeds, is above 0; else: not shown.
    space          seen if the paths of a tree at width 16 are more than a hundred times those at width 2.
    limit          seen if the share of problems whose right way is in the tree, at the width of the search (4), is
                   below that at 16, the intervals of both not overlapping.
    value misled   seen if tree search by the value model answers wrongly, at 880 tokens, in more than a tenth of the
                   problems for which it had found a right solution.

**The loop: decided on 2026-11-28, before its first counted run** (seeds 0, 1, 2; three rounds). One round of both kinds
had been run for an older table (docs/log.md), and a pilot with seed 90, one round. All intervals are of paired
differences over the held-out problems of all seeds, in greedy accuracy unless said otherwise:

    gains          A loop gains if its last round less the start is above 0; else: not shown.
    challenge      seen if the loop by search less the loop by samples, after the last round, includes 0 or lies below
                   it; above 0 it is not seen.
    search         Tree search by the value model beats majority at 440 tokens after the last round of the loop by
                   search if the difference is above 0; else: not shown.
    judge          The value model gets better if the interval of how often it ranks two samples of a problem rightly
                   lies, after the last round of the loop by search, above that at the start; else: not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from grpo_lab.labs.experiment import Experiment, Options, Record, changes_asked
from grpo_lab.labs.search_cell import (
    SearchCell,
    SearchModels,
    SearchSizes,
    judges_measured,
    searches,
    space_measured,
)
from grpo_lab.labs.search_loop import loop_measured
from grpo_lab.labs.search_report import report
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import plan_of_pipeline, run_pipeline
from grpo_lab.recipe.yaml import read_yaml, shipped_recipe
from grpo_lab.settings import refuse_unknown

SEARCHES = ("samples", "beam search, PRM", "tree search, votes", "tree search, value", "tree search, PRM")
VIEWS = ("space", "judges")
LOOPS = ("loop by samples", "loop by search")
"""The arms: ways to search, looks at the search, loops of search and training."""
IMPORTS = ("trl.trainer.sft_trainer", "grpo_lab.labs.search_loop")
MODELS = "models"
"""Name of the pipeline's folder, in the lab's folder."""


def sizes_of(options: Options) -> SearchSizes:
    """Return the sizes of the lab, with the changes of ``--set`` whose key has no dot. Raises ValueError if such a key
    is no size."""
    changes = {key: value for key, value in changes_asked(options).items() if "." not in key}
    sizes = [one.name for one in fields(SearchSizes)]
    refuse_unknown(changes, sizes, "lab 'search'", "or of its pipeline: stages.0.max_steps")
    return SearchSizes(**changes)


def models_of(options: Options) -> dict[str, Any]:
    """Return the recipe of the pipeline that makes the models, with the changes of ``--set`` whose key has a dot."""
    changes = {key: value for key, value in changes_asked(options).items() if "." in key}
    recipe = read_yaml(shipped_recipe("lab/search/pipeline.yaml"), changes)
    return {**recipe, "output_dir": str(options.folder / MODELS)}


def prepare(options: Options) -> None:
    """Make the models that all cells share."""
    run_pipeline(pipeline_from(models_of(options)))


def settings_of_cell(arm: str, seed: int, options: Options) -> Mapping[str, Any]:
    """Return what a cell is made from: the stages that make the models, and the sizes."""
    return {"stages": models_of(options)["stages"], "sizes": asdict(sizes_of(options))}


def check(arms: Sequence[str], options: Options) -> dict[str, str]:
    """Check the sizes and the stages that make the models; return the facts of a dry run. Raises ValueError for a
    mistake."""
    sizes_of(options)
    plan_of_pipeline(pipeline_from(models_of(options)), run=True)
    return {"lab": "search over steps, against samples and beams", "models": str(options.folder / MODELS)}


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    """Measure an arm on the problems of a seed; return its record."""
    sizes = sizes_of(options)
    models = SearchModels.made_in(options.folder / MODELS)
    if arm in LOOPS:
        return {"seed": seed, "loop": loop_measured(arm, models, seed, sizes, folder)}
    cell = SearchCell(models, "test", sizes.problems, seed)
    if arm == "space":
        return {"seed": seed, "space": space_measured(cell, sizes)}
    if arm == "judges":
        return {"seed": seed, "judges": judges_measured(cell, sizes)}
    return {"seed": seed, "budgets": sizes.budgets, "methods": searches(arm, cell, sizes)}


LAB = Experiment(
    [*SEARCHES, *VIEWS, *LOOPS],
    run,
    report,
    prepare,
    imports=IMPORTS,
    settings=settings_of_cell,
    check=check,
)
