"""``grpo-lab quickstart | train | curate | long2short | rounds | evaluate | serve | report | compare``: the command line."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.pipelines.named_objects import working_folder_on_path
from grpo_lab.visible import VisibleFormatter, visible

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
WITH_OVERRIDES = ("quickstart", "train", "curate", "long2short", "rounds")
TRACEBACK = "show the traceback of a user error or of Ctrl-C"
VERBOSE = (
    "print all that the libraries print; without it their bars, metrics and notes are reduced to a line of progress"
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. A mistake of the user is one line on stderr and exit code 2, a lost server 3, steps that could not be
    taken because of NaN (``guard.max_bad_steps``) 4.

    A command that was asked to stop (SIGTERM, the stop file, ``max_hours``) and can be gone on with: 75, Ctrl-C: 130; a
    checkpoint, or any file on a full disk, that could not be written: 74.
    """
    working_folder_on_path()
    parser = _parser()
    known, rest = parser.parse_known_args(words)
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(VisibleFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr])
    for noisy in (
        "httpx",
        "datasets",
        "transformers",
        "absl",
        *(() if known.verbose else ("vllm",)),
    ):  # said at its import
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if rest and known.command not in WITH_OVERRIDES:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(known.run(known, rest) or 0)
    except (ValueError, ConnectionError, FloatingPointError) as error:  # a mistake, a server that is gone, NaN
        if known.traceback:
            raise
        _say(f"error: {error}")
        return 2 if isinstance(error, ValueError) else 4 if isinstance(error, FloatingPointError) else 3
    except OSError as error:
        if known.traceback or error.errno not in NO_ROOM:
            raise
        _say(f"error: {error}. Mend that; what was written before stays, and can be gone on with")
        return 74
    except KeyboardInterrupt as stop:
        if known.traceback:
            raise
        return _stopped(known, rest, stop)


def _say(words: str) -> None:
    """One line on stderr; what it quotes of files and models is made visible."""
    print(visible(f"grpo-lab: {words}"), file=sys.stderr, flush=True)


def _stopped(known: argparse.Namespace, rest: list[str], stop: KeyboardInterrupt) -> int:
    """Ctrl-C: one line with what was kept, of the first process only. 130 is what shells give for it."""
    if int(os.environ.get("RANK", "0")) == 0:
        from grpo_lab.pipelines.kept import kept

        print(file=sys.stderr)
        _say(f"stopped; kept: {kept(known, rest, stop)}")
    return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-lab", description="Reinforcement learning from verifiable rewards, on TRL."
    )
    from grpo_lab import __version__

    parser.add_argument("--version", action="version", version=f"grpo-lab {__version__}")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_pipelines(commands)
    _add_measuring(commands)

    from grpo_lab.rollouts import serve

    server = commands.add_parser("serve", help="a vLLM server at 127.0.0.1 for `vllm_mode: server`")
    serve.add_arguments(server)
    server.set_defaults(run=_serve)
    for command in commands.choices.values():  # after the command, too; SUPPRESS: its default is the one above
        command.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=TRACEBACK)
    for name in (*WITH_OVERRIDES, "evaluate"):
        command = commands.choices[name]
        command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=VERBOSE)
    return parser


def _add_pipelines(commands: Commands) -> None:
    """What a recipe describes: quickstart, train, curate, long2short, rounds."""
    quick = commands.add_parser(
        "quickstart",
        help="learn to work answers out, on two CPU cores without network",
        description="Train by the recipe quickstart/dr_grpo.yaml that the package brings; any setting can be overridden with "
        "--key value, such as --max_steps 2 --cold_start.max_steps 5.",
    )
    train = commands.add_parser("train", help="run a recipe; any setting can be overridden with --key value")
    train.add_argument("--config", required=True, help="a recipe, see recipes/")
    for command, run in ((quick, _quickstart), (train, _train)):
        command.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
        command.add_argument("--overwrite", action="store_true", help="replace an earlier run in the output folder")
        command.add_argument("--resume", action="store_true", help="go on with this run from its last checkpoint")
        command.set_defaults(run=run)

    curate = commands.add_parser(
        "curate", help="choose training rows: pass rates and filters; goes on where it was killed"
    )
    curate.add_argument(
        "--config", required=True, help="a recipe, see recipes/kimi/curate.yaml; override with --key value"
    )
    curate.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
    curate.add_argument("--overwrite", action="store_true", help="sample anew in a folder that holds a curation")
    curate.set_defaults(run=_curate)

    short = commands.add_parser("long2short", help="make a model right in fewer tokens: SFT, DPO, SimPO or merging")
    short.add_argument("--config", required=True, help="a recipe, see recipes/kimi/long2short_*.yaml")
    short.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
    short.add_argument("--overwrite", action="store_true", help="replace an earlier run in the output folder")
    short.set_defaults(run=_long2short)

    again = commands.add_parser(
        "rounds",
        help="sample, choose, train, again: RFT, Online RFT, Expert Iteration, DPO, SimPO; goes on where it was killed",
    )
    again.add_argument("--config", required=True, help="a recipe, see recipes/quickstart/expert_iteration.yaml")
    again.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
    again.add_argument("--overwrite", action="store_true", help="begin anew in a folder that holds such a run")
    again.set_defaults(run=_rounds)


