"""The loop of the lab `search`: what a search finds trains the policy and the value model, round by round.

In R1 (arXiv 2501.12948v1, §4.2) answers are found "via MCTS guided by a pre-trained value model", and "the resulting
question-answer pairs" train "both the actor model and the value model, iteratively refining the process". A round is:

    find        solutions of fresh problems, by tree search or by samples of equally many tokens   `solutions_found`
    policy      goes on from where it was, on the right solutions                                  `learnt_policy`
    value       goes on from where it was, on each state of all solutions found                    `learnt_value`
    held out    greedy answers, tree search by the value model, majority                           `held_out`

A state's label is the outcome of its solution, as AlphaGo Zero's value learns z, the game's winner (Silver et al.,
Nature 550, 2017, eq. 1). It is not the backed-up value Q: nothing in the search knows which answers are right, so Q
holds what the value model already said. In the loop by samples only the policy learns. The reward chooses and labels
rows here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from grpo_lab.curation import Sampled
from grpo_lab.engines.generators import in_form_of
from grpo_lab.evaluation.step_accuracy import area
from grpo_lab.io import write_json_lines
from grpo_lab.labs.search_cell import SearchCell, SearchModels, SearchSizes, right_of_each, valued
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.stages.select import ROWS, Keep, choose
from grpo_lab.stages.step_search import FoundSolution, Judging, best, sampled, steps_in, tree_search, within
from grpo_lab.stages.supervised import MODEL, StepRewardModel, Train

TRAINING: Mapping[str, Any] = {
    "per_device_train_batch_size": 64,
    "learning_rate": 5.0e-4,
    "lr_scheduler_type": "linear",
    "adam_beta2": 0.95,
    "weight_decay": 0.01,
    "max_length": 256,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
}
"""How policy and value model are trained on the rows of a round."""
Solutions = Sequence[Sequence[FoundSolution]]
"""Solutions that were found, a list for each problem."""
Right = Sequence[Sequence[bool]]
"""Whether each solution is right, a list for each problem."""


def loop_measured(arm: str, models: SearchModels, seed: int, sizes: SearchSizes, folder: Path) -> list[dict[str, Any]]:
    """Run the rounds of an arm, each in a folder of its own below ``folder``.

    Returns:
        what `held_out` measured at the start and after each round. A round's also has the tokens generated for a
        problem, the share of problems solved, and the number of right solutions found.
    """
    measured = [held_out(models, seed, sizes)]
    for number in range(1, sizes.rounds + 1):
        place = folder / f"round-{number}"
        cell = SearchCell(models, "train", sizes.round_problems, 1000 * number + seed)
        found = solutions_found(arm, cell, sizes)
        right = right_of_each(cell, found)
        policy = learnt_policy(models, cell, found, right, sizes, place / "policy")
        value = models.value
        if arm == "loop by search":
            value = learnt_value(models, cell, found, right, sizes, place / "value")
        models = replace(models, policy=policy, value=value)
        of_round = {
            "tokens": fmean(own[-1].tokens for own in found),
            "solved": fmean(any(own) for own in right),
            "right_found": sum(map(sum, right)),
        }
        measured.append({**held_out(models, seed, sizes), **of_round})
    return measured


def solutions_found(arm: str, cell: SearchCell, sizes: SearchSizes) -> list[list[FoundSolution]]:
    """Return the solutions of each problem that an arm finds within the round's tokens."""
    if arm == "loop by search":
        judging = Judging(cell.writer, cell.value)
        trees = tree_search(cell.writer, cell.questions, judging, width=sizes.width, tokens=sizes.round_tokens)
        found = [one.found for one in trees]
    else:
        found = sampled(cell.writer, cell.questions, sizes.round_samples)
    return [within(own, sizes.round_tokens) for own in found]


def learnt_policy(
    models: SearchModels, cell: SearchCell, found: Solutions, right: Right, sizes: SearchSizes, folder: Path
) -> Path:
    """Train the policy on the right solutions; return its folder.

    Of a problem's right solutions, those that calculate differently are taken, as `grpo-lab rounds` chooses them.

    Raises:
        ValueError: no solution is right.
    """
    samples = []
    for row, own, good in zip(cell.rows, found, right, strict=True):
        completions = [in_form_of(row["prompt"], one.text) for one in own]
        samples.append(Sampled(row["prompt"], completions, [*map(float, good)], [len(one.text) for one in own]))
    folder.mkdir(parents=True, exist_ok=True)
    choose(samples, Keep(), folder)
    training = {**TRAINING, "max_steps": sizes.round_steps}
    Train(str(models.policy), str(folder / ROWS), cell.seed, training).run(Workspace(folder, StopRequests(folder)))
    return folder / MODEL


def learnt_value(
    models: SearchModels, cell: SearchCell, found: Solutions, right: Right, sizes: SearchSizes, folder: Path
) -> Path:
    """Train the value model on the outcome of every state of every solution; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_lines(folder / ROWS, value_rows(cell, found, right))
    training = {**TRAINING, "max_steps": sizes.round_steps}
    stage = StepRewardModel(str(models.value), str(folder / ROWS), cell.seed, training, held_out=0.0)
    stage.run(Workspace(folder, StopRequests(folder)))
    return folder / MODEL


def value_rows(cell: SearchCell, found: Solutions, right: Right) -> list[dict[str, Any]]:
    """Make a row for each solution that has a step. Every step of it has the solution's outcome as its label: 1 if it
    is right, else 0."""
    rows = []
    for problem, own, good in zip(cell.rows, found, right, strict=True):
        for one, outcome in zip(own, good, strict=True):
            if steps := steps_in(one.text):
                labels = [float(outcome)] * len(steps)
                rows.append({"prompt": problem["prompt"], "completions": steps, "labels": labels})
    return rows


def held_out(models: SearchModels, seed: int, sizes: SearchSizes) -> dict[str, Any]:
    """Measure models on a seed's held-out problems.

    Returns:
        ``greedy``, ``search`` (tree search by the value model), ``majority``: whether each problem's answer is right;
        ``ranked``: how the value model ranks each problem's samples (`ranked`).
    """
    cell = SearchCell(models, "test", sizes.held_out, 200 + seed)
    budget = sizes.held_out_tokens
    trees = tree_search(cell.writer, cell.questions, Judging(cell.writer, cell.value), width=sizes.width, tokens=budget)
    samples = valued(cell, sampled(cell.writer, cell.questions, sizes.round_samples), cell.value)
    right = right_of_each(cell, samples)
    return {
        "greedy": [own[0] for own in right],
        "search": cell.right([best(within(tree.found, budget)) for tree in trees]),
        "majority": cell.right([cell.vote(within(own, budget)) for own in samples]),
        "ranked": [ranked(own[1:], good[1:]) for own, good in zip(samples, right, strict=True)],
    }


def ranked(own: Sequence[FoundSolution], right: Sequence[bool]) -> float | None:
    """Return how often the value of a right solution of a problem is above that of a wrong one; a tie counts ½. None if
    all are right, or all wrong."""
    if all(right) or not any(right):
        return None
    return area(np.array([one.value for one in own]), np.array(right))
