"""Real processes for `test_rounds_run`: everything is imported once, then each run is a fork of its own, which may be
killed with -9.

python rounds_worker.py RECIPE.json FOLDER     runs the recipe in FOLDER/whole, in FOLDER/killed with a kill in each
part of round 2, and in FOLDER/stopped with a request to stop in each of them, by another means each time
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl.trainer.sft_trainer  # noqa: F401

from grpo_lab.cli import main as main_of_grpo_lab
from grpo_lab.evaluation import result
from grpo_lab.pipelines.rounds import run_rounds
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.stages import held_out as measuring
from grpo_lab.stages import sample, select
from grpo_lab.stages import supervised as train
from grpo_lab.trainer.supervised import methods  # noqa: F401

ROUND = "round-2"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_sample() -> None:
    """Before the second batch of the round's questions; the first is on the disk."""
    made, calls = sample.ModelGenerator.written, []

    def written(self: Any, *given: Any, **more: Any) -> Any:
        if "round-1" in self.name:  # the model that samples in round 2
            calls.append(1)
            if len(calls) == 2:
                die()
        return made(self, *given, **more)

    sample.ModelGenerator.written = written  # type: ignore[method-assign]


def in_select() -> None:
    """The rows are written, the marker is not."""
    write = select.write_json_lines

    def written(path: Path, rows: Any) -> None:
        write(path, rows)
        if path.name == "rows.jsonl" and path.parent.name == ROUND:
            die()

    select.write_json_lines = written


def in_train() -> None:
    """After the first optimizer step."""

    def on_step_end(self: Any, *_: Any, **__: Any) -> None:
        if self.path.parent.name == ROUND:
            die()

    train.TrainingFacts.on_step_end = on_step_end  # type: ignore[method-assign]


def in_evaluate() -> None:
    """The outcomes are written, the summary is not."""
    write = result.write_json

    def written(path: Path, value: Any) -> None:
        if path.name == "summary.json" and ROUND in path.parts:
            die()
        write(path, value)

    result.write_json = written


KILLS: tuple[Callable[[], None], ...] = (in_sample, in_select, in_train, in_evaluate)


def asked_in_sample() -> None:
    """SIGTERM, twice, while the first batch is made: it is finished."""
    made = sample.ModelGenerator.written

    def sampled(self: Any, *given: Any, **named: Any) -> Any:
        if "round-1" in self.name:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return made(self, *given, **named)

    sample.ModelGenerator.written = sampled  # type: ignore[method-assign]


def asked_in_train() -> None:
    """SIGUSR1 in the second optimizer step, after its forward and backward."""

    def on_pre_optimizer_step(self: Any, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.path.parent.name == ROUND and state.global_step == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    train.TrainingFacts.on_pre_optimizer_step = on_pre_optimizer_step  # type: ignore[method-assign]


def asked_again_in_train() -> None:
    """Ctrl-C in the fourth, which is the second of the process that goes on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_substep_end(self: Any, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self.path.parent.name == ROUND and state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    train.TrainingFacts.on_step_begin = on_substep_end  # type: ignore[method-assign]


def asked_in_evaluate() -> None:
    """A stop file, seen within a second: the evaluation, which goes on for ever here, ends."""
    measure = measuring.measure_conditions

    def measured(model: str, *given: Any, **named: Any) -> Any:
        if ROUND in model:
            Path("out/STOP").touch()
            while True:
                time.sleep(0.01)
        return measure(model, *given, **named)

    measuring.measure_conditions = measured


STOPS: tuple[tuple[Callable[[], None], int], ...] = (
    (asked_in_sample, 75), (asked_in_train, 75), (asked_again_in_train, 130), (asked_in_evaluate, 75),
)  # fmt: skip


def child(folder: Path, written: dict[str, Any], prepare: Callable[[], None] | None) -> int:
    """A run in a process of its own; the signal that ended it, 0 for none."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        if prepare is not None:
            prepare()
        run_rounds(rounds_recipe_from(written))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"{prepare} ended by itself, with {os.WEXITSTATUS(status)}")
    return os.WTERMSIG(status)


def main() -> None:
    written, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    assert child(folder / "whole", written, None) == 0
    killed = folder / "killed"
    for kill in KILLS:
        assert child(killed, written, kill) == signal.SIGKILL, kill
        parts = sorted(path.stem for path in (killed / "out" / ROUND).glob("*.json"))
        print(kill.__name__, *parts, flush=True)
        if kill is in_sample:  # the torn end of a write
            file = killed / "out" / ROUND / "sampling.jsonl"
            file.write_bytes(file.read_bytes()[:-20])
    assert child(killed, written, None) == 0
    stopped = folder / "stopped"
    for ask, code in STOPS:
        assert commanded(stopped, sys.argv[1], ask) == code, ask
        place = stopped / "out" / ROUND
        kept = [f"{len(file.read_bytes().splitlines())} lines" for file in place.glob("sampling.jsonl")]
        kept += sorted(path.name for path in place.glob("stopped/*"))
        print(ask.__name__, *sorted(path.stem for path in place.glob("*.json")), *kept, flush=True)
        assert not (stopped / "out" / "STOP").exists()
    assert commanded(stopped, sys.argv[1], None) == 0


def commanded(folder: Path, recipe: str, prepare: Callable[[], None] | None) -> int:
    """`grpo-lab rounds` in a process of its own; its exit code."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        if prepare is not None:
            prepare()
        sys.stdout.flush()
        os.dup2(os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        code = main_of_grpo_lab(["rounds", "--config", recipe])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)


if __name__ == "__main__":
    main()
