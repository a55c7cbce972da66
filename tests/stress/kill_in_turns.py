"""Kill a run with tools by −9 in the middle of its turns, resume it each time, and see that no call was made twice.

    python tests/stress/kill_in_turns.py [--of repeatable effects] [--kills 5] [--steps 6] [--seed 0]
                                         [--folder runs/kill_in_turns]

``repeatable``: all tools may be repeated. The weights and the metrics log at the end are those of the run that nobody
killed, to the bit. ``effects``: the tool ``write`` may not. Each of its calls is in the effects' file once, or, if the
kill fell into it, at most once, and the policy was told so. In both no call is made twice but those that were on their
way. A call is named by the tokens before it, so that two of one name are one call.

The model is drawn at random, TRL's ``parse_response`` has a stand-in that calls tools in two of three turns, and a
checkpoint is written every second step. A kill falls into a generation, at a drawn moment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from kill_phases import VARIABLE, Lab, PhaseFile, digits
from kill_processes import adopt_orphans, begin, has_ended, kill, wait
from safetensors.numpy import load_file
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import parse_response as stock_parse

from grpo_lab import LabConfig
from grpo_lab.testing import tiny_model
from grpo_lab.turns.turn_settings import repeatable

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
KINDS = ("repeatable", "effects")
TIMES = ("step_time", "epoch_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss")
LONGEST = 300.0


@dataclass
class Told:
    """What was found: kills, those that fell into calls, calls made, and what is wrong."""

    kills: int = 0
    in_calls: int = 0
    calls: int = 0
    interrupted: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kills", type=int, default=5, help="of each")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kill_in_turns"))
    args = parser.parse_args()
    adopt_orphans()
    bad = []
    for kind in args.of:
        found = Killed(kind, args.folder.resolve() / kind, args.steps).until(args.kills, random.Random(args.seed))
        print(f"{kind}: {found}", flush=True)
        bad += found.wrong
    if bad:
        sys.exit("\n".join(bad))


class Killed:
    """A run in ``folder/killed``, beside the one that nobody killed, in ``folder/whole``."""

    def __init__(self, kind: str, folder: Path, steps: int) -> None:
        self.kind = kind
        self.folder = folder
        self.steps = steps
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.phases = PhaseFile(folder / "phase")
        model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, max_positions=2048, initializer_range=0.2)
        tokenizer.chat_template = TEMPLATE.read_text()
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    def until(self, kills: int, draw: random.Random) -> Told:
        told = Told()
        leader = self.start("whole")
        if wait(leader):
            sys.exit(f"the run that nobody kills failed: {self.log('whole')}")
        while True:
            leader = self.start("killed")
            more = told.kills < kills
            if more and self.came_to_generation(leader, draw.randint(1, 2)):
                time.sleep(draw.uniform(0, 0.6))
                if not has_ended(leader):
                    kill(leader)
                    told.kills += 1
                    told.in_calls += bool(self.on_their_way())
                    continue
            if wait(leader):
                sys.exit(f"a resumed run failed: {self.log('killed')}")
            if more:
                sys.exit(f"the run was over after {told.kills} kills: give it more --steps")
            return self.judged(told)

    def start(self, name: str) -> int:
        self.phases.write("starting", 0)
        place = self.folder / name
        told = {VARIABLE: str(self.phases.path)}
        return begin(lambda: train(self.kind, place, self.folder / "model", self.steps), 1, Path(f"{place}.log"), told)

    def came_to_generation(self, leader: int, times: int) -> bool:
        before = ""
        until = time.monotonic() + LONGEST
        while time.monotonic() < until and not has_ended(leader):
            now = self.phases.read()[0]
            times -= now == "generating" and before != now
            if times == 0:
                return True
            before = now
            time.sleep(0.0005)
        return False

    def on_their_way(self) -> list[str]:
        """The turns whose calls were begun and not answered when the run was killed."""
        begun = set()
        for file in (self.folder / "killed" / "_turns").glob("*.jsonl"):
            for line in file.read_bytes().splitlines(keepends=True)[1:]:
                if line.endswith(b"\n") and "turn" in (entry := json.loads(line)):
                    place = f"{file.name} {entry['key']} {entry['turn']}"
                    begun.discard(place) if "answers" in entry else begun.add(place)
        return sorted(begun)

    def judged(self, told: Told) -> Told:
        right, found = self.folder / "whole", self.folder / "killed"
        made = Counter((found / "effects").read_text().split())
        told.calls = len(made)
        told.interrupted = (found / "told").read_text().count("interrupted") if (found / "told").exists() else 0
        twice = [name for name, times in made.items() if times > 1]
        if self.kind == "repeatable":
            first, second = (load_file(one / "model.safetensors") for one in (right, found))
            if any(first[name].tobytes() != second[name].tobytes() for name in first):
                told.wrong.append("repeatable: the weights are not those of the run that nobody killed")
            if rows_of(right) != rows_of(found):
                told.wrong.append("repeatable: the metrics log is not that of the run that nobody killed")
            if set(made) != set((right / "effects").read_text().split()):
                told.wrong.append("repeatable: other calls were made than in the run that nobody killed")
            if len(twice) > told.kills * ROWS:
                told.wrong.append(f"repeatable: {len(twice)} calls were made twice in {told.kills} kills")
        elif twice:
            told.wrong.append(f"effects: {len(twice)} calls were made twice")
        prompts = [(row["step"], row["prompts"]) for row in map(json.loads, (found / "trained").open())]
        then = [(row["step"], row["prompts"]) for row in map(json.loads, (right / "trained").open())]
        if dict(prompts) != dict(then):
            told.wrong.append(f"{self.kind}: a prompt was trained on in another step, or not once")
        if list((found / "_turns").glob("*")):
            told.wrong.append(f"{self.kind}: journals were left behind")
        return told

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]


ROWS = 4


def train(kind: str, folder: Path, model: Path, steps: int) -> int:
    """Begin the run in ``folder``, or go on with it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    grpo_trainer.parse_response = calling
    write = tool_that_writes(folder / "effects")
    if kind == "repeatable":
        write = repeatable(write)
    settings: dict[str, Any] = {
        "output_dir": str(folder), "objective": "dr_grpo", "rollout": {"turns": {"max_turns": 4}},
        "per_device_train_batch_size": ROWS, "num_generations": 2, "max_completion_length": 900,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "max_steps": steps, "report_to": "none",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    settings["rollout"]["turns"]["turn_tokens"] = 8
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n} and {n * n}?"}] for n in range(64)]})

    def counted(prompts: list[Any], completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        texts = [json.dumps(one) for one in completions]
        row = {"step": trainer_state.global_step, "prompts": [one[-1]["content"] for one in prompts]}
        with (folder / "trained").open("a") as file:
            file.write(json.dumps(row) + "\n")
        with (folder / "told").open("a") as file:
            file.write("interrupted\n" * sum("was interrupted" in text for text in texts))
        return digits(texts)

    trainer = Lab(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=counted,
        args=LabConfig(**settings),
        train_dataset=rows,
        processing_class=tokenizer,
        tools=[write, look],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.save_model(str(folder))
    (folder / "log.json").write_text(json.dumps([row for row in trainer.state.log_history if "loss" in row]))
    return 0


def tool_that_writes(file: Path) -> Any:
    def write(name: str) -> str:
        """Write a name down, and count its letters.

        Args:
            name: what to write.

        Returns:
            How many letters are digits.
        """
        time.sleep(0.03)
        with file.open("a") as effects:
            effects.write(name + "\n")
        time.sleep(0.03)
        return f"{sum(letter.isdigit() for letter in name)} digits"

    return write


@repeatable
def look(name: str) -> str:
    """Look at a name.

    Args:
        name: what to look at.

    Returns:
        Its end.
    """
    time.sleep(0.02)
    return name[-2:]


def calling(tokenizer: Any, ids: list[int], prefix: list[int], **named: Any) -> dict[str, Any]:
    """TRL's ``parse_response``: two of three turns call tools, with a name that stands for the tokens before."""
    if "<tool_call>" in tokenizer.decode(ids):  # the template, which is checked before the first step
        return stock_parse(tokenizer, ids, prefix=prefix, **named)  # type: ignore[no-any-return]
    said: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    name = hashlib.sha256(json.dumps([*prefix, *ids]).encode()).hexdigest()[:16]
    if int(name, 16) % 3:
        named = ("write", "look")[: 1 + int(name, 16) % 2]
        calls = [{"type": "function", "function": {"name": one, "arguments": {"name": name}}} for one in named]
        said["tool_calls"] = calls
    return said


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = json.loads((folder / "log.json").read_text())
    return [{name: value for name, value in row.items() if name not in TIMES and "seconds" not in name} for row in rows]


if __name__ == "__main__":
    main()
