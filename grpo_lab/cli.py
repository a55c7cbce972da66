"""The command line: quickstart, train, curate, long2short, rounds, pipeline, evaluate, serve, report, compare."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.pipelines.named_objects import working_folder_on_path
from grpo_lab.visible import VisibleFormatter, visible

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

NOTHING = "nothing"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TRACEBACK = "show the traceback of a user error or of Ctrl-C"
VERBOSE = (
    "print all that the libraries print; without it their bars, metrics and notes are reduced to a line of progress"
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. A mistake of the user is one line on stderr and exit code 2, a lost server 3, steps that could not be
    taken because of NaN (``guard.max_bad_steps``) 4.

    A command that was asked to stop (SIGTERM, the stop file, ``max_hours``) and can be gone on with: 75, Ctrl-C: 130; a
    checkpoint, or any file on a full disk or of a folder that was removed meanwhile, that could not be written: 74.
    """
    working_folder_on_path()
    parser = _parser()
    known, rest = parser.parse_known_args(words)
    if words is None and getattr(known, "dry_run", False):
        sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]  # TRL loads it for seconds, and no engine starts
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
    if rest and known.command not in PIPELINES:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(known.run(known, rest) or 0)
    except (ValueError, ConnectionError, FloatingPointError) as error:  # a mistake, a server that is gone, NaN
        if known.traceback:
            raise
        said = " ".join(str(error).split()) if isinstance(error, ValueError) else error  # libraries write paragraphs
        _say(f"error: {said}")
        return 2 if isinstance(error, ValueError) else 4 if isinstance(error, FloatingPointError) else 3
    except OSError as error:
        from grpo_lab.runs.folder import FolderGone

        if known.traceback or not (isinstance(error, FolderGone) or error.errno in NO_ROOM):
            raise
        gone = isinstance(error, FolderGone)
        _say(f"error: {error}{'' if gone else '. Mend that; what was written before stays, and can be gone on with'}")
        return 74
    except KeyboardInterrupt as stop:
        if known.traceback:
            raise
        return _stopped(stop)


def _say(words: str) -> None:
    """One line on stderr; what it quotes of files and models is made visible."""
    print(visible(f"grpo-lab: {words}"), file=sys.stderr, flush=True)


