"""`evaluate`: rows → prompts → completions → scores → `EvaluationResult`, in blocks of prompts that ranks share.

`evaluate` checks its arguments, renders the prompts (`_rendered`) and leaves out those without room for an answer
(`_fitting`). For each pass, greedy and then sampled, `_in_passes` takes this rank's next block (`Blocks`), generates
its completions (`_written`), scores them (`_grade`) and has them saved before the next block.

The answers of a block depend on its prompts and its seed, not on the rank or on earlier blocks. So the result is the
same on any number of ranks, and after a kill.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_lab.engines.generators import (
    Completion,
    CompletionGenerator,
    GenerationStopped,
    RenderedPrompt,
    TransformersGenerator,
    context_of_config,
    in_form_of,
    render_prompt,
    too_long,
)
from grpo_lab.engines.thinking_budget import tokens_of_thinking
from grpo_lab.evaluation.blocks import Blocks
from grpo_lab.evaluation.in_turns import TurnGenerator
from grpo_lab.evaluation.outcomes import Kind, Outcome, as_text
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.transcript import last_words, question_in, transcript_of
from grpo_lab.evaluation.votes import ReadAnswer, answer_reader
from grpo_lab.verifiers.verdict import checked_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]
Reward = Callable[..., "list[float | None]"]


class EvaluationStopped(KeyboardInterrupt):
    """Raised when Ctrl-C ends an evaluation.

    Attributes:
        result: the answers that were complete by then; its settings say that it was stopped.
    """

    def __init__(self, result: EvaluationResult) -> None:
        super().__init__(f"stopped {result.stopped}")
        self.result = result


@dataclass(frozen=True)
class _Asked:
    """A problem that is put to the model.

    Attributes:
        index: its number among the rows.
        row: the row.
        said: the prompt as it is asked: the row's, with what an environment adds.
        prompt: the same, rendered to text and tokens.
    """

    index: int
    row: Row
    said: Any
    prompt: RenderedPrompt


def evaluate(
    model: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Row],
    *,
    reward: Reward,
    max_new_tokens: int,
    batch_size: int,
    n_samples: int = 0,
    temperature: float = 1.0,
    seed: int = 0,
    progress: bool = True,
    generate: CompletionGenerator | TurnGenerator | None = None,
    answer: ReadAnswer | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    measures: Mapping[str, Reward] = MappingProxyType({}),
    by: str | None = None,
    context: int | None = None,
    blocks: Blocks | None = None,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> EvaluationResult:
    """Measure the accuracy of ``model`` on ``rows``: of one greedy answer a problem, and of samples if there are any.

    Samples follow from ``seed`` and ``batch_size``, not from torch's random state. Raises ValueError if an argument or
    a row is not allowed or no prompt leaves room for a completion, EvaluationStopped if Ctrl-C comes while answers are
    made, and what ``generate`` and ``reward`` raise.

    Args:
        model: not wrapped for distributed training; None if ``generate`` makes the completions.
        rows: mappings with a column `prompt` (a string or messages); every other column goes to the rewards.
        reward: `(prompts=…, completions=…, **columns) -> list[float | None]`; 1.0 or more is correct, None unscorable.
        max_new_tokens: largest length. A prompt without room for it is left out, and counted in the settings.
        batch_size: completions that the model generates at once.
        n_samples: samples of each problem, by ``temperature`` and ``seed``; 0: only greedy answers.
        generate: makes the completions in place of ``model``, within ``context`` tokens (None: no limit is known).
        answer: reads the answer that votes in maj@k from a text; None: as an `AccuracyReward` reads it, else no vote.
        measures: name → a further reward, whose mean score is reported and decides nothing (`format`, `language`).
        by: a column of the rows (`steps`, `level`) for whose values accuracy is also reported.
        blocks: saves finished blocks and shares them among ranks, each of which calls this and gets the whole result;
            None: all prompts are one block.
        said: settings that the result reports beside these.
    """
    started = time.perf_counter()
    problems = [dict(row) for row in rows]
    rewards = {"": reward, **measures}
    settings = {**said, "reward": _name(reward), **_checked(max_new_tokens, batch_size, n_samples, temperature, seed)}
    if generate is None:
        generate, context = _generator_of(model, tokenizer, batch_size, progress)
    _check_rows(problems, by)
    asked = _fitting(_rendered(problems, tokenizer, chat_template_kwargs, generate), context, max_new_tokens)
    read_answer = answer_reader(reward) if answer is None else answer
    settings |= {"answers_read": read_answer is not None, "prompts_too_long": len(problems) - len(asked), **_by(by)}
    blocks = blocks or Blocks()
    blocks.begin(settings, asked)
    write = partial(_written, generate, max_new_tokens=max_new_tokens)
    grade = partial(_grade, tokenizer=tokenizer, rewards=rewards, read_answer=read_answer, by=by)
    return _in_passes(blocks, _passes(n_samples, temperature), write, grade, settings, progress, started)


def _in_passes(
    blocks: Blocks,
    passes: Sequence[tuple[Kind, int, float]],
    write: Callable[..., tuple[Sequence[Sequence[Completion | None]], bool]],
    grade: Callable[..., list[Outcome]],
    settings: Mapping[str, Any],
    progress: bool,
    started: float,
) -> EvaluationResult:
    """Make every block of each pass: ``write`` its completions, ``grade`` them, keep the outcomes. Raises
    EvaluationStopped, with the answers until then, if Ctrl-C comes meanwhile. ``started``: the clock at the
    beginning."""
    outcomes = list[Outcome]()
    for kind, n, temperature in passes:
        try:
            for name, first, block in blocks.left(kind, n, progress):
                written, stopped = write(block, n, temperature, seed=settings["seed"] + first * n)
                blocks.keep(name, grade(kind, block, written), whole=not stopped)
                if stopped:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            outcomes += blocks.outcomes(kind, of_all=False)  # other ranks may have ended: they are not waited for
            raise _stopped(outcomes, kind, len(blocks.asked) * n, settings, time.perf_counter() - started) from None
        outcomes += blocks.outcomes(kind)
    return EvaluationResult(tuple(outcomes), settings, time.perf_counter() - started)


def _stopped(
    outcomes: Sequence[Outcome], kind: Kind, wanted: int, settings: Mapping[str, Any], seconds: float
) -> EvaluationStopped:
    """Make the exception for Ctrl-C, with the ``outcomes`` until then. ``wanted``: how many of this ``kind`` were to be
    made."""
    answered = sum(one.kind == kind for one in outcomes)
    said = {"stopped": f"after {answered:,} of {wanted:,} {kind} answers, the longest prompts first"}
    return EvaluationStopped(EvaluationResult(tuple(outcomes), {**settings, **said}, seconds))


def _generator_of(
    model: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, batch_size: int, progress: bool
) -> tuple[CompletionGenerator, int | None]:
    """Return a generator that samples from ``model``, and the model's context in tokens."""
    if model is None:
        raise ValueError("evaluate needs a model, or generate= in its place; both are None")
    return TransformersGenerator(model, tokenizer, batch_size, progress), context_of_config(model.config)


