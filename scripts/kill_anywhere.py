"""Kill a run by −9 at random moments, resume it each time, and compare it with the run that nobody killed.

    python scripts/kill_anywhere.py [--of lab-1 lab-2 stock-1 stock-2] [--kills 30] [--steps 24] [--seed 0] [--folder runs/kill_anywhere]

lab: ``grpo-lab train`` and ``grpo-lab train --resume``; stock: TRL's trainer with the same settings, resumed from its last checkpoint.
The number is that of the ranks. A life is one training to its end with the kills that fell into it; there are as many as it takes. The moment is drawn: a phase
(generating, scoring, updating, saving), how many times it is let through, and how far it has come; then the whole process group gets
SIGKILL. Two optimizer steps share a generation batch and a checkpoint is written every third step, so that every other one lies inside a batch.

Bitwise: the final weights, and every number of the metrics log but times. Finished lives are in ``record.json`` and are not repeated.
Every attempt is a process (a group of them) forked from this one, which has everything imported and has computed nothing: it starts within a second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from kill_phases import PHASES, VARIABLE, PhaseFile
from safetensors.numpy import load_file

RECIPE: dict[str, Any] = {
    "name": "kill-anywhere",
    "trainer": "kill_phases:Lab",
    "model": {"tiny": {"hidden_size": 32, "num_layers": 2, "initializer_range": 0.2}},
    "data": {"loader": "word_problems", "n": 64},
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
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Life:
    """One training to its end. ``kills``: phase and step of each; ``gap``: ‖w − w'‖ / ‖w' − w₀‖ with w' the uninterrupted run's."""

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
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # ranks whose leader was killed become ours to wait for
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
                    life.kills.append(self.kill(leader))
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
        os.killpg(leader, signal.SIGKILL)
        raise TimeoutError(f"{self.setting}: no {phase} within {LONGEST:.0f} s; see {self.folder}/*.log")

    def kill(self, leader: int) -> tuple[str, int]:
        """SIGKILL to all of the group; where it was when it came."""
        os.killpg(leader, signal.SIGKILL)
        while True:  # the leader and its orphans
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return self.phases.read()

    def start(self, folder: Path, first: bool) -> int:
        """The leader of a new process group, in which the run begins or goes on."""
        self.phases.write("starting", 0)
        port = free_port()
        log = folder.with_suffix(".log").open("ab")
        leader = os.fork()
        if leader:
            log.close()
            return leader
        try:
            os.setsid()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.chdir(Path(__file__).parent)
            os.environ[VARIABLE] = str(self.phases.path)
            code = self.ranks_of(folder, first, port) if self.ranks > 1 else self.work(folder, first)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def ranks_of(self, folder: Path, first: bool, port: int) -> int:
        """A process a rank; the first that fails ends all."""
        alike = {
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(self.ranks):
            if os.fork() == 0:
                os.environ |= {name: str(value) for name, value in {**alike, "RANK": rank, "LOCAL_RANK": rank}.items()}
                os.environ["ACCELERATE_USE_CPU"] = "true"
                try:
                    code = self.work(folder, first)
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        for _ in range(self.ranks):
            code = os.waitstatus_to_exitcode(os.wait()[1])
            if code != 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.killpg(0, signal.SIGTERM)
                return 1
        return 0

    def work(self, folder: Path, first: bool) -> int:
        if self.side == "stock":
            return stock(self.recipe, folder)
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


def stock(recipe: dict[str, Any], folder: Path) -> int:
    """TRL's own trainer with the recipe's settings, from its last checkpoint where there is one."""
    from kill_phases import Stock, digits
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig

    from grpo_lab.pipelines import parts
    from grpo_lab.pipelines.recipe import recipe_from

    read = recipe_from({**recipe, "output_dir": str(folder)})
    model, tokenizer = parts.load_model(read.model, recipe["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("RANK", "0") == "0" and not (folder / "cold_start").is_dir():
        model.save_pretrained(folder / "cold_start")
    settings = {name: value for name, value in recipe.items() if name not in NOT_TRLS}
    trainer = Stock(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(
            output_dir=str(folder), report_to="none", loss_type="dr_grpo", scale_rewards="none", **settings
        ),
        train_dataset=parts.load_rows(read.data),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.save_model(str(folder))
    if trainer.accelerator.is_main_process:
        lines = [json.dumps(row) for row in trainer.state.log_history if "loss" in row]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
    return 0


# -- small ---------------------------------------------------------------------------------------------------------------


def ended(leader: int) -> int | None:
    """The exit code, once there is one."""
    pid, status = os.waitpid(leader, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def has_ended(leader: int) -> bool:
    """Whether it did, with its exit code left for ``wait``."""
    return os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait(leader: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
