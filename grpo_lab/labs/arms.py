"""A lab that trains, as data: one recipe, its changes ("arms"), and what is shown of them.

Such a lab is a ``lab.yaml`` (`lab_file.LabFile`). Those in ``recipes/lab/*/`` come with the package, named after their
folder. `Arms` reads the file and makes an `Experiment` of it, which runs the cells. Each cell is a training by the
recipe with the changes of its arm; its numbers are read from its evaluations and its log.

Seeds change the problems, their order and the sampling. Arms share the start model unless they change it
(``labs/starts.py``). The module of a ``module:function`` may lie beside the file that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_lab.evaluation.result import EvaluationResult, number_at
from grpo_lab.io import is_local, write_whole_text
from grpo_lab.labs import LABS
from grpo_lab.labs.experiment import GENERATED, Experiment, Found, Options, Record, changes_asked
from grpo_lab.labs.lab_file import LabFile
from grpo_lab.labs.shown_checks import OF_LOG, check_shown, not_logged
from grpo_lab.labs.starts import Changes, Starts, of_start, without_start
from grpo_lab.labs.tables import at_equal_tokens, draw, over_tokens, spread, table
from grpo_lab.pipelines.same_run import CANNOT_CHANGE_THE_PAST, LENGTH
from grpo_lab.reading import read_json_lines, read_record
from grpo_lab.recipe.ahead import Ahead, looking_ahead
from grpo_lab.recipe.job import NOT_OF_THIS_MACHINE, Job, lab_config, numbers_read
from grpo_lab.recipe.sections import ModelSection, Recipe, read_recipe
from grpo_lab.recipe.yaml import PLACES, read_yaml, shipped_recipe
from grpo_lab.registry import load_named, modules_beside
from grpo_lab.runs.differences import OF_NO_FILE, plain_settings
from grpo_lab.settings import one_of, read

KEPT = ("metrics.jsonl", "evaluation/before/summary.json", "evaluation/after/summary.json")
"""Files in a cell's folder that columns and curves are read from."""
IMPORTS = ("grpo_lab.pipelines.train", "grpo_lab.trainer.lab_trainer", "transformers.models.qwen2.modeling_qwen2")
"""Modules that a cell imports, among them the model of the labs that come with the package."""


