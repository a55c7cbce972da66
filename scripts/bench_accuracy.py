"""Time to accuracy: the quick start from its cold start, stock TRL against ours, and what each part of ours gives.

    python scripts/bench_accuracy.py                          # two idle cores, about 90 minutes
    python scripts/bench_accuracy.py --arms stock ours        # in pieces: what is recorded is not trained again
    python scripts/bench_accuracy.py --at-most 2              # two more runs
    python scripts/bench_accuracy.py --at-most 0              # only the tables, the figure and results.json
    python scripts/bench_accuracy.py --tiny                   # a check that it runs

Printed are the search for a tuning, a table of all runs, and stock's time over ours. The records, ``results.json`` and
``accuracy.png`` are written to ``runs/bench_accuracy``.

Arms:

- ``stock``: ``trl.GRPOTrainer``, with the same objective in its settings.
- ``ours``: ``LabTrainer`` as it is.
- ``update off``, ``generate stock``, ``share_prompts off``: ours with one part off.
- ``synchronous`` and ``overlapped``: ours with a vLLM server on the last core, and the trainer on the first.
- ``uncorrected``, which runs only if ``--arms`` names it: overlapped, and the stale completions are weighed as if the
  present policy had made them.

All arms begin from the same cold start; a seed changes the order of the problems and the sampling.

Clock: it runs from the beginning of training to the end of a step. Before that the model, the reward's worker and the
server are started, and the server has answered a batch. Weights are copied on the way (1.5 MB) and evaluated after the
training, all by the same generator, so that a server cannot work ahead while the trainer evaluates.

Tuning: ``stock`` and ``ours`` each try the same learning rates and numbers of updates of a batch (TRL's
``num_iterations``; a step is an update), on a seed that is not measured. Of those that end within two points of the
arm's best, the one is taken that first reaches 90% of stock's best final accuracy. The other arms take the tuning of
ours; those with a server make one update of each batch.

Target of the measured runs: 90% of the mean of stock's final accuracies, each of which is the mean of the last three
evaluations. A run has reached it at its first evaluation at or above it.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accuracy_tables import SERVED, SHARE, TUNED, Point, chosen, final, in_all, main_table, overlap_table, told
from bench_overlap import serve
from bench_step import RECIPE, built, started, training_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging as hf_logging
from trl import GRPOTrainer

from grpo_lab import LabTrainer
from grpo_lab.evaluation import Interval, evaluate
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import Experiment, Found, Options, Record, changes_asked, parser, records, run_experiment
from grpo_lab.labs.tables import draw, markdown
from grpo_lab.recipe import build
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.sections import DataSection, RewardSection
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import read

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ours": {},
    "update off": {"update": "off"},
    "generate stock": {"rollout": {"generate": "stock"}},
    "share_prompts off": {"update": {"share_prompts": "off"}},
    "synchronous": {"rollout": {"overlap": 0}},
    "overlapped": {"rollout": {"overlap": 1}},
    "uncorrected": {"rollout": {"overlap": 1}},
}
ONE_UPDATE = (*SERVED, "uncorrected")
ABLATION = ("update off", "generate stock", "share_prompts off")


class Clock(TrainerCallback):  # type: ignore[misc]
    """Callback that notes the seconds of training and copies the weights: before the first step, after each of the
    first ``dense`` steps, and then after every ``every``-th."""

    def __init__(self, every: int, dense: int) -> None:
        self.every = every
        self.dense = dense
        self.began = 0.0
        self.taken: list[tuple[int, float, dict[str, torch.Tensor]]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        self._take(0, 0.0, model)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        step = state.global_step
        if step <= self.dense or step % self.every == 0 or step == state.max_steps:
            self._take(step, time.perf_counter() - self.began, model)

    def _take(self, step: int, seconds: float, model: Any) -> None:
        weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
        self.taken.append((step, seconds, weights))


def tuning(rate: float, updates: int) -> str:
    """Return the name of a tuning: the learning rate, and the number of updates of each batch if it is not 1."""
    return f"{rate:g}" if updates == 1 else f"{rate:g} x{updates}"


def cell(arm: str, tuned: str, steps: int) -> str:
    """Return the name of a run without its seed: arm, tuning and number of steps. `run` reads them from it."""
    return f"{arm} {tuned.split(' ')[0] if arm in ONE_UPDATE else tuned} {steps} steps"


def run(name: str, seed: int, folder: Path, options: Options) -> Record:
    """Train once and evaluate the copied weights; return the record. Its ``wall_seconds`` are those from the loading of
    the model to the end of the training."""
    words = re.fullmatch(r"(.+?) (\d\S*)(?: x(\d+))? (\d+) steps", name)
    assert words is not None
    arm, rate, updates, steps = words.groups()
    settings = {**changes_asked(options), **ARMS[arm]}
    settings |= {"learning_rate": float(rate), "max_steps": int(steps), "seed": seed}
    settings["num_iterations"] = int(updates or 1)
    clock = Clock(options.every, options.dense)
    start = started(options.start, options.tiny)
    with ExitStack() as stack:
        served = arm in ONE_UPDATE
        if served:
            folder.mkdir(parents=True, exist_ok=True)
            context = json.loads((start / "config.json").read_text())["max_position_embeddings"]
            server = serve(start, folder / "server.log", options.port, context)
            stack.callback(server.stop)
            settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.options.base_url}
            settings |= {"vllm_importance_sampling_mode": "token_truncate"}
            torch.set_num_threads(1)
        rows = training_rows()
        kind = GRPOTrainer if arm == "stock" else LabTrainer
        settings["output_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
        if served:  # a server's first batch takes many times as long as the others
            built(kind, start, rows, **settings | {"max_steps": 1, "learning_rate": 0.0}).train()
        began = time.perf_counter()
        trainer = built(kind, start, rows, **settings)
        trainer.add_callback(clock)
        if arm == "uncorrected":
            trainer.vllm_importance_sampling_correction = False  # as a setting it is refused together with `overlap`
        trainer.train()
        wall = time.perf_counter() - began
    began = time.perf_counter()
    points = evaluated(clock, start, options.problems)
    evaluations = (time.perf_counter() - began) / len(points)
    print(f"{name}, seed {seed}: {wall:.1f} s, an evaluation {evaluations:.2f} s", flush=True)
    return {"points": points, "wall_seconds": wall, "threads": torch.get_num_threads(), **asked(options)}


def asked(options: Options) -> dict[str, Any]:
    """Return the options that all runs recorded in a folder must share."""
    shared = {name: getattr(options, name) for name in ("every", "dense", "problems", "tiny")}
    return {**shared, "set": changes_asked(options)}


def held_out(model: Any, tokenizer: Any, rows: Any, reward: Any, max_new_tokens: int) -> Interval:
    """Return the share of ``rows`` that the model's greedy answers get right, with its 95% interval (Wilson)."""
    model.eval()
    result = evaluate(
        model, tokenizer, rows, reward=reward, max_new_tokens=max_new_tokens, batch_size=256, progress=False
    )
    assert result.accuracy is not None
    return result.accuracy


