"""Speed to capability: seconds of training, from random weights, until an accuracy is sure (docs/speedrun.md).

    make speedrun                                                    # the four entries, each on two seeds
    python scripts/speedrun.py --name mine --recipe FILE.yaml        # one entry
    python scripts/speedrun.py --name mine --set num_iterations 2    # the base line's recipe with a change
    taskset -c 0 python scripts/speedrun.py --all --enter            # on one core, into the records
    python scripts/speedrun.py --table                               # docs/speedrun.md from docs/speedrun_records.json

A run is a cold start and then reinforcement learning. After every second optimizer step of the latter the greedy
accuracy on the held-out problems is measured. The run ends as soon as the lower end of its 95% interval (Wilson) has
reached the target. Its seconds are those of the two ``train()`` calls without the evaluations. ``--stock`` trains by
TRL's ``SFTTrainer`` and ``GRPOTrainer`` in place of ours, with the same objective in TRL's settings. Printed is the
record of the entry; with ``--enter`` it goes into docs/speedrun_records.json and the page instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
from bench_accuracy import held_out
from datasets import Dataset
from speedrun_table import PAGE, RECORDS, entered, page_with
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as hf_logging
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from grpo_lab.evaluation import Interval
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import changes_asked
from grpo_lab.recipe import build
from grpo_lab.recipe.job import Job, lab_config, numbers_read
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import DataSection, Recipe, read_recipe
from grpo_lab.trainer.supervised.methods import cold_start, worked_pairs

ROOT = Path(__file__).resolve().parents[1]
BASE_LINE = "recipes/speedrun/dr_grpo.yaml"
TARGET = 0.6
"""Accuracy that the lower end of the interval must reach, on the base line's held-out problems."""
EVERY = 2
"""Optimizer steps of reinforcement learning from one evaluation to the next."""
SEEDS = (0, 1)
OURS = {
    "stock TRL": ["--stock"],
    "ours": [],
    "ours, further updates": ["--set", "num_iterations", "2"],
    "ours, curation": ["--set", "update.dead_groups", "resample"],
}
"""Our entries: name → the options of its command, behind ``--name``."""
Record = dict[str, Any]


