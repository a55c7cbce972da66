"""Label the steps of sampled solutions by what comes of them: how often is the answer right if a model goes on?

From the end of each step (a line that is not blank) a model writes K completions, and a reward judges each answer:

    hard    y = 1 if any of the K answers is right, else 0      Math-Shepherd (arXiv 2312.08935), eq. 3
    soft    y = (right answers) / K                             eq. 4

The last step of a solution is its answer, so its label is whether that answer is right. Nobody labels anything by hand.
A label depends on the model that goes on: a weak one seldom gets from a right step to a right answer.

A row is in TRL's stepwise form: ``prompt``, ``completions`` (the steps) and ``labels`` (one number in [0, 1] a step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

from grpo_lab.curation import PassRate, Sampled
from grpo_lab.engines.generators import in_form_of
from grpo_lab.io import write_json_lines
from grpo_lab.recipe.job import check_model, questions
from grpo_lab.recipe.sections import STRICT_ACCURACY, ModelSection, RewardSection, SamplingSettings
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.steps import by_line
from grpo_lab.runs.console import describe
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import settings
from grpo_lab.stages.sample import OF_A_LINE, SAMPLING, ModelGenerator, Problem, check_lines, samples_in, with_room
from grpo_lab.stages.select import ROWS
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

BEGUN = "begun"
"""Column of a problem with the beginning of the solution, which its prompt already holds."""


@settings(rest="sampling")
class StepLabels:
    """``step_labels``: label each step of ``samples`` (a stage `sample`'s) by ``n_samples`` completions of ``model``
    from its end, judged by ``reward``. Other keys: `SamplingSettings`.

    Args:
        estimate: ``soft``: the share of right answers; ``hard``: whether any is right.
    """

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    seed = None  # `sampling.seed` is used
    model: str
    samples: str
    reward: RewardSection = STRICT_ACCURACY
    estimate: Literal["soft", "hard"] = "soft"
    sampling: SamplingSettings = field(default_factory=SamplingSettings)

    def plan(self) -> str:
        check_lines(self.samples, "samples", OF_A_LINE)
        asked = questions(None, self.reward, here_only=True)
        check_model(asked, ModelSection(path=self.model), self.sampling, here_only=True, where="model")
        return f"{self.sampling.n_samples} from the end of each step of {self.samples}, by {self.model}"

    def run(self, workspace: Workspace) -> Facts:
        asked = questions(None, self.reward)
        solutions = [one for sampled in samples_in(Path(self.samples)) for one in solutions_of(sampled)]
        completer = StepCompleter(self.model, self.sampling)
        begun = [*with_room(dict(enumerate(beginnings(solutions))), completer).values()]
        progress = workspace.folder / SAMPLING
        said = {"reward": describe(self.reward)}
        reward = partial(whole_answers, asked.reward)
        rates = completer.judged(begun, reward, progress, workspace.stop, said, workspace.folder.name)
        rows = labelled_rows(solutions, begun, rates, self.estimate)
        if not rows:
            raise ValueError(f"no step of the {len(solutions)} solutions in {self.samples} could be labelled")
        write_json_lines(workspace.folder / ROWS, [encodable(row) for row in rows])
        progress.unlink(missing_ok=True)
        found = [label for row in rows for label in row["labels"]]
        return {"rows": len(rows), "steps": len(found), "mean_label": fmean(found), "completions": completer.made}


@dataclass(frozen=True)
class Solution:
    """A sampled solution, divided into steps.

    Attributes:
        problem: the row that it solves.
        text: the whole solution.
        ends: index in ``text`` behind the last character of each step.
        score: the reward of its answer; None: it could not be scored.
    """

    problem: Problem
    text: str
    ends: Sequence[int]
    score: float | None

    @property
    def steps(self) -> list[str]:
        """The steps without the white space around them."""
        return [self.text[start:end].strip() for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def begun(self, step: int) -> dict[str, Any]:
        """Return the problem with a prompt that already holds the solution up to the end of step number ``step``, from
        0, and its end of line. The column ``begun`` has this beginning."""
        text = self.text[: self.ends[step]] + "\n"
        prompt = self.problem["prompt"]
        begins = in_form_of(prompt, text)
        return {**self.problem, "prompt": prompt + begins, BEGUN: text}


def solutions_of(sampled: Sampled) -> list[Solution]:
    """Return the sampled completions of one problem as solutions; those without a step are left out."""
    found = []
    for completion, score in zip(sampled.completions, sampled.scores, strict=True):
        text = completion_text(completion)
        ends = by_line(text)
        if ends:
            found.append(Solution({**sampled.columns, "prompt": sampled.prompt}, text, ends, score))
    return found


def beginnings(solutions: Sequence[Solution]) -> list[dict[str, Any]]:
    """Return the problems to continue: each solution up to the end of each of its steps but the last."""
    return [solution.begun(step) for solution in solutions for step in range(len(solution.steps) - 1)]


class StepCompleter(ModelGenerator):
    """Generates continuations of answers that have begun. A prompt of messages ends with the assistant's message so
    far: the messages before it are rendered, and its tokens follow as if the model had written them. A prompt that is a
    text holds the beginning already."""

    counted = "beginnings"

    def rendered(self, prompt: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        if isinstance(prompt, str):
            return super().rendered(prompt, chat_template_kwargs)
        *asked, answer = prompt
        begins = self.tokenizer(answer["content"], add_special_tokens=False)["input_ids"]
        return [*super().rendered(asked, chat_template_kwargs), *begins]


def whole_answers(
    reward: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
) -> Any:
    """Judge whole answers by ``reward``: each is the beginning in the column ``begun`` and the completion behind it.
    The reward gets the prompts without the beginnings."""
    begun = columns.pop(BEGUN)
    columns.pop("completion_ids", None)  # the answer's beginning is not in them
    asked = []
    answers = []
    for prompt, start, completion in zip(prompts, begun, completions, strict=True):
        if isinstance(prompt, str):
            question = prompt.removesuffix(start)
        else:
            question = prompt[:-1]
        asked.append(question)
        answers.append(in_form_of(question, start + completion_text(completion)))
    return reward(prompts=asked, completions=answers, **columns)


def labelled_rows(
    solutions: Sequence[Solution], begun: Sequence[Problem], rates: Sequence[PassRate], estimate: str
) -> list[dict[str, Any]]:
    """Return a row for each solution whose first step has a label. ``rates`` are the judged continuations of ``begun``,
    in the same order; ``estimate`` is ``soft`` or ``hard``."""
    labels = {key_of(one): label_of(rate, estimate) for one, rate in zip(begun, rates, strict=True)}
    rows = [stepwise_row(solution, labels) for solution in solutions]
    return [row for row in rows if row["labels"]]


def key_of(begun: Problem) -> str:
    """Return a text that is the same for equal beginnings: the question and the answer so far."""
    return repr(begun["prompt"])


def label_of(rate: PassRate, estimate: str) -> float | None:
    """Return the label in [0, 1] of a step from its judged continuations; None if none of them could be scored."""
    if rate.rate is None:
        return None
    if estimate == "hard":
        return float(rate.successes > 0)
    return rate.rate


def stepwise_row(solution: Solution, labels: Mapping[str, float | None]) -> dict[str, Any]:
    """Return a solution as a row in TRL's stepwise form, cut before its first step without a label. ``labels``: key of
    a beginning (`key_of`) → the label of its last step."""
    found: list[float] = []
    for step in range(len(solution.steps)):
        if step < len(solution.steps) - 1:
            label = labels.get(key_of(solution.begun(step)))
        elif solution.score is None:
            label = None
        else:
            label = float(solution.score >= CORRECT_FROM)
        if label is None:
            break
        found.append(label)
    return {"prompt": solution.problem["prompt"], "completions": solution.steps[: len(found)], "labels": found}
