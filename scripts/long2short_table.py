"""Four ways to shorter answers on the misreading lab's model, in one table (2 CPU cores, some minutes).

    python scripts/long2short_table.py --model runs/lab-misreading --output runs/long2short_table

The lab's answers have hardly any length to lose, so a long-winded model is made first: supervised training on
worked solutions in which every line of working is written one to three times. Then, from that one model and one set of
samples: shortest rejection sampling, DPO, SimPO, and the average of its weights with those of the shortest-SFT model.
Numbers: strict accuracy and mean tokens of right answers on held-out problems, greedy and sampled, with 95% intervals.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

DATA = {"loader": "word_problems", "steps": [1, 3], "largest": 20, "template": "chat"}
TOKENS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model of recipes/lab/misreading (cold start or trained)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--problems", type=int, default=400, help="problems to sample on")
    parser.add_argument("--held-out", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    long = options.output / "long"
    if not (long / "config.json").is_file():
        make_long_winded(options.model, long, options.seed)
    results = table(options, long)
    (options.output / "table.json").write_text(json.dumps(results, indent=1))
    print(as_markdown(results))


def make_long_winded(model: str, folder: Path, seed: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grpo_lab.data import word_problems
    from grpo_lab.trainer.supervised.cold_start import cold_start

    rows = word_problems(6000, seed=seed, split="cold_start", steps=(1, 3), largest=20, template="chat")
    rng = random.Random(seed)
    rows = rows.map(lambda row: {"worked_solution": repeated(row["worked_solution"], rng)})
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        "max_steps": 150,
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "max_length": 256,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "seed": seed,
        "logging_steps": 50,
    }
    cold_start(AutoModelForCausalLM.from_pretrained(model), tokenizer, rows, folder, settings)
    tokenizer.save_pretrained(folder)


def repeated(solution: str, rng: random.Random) -> str:
    """Every line of working one to three times, the answer once."""
    lines = solution.split("\n")
    return "\n".join([line for line in lines[:-1] for _ in range(rng.randint(1, 3))] + lines[-1:])


TRAINING = {
    "max_steps": 60, "lr_scheduler_type": "linear", "max_length": 256, "bf16": False, "logging_steps": 20,
    "gradient_checkpointing": False,
}  # fmt: skip
PAIRS = {"ratio": 1.5, "pairs_per_problem": 4}


def ways(output: Path) -> dict[str, dict[str, Any]]:
    """way → what its recipe says besides `recipe_of`."""
    few = {**TRAINING, "per_device_train_batch_size": 16}
    return {
        "shortest_sft": {"training": {**TRAINING, "learning_rate": 5e-4, "per_device_train_batch_size": 32}},
        "dpo": {"pairs": PAIRS, "training": {**few, "learning_rate": 2e-5, "beta": 0.1}},
        "simpo": {"pairs": PAIRS, "training": {**few, "learning_rate": 5e-5, "beta": 2.0, "simpo_gamma": 0.5}},
        "merge": {"short_model": str(output / "shortest_sft"), "alpha": 0.5},
    }


def recipe_of(method: str, options: argparse.Namespace, long: Path) -> dict[str, Any]:
    """What all ways have in common: the model, the samples, the evaluation."""
    data = {} if method == "merge" else {"data": {**DATA, "n": options.problems, "split": "train"}}
    return {
        "name": method,
        "method": method,
        "model": {"path": str(long)},
        **data,
        "n_samples": 8,
        "temperature": 1.0,
        "max_completion_length": TOKENS,
        "batch_size": 256,
        "seed": options.seed,
        "use_cpu": True,
        "samples": str(options.output / "samples.jsonl"),
        "evaluation": {
            "data": {**DATA, "n": options.held_out, "split": "test"},
            "max_new_tokens": TOKENS,
            "n_samples": 4,
            "batch_size": 250,
            "before": method == "shortest_sft",
        },
        "output_dir": str(options.output / method),
    }


def table(options: argparse.Namespace, long: Path) -> list[dict[str, Any]]:
    from grpo_lab.pipelines.long2short import long2short
    from grpo_lab.pipelines.long2short_recipe import long2short_recipe_from

    results: list[dict[str, Any]] = []
    for method, settings in ways(options.output).items():
        recipe = long2short_recipe_from({**recipe_of(method, options, long), **settings})
        done = long2short(recipe, overwrite=True)
        if done.before is not None:
            results.append(row_of("before", 0, done.before))
        results.append(row_of(method, done.rows, done.after))
    return results


def row_of(name: str, rows: int, result: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"way": name, "rows": rows}
    for kind, outcomes in (("greedy", result.greedy), ("sampled", result.sampled)):
        right = [outcome.tokens for outcome in outcomes if outcome.correct]
        row[f"{kind}_tokens_right"] = fmean(right) if right else None
        row[f"{kind}_accuracy"] = len(right) / len(outcomes)
    row["greedy_interval"] = [result.accuracy.low, result.accuracy.high]
    return row


def as_markdown(results: list[dict[str, Any]]) -> str:
    lines = [
        "| way | training rows | greedy: right | tokens of right answers | sampled: right | tokens of right answers |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        low, high = row["greedy_interval"]
        tokens = {
            kind: "–" if (n := row[f"{kind}_tokens_right"]) is None else f"{n:.1f}" for kind in ("greedy", "sampled")
        }
        lines.append(
            f"| {row['way']} | {row['rows'] or '–'} | {row['greedy_accuracy']:.1%} [{low:.1%}, {high:.1%}] | {tokens['greedy']} "
            f"| {row['sampled_accuracy']:.1%} | {tokens['sampled']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
