"""The sources' comparisons: every arm from one cold start, on the same problems, with the same number of completions.

    python scripts/compare_methods.py supervision   # RFT, Online RFT, GRPO with outcome and with process supervision
    python scripts/compare_methods.py trio          # SFT, Expert Iteration, GRPO
    python scripts/compare_methods.py critic        # Dr.GRPO, PPO, Kimi's mirror descent with/without optimizer reset
    python scripts/compare_methods.py all --jobs 2

Cold start (seed 0), problems and held-out problems are those of the recipe --task: the quick start's, or with
lab/chains/dr_grpo.yaml longer ones. Seeds change the problems and the sampling. Killed anywhere, the same command goes
on (a trainer's arm from its last checkpoint). An arm that two comparisons name runs once. Prints a table a comparison
and writes it, with its records and a figure, into --folder; and before the first run, how many seeds it needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import HeldOut, Point, at_tokens, points_of, points_of_rounds, smoothness

from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Experiment, Found, Options, Record, carry_out, changes_asked, parser
from grpo_lab.labs.tables import draw, markdown, spread
from grpo_lab.pipelines.train import shared_start, train
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.models import load_model
from grpo_lab.recipe.sections import Recipe, read_recipe
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs.differences import plain_settings

ROOT = Path(__file__).resolve().parents[1]
QUICK = "recipes/quickstart/dr_grpo.yaml"
ACCURACY = {"name": "accuracy", "mode": "strict"}
PROBLEMS, EACH = 32, 8
"""Problems of a batch of completions, and completions of each."""


@dataclass(frozen=True)
class Arm:
    """A recipe with changes. ``updates``: optimizer steps a batch of completions; ``rounds``: into how many rounds the
    batches are put."""

    recipe: str = QUICK
    changes: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 1
    rounds: int = 1
    trained_by: str = "trainer"


def _kimi(**changes: Any) -> Arm:
    two = {"per_device_train_batch_size": PROBLEMS * EACH // 2, "steps_per_generation": 2}
    return Arm(changes={"objective": {"name": "mirror_descent", "tau": 0.1}, **two, **changes}, updates=2)


ARMS: dict[str, Arm] = {
    "SFT": Arm(trained_by="solutions"),
    "RFT": Arm("recipes/quickstart/rft.yaml", trained_by="rounds"),
    "Online RFT": Arm("recipes/quickstart/online_rft.yaml", rounds=12, trained_by="rounds"),
    "Expert Iteration": Arm("recipes/quickstart/expert_iteration.yaml", rounds=3, trained_by="rounds"),
    "GRPO, outcome": Arm(changes={"objective": "grpo", "rewards": [ACCURACY]}),
    "GRPO, process": Arm(
        changes={
            "objective": {"name": "grpo", "advantage": "process"},
            "rewards": [ACCURACY, {"name": "equation_steps", "weight": 1.0}],
        }
    ),
    "Dr.GRPO": Arm(changes={"rewards": [ACCURACY]}),
    "PPO": Arm("recipes/quickstart/ppo.yaml", updates=4),
    "Kimi, reset": _kimi(reset_optimizer=True, rewards=[ACCURACY], learning_rate=2.0e-4),
    "Kimi, no reset": _kimi(rewards=[ACCURACY], learning_rate=3.0e-4),
}
COMPARISONS = {
    "supervision": ("RFT", "Online RFT", "GRPO, outcome", "GRPO, process"),
    "trio": ("SFT", "Expert Iteration", "GRPO, outcome"),
    "critic": ("Dr.GRPO", "PPO", "Kimi, reset", "Kimi, no reset"),
}


def main() -> None:
    words = parser(__doc__, "runs/compare/methods")
    words.add_argument("experiment", choices=[*COMPARISONS, "all"])
    words.add_argument("--task", default="quickstart/dr_grpo.yaml", help="recipe below recipes/, see above")
    words.add_argument("--steps", type=int, default=48, help=f"batches of {PROBLEMS} x {EACH} completions")
    words.add_argument("--every", type=int, default=5, help="batches from one held-out measurement to the next")
    words.add_argument("--held-out", type=int, default=300, help="held-out problems of a measurement")
    options = words.parse_args()
    chosen = COMPARISONS if options.experiment == "all" else {options.experiment: COMPARISONS[options.experiment]}
    arms = list(dict.fromkeys(arm for of_one in chosen.values() for arm in of_one))
    compared: Any = {
        "settings": settings_of,
        "start": lambda options: options.folder / "cold_start",
        "result": lambda record: record["points"][-1]["accuracy"],
        "problems": lambda _: options.held_out,
    }
    shown = Experiment(arms, run, lambda found, _: report(found, chosen, options.folder), make_start, **compared)
    carry_out(shown, options)


def task(options: Options) -> Recipe:
    return read_recipe(ROOT / "recipes" / options.task, changes_asked(options))


def of_task(options: Options, seed: int) -> dict[str, Any]:
    """The changes that put an arm's recipe on the task's problems."""
    given = task(options)
    data = {"loader": given.data.loader, "template": given.data.template, **given.data.arguments, "seed": seed}
    return {"data": data, "max_completion_length": longest(options)}


def longest(options: Options) -> int:
    """Tokens of a completion."""
    return int(task(options).arguments["max_completion_length"])


def settings_of(arm: str, seed: int, options: Options) -> dict[str, Any]:
    """What an arm is made from: its recipe and changes, on the task's problems."""
    shared = {name: getattr(options, name) for name in ("task", "steps", "every", "held_out", "set")}
    recipe = read_yaml(ROOT / ARMS[arm].recipe)
    cold_start = plain_settings(task(options))["cold_start"]
    return {**shared, **asdict(ARMS[arm]), "recipe": recipe, "cold_start": cold_start, **of_task(options, seed)}


