"""Four ways to shorter answers on the misreading lab's model, in one table (2 CPU cores, some minutes).

    python scripts/long2short_table.py --model runs/lab-misreading

The lab's answers have hardly any length to lose, so a long-winded model is made first: supervised training on
worked solutions in which every line of working is written one to three times. Then, from that one model and one set of
samples: shortest rejection sampling, DPO, SimPO, and the average of its weights with those of the shortest-SFT model.
Numbers: strict accuracy and mean tokens of right answers on held-out problems, greedy and sampled, with 95% intervals.
"""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Experiment, Found, Options, Record, carry_out, parser, record_file
from grpo_lab.labs.tables import table
from grpo_lab.pipelines.train import made_once

DATA = {"loader": "word_problems", "steps": [1, 3], "largest": 20, "template": "chat"}
TOKENS = 120
TRAINING = {
    "max_steps": 60, "lr_scheduler_type": "linear", "max_length": 256, "bf16": False, "logging_steps": 20,
    "gradient_checkpointing": False,
}  # fmt: skip
PAIRS = {"ratio": 1.5, "pairs_per_problem": 4}


def main() -> None:
    words = parser(__doc__, "runs/long2short_table", seeds=[0])
    words.add_argument("--model", required=True, help="a model of recipes/lab/misreading (cold start or trained)")
    words.add_argument("--problems", type=int, default=400, help="problems to sample on")
    words.add_argument("--held-out", type=int, default=250)
    options = words.parse_args()
    if options.jobs > 1:
        words.error("--jobs: the ways share the first one's samples, and the merge takes its model")
    ways = Experiment(list(WAYS), run, report, make_long_winded_once, settings=settings_of)
    carry_out(ways, options)


def make_long_winded_once(options: Options) -> None:
    for seed in options.seeds:
        folder = options.folder / f"long-{seed}"
        settings = {"model": options.model, "seed": seed, "training": TRAINING}
        made_once(folder, settings, lambda at=folder, seed=seed: make_long_winded(options.model, at, seed))


def settings_of(method: str, seed: int, options: Options) -> dict[str, Any]:
    """What a way is made from; `model` counts by what it holds."""
    recipe = recipe_of(method, seed, Path("."), options)
    return {**recipe, **WAYS[method], "long_winded": {"model": options.model, "training": TRAINING}}


def make_long_winded(model: str, folder: Path, seed: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_lab.data import word_problems
    from grpo_lab.trainer.supervised.methods import cold_start

    rows = word_problems(6000, seed=seed, split="cold_start", steps=(1, 3), largest=20, template="chat")
    rng = random.Random(seed)
    rows = rows.map(lambda row: {"worked_solution": repeated(row["worked_solution"], rng)})
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        **TRAINING, "max_steps": 150, "per_device_train_batch_size": 32, "learning_rate": 1e-3, "use_cpu": True,
        "seed": seed, "logging_steps": 50,
    }  # fmt: skip
    cold_start(AutoModelForCausalLM.from_pretrained(model), tokenizer, rows, folder, settings)
    tokenizer.save_pretrained(folder)


def repeated(solution: str, rng: random.Random) -> str:
    """Every line of working one to three times, the answer once."""
    lines = solution.split("\n")
    return "\n".join([line for line in lines[:-1] for _ in range(rng.randint(1, 3))] + lines[-1:])


FEW = {**TRAINING, "per_device_train_batch_size": 16}
WAYS: dict[str, dict[str, Any]] = {
    "shortest_sft": {"training": {**TRAINING, "learning_rate": 5e-4, "per_device_train_batch_size": 32}},
    "dpo": {"pairs": PAIRS, "training": {**FEW, "learning_rate": 2e-5, "beta": 0.1}},
    "simpo": {"pairs": PAIRS, "training": {**FEW, "learning_rate": 5e-5, "beta": 2.0, "simpo_gamma": 0.5}},
    "merge": {"alpha": 0.5},
}
"""Way → what its recipe says besides ``recipe_of``."""


def recipe_of(method: str, seed: int, output: Path, options: Options) -> dict[str, Any]:
    """What all ways have in common: the model, the samples, the evaluation. The merge averages with what was trained on
    the shortest."""
    data: dict[str, Any] = {"data": {**DATA, "n": options.problems, "split": "train"}}
    if method == "merge":
        data = {"short_model": str(record_file(options.folder, "shortest_sft", seed).parent)}
    return {
        "name": method,
        "method": method,
        "model": {"path": str(options.folder / f"long-{seed}")},
        **data,
        "n_samples": 8,
        "temperature": 1.0,
        "max_completion_length": TOKENS,
        "batch_size": 256,
        "seed": seed,
        "use_cpu": True,
        "samples": str(options.folder / f"samples-{seed}.jsonl"),
        "evaluation": {
            "data": {**DATA, "n": options.held_out, "split": "test"},
            "max_new_tokens": TOKENS,
            "n_samples": 4,
            "batch_size": 250,
            "before": method == "shortest_sft",
        },
        "output_dir": str(output),
    }


def run(method: str, seed: int, output: Path, options: Options) -> Record:
    from grpo_lab.pipelines.long2short import long2short, long2short_recipe_from

    done = long2short(
        long2short_recipe_from({**recipe_of(method, seed, output, options), **WAYS[method]}), overwrite=True
    )
    before = {} if done.before is None else {"before": figures(done.before, 0)}
    return {"after": figures(done.after, done.rows), **before}


def figures(result: Any, rows: int) -> dict[str, float]:
    found = {"training rows": rows, "95% from": result.accuracy.low, "to": result.accuracy.high}
    for kind, outcomes in (("greedy", result.greedy), ("sampled", result.sampled)):
        right = [outcome.tokens for outcome in outcomes if outcome.correct]
        found[f"{kind}: right"] = len(right) / len(outcomes)
        found[f"{kind}: tokens of right answers"] = fmean(right) if right else float("nan")
    return found


def report(found: Found, options: Options) -> str:
    write_whole_text(options.folder / "table.md", table(found) + "\n")
    return table(found)


if __name__ == "__main__":
    main()
