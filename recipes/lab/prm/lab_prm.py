"""The exact step score of word problems, the process reward models of the lab `prm`, and what is measured of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from grpo_lab.evaluation.step_accuracy import FirstSteps, first_wrong_f1, first_wrong_step, step_accuracy
from grpo_lab.labs.experiment import GENERATED, Options
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.rewards import EquationSteps, TokenClassificationSteps
from grpo_lab.rewards.arithmetic import equation_list
from grpo_lab.rewards.steps import SplitStepReward
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import settings
from grpo_lab.stages.sample import OF_A_LINE, check_lines, read_lines, samples_in
from grpo_lab.stages.step_labels import solutions_of

MODEL = "rewards/token_classification_steps/mean"
EXACT = "rewards/exact_steps/mean"
SMOOTHED = 10
"""Number of steps that a mean of the log is over."""
NEAR = 0.05
LABEL = "first_error_step_1based"
OF_A_LABEL = {"problem": str, "steps": list}
LONGEST = 4096
"""Tokens of a labelled solution that a model reads."""
WEIGHTS: Mapping[str, tuple[float, float, float]] = {
    "outcome": (1.0, 0.0, 0.0),
    "exact and outcome": (1.0, 1.0, 0.0),
    "model and outcome": (1.0, 0.0, 1.0),
    "model alone": (0.0, 0.0, 1.0),
}
"""Arm → weights of the answer, of the exact step score, and of the model's."""


class ExactSteps(SplitStepReward):
    """Score a line 1 as long as a solution goes the way of the problem's ``worked_solution``, and 0 from the first line
    that leaves it.

    A line goes that way if it has the calculation of the worked solution's line at its place, or is its last line, the
    answer.
    """

    columns = ("worked_solution",)

    def __init__(self) -> None:
        super().__init__()
        self.__name__ = "exact_steps"

    def score_texts(self, prompt: Any, steps: list[str]) -> list[float]:
        raise ValueError("`exact_steps` reads the column 'worked_solution': call `score_all`")

    def score_all(
        self, prompts: Sequence[Any], steps: Sequence[list[str]], columns: Mapping[str, Any]
    ) -> list[list[float]]:
        return [exact(own, worked) for own, worked in zip(steps, columns["worked_solution"], strict=True)]


def exact(steps: Sequence[str], worked_solution: str) -> list[float]:
    """Return the exact score of each step."""
    *lines, answer = worked_solution.split("\n")
    scores: list[float] = []
    right = True
    ended = False
    for place, step in enumerate(steps):
        calculates = place < len(lines) and equation_list(step) == equation_list(lines[place])
        answers = step.strip() == answer
        right = right and not ended and (calculates or answers)
        ended = ended or answers
        scores.append(float(right))
    return scores


@dataclass(frozen=True)
class Marked:
    """Solutions of one problem, cut into steps, and each step's true score: 1 before the first wrong step, then 0."""

    prompt: Any
    steps: list[list[str]]
    truth: list[list[float]]


@settings()
class StepCheck:
    """``lab_prm:StepCheck``: how well a process reward model, and `equation_steps`, tell right lines of ``samples``
    from wrong ones, by the exact step score; and of ``labelled``, if given, by what people said.

    A line that `equation_steps` does not judge counts as right. F1 is None if all solutions have a wrong line, or none
    has one. A line of ``labelled`` has `problem`, `steps` and `first_error_step_1based` (null: all are right); others
    are passed over. The model reads those solutions beyond the positions that it learnt.
    """

    leaves: ClassVar[Mapping[str, str]] = {}
    model: str
    samples: str
    labelled: str | None = None

    def plan(self) -> str:
        check_lines(self.samples, "samples", OF_A_LINE)
        if self.labelled is not None:
            check_lines(self.labelled, "labelled", OF_A_LABEL)
        return f"{self.model} and equation_steps, on {self.samples}"

    def run(self, workspace: Workspace) -> Facts:
        facts = judged(TokenClassificationSteps(self.model), by_exact_score(self.samples))
        if self.labelled is not None:
            model = TokenClassificationSteps(self.model, max_length=LONGEST)
            facts["labelled"] = judged(model, by_people(self.labelled))
        return facts


def by_exact_score(samples: str) -> list[Marked]:
    """Return the sampled solutions, marked by the exact step score."""
    problems = []
    for sampled in samples_in(Path(samples)):
        steps = [solution.steps for solution in solutions_of(sampled)]
        truth = [exact(own, sampled.columns["worked_solution"]) for own in steps]
        problems.append(Marked(sampled.prompt, steps, truth))
    return problems