@dataclass
class Clock:
    """A stopwatch: wall seconds, and CPU seconds of this process."""

    wall: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context that adds the seconds of its block."""
        wall = time.perf_counter()
        cpu = time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def without(self, part: Clock) -> Clock:
        """Return the seconds of this clock less those of another."""
        return Clock(self.wall - part.wall, self.cpu - part.cpu)

    def rounded(self) -> dict[str, float]:
        return {name: round(seconds, 2) for name, seconds in asdict(self).items()}


class Target(TrainerCallback):  # type: ignore[misc]
    """Callback that measures the policy after every ``EVERY``-th step, and ends the training once it reaches the
    target.

    Attributes:
        found: the last measurement; None before the first.
        steps: optimizer steps until then.
        clock: seconds of all measurements.
    """

    def __init__(self, job: Job, tokenizer: Any, target: float) -> None:
        self.job = job
        self.tokenizer = tokenizer
        self.target = target
        self.reward = build.judges_of(job.evaluation)["reward"]
        self.clock = Clock()
        self.steps = 0
        self.found: Interval | None = None

    @property
    def reached(self) -> bool:
        return self.found is not None and self.found.low >= self.target

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step % EVERY:
            return
        with self.clock.running():
            evaluation = self.job.evaluation
            self.found = held_out(model, self.tokenizer, self.job.held_out, self.reward, evaluation.max_new_tokens)
            model.train()
        self.steps = state.global_step
        print(f"  step {self.steps}: {self.found.value:.3f}, surely {self.found.low:.3f}", flush=True)
        if self.reached:
            control.should_training_stop = True


def recipe_of(options: argparse.Namespace, seed: int, folder: Path) -> Recipe:
    """Read the entry's recipe, with ``seed`` as the seed of its weights, its problems and its sampling. Raises
    SystemExit if the recipe has a mistake."""
    seeds = {"seed": seed, "data.seed": seed, "cold_start.data.seed": seed}
    silent = {"output_dir": str(folder), "report_to": "none", "disable_tqdm": True}
    try:
        changes = {**changes_asked(options), **seeds, **silent}
        return numbers_read(read_recipe(ROOT / options.recipe, changes))
    except ValueError as error:
        raise SystemExit(f"speedrun: error: {error}") from error


def broken_rules(recipe: Recipe) -> list[str]:
    """Return the rules that an entry's recipe breaks, in words. They demand random weights, and the base line's
    problems, held-out problems and judge."""
    rules = read_recipe(ROOT / BASE_LINE)
    said = []
    if recipe.model.tiny is None:
        said.append("`model` has no `tiny`: weights are not random")
    if recipe.cold_start is None or asked_of(recipe.cold_start.data) != asked_of(rules.cold_start.data):
        said.append("`cold_start.data` is not that of the rules; only its seed may differ")
    if asked_of(recipe.data, "n") != asked_of(rules.data, "n"):
        said.append("`data` is not that of the rules; only its seed and `n` may differ")
    if recipe.evaluation is None or judged_by(recipe) != judged_by(rules):
        said.append("`evaluation` is not that of the rules in its `data` and `reward`")
    return said


def judged_by(recipe: Recipe) -> tuple[Any, Any]:
    """Return the settings of the held-out rows, and of the reward that judges the answers."""
    return recipe.evaluation.data, recipe.evaluation.reward


def asked_of(section: DataSection, *free: str) -> dict[str, Any]:
    """Return a section of data as plain values, without its seed and the arguments in ``free``."""
    plain = asdict(section)
    plain["arguments"] = {name: one for name, one in plain["arguments"].items() if name not in ("seed", *free)}
    return plain


def run(options: argparse.Namespace, seed: int) -> Record:
    """Train from random weights to the target, and return the record of the run. Raises SystemExit if the target is
    never reached."""
    whole = Clock()
    cold = Clock()
    learning = Clock()
    with whole.running(), tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        recipe = recipe_of(options, seed, folder)
        job = Job.resolve(recipe, lab_config(recipe))
        start = folder / "cold_start"
        make_start(job, start, cold, options.stock)
        trainer = trainer_of(job, recipe, start, options.stock)
        target = Target(job, trainer.processing_class, options.target)
        trainer.add_callback(target)
        trainer.remove_callback(PrinterCallback)
        with learning.running():
            trainer.train()
    learning = learning.without(target.clock)
    if not target.reached:
        raise SystemExit(
            f"{options.name}, seed {seed}: the target is not reached after {trainer.state.global_step} steps"
        )
    training = Clock(cold.wall + learning.wall, cold.cpu + learning.cpu)
    clocks = {"training": training, "cold_start": cold, "reinforcement": learning, "evaluations": target.clock}
    clocks["set_up"] = whole.without(training).without(target.clock)
    seconds = {name: clock.rounded() for name, clock in clocks.items()}
    return {"seed": seed, "steps": target.steps, "accuracy": target.found.value, "low": target.found.low, **seconds}


def make_start(job: Job, folder: Path, clock: Clock, stock: bool) -> None:
    """Train random weights on worked solutions, into ``folder``. ``clock`` counts the training alone."""
    model, tokenizer = load_model(job.model, job.config.seed)
    settings = {"seed": job.config.seed, "use_cpu": True, "bf16": False, "disable_tqdm": True}
    settings |= job.cold_start.arguments

    def timed(trainer: Any) -> None:
        trainer.remove_callback(PrinterCallback)
        with clock.running():
            trainer.train()

    if stock:
        rows = Dataset.from_list(worked_pairs(job.cold_rows))
        args = SFTConfig(output_dir=str(folder), report_to="none", save_strategy="no", **settings)
        trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        timed(trainer)
        trainer.save_model(str(folder))
    else:
        cold_start(model, tokenizer, job.cold_rows, folder, settings, train=timed)
        tokenizer.save_pretrained(folder)


def trainer_of(job: Job, recipe: Recipe, start: Path, stock: bool) -> Any:
    """Make the trainer of the reinforcement learning: the recipe's, or TRL's with the same objective."""
    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    how = {"reward_funcs": job.rewards, "train_dataset": job.rows, "processing_class": tokenizer}
    if not stock:
        return job.trainer(model=model, args=job.config, callbacks=job.arguments["callbacks"], **how)
    args = GRPOConfig(**stock_settings(recipe))
    return GRPOTrainer(model=model, args=args, **how)


def stock_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's settings as arguments of TRL's GRPOConfig, with its objective in TRL's settings. Raises
    SystemExit for a setting that TRL does not have."""
    settings = dict(recipe.arguments)
    if settings.pop("objective") != "dr_grpo":
        raise SystemExit("--stock needs `objective: dr_grpo`: it is put into TRL's settings")
    if unknown := sorted({*settings} - {*GRPOConfig.__dataclass_fields__}):
        raise SystemExit(f"--stock: TRL's GRPOConfig has no {', '.join(unknown)}")
    return settings | {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}


