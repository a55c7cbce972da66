"""What the comparing scripts share: held-out accuracy on the way, tokens from the log.

A point, whatever trained the arm: optimizer steps, generated tokens, held-out accuracy and seconds of training until
then.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import pvariance
from typing import Any

from transformers import TrainerCallback

from grpo_lab.evaluation import evaluate
from grpo_lab.labs.experiment import GENERATED
from grpo_lab.labs.tables import until
from grpo_lab.recipe import build
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.sections import DataSection, RewardSection
from grpo_lab.settings import read

Point = dict[str, float]


class HeldOut(TrainerCallback):  # type: ignore[misc]
    """Greedy held-out accuracy before the first step and after every ``every``-th, into ``file`` (a line of JSON each).

    Reads the model and leaves it, and all random states, as they were. ``seconds`` are those of training, evaluations
    left out.
    """

    def __init__(self, file: str, every: int, data: Mapping[str, Any], max_new_tokens: int) -> None:
        self.file, self.every, self.max_new_tokens = Path(file), every, max_new_tokens
        self.rows = load_rows(read(DataSection, dict(data), "data"), "data")
        self.reward = build.build_reward(RewardSection("accuracy", arguments={"mode": "strict"}))
        self.began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        before = [one for one in read_lines(self.file) if one["step"] <= state.global_step]
        self.began = time.perf_counter() - (before[-1]["seconds"] if before else 0.0)
        if state.global_step == 0:
            self._measure(0, given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state.global_step, given)

    def _measure(self, step: int, given: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        accuracy = held_out(given["model"], given["processing_class"], self.rows, self.reward, self.max_new_tokens)
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, "accuracy": accuracy, "seconds": now - self.began}) + "\n")
        self.began += time.perf_counter() - now


def held_out(model: Any, tokenizer: Any, rows: Any, reward: Any, max_new_tokens: int) -> float:
    """Share of ``rows`` that a greedy answer gets right."""
    policy = getattr(model, "policy", model)  # beside a value model
    training = policy.training
    policy.eval()
    result = evaluate(
        policy, tokenizer, rows, reward=reward, max_new_tokens=max_new_tokens, batch_size=256, progress=False
    )
    policy.train(training)
    assert result.accuracy is not None
    return float(result.accuracy.value)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order: a run that was killed and goes on writes some again, and leaves half of
    one."""
    text = file.read_text() if file.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def points_of(folder: Path) -> list[Point]:
    """Points of a training: ``HeldOut``'s lines, with the tokens that ``metrics.jsonl`` says were generated until then;
    one that generates nothing says nothing of them, and has 0."""
    log = [(row["step"], row[GENERATED]) for row in read_lines(folder / "metrics.jsonl") if GENERATED in row]
    points = read_lines(folder / "points.jsonl")
    return [{**one, "tokens": max((n for step, n in log if step <= one["step"]), default=0)} for one in points]


def points_of_rounds(folder: Path, start: Path, data: Mapping[str, Any], max_new_tokens: int) -> list[Point]:
    """Points of `grpo-lab rounds`: the start, every checkpoint of every round's training, and each round's model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = load_rows(read(DataSection, dict(data), "data"), "data")
    reward = build.build_reward(RewardSection("accuracy", arguments={"mode": "strict"}))
    tokenizer = AutoTokenizer.from_pretrained(start)
    spent = json.loads((folder / "run.json").read_text())["seconds"]

    def point(model: Path, step: float, tokens: float, seconds: float) -> Point:
        loaded = AutoModelForCausalLM.from_pretrained(model)
        accuracy = held_out(loaded, tokenizer, rows, reward, max_new_tokens)
        return {"step": step, "tokens": tokens, "accuracy": accuracy, "seconds": seconds}

    found = [point(start, 0, 0, 0.0)]
    for line in [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]:
        number, steps = line["round"], line["steps"]
        if number == 0:
            continue
        model, before = folder / f"round-{number}" / "model", line["steps_total"] - steps
        sampling = sum(spent.get(f"round {number}, {part}", 0.0) for part in ("sample", "select"))
        began, training = found[-1]["seconds"] + sampling, spent.get(f"round {number}, train", 0.0)
        kept = sorted(int(one.name.split("-")[-1]) for one in model.glob("checkpoint-*"))
        for step in [*(one for one in kept if one < steps), steps]:
            at = model if step == steps else model / f"checkpoint-{step}"
            found.append(point(at, before + step, line["tokens_total"], began + training * step / steps))
    return found


def smoothness(points: Sequence[Point]) -> float:
    """Variance of the differences of accuracy from point to point, in points² (accuracy in %): 0 for a straight
    line."""
    values = [100 * point["accuracy"] for point in points]
    steps = [after - before for before, after in pairwise(values)]
    return pvariance(steps) if steps else math.nan


def at_tokens(points: Sequence[Point], tokens: float) -> float:
    """Accuracy that was there when ``tokens`` had been generated: of the last point with no more. NaN where fewer than
    95% of them were generated in all."""
    enough = points[-1]["tokens"] >= 0.95 * tokens
    return until([(one["tokens"], one["accuracy"]) for one in points], tokens) if enough else math.nan
