"""`evaluate`: rows → prompts → completions → scores → `EvaluationResult`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from grpo_lab.engines.sampler import (
    Completion,
    GenerationStopped,
    RenderedPrompt,
    Sampler,
    TransformersSampler,
    context_of_config,
    in_form_of,
    render_prompt,
    too_long,
)
from grpo_lab.engines.thinking_budget import tokens_of_thinking
from grpo_lab.evaluation.blocks import Blocks
from grpo_lab.evaluation.result import EvaluationResult, Kind, Outcome, ReadAnswer, answer_reader, as_text
from grpo_lab.verifiers.verdict import checked_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Row = Mapping[str, Any]
Reward = Callable[..., "list[float | None]"]
_LONGEST = "the longest prompts first"


class EvaluationStopped(KeyboardInterrupt):
    """Ctrl-C in the middle of an evaluation. ``result`` holds what was answered until then; its settings say so."""

    def __init__(self, result: EvaluationResult) -> None:
        super().__init__(f"stopped {result.stopped}")
        self.result = result


@dataclass(frozen=True)
class _Asked:
    """A problem that is put to the model: its index among the rows, the row, the prompt."""

    index: int
    row: Row
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
    generate: Sampler | None = None,
    answer: ReadAnswer | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    measures: Mapping[str, Reward] = MappingProxyType({}),
    context: int | None = None,
    blocks: Blocks | None = None,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> EvaluationResult:
    """Accuracy of ``model`` on ``rows``: greedy always, and over ``n_samples`` samples a problem where that is > 0.

    rows      mappings with a column `prompt` (plain string or message list); every other column goes to ``reward``
    reward    `(prompts=…, completions=…, **columns) -> list[float | None]`; 1.0 or more is correct, None unscorable
    answer    reads from a completion the answer that votes in maj@k. Default: as `AccuracyReward` reads it if that is
              the reward; for any other reward maj@k is left out unless ``answer`` is given
    generate  makes the completions instead of ``model`` (then None), within ``context`` tokens: see :class:`Sampler`
    measures  name → a further reward whose scores are reported as a mean, and decide nothing (`format`, `language`)
    blocks    that are kept on the disk, and shared by ranks: then every rank calls this, and has the result

    A prompt that leaves no room for max_new_tokens in the model's context is left out and counted in the settings.
    Samples follow from ``seed`` and ``batch_size``, not torch's random state. Unwrap a distributed model first.
    EvaluationStopped: Ctrl-C after the first answers. Other exceptions in ``generate`` or ``reward`` come through.
    """
    started, problems = time.perf_counter(), [dict(row) for row in rows]
    settings = {**said, "reward": _name(reward), **_checked(max_new_tokens, batch_size, n_samples, temperature, seed)}
    asked = _asked(problems, tokenizer, chat_template_kwargs)
    if generate is None:
        if model is None:
            raise ValueError("evaluate needs a model, or generate= in its place; both are None")
        generate, context = TransformersSampler(model, tokenizer, batch_size, progress), context_of_config(model.config)
    asked = _fitting(asked, context, max_new_tokens)
    read_answer = answer_reader(reward) if answer is None else answer
    settings |= {"answers_read": read_answer is not None, "prompts_too_long": len(problems) - len(asked)}
    blocks, outcomes = blocks or Blocks(), list[Outcome]()
    blocks.begin(settings, asked)
    for kind, n, heat in _passes(n_samples, temperature):
        try:
            for name, first, some in blocks.left(kind, n, progress):
                written, stopped = _written(generate, some, n, heat, max_new_tokens, seed + first * n)
                found = _grade(kind, some, written, tokenizer, {"": reward, **measures}, read_answer)
                blocks.keep(name, found, whole=not stopped)
                if stopped:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            found = blocks.outcomes(kind, of_all=False)  # other ranks may have ended: they are not waited for
            settings["stopped"] = f"after {len(found):,} of {len(asked) * n:,} {kind} answers, {_LONGEST}"
            raise _stopped((*outcomes, *found), settings, started) from None
        outcomes += blocks.outcomes(kind)
    return EvaluationResult(tuple(outcomes), settings, time.perf_counter() - started)


def _stopped(outcomes: tuple[Outcome, ...], settings: Mapping[str, Any], started: float) -> EvaluationStopped:
    return EvaluationStopped(EvaluationResult(outcomes, settings, time.perf_counter() - started))


def _passes(n_samples: int, temperature: float) -> list[tuple[Kind, int, float]]:
    passes: list[tuple[Kind, int, float]] = [("greedy", 1, 0.0), ("sampled", n_samples, temperature)]
    return passes if n_samples else passes[:1]


def _asked(problems: Sequence[Row], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None) -> list[_Asked]:
    _check_rows(problems)
    prompts = [render_prompt(row["prompt"], tokenizer, chat_template_kwargs) for row in problems]
    for index, prompt in enumerate(prompts):
        if not prompt.ids:
            raise ValueError(f"row {index}: the prompt {prompt.text!r} has no tokens: nothing to continue")
    return [_Asked(index, row, prompt) for index, (row, prompt) in enumerate(zip(problems, prompts))]


def _written(
    generate: Sampler, asked: Sequence[_Asked], n: int, temperature: float, max_new_tokens: int, seed: int
) -> tuple[Sequence[Sequence[Completion | None]], bool]:
    """Completions of each prompt; where that was broken off those that there are."""
    ids = [one.prompt.ids for one in asked]
    try:
        written = generate(ids, n=n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    except GenerationStopped as stop:
        return stop.completions, True
    counts = sorted({len(group) for group in written})
    if len(written) != len(ids) or counts != [n] * bool(ids):
        raise ValueError(
            f"generate returned {len(written)} lists of {counts} completions; {len(ids)} lists of {n} are needed"
        )
    return written, False


def _fitting(asked: list[_Asked], context: int | None, max_new_tokens: int) -> list[_Asked]:
    """Those with room for a completion; ValueError if there are none."""
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
) -> list[Outcome]:
    """``rewards``: the one that decides, under the empty name, and the measures."""
    answers = [
        (one, sample, completion, str(tokenizer.decode(completion.ids, skip_special_tokens=True)))
        for one, group in zip(asked, written, strict=True)
        for sample, completion in enumerate(group)
        if completion is not None
    ]
    pairs = [(one.row, text) for one, _, _, text in answers]
    scores = {name: _scores(reward, pairs) if answers else [] for name, reward in rewards.items()}
    return [
        Outcome(
            problem=one.index,
            kind=kind,
            sample=sample,
            question=_question(one.row["prompt"]),
            prompt=one.prompt.text,
            solution=as_text(one.row.get("solution")),
            completion=text,
            tokens=len(completion.ids),
            truncated=not completion.ended,
            score=scores[""][place],
            answer=read_answer(text) if read_answer is not None else None,
            thinking=tokens_of_thinking(one.prompt.text, completion, tokenizer.decode),
            log_prob=_mean_log_prob(completion),
            measures={name: found[place] for name, found in scores.items() if name},
        )
        for place, (one, sample, completion, text) in enumerate(answers)
    ]


def _mean_log_prob(completion: Completion) -> float | None:
    """Over the tokens that the model wrote; an inserted one has NaN there."""
    own = [value for value in completion.logprobs or () if not math.isnan(value)]
    return fmean(own) if own else None


def _scores(reward: Reward, pairs: Sequence[tuple[Row, str]]) -> list[float | None]:
    """One call of the reward, as TRL makes it: columns as lists, messages in when messages went out."""
    columns = {name: [row[name] for row, _ in pairs] for name in pairs[0][0] if name not in ("prompt", "completion")}
    completions = [in_form_of(row["prompt"], text) for row, text in pairs]
    scores = reward(prompts=[row["prompt"] for row, _ in pairs], completions=completions, **columns)
    return checked_scores(scores, len(pairs), f"the reward {_name(reward)!r}", nan=False)


def _name(reward: Reward) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def _question(prompt: Any) -> str:
    """What a reader wants to see of a prompt: itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message["role"] == "user"] or list(prompt)
    content = asked[-1]["content"]
    return content if isinstance(content, str) else str(as_text(content))


