"""``grpo_lab.labs.arms``: what a lab file may say, the labs that ship, and their numbers by hand."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_tables import page_with, pages

from documentation.blocks import ROOT
from grpo_lab.cli import main
from grpo_lab.evaluation import EvaluationResult
from grpo_lab.labs import LABS as WRITTEN
from grpo_lab.labs.arms import Arms, evaluated, shipped_labs
from grpo_lab.labs.lab_file import LabFile
from grpo_lab.recipe.job import lab_config, numbers_read
from grpo_lab.recipe.sections import read_recipe
from grpo_lab.registry import load_named
from grpo_lab.settings import read
from grpo_lab.trainer.settings.algorithm import algorithm_from
from unit.reports.test_report import outcome

LABS = shipped_labs()
SAID: dict[str, Any] = {"about": "x", "recipe": "quickstart/dr_grpo.yaml", "arms": {"a": {}, "b": {"seed": 1}}}


def options(**given: Any) -> Namespace:
    return Namespace(**{"recipe": None, "start": None, "set": [], "folder": Path("nowhere"), **given})


def lab_of(**said: Any) -> Arms:
    return Arms(read(LabFile, {**SAID, **said}), Path("nowhere"))


@pytest.mark.parametrize("name", LABS)
def test_arms_are_recipes_and_no_two_are_the_same(name: str) -> None:
    """What a change says is a setting of that recipe; an arm that a function makes is met by its training."""
    lab = Arms.read(str(LABS[name]))
    plain = [arm for arm, (changes, _) in lab.said.cells.items() if not isinstance(changes, str)]
    recipes = [numbers_read(read_recipe(lab.recipe(options()), lab.changes(arm, 3, options()))) for arm in plain]
    assert len({repr(one) for one in recipes}) == len(recipes)
    for one in recipes:
        lab_config(one)
        assert one.data.arguments["seed"] == 3


def test_an_arm_does_not_reach_into_the_next() -> None:
    """The arm a changes an entry of the list that `settings` writes."""
    lab = lab_of(settings={"rewards": ["accuracy"]}, arms={"a": {"rewards.0": "worked_out"}, "b": {}})
    told = [read_recipe(lab.recipe(options()), lab.changes(arm, 0, options())).rewards[0].name for arm in "ab"]
    assert told == ["worked_out", "accuracy"]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_discounted"])
def test_the_reinforce_menu_is_twelve_algorithms(name: str) -> None:
    lab, seen = Arms.read(str(LABS[name])), set()
    for arm in lab.said.arms:
        config = lab_config(numbers_read(read_recipe(lab.recipe(options()), lab.changes(arm, 0, options()))))
        found = algorithm_from(config, config.lab_settings)
        seen.add((str(found.advantage), str(found.objective.surrogate)))
    assert len(seen) == 12
    assert all(("Returns" in rule) is (name == "reinforce_discounted") for rule, _ in seen)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"colums": {}}, "has no setting 'colums'; did you mean 'columns'"),
        ({"arms": {}}, "`arms` and `seeds` need at least one entry each"),
        ({"arms": {"a": 3}}, "it must be changes of the recipe, or 'module:function'"),
        ({"arms": {"a/b": {}}}, r"`arms` has \['a/b'\]: names that differ as folders are needed, without a slash"),
        ({"arms": {"a, b": {}, "a b": {}}}, "names that differ as folders"),
        ({"pairs": [["a", "c"]]}, r"`pairs` has 'c'. Allowed: \['a', 'b'\]"),
        ({"compared_by": "ece"}, r"`compared_by` is 'ece'. Allowed: \['accuracy'\]"),
        ({"threads": 0}, "`threads` is 0"),
    ],
)
def test_a_mistake_in_the_file_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        lab_of(**wrong)


def test_columns_by_hand() -> None:
    """Two right of three greedy answers; the log's last quarter of eight steps is its last two."""
    result = EvaluationResult(tuple(outcome(i, score, tokens=10 * i + 10) for i, score in enumerate([1.0, 0.0, 1.0])))
    log = [{"entropy": float(i)} for i in range(8)] + [{"train_loss": 1.0}]
    lab = lab_of(
        columns={
            "accuracy": "greedy.accuracy.value",
            "right": "greedy.mean_length_correct",
            "none": "greedy.mean_thinking",
            "entropy": "last.entropy",
            "all": "mean.entropy",
            "own": "unit.labs.test_lab_arms:rows",
        }
    )
    found = lab.numbers(result, log)
    assert found.pop("none") != found.get("none")  # NaN
    # (10 + 30) / 2, (6 + 7) / 2, (0 + … + 7) / 8
    assert found == {"accuracy": pytest.approx(2 / 3), "right": 20.0, "entropy": 6.5, "all": 3.5, "own": 9.0}
    assert math.isnan(lab.numbers(result, [])["entropy"])
    for place, said in (("sampled.accuracy.value", "has no 'accuracy' there, but None"),
                        ("greedy.accuracies", "has no 'accuracies' there, but"),
                        ("greedy.accuracy", "which is no number")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"`columns.accuracy` is '{place}'.*{said}"):
            lab_of(columns={"accuracy": place}).numbers(result, log)


def rows(result: EvaluationResult, log: list[Any]) -> int:
    return len(log)