def make_start(options: Options) -> None:
    recipe = task(options)
    shared_start(recipe.model, recipe.cold_start, options.folder / "cold_start")


def run(arm: str, seed: int, folder: Path, options: Options) -> Record:
    return {"points": TRAINED_BY[ARMS[arm].trained_by](ARMS[arm], seed, folder, options)}


def report(found: Found, chosen: Mapping[str, Sequence[str]], folder: Path) -> str:
    """A table, a figure and the points of each comparison, of what has been run."""
    texts = []
    for name, arms in chosen.items():
        if of_one := {arm: found[arm] for arm in arms if arm in found}:
            texts.append(f"{name}\n{table(of_one)}")
            write_whole_text(folder / f"{name}.md", table(of_one) + "\n")
            write_whole_text(folder / f"{name}.json", json.dumps(of_one, indent=1))
            draw_points(of_one, folder / f"{name}.png")
    return "\n\n".join(texts)


def by_trainer(arm: Arm, seed: int, output: Path, options: Options) -> list[Point]:
    """``grpo-lab train`` with a checkpoint at every measurement; goes on from the last one."""
    every = options.every * arm.updates
    changes = {**changes_asked(options), **of_task(options, seed), **arm.changes}
    changes["max_steps"] = options.steps * arm.updates
    changes |= {"model": {"path": str(options.folder / "cold_start")}, "cold_start": None, "evaluation": None}
    changes |= {"output_dir": str(output), "name": output.name, "seed": seed, "disable_tqdm": True}
    changes |= {"save_strategy": "steps", "save_steps": every, "save_total_limit": 1, "logging_steps": 1}
    watch = {"name": "arm_runs:HeldOut", "file": str(output / "points.jsonl"), "every": every}
    changes["callbacks"] = [{**watch, "data": held_out_rows(options), "max_new_tokens": longest(options)}]
    train(read_recipe(ROOT / arm.recipe, changes))
    return points_of(output)


