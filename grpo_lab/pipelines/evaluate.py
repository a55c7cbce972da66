"""`grpo-lab evaluate`: measure a saved model on held-out rows, described by options or by an earlier run (`--like`).

Every setting that a score depends on is reported with it, in the title and in `summary.json`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any

from grpo_lab.engines.generators import check_template_kwargs
from grpo_lab.recipe.data import MADE, READ, every_argument, loader_arguments, loader_signature
from grpo_lab.recipe.sections import (
    BATCH_SIZE,
    NEW_TOKENS,
    STRICT_ACCURACY,
    DataSection,
    EvaluationSection,
    PluginSection,
    RewardSection,
    template_kwargs_of,
    turns_in,
)
from grpo_lab.recipe.yaml import parse_overrides, read_yaml
from grpo_lab.registry import modules_beside
from grpo_lab.runs.folder import LOCK, one_writer
from grpo_lab.settings import at_least, read
from grpo_lab.visible import visible

_ROWS = ("source", "split", "template")
"""Arguments of loaders that have an option of their own in ``add_arguments``, with its own help."""
_TAKEN = (
    "seed", "mode", "model", "limit", "output", "batch_size", "n_samples", "temperature", "tokenizer", "overwrite",
)  # fmt: skip
"""Options whose names loaders use for another argument, which can then only be given as `--data.NAME`."""

_GIVEN = ("batch_size", "n_samples", "temperature", "max_new_tokens", "use_vllm", "log_probs", "templates",
         "thinking", "thinking_budget", "budget_text", "by")  # fmt: skip
"""Options that are settings of a recipe's ``evaluation``."""

_ANSWERS = re.compile(r"(summary\.json|outcomes\.(jsonl|parquet)|answers\.\d+\.jsonl)")
"""Names of the files that one condition of an evaluation leaves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `grpo-lab evaluate`. An option that is not given, and has no default here, is not in the
    namespace: its value then comes from ``--like`` or from the evaluation's own defaults."""
    from grpo_lab.data.made import SPLITS
    from grpo_lab.data.prompts import TEMPLATES

    def add(group: Any, word: str, words: str, **how: Any) -> None:
        group.add_argument(word, help=words, **{"default": argparse.SUPPRESS, **how})

    parser.add_argument("model", help="folder or hub name")
    read = ", ".join(READ)
    made = ", ".join(MADE)
    rows = parser.add_argument_group("rows")
    how = parser.add_argument_group("generation and judging")
    add(rows, "--data", f"{read} or {made}, or module:attribute (or give --like)")
    like = "evaluate as this run, or recipe, does: its rows, reward, limits, seed"
    add(rows, "--like", like, metavar="RUN", default=None)
    add(rows, "--source", f"hub name, folder, or jsonl or parquet file of the rows ({read})")
    splits = "gsm8k: train, test; humaneval: test; math, mbpp: of its source; file: the file's stem in a folder; "
    add(rows, "--split", f"default: test. {splits}{made}: {', '.join(SPLITS)}")
    add(rows, "--template", f"prompt templates: {', '.join(TEMPLATES)} (default: chat)", nargs="+", dest="templates")
    add(rows, "--limit", "most problems; of generated rows: how many to generate", type=at_least(1))
    for name, loaders in loader_arguments().items():
        if name not in _ROWS:
            words = []
            if name not in _TAKEN:
                words = [f"--{name.replace('_', '-')}"]
            of = f"of the loader{'s' * (len(loaders) > 1)} {', '.join(loaders)}"
            shown: Any = {"metavar": "VALUE", "help": of, "default": argparse.SUPPRESS}
            rows.add_argument(*words, f"--data.{name}", dest=f"data.{name}", **shown)
    add(how, "--mode", "how answers are read (default: strict)", choices=["strict", "lenient"])
    add(how, "--max-new-tokens", f"default: {NEW_TOKENS}", type=int)
    add(how, "--batch-size", "default: 64", type=int)
    add(how, "--n-samples", "sampled completions a problem, besides greedy (default: 0)", type=int)
    add(how, "--temperature", "of the samples (default: 1.0)", type=float)
    add(how, "--seed", "of the samples (default: 0); the rows' is --data.seed", type=int)
    add(how, "--thinking", "value of `enable_thinking` for the chat template", nargs="+", choices=["on", "off"])
    template_help = (
        "what the chat template is told besides, as YAML: '{reasoning_effort: low}' (default: nothing, or as --like)"
    )
    add(how, "--chat-template-kwargs", template_help, metavar="MAPPING")
    add(how, "--thinking-budget", "most tokens of thinking, or none", nargs="+", metavar="TOKENS")
    add(how, "--budget-text", "text that ends the thinking at the budget (default: that of Qwen's documentation)")
    measure = "also the mean of this reward: format=think_format, 'language={name: language_consistency, target: de}'"
    add(how, "--measure", measure, action="append", metavar="NAME=REWARD", dest="measures")
    add(how, "--by", "also the accuracy at each value of this column, such as steps or level")
    add(how, "--log-probs", "measure calibration by the answers' log-probs", action="store_true")
    add(how, "--tools", "functions that the model may call, each as module:function", nargs="+", metavar="TOOL")
    add(how, "--environment", "environment, as module:Class, whose `get_reward` judges", metavar="CLASS")
    add(how, "--vllm", "generate with vLLM instead of transformers", action="store_true", dest="use_vllm")
    add(how, "--against", "a second model for the same problems, with a paired test", metavar="MODEL", default=None)
    add(how, "--tokenizer", "another tokenizer's folder (default: the model's own)", default=None)
    output = "new folder for per-problem outputs (parquet, jsonl) and summary.json"
    parser.add_argument("--output", type=Path, help=output)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier evaluation in the output folder")


