"""`grpo-lab evaluate`: a saved model on held-out rows that the command line, or an earlier run, describes.

What decides a score is said with it, in the title and in `summary.json`: model, rows (every argument of their loader),
template, how answers are judged, limits and seed. `--like RUN` takes all of it from a run or a recipe, so that the two
scores are of one kind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.pipelines.held_out import HeldOut, held_out_like
from grpo_lab.recipe.rows import MADE, READ, every_argument, loader_arguments, loader_signature
from grpo_lab.recipe.sections import STRICT_ACCURACY, DataSection, EvaluationSection, RewardSection
from grpo_lab.recipe.yaml import parse_overrides
from grpo_lab.runs.folder import LOCK, OneWriter
from grpo_lab.settings import read
from grpo_lab.visible import visible

WORD_PROBLEMS = 500
"""Word problems that are made where neither `--n` nor `--limit` says how many."""
_ROWS = ("source", "split", "template")
"""Loader arguments with an option of their own."""
_TAKEN = (
    "seed",
    "mode",
    "model",
    "limit",
    "output",
    "batch_size",
    "n_samples",
    "temperature",
    "tokenizer",
    "overwrite",
)
"""Options of another meaning: a loader's argument of that name is `--data.NAME` only."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `grpo-lab evaluate`. Those without a value given are not in the namespace."""
    from grpo_lab.data.made import SPLITS
    from grpo_lab.data.prompts import TEMPLATES

    given: Any = {"default": argparse.SUPPRESS}
    parser.add_argument("model", help="folder or hub name")
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--data", help=f"{', '.join(READ)} or {', '.join(MADE)}, or module:attribute (or give --like)", **given
    )
    rows.add_argument(
        "--like", metavar="RUN", help="evaluate as this run, or recipe, does: its rows, reward, limits, seed"
    )
    rows.add_argument(
        "--source", help=f"hub name, folder, or jsonl or parquet file of the rows ({', '.join(READ)})", **given
    )
    rows.add_argument(
        "--split",
        help="default: test. gsm8k: train, test; humaneval: test; math, mbpp: of its source; file: the file's stem "
        "in a folder; "
        f"{', '.join(MADE)}: {', '.join(SPLITS)}",
        **given,
    )
    rows.add_argument("--template", help=f"prompt template: {', '.join(TEMPLATES)} (default: chat)", **given)
    rows.add_argument("--limit", type=_at_least_one, help="problems at most; of those that are made: how many", **given)
    for name, loaders in loader_arguments().items():
        if name not in _ROWS:
            words = [] if name in _TAKEN else [f"--{name.replace('_', '-')}"]
            of = f"of the loader{'s' * (len(loaders) > 1)} {', '.join(loaders)}"
            rows.add_argument(*words, f"--data.{name}", dest=f"data.{name}", metavar="VALUE", help=of, **given)
    _add_generation(parser.add_argument_group("generation and judging"), given)
    parser.add_argument(
        "--output", type=Path, help="new folder for per-problem outputs (parquet, jsonl) and summary.json"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier evaluation in the output folder")


def _add_generation(how: Any, given: Any) -> None:
    how.add_argument("--mode", choices=["strict", "lenient"], help="how answers are read (default: strict)", **given)
    how.add_argument("--max-new-tokens", type=int, help="default: 512", **given)
    how.add_argument("--batch-size", type=int, help="default: 64", **given)
    how.add_argument(
        "--n-samples", type=int, help="sampled completions a problem, besides greedy (default: 0)", **given
    )
    how.add_argument("--temperature", type=float, help="of the samples (default: 1.0)", **given)
    how.add_argument("--seed", type=int, help="of the samples (default: 0); the rows' is --data.seed", **given)
    how.add_argument("--tokenizer", help="another tokenizer's folder (default: the model's own)")


def run(known: argparse.Namespace) -> int:
    """Evaluate, print and, with `--output`, write. Returns the exit code; 130 after Ctrl-C, 75 after SIGTERM or
    SIGUSR1, each with what was answered kept.
    """
    plan = plan_of(known)
    with nullcontext() if known.output is None else claim_output(known.output, known.overwrite):
        if note := _unlike_its_run(known, plan.section.data):
            print(visible(f"note: {note}"))
        return _evaluate(known, plan)


def _evaluate(known: argparse.Namespace, plan: HeldOut) -> int:
    from grpo_lab.evaluation import EvaluationStopped, terminal_summary, write_report
    from grpo_lab.pipelines.held_out import evaluate_saved_model
    from grpo_lab.runs.stop import StoppedByUser, as_ctrl_c

    stopped = False
    with as_ctrl_c() as asked:
        try:
            result = evaluate_saved_model(
                known.model,
                plan.section,
                known.output,
                use_cpu=False,
                max_new_tokens=plan.max_new_tokens,
                seed=plan.seed,
                tokenizer=known.tokenizer,
            )
        except EvaluationStopped as stop:
            result, stopped = stop.result, True
            if not result.outcomes:
                return _ended(asked, StoppedByUser("nothing"))
        except KeyboardInterrupt as stop:
            return _ended(asked, stop)
    terminal_summary(None, result, title=title(known.model, plan))
    if known.output is not None:
        print(f"outcomes: {known.output}\nreport: {write_report(known.output)}")
    if stopped:
        where = (
            f"in {known.output}" if known.output is not None else "above (--output FOLDER keeps the answers themselves)"
        )
        return _ended(asked, StoppedByUser(f"the {len(result.outcomes):,} answers that were there: {where}"))
    return 0


def _ended(asked: list[str], stop: KeyboardInterrupt) -> int:
    """The exit code of an evaluation that a signal ended; Ctrl-C is the command line's."""
    from grpo_lab.runs.stop import EXIT_INTERRUPTED, StoppedByUser

    if not asked:
        raise stop
    kept = stop.what if isinstance(stop, StoppedByUser) else "nothing"
    print(f"grpo-lab: {asked[0]}: stopped; kept: {kept}", file=sys.stderr, flush=True)
    return EXIT_INTERRUPTED


def plan_of(known: argparse.Namespace) -> HeldOut:
    """Rows, judging and generation out of the options, and out of `--like` where they say nothing.

    Raises:
        ValueError: neither or both of `--data` and `--like`, an argument that the loader does not take, a bad value.
    """
    said = dict(vars(known))
    rows = {name.removeprefix("data."): _value(name, text) for name, text in said.items() if name.startswith("data.")}
    rows |= {name: said[name] for name in ("split", "source") if name in said}
    if ("data" in said) == (known.like is not None):
        raise ValueError(
            "give one of --data (file, gsm8k, math, humaneval, mbpp, one that is made: word_problems, …) and --like "
            "(a run's folder, or a recipe)"
        )
    if known.like is not None:
        plan = held_out_like(known.like)
        data = plan.section.data
        written: dict[str, Any] = {
            "loader": data.loader,
            "template": data.template,
            "limit": data.limit,
            **data.arguments,
        }
    else:
        judge = {**READ, **MADE}.get(said["data"], STRICT_ACCURACY.name)
        reward = STRICT_ACCURACY if judge == STRICT_ACCURACY.name else RewardSection(judge)
        plan = HeldOut(EvaluationSection(DataSection(said["data"], "chat"), reward, batch_size=64), 512, 0)
        written = {"loader": said["data"]}
        if "split" in loader_signature(said["data"], "--data").parameters:
            written["split"] = "test"
        if said["data"] in MADE:
            written["n"] = said.get("limit", WORD_PROBLEMS)
    written = {**written, **rows, **{name: said[name] for name in ("template", "limit") if name in said}}
    section = replace(plan.section, data=with_every_argument(read(DataSection, written, "--data")))
    generation: Any = {name: said[name] for name in ("batch_size", "n_samples", "temperature") if name in said}
    section = replace(section, **generation)
    if "mode" in said:
        section = _judged(section, said["mode"])
    if "max_new_tokens" in said:
        section = replace(section, max_new_tokens=said["max_new_tokens"])
    return HeldOut(section, section.max_new_tokens or plan.max_new_tokens, said.get("seed", plan.seed))


def _judged(section: EvaluationSection, mode: str) -> EvaluationSection:
    if section.reward.name != "accuracy":
        raise ValueError(
            f"--mode is of the reward `accuracy`, and --like names {section.reward.name!r}; leave --mode out"
        )
    return replace(section, reward=replace(section.reward, arguments={**section.reward.arguments, "mode": mode}))


def with_every_argument(section: DataSection) -> DataSection:
    """``section`` with its loader's defaults written out. ValueError for arguments that the loader does not take."""
    parameters = loader_signature(section.loader, "--data").parameters
    allowed = [name for name in parameters if name != "template"]
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in section.arguments:
        if name not in allowed and not anything:
            option = f"--{name}" if name in _ROWS else f"--data.{name}"
            raise ValueError(f"{option}: the loader {section.loader!r} takes {', '.join(allowed)}")
    return replace(section, arguments=every_argument(section))


def title(model: str, plan: HeldOut) -> str:
    """Everything that a score depends on, in one line."""
    from grpo_lab.pipelines.in_words import told

    section = plan.section
    limits = f"max_new_tokens {plan.max_new_tokens}, seed {plan.seed}"
    return (
        f"{model} on {told(replace(section.data, arguments=_telling(section.data)))}, {told(section.reward)}, {limits}"
    )


def _telling(section: DataSection) -> dict[str, Any]:
    """The arguments that a reader needs: none that is off (None, False, a share of 0.0)."""
    off = (None, False, 0.0)
    return {
        name: value
        for name, value in section.arguments.items()
        if not any(value is one or (isinstance(value, float) and value == one) for one in off)
    }


def claim_output(folder: Path, overwrite: bool) -> OneWriter:
    """The output folder, made and this process's now, so that nothing is computed in vain.

    Raises:
        ValueError: it cannot be made, is in use, or holds a whole evaluation (without ``overwrite``) or something else.
    """
    if folder.is_dir() and any(folder.iterdir()):
        strangers = sorted(file.name for file in folder.iterdir() if file.name.removesuffix(".part") not in _FILES)
        if strangers:
            raise ValueError(
                f"--output {str(folder)!r} holds something else ({', '.join(strangers[:5])}); choose a new folder"
            )
        if not overwrite and _is_whole(folder):
            raise ValueError(
                f"--output {str(folder)!r} holds an evaluation already; choose another, or give --overwrite"
            )
    try:
        return OneWriter(folder).take()
    except OSError as error:
        raise ValueError(
            f"--output {str(folder)!r} cannot be written to ({error.strerror}); choose another folder"
        ) from error


_FILES = ("summary.json", "outcomes.jsonl", "outcomes.parquet", "report.html", LOCK)


def _is_whole(folder: Path) -> bool:
    """Neither killed, which leaves its lock, nor asked to stop."""
    from grpo_lab.evaluation import EvaluationResult

    there = (folder / "summary.json").is_file() and not (folder / LOCK).exists()
    return there and EvaluationResult.read(folder).stopped is None


def _unlike_its_run(known: argparse.Namespace, data: DataSection) -> str:
    """In words, that the model's own run was evaluated on other rows; empty where it was not, or has no record."""
    if known.like is not None or not (Path(known.model) / "recipe.yaml").is_file():
        return ""
    try:
        own = with_every_argument(held_out_like(known.model).section.data)
    except ValueError:
        return ""
    if own.loader != data.loader:
        return ""
    there: Mapping[str, Any] = {**own.arguments, "template": own.template, "limit": own.limit}
    here: Mapping[str, Any] = {**data.arguments, "template": data.template, "limit": data.limit}
    other = [f"{name} {there[name]}" for name in there if there[name] is not None and there[name] != here.get(name)]
    return (
        f"this model's own run was evaluated with {', '.join(other)}; --like {known.model} takes that" if other else ""
    )


def _value(name: str, text: str) -> Any:
    """An option's text as YAML; `1,3` is a list, as `[1, 3]` is."""
    listed = name in ("data.steps", "data.families") and not text.startswith("[")
    return next(iter(parse_overrides([f"--{name}={f'[{text}]' if listed else text}"]).values()))


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
