"""Start models of a lab that trains: what each arm begins from, and where it is made.

Arms share the lab's start. An arm that changes ``model`` or ``cold_start`` has a start of its own; arms with the same
changes of these share it. Each start is made once, with seed 0, by the cold start of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.io import is_local, looks_local
from grpo_lab.labs.cells import folder_name
from grpo_lab.recipe.ahead import model_here
from grpo_lab.recipe.sections import ModelSection, Recipe, template_kwargs_of

Changes = Mapping[str, Any]
OF_START = ("model", "cold_start")
"""Sections of a recipe that say what RL begins from."""
LAB_START = "start"
"""Value of an arm's ``model`` that means the lab's start; the arm's cold start trains it further."""


def of_start(changes: Changes) -> dict[str, Any]:
    """Return those of ``changes`` that change the start."""
    return {name: value for name, value in changes.items() if name.partition(".")[0] in OF_START}


def without_start(changes: Changes) -> dict[str, Any]:
    """Return those of ``changes`` that do not change the start."""
    return {name: value for name, value in changes.items() if name.partition(".")[0] not in OF_START}


@dataclass(frozen=True)
class Starts:
    """Models that the arms of a lab begin from.

    Args:
        folder: the lab's; starts that are made lie in it.
        given: folder or hub name of a model that takes the place of the lab's own start; empty: none does.
        changes: arm → its changes of the start. An arm that is missing here begins from the lab's start.
        read: function that reads the lab's recipe with some changes.
    """

    folder: Path
    given: str
    changes: Mapping[str, Changes]
    read: Callable[[Changes], Recipe]

    @property
    def lab(self) -> Path:
        """Return the place of the lab's start, which may still have to be made."""
        return Path(self.given or self.folder / "cold_start")

    @property
    def to_come(self) -> dict[str, ModelSection | None]:
        """Return the place of the lab's start → the model that it is made from; empty if the start is given."""
        if self.given:
            return {}
        return {str(self.lab): self.read({}).model}

    def is_given(self, arm: str) -> bool:
        """Return whether the arm begins from a model that no cold start of this lab makes."""
        return bool(self.given) and arm not in self.changes

    def changes_of(self, arm: str) -> dict[str, Any]:
        """Return the arm's changes of the start, with the path of the lab's start for ``model: start``."""
        changes = dict(self.changes.get(arm, {}))
        if changes.get("model") == LAB_START:
            changes["model"] = {"path": str(self.lab)}
        return changes

    def place(self, arm: str) -> Path:
        """Return the place of the model that the arm begins from, which may still have to be made."""
        if arm not in self.changes:
            return self.lab
        first = next(one for one, changes in self.changes.items() if changes == self.changes[arm])
        return self.folder / f"cold_start_{folder_name(first)}"

    def check_given(self) -> None:
        """Raise ValueError if the given model is a folder that does not exist."""
        if looks_local(self.given) and not is_local(self.given):
            raise ValueError(f"`start` is {self.given!r}: no such folder; name a model by `--start`")

    def check_reached(self) -> None:
        """Raise ValueError if the given model is a hub name that the hub does not give."""
        if self.given and not is_local(self.given):
            try:
                model_here(ModelSection(self.given), here_only=False)
            except ValueError as error:
                raise ValueError(f"`start`: {error}") from error

    def check(self, arm: str) -> None:
        """Raise ValueError if a cold start has to make the arm's model, and the recipe has none."""
        from grpo_lab.pipelines.train import NOTHING_TO_SHARE

        if self.is_given(arm) or self.read(self.changes_of(arm)).cold_start is not None:
            return
        if arm not in self.changes:
            raise ValueError(NOTHING_TO_SHARE)
        said = f"arm {arm!r} sets {', '.join(f'`{name}`' for name in self.changes[arm])} and has no `cold_start`"
        raise ValueError(f"{said}: its start is made by one; a model as it is needs a lab of its own, with `--start`")

    def make(self, arm: str) -> str:
        """Return the path of the model that the arm begins from, made if it is missing. If it is trained further from
        the lab's start, that is made before it."""
        if arm not in self.changes:
            return self._lab_made()
        if self.changes[arm].get("model") == LAB_START:
            self._lab_made()
        return self._cold_started(self.changes_of(arm), self.place(arm))

    def _lab_made(self) -> str:
        """Return the path of the lab's start, made if it is missing and not given."""
        return self.given or self._cold_started({}, self.lab)

    def _cold_started(self, changes: Changes, place: Path) -> str:
        """Return the path of the model that the recipe's cold start makes with these changes, made if it is missing."""
        from grpo_lab.pipelines.train import shared_start

        recipe = self.read(changes)
        template_kwargs = template_kwargs_of(recipe.arguments)
        return str(shared_start(recipe.model, recipe.cold_start, place, chat_template_kwargs=template_kwargs))