def run(known: argparse.Namespace) -> int:
    """Evaluate, print the results and, with `--output`, write them; return the exit code: 0, or 75 after SIGTERM or
    SIGUSR1, when the answers so far are kept. Raises ValueError for options that do not fit."""
    from grpo_lab.evaluation.sweep import AGAINST
    from grpo_lab.recipe.ahead import check_engine
    from grpo_lab.stages.held_out import conditions_in

    plan = plan_of(known)
    check_engine(plan.section.use_vllm is True, "--vllm", here_only=False)
    main = int(os.environ.get("RANK", "0")) == 0
    ours = [*conditions_in(plan.section), *([AGAINST] if known.against else [])]
    with claim_output(known.output, known.overwrite, ours) if main and known.output else nullcontext():
        if main and (note := _unlike_its_run(known, plan.section.data)):
            print(visible(f"note: {note}"))
        return _evaluate(known, plan, main)


def _evaluate(known: argparse.Namespace, plan: HeldOut, main: bool) -> int:
    """Measure every condition and report them; return the exit code. ``main``: this process prints and writes. Raises
    StoppedByUser, which says what is kept, after Ctrl-C."""
    from grpo_lab.evaluation import EvaluationStopped, terminal_summary, write_report
    from grpo_lab.evaluation.comparison import print_comparison
    from grpo_lab.evaluation.sweep import compared
    from grpo_lab.io import EXIT_INTERRUPTED
    from grpo_lab.runs.stop_requests import StoppedByUser, as_ctrl_c
    from grpo_lab.stages.held_out import measure_conditions

    limits: Any = {"max_new_tokens": plan.max_new_tokens, "seed": plan.seed, "tokenizer": known.tokenizer}
    limits["against"] = known.against
    kept = ""
    found = []
    with as_ctrl_c() as asked:
        try:
            try:
                found = measure_conditions(known.model, plan.section, known.output, use_cpu=False, **limits)
                result = found[0].result
            except EvaluationStopped as stop:
                result = stop.result
                if not result.outcomes:
                    raise
                place = "above (--output FOLDER keeps the answers themselves)"
                if known.output is not None:
                    place = f"in {known.output}"
                kept = f"the {len(result.outcomes):,} answers that were there: {place}"
            if not main:
                return 0
            if len(found) > 1:
                print_comparison(compared(found))
            terminal_summary(None, result, title=title(known.model, plan))
            if known.output is not None:
                print(f"outcomes: {known.output}\nreport: {write_report(known.output)}")
            if kept:
                raise StoppedByUser(kept)
        except KeyboardInterrupt as stop:
            if not asked:  # a real Ctrl-C, which the command line reports
                raise StoppedByUser(kept or "nothing") from stop
            print(f"grpo-lab: {asked[0]}: stopped; kept: {kept or 'nothing'}", file=sys.stderr, flush=True)
            return EXIT_INTERRUPTED
    return 0


