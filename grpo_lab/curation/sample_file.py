"""The file behind `pass_rates`: a header with the settings, then one line a problem, appended and on the disk before
the next batch begins.

And how far a long sampling is, for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from grpo_lab.verifiers.verdict import CORRECT_FROM


@dataclass(frozen=True)
class Written:
    """A completion of `generate` that says whether a limit of tokens cut it off."""

    completion: Any
    cut: bool


@dataclass(frozen=True)
class PassRate:
    """One problem's completions and their scores. `cut`: how many were cut off at the limit of tokens; None where
    `generate` does not say (it gives no `Written`)."""

    scores: tuple[float | None, ...]
    completions: tuple[Any, ...]
    cut: int | None = None

    @property
    def successes(self) -> int:
        return sum(score is not None and score >= CORRECT_FROM for score in self.scores)

    @property
    def trials(self) -> int:
        """Completions that could be scored."""
        return sum(score is not None for score in self.scores)

    @property
    def unscorable(self) -> int:
        return len(self.scores) - self.trials

    @property
    def rate(self) -> float | None:
        """p̂, or None if no completion could be scored."""
        return self.successes / self.trials if self.trials else None


Save = Callable[[Mapping[str, PassRate]], None]
_SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def opened(path: str | Path | None, header: dict[str, Any]) -> Iterator[tuple[dict[str, PassRate], Save]]:
    """The results that are there already and a function that appends more and returns once they are on the disk."""
    if path is None:
        yield {}, lambda results: None
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{path} is being written by another process") from error
        done = _read(file, path, header)

        def save(results: Mapping[str, PassRate]) -> None:
            lines = [_line({"key": key, **_row(result)}) for key, result in results.items()]
            _append(file, lines)

        yield done, save


def _read(file: IO[bytes], path: str | Path, header: dict[str, Any]) -> dict[str, PassRate]:
    file.seek(0)
    lines = file.read().split(b"\n")
    parsed = [_parsed(line) for line in lines[:-1]]  # the piece after the last newline is torn, or empty
    good = len(parsed)
    while good and parsed[good - 1] is None:
        good -= 1
    if None in parsed[:good]:
        raise ValueError(f"{path} is damaged in line {parsed.index(None) + 1}; remove that line or the file")
    if not good and not _line(header).startswith(lines[0]):
        raise ValueError(f"{path} holds something else than samples, and is left as it is; use another path")
    file.truncate(sum(len(line) + 1 for line in lines[:good]))
    file.seek(0, os.SEEK_END)
    if not good:
        _append(file, [_line(header)])
        return {}
    found = parsed[0] or {}
    if other := sorted(name for name in header if found.get(name) != header[name]):
        seen, asked = _differing({name: found.get(name) for name in other}, {name: header[name] for name in other})
        raise ValueError(
            f"{path} holds samples made with {seen}, this run has {asked}; use another path or remove the file "
            "(`grpo-lab curate` and `long2short`: `--overwrite` samples anew)"
        )
    done: dict[str, PassRate] = {}
    for row in parsed[1:good]:
        assert row is not None
        done[row["key"]] = PassRate(tuple(row["scores"]), tuple(row["completions"]), row.get("cut"))
    return done


def _differing(found: Any, asked: Any) -> tuple[Any, Any]:
    """Both without what they agree in, mappings inside of mappings included."""
    if not (isinstance(found, dict) and isinstance(asked, dict)):
        return found, asked
    names = [name for name in {**found, **asked} if found.get(name) != asked.get(name)]
    pairs = {name: _differing(found.get(name), asked.get(name)) for name in names}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return (
        row if isinstance(row, dict) and ("grpo_lab" in row or row.keys() >= {"key", "scores", "completions"}) else None
    )


def _row(result: PassRate) -> dict[str, Any]:
    cut = {} if result.cut is None else {"cut": result.cut}
    return {"scores": list(result.scores), "rate": result.rate, **cut, "completions": list(result.completions)}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=True).encode() + b"\n"


def _append(file: IO[bytes], lines: Sequence[bytes]) -> None:
    file.write(b"".join(lines))
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def progress_of(total: int, done: int, label: str, shown: bool = True) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(problems, note)`: a bar on a terminal, a line now and then in a log file; `done` of `total` were
    there before."""
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    with tqdm(
        total=total,
        initial=done,
        desc=label,
        unit=" problems",
        disable=not shown,
        mininterval=seconds,
        maxinterval=seconds,
    ) as bar:

        def advance(count: int, note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(count)

        yield advance
