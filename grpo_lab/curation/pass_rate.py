"""Measure pass rates, how often a model solves each problem, from n scored samples; results are saved batch by batch.

p̂_i = (right completions of problem i) / (scored completions of problem i)

Kimi k1.5 (section 2.1) takes n = 10 samples at a relatively high temperature from the SFT model and uses p̂ as the
difficulty of the problem. A completion that could not be scored (`None`) is counted separately, never as wrong.

The file has a header with the settings, then one line per problem. A batch is on disk as a whole before the next
begins, so a killed run continues with the problems that have no line yet. Problems are recognised by their content and
by the model's input for them (`rendered`). So their order may change, and equal ones are sampled once.

A problem is guessable if one of 8 tries *without reasoning* is right (`guess_rates`). Kimi k1.5 removes these as "easy
to hack". The wording of the request is ours.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from grpo_lab.io import append_rows, cut_to_whole_batches, no_link
from grpo_lab.locks import lock
from grpo_lab.reading import parse_json
from grpo_lab.verifiers.verdict import CORRECT_FROM, checked_scores

Problem = Mapping[str, Any]
Generate = Callable[[list[Any], int], list[list[Any]]]  # (prompts, n) -> n completions a prompt
Rendered = Callable[[Any], Any]  # prompt -> what the model really continues: text or token ids
Score = Callable[..., list["float | None"]]  # the reward contract: (prompts, completions, **columns)
_SECONDS_BETWEEN_LINES = 30.0
#: Number of answers without reasoning that are sampled per problem, to see whether it can be guessed.
TRIES = 8


@dataclass(frozen=True)
class Written:
    """A completion as `generate` may return it, with what else is known of it.

    Attributes:
        completion: the text or message list.
        cut: whether the token limit cut it off.
        ids: its token ids, which some rewards read; None if not known.
    """

    completion: Any
    cut: bool
    ids: Sequence[int] | None = None


@dataclass(frozen=True)
class PassRate:
    """The completions of one problem, and how many of them are right.

    Attributes:
        scores: one per completion; None: it could not be scored.
        completions: the completions.
        cut: how many of them the token limit cut off; None if `generate` did not say.
    """

    scores: tuple[float | None, ...]
    completions: tuple[Any, ...]
    cut: int | None = None

    @property
    def successes(self) -> int:
        """Number of right completions."""
        return sum(score is not None and score >= CORRECT_FROM for score in self.scores)

    @property
    def trials(self) -> int:
        """Number of completions that could be scored."""
        return sum(score is not None for score in self.scores)

    @property
    def rate(self) -> float | None:
        """The pass rate p̂, or None if no completion could be scored."""
        if self.trials:
            return self.successes / self.trials
        return None


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
    counted: str = "problems",
    rendered: Rendered | None = None,
) -> list[PassRate]:
    """Sample and score n completions of each problem; return the pass rates in the order of `problems`.

    Args:
        problems: rows with the column `prompt`; every other column is passed to `score`.
        generate: `(prompts, n)` -> a list of n completions (strings, message lists or `Written`) for every prompt.
        score: a reward `(prompts, completions, **columns) -> list[float | None]`; right is `CORRECT_FROM` or more.
        n: samples per problem.
        path: JSON-lines file to which results are appended; those in it are used again. None saves nothing.
        settings: what the samples depend on (model, temperature, …). A file with other settings is refused.
        batch_size: problems per call of `generate`; at most this many are lost if the process is killed.
        progress: show a progress bar.
        label: name of that bar; ``counted``: what problems are called in it.
        rendered: returns the model's input for a prompt (text or token ids), by which a problem is recognised, too.

    Raises ValueError if a setting is wrong, or `generate` or `score` returns the wrong number of items. Also if the
    file has other settings, is damaged before its end, or is being written by another process.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(f"n={n} and batch_size={batch_size} have to be at least 1")
    for row, problem in enumerate(problems):
        if "prompt" not in problem:
            raise ValueError(f"problem {row} has no column 'prompt'; its columns: {sorted(problem)}")
    header = {
        "grpo_lab": "pass_rates",
        "n": n,
        "success_at": CORRECT_FROM,
        "prompt_column": "prompt",
        "settings": json.loads(json.dumps(dict(settings or {}), sort_keys=True, default=str)),
    }
    keys = [_key(problem, None if rendered is None else rendered(problem["prompt"])) for problem in problems]
    with _opened(path, header) as (done, save):
        missing = {key: problem for key, problem in zip(keys, problems, strict=True) if key not in done}
        todo = list(missing.items())
        different = dict.fromkeys(keys)
        with _progress_of(len(different), len(different) - len(todo), label, counted, progress) as advance:
            for start in range(0, len(todo), batch_size):
                batch = dict(todo[start : start + batch_size])
                results = dict(zip(batch, _sample(list(batch.values()), generate, score, n), strict=True))
                save(results)
                done.update(results)
                advance(len(batch), [done[key] for key in different if key in done])
    return [done[key] for key in keys]