def by_people(labelled: str) -> list[Marked]:
    """Return the solutions whose first wrong step people have labelled."""
    problems = []
    for row in read_lines(Path(labelled)):
        if LABEL not in row:
            continue
        steps = row["steps"]
        right = len(steps) if row[LABEL] is None else row[LABEL] - 1
        truth = [float(place < right) for place in range(len(steps))]
        problems.append(Marked([{"role": "user", "content": row["problem"]}], [steps], [truth]))
    return problems


def judged(model: TokenClassificationSteps, problems: Sequence[Marked]) -> dict[str, Any]:
    """Return accuracy, AUC and F1 of the model's scores, and of `equation_steps`."""
    pairs: dict[str, list[list[tuple[float, float]]]] = {"model": [], "equation_steps": []}
    first: dict[str, list[FirstSteps]] = {"model": [], "equation_steps": []}
    for problem in problems:
        holds = [EquationSteps().score_texts("", own) for own in problem.steps]
        scores: dict[str, list[list[Any]]] = {
            "model": model.score_all([problem.prompt] * len(problem.steps), problem.steps, {}),
            "equation_steps": [[1.0 if score is None else score for score in own] for own in holds],
        }
        for name, found in scores.items():
            both = [*zip(found, problem.truth, strict=True)]
            pairs[name].append([pair for own, right in both for pair in zip(own, right, strict=True)])
            first[name].append([(first_wrong_step(own), first_wrong_step(right)) for own, right in both])
    return {name: {**step_accuracy(pairs[name]).to_dict(), "F1": f1_of(first[name])} for name in pairs}


def f1_of(problems: Sequence[FirstSteps]) -> dict[str, Any] | None:
    """Return F1 of the first wrong steps; None without solutions of both kinds, as from a start that learnt little."""
    kinds = {right is None for solutions in problems for _, right in solutions}
    if len(kinds) < 2:
        return None
    return first_wrong_f1(problems).f1.to_dict()


def models(options: Options) -> None:
    """Make each seed's process reward model from solutions of the start, and check it on unseen problems."""
    for seed in options.seeds:
        run_pipeline(pipeline_from(pipeline_of(seed, options)))


def pipeline_of(seed: int, options: Options) -> dict[str, Any]:
    """Return the seed's pipeline: `pipeline.yaml` with the lab's start in place of its first stage."""
    recipe = read_yaml(Path(__file__).with_name("pipeline.yaml"))
    stages = {one["name"]: one for one in recipe["stages"] if one["name"] != "start"}
    for stage in stages.values():
        wanted = [setting for setting, place in stage["inputs"].items() if place == "start.model"]
        for setting in wanted:
            del stage["inputs"][setting]
            stage[setting] = str(options.start)
    for name in ("samples", "unseen"):
        stages[name]["data"] = {**stages[name]["data"], "seed": 1000 + seed}
    for name in ("samples", "labels", "prm", "unseen"):
        stages[name]["seed"] = seed
    folder = options.folder / f"prm-{seed}"
    return {"name": f"prm-{seed}", "output_dir": str(folder), "stages": [*stages.values()]}


def arm(name: str, seed: int, options: Options) -> dict[str, Any]:
    """Return the arm's rewards: what differs is what they weigh. Raises ValueError without the seed's model."""
    model = options.folder / f"prm-{seed}" / "prm" / "model"
    if not model.is_dir():
        raise ValueError(f"no process reward model in {model}: the lab's `prepare` makes it")
    answer, steps, learnt = WEIGHTS[name]
    rewards = [
        {"name": "accuracy", "mode": "strict", "weight": answer},
        {"name": "lab_prm:ExactSteps", "weight": steps},
        {"name": "token_classification_steps", "model": str(model), "weight": learnt},
    ]
    return {"rewards": rewards}


def means(log: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Return the mean of each ten steps in a row (of all, if there are fewer)."""
    values = [row[metric] for row in log if metric in row]
    return [fmean(values[at : at + SMOOTHED]) for at in range(max(1, len(values) - SMOOTHED + 1)) if values]


def lost(result: Any, log: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much the exact step score at the end is below its highest; 0 if the model's score fell, too."""
    exact_means = means(log, EXACT)
    if not exact_means:
        return float("nan")
    model_means = means(log, MODEL)
    peak = exact_means.index(max(exact_means))
    if model_means[-1] < model_means[peak]:
        return 0.0
    return exact_means[peak] - exact_means[-1]


def parted(result: Any, log: Sequence[Mapping[str, Any]]) -> float:
    """Return the generated tokens at the last step whose exact step score is near its highest; NaN if that is the
    end."""
    exact_means = means(log, EXACT)
    near = [at for at, value in enumerate(exact_means) if value >= max(exact_means) - NEAR]
    if not near or near[-1] == len(exact_means) - 1:
        return float("nan")
    tokens = [row[GENERATED] for row in log if EXACT in row]
    return float(tokens[near[-1] + SMOOTHED - 1])
