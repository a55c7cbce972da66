"""The command line: parser, exit codes, and what stops a command.

``main`` parses the words, looks the command up in ``commands.COMMANDS`` and calls its functions. A command with a
recipe goes through ``_run_recipe``: read the YAML with its overrides, make the recipe, then plan it (``--dry-run``) or
run it. Modules are imported only once a command needs them, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lab.commands import COMMANDS, Command
from grpo_lab.io import EXIT_INTERRUPTED, NO_ROOM
from grpo_lab.requirements import absent, failing, in_words
from grpo_lab.visible import VisibleFormatter, print_errors_visibly, visible

NOTHING = "nothing"
"""What a command that Ctrl-C ended says that it kept, where it kept nothing."""
SUBMIT = "write a batch script for each stage, each waiting for those that it reads, and submit nothing"
TRACEBACK = "show the traceback of a user error or of Ctrl-C"
VERBOSE = (
    "print all that the libraries print; without it their bars, metrics and notes are reduced to a line of progress"
)
OVERRIDES = (
    "Every setting of the recipe can be replaced by --key value (or --key=value), one in a section by its "
    "place: --output_dir runs/mine --data.limit 100 --evaluation.data.n 50. A switch may stand without a value."
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line with ``words`` (default: those of ``sys.argv``) and return its exit code.

    A command that ends early says why in one line on stderr. The exit codes are:

    0    the command did what it should
    1    an engine does not follow the trainer
    2    a mistake of the user
    3    a server was lost
    4    steps could not be taken because of NaN (``guard.max_bad_steps``)
    74   a file could not be written: a checkpoint, a full disk, a folder that was removed meanwhile
    75   the command was asked to stop (SIGTERM, the stop file, ``max_hours``) and can be continued
    130  Ctrl-C
    """
    try:
        lacking = absent()
        if not lacking:
            return _main(words)
    except ImportError:
        lacking = failing()
        if not lacking:
            raise
    _say(f"error: {in_words(lacking)}")
    return 2


def _main(words: Sequence[str] | None) -> int:
    """Do what ``main`` does; all requirements are installed."""
    from grpo_lab.registry import working_folder_on_path

    working_folder_on_path()
    if words is None:
        sys.excepthook = print_errors_visibly
    first = int(os.environ.get("RANK", "0")) == 0
    parser = _parser(sys.argv[1:] if words is None else words)
    known, rest = parser.parse_known_args(words)
    known.own_process = words is None
    to_stderr = logging.StreamHandler()
    to_stderr.setFormatter(VisibleFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[to_stderr])
    for noisy in ("httpx", "datasets", "transformers", "absl", *(() if known.verbose else ("vllm",))):  # at import
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if rest and not COMMANDS[known.command].read:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run(COMMANDS[known.command], known, rest)
    except KeyboardInterrupt as stop:
        if known.traceback:
            raise
        if first:
            print(file=sys.stderr)
            _say(f"stopped; kept: {getattr(stop, 'what', NOTHING)}")
        return 130  # as shells give for it
    except Exception as error:
        code, said = _code_of(error)
        if code == 0 or (known.traceback and code != EXIT_INTERRUPTED):
            raise
        if code != EXIT_INTERRUPTED or first:  # every process stops: one message is enough
            _say(said)
        return code