def by_rounds(arm: Arm, seed: int, output: Path, options: Options) -> list[Point]:
    """``grpo-lab rounds``: the same number of completions, sampled in ``arm.rounds`` parts; goes on by itself."""
    from grpo_lab.pipelines.rounds import run_rounds
    from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from

    start = options.folder / "cold_start"
    changes = {"model": {"path": str(start)}, "cold_start": None, "evaluation": None, "output_dir": str(output)}
    changes |= {
        "seed": seed,
        **of_task(options, seed),
        "n_samples": EACH,
        "rounds.count": arm.rounds,
        "training.disable_tqdm": True,
    }
    changes |= {"rounds.questions": max(1, options.steps * PROBLEMS // arm.rounds), **arm.changes}
    changes |= {
        "training.save_strategy": "steps",
        "training.save_steps": options.every,
        "training.save_only_model": True,
    }
    run_rounds(rounds_recipe_from(read_yaml(ROOT / arm.recipe, changes), Path(arm.recipe).stem))
    return points_of_rounds(output, start, held_out_rows(options), longest(options))


def by_solutions(arm: Arm, seed: int, output: Path, options: Options) -> list[Point]:
    """TRL's SFT on the problems' own worked solutions: a teacher's, nothing is generated."""
    from grpo_lab.trainer.supervised.methods import cold_start

    recipe = read_recipe(ROOT / arm.recipe, {**changes_asked(options), **of_task(options, seed)})
    model, tokenizer = load_model(
        read_recipe(ROOT / QUICK, {"model": {"path": str(options.folder / "cold_start")}}).model, seed
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "points.jsonl").unlink(missing_ok=True)
    watch = HeldOut(str(output / "points.jsonl"), options.every, held_out_rows(options), longest(options))
    settings = {
        "per_device_train_batch_size": 64,
        "learning_rate": 5.0e-4,
        "lr_scheduler_type": "linear",
        "adam_beta2": 0.95,
    }
    settings |= {"max_steps": options.steps, "max_length": 256, "gradient_checkpointing": False, "logging_steps": 1}
    settings |= {"seed": seed, "use_cpu": True, "bf16": False, "disable_tqdm": True}
    cold_start(model, tokenizer, load_rows(recipe.data), output, settings, [watch])
    return points_of(output)


TRAINED_BY: dict[str, Callable[..., list[Point]]] = {
    "trainer": by_trainer,
    "rounds": by_rounds,
    "solutions": by_solutions,
}


def held_out_rows(options: Options) -> dict[str, Any]:
    section = task(options).evaluation
    assert section is not None
    return {
        "loader": section.data.loader,
        "template": section.data.template,
        **section.data.arguments,
        "n": options.held_out,
    }


def table(found: Found) -> str:
    """One line an arm; mean ± 95% interval over seeds (Student's t), and the seeds."""
    curves = {arm: [run["points"] for run in runs] for arm, runs in found.items()}
    totals = [max(points[-1]["tokens"] for points in runs) for runs in curves.values()]
    shared = min((total for total in totals if total), default=math.nan)  # no seed of the thriftiest arm has more
    heads = ["arm", "seeds", "held-out accuracy at the end", f"after {shared / 1e3:,.0f} k generated tokens"]
    heads += ["generated tokens, k", "unsteadiness, points²", "seconds of training", "memory, MiB"]
    rows = [["(start)", "–", spread([next(iter(curves.values()))[0][0]["accuracy"]]), *["–"] * (len(heads) - 3)]]
    for arm, runs in curves.items():
        figures = [
            spread([points[-1]["accuracy"] for points in runs]),
            spread([at_tokens(points, shared) for points in runs]),
            f"{fmean(points[-1]['tokens'] for points in runs) / 1e3:,.0f}",
            f"{fmean(smoothness(points[len(points) // 2 :]) for points in runs):.1f}",
            f"{fmean(points[-1]['seconds'] for points in runs):.0f}",
            f"{fmean(run['memory_mib'] for run in found[arm]):.0f}",
        ]
        rows.append([arm, str(len(runs)), *figures])
    return markdown(heads, rows)


def draw_points(found: Found, path: Path) -> None:
    """Held-out accuracy over steps and over generated tokens, in which a method that generates all its tokens first has
    learned nothing until then."""
    most = max(run["points"][-1]["tokens"] for runs in found.values() for run in runs)
    steps, tokens = {}, {}
    for arm, runs in found.items():
        curves = [run["points"] for run in runs]
        steps[arm] = [[(one["step"], one["accuracy"]) for one in points] for points in curves]
        if curves[0][-1]["tokens"]:
            tokens[arm] = [[(one["tokens"], one["accuracy"]) for one in points] for points in curves]
        else:
            tokens[f"{arm} (generates nothing)"] = [
                [(at, points[-1]["accuracy"]) for at in (0, most)] for points in curves
            ]
    panels = {"held-out accuracy over optimizer steps": steps, "held-out accuracy over generated tokens": tokens}
    draw(panels, path, "", stairs=True)


if __name__ == "__main__":
    main()
