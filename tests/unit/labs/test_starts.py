"""``grpo_lab.labs.starts``: arms that begin from a start of their own, by real trainings of a tiny model."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lab.labs.arms import Arms
from grpo_lab.labs.cells import LabCell
from grpo_lab.labs.lab_file import LabFile
from grpo_lab.pipelines.train import shared_start
from grpo_lab.recipe.sections import ModelSection, read_recipe
from grpo_lab.settings import read

FURTHER = {"cold_start.data.seed": 7, "cold_start.max_steps": 1}
LAB: dict[str, Any] = {
    "about": "x",
    "recipe": "quickstart/dr_grpo.yaml",
    "arms": {
        "shared": {},
        "other rows": {"cold_start.data.n": 16},
        "further": {"model": "start", **FURTHER},
        "other rows too": {"cold_start.data.n": 16, "num_generations": 4},
        "wider": {"model.tiny.hidden_size": 48},
    },
    "settings": {
        "model.tiny": {"architecture": "qwen2", "hidden_size": 24, "num_layers": 1},
        "cold_start.data.n": 32,
        "cold_start.max_steps": 2,
        "cold_start.per_device_train_batch_size": 8,
        "cold_start.warmup_steps": 0,
        "learning_rate": 0.0,  # RL leaves the weights as it found them
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "max_completion_length": 4,
        "data.n": 32,
        "evaluation": None,
    },
    "columns": {"entropy": "last.entropy"},
    "compared_by": "entropy",
}


def asked(folder: Path, **given: Any) -> Namespace:
    return Namespace(
        **{"recipe": None, "start": None, "set": [], "arms": None, "folder": folder, "dry_run": False, **given}
    )


def lab_of(**said: Any) -> Arms:
    return Arms(read(LabFile, {**LAB, **said}), Path("nowhere"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def are_equal(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the lab after its starts are made."""
    folder = tmp_path_factory.mktemp("lab")
    lab_of().make_ready(asked(folder))
    return folder


def test_each_start_is_made_once(made: Path) -> None:
    """Arms with the same changes share theirs. A second call makes nothing again."""
    folders = {"cold_start", "cold_start_other_rows", "cold_start_further", "cold_start_wider"}
    assert {one.name for one in made.iterdir()} == folders
    starts = lab_of().starts(asked(made))
    assert starts.place("other rows too") == starts.place("other rows") == made / "cold_start_other_rows"
    assert starts.place("shared") == made / "cold_start"
    before = {one: one.stat().st_mtime_ns for one in made.glob("*/model.safetensors")}
    lab_of().make_ready(asked(made))
    assert {one: one.stat().st_mtime_ns for one in made.glob("*/model.safetensors")} == before
    assert weights(made / "cold_start_wider")["model.norm.weight"].shape == (48,)


def test_the_lab_s_start_is_trained_further(made: Path, tmp_path: Path) -> None:
    """To the bit what one gets by hand from the lab's start, and not what one gets from random weights."""
    lab = lab_of()
    recipe = read_recipe(lab.recipe(asked(made)), {**lab.said.settings, **FURTHER})
    by_hand = shared_start(ModelSection(str(made / "cold_start")), recipe.cold_start, tmp_path / "by_hand")
    afresh = shared_start(recipe.model, recipe.cold_start, tmp_path / "afresh")
    assert are_equal(made / "cold_start_further", by_hand)
    assert not are_equal(made / "cold_start_further", afresh)


@pytest.mark.parametrize("arm", ["shared", "further", "other rows too"])
def test_rl_begins_from_the_arm_s_start(arm: str, made: Path, tmp_path: Path) -> None:
    """A step at rate 0 leaves the weights of the start, and of no other one."""
    lab_of().run(arm, 0, tmp_path / "cell", asked(made))
    same = [one.name for one in sorted(made.glob("cold_start*")) if are_equal(tmp_path / "cell", one)]
    assert same == [lab_of().starts(asked(made)).place(arm).name]