def _check_rows(problems: Sequence[Row]) -> None:
    if not problems:
        raise ValueError("there are no rows to evaluate; at least one with a column `prompt` is needed")
    columns = set(problems[0])
    for index, row in enumerate(problems):
        if "prompt" not in row:
            raise ValueError(f"row {index} has no column `prompt`; its columns are {sorted(row)}")
        if set(row) != columns:
            raise ValueError(f"row {index} has the columns {sorted(row)}, but row 0 has {sorted(columns)}")
        prompt = row["prompt"]
        messages = prompt if isinstance(prompt, Sequence) and not isinstance(prompt, str) else ()
        fine = messages and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in messages)
        if not isinstance(prompt, str) and not fine:
            raise ValueError(
                f"row {index}: `prompt` must be a string or a non-empty list of messages with `role` and `content`, "
                f"got {str(prompt)[:200]!r}"
            )


def _checked(max_new_tokens: int, batch_size: int, n_samples: int, temperature: float, seed: int) -> dict[str, Any]:
    """What the result says it was measured with."""
    counts = {"max_new_tokens": (max_new_tokens, 1), "batch_size": (batch_size, 1), "n_samples": (n_samples, 0)}
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if n_samples > 0 and not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be above 0 to draw n_samples={n_samples} samples, got {temperature!r}")
    asked = {name: value for name, (value, _) in counts.items()}
    return {**asked, "temperature": temperature if n_samples > 0 else None, "seed": seed}
