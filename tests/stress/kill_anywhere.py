"""Kill a run by −9 at random moments, resume it each time, and compare it with the run that nobody killed.

    python tests/stress/kill_anywhere.py [--of lab-1 lab-2 stock-1 stock-2] [--kills 30] [--steps 24] [--seed 0]
                                         [--folder runs/kill_anywhere]

lab: ``grpo-lab train`` and ``grpo-lab train --resume``; stock: TRL's trainer with the same settings, resumed from its
last checkpoint. The number is that of the ranks. A life is one training to its end with the kills that fell into it;
there are as many as it takes. The moment is drawn: a phase (generating, scoring, updating, saving), how many times it
is let through, and how far it has come; then the whole process group gets SIGKILL. Two optimizer steps share a
generation batch and a checkpoint is written every third step, so that every other one lies inside a batch.

Bitwise: the final weights, and every number of the metrics log but times. Finished lives are in ``record.json`` and are
not repeated. Every attempt is a process (a group of them) forked from this one, which has everything imported and has
computed nothing: it starts within a second.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from kill_phases import PHASES, VARIABLE, PhaseFile, stock
from kill_processes import adopt_orphans, begin, ended, has_ended, kill, wait
from safetensors.numpy import load_file

RECIPE: dict[str, Any] = {
    "name": "kill-anywhere",
    "trainer": "kill_phases:Lab",
    "model": {"tiny": {"hidden_size": 32, "num_layers": 2, "initializer_range": 0.2}},
    "data": {"loader": "word_problems", "n": 8},  # 8 steps an epoch on one process, 4 on two ranks
    "rewards": ["kill_phases:digits"],
    "objective": "dr_grpo",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
    "save_total_limit": 3,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
NOT_TRLS = ("name", "trainer", "model", "data", "rewards", "objective")
SETTINGS = ("lab-1", "lab-2", "stock-1", "stock-2")
TIMES = (
    "step_time",
    "epoch_time",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
    "total_flos",
)
LONGEST = 600.0


@dataclass
class Life:
    """One training to its end. ``kills``: phase and step of each; ``gap``: ‖w − w'‖ / ‖w' − w₀‖ with w' the
    uninterrupted run's."""

    kills: list[tuple[str, int]] = field(default_factory=list)
    refused: int = 0
    weights_equal: bool = False
    gap: float = float("nan")
    largest: float = float("nan")
    rows: int = 0
    rows_different: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--kills", type=int, default=30, help="of each")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a life")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill_anywhere"))
    args = parser.parse_args()
    adopt_orphans()
    found = {}
    for setting in args.of:
        found[setting] = Experiment(setting, args.folder / setting, args.steps, args.seed).until(args.kills)
        print("\n" + table(found), flush=True)
    wrong = [s for s, lives in found.items() if s.startswith("lab") and not all(map(is_exact, lives))]
    if wrong:
        sys.exit(f"not the uninterrupted run to the bit: {', '.join(wrong)}")


