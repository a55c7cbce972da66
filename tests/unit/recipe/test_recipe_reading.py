"""A recipe that does not have the form of one: the sentence names the place, what stands there and what may."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_lab.cli import _parser, main
from grpo_lab.pipelines.curate import curation_recipe_from
from grpo_lab.pipelines.evaluate import plan_of
from grpo_lab.pipelines.long2short import LONG2SHORT, long2short_recipe_from
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.rounds import ROUNDS
from grpo_lab.pipelines.rounds_recipe import rounds_recipe_from
from grpo_lab.pipelines.staged_command import resolve
from grpo_lab.recipe.build import build_reward, reach_reward_models
from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.job import numbers_read
from grpo_lab.recipe.models import load_tokenizer
from grpo_lab.recipe.policy import meta_model
from grpo_lab.recipe.sections import DataSection, ModelSection, RewardSection, recipe_from
from grpo_lab.recipe.yaml import parse_overrides, read_yaml, written
from grpo_lab.runs.differences import refuse_other_rows, rows_fingerprint
from grpo_lab.runs.folder import write_run

GOOD: dict[str, Any] = {
    "model": {"tiny": {}},
    "data": {"loader": "word_problems", "n": 8},
    "rewards": [{"name": "accuracy", "weight": 1.0}],
}
DATA = GOOD["data"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rewards": "accuracy"}, ["`rewards` is 'accuracy'", "list"]),
        ({"rewards": {"name": "accuracy"}}, ["`rewards` is {'name': 'accuracy'}", "list"]),
        ({"rewards": None}, ["`rewards` is None", "list"]),
        ({"rewards": [{"name": "accuracy", "weight": "heavy"}]}, ["`rewards.0.weight` is 'heavy'", "a number"]),
        ({"rewards": [{"name": "accuracy", "weight": None}]}, ["`rewards.0.weight` is None", "a number"]),
        ({"cold_start": True}, ["`cold_start` is True", "mapping"]),
        ({"evaluation": True}, ["`evaluation` is True", "mapping"]),
        ({"data": {**DATA, "steps": 3}}, ["`data` is", "'steps': 3", "`steps` must be two numbers"]),
        ({"data": {**DATA, "limit": "ten"}}, ["`data.limit` is 'ten'", "at least 1"]),
        ({"evaluation": {"data": {**DATA, "limit": 0}}}, ["`evaluation.data.limit` is 0"]),
        ({"model": {"nonsense": 1}}, ["`model` has no setting 'nonsense'", "Allowed"]),
    ],
)
def test_a_section_of_another_form_is_named(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        recipe_from({**GOOD, **changed})
    for word in words:
        assert word in str(caught.value)


def test_a_good_recipe_is_read() -> None:
    recipe = recipe_from({**GOOD, "data": {**DATA, "steps": [1, 3], "limit": 4}})
    assert recipe.data.arguments["steps"] == (1, 3)
    assert (recipe.data.limit, recipe.rewards[0].weight) == (4, 1.0)


@pytest.mark.not_fast(cases="text11-nested more than 100 deep")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_steps: 1\nseed: 2\nmax_steps: 3", ", line 3: `max_steps` stands there twice (first in line 1); leave "
            "one out"),
        ("data:\n  n: 1\n  'n': 2", ", line 3: `n` stands there twice (first in line 2); leave one out"),
        ("x: {a: 1, a: 2}", ": `a` stands there twice"),
        ("a: 1\nmax_steps: 010", ", line 2: `010` is an octal number, or a decimal one: write the decimal number, or "
            "'010' in quotes"),
        ("max_steps: -08", "`-08` is an octal number, or a decimal one"),
        ("max_steps: 1:30", "`1:30` is a number of base 60, or text: write the decimal number, or '1:30' in quotes "
            "for text"),
        ("max_hours: 1:30.5", "`1:30.5` is a number of base 60"),
        ("on: 1", "the key `on` is read as a switch; put it in quotes"),
        ("a: 1\n---\nb: 2", ", line 2: no YAML: expected a single document in the stream, but found another document"),
        ("a: &a {b: *a}", "the anchor &a holds itself"),
        ("a: &a {b: 1}\nc: {<<: *a, <<: *a}", "`<<` stands there twice"),
        ("a: " + "[" * 5000, "nested more than 100 deep"),
        ("{a: " * 5000, "nested more than 100 deep"),
        ("? [a]\n: 1", "found unhashable key"),
        ("a: \0", "no YAML: the character '\\x00' is not allowed"),
        ("model: {path: a\ndata: [", "no YAML"),
    ],
)  # fmt: skip
def test_a_line_of_a_recipe_means_one_thing(text: str, said: str, tmp_path: Path) -> None:
    """A key written twice took the last, `010` was 8 and `1:30` was 90."""
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"recipe {str(file)!r}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_two_releases_of_yaml_agree_on_is_read_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("base: &b {x: 1, y: 2}\nover: {<<: *b, x: 3}\nday: 2024-05-01\nbig: 1_000\nhex: 0x10\nquiet: no")
    found = read_yaml(file)
    assert found["over"] == {"x": 3, "y": 2}
    assert (found["day"], found["big"], found["hex"], found["quiet"]) == (
        "2024-05-01",
        1000,
        16,
        False,
    )  # the day was a date
    texts = dict(enumerate(["010", "08", "1e-5", "2024-05-01", "1:30", "no", "0x10", "1_000", "08:30"]))
    file.write_text(written({str(name): text for name, text in texts.items()}))
    assert list(read_yaml(file).values()) == list(texts.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max_steps", "010"], "`--max_steps` '010': `010` is an octal number"),
        (["--max_steps", "1:30"], "`--max_steps` '1:30': `1:30` is a number of base 60"),
        (["--rewards", "{name: "], r"`--rewards`.*'\{name: '"),
    ],
)
def test_a_value_on_the_command_line_means_one_thing(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_overrides(words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"rewards.0.weight": 2.0}, None),
        ({"rewards.name": "accuracy"}, ["`--rewards.name`", "'name'", "0 to 0"]),
        ({"rewards.1.weight": 2.0}, ["`--rewards.1.weight`", "'1'", "0 to 0"]),
        ({"rewards.1": "accuracy"}, ["`--rewards.1`", "'1'", "0 to 0"]),
        ({"data.loader.split": "test"}, ["`--data.loader.split`", "'loader'"]),
    ],
)
def test_an_override_into_a_list_takes_a_place_of_it(
    tmp_path: Path, override: dict[str, Any], words: list[str] | None
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(GOOD))
    if words is None:
        assert read_yaml(file, override)["rewards"][0]["weight"] == 2.0
        return
    with pytest.raises(ValueError) as caught:
        read_yaml(file, override)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("limit", ["0", "-3", "1.5", "ten"])
def test_evaluate_refuses_a_limit_of_nothing(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--limit 0` used to make 500 word problems."""
    with pytest.raises(SystemExit) as left:
        main(["evaluate", "m", "--data", "word_problems", "--limit", limit])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "--limit" in error
    assert repr(limit) in error


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for model in (str(tmp_path), "nobody/nothing"):  # a folder without a model, and no hub model
        assert main(["evaluate", model, "--data", "word_problems", "--limit", "2"]) == 2
        error = capsys.readouterr().err
        assert model in error
        assert error.count("\n") == 1
    assert "local folder" in error


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"batch_size": 0}, "`evaluation.batch_size` is 0"),
        ({"n_samples": -1}, "`evaluation.n_samples` is -1"),
        ({"max_new_tokens": 0}, "`evaluation.max_new_tokens` is 0"),
        ({"n_samples": 4, "temperature": 0}, "`evaluation.temperature` is 0"),
        ({"before": "no"}, "`evaluation.before` is 'no'"),
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused_before_the_training(changed: dict[str, Any], word: str) -> None:
    """With `before: false` it used to be refused when the training was over."""
    with pytest.raises(ValueError, match=word):
        recipe_from({**GOOD, "evaluation": {"data": DATA, "before": False, **changed}})