def entry(options: argparse.Namespace) -> Record:
    """Make all runs of an entry, and return its record: the runs, and on what machine, commit and date."""
    imports = time.time() - psutil.Process().create_time()  # seconds of this process so far
    load = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    print(f"{options.name}: {cores} cores, load {load:.2f}", flush=True)
    runs = []
    for seed in options.seeds:
        found = run(options, seed)
        print(f"{options.name}, seed {seed}: {found}", flush=True)
        runs.append(found)
    return {
        "entry": options.name,
        "recipe": options.recipe,
        "command": command_of(options),
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores,
        "machine": processor(),
        "load": round(load, 2),
        "imports": round(imports, 1),
        "runs": runs,
    }


def processor() -> str:
    """Return the processor's name, as Linux says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def git(*words: str) -> str:
    """Return what a git command prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def command_of(options: argparse.Namespace) -> str:
    """Return what follows ``python scripts/speedrun.py`` in the command that makes the entry."""
    words = ["--name", options.name]
    if options.recipe != BASE_LINE:
        words += ["--recipe", options.recipe]
    if options.stock:
        words.append("--stock")
    for key, value in options.set:
        words += ["--set", key, value]
    return shlex.join(words)


def refuse_entry(options: argparse.Namespace) -> None:
    """Raise SystemExit if the recipe, the target or the seeds break a rule, or if files differ from the last commit."""
    said = broken_rules(recipe_of(options, 0, Path("unused")))
    if options.target != TARGET:
        said.append(f"--target is {options.target}, and {TARGET} is the rules'")
    if options.seeds != [*SEEDS]:
        said.append(f"--seeds are {options.seeds}, and {[*SEEDS]} are the rules'")
    if git("status", "--porcelain", "--untracked-files=no", "--", ":!docs"):
        said.append("files differ from the last commit, which the record names: commit them first")
    if said:
        raise SystemExit(f"no entry: {'; '.join(said)}")


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--name", default="tried", help="of the entry; a record of that name is replaced")
    asked.add_argument("--recipe", default=BASE_LINE, help=f"default: {BASE_LINE}")
    asked.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of the recipe")
    asked.add_argument("--stock", action="store_true", help="train by TRL's own trainers")
    asked.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    asked.add_argument("--target", type=float, default=TARGET)
    asked.add_argument("--enter", action="store_true", help=f"into {RECORDS.name} and {PAGE.name}")
    asked.add_argument("--all", action="store_true", help=f"our entries, one after the other: {', '.join(OURS)}")
    asked.add_argument("--table", action="store_true", help=f"only {PAGE.name}, from {RECORDS.name}")
    return asked.parse_args(words)


def run_all(enter: bool) -> None:
    """Run our entries, each in a process of its own. Raises SystemExit, after the others, if one failed."""
    failed = []
    for name, words in OURS.items():
        command = [sys.executable, __file__, "--name", name, *words]
        if enter:
            command.append("--enter")
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def measure(options: argparse.Namespace) -> None:
    """Make an entry, and print its record; with ``--enter`` write it into the records and the page instead."""
    if options.enter:
        refuse_entry(options)
    hf_logging.set_verbosity_error()
    datasets.disable_progress_bars()
    found = entry(options)
    if not options.enter:
        print(json.dumps(found, indent=1))
        return
    records = entered(json.loads(RECORDS.read_text(encoding="utf-8")), found)
    write_whole_text(RECORDS, json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    write_table()


def write_table() -> None:
    """Write the table of all records into the page."""
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    write_whole_text(PAGE, page_with(PAGE.read_text(encoding="utf-8"), records))


def main() -> None:
    options = options_of()
    if options.all:
        run_all(options.enter)
    elif options.table:
        write_table()
    else:
        measure(options)


if __name__ == "__main__":
    main()
