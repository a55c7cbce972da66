"""Sample: n completions of each problem, judged, on the disk batch by batch; and what a file of samples holds, without
reading it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from grpo_lab.curation import PassRate, Written, pass_rates
from grpo_lab.io import no_link, write_json_lines
from grpo_lab.runs.stop import StopRequests
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

SAMPLES, SAMPLING = "samples.jsonl", "sampling.jsonl"
"""All samples; those made so far (gone when the former is there)."""


class CompletionWriter(Protocol):
    """A saved model that writes completions (`pipelines.sampler.ModelSampler`)."""

    settings: Any

    def written(self, prompts: Sequence[Any], n: int) -> list[list[Written]]: ...

    def rendered(self, prompt: Any) -> list[int]: ...

    def tokens(self, completion: Any) -> int: ...

    def identity(self) -> dict[str, Any]: ...


def judged_samples(
    problems: Sequence[Mapping[str, Any]],
    sampler: CompletionWriter,
    reward: Any,
    file: Path,
    stop: StopRequests,
    said: Mapping[str, Any],
    label: str = "pass rates",
) -> list[PassRate]:
    """``sampler``'s completions of every problem with ``reward``'s scores; goes on with those that ``file`` has.

    Args:
        said: beside what the sampler says of itself: what the samples follow from. A file of other samples is refused.
    """
    return pass_rates(
        problems,
        stop.before_each(sampler.written),
        reward,
        sampler.settings.n_samples,
        path=file,
        settings={**sampler.identity(), **said},
        batch_size=sampler.settings.problems_per_save,
        label=label,
        rendered=sampler.rendered,
    )


def sample(
    rows: Sequence[Mapping[str, Any]],
    start: Callable[[], tuple[CompletionWriter, Sequence[int]]],
    reward: Any,
    folder: Path,
    stop: StopRequests,
    said: Mapping[str, Any],
    label: str,
) -> list[dict[str, Any]]:
    """`samples.jsonl` in ``folder``: a line a problem with its row's number, its completions, their scores and lengths
    in tokens.

    Args:
        start: loads the model: what samples, and the numbers of the ``rows`` that it is asked. Not called where the
            file is there.
    """
    file, progress = folder / SAMPLES, folder / SAMPLING
    if not file.is_file():
        sampler, asked = start()
        trim_to_whole_batches(progress, sampler.settings.problems_per_save)
        rates = judged_samples([rows[row] for row in asked], sampler, reward, progress, stop, said, label)
        lines = [_line(row, rate, sampler) for row, rate in zip(asked, rates, strict=True)]
        write_json_lines(file, lines)
    progress.unlink(missing_ok=True)
    return read_lines(file)


def _line(row: int, rate: PassRate, sampler: CompletionWriter) -> dict[str, Any]:
    return {
        "row": row,
        "scores": list(rate.scores),
        "lengths": [sampler.tokens(one) for one in rate.completions or ()],
        "cut": rate.cut,
        "completions": [encodable(one) for one in rate.completions or ()],
    }


def sample_facts(lines: Sequence[Mapping[str, Any]], asked: int) -> dict[str, Any]:
    """Tokens: of the texts, and one for each end that was written."""
    each = [(length, score) for line in lines for length, score in zip(line["lengths"], line["scores"], strict=True)]
    cut = sum(line["cut"] or 0 for line in lines)
    scored = [score for _, score in each if score is not None]
    right = [length for length, score in each if score is not None and score >= CORRECT_FROM]
    return {
        "questions": asked,
        "left_out": asked - len(lines),
        "samples": len(each),
        "right_share": len(right) / len(scored) if scored else None,
        "cut": cut,
        "tokens": sum(length for length, _ in each) + len(each) - cut,
        "mean_length": fmean(length for length, _ in each),
        "mean_length_right": fmean(right) if right else None,
    }


def read_lines(file: Path) -> list[dict[str, Any]]:
    """A file of JSON, an object a line."""
    with file.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def problems_in(file: Path) -> int:
    """How many problems a file of samples holds: its whole lines after the header."""
    return max(0, file.read_bytes().count(b"\n") - 1) if file.is_file() else 0


def samples_in_words(files: Mapping[str, Path]) -> str:
    """What is there after Ctrl-C: what they are → their file."""
    counts = {name: (problems_in(file), file) for name, file in files.items()}
    found = [f"{name} of {count:,} problems in {file}" for name, (count, file) in counts.items() if count]
    return f"{', '.join(found)} (the same command goes on)" if found else "no samples yet"


def refuse_other_count(file: Path, n: int, setting: str, instead: str) -> None:
    """ValueError where ``file`` holds another number of samples a problem than ``setting`` asks for; before a model is
    loaded."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        first = lines.readline()
    try:
        there = json.loads(first)["n"]
    except (ValueError, KeyError, TypeError):
        return  # torn or of somebody else: said where the samples are read
    if there != n:
        raise ValueError(f"`{setting}` is {n} and {file} holds {there} samples a problem; {instead}")


def trim_to_whole_batches(file: Path, size: int) -> None:
    """Keep the header and the first whole batches of ``size`` problems. The problems of a batch share one stream of
    random numbers: a batch of which a kill left a part is drawn again as a whole, or its rest would be drawn from
    another stream.
    """
    if not file.is_file():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = whole[: 1 + (len(whole) - 1) // size * size] if whole else []
    with open(file, "r+b", opener=no_link) as opened:
        opened.truncate(sum(len(line) for line in kept))
        os.fsync(opened.fileno())