def _code_of(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message for the error that ended a command. Code 0 means that the error is none of
    the known kinds, so a bug: the caller raises it again, with its traceback."""
    if isinstance(error, ValueError):
        return 2, f"error: {' '.join(str(error).split())}"  # libraries write paragraphs
    from grpo_lab.engines.grouping import EngineFault
    from grpo_lab.engines.weights.sync import WeightSyncError
    from grpo_lab.runs.folder import FolderGone
    from grpo_lab.runs.stop_requests import Interrupted
    from grpo_lab.trainer.resume.checkpoint import CheckpointNotWritten

    if isinstance(error, Interrupted):
        return EXIT_INTERRUPTED, str(error)
    for kind, code in ((CheckpointNotWritten, 74), (FolderGone, 74), (ConnectionError, 3), (FloatingPointError, 4)):
        if isinstance(error, kind):
            return code, f"error: {error}"
    if isinstance(error, (EngineFault, WeightSyncError)):
        return 1, f"error: {' '.join(str(error).split())}"
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return 74, f"error: {error}. Mend that; what was written before stays, and can be gone on with"
    return 0, ""


def _say(words: str) -> None:
    """Write a line to stderr. Invisible characters in it, as files and models may hold them, are made visible."""
    print(visible(f"grpo-lab: {words}"), file=sys.stderr, flush=True)


def _parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Make the parser of all commands. With ``words``, only a command whose name is among them gets its options: to
    find the others' would import their modules."""
    from grpo_lab import __version__

    said = "Reinforcement learning from verifiable rewards, on TRL."
    parser = argparse.ArgumentParser(prog="grpo-lab", description=said)
    parser.add_argument("--version", action="version", version=f"grpo-lab {__version__}")
    parser.add_argument("--traceback", action="store_true", help=TRACEBACK)
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, **_looks(name, command))
        if words is not None and name not in words:
            continue
        if command.read:
            _add_recipe_options(own, command)
        else:
            _load(command.options)(own)
        # allowed after the command, too; SUPPRESS keeps the value from before it
        own.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help=TRACEBACK)
        if command.verbose:
            own.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=VERBOSE)
    return parser


def _looks(name: str, command: Command) -> dict[str, Any]:
    """Return the arguments of a command's parser: its description and, with a recipe, its usage line."""
    if not command.read:
        return {"allow_abbrev": name != "evaluate", "description": command.about}
    asks = ""
    if command.actions:
        asks = f"{{{','.join(command.actions)}}} FILE or FOLDER "
    elif command.recipes:
        asks = "--config RECIPE "
    usage = f"grpo-lab {name} {asks}[options] [--key value …]"
    return {"usage": usage, "description": f"{command.help}. {OVERRIDES}"}


def _add_recipe_options(own: argparse.ArgumentParser, command: Command) -> None:
    """Add to the parser of a command with a recipe its options: those that name the recipe, and those of every run."""
    if command.recipes:
        said = argparse.SUPPRESS if command.actions else f"a recipe, see {command.recipes}"
        own.add_argument("--config", required=not command.actions, metavar="RECIPE", help=said)
    own.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
    own.add_argument("--overwrite", action="store_true", help="begin anew where the output folder holds a run")
    if command.actions:
        said = "; ".join(f"`{action}` {what}" for action, what in command.actions.items())
        own.add_argument("action", nargs="?", choices=list(command.actions), help=said)
        said = f"a recipe, see {command.recipes}; the output folder of a run"
        own.add_argument("place", nargs="?", metavar="FILE or FOLDER", help=said)
        only = "run this stage alone, once the stages that it reads are done"
        own.add_argument("--only", metavar="STAGE", help=only)
        own.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)
        own.add_argument("--submit", choices=["slurm"], help=SUBMIT)
    if command.resumes:
        own.add_argument("--resume", action="store_true", help="no effect: the same command goes on in any case")