def evaluated(clock: Clock, start: Path, problems: int) -> list[Point]:
    """Return the greedy, strictly judged accuracy of all weights that the clock has copied, on ``problems`` of the
    recipe's held-out problems."""
    recipe = read_yaml(RECIPE)
    rows = load_rows(read(DataSection, recipe["evaluation"]["data"] | {"n": problems}, "evaluation.data"))
    reward = build.build_reward(RewardSection("accuracy", arguments={"mode": "strict"}))
    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    found = []
    for step, seconds, weights in clock.taken:
        model.load_state_dict(weights)
        accuracy = held_out(model, tokenizer, rows, reward, recipe["max_completion_length"])
        found.append({"step": step, "seconds": seconds, "accuracy": accuracy.value})
    return found


def search(options: Options) -> tuple[dict[str, str] | None, Found]:
    """Return arm → its tuning, and the test runs by which they were chosen. None in place of the tunings: some test
    runs have still to be made. With a single tuning to try there is no search."""
    asked = [tuning(rate, updates) for updates in options.updates for rate in options.rates]
    if len(asked) == 1:
        return dict.fromkeys(TUNED, asked[0]), {}
    steps = options.search_steps or options.steps
    tried = {(arm, one): cell(arm, one, steps) for arm in TUNED for one in asked}
    found = carried_out(list(tried.values()), [options.search_seed], options)
    if missing := sorted({*tried.values()} - {*found}):
        print(f"nothing is chosen yet; of the search are missing: {', '.join(missing)}")
        return None, found
    tests = {key: found[name][0] for key, name in tried.items()}
    taken, target = chosen(tests)
    rows = [
        [arm, tried, *told(one, target)[:3], "taken" if taken[arm] == tried else ""]
        for (arm, tried), one in tests.items()
    ]
    print(f"\nsearch: seed {options.search_seed}, {steps} steps, target {target:.3f} (90% of stock's best)")
    print(
        markdown(
            ["arm", "rate, updates of a batch", "steps to target", "seconds to target", "final accuracy", ""], rows
        )
    )
    return taken, found


