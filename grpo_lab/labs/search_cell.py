"""What a cell of the lab `search` measures: answers of each method, the space of steps, the judges.

A `SearchCell` loads models and problems. `searches` measures a way to search: for each budget of generated tokens,
whether the answer to each problem is right. `space_measured` looks at the tree of steps around the worked solutions,
`judges_measured` at how well the judges value states. A state is a solution as far as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.data import word_problems
from grpo_lab.engines.generators import in_form_of, render_prompt
from grpo_lab.evaluation.votes import answer_reader
from grpo_lab.recipe.sections import SamplingSettings
from grpo_lab.rewards import AccuracyReward
from grpo_lab.rewards.token_classification import TokenClassificationSteps
from grpo_lab.settings import Positive, settings
from grpo_lab.stages.sample import load_generator
from grpo_lab.stages.step_search import (
    FoundSolution,
    Judging,
    Question,
    StepJudge,
    StepWriter,
    Voting,
    beam_search,
    best,
    sampled,
    steps_in,
    tree_search,
    voted,
    within,
)
from grpo_lab.stages.supervised import MODEL

TASK: Mapping[str, Any] = {"steps": (3, 4), "largest": 20}
"""Arguments of `word_problems`."""
MOST_TOKENS = 72
MOST_OF_A_STEP = 20
"""Largest number of tokens of a solution, and of a step. The longest worked solution has 56, the longest step 16."""
WRITTEN_AT_ONCE = 256
JUDGED_AT_ONCE = 64
"""Number of solutions in a batch of the policy, and of a judge."""
WIDTHS = (1, 2, 4, 8, 16)
"""Numbers of proposals of a node, in the look at the space."""
Pick = Callable[[Sequence[FoundSolution]], str]
"""Function that chooses the answer to a problem from its solutions."""


@settings()
class SearchSizes:
    """Sizes of the lab, which ``--set`` changes as it changes the pipeline of its models.

    Args:
        problems: held-out problems of a seed.
        budgets: tokens generated for a problem, smallest first.
        width: proposals for a node's next step.
        beams: numbers of states that a beam search keeps; there is a search for each number.
        beam_width: proposals for the next step of each of these states.
        samples: of a problem; as many as the largest budget pays for.
        proposals: next steps that are sampled from each state of a worked solution, to look at the space.
        rests: ends of a solution that are sampled from each state; the share of right ones is the state's exact value.
        rounds: of the loop.
        round_problems: fresh problems of a round.
        round_tokens: generated for each of them.
        round_steps: optimizer steps of the policy in a round, and of the value model.
        held_out: problems that the loop is measured by.
        held_out_tokens: generated for each of them.
        round_samples: of a problem in the loop; as many as its tokens pay for.
    """

    problems: Positive = 40
    budgets: tuple[Positive, ...] = (50, 220, 440, 880)
    width: Positive = 4
    beams: tuple[Positive, ...] = (1, 2, 4)
    beam_width: Positive = 3
    samples: Positive = 20
    proposals: Positive = 16
    rests: Positive = 16
    rounds: Positive = 3
    round_problems: Positive = 80
    round_tokens: Positive = 220
    round_steps: Positive = 30
    held_out: Positive = 80
    held_out_tokens: Positive = 440
    round_samples: Positive = 16

    def __post_init__(self) -> None:
        if [*self.budgets] != sorted(set(self.budgets)):
            raise ValueError(f"`budgets` is {[*self.budgets]}; they must rise")


@dataclass(frozen=True)
class SearchModels:
    """Folders of the policy, of the value model, and of the process reward model (``prm``)."""

    policy: Path
    value: Path
    prm: Path

    @classmethod
    def made_in(cls, pipeline: Path) -> SearchModels:
        """Return the models that the stages of the pipeline in this folder have made."""
        return cls(pipeline / "start" / MODEL, pipeline / "value" / MODEL, pipeline / "prm" / MODEL)


class SearchCell:
    """Models and problems of a cell.

    Args:
        models: the policy and its judges.
        split: of the problems; ``test`` is held out.
        count: number of problems.
        seed: of the problems, and of all that is sampled.
    """

    def __init__(self, models: SearchModels, split: str, count: int, seed: int) -> None:
        self.seed = seed
        self.rows = word_problems(count, seed=100 + seed, split=split, template="chat", **TASK).to_list()
        self.writer = self._writer(models.policy)
        tokenizer = self.writer.loaded.tokenizer
        self.questions = [Question(row["prompt"], render_prompt(row["prompt"], tokenizer).ids) for row in self.rows]
        self.reward = AccuracyReward(mode="strict")
        reader = answer_reader(self.reward)
        assert reader is not None  # an AccuracyReward has one
        self.read = reader
        self.value = StepJudge(self._scores(models.value), "last")
        self.prm = StepJudge(self._scores(models.prm), "least")

    def _writer(self, model: Path) -> StepWriter:
        """Load the policy."""
        how = SamplingSettings(batch_size=WRITTEN_AT_ONCE, max_completion_length=MOST_TOKENS, use_cpu=True)
        loaded = load_generator(str(model), how, use_cpu=True, seed=self.seed)
        return StepWriter(loaded, MOST_TOKENS, MOST_OF_A_STEP, seed=self.seed)

    def _scores(self, model: Path) -> TokenClassificationSteps:
        """Load a judge of steps."""
        return TokenClassificationSteps(model, batch_size=JUDGED_AT_ONCE, device="cpu")

    def vote(self, found: Sequence[FoundSolution]) -> str:
        """Return the first solution with the most frequent answer (`voted`)."""
        return voted(found, self.read)

    def right(self, texts: Sequence[str], places: Sequence[int] | None = None) -> list[bool]:
        """Return whether each text solves its problem. ``places``: the index of each text's problem; None: a text for
        each problem."""
        rows = self.rows
        if places is not None:
            rows = [self.rows[place] for place in places]
        prompts = [row["prompt"] for row in rows]
        completions = [in_form_of(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        solutions = [row["solution"] for row in rows]
        scores = self.reward(prompts=prompts, completions=completions, solution=solutions)
        return [score is not None and score >= 1 for score in scores]


def searches(arm: str, cell: SearchCell, sizes: SearchSizes) -> dict[str, Any]:
    """Search by an arm's methods; return method → what it answered (`measured`).

    The arm `samples` has three methods, which choose from the same samples: majority, and the best one by each judge.
    """
    most = sizes.budgets[-1]
    tree: dict[str, Any] = {"width": sizes.width, "tokens": most}
    if arm == "beam search, PRM":
        return {arm: beams_measured(cell, sizes)}
    if arm == "tree search, votes":
        trees = tree_search(cell.writer, cell.questions, Voting(cell.writer, cell.read), **tree)
        return {arm: measured(cell, [one.found for one in trees], cell.vote, sizes)}
    judges = {"tree search, value": cell.value, "tree search, PRM": cell.prm}
    if arm in judges:
        trees = tree_search(cell.writer, cell.questions, Judging(cell.writer, judges[arm]), **tree)
        return {arm: measured(cell, [one.found for one in trees], best, sizes)}
    found = sampled(cell.writer, cell.questions, sizes.samples)
    return {
        "majority": measured(cell, found, cell.vote, sizes),
        "best of n, value": measured(cell, valued(cell, found, cell.value), best, sizes),
        "best of n, PRM": measured(cell, valued(cell, found, cell.prm), best, sizes),
    }


def valued(cell: SearchCell, found: Sequence[Sequence[FoundSolution]], judge: StepJudge) -> list[list[FoundSolution]]:
    """Return the solutions of each problem with a judge's values."""
    every = [(question, one) for question, own in zip(cell.questions, found, strict=True) for one in own]
    values = iter(judge([question for question, _ in every], [one.text for _, one in every]))
    return [[FoundSolution(one.text, one.tokens, next(values)) for one in own] for own in found]


