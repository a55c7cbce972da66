"""The round machine, its recipe and its page, without a model: markers, questions, batches, mistakes, what a line
says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_lab.evaluation.rounds_sections import rounds_figures as figures
from grpo_lab.evaluation.rounds_sections import rounds_table
from grpo_lab.evaluation.run_page import rounds_page
from grpo_lab.evaluation.run_record import read_run
from grpo_lab.io import write_json, write_json_lines
from grpo_lab.pipelines.rounds import ROUNDS as COMMAND
from grpo_lab.pipelines.rounds import line_of, plan_of_rounds, stages_of
from grpo_lab.pipelines.rounds_recipe import METHODS, RoundsRecipe, questions_of, rounds_recipe_from, seed_of
from grpo_lab.pipelines.stage_engine import Stage, Work, carry_out, make_again
from grpo_lab.recipe.job import Questions
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs import stage
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.stages.sample import SAMPLES

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ROUNDS = sorted(
    path for path in RECIPES.rglob("*.yaml") if read_yaml(path).get("method") in METHODS and "rounds" in read_yaml(path)
)
DATA = {"loader": "word_problems", "n": 8, "steps": [1, 2], "largest": 20}
GOOD: dict[str, Any] = {"method": "expert_iteration", "model": {"path": "m"}, "data": DATA}


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_a_stage_with_a_marker_is_not_done_again_and_one_that_broke_off_is(tmp_path: Path) -> None:
    done: list[str] = []

    def stage_of(name: str, broken: bool = False) -> Stage:
        def make(workspace: Workspace) -> dict[str, Any]:
            done.append(name)
            if broken:
                raise RuntimeError("killed")
            return {"name": name, "before": sorted(workspace.facts)}

        return Stage(name, Work(make), tmp_path)

    workspace = Workspace(tmp_path, StopRequests(tmp_path))
    with pytest.raises(RuntimeError):
        carry_out([stage_of("sample"), stage_of("train", broken=True)], workspace)
    assert not (tmp_path / "train.json").exists()
    whole = [stage_of("sample"), stage_of("train")]
    assert carry_out(whole, workspace) == ["train"]
    assert done == ["sample", "train", "train"]
    assert workspace.facts["train"] == {"name": "train", "before": ["sample"]}
    assert carry_out(whole, Workspace(tmp_path, workspace.stop)) == []
    (tmp_path / "train.json").write_text('{"steps": 3}')  # as it was written until November 2026
    assert whole[1].record().results == {"steps": 3}
    assert carry_out(whole, workspace) == []
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(ValueError, match=r"train\.json, line 1: not JSON.*the stage is done again"):
        carry_out(whole, workspace)


def test_what_is_gone_is_made_again_with_what_it_was_made_of(tmp_path: Path) -> None:
    def made(_: Workspace) -> None: ...

    def stages(number: int, before: Path) -> list[Stage]:
        folder = tmp_path / f"round-{number}"
        return [
            Stage("select", Work(made, {"rows": "rows.jsonl"}), folder),
            Stage("train", Work(made, {"model": "model"}), folder, [folder / "rows.jsonl", before]),
            Stage("evaluate", Work(made, keeps=["evaluation"]), folder, [folder / "model"]),
        ]

    first, second = stages(1, tmp_path / "start"), stages(2, tmp_path / "round-1" / "model")
    every = [*first, *second]

    def due(gone: str, *kept: str) -> list[str]:
        for name in kept:
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for one in every:
            one.begin(one.record(), "")
            one.finish(one.record())
        make_again(every, [tmp_path / gone])
        return [f"{one.folder.name} {one.name}" for one in every if one.due(one.record())]

    assert due("round-2/evaluation/x", "round-2/model") == ["round-2 evaluate"]
    assert due("round-2/model/w", "round-2/rows.jsonl", "round-1/model") == ["round-2 train"]
    assert not (tmp_path / "round-2" / "model").exists()
    (tmp_path / "round-1" / "model").rmdir()
    assert due("round-2/model/w", "round-1/rows.jsonl", "start") == ["round-1 train", "round-2 train"]


def test_a_workspace_can_still_be_imported_by_its_earlier_name() -> None:
    with pytest.warns(DeprecationWarning, match="called `Workspace` now"):
        assert stage.At is stage.Workspace
    with pytest.raises(AttributeError, match="no attribute 'Nowhere'"):
        _ = stage.Nowhere


def test_every_round_asks_other_questions_until_all_were_asked() -> None:
    """10 rows, 3 a round: three rounds of a lap, one row is left out of it; the next lap has another order."""
    lap = [questions_of(number, 10, 3, seed=0) for number in (1, 2, 3)]
    assert len({row for asked in lap for row in asked}) == 9
    assert questions_of(4, 10, 3, seed=0) != lap[0]
    assert questions_of(2, 10, 3, seed=0) == lap[1]
    assert questions_of(2, 10, 3, seed=1) != lap[1]
    assert questions_of(7, 4, None, seed=0) == [0, 1, 2, 3]
    assert len({seed_of(s, n, what) for s in range(3) for n in range(9) for what in ("sample", "train")}) == 54


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "expert_iteratoin"}, "`method` is 'expert_iteratoin'; did you mean 'expert_iteration'"),
        ({"method": None}, "`method` is None. Allowed"),
        ({"rounds": {"conut": 2}}, "`rounds` has no setting 'conut'; did you mean 'count'"),
        ({"rounds": 3}, "`rounds` is 3; it must be a mapping"),
        ({"rounds": {"count": 0}}, "`rounds.count` is 0"),
        ({"rounds": {"train_from": "first"}}, "`rounds.train_from` is 'first'"),
        ({"n_sampels": 2}, "did you mean 'n_samples'"),
        ({"keep": {"distinct": "equation"}}, "`keep.distinct` is 'equation'"),
        ({"pairs": {}}, "`pairs` has no effect with `method: expert_iteration`"),
        ({"method": "dpo", "keep": {}}, "`keep` has no effect with `method: dpo`"),
        ({"method": "rft", "rounds": {"count": 2}}, "`method: rft` samples once.*`online_rft`"),
        ({"method": "online_rft", "rounds": {"train_from": "base"}}, "goes on with the last model"),
        ({"base": {"path": "b"}}, "`base` has an effect only with"),
        ({"model": {"path": "m", "lora": {"r": 1}}}, "`model.lora`: rounds train all weights"),
        ({"method": "simpo", "pairs": {"reference": "base"}}, "simpo`, which has no reference"),
        ({"data": None}, "needs `data`"),
        ({"method": "dpo", "n_samples": 1}, "`n_samples` is 1; `method: dpo` holds a right answer against a wrong one"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rounds_recipe_from(
            {name: value for name, value in {**GOOD, **changes}.items() if value is not None or name == "method"}
        )


def test_a_method_is_its_settings() -> None:
    made = {method: rounds_recipe_from({**GOOD, "method": method}) for method in METHODS}
    assert {m: (r.rounds.count, r.rounds.train_from) for m, r in made.items()} == {
        "rft": (1, "base"), "online_rft": (10, "last"), "expert_iteration": (3, "last"), "dpo": (2, "last"),
        "simpo": (2, "last")
    }  # fmt: skip
    assert made["rft"].keep is not None
    assert (made["rft"].keep.gold, made["rft"].keep.right_calculations) == (True, True)
    assert made["expert_iteration"].keep is not None
    assert not made["expert_iteration"].keep.gold
    star = rounds_recipe_from({**GOOD, "rounds": {"train_from": "base"}})
    assert (star.rounds.count, star.rounds.train_from) == (3, "base")


@pytest.mark.not_fast
@pytest.mark.parametrize("path", ROUNDS, ids=lambda path: path.stem)
def test_every_recipe_is_told_in_words_and_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    fewer = {"cold_start.data.n": 20, "data.n": 1600, "evaluation.data.n": 4, "output_dir": str(tmp_path / "out")}
    facts = plan_of_rounds(rounds_recipe_from(read_yaml(path, fewer)))
    recipe = rounds_recipe_from(read_yaml(path, fewer))
    assert f"{recipe.rounds.questions * recipe.sampling.n_samples * recipe.rounds.count:,} in all" in facts["1. sample"]  # type: ignore[operator]
    assert "after a cold start on 20" in facts["start model"]
    assert "the start model and the model of each round on 4" in facts["4. evaluate"]
    assert not (tmp_path / "out").exists()


def test_there_is_a_recipe_of_each_method_from_one_start_model() -> None:
    found = {path.stem: read_yaml(path) for path in ROUNDS}
    assert {one["method"] for one in found.values()} == set(METHODS)
    quick = read_yaml(RECIPES / "quickstart" / "dr_grpo.yaml")
    for one in found.values():
        assert (one["model"], one["data"], one["evaluation"]) == (quick["model"], quick["data"], quick["evaluation"])
        assert {key: value for key, value in one["cold_start"].items() if key != "bf16"} == quick["cold_start"]


def test_a_folder_of_other_settings_is_refused_and_more_rounds_go_on(tmp_path: Path) -> None:
    def recipe(**changes: Any) -> RoundsRecipe:
        return rounds_recipe_from({**GOOD, "output_dir": str(tmp_path), **changes})

    assert COMMAND.earlier(recipe(), False) == {}
    run = {"pipeline": "rounds", "count": 3, "recipe": COMMAND.settings(recipe()), "finished": True}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert COMMAND.earlier(recipe(), False) == run
    assert COMMAND.earlier(recipe(rounds={"count": 4}, name="another", keep_models=False), False) == run
    with pytest.raises(ValueError, match=r"other settings: temperature: 1\.0 → 0\.5\. Choose"):
        COMMAND.earlier(recipe(temperature=0.5), False)
    with pytest.raises(ValueError, match=r"keep\.per_problem: not set → 2; training\.beta2: not set → 1\. Choose"):
        COMMAND.earlier(recipe(keep={"per_problem": 2}, training={"beta2": 1}), False)
    with pytest.raises(ValueError, match="it can only grow"):
        COMMAND.earlier(recipe(rounds={"count": 2}), False)
    assert COMMAND.earlier(recipe(temperature=0.5), True) == {}
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="holds something else"):
        COMMAND.earlier(recipe(), False)


@pytest.mark.parametrize(
    ("scores", "said"),
    [([None, None], "0 could be scored and 0 are right"), ([1.0, 1.0], "2 could be scored and 2 are")],
)
def test_a_round_without_rows_says_why(scores: list[float | None], said: str, tmp_path: Path) -> None:
    recipe = rounds_recipe_from({**GOOD, "method": "dpo", "output_dir": str(tmp_path), "rounds": {"count": 1}})
    line = {"row": 0, "completions": ["a", "b"], "scores": scores, "lengths": [1, 1]}
    folder = tmp_path / "round-1"
    folder.mkdir()
    (folder / SAMPLES).write_text(json.dumps(line) + "\n")
    select = stages_of(recipe, Questions(Dataset.from_list([{"prompt": "q"}]), None))[1][1]
    with pytest.raises(ValueError, match=rf"of 2 samples {said}.*the model so far is m$"):
        select.kind.run(Workspace(folder, StopRequests(tmp_path)))


# --- what is shown ----------------------------------------------------------------------------------------------------


def lines() -> list[dict[str, Any]]:
    """The start, and a round: 4 questions × 5 samples, 8 right, 3 problems solved in 6 ways, 5 own rows and 4 gold
    ones."""
    accuracy = {"value": 0.25, "low": 0.1, "high": 0.4, "n": 4}
    found: list[dict[str, Any]] = []
    found.append(line_of(0, {"train": {"steps": 9}, "evaluate": {"accuracy": accuracy, "mean_length": 5.0}}, found))
    sample = {"questions": 4, "samples": 20, "right_share": 0.4, "tokens": 200, "mean_length": 9.0}
    select = {"solved": 3, "ways": 6, "kept": 9, "gold": 4, "rows": 9}
    train = {"steps": 3, "loss": 0.5, "weight_first": 0.5, "weight_last": 0.4}
    for number in (1, 2):
        found.append(
            line_of(
                number, {"sample": sample, "select": select, "train": train, "evaluate": {"accuracy": accuracy}}, found
            )
        )
    return found


def test_a_line_holds_shares_and_totals() -> None:
    start, _, second = lines()
    assert (start["steps"], start["tokens_total"], start["accuracy"], start["length"]) == (0, 0, 0.25, 5.0)
    # 5 own rows of 20 samples, 6 ways over 3 solved problems; two rounds of 3 steps and 200 tokens
    assert (second["kept_share"], second["ways"], second["steps_total"], second["tokens_total"]) == (0.25, 2.0, 6, 400)
    table = rounds_table([start, second])
    assert table.rows[0][3] == "–"
    assert "25.0% [10.0%, 40.0%]" in table.rows[1]


def test_the_page_shows_every_curve_and_trusts_no_text(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rounds.jsonl", lines())
    recorded = read_run(tmp_path).rounds
    found = figures(recorded)
    assert [one.title for one in found][-1].startswith("Weight of a pair")
    assert len(found) == 5
    assert len(figures([{k: v for k, v in line.items() if "weight" not in k} for line in recorded])) == 4
    run = {"name": "<b>x", "pipeline": "rounds", "method": "dpo", "count": 2, "recipe": {"data": {"loader": "<i>"}}}
    write_json(tmp_path / "run.json", run)
    text = rounds_page(read_run(tmp_path)).html()
    assert "&lt;b&gt;x" in text
    assert "<i>" not in text
    assert "tokens generated</text>" in text
    assert "0.500 → 0.400" in text
    (tmp_path / "rounds.jsonl").unlink()
    assert "Not recorded: Rounds (rounds.jsonl)." in rounds_page(read_run(tmp_path)).html()