def carried_out(names: Sequence[str], seeds: Sequence[int], options: Options) -> Found:
    """Return the records of the runs ``names``. Missing ones are made first, at most ``--at-most`` of them in all calls
    together. Raises SystemExit if some failed."""
    own = argparse.Namespace(**{**vars(options), "seeds": list(seeds), "arms": None})
    before = recorded(names, seeds, options)
    try:
        run_experiment(experiment(names), own)
    finally:
        found = recorded(names, seeds, options)
        if options.at_most is not None:
            options.at_most -= sum(map(len, found.values())) - sum(map(len, before.values()))
    return found


def experiment(names: Sequence[str]) -> Experiment:
    """Return the runs ``names`` as a lab's experiment, which runs and records each in a process of its own."""

    def report(found: Found, options: Options) -> str:
        return f"recorded: {sum(map(len, found.values()))} runs"

    return Experiment(names, run, report, settings=settings_of, start=lambda arm, options: Path(options.start))


def settings_of(name: str, seed: int, options: Options) -> dict[str, Any]:
    """Return everything that a run is made from; rate, updates and steps are in its name."""
    arm = next(arm for arm in sorted(ARMS, key=len, reverse=True) if name.startswith(f"{arm} "))
    return {**asked(options), "name": name, "arm": ARMS[arm], "recipe": read_yaml(RECIPE)}


def recorded(names: Sequence[str], seeds: Sequence[int], options: Options) -> Found:
    """Return the records of the runs ``names`` that the folder has. Raises SystemExit if they are of other options."""
    found = records(names, argparse.Namespace(folder=options.folder, seeds=seeds))
    for name, one in ((name, one) for name, runs in found.items() for one in runs):
        if (seen := {key: one.get(key) for key in asked(options)}) != asked(options):
            where = f"take another --folder than {options.folder}"
            raise SystemExit(f"{name}, seed {one['seed']}, is of {seen}, and {asked(options)} is asked for: {where}")
    return found