@pytest.mark.parametrize(
    ("filters", "word"),
    [
        ({"band": {"low": 0.9, "high": 0.1}}, "`filters.band`.*0.9.*0.1"),
        ({"band": {"low": "hard"}}, "`filters.band.low` is 'hard'"),
        ({"band": "easy"}, "`filters.band.rule` is 'easy'.*'learnable' or 'hard'"),
        ({"band": {"rule": "hard", "low": 0.5}}, "`filters.band`.*low=0.5, high=0.3"),
        ({"band": {"rule": "hard", "fail_best_of": 8}}, "`fail_best_of`, which is a rule of its own"),
        ({"band": {"fail_best_of": 11}}, "`filters.band.fail_best_of` is 11 and `n_samples` 10"),
        ({"guessable": {"tries": 0}}, "`filters.guessable.tries` is 0"),
        ({"guessable": {"max_new_tokens": 1.5}}, "`filters.guessable.max_new_tokens` is 1.5"),
        ({"balance": {"by": "kind", "per_domain": -1}}, "`filters.balance.per_domain` is -1"),
        ({"balance": {"by": "kind", "per_domain": "all"}}, "`filters.balance.per_domain` is 'all'"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_refused_before_anything_is_sampled(
    filters: dict[str, Any], word: str
) -> None:
    """The band and the balance used to be looked at when all samples were there."""
    with pytest.raises(ValueError, match=word):
        curation_recipe_from({"data": DATA, "model": {"path": "m"}, "filters": filters})


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: build_reward(RewardSection("accuracy", arguments={"mod": "strict"})), "has no setting 'mod'; did "
            "you mean 'mode'?"),
        (lambda: build_reward(RewardSection("soft_overlong", arguments={"max_completion": 8})),
            "did you mean 'max_completion_len'?"),
        (lambda: build_reward(RewardSection("json:dumps", arguments={"x": 1})), None),  # any keyword
        (lambda: build_reward(RewardSection("shutil:move", arguments={"scr": 1})), "has no setting 'scr'; did you "
            "mean 'src'?"),
        (lambda: load_rows(DataSection("gsm8k", arguments={"splitt": "test"})), "has no setting 'splitt'; did you "
            "mean 'split'?"),
    ],
)  # fmt: skip
def test_a_misspelt_argument_of_a_reward_or_a_loader(build: Any, words: str | None) -> None:
    """A function's was not looked at before its first call; a class's and a loader's said what Python says."""
    if words is None:
        build()
        return
    with pytest.raises(ValueError, match=re.escape(words)):
        build()