def plan_of(known: argparse.Namespace) -> HeldOut:
    """Make the evaluation from the options: they replace what ``--like`` or, with ``--data``, our defaults say.

    Raises ValueError if neither or both of `--data` and `--like` are given, for an argument that the loader does not
    take, or for a bad value.
    """
    said = dict(vars(known))
    rows = {name.removeprefix("data."): _value(name, text) for name, text in said.items() if name.startswith("data.")}
    rows |= {name: said[name] for name in ("split", "source", "limit") if name in said}
    rows |= {"template": said["templates"][0]} if "templates" in said else {}
    if ("data" in said) == (known.like is not None):
        raise ValueError(
            "give one of --data (file, gsm8k, math, humaneval, mbpp, one that is made: word_problems, …) and --like "
            "(a run's folder, or a recipe)"
        )
    if known.like is not None:
        plan = held_out_like(known.like)
        data = plan.section.data
        written = {"loader": data.loader, "template": data.template, "limit": data.limit, **data.arguments}
    else:
        plan, written = _of_data(said)
    section = replace(plan.section, data=with_every_argument(read(DataSection, {**written, **rows}, "--data")))
    given = {name: said[name] for name in _GIVEN if name in said}
    if "tools" in said:
        given["tools"] = tuple(PluginSection(name) for name in said["tools"])
    if "environment" in said:
        given["environment_factory"] = PluginSection(said["environment"])
        if known.like is None:
            given["reward"] = RewardSection("environment")
    if "chat_template_kwargs" in said:
        given["chat_template_kwargs"] = _template_kwargs(said["chat_template_kwargs"])
    if "measures" in said:
        given["measures"] = {**section.measures, **_measures(said["measures"])}
    section = replace(section, **given)
    if "mode" in said:
        if section.reward.name != "accuracy":
            raise ValueError(
                f"--mode is of the reward `accuracy`, and --like names {section.reward.name!r}; leave --mode out"
            )
        judge_arguments = {**section.reward.arguments, "mode": said["mode"]}
        section = replace(section, reward=replace(section.reward, arguments=judge_arguments))
    return HeldOut(section, section.max_new_tokens or plan.max_new_tokens, said.get("seed", plan.seed))


def _of_data(said: Mapping[str, Any]) -> tuple[HeldOut, dict[str, Any]]:
    """Return the evaluation that the option ``--data`` means by itself, and its rows as a recipe has them."""
    loader = said["data"]
    judge = {**READ, **MADE}.get(loader, STRICT_ACCURACY.name)
    reward = STRICT_ACCURACY if judge == STRICT_ACCURACY.name else RewardSection(judge)
    written = {"loader": loader}
    if "split" in loader_signature(loader, "--data").parameters:
        written["split"] = "test"
    if loader in MADE:
        written["n"] = said.get("limit", 500)
    section = EvaluationSection(DataSection(loader, "chat"), reward, batch_size=BATCH_SIZE)
    return HeldOut(section, NEW_TOKENS, 0), written


def with_every_argument(section: DataSection) -> DataSection:
    """Return ``section`` with every argument of its loader, those that it leaves out at their defaults. Raises
    ValueError for arguments that the loader does not take."""
    parameters = loader_signature(section.loader, "--data").parameters
    allowed = [name for name in parameters if name != "template"]
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for name in section.arguments:
        if name not in allowed and not anything:
            option = f"--{name}" if name in _ROWS else f"--data.{name}"
            raise ValueError(f"{option}: the loader {section.loader!r} takes {', '.join(allowed)}")
    return replace(section, arguments=every_argument(section))


