"""Variants ("arms") of one recipe from one cold start, several seeds each: table, figure and records under
runs/compare/EXPERIMENT.

    python scripts/compare.py length       # Kimi's length reward: none, after a warm-up, large from step 0
    python scripts/compare.py language     # R1's language consistency: without and with, on a bilingual cold start
    python scripts/compare.py objective    # mirror descent with and without optimizer reset, against Dr.GRPO
    python scripts/compare.py process      # GRPO with outcome supervision, and with steps beside it (both weights 1)
    python scripts/compare.py sorting --seeds 0        # the sorting lab, paid by each of four rewards
    python scripts/compare.py reinforce --seeds 0      # 4 deltas x 3 losses, four updates a rollout
    python scripts/compare.py reinforce --gamma 0.98   # the same, discounted per token
    python scripts/compare.py curation --start DIR     # curated against random, prioritized against uniform
    python scripts/compare.py preference --start DIR   # paid by a preference model alone: frozen, and kept in training

DIR: the cold start of another run, for curation runs/lab-misreading/cold_start, for preference
runs/r1-pipeline-quickstart/second_sft/model, whose run has the preference model, too.

Seeds change the problems, their order and the sampling; the start is shared (seed 0). A finished arm is not repeated,
one that was broken off goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from arm_runs import shared_start

from grpo_lab.evaluation import EvaluationResult
from grpo_lab.io import write_whole_text
from grpo_lab.labs.experiment import (
    Experiment,
    Found,
    Options,
    Record,
    carry_out,
    changes_asked,
    draw,
    parser,
    spread,
    table,
)
from grpo_lab.labs.tokens import GENERATED, at_equal_tokens, over_tokens
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.rewards import EquationSteps, LanguageConsistencyReward, SortingReward
from grpo_lab.rewards.completion import completion_text

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
Changes = Mapping[str, Any]
Log = Sequence[Mapping[str, Any]]
"""Rows of ``metrics.jsonl``; empty before training."""
SAMPLES = "rewards/accuracy_reward/mean"


def accuracy(result: EvaluationResult, log: Log) -> dict[str, float]:
    """Greedy, on held-out problems."""
    assert result.accuracy is not None
    return {"accuracy": result.accuracy.value}


@dataclass(frozen=True)
class Arms:
    """Changes of one recipe.

    Args:
        recipe: below ``recipes/``.
        arms: name → changes, or a function of options and seed that makes them.
        curves: what is drawn over generated tokens: title → logged metric.
        columns: of the table: an evaluation of held-out problems, and the log until then → numbers.
        settings: changes of every arm.
        pairs: arms whose first columns are subtracted, seed by seed.
        panel: an arm → panel and label in the figure.
        prepare: besides the shared start.
        compared_by: the column, a share, that says how many seeds a difference needs.
    """

    recipe: str
    arms: Mapping[str, Changes | Callable[[Options, int], Changes]]
    curves: Mapping[str, str]
    columns: Callable[[EvaluationResult, Log], dict[str, float]] = accuracy
    settings: Changes = field(default_factory=dict)
    pairs: Sequence[tuple[str, str]] = ()
    panel: Callable[[str], tuple[str, str]] = lambda arm: ("", arm)
    prepare: Callable[[Options], None] = lambda options: None
    compared_by: str = "accuracy"

    def start(self, options: Options) -> Path:
        recipe = read_recipe(RECIPES / self.recipe, changes_asked(options))
        return options.start or shared_start(recipe, options.folder / "cold_start")

    def make_ready(self, options: Options) -> None:
        self.start(options)
        self.prepare(options)

    def run(self, arm: str, seed: int, folder: Path, options: Options) -> Record:
        changes = self.arms[arm]
        changes = changes(options, seed) if callable(changes) else changes
        settings = {"data.seed": seed, "disable_tqdm": True, **self.settings, **changes, **changes_asked(options)}
        settings |= {"model": {"path": str(self.start(options))}, "cold_start": None}
        settings |= {"output_dir": str(folder), "name": arm, "seed": seed}
        done = train(read_recipe(RECIPES / self.recipe, settings))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        log = [{name: value for name, value in row.items() if value is not None} for row in rows]
        assert done.after is not None
        return {
            "before": self.columns(done.before, []) if done.before else None,
            "after": self.columns(done.after, log),
            "curves": {one: [(row[GENERATED], row[one]) for row in log if one in row] for one in self.curves.values()},
        }

    def report(self, found: Found, options: Options) -> str:
        name = next(iter(next(iter(found.values()))[0]["after"]))
        lines = [table(found), "", at_equal_tokens(over_tokens(found, self.curves)), ""]
        for ours, theirs in self.pairs:
            both = zip(found.get(ours, []), found.get(theirs, []), strict=False)
            gains = [one["after"][name] - other["after"][name] for one, other in both]
            lines.append(f"{name}, {ours} - {theirs}, seed by seed: {spread(gains)}")
        text = "\n".join(lines).rstrip()
        write_whole_text(options.folder / "table.md", text + "\n")
        write_whole_text(options.folder / "records.json", json.dumps(found, indent=1))
        self.draw(found, options.folder / "curves.png")
        return text

    def draw(self, found: Found, path: Path) -> None:
        panels: dict[str, dict[str, Any]] = {}
        for title, lines in over_tokens(found, self.curves).items():
            for arm, curves in lines.items():
                panel, label = self.panel(arm)
                panels.setdefault(", ".join(filter(None, (panel, title))), {})[label] = curves
        draw(panels, path, "generated tokens")

    def problems(self, options: Options) -> int | None:
        held_out = read_recipe(RECIPES / self.recipe, {**self.settings, **changes_asked(options)}).evaluation
        return held_out.data.arguments.get("n") if held_out else None


def of_two_samples(result: EvaluationResult, log: Log) -> dict[str, float]:
    """Besides: accuracy, tokens of right answers and share of English words of the samples."""
    assert result.sampled_accuracy is not None
    right = [one.tokens for one in result.sampled if one.correct]
    shares = LanguageConsistencyReward("en")(completions=[one.completion for one in result.sampled])
    return accuracy(result, log) | {
        "sampled accuracy": result.sampled_accuracy.value,
        "tokens of right answers": fmean(right) if right else math.nan,
        "share of en words": fmean(share for share in shares if share is not None),
    }


def equation_steps(completions: list[Any], **_: Any) -> list[float | None]:
    """Share of a completion's judged lines that hold; a reward for the log of the arm that is not trained on it."""
    judged = [
        [s for s in EquationSteps().score_texts("", completion_text(one).split("\n")) if s is not None]
        for one in completions
    ]
    return [fmean(scores) if scores else None for scores in judged]