def test_another_start_makes_another_cell(made: Path, tmp_path: Path) -> None:
    """A changed start of the lab concerns the arms that begin from it and those that train it further; a changed start
    of an arm that arm alone."""
    folder = tmp_path / "lab"
    shutil.copytree(made, folder)

    def cells(lab: Arms) -> dict[str, LabCell]:
        return {arm: lab.experiment().cell(arm, 0, asked(folder)) for arm in lab.said.arms}

    for cell in cells(lab_of()).values():
        cell.begin()
        cell.finish({"after": {}}, ())
    assert {cell.due() for cell in cells(lab_of()).values()} == {""}
    edited = lab_of(arms={**LAB["arms"], "other rows": {"cold_start.data.n": 17}})
    due = {arm: cell.due() for arm, cell in cells(edited).items() if cell.due()}
    assert [*due] == ["other rows"]
    assert "cold_start.data.n: 16 → 17" in due["other rows"]
    shutil.copy(made / "cold_start_other_rows" / "model.safetensors", folder / "cold_start")
    due = {arm: cell.due() for arm, cell in cells(lab_of()).items() if cell.due()}
    assert due == {"shared": "again: start has changed", "further": "again: cold_start has changed"}


def test_a_given_start_is_that_of_arms_without_one(made: Path, tmp_path: Path) -> None:
    given = made / "cold_start_wider"
    options = asked(tmp_path, start=given)
    starts = lab_of().starts(options)
    assert starts.make("shared") == str(given)
    assert starts.changes_of("further")["model"] == {"path": str(given)}
    said = lab_of().check(["shared", "further", "wider"], options)["start"]
    own = "; ".join(f"{arm}'s own, in {tmp_path}/cold_start_{arm}" for arm in ("further", "wider"))
    assert said == f"{given}; {own}"
    assert not [*tmp_path.iterdir()]


def by_function(arm: str, seed: int, options: Namespace) -> dict[str, Any]:
    return {"model.tiny.hidden_size": 48}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cold_start": None}, "arm 'own' sets `cold_start` and has no `cold_start`: its start is made by one"),
        ({"model": {"path": "./gone"}}, r"arm 'own': .*\./gone"),
        ({"model": "begin"}, "`model`"),
    ],
)
def test_a_mistake_of_an_own_start_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        lab_of(arms={"own": changes}).check(["own"], asked(tmp_path))


def test_a_change_of_the_model_for_all_is_that_of_the_lab_s_start(tmp_path: Path) -> None:
    options = asked(tmp_path, set=[["model.tiny.hidden_size", "16"]])
    starts = lab_of().starts(options)
    assert starts.read({}).model.tiny == {**LAB["settings"]["model.tiny"], "hidden_size": 16}
    assert starts.read(starts.changes_of("further")).model.path == str(tmp_path / "cold_start")
    lab_of().check(["shared", "further"], options)


def test_a_given_start_that_is_nowhere_is_named_before_a_cell_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`start`: 'runs/gone' is neither a folder with a saved model here nor a"):
        lab_of().check(["shared"], asked(tmp_path, start="runs/gone"))
    said = lab_of().check(["shared"], asked(tmp_path, start="runs/gone", dry_run=True))
    assert said["start"] == "runs/gone (a hub name: there is no such folder)"


def test_a_function_cannot_change_the_start(made: Path) -> None:
    lab = lab_of(arms={"own": "unit.labs.test_starts:by_function"})
    with pytest.raises(ValueError, match=r"`arms\.own` gives \['model\.tiny\.hidden_size'\].*write it in the file"):
        lab.run("own", 0, made / "own-0", asked(made))


def test_the_shipped_bases_have_starts_of_their_own(tmp_path: Path) -> None:
    """Mid-training begins from the base that `share 1%` begins from."""
    lab = Arms.read("capability_bases")
    starts = lab.starts(asked(tmp_path))
    places = {arm: starts.place(arm).name.removeprefix("cold_start") for arm in lab.said.arms}
    own = {"share 0%": "_share_0%", "share 10%": "_share_10%", "small base": "_small_base"}
    assert places == {"share 1%": "", **own, "mid-training": "_mid-training"}
    recipes = {arm: starts.read(starts.changes_of(arm)) for arm in lab.said.arms}
    assert recipes["mid-training"].model == ModelSection(str(starts.place("share 1%")))
    shares = {arm: recipes[arm].cold_start.data.arguments.get("edge", {}).get("n") for arm in recipes}
    assert shares == {"share 1%": 200, "share 0%": None, "share 10%": 2000, "small base": 200, "mid-training": None}