def title(model: str, plan: HeldOut) -> str:
    """Return a line that names everything that a score depends on: model, rows, reward, token limit and seed. Loader
    arguments that are off (None, False, 0.0) are left out."""
    from grpo_lab.runs.console import describe

    data = plan.section.data
    off = ("None", "False", "0.0")
    shown = {name: value for name, value in data.arguments.items() if repr(value) not in off}
    limits = f"max_new_tokens {plan.max_new_tokens}, seed {plan.seed}"
    return f"{model} on {describe(replace(data, arguments=shown))}, {describe(plan.section.reward)}, {limits}"


def claim_output(folder: Path, overwrite: bool, conditions: Sequence[str] = ()) -> ExitStack:
    """Make the output folder and lock it for this process, before anything is computed; return the lock.

    ``conditions``: names of the folders that this evaluation will make in it. With ``overwrite``, folders of other
    conditions, which an earlier evaluation left, are removed. Raises ValueError if the folder cannot be made, is in
    use, holds something else or, without ``overwrite``, a finished evaluation.
    """
    from grpo_lab.evaluation import EvaluationResult
    from grpo_lab.evaluation.sweep import SWEEP

    begun = any(_ANSWERS.fullmatch(one.name) for one in folder.glob("*"))

    def is_ours(file: Path) -> bool:
        """Return whether an evaluation may have left this file, or folder."""
        if file.is_dir() and not file.is_symlink():
            return True
        name = file.name.removesuffix(".part")
        on_top = file.parent == folder
        if on_top and name in ("report.html", LOCK, SWEEP):
            return True
        return (on_top or begun) and _ANSWERS.fullmatch(name) is not None

    others = sorted(str(one.relative_to(folder)) for one in islice(filterfalse(is_ours, folder.rglob("*")), 5))
    if others:
        raise ValueError(f"--output {str(folder)!r} holds something else ({', '.join(others)}); choose a new folder")
    stale = [one for one in folder.glob("*") if begun and one.is_dir() and one.name not in conditions]
    ended = (folder / "summary.json").is_file() and not (folder / LOCK).exists()  # a kill leaves the lock
    if not overwrite and (stale or (ended and EvaluationResult.read(folder).stopped is None)):
        raise ValueError(f"--output {str(folder)!r} holds an evaluation already; choose another, or give --overwrite")
    writer = ExitStack()
    try:
        writer.enter_context(one_writer(folder))
    except OSError as error:
        raise ValueError(f"--output {str(folder)!r} cannot be written to ({error.strerror}); choose another") from error
    for one in stale:
        (folder / SWEEP).unlink(missing_ok=True)  # the sweep's file lists the folders
        shutil.rmtree(one)
    return writer


def _unlike_its_run(known: argparse.Namespace, data: DataSection) -> str:
    """Return a note if the run that made the model evaluated it on other rows of the same loader than ``data`` asks
    for; empty if it did not, with ``--like``, or if no recipe of that run is beside the model."""
    if known.like is not None or not (Path(known.model) / "recipe.yaml").is_file():
        return ""
    try:
        own = with_every_argument(held_out_like(known.model).section.data)
    except ValueError:
        return ""
    there = {**own.arguments, "template": own.template, "limit": own.limit}
    here = {**data.arguments, "template": data.template, "limit": data.limit}
    other = [f"{name} {there[name]}" for name in there if there[name] is not None and there[name] != here.get(name)]
    if own.loader != data.loader or not other:
        return ""
    return f"this model's own run was evaluated with {', '.join(other)}; --like {known.model} takes that"


def _value(name: str, text: str) -> Any:
    """Read the text of the option ``name`` as YAML. For `steps` and `families`, `1,3` is a list, as `[1, 3]` is."""
    if name in ("data.steps", "data.families") and not text.startswith("["):
        text = f"[{text}]"
    return next(iter(parse_overrides([f"--{name}={text}"]).values()))