def report(found: Found, searched: Found, taken: Mapping[str, str], options: Options) -> None:
    """Print the tables, and write results.json and accuracy.png."""
    target = SHARE * fmean(map(final, found["stock"])) if "stock" in found else None
    if target is None:
        print("\nno target: `stock` has no measured run yet")
    else:
        stock = ", ".join(str(one["seed"]) for one in found["stock"])
        print(f"\ntunings: {taken}; target {target:.4f}: 90% of stock's final accuracy (mean of seeds {stock})\n")
        print(f"{main_table(found, target)}\n\n{in_all(found, target)}")
    if text := overlap_table(found):
        print(f"\n{text}")
    lines = {
        arm: [[(at["seconds"], at["accuracy"]) for at in one["points"]] for one in of] for arm, of in found.items()
    }
    panels = {
        "stock and ours": TUNED[::-1],
        "one part off": ("ours", *ABLATION),
        "a vLLM server": (*SERVED, "uncorrected"),
    }
    shown = {title: {arm: lines[arm] for arm in arms if arm in lines} for title, arms in panels.items()}
    shown = {title: arms for title, arms in shown.items() if arms}
    if shown:
        draw(shown, options.folder / "accuracy.png", "seconds of training", target=target)
    result = {**asked(options), "taken": taken, "target": target, "search": searched, "runs": found}
    write_whole_text(options.folder / "results.json", json.dumps(result, indent=1))


def options_of(words: argparse.ArgumentParser) -> Options:
    """Return the options of the command line. Raises SystemExit for an unknown arm, or if the seed of the search is
    among those that are measured."""
    words.add_argument("--steps", type=int, default=100)
    words.add_argument("--every", type=int, default=5, help="steps from one evaluation to the next")
    words.add_argument("--dense", type=int, default=20, help="until this step after each: the target is met early")
    words.add_argument("--problems", type=int, default=500, help="held-out ones of an evaluation")
    words.add_argument(
        "--rates", type=float, nargs="+", default=[3e-4, 1e-3], help="one, with one of --updates: there is no search"
    )
    words.add_argument("--updates", type=int, nargs="+", default=[1, 2, 4], help="of each batch; searched, too")
    words.add_argument("--search-seed", type=int, default=100)
    words.add_argument("--search-steps", type=int, help="default: --steps")
    words.add_argument("--ablation-seeds", type=int, nargs="+", help="of the arms with a part off; default: --seeds")
    words.add_argument("--start", type=Path, default=Path("runs/bench_step/start"), help="made where it is not there")
    words.add_argument("--port", type=int, default=8765, help="of the server")
    words.add_argument("--tiny", action="store_true", help="a smoke: two steps, 20 problems, one seed, one rate")
    options = words.parse_args()
    if options.tiny:
        options.steps = 2
        options.every = 1
        options.problems = 20
        options.seeds = options.seeds[:1]
        options.folder = options.folder / "tiny"
        options.rates = options.rates[:1]
        options.updates = options.updates[:1]
    options.arms = options.arms or [arm for arm in ARMS if arm != "uncorrected"]
    if unknown := sorted({*options.arms} - {*ARMS}):
        raise SystemExit(f"--arms {', '.join(unknown)}: there are {', '.join(ARMS)}")
    if options.search_seed in options.seeds:
        raise SystemExit(
            f"--search-seed {options.search_seed} is among --seeds: rates are chosen on a seed of their own"
        )
    return options


def main() -> None:
    options = options_of(parser(__doc__, "runs/bench_accuracy"))
    hf_logging.set_verbosity_error()
    if options.run_one is not None:
        run_experiment(experiment([]), options)
        return
    started(options.start, options.tiny)
    taken, searched = search(options)
    if taken is None:
        return
    names = {arm: cell(arm, taken["stock" if arm == "stock" else "ours"], options.steps) for arm in ARMS}
    failed = []
    for arms, seeds in ((set(ARMS) - {*ABLATION}, options.seeds), (ABLATION, options.ablation_seeds or options.seeds)):
        if of_these := [names[arm] for arm in options.arms if arm in arms]:
            try:
                carried_out(of_these, seeds, options)
            except SystemExit as stop:
                failed.append(str(stop))
    found = recorded(list(names.values()), options.seeds, options)
    report({arm: found[name] for arm, name in names.items() if name in found}, searched, taken, options)
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
