"""Three ways from one student with one teacher, at equal generated tokens: SFT on the teacher's filtered samples,
on-policy distillation, and the student's own RL. Accuracy and pass@k, several seeds each.

    python scripts/compare_distillation.py                              # the recipe's student and teacher, made once
    python scripts/compare_distillation.py --student DIR --teacher DIR  # saved ones, of one vocabulary

The arms are stages of recipes/distillation/pipeline_quickstart.yaml, each run as a pipeline of its own; a seed changes
the problems, their order and the sampling. The teacher is asked as many problems as come to ``--tokens``, by the length
of its first answers; the other arms end with the step that reaches them. Killed anywhere, the same command goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import (
    Experiment,
    Found,
    Options,
    Record,
    carry_out,
    changes_asked,
    options_of_cell,
    parser,
)
from grpo_lab.labs.tables import draw, table
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.recipe.yaml import read_yaml

RECIPE = Path(__file__).resolve().parents[1] / "recipes/distillation/pipeline_quickstart.yaml"
ARMS = {
    "SFT on the teacher's samples": ("teacher_samples", "chosen", "imitated"),
    "on-policy distillation": ("distilled",),
    "own RL": ("own_rl",),
}
"""Arm → its stages; the last leaves the model that is measured."""
Entry = dict[str, Any]
Facts = Mapping[str, Mapping[str, Any]]


def main() -> None:
    words = parser(__doc__, "runs/compare/distillation")
    words.add_argument("--tokens", type=int, default=200_000, help="that each arm generates")
    words.add_argument("--student", type=Path, help="a saved model; default: the recipe's, made once")
    words.add_argument("--teacher", type=Path, help="likewise")
    options = words.parse_args()
    compared: Any = {"settings": settings_of, "result": lambda record: record["after"]["accuracy"]}
    carry_out(Experiment(list(ARMS), run, report, prepare, **compared), options)


def settings_of(arm: str, seed: int, options: Options) -> dict[str, Any] | None:
    """What a cell is made from; None: student and teacher are not made."""
    if not (options.folder / "shared.json").is_file():
        return None
    shared, entries = entries_of_cell(arm, seed, options)
    return {**options_of_cell(arm, seed, options), "models": shared["models"], "stages": entries}


def stages(options: Options, names: Sequence[str], given: Mapping[str, str]) -> list[Entry]:
    """Those entries of the recipe. ``given``: a stage that is not among them → the model that it would have left."""
    written = {one["name"]: json.loads(json.dumps(one)) for one in read_yaml(RECIPE)["stages"]}
    for key, value in changes_asked(options).items():  # `STAGE.KEY`
        name, _, rest = key.partition(".")
        put(written[name], rest, value)
    for one in written.values():
        for setting, wanted in list(one.get("inputs", {}).items()):
            if (before := wanted.partition(".")[0]) in given:
                del one["inputs"][setting]
                put(one, setting, given[before])
    return [written[name] for name in names]


def put(section: Entry, key: str, value: Any) -> None:
    """``value`` at a dotted ``key``."""
    first, _, rest = key.partition(".")
    if rest:
        put(section.setdefault(first, {}), rest, value)
    else:
        section[first] = value


def carried_out(entries: Sequence[Entry], folder: Path) -> Facts:
    return run_pipeline(pipeline_from({"name": folder.name, "output_dir": str(folder), "stages": list(entries)}))


def prepare(options: Options) -> None:
    """`shared.json`: student and teacher, what both can do, and how long the teacher's answers are."""
    given = {name: str(getattr(options, name)) for name in ("student", "teacher") if getattr(options, name)}
    made = [name for name in ("student", "teacher") if name not in given]
    entries = stages(options, [*made, "student_measured", "teacher_measured", "teacher_samples"], given)
    put(entries[-1], "data.n", 128)
    folder = options.folder / "shared"
    facts = carried_out(entries, folder)
    models = given | {name: str(folder / name / "model") for name in made}
    samples, measured = facts["teacher_samples"], {name: columns(facts[f"{name}_measured"]) for name in models}
    shared = {"models": models, "measured": measured, "tokens_a_sample": samples["tokens"] / samples["samples"]}
    write_whole_text(options.folder / "shared.json", json.dumps(shared, indent=1))


def entries_of_cell(arm: str, seed: int, options: Options) -> tuple[dict[str, Any], list[Entry]]:
    """What all cells share, and the stages of one."""
    shared = json.loads((options.folder / "shared.json").read_text())
    last = ARMS[arm][-1]
    entries = stages(options, [*ARMS[arm], f"{last}_measured"], shared["models"])
    for one in entries[:-1]:
        if one["stage"] != "select":
            put(one, "seed", seed)
        if "data" in one:
            put(one, "data.seed", seed)
        if one["stage"] == "sample":
            put(one, "data.n", round(options.tokens / shared["tokens_a_sample"] / one["n_samples"]))
        if one["stage"] == "distill":
            put(one, "tokens", options.tokens)
        if one["stage"] == "rl":
            one["callbacks"][0]["tokens"] = options.tokens
    return shared, entries


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    shared, entries = entries_of_cell(arm, seed, options)
    last = ARMS[arm][-1]
    facts = carried_out(entries, folder)
    after = {**columns(facts[f"{last}_measured"]), "generated tokens, k": generated(entries[0], facts, folder) / 1e3}
    return {"before": shared["measured"]["student"], "teacher": shared["measured"]["teacher"], "after": after}


def generated(first: Entry, facts: Facts, folder: Path) -> float:
    """Tokens that an arm has had written: its first stage says so, or the log of its training (a line a step)."""
    if first["stage"] != "rl":
        return float(facts[first["name"]]["tokens"])
    log = [json.loads(line) for line in (folder / first["name"] / "metrics.jsonl").read_text().splitlines()]
    return sum(row.get("completions/mean_length", 0.0) for row in log) * float(first["per_device_train_batch_size"])


def columns(measured: Mapping[str, Any]) -> dict[str, float]:
    """Of an evaluation's facts: greedy accuracy, and pass@k of its samples."""
    wanted = {"accuracy": "accuracy", "sampled_accuracy": "pass@1"}
    wanted |= {name: f"pass@{name[8:]}" for name in measured if name.startswith("pass_at_")}
    return {
        name: float(value["value"] if isinstance(value := measured[key], Mapping) else value)
        for key, name in wanted.items()
    }


def report(found: Found, options: Options) -> str:
    first = next(iter(found.values()))[0]
    teacher = ", ".join(f"{name} {value:.3f}" for name, value in first["teacher"].items())
    text = f"{table(found)}\n\nteacher: {teacher}"
    write_whole_text(options.folder / "table.md", text + "\n")
    curves = {arm: [passes(one["after"]) for one in runs] for arm, runs in found.items()}
    lines = {"(start)": [passes(first["before"])], "(teacher)": [passes(first["teacher"])], **curves}
    draw({"pass@k": lines}, options.folder / "pass_at_k.png", "k")
    return text


def passes(measured: Mapping[str, float]) -> list[tuple[float, float]]:
    return [(float(name[5:]), value) for name, value in measured.items() if name.startswith("pass@")]


if __name__ == "__main__":
    main()
