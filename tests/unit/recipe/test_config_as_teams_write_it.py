"""``LabConfig`` on the roads that teams use: parsers, YAML, JSON, copies, records of a run; every mapping on each of
them."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import HfArgumentParser
from trl import ScriptArguments, TrlParser

from grpo_lab import LabConfig
from grpo_lab.trainer.resume.checkpoint import picklable
from grpo_lab.trainer.settings.parse import OUR_FIELDS, LabSettings

FLAT: dict[str, Any] = {
    "output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_completion_length": 64,
    "learning_rate": 2e-6, "reward_weights": [1.0, 0.5],
}  # fmt: skip
OURS: dict[str, Any] = {
    "objective": {"name": "ppo", "epsilon": 0.1, "epsilon_high": 0.3},
    "advantage": {"name": "gae", "lam": 0.9},
    "correction": {"name": "icepop", "high": 4.0},
    "value": {"vf_coef": 0.2, "learning_rate": 1e-4, "warmup_steps": 3},
    "kl": {"estimator": "k2", "placement": "loss", "coefficient": 0.1},
    "rollout": {"thinking_budget": 32, "budget_text": " So:</think>"},
    "reward_schedules": {"accuracy_reward": {"kind": "warmup", "start": 10, "value": 0.5}},
    "reset_optimizer": True,
    "reference_every": 400,
    "max_hours": 23.5,
    "stop_file": "/tmp/stop here",
    "save_checksums": False,
    "profile": True,
    "token_weights_every": 25,
    "sampler": {"name": "prioritized", "floor": 0.1},
    "update": {"dead_groups": "keep", "max_tokens": 4096, "randomness": "same_draws"},
    "guard": {"max_bad_steps": 5, "save": False},
}
ALL = {**FLAT, **OURS}


@pytest.fixture(scope="module")
def first() -> LabConfig:
    return LabConfig(**ALL)


def words(values: dict[str, Any]) -> list[str]:
    """A command line: mappings as JSON, lists word by word."""
    line: list[str] = []
    for name, value in values.items():
        given = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        line += [f"--{name}", *map(str, given)]
    return line


def same(a: LabConfig, b: LabConfig) -> bool:
    flat = (
        "loss_type", "scale_rewards", "beta", "epsilon", "epsilon_high", "learning_rate", "reward_weights",
        "reset_optimizer", "reference_every", "max_hours", "stop_file", "save_checksums",
    )  # fmt: skip
    flat += ("steps_per_generation", "generation_batch_size", "importance_sampling_level")
    return a.lab_settings == b.lab_settings and all(getattr(a, name) == getattr(b, name) for name in flat)


def by_hf(folder: Path, _: LabConfig) -> LabConfig:
    return HfArgumentParser(LabConfig).parse_args_into_dataclasses(args=words(ALL))[0]


def by_hf_json(folder: Path, _: LabConfig) -> LabConfig:
    (folder / "run.json").write_text(json.dumps(ALL))
    return HfArgumentParser(LabConfig).parse_json_file(str(folder / "run.json"))[0]


def by_hf_yaml(folder: Path, _: LabConfig) -> LabConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(ALL))
    return HfArgumentParser(LabConfig).parse_yaml_file(str(folder / "run.yaml"))[0]


def by_trl(folder: Path, _: LabConfig) -> LabConfig:
    """As TRL's own scripts: several dataclasses, a YAML, and words that win over it."""
    (folder / "run.yaml").write_text(yaml.safe_dump({**ALL, "learning_rate": 1.0, "dataset_name": "d"}))
    line = ["--config", str(folder / "run.yaml"), "--learning_rate", "2e-6"]
    _, found = TrlParser((ScriptArguments, LabConfig)).parse_args_and_config(args=line)
    return found


def by_words_over_yaml(folder: Path, _: LabConfig) -> LabConfig:
    """A mapping on the command line takes the place of the YAML's, whole."""
    (folder / "run.yaml").write_text(yaml.safe_dump({**ALL, "kl": {"estimator": "k1", "coefficient": 0.5}}))
    line = ["--config", str(folder / "run.yaml"), "--kl", json.dumps(OURS["kl"])]
    return TrlParser(LabConfig).parse_args_and_config(args=line)[0]


def by_record(folder: Path, config: LabConfig) -> LabConfig:
    return LabConfig.from_dict(config.to_dict())