# --- rows by a function of a team -------------------------------------------------------------------------------------

TEAM = '''
from datasets import Dataset


def questions(count: int, start: int = 1):
    """Rows that the recipe's template makes prompts of."""
    return [{"question": f"{i} + 1?", "solution": str(i + 1)} for i in range(start, start + count)]


def prompts(count: int):
    return Dataset.from_list([{"prompt": f"{i} + 1 =", "solution": str(i + 1)} for i in range(count)])


def own(count: int, template: str):
    return [{"prompt": f"{template}: {i}", "solution": str(i)} for i in range(count)]


def anything(**arguments):
    return [{"question": repr(sorted(arguments)), "solution": "1"}]


def nowhere():
    return open("/no/such/file")


def empty():
    return []


def wrong():
    return {"question": ["1 + 1?"]}


def bare():
    return [{"text": "1 + 1?"}]
'''


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder."""
    name = f"team_rows_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TEAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    return name


def section(loader: str, **more: Any) -> DataSection:
    return recipe_from({**GOOD, "data": {"loader": loader, **more}}).data


def test_a_loader_of_a_team(team: str) -> None:
    """It was "`data.loader` is 'team.data:rows'; it must be one of [...]"."""
    rows = load_rows(section(f"{team}:questions", count="1e1", start=2, limit=3, template="r1"))
    assert (len(rows), rows["solution"], set(rows["template"])) == (3, ["3", "4", "5"], {"r1"})
    assert "2 + 1?" in rows["prompt"][0]
    assert rows["prompt"][0] != "2 + 1?"
    assert load_rows(section(f"{team}:prompts", count=2))["prompt"] == ["0 + 1 =", "1 + 1 ="]
    assert load_rows(section(f"{team}:own", count=1, template="r1"))["prompt"] == ["r1: 0"]
    assert "['template', 'x']" in load_rows(section(f"{team}:anything", x=1))["question"][0]


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("questions", {}, "`data` (loader 'TEAM:questions') needs `count`, and has none"),
        ("questions", {"cuont": 3}, "has no setting 'cuont'; did you mean 'count'? Allowed: ['count', 'limit', "
            "'loader', 'start', 'template']"),
        ("questions", {"count": "many"}, "`data.count` is 'many'; it must be a whole number"),
        ("questions", {"count": 2, "template": "r2"}, "`template` is 'r2'"),
        ("prompts", {"count": 2, "template": "r1"}, "`template` has no effect, since its rows have a `prompt`; leave "
            "it out"),
        ("nowhere", {}, "`data` (loader 'TEAM:nowhere'): [Errno 2] No such file or directory: '/no/such/file'"),
        ("empty", {}, "gave no rows"),
        ("wrong", {}, "gave a dict; a `datasets.Dataset` or a list of mappings is needed"),
        ("bare", {}, "gave rows with the columns ['text']; `prompt`, or `question`, is needed"),
        ("none_there", {}, "has no 'none_there'"),
    ],
)  # fmt: skip
def test_what_a_loader_of_a_team_does_not_take_or_give(
    function: str, arguments: dict[str, Any], said: str, team: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load_rows(section(f"{team}:{function}", **arguments))
    assert said.replace("TEAM", team) in str(caught.value)


def test_an_evaluation_on_rows_of_a_team(team: str) -> None:
    known = _parser().parse_args(["evaluate", "m", "--data", f"{team}:anything", "--limit", "1"])
    plan = plan_of(known)
    assert (plan.section.data.loader, plan.section.data.limit) == (f"{team}:anything", 1)
    assert plan.section.reward == RewardSection("accuracy", arguments={"mode": "strict"})


@pytest.mark.parametrize("command", ["rounds", "long2short"])
def test_a_run_does_not_go_on_with_other_rows(command: str, team: str, tmp_path: Path, tiny_folder: Path) -> None:
    """What a function gives is not said by its name: a round's samples are kept by the number of their row."""
    written = {"model": {"path": str(tiny_folder)}, "data": {"loader": f"{team}:questions", "count": 3}}
    written |= {"max_completion_length": 8, "output_dir": str(tmp_path / "out"), "training": {"max_steps": 1}}
    given: Any = long2short_recipe_from if command == "long2short" else rounds_recipe_from
    of = {"long2short": LONG2SHORT, "rounds": ROUNDS}[command]
    recipe = given({**written, "method": "dpo"})
    found = resolve(of, recipe, overwrite=False)
    before = found.fingerprint
    changed = found.asked.rows.map(lambda row: {"solution": row["solution"] + "0"})
    (tmp_path / "out").mkdir()
    said = {"pipeline": command, "recipe": of.settings(recipe), of.rows: before}
    write_run(tmp_path / "out", said)
    (tmp_path / "out" / "samples.jsonl").write_text("{}\n")  # it has begun
    resolve(of, recipe, overwrite=False)
    refuse: Any = pytest.raises(ValueError, match=r"the data of the run in .* has changed since: 3 rows")
    with refuse:
        refuse_other_rows(tmp_path / "out", before, rows_fingerprint(changed))
    (tmp_path / f"{team}.py").write_text(TEAM.replace("str(i + 1)", "str(i)"))
    importlib.reload(sys.modules[team])
    with refuse:
        resolve(of, recipe, overwrite=False)
    resolve(of, recipe, overwrite=True)