def _key(problem: Problem, rendered: Any) -> str:
    """Return a digest of a problem's columns and of the model's input, by which another run recognises it."""
    text = json.dumps(dict(problem), sort_keys=True, default=str, ensure_ascii=True)
    if rendered is not None:
        text += json.dumps(rendered, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sample(problems: list[Problem], generate: Generate, score: Score, n: int) -> list[PassRate]:
    """Sample and score n completions of each problem of one batch."""
    prompts = [problem["prompt"] for problem in problems]
    groups = generate(prompts, n)
    if len(groups) != len(prompts) or any(len(group) != n for group in groups):
        raise ValueError(
            f"generate was asked for {n} completions of {len(prompts)} prompts and returned "
            f"{len(groups)} lists of {sorted({len(group) for group in groups})} completions"
        )
    cuts = [sum(one.cut for one in group) if isinstance(group[0], Written) else None for group in groups]
    ids = [getattr(one, "ids", None) for group in groups for one in group]
    groups = [[one.completion if isinstance(one, Written) else one for one in group] for group in groups]
    answers = [(problem, completion) for problem, group in zip(problems, groups) for completion in group]
    scores = scores_of(answers, score, None if None in ids else ids)
    of_group = [tuple(scores[start : start + n]) for start in range(0, len(scores), n)]
    return [PassRate(own, tuple(group), cut) for own, group, cut in zip(of_group, groups, cuts)]


def scores_of(
    answers: Sequence[tuple[Problem, Any]], score: Score, ids: Sequence[Sequence[int] | None] | None = None
) -> list[float | None]:
    """Return the score of each (problem, completion) by a reward, which gets every column of the problems and, if
    known, the completions' token ``ids``."""
    names = dict.fromkeys(name for problem, _ in answers for name in problem if name != "prompt")
    columns: dict[str, Any] = {name: [problem.get(name) for problem, _ in answers] for name in names}
    if ids is not None:
        columns["completion_ids"] = [list(one or ()) for one in ids]
    given = score(prompts=[one["prompt"] for one, _ in answers], completions=[one for _, one in answers], **columns)
    return checked_scores(given, len(answers), "`score`", nan=False)


@contextmanager
def _opened(
    path: str | Path | None, header: dict[str, Any]
) -> Iterator[tuple[dict[str, PassRate], Callable[[Mapping[str, PassRate]], None]]]:
    """Open the file of results, locked, and yield the results in it by key, and a function that appends more and
    returns once they are on disk. Without a path there are none, and nothing is written."""
    if path is None:
        yield {}, lambda results: None
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", opener=no_link) as file:
        free = True
        with suppress(OSError):  # a file system without locks
            free = lock(file.fileno())
        if not free:
            raise ValueError(f"{path} is being written by another process")

        def save(results: Mapping[str, PassRate]) -> None:
            rows = [
                {"key": key, "scores": one.scores, "rate": one.rate}
                | ({} if one.cut is None else {"cut": one.cut})
                | {"completions": one.completions}
                for key, one in results.items()
            ]
            append_rows(file, rows)

        yield _read(file, path, header), save


def _read(file: IO[bytes], path: str | Path, header: dict[str, Any]) -> dict[str, PassRate]:
    """Return the results of the whole batches in the file, by key, and cut off a torn batch at its end. A batch shares
    one stream of random numbers, so the missing part of a torn one would be drawn from another stream. An empty file
    gets the header. Raises ValueError if the file holds something else, or samples made with other settings."""
    file.seek(0)
    first = file.readline()
    if not _holds_ours(first) and not json.dumps(header).encode().startswith(first):
        raise ValueError(f"{path} holds something else than samples, and is left as it is; use another path")
    cut_to_whole_batches(file, _is_ours)
    file.seek(0)
    lines = [parse_json(line, f"{path}, line {number}") for number, line in enumerate(file, start=1)]
    if not lines:
        append_rows(file, [header])
        return {}
    found, *rows = lines
    for number, row in enumerate(rows, start=2):
        if not _is_ours(row):
            raise ValueError(f"{path}, line {number}: it holds no `key`, `scores` and `completions`; remove that line")
    seen, asked = _differing({name: found.get(name) for name in header}, header)
    if asked:
        raise ValueError(
            f"{path} holds samples made with {seen}, this run has {asked}; use another path or remove the file "
            "(`grpo-lab curate` and `long2short`: `--overwrite` samples anew)"
        )
    return {row["key"]: PassRate(tuple(row["scores"]), tuple(row["completions"]), row.get("cut")) for row in rows}


def _differing(found: Any, asked: Any) -> tuple[Any, Any]:
    """Return both values without the entries in which they agree, also inside nested mappings."""
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        return found, asked
    names = [name for name in {**found, **asked} if found.get(name) != asked.get(name)]
    pairs = {name: _differing(found.get(name), asked.get(name)) for name in names}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def _is_ours(row: Any) -> bool:
    """Return whether a row is a header, or has samples."""
    return isinstance(row, dict) and ("grpo_lab" in row or row.keys() >= {"key", "scores", "completions"})


def _holds_ours(line: bytes) -> bool:
    """Return whether a line of the file is a whole header, or a whole row with samples."""
    try:
        return _is_ours(parse_json(line, "a line"))
    except ValueError:
        return False


@contextmanager
def _progress_of(
    total: int, done: int, label: str, counted: str, shown: bool
) -> Iterator[Callable[[int, Sequence[PassRate]], None]]:
    """Yield `advance(number of new problems, all results so far)`, which updates a bar on a terminal or writes a line
    to a log now and then. The bar starts at `done` of `total` problems."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    often = {"mininterval": seconds, "maxinterval": seconds}
    with tqdm(total=total, initial=done, desc=label, unit=f" {counted}", disable=not shown, **often) as bar:

        def advance(count: int, results: Sequence[PassRate]) -> None:
            trials = sum(result.trials for result in results)
            right = sum(result.successes for result in results) / max(trials, 1)
            bar.set_postfix_str(f"{right:.1%} right so far" if trials else "nothing scorable so far", refresh=False)
            bar.update(count)

        yield advance


def keep_band(rates: Sequence[float | None], low: float = 0.0, high: float = 1.0) -> list[bool]:
    """Return for each problem whether its pass rate p is kept: low < p < high. One without a rate (None) is not.

    The default keeps all problems that can teach something: with p = 0 or 1 all advantages of a group are zero.
    """
    if not low < high:
        raise ValueError(f"the band low={low} < p < high={high} is empty")
    if wrong := [rate for rate in rates if rate is not None and not 0 <= rate <= 1]:
        raise ValueError(f"a pass rate lies in [0, 1]; got {wrong[0]}")
    return [rate is not None and low < rate < high for rate in rates]


ANSWER_ONLY = "Give only the final answer. No explanation, no working, no other words.\nAnswer:"


def guess_rates(
    problems: Sequence[Problem],
    generate: Generate,
    score: Score,
    tries: int = TRIES,
    *,
    settings: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[PassRate]:
    """Return the pass rates of the problems when every prompt asks for the answer alone (`ANSWER_ONLY`). The arguments
    are those of `pass_rates`, with `tries` as its n.

    `generate` should allow few tokens (enough for an answer, say 32), or the model reasons all the same. The thinking
    mode of a chat template has to be off.
    """
    asked = [{**problem, "prompt": answer_only(problem["prompt"])} for problem in problems]
    made_with = {**(settings or {}), "request": ANSWER_ONLY}
    return pass_rates(asked, generate, score, tries, settings=made_with, label="guesses", **how)


def guessable(rates: Sequence[PassRate]) -> list[bool]:
    """Return for each problem whether at least one try was right."""
    return [rate.successes > 0 for rate in rates]


def answer_only(prompt: Any, request: str = ANSWER_ONLY) -> Any:
    """Return the prompt with the request appended to its text or, in a message list, to the last user message."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{request}"
    messages = [dict(message) for message in prompt]
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            message["content"] = f"{message['content']}\n\n{request}"
            return messages
    raise ValueError("a prompt is a string or a message list with a user message whose content is text")