def _passes(n_samples: int, temperature: float) -> list[tuple[Kind, int, float]]:
    """List the passes over the problems: kind, completions of a problem, temperature."""
    greedy: tuple[Kind, int, float] = ("greedy", 1, 0.0)
    if n_samples:
        return [greedy, ("sampled", n_samples, temperature)]
    return [greedy]


def _rendered(
    problems: Sequence[Row], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None, generate: Any
) -> list[_Asked]:
    """Render the prompt of each problem, with what tools or an environment add to it. Raises ValueError that names the
    row if one cannot be rendered."""
    prompts = [row["prompt"] for row in problems]
    if isinstance(generate, TurnGenerator):
        prompts = [generate.observed(row) for row in problems]
        chat_template_kwargs = {**(chat_template_kwargs or {}), **generate.template_kwargs()}
    found = []
    for index, (row, prompt) in enumerate(zip(problems, prompts, strict=True)):
        try:
            found.append(_Asked(index, row, prompt, render_prompt(prompt, tokenizer, chat_template_kwargs)))
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
    return found


def _written(
    generate: CompletionGenerator | TurnGenerator,
    asked: Sequence[_Asked],
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
) -> tuple[Sequence[Sequence[Completion | None]], bool]:
    """Generate n completions of each prompt. Return them, and whether Ctrl-C ended this early: then some are None.
    Raises ValueError if ``generate`` returns other counts."""
    ids = [one.prompt.ids for one in asked]
    how: Any = {"n": n, "temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    try:
        if isinstance(generate, TurnGenerator):
            written = generate.written([one.row for one in asked], ids, **how)
        else:
            written = generate(ids, **how)
    except GenerationStopped as stop:
        return stop.completions, True
    counts = sorted({len(group) for group in written})
    if len(written) != len(ids) or any(count != n for count in counts):
        raise ValueError(
            f"generate returned {len(written)} lists of {counts} completions; {len(ids)} lists of {n} are needed"
        )
    return written, False


def _fitting(asked: list[_Asked], context: int | None, max_new_tokens: int) -> list[_Asked]:
    """Return the problems whose prompts leave room for a completion. Raises ValueError if none does."""
    if context is None:
        return asked
    fitting = [one for one in asked if len(one.prompt.ids) + max_new_tokens <= context]
    if not fitting:
        shortest = min(len(one.prompt.ids) for one in asked)
        raise ValueError(too_long("shortest" if len(asked) > 1 else "only", shortest, max_new_tokens, context))
    return fitting


def _grade(
    kind: Kind,
    asked: Sequence[_Asked],
    written: Sequence[Sequence[Completion | None]],
    tokenizer: Any,
    rewards: Mapping[str, Reward],
    read_answer: ReadAnswer | None,
    by: str | None,
) -> list[Outcome]:
    """Score completions; return an outcome for each.

    Args:
        kind: the pass that they are of.
        asked: the problems.
        written: the completions of each; a missing one is None.
        rewards: the reward that decides, named "", and the measures by their names.
        read_answer: reads the answer that votes; None: there is no vote.
        by: the column whose value each outcome keeps as ``group``.
    """
    answers = [
        (one, sample, completion, str(tokenizer.decode(completion.ids, skip_special_tokens=True)))
        for one, group in zip(asked, written, strict=True)
        for sample, completion in enumerate(group)
        if completion is not None
    ]
    given = [(one.row, text, completion) for one, _, completion, text in answers]
    scores = {name: _scores(reward, given) if answers else [] for name, reward in rewards.items()}
    return [
        Outcome(
            problem=one.index,
            kind=kind,
            sample=sample,
            question=question_in(one.said),
            prompt=one.prompt.text,
            solution=as_text(one.row.get("solution")),
            completion=text,
            tokens=len(completion.ids) if completion.messages is None else sum(completion.mask or ()),
            truncated=not completion.ended,
            score=scores[""][place],
            answer=read_answer(last_words(completion.messages, text)) if read_answer is not None else None,
            thinking=_thinking(one.prompt.text, completion, tokenizer.decode),
            log_prob=_mean_log_prob(completion),
            measures={name: found[place] for name, found in scores.items() if name},
            group=None if by is None else as_text(one.row[by]),
            transcript=transcript_of(completion.messages),
        )
        for place, (one, sample, completion, text) in enumerate(answers)
    ]


def _thinking(prompt: str, completion: Completion, decode: Callable[..., str]) -> int | None:
    """Count the tokens of thinking; None if there is none, or if the completion has several turns."""
    return None if completion.messages is not None else tokens_of_thinking(prompt, completion, decode)


def _mean_log_prob(completion: Completion) -> float | None:
    """Average the log-probs of the tokens that the model wrote, in nats; inserted ones have NaN and do not count. None
    without log-probs."""
    own = [value for value in completion.logprobs or () if not math.isnan(value)]
    return fmean(own) if own else None


def _scores(reward: Reward, given: Sequence[tuple[Row, str, Completion]]) -> list[float | None]:
    """Call a reward as TRL does: once, with columns as lists, the tokens of each completion, and messages where the
    prompt is messages.

    ``given``: the row of each completion, its text, and the completion. Returns a score for each, None if unscorable.
    Raises ValueError if the reward returns anything else.
    """
    rows = [row for row, _, _ in given]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    columns["completion_ids"] = [list(one.ids) for _, _, one in given]
    for name in given[0][2].columns:
        columns[name] = [one.columns[name] for _, _, one in given]
    completions = [in_form_of(row["prompt"], one.messages or text) for row, text, one in given]
    scores = reward(prompts=[row["prompt"] for row in rows], completions=completions, **columns)
    return checked_scores(scores, len(given), f"the reward {_name(reward)!r}", nan=False)


def _name(reward: Reward) -> str:
    """Return a reward's name: a function's, or that of its class."""
    return str(getattr(reward, "__name__", type(reward).__name__))


def _by(by: str | None) -> dict[str, str]:
    """Return the setting `by`, if there is one."""
    return {} if by is None else {"by": by}


def _check_rows(problems: Sequence[Row], by: str | None) -> None:
    """Raise ValueError if there are no rows, if they have different columns, or if a prompt is neither text nor
    messages."""
    if not problems:
        raise ValueError("there are no rows to evaluate; at least one with a column `prompt` is needed")
    columns = set(problems[0])
    if by is not None and by not in columns:
        raise ValueError(f"`by` is {by!r}; the columns of the rows are {', '.join(problems[0])}")
    for index, row in enumerate(problems):
        if "prompt" not in row:
            raise ValueError(f"row {index} has no column `prompt`; its columns are {sorted(row)}")
        if set(row) != columns:
            raise ValueError(f"row {index} has the columns {sorted(row)}, but row 0 has {sorted(columns)}")
        prompt = row["prompt"]
        if not isinstance(prompt, str) and not _are_messages(prompt):
            raise ValueError(
                f"row {index}: `prompt` must be a string or a non-empty list of messages with `role` and `content`, "
                f"got {str(prompt)[:200]!r}"
            )


def _are_messages(prompt: Any) -> bool:
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in prompt)


def _checked(max_new_tokens: int, batch_size: int, n_samples: int, temperature: float, seed: int) -> dict[str, Any]:
    """Return these settings as the result reports them. Raises ValueError if one is not allowed."""
    counts = {"max_new_tokens": (max_new_tokens, 1), "batch_size": (batch_size, 1), "n_samples": (n_samples, 0)}
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if n_samples > 0 and not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be above 0 to draw n_samples={n_samples} samples, got {temperature!r}")
    asked = {name: value for name, (value, _) in counts.items()}
    return {**asked, "temperature": temperature if n_samples > 0 else None, "seed": seed}