def _add_measuring(commands: Commands) -> None:
    """What looks at what is there: evaluate, report, compare."""
    from grpo_lab.pipelines import evaluate

    measured = commands.add_parser(
        "evaluate", help="greedy and sampled accuracy of a model with a 95%% interval", allow_abbrev=False
    )
    evaluate.add_arguments(measured)
    measured.set_defaults(run=_evaluate)

    report = commands.add_parser("report", help="write the HTML page of a run, or of a comparison, anew")
    report.add_argument("run_dir", type=Path, help="output folder of any command, or the page of `compare`")
    report.set_defaults(run=_report)

    compare = commands.add_parser("compare", help="two or more runs side by side: table, curves, paired test")
    compare.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folders; the first is the baseline")
    compare.add_argument(
        "--output", type=Path, default=Path("comparison.html"), help="the page (default: comparison.html)"
    )
    compare.set_defaults(run=_compare)


def _quickstart(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.shipped import QUICKSTART, shipped_recipe

    known.config = str(shipped_recipe(QUICKSTART))
    print(f"recipe: {known.config}", flush=True)
    return _train(known, rest)


def _train(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.recipe import read_recipe
    from grpo_lab.pipelines.recipe_file import parse_overrides

    recipe = read_recipe(known.config, parse_overrides(rest))
    if known.dry_run:
        from grpo_lab.pipelines.dry_run import dry_run

        dry_run(recipe)
        return 0
    from grpo_lab.pipelines.train import train

    return _to_its_end(known, lambda: train(recipe, overwrite=known.overwrite, resume=known.resume))


def _to_its_end(known: argparse.Namespace, run: Callable[[], Any]) -> int:
    """``run``, and the exit code where it was asked to stop, or could not keep what it had."""
    from grpo_lab.pipelines.console_noise import quiet
    from grpo_lab.pipelines.interruption import EXIT_INTERRUPTED, EXIT_NOT_WRITTEN, Interrupted
    from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten

    try:
        with quiet(known.verbose):
            run()
    except Interrupted as stop:
        if int(os.environ.get("RANK", "0")) == 0:  # every process has it
            _say(str(stop))
        return EXIT_INTERRUPTED
    except CheckpointNotWritten as error:
        if known.traceback:
            raise
        _say(f"error: {error}")
        return EXIT_NOT_WRITTEN
    return 0


def _curate(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.curation_recipe import read_curation_recipe
    from grpo_lab.pipelines.recipe_file import parse_overrides

    recipe = read_curation_recipe(known.config, parse_overrides(rest))
    if known.dry_run:
        from grpo_lab.pipelines.plan import plan_of_curation, show

        show(recipe.name, plan_of_curation(recipe, known.overwrite))
        return 0
    from grpo_lab.pipelines.curate import curate

    return _to_its_end(known, lambda: curate(recipe, overwrite=known.overwrite))


def _long2short(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.long2short_recipe import read_long2short_recipe
    from grpo_lab.pipelines.recipe_file import parse_overrides

    recipe = read_long2short_recipe(known.config, parse_overrides(rest))
    if known.dry_run:
        from grpo_lab.pipelines.plan import plan_of_long2short, show

        show(recipe.name, plan_of_long2short(recipe, known.overwrite))
        return 0
    from grpo_lab.pipelines.long2short import long2short

    return _to_its_end(known, lambda: long2short(recipe, overwrite=known.overwrite))


def _rounds(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.recipe_file import parse_overrides
    from grpo_lab.pipelines.rounds_recipe import read_rounds_recipe

    recipe = read_rounds_recipe(known.config, parse_overrides(rest))
    if known.dry_run:
        from grpo_lab.pipelines.plan import show
        from grpo_lab.pipelines.rounds_plan import plan_of_rounds

        show(recipe.name, plan_of_rounds(recipe, known.overwrite))
        return 0
    from grpo_lab.pipelines.run_rounds import run_rounds

    return _to_its_end(known, lambda: run_rounds(recipe, overwrite=known.overwrite))


def _serve(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.rollouts import serve

    return serve.serve(serve.options_from(known), start_timeout=known.start_timeout, log=known.log)


def _evaluate(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.pipelines import evaluate
    from grpo_lab.pipelines.console_noise import quiet

    with quiet(known.verbose):
        return evaluate.run(known)


def _report(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.evaluation import write_report

    print(f"report: {write_report(known.run_dir)}")
    return 0


def _compare(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.evaluation.comparison import compare
    from grpo_lab.evaluation.comparison_page import print_comparison, write_comparison

    found = compare(known.runs)
    page = write_comparison(found, known.output)
    print_comparison(found)
    print(f"comparison: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
