"""Kill ``curate``, ``rounds``, ``long2short`` (``merge``: of two models), ``evaluate`` and ``pipeline`` by −9 at random
moments, run the same command again, and compare the files.

    python tests/stress/kill_commands.py [--of curate rounds …] [--kills 10] [--seed 0] [--folder runs/kill_commands]

A life is one command to its end with the kills that fell into it, three at most; there are as many as it takes. The
moment is drawn: a time of the uninterrupted run, or, every other kill, the moment in which a file of the folder has
just come, changed or gone, so that writing is met, too. Then the whole process group gets SIGKILL. Compared, byte by
byte, is the whole folder, but for what tells the time of day or counts seconds and sessions (``VOLATILE``). A command
that refuses its own folder counts as different. Every attempt is a process forked from this one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft  # noqa: F401
import trl.trainer.sft_trainer  # noqa: F401
import yaml
from kill_processes import adopt_orphans, begin, ended, has_ended, kill, wait

from grpo_lab.cli import main as command
from grpo_lab.pipelines import evaluate, rounds  # noqa: F401
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.supervised import methods  # noqa: F401

DATA = {"loader": "word_problems", "n": 24, "template": "chat", "largest": 20, "steps": [1, 2]}
SAMPLING = {"n_samples": 6, "max_completion_length": 12, "problems_per_save": 4, "use_cpu": True}
TRAINING = {
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "bf16": False,
    "max_length": 256,
    "logging_steps": 1,
}
REWARD = "kill_commands:by_digest"
MEASURED = {"data": {**DATA, "n": 8, "split": "test"}, "reward": REWARD, "max_new_tokens": 8}
RECIPES: dict[str, dict[str, Any]] = {
    "curate": {**SAMPLING, "filters": {"kind": True, "band": {}, "guessable": {"tries": 2, "max_new_tokens": 3}}},
    "rounds": {
        "method": "expert_iteration", **SAMPLING, "rounds": {"count": 2, "questions": 8},
        "training": {**TRAINING, "num_train_epochs": 2}, "evaluation": MEASURED,
    },
    "long2short": {"method": "dpo", **SAMPLING, "training": {**TRAINING, "max_steps": 4}, "evaluation": MEASURED},
    "merge": {"method": "merge", "alpha": 0.5, "n_samples": 1, "use_cpu": True, "evaluation": MEASURED},
    "evaluate": {},
    "pipeline": {
        "stages": [
            {"stage": "sample", "name": "samples", "model": "{model}", "data": DATA, "reward": REWARD, **SAMPLING},
            {"stage": "select", "name": "pairs", "inputs": {"samples": "samples.samples"}, "contrast": {}},
            {"stage": "dpo", "name": "tuned", "model": "{model}", "inputs": {"rows": "pairs.rows"}, **TRAINING}
            | {"max_steps": 4},
            {"stage": "merge", "name": "mean", "model": "{model}", "inputs": {"short_model": "tuned.model"}},
            {"stage": "evaluate", "name": "measured", "inputs": {"model": "mean.model"}, **MEASURED, "use_cpu": True},
        ]
    },
}  # fmt: skip
VOLATILE = (
    rb'"why": "(new|goes on)"',
    rb'"seconds": \{[^}]*\}',
    rb'"(seconds|time|completions of this session)": [^,\n}]+',
    rb"<div><dt>completions of this session</dt><dd[^>]*>[^<]*</dd></div>",
    rb"\d+(\.\d)? s</(dd|p)>",
    rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC",
)
"""Of ``run.json``, ``stage.json``, ``curation.json``, ``summary.json`` and the pages."""
ENDED = ("holds an evaluation already; choose another, or give --overwrite",)
MOST = 3
LONGEST = 600.0


@dataclass
class Life:
    """``kills``: seconds into the process, and how many files were there. ``different``: files that are not the
    uninterrupted run's."""

    kills: list[tuple[float, int]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def by_digest(completions: list[Any], solution: list[str], **_: Any) -> list[float]:
    """About half of a problem's completions are right, for a random model, too."""
    pairs = zip(completions, solution, strict=True)
    return [float(zlib.crc32(f"{one}{gold}".encode()) % 10 < 5) for one, gold in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--kills", type=int, default=10, help="of each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill_commands"))
    args = parser.parse_args()
    adopt_orphans()
    print(
        "| command | kills | lives | equal to the byte | files | different |\n|---|---:|---:|---:|---:|---|", flush=True
    )
    wrong = []
    for name in args.of:
        lives, files = Experiment(name, args.folder.resolve() / name, args.seed).until(args.kills)
        bad = [life for life in lives if life.different]
        cells = (name, sum(len(one.kills) for one in lives), len(lives), len(lives) - len(bad), files)
        different = "; ".join(sorted({one for life in bad for one in life.different})) or "none"
        print("| " + " | ".join(map(str, (*cells, different))) + " |", flush=True)
        wrong += [name] if bad else []
    if wrong:
        sys.exit(f"not the files of the uninterrupted run: {', '.join(wrong)}")


class Experiment:
    """One command in ``folder``, always in ``now/`` (files tell where they lie): ``whole/`` uninterrupted,
    ``life-<n>/`` killed."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name, self.folder, self.seed, self.now = name, folder, seed, folder / "now"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for seed, place in enumerate(("model", "short")):
            model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, initializer_range=0.2, seed=seed)
            model.save_pretrained(folder / place)
            tokenizer.save_pretrained(folder / place)

    def until(self, kills: int) -> tuple[list[Life], int]:
        started = time.monotonic()
        if code := wait(self.start()):
            sys.exit(f"{self.name}: exit code {code}; see {self.now}.log")
        seconds, lives, done = time.monotonic() - started, list[Life](), 0
        right = contents(self.now.rename(self.folder / "whole"))
        while done < kills:
            draw = random.Random(f"{self.seed} {self.name} {len(lives)}")
            lives.append(self.live(len(lives), min(MOST, kills - done), draw, seconds, right))
            done += len(lives[-1].kills)
            print(f"{self.name}, life {len(lives)}: {lives[-1]}", file=sys.stderr, flush=True)
        return lives, len(right)

    def live(self, number: int, most: int, draw: random.Random, seconds: float, right: dict[str, bytes]) -> Life:
        life = Life()
        while True:
            leader, began = self.start(), time.monotonic()
            if len(life.kills) < most:
                at, changes = (
                    (draw.random() * seconds, 10**9) if len(life.kills) % 2 else (LONGEST, draw.randint(1, 30))
                )
                if came_to(leader, self.now, at, changes):
                    kill(leader)
                    life.kills.append((round(time.monotonic() - began, 3), len(stamps(self.now))))
                    continue
            life.codes.append(wait(leader))
            if life.codes[-1] == 2 and life.kills and (self.said().rstrip().endswith(ENDED)):
                life.codes[-1] = 0  # killed after its last file
            found = contents(self.now.rename(self.folder / f"life-{number}"))
            life.different = sorted(name for name in {*right, *found} if right.get(name) != found.get(name))
            life.different += [f"exit code {code}" for code in life.codes if code]
            return life

    def said(self) -> str:
        return self.now.with_suffix(".log").read_text(errors="replace")

    def start(self) -> int:
        """The leader of a new process group, in which the command begins or goes on."""
        self.now.mkdir(exist_ok=True)
        return begin(lambda: int(command(self.words()) or 0), 1, self.now.with_suffix(".log"), {})

    def words(self) -> list[str]:
        model, out = str(self.folder / "model"), self.now / "out"
        if self.name == "evaluate":
            rows = "--data word_problems --n 16 --n-samples 2 --max-new-tokens 12 --batch-size 8"
            return ["evaluate", model, *rows.split(), "--output", str(out)]
        given: dict[str, Any] = {"output_dir": str(out), **RECIPES[self.name]}
        if self.name == "pipeline":
            given = yaml.safe_load(yaml.safe_dump(given).replace("{model}", model))
        else:
            given |= {"name": "killed", "model": {"path": model}}
            of_one = {"data": DATA, "reward": REWARD}
            given |= {"short_model": str(self.folder / "short")} if self.name == "merge" else of_one
        file = self.now / "recipe.yaml"
        file.write_text(yaml.safe_dump(given))
        return ["long2short" if self.name == "merge" else self.name, "--config", str(file)]


def came_to(leader: int, place: Path, seconds: float, changes: int) -> bool:
    """Wait for the moment; False where the command ended before."""
    began, seen = time.monotonic(), dict[str, tuple[int, int]]()
    while (spent := time.monotonic() - began) < LONGEST:
        if has_ended(leader):
            return False
        now = stamps(place)
        changes -= len({*now.items()} ^ {*seen.items()}) > 0
        seen = now
        if spent >= seconds or changes <= 0:
            return True
        time.sleep(0.0005)
    raise TimeoutError(f"no end within {LONGEST:.0f} s; see {place}.log, exit code {ended(leader)}")


def stamps(place: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for folder, folders, files in os.walk(place):  # rglob ends with an error where a folder goes meanwhile
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                stat = os.stat(os.path.join(folder, name))
                found[os.path.join(folder, name)] = (stat.st_mtime_ns, stat.st_size)
    return found


def contents(place: Path) -> dict[str, bytes]:
    """File → its bytes, without what is volatile."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file():
            said = path.read_bytes()
            for pattern in VOLATILE if path.suffix in (".json", ".html") else ():
                said = re.sub(pattern, b"", said)
            found[path.relative_to(place).as_posix()] = said
    return found


if __name__ == "__main__":
    main()
