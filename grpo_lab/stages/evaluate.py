"""Evaluate: a saved model on held-out rows, and the facts of it that later rounds, tables and pages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.evaluation import EvaluationResult, EvaluationStopped, evaluate
from grpo_lab.evaluation.result import effort
from grpo_lab.recipe import parts
from grpo_lab.recipe.job import questions
from grpo_lab.recipe.models import load_saved_model, load_tokenizer
from grpo_lab.recipe.rows import every_argument, load_rows
from grpo_lab.recipe.sections import EvaluationSection, ModelSection
from grpo_lab.runs.console import count_of, told
from grpo_lab.runs.stage import At, Facts
from grpo_lab.settings import Positive, Switch, Whole, settings

EVALUATION = "evaluation"
"""Folder of the answers."""


@settings(rest="section")
class Evaluate:
    """``evaluate``: a model on held-out rows. Other keys: those of a recipe's ``evaluation``, but ``before``.

    Args:
        effort_by: a column of the rows that says how hard they are (`steps`, `level`): adds the mean tokens of thinking
            at each of its values.
    """

    leaves: ClassVar[Mapping[str, str]] = {}
    whole: ClassVar[bool] = True
    model: str
    section: EvaluationSection
    seed: Whole = 0
    use_cpu: Switch = False
    max_completion_length: Positive = 512
    effort_by: str | None = None

    def plan(self) -> str:
        found = questions(self.section.data, self.section.reward, here_only=True)
        if found.rows is not None:
            self._difficulty(found.rows)
        return f"{self.model} on {count_of(found.rows, self.section.data)}, judged by {told(self.section.reward)}"

    def run(self, at: At) -> Facts:
        return self.measured(at.folder / EVALUATION)

    def measured(self, target: Path) -> Facts:
        """The answers in ``target``, without their seconds, which no two runs share."""
        how: Any = {"use_cpu": self.use_cpu, "max_new_tokens": self.max_completion_length, "seed": self.seed}
        result = evaluate_saved_model(self.model, self.section, None, **how)
        replace(result, seconds=None).write(target)
        return {
            "accuracy": result.accuracy.to_dict() if result.accuracy else None,
            "sampled_accuracy": result.sampled_accuracy.to_dict() if result.sampled_accuracy else None,
            "mean_length": result.mean_length,
            "mean_length_correct": result.mean_length_correct,
            "worked_out_share": result.worked_out_share,
            **{f"pass_at_{k}": found.value for k, found in result.pass_at.items() if k > 1},
            **self._effort(result),
        }

    def _effort(self, result: EvaluationResult) -> Facts:
        if self.effort_by is None:
            return {}
        words = load_tokenizer(ModelSection(path=self.model))
        difficulty = self._difficulty(load_rows(self.section.data, "data"))
        found = effort(result.greedy, difficulty, lambda text: len(words(text, add_special_tokens=False)["input_ids"]))
        return {f"thinking_tokens.{self.effort_by}_{value}": tokens for value, tokens in found.items()}

    def _difficulty(self, rows: Any) -> list[Any]:
        """What each row has in ``effort_by``."""
        if self.effort_by is not None and self.effort_by not in rows.column_names:
            raise ValueError(f"`effort_by` is {self.effort_by!r}; the columns of `data` are {rows.column_names}")
        return [] if self.effort_by is None else list(rows[self.effort_by])


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
    """Held-out accuracy by a recipe's ``evaluation``, written to ``target`` (None: not written); ``max_new_tokens``:
    where the section does not say. EvaluationStopped on Ctrl-C, with what was answered until then written as well."""
    rows = load_rows(section.data, "evaluation.data")
    reward = parts.build_reward(section.reward, "evaluation.reward")
    loaded, words = load_saved_model(model, use_cpu, tokenizer)
    how: Any = {name: getattr(section, name) for name in ("batch_size", "n_samples", "temperature")}
    how |= {"max_new_tokens": section.max_new_tokens or max_new_tokens, "seed": seed}
    stopped = False
    try:
        result = evaluate(loaded, words, rows, reward=reward, **how)
    except EvaluationStopped as stop:
        result, stopped = stop.result, True
    result = replace(result, settings={**about(model, section), **result.settings})
    if target is not None and result.outcomes:
        result.write(target)
    if stopped:
        raise EvaluationStopped(result)
    return result


def about(model: str, section: EvaluationSection) -> dict[str, Any]:
    """What a score depends on besides the generation, for `summary.json`: rows with every argument, template, judge."""
    mode = getattr(parts.build_reward(section.reward, "evaluation.reward"), "mode", None)  # the default, too
    judge = {"name": section.reward.name, **({} if mode is None else {"mode": mode}), **section.reward.arguments}
    return {
        "model": model,
        "data": {"loader": section.data.loader, **every_argument(section.data)},
        "template": section.data.template,
        "limit": section.data.limit,
        "mode": mode,
        "judge": judge,
    }
