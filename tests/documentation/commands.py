"""A line of shell as a reader would type it, up to the point where it would begin to work: parsed, looked up, read.

Words in capitals (``M``, ``FOLDER``), ``…`` and ``$NAME`` stand for what the reader puts in.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from documentation.blocks import ROOT
from grpo_lab.cli import _parser
from grpo_lab.pipelines.curate import curation_recipe_from
from grpo_lab.pipelines.long2short import long2short_recipe_from
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.recipe.job import lab_config, numbers_read
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.recipe.yaml import parse_overrides, read_yaml

EXPERIMENT = ROOT / "grpo_lab" / "labs" / "experiment.py"
SHELL = ("source", "cd", "export", "git", "mkdir", "echo")
_PLACEHOLDER = re.compile(r"[A-Z]|[A-Z][A-Z_]+|.*[…$].*")
#: so that a recipe for GPUs can be read on any machine
ON_CPU = {"use_cpu": True, "bf16": False}


def check_line(line: str) -> int:
    """Check every command of a line of bash; how many there were. ValueError or the parser's own error where one is
    wrong."""
    words = shlex.split(line, comments=True)
    commands: list[list[str]] = [[]]
    for word in words:
        commands.append([]) if word in ("&&", "||", ";", "|", "&") else commands[-1].append(word)
    commands = [command for command in commands if command]
    for command in commands:
        check_command(command)
    return len(commands)


def check_command(words: Sequence[str]) -> None:
    """One command: who would run it, and would that one understand it?"""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]  # VARIABLE=value command
    if words and words[0] == "taskset":
        words = words[3:]  # taskset -c CORES command
    if not words or words[0] in SHELL:
        return
    name, rest = words[0].rpartition("/")[2], list(words[1:])
    if name == "grpo-lab":
        _grpo_lab(rest)
    elif name == "make":
        subprocess.run(["make", "-n", "--no-print-directory", *rest], cwd=ROOT, check=True, capture_output=True)
    elif name in ("python", "python3", "bash", "sbatch"):
        _script(rest)
    elif name in ("accelerate", "torchrun"):
        _launch(name, rest)
    elif name == "pip":
        _pip(rest)
    else:
        raise ValueError(f"{name!r}: no way is known to check this command; add one to {__name__}")


def _grpo_lab(words: list[str]) -> None:
    try:
        known, rest = _parser().parse_known_args(words)
    except SystemExit as end:
        if end.code == 0:  # --help, --version
            return
        raise ValueError(f"grpo-lab {' '.join(words)}: the argument parser refuses it") from end
    if getattr(known, "action", None) in ("resume", "status", "show"):
        return  # of a folder that a run leaves
    if known.command in ("train", "curate", "long2short", "rounds", "pipeline"):
        _recipe(known.command, known.config or known.place or "FILE", rest)
    elif rest:
        raise ValueError(f"grpo-lab {known.command} knows no {rest}")


def _recipe(command: str, path: str, words: list[str]) -> None:
    """The recipe with its ``--key value``, read as the command reads it."""
    overrides = parse_overrides(words)
    if _PLACEHOLDER.fullmatch(path):
        return
    given = {key: value for key, value in overrides.items() if not _PLACEHOLDER.fullmatch(str(value))}
    if command == "train":
        lab_config(numbers_read(read_recipe(ROOT / path, {**given, **ON_CPU})))
    else:
        read: Any = {"curate": curation_recipe_from, "long2short": long2short_recipe_from, "rounds": rounds_recipe_from}
        read["pipeline"] = pipeline_from
        beside = {"beside": (ROOT / path).parent} if command == "pipeline" else {}
        read[command](read_yaml(ROOT / path, overrides), Path(path).stem, **beside)


def _script(words: list[str]) -> None:
    options = [words.pop(0) for _ in range(_leading_options(words))]
    if options == ["-m"]:
        words[0] = words[0].replace(".", "/") + ".py"
    script = ROOT / words[0].replace("KIT/", "scripts/offline_kits/")  # which a kit takes along
    if not script.is_file():
        raise ValueError(f"{words[0]}: no such script")
    if script.name == "train.py":
        _grpo_lab(["train", *words[1:]])
    elif script.suffix == ".py":
        unknown = {word for word in words[1:] if word.startswith("--")} - options_of(script)
        if unknown:
            raise ValueError(f"{words[0]} has no option {sorted(unknown)}")
    else:
        _files(words[1:])


def _leading_options(words: list[str]) -> int:
    return next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))


def options_of(script: Path) -> set[str]:
    """The ``--option`` words that a script gives to ``add_argument`` (without importing what it imports), and those of
    every experiment where it is one."""
    text = script.read_text(encoding="utf-8")
    shared = options_of(EXPERIMENT) if "labs.experiment import" in text else set()
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    adding = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    said = [arg.value for call in adding for arg in call.args if isinstance(arg, ast.Constant)]
    return {"--help", *shared, *(word for word in said if isinstance(word, str) and word.startswith("--"))}


def _launch(name: str, words: list[str]) -> None:
    if name == "torchrun":
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(words)
    else:
        from accelerate.commands.launch import launch_command_parser

        if words.pop(0) != "launch":
            raise ValueError(f"accelerate {words}: only `launch` is known here")
        args = launch_command_parser().parse_args(words)
        if args.config_file is not None:
            _files([args.config_file])
            yaml.safe_load((ROOT / args.config_file).read_text(encoding="utf-8"))
    _script([args.training_script, *args.training_script_args])


def _files(words: list[str]) -> None:
    for word in words:
        if "/" in word and not word.startswith("-") and not _PLACEHOLDER.fullmatch(word) and not (ROOT / word).exists():
            raise ValueError(f"{word}: no such file")


def _pip(words: list[str]) -> None:
    """``grpo_lab[extra]``: the extra is one that pyproject.toml declares."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
    extras = set(re.findall(r"^(\w+) = \[", declared.partition("\n[")[0], re.M))
    for word in words:
        asked = re.fullmatch(r"(?:grpo_lab|\.)\[(.*)\]", word)
        missing = set(asked[1].split(",")) - extras if asked else set()
        if missing:
            raise ValueError(f"{word}: pyproject.toml has no extra {sorted(missing)}; it has {sorted(extras)}")


__all__ = ["check_command", "check_line", "options_of"]