@pytest.mark.parametrize(
    "name", ["123", "010", "1e3", "1_0", "null", "off", "~", "[x]", "a: b", "a\nb", "a #b", " a", "{x}"]
)
def test_a_folder_is_the_one_whose_name_is_written(name: str, tmp_path: Path) -> None:
    """`1_0` was the folder `10`, a newline a space, `[x]` a list, `null` no folder."""
    assert parse_overrides(["--output_dir", name, f"--model.path={name}"]) == {"output_dir": name, "model.path": name}
    (tmp_path / "r.yaml").write_text("output_dir: 1_0\nmodel: {path: 1e3}\ndata: {source: off}\nstop_file: null\n")
    assert read_yaml(tmp_path / "r.yaml") == {
        "output_dir": "1_0", "model": {"path": "1e3"}, "data": {"source": "off"}, "stop_file": None
    }  # fmt: skip


@pytest.mark.parametrize("folder", [["x"], {"a": "b"}, 12, True, None, ""])
def test_what_is_no_name_of_a_folder_is_refused(folder: Any) -> None:
    model, sampled = {"path": "m"}, {"model": {"path": "m"}, "data": DATA, "output_dir": folder}
    for read_one, recipe in (
        (recipe_from, {**GOOD, "output_dir": folder}),
        (curation_recipe_from, sampled),
        (rounds_recipe_from, {**sampled, "method": "rft"}),
        (long2short_recipe_from, {**sampled, "method": "dpo"}),
        (pipeline_from, {"stage": "evaluate", "model": model["path"], "data": DATA, "output_dir": folder}),
    ):
        with pytest.raises(
            ValueError, match=r"`output_dir` is (empty; name a folder|.*it must be the name of a folder)"
        ):
            read_one(recipe)
    with pytest.raises(ValueError, match="`--output_dir` has no value"):
        parse_overrides(["--output_dir", "--overwrite"])