def _template_kwargs(text: str) -> dict[str, Any]:
    """Read the text of ``--chat-template-kwargs`` as a mapping. Raises ValueError if it is none, or has a key that is
    not the user's to set (`check_template_kwargs`)."""
    found = _value("chat-template-kwargs", text)
    if not isinstance(found, Mapping):
        raise ValueError(
            f"--chat-template-kwargs is {text!r}; it must be a mapping, such as '{{enable_thinking: false}}'"
        )
    check_template_kwargs(found, "--chat-template-kwargs")
    return dict(found)


def _measures(said: list[str]) -> dict[str, RewardSection]:
    """Read the texts ``NAME=REWARD`` of the options ``--measure``: name → reward."""
    found = {}
    for name, _, reward in (one.partition("=") for one in said):
        found[name] = read(RewardSection, _value(f"measure {name}", reward), f"--measure {name}")
    return found


@dataclass(frozen=True)
class HeldOut:
    """An evaluation: its section, with the most new tokens of a completion and the seed, which a section leaves to the
    recipe that it stands in."""

    section: EvaluationSection
    max_new_tokens: int
    seed: int


def held_out_like(run: str | Path) -> HeldOut:
    """Return the evaluation that a recipe describes. ``run``: the recipe's file, or an output folder with its
    `recipe.yaml`. Raises ValueError if there is no such file, or no evaluation in it."""
    path = Path(run)
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        wrong = "it has no recipe.yaml" if path.is_dir() else "no such folder or file"
        raise ValueError(f"--like {str(run)!r}: {wrong}; it takes the output folder of `grpo-lab train`, or a recipe")
    written = read_yaml(file)
    modules_beside(file)
    section = written.get("evaluation")
    if section is None:
        raise ValueError(f"--like {str(run)!r}: that run has no `evaluation`; describe the rows with --data")
    flat = written.get("arguments", written)  # a run's own copy keeps the trainer's settings apart
    own = _in_the_turns_of(_as_written(section), written, flat)
    parsed = read(EvaluationSection, own, "evaluation").rendered_as(template_kwargs_of(flat))
    tokens = parsed.max_new_tokens or flat.get("max_completion_length", NEW_TOKENS)
    if tokens is None:
        raise ValueError(
            f"--like {str(run)!r}: that run's `max_completion_length` is null and it has no "
            "`evaluation.max_new_tokens`, so nothing says how long its evaluation's completions were: write "
            "`evaluation.max_new_tokens` there"
        )
    seed = flat.get("seed")
    otherwise = 0 if "method" in written else 42  # the default of long2short, or of training
    return HeldOut(parsed, int(tokens), int(otherwise if seed is None else seed))


def _in_the_turns_of(section: Any, written: Mapping[str, Any], flat: Mapping[str, Any]) -> Any:
    """Return an evaluation's ``section`` with the tools, the environment and the limits of turns of the recipe that it
    stands in (``written``; ``flat``: its trainer's settings), unless it has tools or an environment of its own."""
    of_run = {name: _as_written(written[name]) for name in ("tools", "environment_factory") if written.get(name)}
    if not isinstance(section, Mapping) or not of_run or {"tools", "environment_factory"} & section.keys():
        return section
    return {**section, **of_run, "turns": asdict(turns_in(flat))}


def _as_written(section: Any) -> Any:
    """Return a section of a run's own copy of its recipe as a user writes it: the copy keeps arguments of rows and
    rewards apart, under ``arguments``, and names unset settings with None."""
    if isinstance(section, list):
        return [_as_written(one) for one in section]
    if not isinstance(section, Mapping):
        return section
    arguments = None
    if isinstance(section.get("arguments"), Mapping):
        arguments = section["arguments"]
    own = {name: _as_written(one) for name, one in section.items() if one is not None and one is not arguments}
    return {**own, **(arguments or {})}
