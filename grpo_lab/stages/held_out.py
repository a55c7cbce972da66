"""Evaluate a saved model on held-out rows, and return the facts that later rounds, tables and pages read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.engines.generators import render_prompt
from grpo_lab.engines.thinking_budget import BudgetedGenerator, ThinkingBudget
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.evaluation import EvaluationResult, EvaluationStopped, evaluate
from grpo_lab.evaluation.blocks import KEPT, Blocks, rank_and_ranks
from grpo_lab.evaluation.in_turns import TurnGenerator
from grpo_lab.evaluation.result import mean
from grpo_lab.evaluation.sweep import AGAINST, Measured, compared, write_sweep
from grpo_lab.recipe import build
from grpo_lab.recipe.ahead import check_engine, known_model
from grpo_lab.recipe.checks import check_by, check_held_out
from grpo_lab.recipe.data import every_argument, load_rows, rows_here
from grpo_lab.recipe.models import model_files
from grpo_lab.recipe.sections import NEW_TOKENS, EvaluationSection, ModelSection, SamplingSettings
from grpo_lab.runs.console import count_of, describe
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import Positive, Switch, Whole, settings
from grpo_lab.stages.sample import LoadedGenerator, load_generator
from grpo_lab.turns.template_check import check_template
from grpo_lab.turns.turn_settings import TurnSettings

EVALUATION = "evaluation"
"""Folder of the answers, inside a stage's folder."""


@settings(rest="section")
class Evaluate:
    """``evaluate``: measure a model on held-out rows. Other keys: those of a recipe's ``evaluation``, but ``before``.

    Args:
        effort_by: a column that says how hard a row is (`steps`, `level`): adds the mean tokens of thinking at each of
            its values.
        against: a second model, which is asked the same problems and compared with the first by a paired test.
    """

    leaves: ClassVar[Mapping[str, str]] = {}
    keeps: ClassVar[Sequence[str]] = (EVALUATION,)
    whole: ClassVar[bool] = True
    ranks: ClassVar[bool] = True
    model: str
    section: EvaluationSection
    seed: Whole = 0
    use_cpu: Switch = False
    max_completion_length: Positive = NEW_TOKENS
    against: str | None = None
    effort_by: str | None = None

    def plan(self) -> str:
        refuse_itself(self.model, self.against)
        for name, unset in (("every", None), ("before", True)):
            if getattr(self.section, name) != unset:
                raise ValueError(f"`{name}` has no effect: a stage `evaluate` measures one model, once; leave it out")
        held_out = HeldOutRows(self.section, self.max_completion_length, self.seed, rows_here, "data")
        rows = next(iter(held_out.rows.values()))
        if rows is not None:
            self._difficulty(rows)
        held_out.check_model(self.model, "model")
        if self.against is not None:
            held_out.check_model(self.against, "against")
        names = ", ".join(filter(None, conditions_in(self.section)))
        on = f"{self.model} on {count_of(rows, self.section.data)}, judged by {describe(self.section.reward)}"
        return f"{on}; {names}" if names else on

    def run(self, workspace: Workspace) -> Facts:
        """Measure the model, and return the results as facts.

        The numbers of the first condition have plain names (``accuracy``), those of the others end with their folder
        (``accuracy.<condition>``). ``thinking`` and ``no_thinking`` are the accuracies in the modes that were asked
        for, ``difference`` and ``p_value`` the comparison with ``against``.
        """
        found = self._measured(workspace.folder / EVALUATION)
        facts = flat_facts(found[0].result)
        for one in found:
            mode = {"on": "thinking", "off": "no_thinking"}.get(one.result.settings.get("thinking", ""))
            if mode and one.result.accuracy:
                facts.setdefault(mode, one.result.accuracy.value)
        for one in found[1:]:
            facts |= {f"{name}.{one.place}": value for name, value in flat_facts(one.result).items()}
        for one, test in zip(found, compared(found).tests, strict=False):
            if test.difference is not None:
                suffix = "" if one is found[0] else f".{one.name}"
                facts |= {f"difference{suffix}": test.difference.value, f"p_value{suffix}": test.p_value}
        if self.effort_by is not None:
            difficulty = self._difficulty(load_rows(self.section.data, "data"))
            for value in sorted(set(difficulty)):
                tokens = mean(one.thinking or 0 for one in found[0].result.greedy if difficulty[one.problem] == value)
                if tokens is not None:
                    facts[f"thinking_tokens.{self.effort_by}_{value}"] = tokens
        return facts

    def measured(self, target: Path) -> Facts:
        """Evaluate, keep the answers in ``target``, and return the results of the first condition. They hold no times,
        so that equal runs return equal results."""
        result = self._measured(target)[0].result
        return {
            "accuracy": result.accuracy.to_dict() if result.accuracy else None,
            "sampled_accuracy": result.sampled_accuracy.to_dict() if result.sampled_accuracy else None,
            "mean_length": result.mean_length,
            "mean_length_correct": result.mean_length_correct,
            "worked_out_share": result.numbers["worked_out_share"],
            **{f"pass_at_{k}": found.value for k, found in result.pass_at.items() if k > 1},
        }

    def _difficulty(self, rows: Any) -> list[Any]:
        """Return the values of the column ``effort_by``; empty if none is set."""
        if self.effort_by is None:
            return []
        if self.effort_by not in rows.column_names:
            raise ValueError(f"`effort_by` is {self.effort_by!r}; the columns of `data` are {rows.column_names}")
        return list(rows[self.effort_by])

    def _measured(self, target: Path) -> list[Measured]:
        how: Any = {"use_cpu": self.use_cpu, "max_new_tokens": self.max_completion_length, "seed": self.seed}
        return measure_conditions(self.model, self.section, target, against=self.against, timed=False, **how)


