"""``grpo-lab train | curate | long2short | evaluate | serve | report``: the command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.pipelines.named_objects import working_folder_on_path

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. A mistake of the user is one line on stderr and exit code 2, a lost server 3.

    A training that ended on a signal with a checkpoint (``enable_jit_checkpoint``): 75, ``EXIT_INTERRUPTED``.
    """
    working_folder_on_path()
    parser = _parser()
    known, rest = parser.parse_known_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=False)
    for noisy in ("httpx", "datasets", "transformers", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if rest and known.command not in ("train", "curate", "long2short"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(known.run(known, rest) or 0)
    except (ValueError, ConnectionError) as error:  # ConnectionError: a vLLM server that is not up, or gone
        if known.traceback:
            raise
        print(f"grpo-lab: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-lab", description="Reinforcement learning from verifiable rewards, on TRL."
    )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of a user error")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_pipelines(commands)
    _add_evaluate(commands)

    from grpo_lab.rollouts import serve

    server = commands.add_parser("serve", help="a vLLM server at 127.0.0.1 for `vllm_mode: server`")
    serve.add_arguments(server)
    server.set_defaults(run=_serve)

    report = commands.add_parser("report", help="write a run's HTML report")
    report.add_argument("run_dir", type=Path, help="the run's output folder")
    report.set_defaults(run=_report)
    return parser


def _add_pipelines(commands: Commands) -> None:
    """What a recipe describes: train, curate, long2short."""
    train = commands.add_parser("train", help="run a recipe; any setting can be overridden with --key value")
    train.add_argument("--config", required=True, help="a recipe, see recipes/")
    train.add_argument("--dry-run", action="store_true", help="print what will happen and stop")
    train.add_argument("--overwrite", action="store_true", help="replace an earlier run in the output folder")
    train.add_argument("--resume", action="store_true", help="go on with this run from its last checkpoint")
    train.set_defaults(run=_train)

    curate = commands.add_parser(
        "curate", help="choose training rows: pass rates and filters; goes on where it was killed"
    )
    curate.add_argument(
        "--config", required=True, help="a recipe, see recipes/kimi/curate.yaml; override with --key value"
    )
    curate.add_argument("--overwrite", action="store_true", help="sample anew in a folder that holds a curation")
    curate.set_defaults(run=_curate)

    short = commands.add_parser("long2short", help="make a model right in fewer tokens: SFT, DPO, SimPO or merging")
    short.add_argument("--config", required=True, help="a recipe, see recipes/kimi/long2short_*.yaml")
    short.add_argument("--overwrite", action="store_true", help="replace an earlier run in the output folder")
    short.set_defaults(run=_long2short)


def _add_evaluate(commands: Commands) -> None:
    evaluate = commands.add_parser("evaluate", help="greedy and sampled accuracy of a model with a 95%% interval")
    evaluate.add_argument("model", help="folder or hub name")
    evaluate.add_argument("--data", required=True, help="gsm8k, math or word_problems")
    evaluate.add_argument("--source", help="hub name, folder or jsonl file of the data (gsm8k, math)")
    evaluate.add_argument("--split", default="test", help="split; word_problems: train or heldout")
    evaluate.add_argument("--template", default="chat", help="prompt template: r1, qwen_math, none, chat")
    evaluate.add_argument("--limit", type=_at_least_one, help="problems at most (word_problems: how many are made)")
    evaluate.add_argument("--mode", default="strict", choices=["strict", "lenient"], help="how answers are read")
    evaluate.add_argument("--max-new-tokens", type=int, default=512)
    evaluate.add_argument("--batch-size", type=int, default=64)
    evaluate.add_argument("--n-samples", type=int, default=0, help="sampled completions a problem, besides greedy")
    evaluate.add_argument("--temperature", type=float, default=1.0)
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--output", type=Path, help="folder for per-problem outputs (parquet, jsonl) and the summary")
    evaluate.set_defaults(run=_evaluate)


def _at_least_one(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _train(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.recipe import read_recipe
    from grpo_lab.pipelines.recipe_file import parse_overrides

    recipe = read_recipe(known.config, parse_overrides(rest))
    if known.dry_run:
        from grpo_lab.pipelines.dry_run import dry_run

        dry_run(recipe)
        return 0
    from grpo_lab.pipelines.interruption import EXIT_INTERRUPTED, Interrupted
    from grpo_lab.pipelines.train import train

    try:
        train(recipe, overwrite=known.overwrite, resume=known.resume)
    except Interrupted as stop:
        print(f"grpo-lab: {stop}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _curate(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.curate import curate
    from grpo_lab.pipelines.curation_recipe import curation_recipe_from
    from grpo_lab.pipelines.recipe_file import parse_overrides, read_yaml

    written = read_yaml(known.config, parse_overrides(rest))
    curate(curation_recipe_from(written, Path(known.config).stem), overwrite=known.overwrite)
    return 0


def _long2short(known: argparse.Namespace, rest: list[str]) -> int:
    from grpo_lab.pipelines.long2short import long2short
    from grpo_lab.pipelines.long2short_recipe import long2short_recipe_from
    from grpo_lab.pipelines.recipe_file import parse_overrides, read_yaml

    written = read_yaml(known.config, parse_overrides(rest))
    long2short(long2short_recipe_from(written, Path(known.config).stem), overwrite=known.overwrite)
    return 0


def _evaluate(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.evaluation import evaluate, terminal_summary
    from grpo_lab.pipelines.parts import load_rows
    from grpo_lab.pipelines.recipe import DataSection
    from grpo_lab.pipelines.saved_model import load_saved_model
    from grpo_lab.rewards import AccuracyReward

    arguments: dict[str, object] = {"split": known.split}
    if known.source:
        arguments["source"] = known.source
    if known.data == "word_problems":
        arguments["n"] = known.limit or 500
    rows = load_rows(DataSection(known.data, known.template, known.limit, arguments))
    model, tokenizer = load_saved_model(known.model, use_cpu=False)
    result = evaluate(
        model,
        tokenizer,
        rows,
        reward=AccuracyReward(mode=known.mode),
        max_new_tokens=known.max_new_tokens,
        batch_size=known.batch_size,
        n_samples=known.n_samples,
        temperature=known.temperature,
        seed=known.seed,
    )
    if known.output is not None:
        result.write(known.output)
    title = f"{known.model} on {known.data} (template {known.template}, {known.mode})"
    terminal_summary(None, result, title=title, report=known.output)
    return 0


def _serve(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.rollouts import serve

    return serve.serve(serve.options_from(known), start_timeout=known.start_timeout, log=known.log)


def _report(known: argparse.Namespace, _: list[str]) -> int:
    from grpo_lab.evaluation import write_report

    print(f"report: {write_report(known.run_dir)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