def of_equations(result: EvaluationResult, log: Log) -> dict[str, float]:
    texts = [completion_text(one.completion) for one in result.greedy]
    shares = [share for share in equation_steps(texts) if share is not None]
    counts = [sum(score is not None for score in EquationSteps().score_texts("", text.split("\n"))) for text in texts]
    return accuracy(result, log) | {
        "right equations": fmean(shares) if shares else math.nan,
        "equations a solution": fmean(counts),
        "accuracy of the samples, all steps": part_mean(log, SAMPLES, 1),
    }


def of_sorting(result: EvaluationResult, log: Log) -> dict[str, float]:
    """The greedy answers to held-out prompts, judged by every reward; dead groups of the last 20 steps."""
    numbers = [[int(word) for word in one.question.split()] for one in result.greedy]
    texts = [one.completion.strip() for one in result.greedy]
    scores = {
        f"{kind} (of {most})": fmean(SortingReward(kind)(completions=texts, numbers=numbers))
        for kind, most in SORTING.items()
    }
    dead = [row["groups/dead_share"] for row in log if "reward" in row][-20:]
    return {**scores, "dead groups": fmean(dead) if dead else math.nan}


def of_the_end(result: EvaluationResult, log: Log) -> dict[str, float]:
    return accuracy(result, log) | {"accuracy of the samples, last quarter": part_mean(log, SAMPLES, 4)}


