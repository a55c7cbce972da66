"""Numbers of a recipe are numbers, wherever they stand and however they are written; a forgotten value is not
`true`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.recipe.data import load_rows
from grpo_lab.recipe.job import lab_config, numbers_read
from grpo_lab.recipe.models import load_model, lora_config
from grpo_lab.recipe.sections import Recipe, read_recipe, recipe_from
from grpo_lab.recipe.yaml import parse_overrides, read_yaml

TEXT = """
model: {tiny: {hidden_size: 16, num_layers: 1, initializer_range: 6e-2}}
data: {loader: word_problems, n: 8}
rewards: [{name: accuracy, weight: 5e-1}]
learning_rate: 1e-3
beta: 1E-2
adam_epsilon: +1e-8
max_steps: 1e3
warmup_steps: .5e1
objective: {name: dr_grpo, epsilon: 2e-1}
reward_schedules: {accuracy_reward: {kind: linear, start: 0, end: 10, value: 1e-1}}
lr_scheduler_kwargs: {power: [1e0, -2.5e-1]}
cold_start: {data: {loader: word_problems, n: 8}, learning_rate: 5e-3}
num_generations: 2
per_device_train_batch_size: 4
use_cpu: true
bf16: false
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(TEXT)
    return tmp_path / "r.yaml"


def given(*words: str) -> Recipe:
    written = read_yaml_text(TEXT)
    for key, value in parse_overrides(words).items():
        written[key] = value
    return recipe_from(written)


def read_yaml_text(text: str) -> dict[str, Any]:
    from grpo_lab.recipe.yaml import parsed

    found: dict[str, Any] = parsed(text, "text")
    return found


def test_exponents_without_a_point_are_numbers_at_every_depth(file: Path) -> None:
    """YAML 1.1 takes `1e-3` for text: the optimizer died of it, after the first evaluation."""
    recipe = read_recipe(file)
    arguments = recipe.arguments
    assert (arguments["learning_rate"], arguments["beta"], arguments["adam_epsilon"]) == (1e-3, 1e-2, 1e-8)
    assert arguments["objective"]["epsilon"] == 0.2
    assert arguments["reward_schedules"]["accuracy_reward"]["value"] == 0.1
    assert arguments["lr_scheduler_kwargs"] == {"power": [1.0, -0.25]}
    assert recipe.rewards[0].weight == 0.5
    assert recipe.model.tiny == {"hidden_size": 16, "num_layers": 1, "initializer_range": 0.06}
    assert recipe.cold_start is not None
    assert recipe.cold_start.arguments["learning_rate"] == 5e-3


def test_a_whole_number_with_an_exponent_is_whole(file: Path) -> None:
    config = lab_config(numbers_read(read_recipe(file)))
    assert config.max_steps == 1000
    assert isinstance(config.max_steps, int)
    assert config.warmup_steps == 5.0


@pytest.mark.parametrize("text", ["e5", "1e", "0x1e-3q", "v1e-3", "1e5.2", "12-1e3", "qwen1e3", "+", "."])
def test_what_only_looks_like_a_number_stays_text(text: str) -> None:
    assert parse_overrides(["--run_name", text])["run_name"] == text


