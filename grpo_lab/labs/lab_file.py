"""Contents of a ``lab.yaml``: the arms of a lab that trains, and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from grpo_lab.labs.cells import record_file
from grpo_lab.settings import Named, Positive, Switch, Whole, must_be, one_of, settings


@settings()
class LabFile:
    """Contents of a ``lab.yaml``.

    Args:
        about: a line about the lab.
        recipe: the recipe of ``grpo-lab train``: a path beside the file, or one below ``recipes/``.
        arms: name → changes of the recipe (keys may be dotted), or ``module:function``, which returns them from the
            arm's name, the seed and the options (``options.start``: the path of the lab's start). An arm that changes
            ``model`` or ``cold_start`` has a start of its own; ``model: start`` is the lab's, trained further.
        conditions: name → changes of the recipe. Every arm is then run in each of them, as the arm ``arm, condition``,
            with the changes of both.
        columns: title → number in the table: a place in the evaluation's ``summary.json``
            (``greedy.mean_length_correct``); ``mean.METRIC`` or ``last.METRIC``, a logged metric's mean over all steps
            or over the last quarter of them; or ``module:function``, which computes the number from the
            ``EvaluationResult`` and the log.
        curves: title → curve over generated tokens: a logged metric; ``evaluation.PLACE``, a number of the held-out
            evaluations (before, each ``evaluation.every`` steps, after); or ``module:function``, which computes the
            points (tokens, value) from the log.
        panels: draw the arm ``a, b`` as line b of the panel a.
        settings: changes of every arm, and of its start.
        seeded: settings that get the seed, besides ``seed``.
        report: ``module:function``, called with records and options in place of our own report. It returns the text to
            print, and writes table and figures into ``options.folder``.
        pairs: pairs of arms. The first column of the second arm is subtracted from that of the first, seed by seed.
        seeds: the default seeds.
        compared_by: title of a column, a share, for which the lab says how many seeds a difference needs.
        start: the model that arms without a start of their own begin from; None: the recipe's cold start, made once.
        prepare: ``module:function``, called with the options before the first cell.
        threads: threads of a cell on a CPU, so that cells side by side do not wait for each other; None: PyTorch's
            choice.
    """

    about: str
    recipe: str
    arms: Mapping[str, Annotated[Mapping[str, Any] | Named, must_be("changes of the recipe, or 'module:function'")]]
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=lambda: {"accuracy": "greedy.accuracy.value"})
    curves: Mapping[str, str] = field(default_factory=dict)
    panels: Switch = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeded: tuple[str, ...] = ("data.seed",)
    report: Named | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    seeds: tuple[Whole, ...] = (0, 1, 2)
    compared_by: str = "accuracy"
    start: str | None = None
    prepare: Named | None = None
    threads: Positive | None = None

    def __post_init__(self) -> None:
        if not self.arms or not self.seeds:
            raise ValueError("`arms` and `seeds` need at least one entry each")
        cells = self.cells
        if len({record_file(Path(), arm, 0).parts[:-1] for arm in cells if "/" not in arm}) < len(cells):
            raise ValueError(f"`arms` has {[*cells]}: names that differ as folders are needed, without a slash")
        for arm in (arm for pair in self.pairs for arm in pair if arm not in cells):
            raise ValueError(f"`pairs` has {arm!r}{one_of(arm, cells)}")
        if self.compared_by not in self.columns:
            raise ValueError(f"`compared_by` is {self.compared_by!r}{one_of(self.compared_by, self.columns)}")

    @property
    def cells(self) -> Mapping[str, tuple[Mapping[str, Any] | str, Mapping[str, Any]]]:
        """Return every arm in every condition: name → (changes of the arm, or its function; changes of the
        condition)."""
        if not self.conditions:
            return {arm: (changes, {}) for arm, changes in self.arms.items()}
        both = product(self.arms.items(), self.conditions.items())
        return {f"{arm}, {condition}": (changes, more) for (arm, changes), (condition, more) in both}

    def once(self, cells: Iterable[str]) -> list[str]:
        """Return as few of ``cells`` as hold every arm and every condition among them; without conditions all of
        them."""
        seen = set[int]()
        found = []
        for cell in cells:
            both = {*map(id, self.cells[cell])}
            if not both <= seen or not self.conditions:
                found.append(cell)
            seen |= both
        return found