@dataclass(frozen=True)
class Measure:
    """Stage that measures a model within a command, on the recipe's held-out rows. Answers go to ``place`` in the
    folder; prompts are rendered as for the command's sampling."""

    whole: ClassVar[bool] = True
    model: str
    section: EvaluationSection
    sampling: SamplingSettings
    place: str = EVALUATION

    @property
    def keeps(self) -> tuple[str]:
        return (self.place,)

    def run(self, workspace: Workspace) -> Facts:
        sampling = self.sampling
        section = self.section.rendered_as(sampling.chat_template_kwargs)
        kind = Evaluate(self.model, section, sampling.seed, sampling.use_cpu, sampling.max_completion_length)
        return kind.measured(workspace.folder / self.place)


def flat_facts(result: EvaluationResult) -> Facts:
    """Return a result as numbers, under the names that stages share; what was not measured is left out."""
    accuracy = result.accuracy
    sampled = result.sampled_accuracy
    facts = {
        "accuracy": accuracy.value if accuracy else None,
        "accuracy_low": accuracy.low if accuracy else None,
        "accuracy_high": accuracy.high if accuracy else None,
        "sampled_accuracy": sampled.value if sampled else None,
        **{f"pass_at_{k}": one.value for k, one in result.pass_at.items() if k > 1},
        **{f"accuracy.{result.settings['by']}_{group}": one.value for group, one in result.accuracy_by.items()},
        **result.numbers["measures"],
        "length": result.mean_length,
        "thinking_length": result.numbers["mean_thinking"],
        "reflection": result.numbers["reflection_share"],
        **{f"ece_{name}": one.ece.value for name, one in result.calibration.items()},
        "rows": result.n_problems,
        "tokens": sum(one.tokens for one in result.outcomes),
    }
    return {name: value for name, value in facts.items() if value is not None}


def evaluate_saved_model(model: str, section: EvaluationSection, target: Path | None, **how: Any) -> EvaluationResult:
    """Return the result of `measure_conditions` in the first condition."""
    return measure_conditions(model, section, target, **how)[0].result


@dataclass(frozen=True)
class Condition:
    """How a model is asked: the prompt's ``template``, whether it thinks (``thinking``; None: the chat template
    decides), and the most tokens of its thinking (``budget``; None: no limit)."""

    template: str
    thinking: bool | None = None
    budget: int | None = None


def refuse_itself(model: str, against: str | None) -> None:
    """Raise ValueError if a model would be compared with itself."""
    if against == model:
        raise ValueError(f"`against` names the model itself, {model!r}; name another, or leave it out")