@pytest.mark.parametrize("word", ["1e-5", "1E-5", "1.0e-5", "0.00001", '"1e-5"'])
def test_one_number_in_every_writing(word: str) -> None:
    assert lab_config(numbers_read(given("--learning_rate", word, "--max_steps", "3"))).learning_rate == 1e-5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rate"], r"`learning_rate` is True; it must be a number \(a setting without its value"),
        (["--learning_rate", "fast"], "`learning_rate` is 'fast'; it must be a number"),
        (["--learning_rate", "[1, 2]"], r"`learning_rate` is \[1, 2\]; it must be a number"),
        (["--max_steps", "2.5"], "`max_steps` is 2.5; it must be a whole number"),
        (["--max_steps"], "`max_steps` is True; it must be a whole number"),
        (["--use_cpu", "perhaps"], "`use_cpu` is 'perhaps'; it must be true or false"),
        (["--epsilon_high", "true"], "`epsilon_high` is True; it must be a number"),
        (["--reward_weights", "[heavy]"], "`reward_weights.0` is 'heavy'; it must be a number"),
        (["--objective", "{name: dr_grpo, epsilon: wide}"], "`objective.epsilon` is 'wide'; it must be a number"),
        (["--objective", "{name: dr_grpo, epsilon: true}"], "`objective.epsilon` is True; it must be a number"),
        (["--kl", "{estimator: k3, coefficient: small}"], "`kl.coefficient` is 'small'; it must be a number"),
        (["--update", "{max_tokens: 10.5}"], "`update.max_tokens` is 10.5; it must be a whole number"),
        (["--sampler", "{name: prioritized, floor: low}"], "`sampler.floor` is 'low'; it must be a number"),
        (["--rollout", "{verify_every: often}"], "`rollout.verify_every` is 'often'; it must be a whole number"),
        (["--objective"], "`objective` is True: it has no value"),
        (["--run_name", "no"], r"`run_name` is False; it must be text \(a bare on, off, yes or no is a switch in YAML"),
        (["--stop_file"], "`--stop_file` has no value"),
        (["--output_dir"], "`--output_dir` has no value"),
        (["--report_to", "off"], "`report_to` is False; it must be text"),
        (["--learning_rate", "nan"], "`learning_rate` is 'nan'; it must be a number"),
        (["--epsilon_high", ".nan"], "`epsilon_high` is nan; it must be a number"),
        (["--top_k", "nan"], "`top_k` is 'nan'; it must be a whole number"),
        (["--objective", "{name: mirror_descent, tau: nan}"], "`objective.tau` is 'nan'; it must be a number"),
        (["--objective", "{name: dr_grpo, epsilon: inf}"], "`objective.epsilon` is inf; it must be a finite number"),
        (
            ["--beta", "0", "--kl", "{estimator: k3, coefficient: .inf}"],
            "`kl.coefficient` is inf; it must be a finite number",
        ),
        (["--beta", "0", "--kl", "{estimator: k3, coefficient: .nan}"], "`kl.coefficient` is nan; it must be a number"),
        (["--kl", "k3", "--beta", ".inf"], r"`kl.coefficient` \(β\) is inf; it must be a finite number ≥ 0"),
        (["--sampler", "{name: prioritized, floor: .nan}"], "`sampler.floor` is nan; it must be a number"),
        (
            ["--reward_schedules", "{accuracy_reward: .nan}"],
            "schedule 'constant': `value` is nan; it must be a number",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lab_config(numbers_read(given(*words)))


def test_switches_are_read_in_every_writing() -> None:
    """The text "false" is true in Python."""
    config = lab_config(
        numbers_read(given("--gradient_checkpointing", '"false"', "--max_steps", "3", "--log_completions"))
    )
    assert config.gradient_checkpointing is False
    assert config.log_completions is True
    assert lab_config(numbers_read(given("--save_strategy", "no"))).save_strategy == "no"  # YAML 1.1: false


def test_a_rewards_weight_is_said_once() -> None:
    def weights(weight: float, beside: list[float]) -> Any:
        rewards = [{"name": "accuracy", "weight": weight}]
        return lab_config(
            recipe_from({**read_yaml_text(TEXT), "rewards": rewards, "reward_weights": beside})
        ).reward_weights

    assert (weights(1.0, [2.0]), weights(2.0, [2.0])) == ([2.0], [2.0])
    with pytest.raises(
        ValueError, match=r"`rewards\.0\.weight` is 0\.5 and `reward_weights\.0` is 2\.0: they are one setting"
    ):
        weights(0.5, [2.0])


def test_arguments_of_loaders_rewards_and_tiny_models_alike() -> None:
    data = recipe_from({**read_yaml_text(TEXT), "data": {"loader": "word_problems", "n": "1e1"}}).data
    assert len(load_rows(data)) == 10
    builders: list[tuple[dict[str, Any], Any, str]] = [
        ({"data": {"loader": "word_problems", "n": True}}, lambda r: load_rows(r.data), "`data.n` is True; it must be"),
        ({"model": {"tiny": {"num_layers": "two"}}}, lambda r: load_model(r.model, 0), "`model.tiny.num_layers` is "
            "'two'"),
        ({"model": {"tiny": {"num_layer": 1}}}, lambda r: load_model(r.model, 0),
            "`model.tiny` .*'num_layer'.*'num_layers'"),
        ({"model": {"path": "m", "lora": {"r": "many"}}}, lambda r: lora_config(r.model), "`model.lora.r` is 'many'"),
    ]  # fmt: skip
    for changed, build, message in builders:
        recipe = recipe_from({**read_yaml_text(TEXT), **changed})
        with pytest.raises(ValueError, match=message):
            build(recipe)


@pytest.mark.parametrize("switch", ["reset_optimizer", "profile", "save_checksums"])
def test_a_switch_of_ours_may_be_true(switch: str) -> None:
    """Refused as a setting without its value, as `--objective` is, though true is a value of it."""
    assert numbers_read(recipe_from({**read_yaml_text(TEXT), switch: True})).arguments[switch] is True


@pytest.mark.parametrize("word", ["--cold_start.learning_rate", "--data.n", "--rewards.0.weight"])
def test_a_dotted_key_needs_its_value(word: str) -> None:
    """`--data.n` made one row, `--cold_start.learning_rate` a learning rate of 1."""
    for words in ([word], [word, "--max_steps", "3"]):
        with pytest.raises(ValueError, match=f"`{word}` has no value"):
            parse_overrides(words)


@pytest.mark.parametrize(
    ("written", "override", "place", "expected"),
    [
        ({"objective": "dr_grpo"}, {"objective.epsilon": 0.1}, "objective", {"name": "dr_grpo", "epsilon": 0.1}),
        ({"sampler": "prioritized"}, {"sampler.floor": 0.1}, "sampler", {"name": "prioritized", "floor": 0.1}),
        ({"rewards": ["accuracy"]}, {"rewards.0.weight": 2}, "rewards", [{"name": "accuracy", "weight": 2}]),
        ({"callbacks": ["t:C"]}, {"callbacks.0.patience": 2}, "callbacks", [{"name": "t:C", "patience": 2}]),
        ({"evaluation": {"reward": "accuracy"}}, {"evaluation.reward.mode": "lenient"}, "evaluation",
         {"reward": {"name": "accuracy", "mode": "lenient"}}),
        ({"evaluation": None}, {"evaluation.n_samples": 2}, "evaluation", {"n_samples": 2}),
    ],
)  # fmt: skip
def test_a_bare_name_on_the_way_is_the_mapping_it_stands_for(
    written: dict[str, Any], override: dict[str, Any], place: str, expected: Any, tmp_path: Path
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps(written))
    assert read_yaml(file, override)[place] == expected


def test_what_is_no_section_is_named_with_its_value(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps({"name": "n", "data": {"loader": "gsm8k"}}))
    for key, value in (("name.x", "'n'"), ("data.loader.x", "'gsm8k'")):
        with pytest.raises(ValueError, match=f"is {value} in the recipe, and not a section that holds 'x'"):
            read_yaml(file, {key: 1})


def test_whole_numbers_of_sections_may_have_an_exponent_too() -> None:
    """`data.limit` 1e1 "must be a whole number"; `evaluation.n_samples` likewise."""
    recipe = given(
        "--data", "{loader: word_problems, n: 8e0, limit: 4e0}",
        "--evaluation", "{data: {loader: word_problems, n: 8, limit: 1e1}, n_samples: 2e0, batch_size: 8.0, "
            "max_new_tokens: 1e1}",
    )  # fmt: skip
    assert (recipe.data.limit, len(load_rows(recipe.data))) == (4, 4)
    section = recipe.evaluation
    assert section is not None
    found = (section.data.limit, section.n_samples, section.batch_size, section.max_new_tokens)
    assert found == (10, 2, 8, 10)
    assert all(type(value) is int for value in (recipe.data.limit, *found))
    for wrong in ("1.5", "true", "0"):
        with pytest.raises(ValueError, match=r"`data.limit` is .*whole number of at least 1"):
            given("--data", f"{{loader: word_problems, limit: {wrong}}}")
