"""Sample: n completions of each problem, judged, on the disk batch by batch; and what a file of samples holds, without reading it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_lab.curation import PassRate, Written, pass_rates
from grpo_lab.io import no_link
from grpo_lab.runs.stop import StopRequests


class Sampler(Protocol):
    """A saved model that writes completions (`pipelines.sampler.ModelSampler`)."""

    settings: Any

    def written(self, prompts: Sequence[Any], n: int) -> list[list[Written]]: ...

    def rendered(self, prompt: Any) -> list[int]: ...

    def identity(self) -> dict[str, Any]: ...


def judged_samples(
    problems: Sequence[Mapping[str, Any]],
    sampler: Sampler,
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


def problems_in(file: Path) -> int:
    """How many problems a file of samples holds: its whole lines after the header."""
    return max(0, file.read_bytes().count(b"\n") - 1) if file.is_file() else 0


def samples_in_words(files: Mapping[str, Path]) -> str:
    """What is there after Ctrl-C: what they are → their file."""
    counts = {name: (problems_in(file), file) for name, file in files.items()}
    found = [f"{name} of {count:,} problems in {file}" for name, (count, file) in counts.items() if count]
    return f"{', '.join(found)} (the same command goes on)" if found else "no samples yet"


def refuse_other_count(file: Path, n: int, setting: str, instead: str) -> None:
    """ValueError where ``file`` holds another number of samples a problem than ``setting`` asks for; before a model is loaded."""
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
    """Keep the header and the first whole batches of ``size`` problems. The problems of a batch share one stream of random numbers:
    a batch of which a kill left a part is drawn again as a whole, or its rest would be drawn from another stream.
    """
    if not file.is_file():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    kept = whole[: 1 + (len(whole) - 1) // size * size] if whole else []
    with open(file, "r+b", opener=no_link) as opened:
        opened.truncate(sum(len(line) for line in kept))
        os.fsync(opened.fileno())