def measured(
    cell: SearchCell, found: Sequence[Sequence[FoundSolution]], pick: Pick, sizes: SearchSizes
) -> dict[str, Any]:
    """Measure a method, from the solutions that it found for each problem, by rising tokens.

    Args:
        cell: models and problems.
        found: each problem's solutions.
        pick: function that chooses the answer from the solutions found within a budget.
        sizes: the budgets.

    Returns:
        ``right``: for each budget whether the answer to each problem is right; ``tokens``: for each budget the mean
        tokens generated for a problem; ``had``: whether the largest budget found a right solution of each problem.
    """
    right = []
    tokens = []
    for budget in sizes.budgets:
        known = [within(own, budget) for own in found]
        right.append(cell.right([pick(own) for own in known]))
        tokens.append(fmean(own[-1].tokens for own in known))
    return {"right": right, "tokens": tokens, "had": had_right(cell, [within(own, sizes.budgets[-1]) for own in found])}


def had_right(cell: SearchCell, found: Sequence[Sequence[FoundSolution]]) -> list[bool]:
    """Return for each problem whether one of its solutions is right."""
    return [any(own) for own in right_of_each(cell, found)]


def right_of_each(cell: SearchCell, found: Sequence[Sequence[FoundSolution]]) -> list[list[bool]]:
    """Return for each solution of each problem whether it is right."""
    places = [place for place, own in enumerate(found) for _ in own]
    right = iter(cell.right([one.text for own in found for one in own], places))
    return [[next(right) for _ in own] for own in found]


