"""Whose folder is this, which checkpoint, what are its rows: one `grpo-lab train` asks each of it once at most."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.evaluation import run_record
from grpo_lab.pipelines import run_folder, same_run
from grpo_lab.pipelines.train import train
from grpo_lab.recipe.sections import recipe_from
from grpo_lab.runs import differences
from grpo_lab.trainer.resume import whole

pytestmark = pytest.mark.slow

QUESTIONS = {
    run_folder: ("_look_at", "has_begun", "start_is_whole", "is_measured", "check_length", "refuse_lost"),
    same_run: ("changed_since", "fingerprint"),
    whole: ("newest_whole",),
    differences: ("differing", "plain_settings", "rows_fingerprint"),
    run_record: ("read_run",),
}
FILES = ("run.json", "recipe.yaml", "stage.json")
TINY: dict[str, Any] = {
    "name": "asked",
    "model": {"tiny": {"hidden_size": 16, "num_layers": 1}},
    "data": {"loader": "word_problems", "n": 8, "template": "chat"},
    "rewards": ["training.curation_rewards:by_digest"],
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
_opened: list[str] = []
_listens: list[bool] = []


def _hear(event: str, arguments: Any) -> None:
    if _listens and event == "open" and isinstance(arguments[0], str) and "r" in str(arguments[1] or ""):
        _opened.append(Path(arguments[0]).name)


sys.addaudithook(_hear)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each question was asked, and each file of the folder read."""
    counts: Counter[str] = Counter()

    def counted(name: str, question: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(question)
        def ask(*given: Any, **more: Any) -> Any:
            counts[name] += 1
            return question(*given, **more)

        return ask

    for home, names in QUESTIONS.items():
        for name in names:
            question = getattr(home, name)
            wrapped = counted(name, question)
            for module in [one for key, one in sys.modules.items() if key.startswith("grpo_lab.")]:
                for own, value in list(vars(module).items()):
                    if value is question:
                        monkeypatch.setattr(module, own, wrapped)
    _opened.clear()
    _listens.append(True)
    yield counts
    _listens.clear()


def test_each_question_about_the_folder_is_asked_once(tmp_path: Path, asked: Counter[str]) -> None:
    recipe = {**TINY, "output_dir": str(tmp_path / "run")}
    for what, steps in (("new", 1), ("gone on with", 2), ("finished", 2)):
        asked.clear()
        _opened.clear()
        train(recipe_from({**recipe, "max_steps": steps}))
        found = {**asked, **{name: count for name, count in Counter(_opened).items() if name in FILES}}
        assert found, what
        assert {name: count for name, count in found.items() if count > 1} == {}, what