def _load(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names; the module's name is without ``grpo_lab.``."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"grpo_lab.{module}"), function)
    return found


def _run(command: Command, known: argparse.Namespace, rest: list[str]) -> int:
    """Carry out the command and return its exit code. ``rest`` are the words that its parser does not know, which for a
    command with a recipe are overrides."""
    if not command.verbose:
        return int(_load(command.run)(known) or 0)
    if command.read:
        return _run_recipe(command, known, rest)
    from grpo_lab.runs.console import quiet

    with quiet(known.verbose):
        return int(_load(command.run)(known))


def _run_recipe(command: Command, known: argparse.Namespace, rest: list[str]) -> int:
    """Run the recipe that the command line names and return the exit code 0. With ``--dry-run`` print its plan instead,
    with ``--submit`` write batch scripts, with ``status`` or ``show`` print how far its folder is.

    Raises whatever ends the command early, for ``_code_of``; Ctrl-C as a KeyboardInterrupt that says what is kept.
    """
    from grpo_lab.recipe.yaml import parse_overrides, read_yaml, switched_on
    from grpo_lab.registry import modules_beside

    rest = [*rest, *_name_recipe(command, known)]
    if known.config is None:  # `status` or `show`
        _load(f"pipelines.standing:{known.action}")(Path(known.place))
        return 0
    file = Path(known.config)
    written = read_yaml(file, parse_overrides(rest))
    modules_beside(file)
    engine = switched_on("use_vllm", written)
    if known.dry_run and known.own_process and not engine:
        sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]  # TRL loads it for seconds, and no engine starts
    from grpo_lab.runs.console import quiet, show

    beside = {}
    if command.actions:
        beside = {"beside": file.parent}
    recipe = _load(command.read)(written, file.stem, **beside)
    given = ("overwrite", "resume", "only", "launched")
    flags = {name: getattr(known, name) for name in given if hasattr(known, name)}
    if getattr(known, "submit", None):
        print(f"submit with: bash {_load('pipelines.slurm:write_batch_scripts')(recipe)}")
        return 0
    with quiet(known.verbose):
        if known.dry_run:
            plan = dict(_load(command.plan)(recipe, **flags))
            if engine:
                from grpo_lab.engines.vllm.presence import engine_here

                plan |= engine_here(written)
            show(recipe.name, plan)
            return 0
        try:
            _load(command.run)(recipe, **flags)
        except KeyboardInterrupt as stop:
            if hasattr(stop, "what"):
                raise
            from grpo_lab.runs.folder import kept
            from grpo_lab.runs.stop_requests import StoppedByUser

            try:
                said = kept(recipe)
            except (ValueError, OSError):
                said = NOTHING
            raise StoppedByUser(said) from stop
    return 0


def _name_recipe(command: Command, known: argparse.Namespace) -> list[str]:
    """Set ``known.config`` to the recipe's file, and return the overrides that follow from how it was named.

    ``known.config`` is None for ``status`` and ``show``, which only read the folder ``known.place``. ``resume`` takes
    the recipe that is in the folder, and that folder as the output folder.
    """
    from grpo_lab.recipe.yaml import QUICKSTART, shipped_recipe

    if not command.recipes:
        known.config = str(shipped_recipe(QUICKSTART))
        print(f"recipe: {known.config}", flush=True)
    if not command.actions:
        return []
    known.place = known.config or known.place
    if known.place is None:
        raise ValueError(f"`grpo-lab {known.command}` needs one of {[*command.actions]} and a file or folder")
    if known.action in ("status", "show"):
        known.config = None
        return []
    if known.action == "resume":
        known.config = f"{known.place}/pipeline.yaml"
        return ["--output_dir", known.place]
    known.config = known.place
    return []


def _serve(known: argparse.Namespace) -> int:
    from grpo_lab.engines.vllm.server import options_from, serve

    return serve(options_from(known), start_timeout=known.start_timeout, log=known.log)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, help="output folder of any command, or the page of `compare`")


def _report(known: argparse.Namespace) -> None:
    from grpo_lab.pipelines.standing import report

    print(f"report: {report(known.run_dir)}")


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folders; the first is the baseline")
    place = Path("comparison.html")
    parser.add_argument("--output", type=Path, default=place, help="the page (default: comparison.html)")


def _compare(known: argparse.Namespace) -> None:
    from grpo_lab.evaluation.comparison import compare, print_comparison, write_comparison
    from grpo_lab.pipelines.standing import stages_now

    found = compare(known.runs, stages_now)
    page = write_comparison(found, known.output)
    print_comparison(found)
    print(f"comparison: {page}")


if __name__ == "__main__":
    sys.exit(main())
