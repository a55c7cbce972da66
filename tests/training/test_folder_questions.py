"""Whose folder is this, which checkpoint, what are its rows: one `grpo-lab train` asks each of it once at most, and
hands the recipe to few functions."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import grpo_lab
from grpo_lab.evaluation import run_record
from grpo_lab.pipelines import run_folder, same_run
from grpo_lab.pipelines.train import train
from grpo_lab.recipe import job, sections
from grpo_lab.recipe.sections import Recipe, recipe_from
from grpo_lab.runs import differences, folder
from grpo_lab.trainer.resume import going_on, whole

pytestmark = pytest.mark.slow

QUESTIONS: dict[ModuleType, tuple[str, ...]] = {
    run_folder: ("_look_at", "_starts_from", "has_begun", "start_is_whole", "is_measured", "check_length"),
    same_run: ("changed_since", "fingerprint"),
    folder: ("record_of", "check_writable"),
    going_on: ("newest_read",),
    whole: ("newest_whole",),
    differences: ("differing", "plain_settings", "rows_fingerprint"),
    job: ("numbers_read", "lab_config", "facts_of"),
    run_record: ("read_run",),
}
FILES = ("run.json", "recipe.yaml", "stage.json")
ROWS = {"loader": "word_problems", "n": 8, "template": "chat"}
TINY: dict[str, Any] = {
    "name": "asked",
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1}},
    "data": ROWS,
    "rewards": ["training.curation_rewards:by_digest"],
    "cold_start": {"data": ROWS, "max_steps": 1},
    "evaluation": {"data": {"loader": "word_problems", "split": "test", "n": 2}, "max_new_tokens": 4},
    "objective": "dr_grpo",
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_completion_length": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
}
PACKAGE = str(Path(grpo_lab.__file__).parent)
PARTS = tuple(one for one in vars(sections).values() if isinstance(one, type) and is_dataclass(one))
OWN = ("recipe/sections.py", "settings.py")
"""Files of the recipe's own classes: their properties, and what makes their objects."""
STAYS_OF_THE_RECIPE = 8
STAYS_WITH_ITS_PARTS = 60
"""Most stays of a recipe in a training: calls in a row into one file are one stay. 8 and 43 when they were counted."""
_opened: list[str] = []
_listens: list[bool] = []


def _hear(event: str, arguments: Any) -> None:
    if _listens and event == "open" and isinstance(arguments[0], str) and "r" in str(arguments[1] or ""):
        _opened.append(Path(arguments[0]).name)


sys.addaudithook(_hear)


@dataclass
class Seen:
    """What one training asked and was handed.

    Attributes:
        asked: how often each question was asked, and each file of the folder read.
        handed: of each call with the recipe, or a part of it, among its arguments: the file, and whether it was the
            whole recipe.
    """

    asked: Counter[str] = field(default_factory=Counter)
    handed: list[tuple[str, bool]] = field(default_factory=list)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call of a function of the package."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        parts = [one for one in given if isinstance(one[0] if isinstance(one, tuple) and one else one, PARTS)]
        if parts and file not in OWN:
            self.handed.append((file, any(isinstance(one, Recipe) for one in parts)))

    def stays(self, whole_recipe: bool) -> int:
        """Return the number of stays: of calls in a row into one file."""
        return len([*groupby(file for file, is_whole in self.handed if is_whole or not whole_recipe)])


@contextmanager
def counted_questions(counts: Counter[str]) -> Iterator[None]:
    """Context in which every question counts how often it is asked."""

    def counted(name: str, question: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(question)
        def ask(*given: Any, **more: Any) -> Any:
            counts[name] += 1
            return question(*given, **more)

        return ask

    with pytest.MonkeyPatch.context() as patch:
        for home, names in QUESTIONS.items():
            for name in names:
                question = getattr(home, name)
                wrapped = counted(name, question)
                for module in [one for key, one in sys.modules.items() if key.startswith("grpo_lab.")]:
                    for own, value in list(vars(module).items()):
                        if value is question:
                            patch.setattr(module, own, wrapped)
        yield


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """A new training, the same gone on with, and the same finished."""
    found = {}
    place = tmp_path_factory.mktemp("asked") / "run"
    for what, steps in (("new", 1), ("gone on with", 2), ("finished", 2)):
        recipe = recipe_from({**TINY, "output_dir": str(place), "max_steps": steps})
        seen = Seen()
        _opened.clear()
        _listens.append(True)
        with counted_questions(seen.asked):
            sys.setprofile(seen.profile)
            try:
                train(recipe)
            finally:
                sys.setprofile(None)
        _listens.clear()
        seen.asked.update(name for name in _opened if name in FILES)
        found[what] = seen
    return found


@pytest.mark.parametrize("what", ["new", "gone on with", "finished"])
def test_each_question_about_the_folder_is_asked_once(trainings: dict[str, Seen], what: str) -> None:
    asked = trainings[what].asked
    assert asked["_look_at"] == 1
    assert asked["plain_settings"] == 1
    assert {name: count for name, count in asked.items() if count > 1} == {}


@pytest.mark.parametrize("what", ["new", "gone on with", "finished"])
def test_few_functions_are_handed_the_recipe(trainings: dict[str, Seen], what: str) -> None:
    """`train` opens the folder with it and resolves it; what comes after that gets what was made of it."""
    seen = trainings[what]
    assert 0 < seen.stays(whole_recipe=True) <= STAYS_OF_THE_RECIPE
    assert seen.stays(whole_recipe=False) <= STAYS_WITH_ITS_PARTS