def beams_measured(cell: SearchCell, sizes: SearchSizes) -> dict[str, Any]:
    """Measure beam search; what is returned is as in `measured`.

    The answer at a budget is that of the largest beam whose search ended within it, or else the greedy one. The larger
    beams do not know what the smaller ones found.
    """
    runs = [beam_search(cell.writer, cell.questions, cell.prm, beam, sizes.beam_width) for beam in sizes.beams]
    right = []
    tokens = []
    for budget in sizes.budgets:
        known = []
        for of_problem in zip(*runs, strict=True):
            own = of_problem[0][:1]  # the greedy solution, which every beam search begins with
            for found in of_problem:
                if found[-1].tokens <= budget:
                    own = found
            known.append(own)
        right.append(cell.right([best(own) for own in known]))
        tokens.append(fmean(own[-1].tokens for own in known))
    return {"right": right, "tokens": tokens, "had": had_right(cell, known)}


def space_measured(cell: SearchCell, sizes: SearchSizes) -> dict[str, Any]:
    """Measure the tree of steps around each worked solution, by the number of proposals that a node has.

    From each state of a worked solution the policy proposes next steps. A problem's right way is in the tree if each
    step of its worked solution is proposed.

    Returns:
        width → ``steps``: mean number of different proposals of a node; ``paths``: paths of each problem's whole tree,
        as the product of these numbers over the states of the worked solution; ``inside``: whether each problem's right
        way is in the tree.
    """
    asked = []
    for place, row in enumerate(cell.rows):
        lines = row["worked_solution"].split("\n")
        for depth, line in enumerate(lines):
            asked.append((place, "".join(f"{one}\n" for one in lines[:depth]), line))
    tokenizer = cell.writer.loaded.tokenizer
    states = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, text, _ in asked]
    groups = cell.writer.steps([cell.questions[place] for place, _, _ in asked], states, sizes.proposals)
    texts = [[cell.writer.text(step).strip() for step, _ in group] for group in groups]
    found: dict[str, Any] = {}
    for width in WIDTHS:
        distinct = [len({*group[:width]}) for group in texts]
        paths = [1] * len(cell.rows)
        inside = [True] * len(cell.rows)
        for (place, _, line), group, count in zip(asked, texts, distinct, strict=True):
            paths[place] *= count
            inside[place] = inside[place] and line in group[:width]
        found[str(width)] = {"steps": fmean(distinct), "paths": paths, "inside": inside}
    return found


def judges_measured(cell: SearchCell, sizes: SearchSizes) -> dict[str, Any]:
    """Compare the judges with exact values at each step of a sampled solution. A state's exact value is the share of
    right answers among many ends that are sampled from it.

    Returns:
        judge → (steps done, judge's value, exact value) of each state.
    """
    written = [one for [one] in cell.writer.solutions(cell.questions, 1, 1.0)]
    tokenizer = cell.writer.loaded.tokenizer
    asked = []
    for place, one in enumerate(written):
        lines = steps_in(cell.writer.text(one.ids))
        asked += [(place, depth, "".join(f"{line}\n" for line in lines[:depth])) for depth in range(1, len(lines))]
    many = [one for one in asked for _ in range(sizes.rests)]
    states = [tokenizer(text, add_special_tokens=False)["input_ids"] for _, _, text in many]
    rests = cell.writer.rests([cell.questions[place] for place, _, _ in many], states)
    whole = [cell.writer.text([*state, *rest]) for state, rest in zip(states, rests, strict=True)]
    right = cell.right(whole, [place for place, _, _ in many])
    exact = [fmean(right[first : first + sizes.rests]) for first in range(0, len(right), sizes.rests)]
    found: dict[str, Any] = {}
    for name, judge in (("value", cell.value), ("PRM", cell.prm)):
        values = judge([cell.questions[place] for place, _, _ in asked], [text for _, _, text in asked])
        depths = [depth for _, depth, _ in asked]
        found[name] = [[*state] for state in zip(depths, values, exact, strict=True)]
    return found