def part_mean(log: Log, metric: str, part: int) -> float:
    """Mean of the last 1/``part`` of what was logged."""
    values = [row[metric] for row in log if metric in row]
    return fmean(values[-max(1, len(values) // part) :]) if values else math.nan


ACCURACY = {"name": "accuracy", "mode": "strict"}
OURS = {"rewards": [ACCURACY], "trainer": "LabTrainer"}
OF_SAMPLES = {"accuracy of the samples": SAMPLES}
SORTING = {"inclusion_ordering_multiset": 7, "inclusion_ordering": 7, "distance": 4, "exact": 1}
DELTAS = {"raw": "raw", "centred": "group_mean", "normalised": "group_zscore", "only the maximum": "group_max"}
LOSSES = {"naive": "reinforce", "unclipped": "unclipped", "clipped": "clipped"}
TOKENS_OF_RIGHT = {"tokens of right answers": "completions/mean_length_correct"}
FOUR_UPDATES = {"max_steps": 80, "num_iterations": 4, "per_device_train_batch_size": 128}
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 20, "save_total_limit": 1}


def menu(delta: str, loss: str) -> Callable[[Options, int], Changes]:
    """Deltas: raw, centred, divided by the group's deviation, its maximum only. Losses: −A log π, −ratio·A, clipped;
    old log-probs are the rollout's."""

    def changes(options: Options, seed: int) -> Changes:
        rule: Any = DELTAS[delta]
        if options.gamma is not None:
            rule = {"name": "returns", "gamma": options.gamma, "delta": rule}
        return {"objective": {"name": "reinforce", "surrogate": LOSSES[loss], "advantage": rule}}

    return changes


WORDS = {"loader": "word_problems", "steps": [1, 3], "largest": 20, "template": "chat"}
POOL, PROBLEMS = 600, 128
"""Problems to choose from, and those of ``random`` and ``curated``."""


def pools(options: Options) -> None:
    """A seed's problems with their pass rates: ten samples each of the start, which nobody counts as rollouts of a
    training."""
    from grpo_lab.pipelines.curate import curate, curation_recipe_from

    common = {
        "max_completion_length": 56,
        "batch_size": 320,
        "use_cpu": True,
        "filters": {"band": {"low": 0.0, "high": 1.0}},
    }
    for seed in options.seeds:
        data = {**WORDS, "n": POOL, "seed": seed, "split": "train"}
        of_seed = {"name": f"pool-{seed}", "model": {"path": str(options.start)}, "data": data, "seed": seed}
        curate(curation_recipe_from({**common, **of_seed, "output_dir": str(options.folder / f"pool-{seed}")}))


def chosen(arm: str) -> Callable[[Options, int], Changes]:
    """``curated``: problems with 0 < p < 1; ``random``: as many of the pool; the others have the whole pool."""

    def changes(options: Options, seed: int) -> Changes:
        import pyarrow.parquet as pq

        rows = pq.read_table(options.folder / f"pool-{seed}" / "all.parquet").to_pylist()
        if arm in ("random", "curated"):
            among = [row for row in rows if row["kept"] or arm == "random"]
            if len(among) < PROBLEMS:
                raise ValueError(
                    f"only {len(among)} of {POOL} problems are in the band, {PROBLEMS} are needed: take another start"
                )
            rows = random.Random(f"{arm}/{seed}").sample(among, PROBLEMS)
        file = options.folder / f"{arm}-{seed}.jsonl"
        lines = [
            json.dumps({name: value for name, value in row.items() if name not in ("kept", "dropped_by")})
            for row in rows
        ]
        write_whole_text(file, "\n".join(lines) + "\n")
        sampler = {"sampler": {"name": "prioritized"}} if arm == "prioritized" else {}
        return {"data": {"loader": "file", "source": str(file), "template": "chat"}, **sampler}

    return changes


def paid_by_preference(every: int | None) -> Callable[[Options, int], Changes]:
    """The preference model of a run of R1's quick start is the only reward; accuracy is its judge, and only logged."""

    def changes(options: Options, seed: int) -> Changes:
        run = options.start.parents[1]
        learned = {"model": str(run / "preference/model"), "comparisons": str(run / "pairs/rows.jsonl")}
        how = {"judge": "accuracy_reward", "every": every, "noise": 0.1, "steps": 20, "learning_rate": 3.0e-4}
        return {"rewards": [{**ACCURACY, "weight": 0.0}, {"name": "preference", **learned, **how, "seed": seed}]}

    return changes


def of_preference(result: EvaluationResult, log: Log) -> dict[str, float]:
    metrics = {"proxy": "rewards/preference_reward/mean", "right pairs, held out": "preference/pair_accuracy"}
    return of_the_end(result, log) | {f"{name}, last quarter": part_mean(log, one, 4) for name, one in metrics.items()}


EXPERIMENTS = {
    "length": Arms(
        "kimi/quickstart.yaml",
        {
            "no length reward": {**OURS, "reset_optimizer": True},
            "after a warm-up": {},
            "large from step 0": {"rewards": [ACCURACY, {"name": "kimi_length", "weight": 4.0}]},
        },
        OF_SAMPLES | TOKENS_OF_RIGHT,
        of_two_samples,
        {"evaluation.n_samples": 2},
    ),
    "language": Arms(
        "r1/quickstart.yaml",
        {
            "without": {"rewards": [ACCURACY, {"name": "language_consistency", "target": "en", "weight": 0.0}]},
            "with": {},
        },
        OF_SAMPLES | {"share of target-language words": "rewards/language_consistency_reward/mean"},
        of_two_samples,
        {"evaluation.n_samples": 2},
    ),
    "objective": Arms(
        "kimi/quickstart.yaml",
        {
            "mirror descent, reset": {**OURS, "reset_optimizer": True},
            "mirror descent": {**OURS, "learning_rate": 3.0e-4},
            "Dr.GRPO": {**OURS, "objective": "dr_grpo", "learning_rate": 3.0e-4},
        },
        OF_SAMPLES,
        of_two_samples,
        {"evaluation.n_samples": 2},
    ),
    "process": Arms(
        "quickstart/dr_grpo.yaml",
        {
            "outcome": {"objective": "grpo", "rewards": [ACCURACY, {"name": "compare:equation_steps", "weight": 0.0}]},
            "steps and outcome": {
                "objective": {"name": "grpo", "advantage": "process"},
                "rewards": [ACCURACY, {"name": "equation_steps", "weight": 1.0}],
            },
        },
        OF_SAMPLES | {"share of right equations": "rewards/equation_steps/mean"},
        of_equations,
        {"max_steps": 40, "per_device_train_batch_size": 128},
        pairs=[("steps and outcome", "outcome")],
    ),
    "sorting": Arms(
        "lab/sorting/dr_grpo.yaml",
        {
            paid: {"rewards": [{"name": "sorting", "kind": kind, "weight": float(kind == paid)} for kind in SORTING]}
            for paid in SORTING
        },
        {f"{kind} (of {most})": f"rewards/sorting_{kind}_reward/mean" for kind, most in SORTING.items()},
        of_sorting,
        compared_by="exact (of 1)",
    ),
    "reinforce": Arms(
        "quickstart/dr_grpo.yaml",
        {f"{delta}, {loss}": menu(delta, loss) for delta in DELTAS for loss in LOSSES},
        OF_SAMPLES,
        of_the_end,
        FOUR_UPDATES | CHECKPOINTS,
        panel=lambda arm: (arm.split(", ")[0], arm.split(", ")[1]),
    ),
    "curation": Arms(
        "lab/misreading/dr_grpo.yaml",
        {arm: chosen(arm) for arm in ("random", "curated", "uniform", "prioritized")},
        OF_SAMPLES,
        settings={"evaluation.data.n": 500, "evaluation.before": False, "max_steps": 60, "logging_steps": 10},
        pairs=[("curated", "random"), ("prioritized", "uniform")],
        prepare=pools,
    ),
    "preference": Arms(
        "r1/quickstart.yaml",
        {"frozen": paid_by_preference(None), "kept in training": paid_by_preference(5)},
        {
            "proxy": "rewards/preference_reward/mean",
            "true quality: accuracy": SAMPLES,
            "right pairs, held out": "preference/pair_accuracy",
        },
        of_preference,
        {
            "data.template": "chat",
            "data.steps": [1, 3],
            "evaluation.data.steps": [1, 3],
            "evaluation.before": True,
            "max_completion_length": 100,
            "max_steps": 80,
            "per_device_train_batch_size": 256,
        },
    ),
}


def main() -> None:
    words = parser(__doc__, "runs/compare")
    words.add_argument("experiment", choices=EXPERIMENTS)
    words.add_argument(
        "--task", help="another recipe below recipes/ than the experiment's, such as lab/chains/dr_grpo.yaml"
    )
    words.add_argument("--start", type=Path, help="model to start from; default: the recipe's cold start, made once")
    words.add_argument("--gamma", type=float, help="reinforce: discount of the return, per token")
    options = words.parse_args()
    options.folder /= options.experiment
    one = EXPERIMENTS[options.experiment]
    if options.start is None and options.experiment in ("curation", "preference"):
        words.error(f"{options.experiment}: give --start")
    one = replace(one, recipe=options.task or one.recipe)
    compared: Any = {"result": lambda record: record["after"][one.compared_by], "problems": one.problems}
    carry_out(Experiment(list(one.arms), one.run, one.report, one.make_ready, **compared), options)


if __name__ == "__main__":
    main()