def test_the_name_of_a_stage_is_one_that_a_file_system_takes() -> None:
    """300 characters were an OSError when the stage began."""
    for name in ("a" * 300, "a/b", "", "a\n"):
        stage = {"stage": "evaluate", "name": name, "model": "m", "data": DATA}
        with pytest.raises(ValueError, match=r"`stages.0.name` is .*; it must be a folder's name: 1 to 100 letters"):
            pipeline_from({"stages": [stage]})


@pytest.mark.parametrize(
    "words", [["--output_dir", "x" * 300], ["--output_dir", "y/" * 3000], ["--output_dir", "a\0b"]]
)
def test_a_folder_that_no_file_system_takes_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(json.dumps(GOOD))
    (tmp_path / "p.yaml").write_text(
        json.dumps({"stages": [{"stage": "merge", "name": "m", "model": "a", "short_model": "b"}]})
    )
    for command in (["train", "--config", "r.yaml"], ["pipeline", "run", "p.yaml"]):
        assert main([*command, *words, "--dry-run"]) == 2
        assert "`output_dir`" in capsys.readouterr().err.splitlines()[-1]


def test_words_of_other_frameworks_are_answered_all_at_once() -> None:
    """They were "needs `model`, and has none"."""
    theirs = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["accuracy"], "torch_dtype": "bfloat16"}
    for reader, own in (
        (recipe_from, ("`rewards: [", "{dtype: …}", "{attn_implementation: …}")),
        (curation_recipe_from, ("`reward: …`", "'torch_dtype' is nothing: a model is loaded as it was saved")),
    ):
        with pytest.raises(ValueError, match="words of another framework") as caught:
            reader({**theirs, "attn_implementation": "sdpa"})
        for one in ("`model: {path: …}`", "`data: {loader: …", *own):
            assert one in str(caught.value)


def test_several_mistakes_are_said_in_one_go() -> None:
    with pytest.raises(ValueError, match=r"^3 mistakes\. \(1\) ") as caught:
        recipe_from({**GOOD, "data": {**DATA, "limit": 0}, "cold_start": True, "rewards": "accuracy"})
    for one in ("`data.limit` is 0", "`cold_start` is True", "`rewards` is 'accuracy'"):
        assert one in str(caught.value)
    with pytest.raises(ValueError, match=r"2 mistakes.*'lerning_rate'; did you mean.*'max_stps'; did you mean"):
        numbers_read(recipe_from({**GOOD, "lerning_rate": 1, "max_stps": 2}))


def test_a_hub_that_is_away_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tried for 29 seconds."""
    asked = []

    def away(self: Any, name: str, **_: Any) -> Any:
        asked.append(name)
        raise httpx.ConnectError("no name")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", away)
    with pytest.raises(ValueError, match=r"'runs/start' is neither .*cannot be reached: no name"):
        load_tokenizer(ModelSection(path="runs/start"))
    assert asked == ["runs/start"]
    assert meta_model(ModelSection(tiny={"hidden_size": 16, "num_layers": 1})).num_parameters() > 0
    assert asked == ["runs/start"]  # the dry run of a tiny model asked the hub for 'None', and was refused
    with pytest.raises(ValueError, match=r"'team/judge' is neither .*cannot be reached"):
        reach_reward_models(["team/judge"])  # TRL tried for 72 seconds, after the cold start
    assert asked == ["runs/start", "team/judge"]
