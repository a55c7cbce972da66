"""What Ctrl-C left of each command, in words: where it lies, and how to go on from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.interruption import Kept
from grpo_lab.pipelines.sample_counts import problems_in

NOTHING = "nothing"


def kept(known: argparse.Namespace, words: list[str], stop: BaseException) -> str:
    """In words, what the interrupted command left on disk. Never raises: it is the last thing that is said."""
    if isinstance(stop, Kept):
        return stop.what
    try:
        return _OF[known.command](known, words)
    except (KeyError, ValueError, OSError):
        return NOTHING


def _of_training(known: argparse.Namespace, words: list[str]) -> str:
    from grpo_lab.recipe.sections import read_recipe
    from grpo_lab.recipe.yaml import parse_overrides

    folder = read_recipe(known.config, parse_overrides(words)).output_dir
    if known.dry_run or not (folder / "run.json").is_file():
        return NOTHING
    steps = sorted(int(p.name.rpartition("-")[2]) for p in folder.glob("checkpoint-*") if p.name[11:].isdigit())
    found = [
        f"checkpoint-{steps[-1]}" if steps else "no checkpoint",
        *(["cold_start"] if (folder / "cold_start" / "config.json").is_file() else []),
        *(["evaluation/before"] if (folder / "evaluation" / "before" / "summary.json").is_file() else []),
        *(["metrics.jsonl"] if (folder / "metrics.jsonl").is_file() else []),
    ]
    return f"{', '.join(found)} in {folder} (the same command with --resume goes on)"


def _of_curation(known: argparse.Namespace, words: list[str]) -> str:
    from grpo_lab.pipelines.curation_recipe import read_curation_recipe
    from grpo_lab.recipe.yaml import parse_overrides

    folder = read_curation_recipe(known.config, parse_overrides(words)).output_dir
    return _samples({"pass rates": folder / "pass_rates.jsonl", "guesses": folder / "guesses.jsonl"})


def _of_long2short(known: argparse.Namespace, words: list[str]) -> str:
    from grpo_lab.pipelines.long2short import samples_file
    from grpo_lab.pipelines.long2short_recipe import read_long2short_recipe
    from grpo_lab.recipe.yaml import parse_overrides

    recipe = read_long2short_recipe(known.config, parse_overrides(words))
    return _samples({"samples": samples_file(recipe)})


def _of_rounds(known: argparse.Namespace, words: list[str]) -> str:
    from grpo_lab.pipelines.rounds_recipe import read_rounds_recipe
    from grpo_lab.recipe.yaml import parse_overrides

    folder = read_rounds_recipe(known.config, parse_overrides(words)).output_dir
    parts = ("sample", "select", "train", "evaluate")
    places = [folder / "start", *sorted(folder.glob("round-*"), key=lambda place: int(place.name[6:]))]
    done = {place.name: [part for part in parts if (place / f"{part}.json").is_file()] for place in places}
    found = [f"{name} ({', '.join(some)})" for name, some in done.items() if some]
    return f"{', '.join(found)} in {folder} (the same command goes on)" if found else "no part of a round yet"


def _samples(files: dict[str, Path]) -> str:
    counts = {name: (problems_in(file), file) for name, file in files.items()}
    found = [f"{name} of {count:,} problems in {file}" for name, (count, file) in counts.items() if count]
    return f"{', '.join(found)} (the same command goes on)" if found else "no samples yet"


_OF: dict[str, Any] = {
    "quickstart": _of_training,
    "train": _of_training,
    "curate": _of_curation,
    "long2short": _of_long2short,
    "rounds": _of_rounds,
}