def _stopped(stop: KeyboardInterrupt) -> int:
    """Ctrl-C: one line with what was kept, of the first process only. 130 is what shells give for it."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(file=sys.stderr)
        _say(f"stopped; kept: {getattr(stop, 'what', NOTHING)}")
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

    from grpo_lab.engines.vllm import serve

    server = commands.add_parser("serve", help="a vLLM server at 127.0.0.1 for `vllm_mode: server`")
    serve.add_arguments(server)
    server.set_defaults(run=_serve)
    for command in commands.choices.values():  # after the command, too; SUPPRESS: its default is the one above
        command.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=TRACEBACK)
    for name in (*PIPELINES, "evaluate"):
        command = commands.choices[name]
        command.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=VERBOSE)
    return parser


#: command → what it does, and the recipe to look at
PIPELINES = {
    "quickstart": ("learn to work answers out, on two CPU cores without network", ""),
    "train": ("run a recipe: rows, cold start, reinforcement, evaluation, report", "recipes/"),
    "curate": ("choose training rows: pass rates and filters; goes on where it was killed", "recipes/kimi/curate.yaml"),
    "long2short": (
        "make a model right in fewer tokens: SFT, DPO, SimPO or merging",
        "recipes/kimi/long2short_*.yaml",
    ),
    "rounds": (
        "sample, choose, train, again: RFT, Online RFT, Expert Iteration, DPO, SimPO; goes on where it was killed",
        "recipes/quickstart/expert_iteration.yaml",
    ),
    "pipeline": (
        "run stages that a YAML lists: cold start, RL, sample, filter, select, SFT, DPO, merge, evaluate, a team's own",
        "docs/recipes.md",
    ),
}
OVERRIDES = (
    "Every setting of the recipe can be replaced by --key value (or --key=value), one in a section by its "
    "place: --output_dir runs/mine --data.limit 100 --evaluation.data.n 50. A switch may stand without a value."
)


def _add_pipelines(commands: Commands) -> None:
    """What a recipe describes."""
    handlers = (_quickstart, _train, _curate, _long2short, _rounds, _pipeline_of_stages)
    for (name, (what, recipe)), run in zip(PIPELINES.items(), handlers, strict=True):
        asks = "" if run is _quickstart else "--config RECIPE "
        usage = f"grpo-lab {name} {asks}[options] [--key value …]"
        command = commands.add_parser(name, help=what, description=f"{what}. {OVERRIDES}", usage=usage)
        if asks:
            command.add_argument("--config", required=True, metavar="RECIPE", help=f"a recipe, see {recipe}")
        command.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
        command.add_argument("--overwrite", action="store_true", help="begin anew where the output folder holds a run")
        if run in (_quickstart, _train):
            command.add_argument("--resume", action="store_true", help="as without it: the same command goes on")
        command.set_defaults(run=run)


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


def _with_recipe(read: str, plan: str, run: str, kept: str, known: argparse.Namespace, rest: list[str]) -> int:
    """The recipe of the command line, planned (``--dry-run``) or run, by functions of the pipelines."""
    from grpo_lab.pipelines.console_noise import quiet
    from grpo_lab.pipelines.in_words import show
    from grpo_lab.pipelines.recipe_file import parse_overrides

    recipe = _pipeline(read)(known.config, parse_overrides(rest))
    flags = {name: getattr(known, name) for name in ("overwrite", "resume") if hasattr(known, name)}
    if not known.dry_run:
        try:
            return _to_its_end(known, lambda: _pipeline(run)(recipe, **flags))
        except KeyboardInterrupt as stop:
            if hasattr(stop, "what"):
                raise
            raise _with_words(lambda: _pipeline(kept)(recipe)) from stop
    with quiet(known.verbose):
        show(recipe.name, _pipeline(plan)(recipe, **flags))
    return 0


def _with_words(kept: Callable[[], str]) -> KeyboardInterrupt:
    """Ctrl-C, with what is on disk."""
    from grpo_lab.runs.stop import StoppedByUser

    try:
        return StoppedByUser(kept())
    except (ValueError, OSError):
        return StoppedByUser(NOTHING)


def _pipeline(name: str) -> Any:
    """``module:function``, loaded when it is needed."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"grpo_lab.pipelines.{module}"), function)


_train = partial(_with_recipe, "recipe:read_recipe", "dry_run:plan_of_training", "train:train", "run_folder:kept")
_curate = partial(
    _with_recipe, "curation_recipe:read_curation_recipe", "curate:plan_of_curation", "curate:curate", "curate:kept"
)
_long2short = partial(
    _with_recipe,
    "long2short_recipe:read_long2short_recipe",
    "long2short:plan_of_long2short",
    "long2short:long2short",
    "long2short:kept",
)
_rounds = partial(
    _with_recipe,
    "rounds_recipe:read_rounds_recipe",
    "run_rounds:plan_of_rounds",
    "run_rounds:run_rounds",
    "run_rounds:kept",
)

_pipeline_of_stages = partial(
    _with_recipe, "runner:read_pipeline", "runner:plan_of_pipeline", "runner:run_pipeline", "runner:kept"
)


def _to_its_end(known: argparse.Namespace, run: Callable[[], Any]) -> int:
    """``run``, and the exit code where it was asked to stop, or could not keep what it had."""
    from grpo_lab.pipelines.console_noise import quiet
    from grpo_lab.runs.stop import EXIT_INTERRUPTED, EXIT_NOT_WRITTEN, Interrupted
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


def _serve(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.engines.vllm import serve

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
    from grpo_lab.evaluation.comparison import compare, print_comparison, write_comparison

    found = compare(known.runs)
    page = write_comparison(found, known.output)
    print_comparison(found)
    print(f"comparison: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