def by_json_string(folder: Path, config: LabConfig) -> LabConfig:
    return LabConfig.from_dict(json.loads(config.to_json_string()))


def by_yaml_of_the_record(folder: Path, config: LabConfig) -> LabConfig:
    return LabConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict())))


def by_training_args(folder: Path, config: LabConfig) -> LabConfig:
    """As the Trainer keeps it beside each checkpoint."""
    torch.save(picklable(config), folder / "training_args.bin")
    return torch.load(folder / "training_args.bin", weights_only=False)


def by_replace(folder: Path, config: LabConfig) -> LabConfig:
    changed = dataclasses.replace(config, seed=7, generation_batch_size=None)
    assert (changed.seed, config.seed) == (7, 42)
    return changed


ROADS: list[Callable[[Path, LabConfig], LabConfig]] = [
    by_hf, by_hf_json, by_hf_yaml, by_trl, by_words_over_yaml, by_record, by_json_string, by_yaml_of_the_record,
    by_training_args, by_replace, lambda _, config: copy.deepcopy(config),
]  # fmt: skip


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_every_mapping_on_every_road(
    road: Callable[[Path, LabConfig], LabConfig], first: LabConfig, tmp_path: Path
) -> None:
    found = road(tmp_path, first)
    assert type(found) is LabConfig
    assert same(found, first)


def test_the_example_sets_every_mapping(first: LabConfig) -> None:
    """Else the roads above would show less than they say. ``tasks`` has no place beside ``sampler``."""
    assert set(OURS) == set(OUR_FIELDS) - {"tasks"}
    settings, default = first.lab_settings, LabSettings()
    assert all(getattr(settings, name) != getattr(default, name) for name in OURS)


@pytest.mark.parametrize("road", [by_record, by_json_string, by_yaml_of_the_record, by_training_args])
def test_tasks_on_every_record(road: Callable[[Path, LabConfig], LabConfig], tmp_path: Path) -> None:
    tasks = {"a": {"weight": 2, "objective": {"name": "dr_grpo", "epsilon": 0.1}}, "b": {"denominators": "own"}}
    config = LabConfig(str(tmp_path), objective="grpo", tasks=tasks, use_cpu=True, bf16=False)
    assert road(tmp_path, config).lab_settings == config.lab_settings


def test_replace_takes_one_setting(first: LabConfig) -> None:
    """TRL's own configuration refuses this: both of the sizes that follow from each other are handed on."""
    changed = dataclasses.replace(first, learning_rate=3e-6)
    assert changed.learning_rate == 3e-6
    assert changed.lab_settings == first.lab_settings
    assert changed.generation_batch_size == first.generation_batch_size
    with pytest.raises(ValueError, match=r"both set; .* \(`dataclasses.replace`: set it to None\)"):
        dataclasses.replace(first, steps_per_generation=first.steps_per_generation * 2)


def test_a_deep_copy_shares_nothing(first: LabConfig) -> None:
    other = copy.deepcopy(first)
    other.kl["coefficient"] = 0.9
    assert first.kl["coefficient"] == 0.1


def test_the_record_holds_no_token_and_reads_without_it() -> None:
    config = LabConfig(**FLAT, hub_token="secret")
    assert "secret" not in config.to_json_string()
    assert LabConfig.from_dict(config.to_dict()).hub_token is None


def test_a_record_of_a_drop_in_run_reads_as_one() -> None:
    found = LabConfig.from_dict(LabConfig(**FLAT, loss_type="bnpo", beta=0.04).to_dict())
    assert (found.loss_type, found.beta, found.objective) == ("bnpo", 0.04, None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kl": '{"estimater": "k2"}'}, "`kl` has no setting 'estimater'; did you mean 'estimator'"),
        ({"update": {"max_tokens": "many"}}, "`update.max_tokens` is 'many'; it must be a whole number"),
        (
            {"update": {"name": "off", "randomness": "same_draws"}},
            "`update.randomness` has no effect with `update: off`",
        ),
        ({"sampler": "prioritised"}, "`sampler.name` is 'prioritised'; it must be 'prioritized', 'curriculum' or"),
        ({"rollout": "thinking"}, "`rollout` is 'thinking'; it must be a mapping of settings"),
        ({"reward_schedules": {"r": {"kind": "warmpu"}}}, r"`reward_schedules\.r`.*did you mean 'warmup'"),
    ],
)
def test_what_is_wrong_is_said_on_every_road(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LabConfig.from_dict({**FLAT, **changed})