def conditions_in(section: EvaluationSection) -> dict[str, Condition]:
    """Return name → condition for all combinations of templates, modes and budgets in a recipe's ``evaluation``, the
    first template and mode and the loosest budget first. A name says only in what the conditions differ. Without
    thinking a budget limits nothing, so the model is asked once in that mode."""
    templates = section.templates or (section.data.template,)
    modes = section.thinking or (None,)
    budgets = sorted({*section.thinking_budget} or {None}, key=lambda one: math.inf if one is None else one)
    found = {}
    for template, mode, budget in product(templates, modes, reversed(budgets)):
        limits = mode is not False
        parts = [
            (template, templates),
            ("thinking" if mode else "no-thinking", modes),
            (f"budget-{'none' if budget is None else budget}", budgets if limits else ()),
        ]
        name = "-".join(part for part, all_there in parts if len(set(all_there)) > 1)
        found[name] = Condition(template, mode, budget if limits else None)
    return found


def template_kwargs_in(section: EvaluationSection, way: Condition) -> dict[str, Any]:
    """Return the keyword arguments that the chat template gets in a condition."""
    mode = {}
    if way.thinking is not None:
        mode = {"enable_thinking": way.thinking}
    return {**(section.chat_template_kwargs or {}), **mode}


class HeldOutRows:
    """A recipe's ``evaluation`` with its held-out rows and rewards loaded.

    Attributes:
        ways: name → condition.
        rows: template → data set; None if a plan is made and the rows are not on this machine.
        asked: keyword arguments of `evaluate` that are the same in every condition.
    """

    def __init__(
        self,
        section: EvaluationSection,
        max_new_tokens: int | None,
        seed: int,
        load: Callable[..., Any] = load_rows,
        where: str = "evaluation.data",
    ) -> None:
        """``load`` loads the rows, which messages call ``where``. Raises ValueError if loading or building fails."""
        self.section = section
        self.ways = conditions_in(section)
        templates = dict.fromkeys(way.template for way in self.ways.values())
        self.rows = {name: load(replace(section.data, template=name), where) for name in templates}
        for rows in self.rows.values():
            check_by(section, rows)
        self.asked: Any = {
            **{name: getattr(section, name) for name in ("batch_size", "n_samples", "temperature", "by")},
            "max_new_tokens": section.max_new_tokens or max_new_tokens,
            "seed": seed,
            **build.judges_of(section),
        }

    def asking(
        self, model: str, loaded: LoadedGenerator, way: Condition, in_step: bool = False
    ) -> Callable[..., EvaluationResult]:
        """Return a function that evaluates ``model`` in the condition ``way``; it is called with ``blocks=``, where the
        answers are kept. ``in_step``: all ranks make the same calls of the engine. Raises ValueError if the mode does
        not change the prompts, or a budget has no room."""
        generate: Any = loaded.generate
        template_kwargs = template_kwargs_in(self.section, way)
        limits = self._limits(way, loaded.tokenizer, loaded.stops)
        if limits is not None:
            generate = BudgetedGenerator(generate, limits, in_step)
        if self.section.in_turns:
            generate = in_turns(self.section, loaded, template_kwargs)
        how: Any = {
            **self.asked,
            "generate": generate,
            "context": loaded.context,
            "chat_template_kwargs": template_kwargs,
        }
        said = about(model, self.section, self.asked["reward"], way)
        return partial(evaluate, None, loaded.tokenizer, self.rows[way.template], said=said, **how)

    def _limits(self, way: Condition, tokenizer: Any, stops: Sequence[int] = ()) -> ThinkingBudget | None:
        """Return a condition's budget; None if it has none. Raises ValueError as `asking` does."""
        rows = self.rows[way.template]
        if way.thinking is not None and rows is not None:
            prompt = rows[0]["prompt"]
            modes = [{**template_kwargs_in(self.section, way), "enable_thinking": on} for on in (True, False)]
            both = {render_prompt(prompt, tokenizer, mode).text for mode in modes}
            if len(both) == 1:
                raise ValueError(
                    f"`evaluation.thinking` has no effect: with template {way.template!r} the prompt is the same in "
                    "both modes. It takes messages, and a chat template that knows `enable_thinking`"
                )
        if way.budget is None:
            return None
        room: Any = {"max_completion_length": self.asked["max_new_tokens"], "eos_ids": stops}
        return ThinkingBudget.for_tokenizer(tokenizer, way.budget, text=self.section.budget_text, **room)

    def check_model(self, model: str, where: str, here_only: bool = True) -> None:
        """Raise ValueError if a model does not exist, cannot be asked in a condition, or has no room for an answer. A
        model that is not fully known here is checked as far as possible."""
        if self.section.use_vllm:
            EngineOptions.from_mapping(self.section.engine)
            check_engine(True, "use_vllm", here_only)
        known = known_model(ModelSection(path=model), where, here_only)
        if known is None:
            return
        for way in self.ways.values():
            self._limits(way, known[0])
            rows = self.rows[way.template]
            if rows is not None:
                asked = replace(self.section, chat_template_kwargs=template_kwargs_in(self.section, way))
                check_held_out(asked, self.asked["max_new_tokens"], rows["prompt"], known)