@dataclass(frozen=True)
class Arms:
    """A lab that trains: its file, and how its cells are checked, run and shown.

    Args:
        said: the contents of the lab file.
        folder: the folder that the file is in.
    """

    said: LabFile
    folder: Path

    @staticmethod
    def read(name: str) -> Arms:
        """Read the lab of that name or path. Raises ValueError if there is none, or if its contents are not allowed."""
        file = Path(name) if name.endswith((".yaml", ".yml")) else shipped_labs().get(name)
        if file is None:
            raise ValueError(f"no lab is called {name!r}{one_of(name, [*LABS, *shipped_labs()])}, or a lab.yaml's path")
        modules_beside(file)
        return Arms(read(LabFile, read_yaml(file)), file.parent)

    def experiment(self) -> Experiment:
        """Return the lab as an experiment."""
        return Experiment(
            [*self.said.cells],
            self.run,
            self.report,
            self.make_ready,
            seeds=self.said.seeds,
            imports=IMPORTS,
            result=lambda record: record["after"][self.said.compared_by],
            problems=self.problems,
            settings=self.settings,
            start=lambda arm, options: self.starts(options).place(arm),
            check=self.check,
            kept=KEPT,
            read=self.read_anew,
            odd=partial(not_logged, self.said.columns, self.said.curves),
        )

    def recipe(self, options: Options) -> Path:
        """Return the path of the recipe: that of ``--recipe``, else the lab's own."""
        name = options.recipe or self.said.recipe
        return next((at for at in (self.folder / name, Path(name)) if at.is_file()), None) or shipped_recipe(name)

    def with_changes(self, options: Options, changes: Mapping[str, Any]) -> Recipe:
        """Read the lab's recipe with ``changes``, and with those that ``--set`` asks for in every arm.

        For a start that is trained further from the lab's start (``model: start``), what ``--set`` changes of ``model``
        is left out: the lab's start was made with that.
        """
        asked = changes_asked(options)
        if changes.get("model") == {"path": str(self.starts(options).lab)}:
            asked = {name: value for name, value in asked.items() if name.partition(".")[0] != "model"}
        return read_recipe(self.recipe(options), {**changes, **asked})

    def starts(self, options: Options) -> Starts:
        """Return the models that the arms begin from."""
        given = str(options.start or self.said.start or "")
        if given == str(options.folder / "cold_start"):
            given = ""  # `make_ready` has set it to the lab's own start
        own = dict[str, Changes]()
        for arm, (of_arm, of_condition) in self.said.cells.items():
            if isinstance(of_arm, str):  # a function may not change the start, which is made before it is called
                of_arm = {}
            if found := of_start({**of_arm, **of_condition}):
                own[arm] = found

        def recipe_with(changes: Changes) -> Recipe:
            return self.with_changes(options, deepcopy({**self.said.settings, **changes}))

        return Starts(options.folder, given, own, recipe_with)

    def make_ready(self, options: Options) -> None:
        """Make the starts of the arms that will run, set ``options.start``, and call the lab's own ``prepare``."""
        starts = self.starts(options)
        for arm in options.arms or self.said.cells:
            starts.make(arm)
        options.start = str(starts.lab)
        if self.said.prepare:
            load_named(self.said.prepare, "prepare")(options)

    def settings(self, arm: str, seed: int, options: Options) -> Mapping[str, Any] | None:
        """Return the settings that a cell's numbers depend on: its recipe, without settings that change no number.

        None if the arm is made by a function that fails now, since it may need what ``prepare`` has still to make. If
        it is a mistake, the cell reports it.
        """
        starts = self.starts(options)
        starts.check_given()
        try:
            changes = self.changes(arm, seed, options)
        except (OSError, ValueError):
            if isinstance(self.said.cells[arm][0], str):
                return None
            raise
        recipe = numbers_read(self.with_changes(options, {**changes, "seed": seed}))
        no_matter = {*OF_NO_FILE, *CANNOT_CHANGE_THE_PAST.difference(LENGTH)}
        plain = plain_settings(recipe)
        plain["arguments"] = {name: one for name, one in plain["arguments"].items() if name not in no_matter}
        if starts.is_given(arm):
            plain |= {"model": None if is_local(starts.given) else {"path": starts.given}, "cold_start": None}
        return {**plain, "name": None, "threads": self.said.threads}

    def check(self, arms: Sequence[str], options: Options) -> dict[str, str]:
        """Check the lab before anything is made; return what a dry run says of it.

        Raises:
            ValueError: something would stop a cell, or a column or curve is one that no run can have.
        """
        starts = self.starts(options)
        jobs = dict[str, Job]()
        no_gpu: Mapping[str, Any] = {}
        if options.dry_run:  # the lab may be meant for another machine
            no_gpu = NOT_OF_THIS_MACHINE
        else:
            starts.check_reached()
        for arm in self.said.once(arms):
            starts.check(arm)
        if self.said.prepare:
            load_named(self.said.prepare, "prepare")
        for arm in self.said.once(arms):
            if isinstance(changes := self.said.cells[arm][0], str):
                load_named(changes, f"arms.{arm}")  # loaded, not called: it may read what `prepare` makes
                continue
            recipe = self.with_changes(options, {**self.changes(arm, self.said.seeds[0], options), "name": arm})
            if starts.is_given(arm):
                recipe = replace(recipe, model=ModelSection(starts.given), cold_start=None)
            first = starts.place(arm) not in map(starts.place, jobs)  # a shared cold start is checked once
            try:
                recipe = numbers_read(recipe)
                with looking_ahead(Ahead(starts.to_come)):
                    jobs[arm] = Job.resolve(recipe, lab_config(recipe, **no_gpu), here_only=True, cold_start=first)
            except ValueError as error:
                raise ValueError(f"arm {arm!r}: {error}") from error
        check_shown(self.said.columns, self.said.curves, jobs, known_later=len(jobs) < len(self.said.once(arms)))
        start = starts.given or f"the recipe's cold start, in {starts.lab}"
        if starts.given and not is_local(starts.given):
            start += " (a hub name: there is no such folder)"
        own = [f"{arm}'s own, in {starts.place(arm)}" for arm in arms if arm in starts.changes]
        return {"lab": self.said.about, "recipe": str(self.recipe(options)), "start": "; ".join([start, *own])}

    def run(self, arm: str, seed: int, folder: Path, options: Options) -> Record:
        """Train a cell in ``folder``, from its start; return its record."""
        from grpo_lab.pipelines.train import train

        starts = self.starts(options)
        start = starts.make(arm)
        options.start = str(starts.lab)
        if self.said.threads:
            import torch

            torch.set_num_threads(self.said.threads)
        changes = without_start({**self.changes(arm, seed, options), **changes_asked(options)})
        changes |= {"model": {"path": start}, "cold_start": None, "output_dir": str(folder)}
        train(read_recipe(self.recipe(options), {**changes, "name": arm, "seed": seed}))
        return self.measured(folder)

    def read_anew(self, record: Record, folder: Path, options: Options) -> Record:
        """Return a record with the columns and curves that the file asks for now, read from the cell's folder."""
        return {**record, **self.measured(folder)}

    def measured(self, folder: Path) -> Record:
        """Compute columns and curves of the run in ``folder`` from its evaluations and its log. ``before`` is None if
        there was no evaluation before training."""
        before, after = (
            EvaluationResult.read(place) if (place / "summary.json").is_file() else None
            for place in (folder / "evaluation" / "before", folder / "evaluation" / "after")
        )
        file = folder / "metrics.jsonl"
        rows: Iterable[tuple[int, dict[str, Any]]] = ()
        if file.is_file():  # a run may log no step
            rows = read_json_lines(file, {"step": int})
        log = [{name: value for name, value in row.items() if value is not None} for _, row in rows]
        curves = {one: self.curve(title, one, log, folder) for title, one in self.said.curves.items()}
        numbers = None
        if before is not None:
            numbers = self.numbers(before, [])
        return {"before": numbers, "after": self.numbers(after, log), "curves": curves}

    def changes(self, arm: str, seed: int, options: Options) -> dict[str, Any]:
        """Return the arm's changes of the recipe with this seed, without those of ``--set``. Raises ValueError if a
        function changes the start, which is made before it is called."""
        of_arm: Any
        of_arm, of_condition = self.said.cells[arm]
        if isinstance(of_arm, str):
            of_arm = load_named(of_arm, f"arms.{arm}")(arm, seed, options)
            if unread := of_start(of_arm):
                made_before = "the start is made before it is called; write it in the file"
                raise ValueError(f"`arms.{arm}` gives {[*unread]}, and {made_before}")
        changes = {**self.said.settings, **of_arm, **of_condition, **self.starts(options).changes_of(arm)}
        of_seed = dict.fromkeys(self.said.seeded, seed)
        return {"disable_tqdm": True, **deepcopy(changes), **of_seed}  # copied: dotted keys change what is in them

    def curve(self, title: str, name: str, log: Sequence[Mapping[str, Any]], folder: Path) -> list[tuple[float, float]]:
        """Return the points (generated tokens, value) of a curve of a run. ``title``, ``name``: of ``curves`` in the
        lab file."""
        if ":" in name:
            return list(load_named(name, f"curves.{title}")(log))
        of, _, place = name.partition(".")
        if of == "evaluation":
            return evaluated(folder / "evaluation", place, f"curves.{title}", log)
        return [(row[GENERATED], row[name]) for row in log if {GENERATED, name} <= row.keys()]

    def numbers(self, result: Any, log: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Compute the columns: title → number, NaN if there is nothing to count.

        Args:
            result: the evaluation; None: there was none.
            log: the rows of `metrics.jsonl`; empty before training.

        Raises:
            ValueError: the evaluation has no such number.
        """
        summary = {}
        if result is not None:
            summary = result.summary()
        found = {}
        for title, name in self.said.columns.items():
            of_log, _, metric = name.partition(".")
            if ":" in name:
                found[title] = float(load_named(name, f"columns.{title}")(result, log))
            elif of_log in OF_LOG:
                values = [row[metric] for row in log if metric in row]
                if of_log != "mean":
                    values = values[-max(1, len(values) // 4) :]
                found[title] = fmean(values) if values else math.nan
            else:
                found[title] = number_at(summary, name, f"columns.{title}")
        return found

    def report(self, found: Found, options: Options) -> str:
        """Write ``table.md`` and ``curves.png``; return the text to print. If the lab file has a ``report``, that does
        both."""
        if self.said.report:
            return str(load_named(self.said.report, "report")(found, options))
        name = next(iter(next(iter(found.values()))[0]["after"]))
        panels = over_tokens(found, self.said.curves)
        lines = [table(found), "", at_equal_tokens(panels), ""]
        for ours, theirs in self.said.pairs:
            both = [{run["seed"]: run["after"][name] for run in found.get(arm, [])} for arm in (ours, theirs)]
            gains = [both[0][seed] - both[1][seed] for seed in both[0] if seed in both[1]]
            if gains:
                lines.append(f"- {name}, {ours} − {theirs}, seed by seed: {spread(gains)}")
        text = "\n".join(lines).rstrip()
        write_whole_text(options.folder / "table.md", f"{text}\n")
        shown: dict[str, dict[str, Any]] = {}
        for title, by_arm in panels.items():
            for arm, curves in by_arm.items():
                panel = ""
                line = arm
                if self.said.panels:
                    panel, _, line = arm.partition(", ")
                shown.setdefault(", ".join(filter(None, (panel, title))), {})[line] = curves
        if shown:
            draw(shown, options.folder / "curves.png", "generated tokens")
        return text

    def problems(self, options: Options) -> int | None:
        """Return the number of held-out problems that the recipe asks for; None if it does not say."""
        held_out = self.with_changes(options, self.said.settings).evaluation
        if held_out:
            return held_out.data.arguments.get("n")
        return None


def evaluated(folder: Path, place: str, where: str, log: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the points (generated tokens, number) of a run's evaluations, in their order.

    Args:
        folder: the folder of the evaluations.
        place: dotted place of the number in their `summary.json`.
        where: what asks for it, for an error message.
        log: rows of `metrics.jsonl`, which say how many tokens had been generated at each step.
    """
    generated = {row["step"]: row[GENERATED] for row in log if GENERATED in row}
    after = max(generated, default=0)
    step_of = {"before": 0, "after": after} | {file.name: int(file.name[5:]) for file in folder.glob("step_*")}
    found = []
    for name, step in sorted(step_of.items(), key=lambda one: one[1]):
        if (file := folder / name / "summary.json").is_file():
            tokens = max((of for at, of in generated.items() if at <= step), default=0)
            found.append((tokens, number_at(read_record(file), place, where)))
    return found


def shipped_labs() -> dict[str, Path]:
    """Return the labs that train and come with the package: name → file."""
    return {file.parent.name: file for place in PLACES for file in sorted(place.glob("lab/*/lab.yaml"))}
