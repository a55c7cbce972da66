"""How often a model solves each problem: n samples, scored, saved problem by problem.

p̂_i = (right completions of problem i) / (scored completions of problem i)

Kimi k1.5 (section 2.1) takes n = 10 samples at a relatively high temperature from the SFT model and uses p̂ as the
difficulty of the problem. A completion that could not be scored (`None`) is counted apart and never as wrong. A run
that was killed goes on with the problems that have no line in the file yet (`sample_file`). Problems are recognised by
their content and by what the model is given for them (`rendered`): their order may change, equal ones are sampled once,
and another chat template makes other problems of them.

Guessable is a problem of which one of 8 tries *without reasoning* is right. Kimi k1.5 removes these as "easy to hack".
The wording of the request is ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.curation.sample_file import PassRate as PassRate
from grpo_lab.curation.sample_file import Written as Written
from grpo_lab.curation.sample_file import opened, progress_of
from grpo_lab.verifiers.verdict import CORRECT_FROM, checked_scores

Problem = Mapping[str, Any]
Generate = Callable[[list[Any], int], list[list[Any]]]  # (prompts, n) -> n completions a prompt
Rendered = Callable[[Any], Any]  # prompt -> what the model really continues: text or token ids
Score = Callable[..., list["float | None"]]  # the reward contract: (prompts, completions, **columns)


def pass_rates(
    problems: Sequence[Problem],
    generate: Generate,
    score: Score,
    n: int = 10,
    *,
    path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    progress: bool = True,
    label: str = "pass rates",
    rendered: Rendered | None = None,
) -> list[PassRate]:
    """The pass rate of every problem, in the order of `problems`.

    Args:
        problems: rows with the column `prompt`; every other column goes to `score`.
        generate: `(prompts, n)` -> for every prompt a list of n completions (strings or message lists, or `Written`
            ones).
        score: a reward callable `(prompts, completions, **columns) -> list[float | None]`; right is `CORRECT_FROM` or
            more.
        n: samples a problem.
        path: JSON-lines file to append to and to go on from; None keeps nothing.
        settings: what the samples depend on (model, temperature, …). Written into the file; a file with other
            settings is refused.
        batch_size: problems a call of `generate`; at most this many are lost when the process is killed.
        progress: show how far it is, under the name `label`.
        rendered: what the model is given for a prompt (text or token ids); becomes part of the problem's key in the
            file.
    Raises: ValueError for bad settings, a `generate` or `score` that returns the wrong number of items, a file that
        belongs to other settings, is damaged before its end, or is being written by another process.
    """
    _check(problems, n, batch_size)
    header = {
        "grpo_lab": "pass_rates",
        "n": n,
        "success_at": CORRECT_FROM,
        "prompt_column": "prompt",
        "settings": json.loads(json.dumps(dict(settings or {}), sort_keys=True, default=str)),
    }
    keys = [problem_key(p, None if rendered is None else rendered(p["prompt"])) for p in problems]
    with opened(path, header) as (done, save):
        missing = {key: problem for key, problem in zip(keys, problems, strict=True) if key not in done}
        todo, different = list(missing.items()), len(set(keys))
        with progress_of(different, different - len(todo), label, progress) as advance:
            for start in range(0, len(todo), batch_size):
                batch = dict(todo[start : start + batch_size])
                results = _sample(list(batch.values()), generate, score, n)
                named = dict(zip(batch, results, strict=True))
                save(named)
                done.update(named)
                advance(len(batch), _so_far(done[key] for key in dict.fromkeys(keys) if key in done))
    return [done[key] for key in keys]


def problem_key(problem: Problem, rendered: Any = None) -> str:
    """What makes a problem the same one in another run: a digest of all of its columns and of what the model is
    given."""
    text = json.dumps(dict(problem), sort_keys=True, default=str, ensure_ascii=True)
    if rendered is not None:
        text += json.dumps(rendered, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def keep_band(rates: Sequence[float | None], low: float = 0.0, high: float = 1.0) -> list[bool]:
    """Which problems have low < p < high, both ends excluded; a problem without a rate (None) is not kept.

    The default keeps what can teach at all: with p = 0 or 1 every group is dead and its advantages are zero.
    """
    if not low < high:
        raise ValueError(f"the band low={low} < p < high={high} is empty")
    if wrong := [rate for rate in rates if rate is not None and not 0 <= rate <= 1]:
        raise ValueError(f"a pass rate lies in [0, 1]; got {wrong[0]}")
    return [rate is not None and low < rate < high for rate in rates]


def _sample(problems: list[Problem], generate: Generate, score: Score, n: int) -> list[PassRate]:
    prompts = [problem["prompt"] for problem in problems]
    groups = generate(prompts, n)
    if len(groups) != len(prompts) or any(len(group) != n for group in groups):
        raise ValueError(
            f"generate was asked for {n} completions of {len(prompts)} prompts and returned "
            f"{len(groups)} lists of {sorted({len(group) for group in groups})} completions"
        )
    cuts = [_cut(group) for group in groups]
    groups = [[one.completion if isinstance(one, Written) else one for one in group] for group in groups]
    names = dict.fromkeys(name for problem in problems for name in problem if name != "prompt")
    columns = {name: [problem.get(name) for problem in problems for _ in range(n)] for name in names}
    given = score(
        prompts=[prompt for prompt in prompts for _ in range(n)],
        completions=[completion for group in groups for completion in group],
        **columns,
    )
    scores = checked_scores(given, n * len(prompts), "`score`", nan=False)
    return [
        PassRate(tuple(scores[row * n : (row + 1) * n]), tuple(group), cuts[row]) for row, group in enumerate(groups)
    ]


def _cut(group: Sequence[Any]) -> int | None:
    return sum(one.cut for one in group) if all(isinstance(one, Written) for one in group) else None


def _so_far(results: Iterable[PassRate]) -> str:
    counted = [(result.successes, result.trials) for result in results]
    successes, trials = sum(s for s, _ in counted), sum(t for _, t in counted)
    return f"{successes / trials:.1%} right so far" if trials else "nothing scorable so far"


def _check(problems: Sequence[Problem], n: int, batch_size: int) -> None:
    if n < 1 or batch_size < 1:
        raise ValueError(f"n={n} and batch_size={batch_size} have to be at least 1")
    for row, problem in enumerate(problems):
        if "prompt" not in problem:
            raise ValueError(f"problem {row} has no column 'prompt'; its columns: {sorted(problem)}")


ANSWER_ONLY = "Give only the final answer. No explanation, no working, no other words.\nAnswer:"


def guess_rates(
    problems: Sequence[Problem],
    generate: Generate,
    score: Score,
    tries: int = 8,
    *,
    request: str = ANSWER_ONLY,
    settings: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[PassRate]:
    """Pass rates of the problems with `request` added to every prompt; ``how``: as in `pass_rates`.

    `generate` should allow few tokens (an answer's worth, say 32), or the model reasons all the same, and a chat
    template's thinking has to be off.
    """
    asked = [{**problem, "prompt": answer_only(problem["prompt"], request)} for problem in problems]
    made_with = {**(settings or {}), "request": request}
    return pass_rates(asked, generate, score, tries, settings=made_with, label="guesses", **how)


def guessable(rates: Sequence[PassRate]) -> list[bool]:
    """Which problems were right in at least one try."""
    return [rate.successes > 0 for rate in rates]


def answer_only(prompt: Any, request: str = ANSWER_ONLY) -> Any:
    """The prompt with the request after its text, or after the last user message of a message list."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{request}"
    messages = [dict(message) for message in prompt]
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            message["content"] = f"{message['content']}\n\n{request}"
            return messages
    raise ValueError("a prompt is a string or a message list with a user message whose content is text")