def in_turns(section: EvaluationSection, loaded: LoadedGenerator, template_kwargs: Mapping[str, Any]) -> TurnGenerator:
    """Return the generator that answers in several turns, for an evaluation with tools or in an environment."""
    from grpo_lab.trainer.generation.trajectories import dialogue_for

    limits = section.turns or TurnSettings()
    dialogue = dialogue_for(loaded.tokenizer, loaded.stops, template_kwargs)
    check_template(dialogue, limits.earlier_thinking)
    return TurnGenerator(
        loaded.generate,
        dialogue,
        limits,
        build.tools_of(section.tools),
        build.environment_of(section.environment_factory),
        loaded.context,
        loaded.stops,
    )


def measure_conditions(
    model: str,
    section: EvaluationSection,
    target: Path | None,
    *,
    use_cpu: bool,
    seed: int,
    max_new_tokens: int | None = None,
    tokenizer: str | None = None,
    against: str | None = None,
    timed: bool = True,
) -> list[Measured]:
    """Measure the held-out accuracy of ``model``, and then of ``against``, in all conditions of a recipe's
    ``evaluation``. Every rank calls it.

    Finished blocks of answers are kept in ``target`` (None: nothing is written), and the same call goes on with them.
    ``max_new_tokens`` is used if the section has none; ``timed``: whether results hold the seconds that they took.
    Raises EvaluationStopped after Ctrl-C, with the answers written.
    """
    refuse_itself(model, against)
    found = list[Measured]()
    main = rank_and_ranks()[0] == 0
    held_out = HeldOutRows(section, max_new_tokens, seed)
    for one in [model] if against is None else [model, against]:
        own: Any = {"use_cpu": use_cpu, "seed": seed, "tokenizer": tokenizer, "logprobs": bool(section.log_probs)}
        loaded = load_generator(one, section, **own)
        identity = [model_files(one), tokenizer, asdict(section)]
        asking = {name: held_out.asking(one, loaded, way) for name, way in held_out.ways.items()}
        for name, ask in asking.items():
            parts = [AGAINST if one is not model else "", name if found else ""]  # both are empty for the first
            place = "/".join(filter(None, parts)) or "."
            folder = None
            if target is not None:
                folder = target / place
            try:
                result = ask(blocks=Blocks(section.batch_size, folder, identity))
            except EvaluationStopped as stop:
                if folder is not None and stop.result.outcomes and main:
                    stop.result.write(folder)
                raise
            found.append(Measured(name, place, result if timed else replace(result, seconds=None)))
            if folder is not None and main:
                found[-1].result.write(folder)
    if target is not None and main:
        write_sweep(found, target)
        for file in target.rglob(KEPT.format("*")):
            file.unlink()
    return found


def about(model: str, section: EvaluationSection, reward: Any, way: Condition) -> dict[str, Any]:
    """Return the model, data, template, judge and settings of a result, for `summary.json`. ``reward`` is the judge
    that was built from ``section.reward``."""
    mode = getattr(reward, "mode", None)  # also one that the recipe leaves to the reward
    judge = {"name": section.reward.name, **({} if mode is None else {"mode": mode}), **section.reward.arguments}
    more = {
        "thinking": None if way.thinking is None else "on" if way.thinking else "off",
        "thinking_budget": way.budget,
        "budget_text": None if way.budget is None else section.budget_text,
        "engine": {"vllm": dict(section.engine)} if section.use_vllm else None,
        "log_probs": section.log_probs or None,
        "tools": [tool.name for tool in section.tools] or None,
        "environment": section.environment_factory and section.environment_factory.name,
        "chat_template_kwargs": dict(section.chat_template_kwargs or {}) or None,
    }
    return {
        "model": model,
        "data": {"loader": section.data.loader, **every_argument(section.data)},
        "template": way.template,
        "limit": section.data.limit,
        "mode": mode,
        "judge": judge,
        **{name: value for name, value in more.items() if value is not None},
    }