class Experiment:
    """The lives of one setting, in ``folder``; the uninterrupted run is in ``folder/whole``."""

    def __init__(self, setting: str, folder: Path, steps: int, seed: int) -> None:
        self.setting, self.folder, self.seed = setting, folder.resolve(), seed
        self.side, self.ranks = setting.split("-")[0], int(setting.split("-")[1])
        self.record = self.folder / "record.json"
        self.recipe = {**RECIPE, "max_steps": steps}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.yaml").write_text(yaml.safe_dump(self.recipe))
        self.phases = PhaseFile(self.folder / "phase")

    def until(self, kills: int) -> list[Life]:
        known = {"steps": self.recipe["max_steps"], "seed": self.seed}
        found = json.loads(self.record.read_text()) if self.record.is_file() else {**known, "lives": [], "seconds": {}}
        if {name: found[name] for name in known} != known:
            sys.exit(f"{self.record} is of other --steps or --seed; choose another --folder")
        lives = [Life(**one) for one in found["lives"]]
        if not found["seconds"]:
            found["seconds"] = self.whole()
        while (done := sum(len(life.kills) for life in lives)) < kills:
            draw = random.Random(f"{self.seed} {self.setting} {len(lives)}")
            lives.append(self.live(len(lives), kills - done, draw, found["seconds"]))
            self.record.write_text(json.dumps({**found, "lives": [asdict(life) for life in lives]}, indent=1))
            print(f"{self.setting}, life {len(lives)}: {lives[-1]}", flush=True)
        return lives

    def whole(self) -> dict[str, float]:
        """The run that nobody kills; how long each of its phases takes."""
        folder = self.folder / "whole"
        shutil.rmtree(folder, ignore_errors=True)
        leader, took = self.start(folder, first=True), {phase: [0.01] for phase in PHASES}
        before, since = self.phases.read()[0], time.monotonic()
        while (code := ended(leader)) is None:
            now = self.phases.read()[0]
            if now != before:
                if before in took:
                    took[before].append(time.monotonic() - since)
                before, since = now, time.monotonic()
            time.sleep(0.001)
        self.must_be_0(code, folder)
        return {phase: fmean(seconds) for phase, seconds in took.items()}

    def live(self, number: int, most: int, draw: random.Random, seconds: dict[str, float]) -> Life:
        folder, life = self.folder / f"life-{number}", Life()
        shutil.rmtree(folder, ignore_errors=True)
        first = True
        while True:
            leader = self.start(folder, first)
            first = False
            if len(life.kills) < most:
                phase, times, share = draw.choice(PHASES), draw.randint(1, 4), draw.random()
                if self.came_to(leader, phase, times):
                    time.sleep(share * seconds[phase])
                    kill(leader)
                    life.kills.append(self.phases.read())
                    continue
            code = wait(leader)
            if code == 0:
                return self.judged(life, folder)
            if self.side == "lab":
                self.must_be_0(code, folder)
            life.refused += 1  # as a user does: the checkpoint before it
            self.drop_newest(folder, code)

    def came_to(self, leader: int, phase: str, times: int) -> bool:
        """Wait until ``phase`` was entered so many times; False where the run ended before."""
        before, until = "", time.monotonic() + LONGEST
        while time.monotonic() < until:
            if has_ended(leader):
                return False
            now = self.phases.read()[0]
            times -= now == phase and before != phase
            if times == 0:
                return True
            before = now
            time.sleep(0.0005)
        kill(leader)
        raise TimeoutError(f"{self.setting}: no {phase} within {LONGEST:.0f} s; see {self.folder}/*.log")

    def start(self, folder: Path, first: bool) -> int:
        """The leader of a new process group, in which the run begins or goes on."""
        self.phases.write("starting", 0)
        told = {VARIABLE: str(self.phases.path)}
        return begin(lambda: self.work(folder, first), self.ranks, folder.with_suffix(".log"), told)

    def work(self, folder: Path, first: bool) -> int:
        if self.side == "stock":
            return stock(self.recipe, folder, NOT_TRLS)
        from grpo_lab.cli import main as command

        words = ["train", "--config", str(self.folder / "recipe.yaml"), "--output_dir", str(folder)]
        return int(command([*words, *([] if first else ["--resume"])]) or 0)

    def judged(self, life: Life, folder: Path) -> Life:
        start, right, ours = (
            load_file(f / "model.safetensors")
            for f in (folder.parent / "whole" / "cold_start", folder.parent / "whole", folder)
        )
        life.weights_equal = all(right[name].tobytes() == ours[name].tobytes() for name in right)
        moved = np.sqrt(sum(np.sum((right[n].astype(np.float64) - start[n]) ** 2) for n in right))
        apart = np.sqrt(sum(np.sum((right[n].astype(np.float64) - ours[n]) ** 2) for n in right))
        life.gap, life.largest = float(apart / moved), max(float(np.abs(right[n] - ours[n]).max()) for n in right)
        expected, found = rows_of(folder.parent / "whole"), rows_of(folder)
        life.rows = len(expected)
        life.rows_different = abs(len(expected) - len(found)) + sum(
            a != b for a, b in zip(expected, found, strict=False)
        )
        return life

    def drop_newest(self, folder: Path, code: int) -> None:
        checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        if not checkpoints:
            self.must_be_0(code, folder)
        shutil.rmtree(checkpoints[-1])

    def must_be_0(self, code: int, folder: Path) -> None:
        if code != 0:
            log = folder.with_suffix(".log")
            sys.exit(f"{self.setting}: exit code {code}; the end of {log}:\n{log.read_text(errors='replace')[-4000:]}")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics log without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def is_exact(life: Life) -> bool:
    return life.weights_equal and life.rows_different == 0


def table(found: dict[str, list[Life]]) -> str:
    phases = ("starting", *PHASES, "between")
    head = (
        "run",
        "ranks",
        "kills",
        *phases,
        "lives",
        "equal to the bit",
        "log rows that differ",
        "‖Δw‖ / ‖moved‖",
        "largest Δw",
        "resumes refused",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for setting, lives in found.items():
        side, ranks = setting.split("-")
        counted = Counter(phase for life in lives for phase, _ in life.kills)
        cells = [
            *("grpo_lab" if side == "lab" else "TRL", ranks, sum(counted.values())),
            *(counted[phase] for phase in phases),
            *(len(lives), sum(map(is_exact, lives))),
            f"{sum(life.rows_different for life in lives)} of {sum(life.rows for life in lives)}",
            f"{max(life.gap for life in lives):.3g}",
            f"{max(life.largest for life in lives):.3g}",
            sum(life.refused for life in lives),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
