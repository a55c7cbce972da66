"""The table of commands: what each is called, its help, and which function carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command of ``grpo-lab``. Its functions are given as text, ``module:function`` without ``grpo_lab.``, so that
    the table imports nothing.

    There are two kinds. A command with a recipe has ``read`` and ``plan``; one with options alone has ``options``.

    Attributes:
        help: one line on what the command does.
        run: function that carries the command out. With a recipe it is called with the recipe and the flags; else with
            the parsed options, and may return an exit code.
        options: function that adds the command's options to its parser; only without a recipe.
        about: several sentences on what the command does, for its ``--help``; only without a recipe.
        read: function that makes a recipe from the mapping in a YAML file and a default name.
        plan: function that returns, for ``--dry-run``, what a recipe will do: name → value.
        recipes: where example recipes are; empty if the command always runs the same recipe, which we ship.
        resumes: whether the command takes ``--resume``.
        verbose: whether the command takes ``--verbose``; without that option it is then quiet.
        actions: for a command that takes a word before a file or folder: that word → its help.
    """

    help: str
    run: str
    options: str = ""
    about: str = ""
    read: str = ""
    plan: str = ""
    recipes: str = ""
    resumes: bool = False
    verbose: bool = True
    actions: Mapping[str, str] = field(default_factory=dict)


def _pipeline(module: str, run: str, plan: str, read: str) -> Any:
    """Return the fields ``run``, ``plan`` and ``read`` of a command whose functions are in ``grpo_lab.pipelines``."""
    return {"run": f"pipelines.{module}:{run}", "plan": f"pipelines.{module}:{plan}", "read": f"pipelines.{read}"}


_TRAINING: Any = {
    "run": "pipelines.train:train",
    "read": "recipe.sections:recipe_from",
    "plan": "pipelines.dry_run:plan_of_training",
    "resumes": True,
}
COMMANDS = {
    "quickstart": Command("learn to work answers out, on two CPU cores without network", **_TRAINING),
    "train": Command(
        "run a recipe: rows, cold start, reinforcement, evaluation, report", recipes="recipes/", **_TRAINING
    ),
    "curate": Command(
        "choose training rows: pass rates and filters; goes on where it was killed",
        **_pipeline("curate", "curate", "plan_of_curation", "curate:curation_recipe_from"),
        recipes="recipes/kimi/curate.yaml",
    ),
    "long2short": Command(
        "make a model right in fewer tokens: SFT, DPO, SimPO or merging",
        **_pipeline("long2short", "long2short", "plan_of_long2short", "long2short:long2short_recipe_from"),
        recipes="recipes/kimi/long2short_*.yaml",
    ),
    "rounds": Command(
        "sample, choose, train, again: RFT, Online RFT, Expert Iteration, DPO, SimPO; goes on where it was killed",
        **_pipeline("rounds", "run_rounds", "plan_of_rounds", "rounds_recipe:rounds_recipe_from"),
        recipes="recipes/quickstart/expert_iteration.yaml",
    ),
    "pipeline": Command(
        "run stages that a YAML lists (cold start, RL, sample, SFT, evaluate, a team's own), and say how far they are",
        **_pipeline("runner", "run_pipeline", "plan_of_pipeline", "pipeline_recipe:pipeline_from"),
        recipes="docs/pipelines.md",
        actions={
            "run": "FILE: carry the stages out, or go on with them",
            "resume": "FOLDER: the same, from what the folder says was asked for",
            "status": "FOLDER: how far every stage has come, as a table",
            "show": "FOLDER: the same as a drawing",
        },
    ),
    "evaluate": Command(
        "greedy and sampled accuracy of a model with a 95%% interval",
        run="pipelines.evaluate:run",
        options="pipelines.evaluate:add_arguments",
        about="Ask a model the problems of a data set, judge its answers, and write all of it into a folder.",
    ),
    "harness": Command(
        "write held-out rows as a task of lm-evaluation-harness, judged as `evaluate` judges them",
        run="pipelines.harness:run",
        options="pipelines.evaluate:add_arguments",
        about="Write the problems of a data set as a task of lm-evaluation-harness, which then asks and judges as "
        "`evaluate` does.",
    ),
    "report": Command(
        "write the HTML page of a run, or of a comparison, anew",
        run="cli:_report",
        options="cli:_report_options",
        about="Read what a command left in its output folder, finished or not, and write `report.html` there anew: "
        "curves, accuracy before and after, samples, settings. Nothing else in the folder changes.",
        verbose=False,
    ),
    "compare": Command(
        "two or more runs side by side: table, curves, paired test",
        run="cli:_compare",
        options="cli:_compare_options",
        about="Set runs side by side: their settings where they differ, their curves, their last evaluations, and a "
        "paired test of each against the first. Prints the results and writes a page.",
        verbose=False,
    ),
    "lab": Command(
        "what RL does to a model, as a small experiment: table and figure under runs/labs/NAME",
        run="labs.command:run",
        options="labs.command:add_arguments",
        about="Run a lab: arms that differ in one thing, each with several seeds, from one start. Prints a table with "
        "intervals over seeds and writes it, with a figure, into the folder. Cells that are done are never repeated; "
        "where their settings have changed they run again, and what was there stands beside them.",
        verbose=False,
    ),
    "check": Command(
        "trainer against engine: log-probs by turn and by length, and whether to train",
        run="pipelines.check_numerics:run",
        options="pipelines.check_numerics:add_arguments",
        about="Let the engine write transcripts of several turns, compare its log-probs with the trainer's by turn and "
        "by length, name a likely cause where the gaps show one, and say whether to train (exit code 0 or 1).",
    ),
    "serve": Command(
        "a vLLM server at 127.0.0.1 for `vllm_mode: server`",
        run="cli:_serve",
        options="engines.vllm.server:add_arguments",
        about="Start a vLLM server for one training, which finds it by `vllm_server_base_url` and sends it the weights "
        "after each step. It ends with Ctrl-C or SIGTERM.",
        verbose=False,
    ),
}