def test_the_entropy_labs_curve_is_the_law_of_its_first_third() -> None:
    """Nine rollouts of R = 1 − e^H / 4, the last six 0.1 below that: what is predicted knows nothing of the 0.1. Rows
    between rollouts have no reward; of the last quarter's two rollouts H is 0.2 and 0.1: 1 − (e^0.2 + e^0.1) / 8."""
    lab = Arms.read("entropy")
    entropies = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    log = [
        {"entropy": h, "rollout/generated": 10 * i, "rewards/accuracy_reward/mean": 1 - math.exp(h) / 4 - 0.1 * (i > 2)}
        for i, h in enumerate(entropies)
    ]
    log = [row for rollout in log for row in (rollout, {"entropy": 5.0, "rollout/generated": 0})]
    curve = lab.curve("predicted", "lab_entropy:predicted", log, Path("nowhere"))
    assert curve == [(10 * i, pytest.approx(1 - math.exp(entropies[i]) / 4)) for i in range(3, 9)]
    end = load_named("lab_entropy:predicted_end", "columns")(None, log)
    assert end == pytest.approx(1 - (math.exp(0.2) + math.exp(0.1)) / 8)
    assert lab.curve("predicted", "lab_entropy:predicted", log[:4], Path("nowhere")) == []  # two rollouts
    assert math.isnan(load_named("lab_entropy:predicted_end", "columns")(None, []))
    measured = lab.curve("pass@1", "rewards/accuracy_reward/mean", log, Path("nowhere"))
    assert [place for place, _ in measured] == [10 * i for i in range(9)]


def test_pairs_are_of_one_seed(tmp_path: Path) -> None:
    """The arm a has seeds 0 and 2, b has 1 and 2: only seed 2 is compared."""
    found = {
        arm: [{"seed": seed, "before": None, "after": {"accuracy": value}, "curves": {}} for seed, value in runs]
        for arm, runs in {"a": [(0, 0.1), (2, 0.75)], "b": [(1, 0.9), (2, 0.5)]}.items()
    }
    said = lab_of(pairs=[["a", "b"]]).report(found, options(folder=tmp_path))
    assert said.endswith("- accuracy, a − b, seed by seed: 0.250")
    assert (tmp_path / "table.md").read_text() == said + "\n"


def test_a_pair_of_which_an_arm_has_no_run_has_no_line(tmp_path: Path) -> None:
    """The difficulty lab from a weaker start runs without `resample`: its page said "resample − uniform: –"."""
    found = {"a": [{"seed": 0, "before": None, "after": {"accuracy": 0.5}, "curves": {}}]}
    assert "seed by seed" not in lab_of(pairs=[["a", "b"]]).report(found, options(folder=tmp_path))
    assert [name for name, text in pages().items() if re.search(r"seed by seed: –$", text, re.MULTILINE)] == []


def test_the_recipe_lies_beside_the_file_or_below_recipes(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("")
    lab = Arms(read(LabFile, {**SAID, "recipe": "mine.yaml"}), tmp_path)
    assert lab.recipe(options()) == tmp_path / "mine.yaml"
    assert lab.recipe(options(recipe="lab/chains/dr_grpo.yaml")).parts[-3:] == ("lab", "chains", "dr_grpo.yaml")
    with pytest.raises(ValueError, match=r"ships no recipe 'gone.yaml'"):
        lab.recipe(options(recipe="gone.yaml"))


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "sortin"]) == 2
    assert "no lab is called 'sortin'; did you mean 'sorting'?" in capsys.readouterr().err
    (tmp_path / "lab.yaml").write_text(yaml.safe_dump({**SAID, "start": "no/such/place"}))
    assert main(["lab", str(tmp_path / "lab.yaml"), "--folder", str(tmp_path / "out")]) == 2
    assert "`start` is 'no/such/place': no such folder; name a model by `--start`" in capsys.readouterr().err
    for option in ("--start", "--recipe"):
        assert main(["lab", "kl", option, "x"]) == 2
        assert f"{option} has no effect: lab 'kl' trains nothing" in capsys.readouterr().err


def test_a_table_takes_the_place_of_its_block(tmp_path: Path) -> None:
    (tmp_path / "bias").mkdir()
    (tmp_path / "bias" / "table.md").write_text("| \\1 |\n")
    blocks = "<!-- lab {0}: begin -->\nold\n<!-- lab {0}: end -->\n"
    text = f"a\n{blocks.format('bias')}b\n{blocks.format('noise')}"
    assert page_with(text, tmp_path) == text.replace("old", "| \\1 |", 1)
    for name in re.findall(r"<!-- lab (\S+): begin -->", "".join(pages().values())):
        assert "/" in name or name.partition("-")[0] in {*LABS, *WRITTEN}  # with a slash: kept from a former script


def test_make_labs_runs_all() -> None:
    (said,) = re.findall(r"^LABS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(said.replace("\\\n", " ").split()) == sorted({*LABS, *WRITTEN})


def test_the_page_s_own_lab_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "labs.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "lab.yaml").write_text(block)
    lab = Arms.read(str(tmp_path / "lab.yaml"))
    for arm in lab.said.arms:
        lab_config(numbers_read(read_recipe(lab.recipe(options()), lab.changes(arm, 0, options()))))


def test_a_curve_of_the_evaluations_by_hand(tmp_path: Path) -> None:
    """Logged every second step; an evaluation of step 3 has the tokens that were logged at step 2."""
    log = [{"step": step, "rollout/generated": 100 * step} for step in (2, 4, 6, 8, 10, 12)]
    for name, value in {"before": 0.1, "step_3": 0.2, "step_10": 0.4, "after": 0.5}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"greedy": {"accuracy": value}}))
    found = evaluated(tmp_path, "greedy.accuracy", "curves.right", log)
    assert found == [(0, 0.1), (200, 0.2), (1000, 0.4), (1200, 0.5)]
    with pytest.raises(ValueError, match=r"`curves\.right` is 'greedy.ece': the evaluation's summary has no 'ece'"):
        evaluated(tmp_path, "greedy.ece", "curves.right", log)
