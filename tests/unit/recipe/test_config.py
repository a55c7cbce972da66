"""``LabConfig``: what it refuses, and that it goes wherever a ``GRPOConfig`` goes (parsers, JSON, copies, pickles)."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from grpo_lab import LabConfig
from grpo_lab.advantages.whole_table import GDPO
from grpo_lab.objectives import AdaptiveEntropy, Clipped, EntropyBonus, GammaWeight, OffPolicyMask, SoftGate, TopEntropy
from grpo_lab.trainer.settings.knobs import other_than_the_paper
from grpo_lab.trainer.settings.parse import OUR_FIELDS


def config(folder: Path | str = "unused", **changes: Any) -> LabConfig:
    settings: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
    return LabConfig(str(folder), **{**settings, **changes})


def my_surrogate(batch: Any) -> Any:
    return -batch.advantages * batch.logps


# -- refusals ----------------------------------------------------------------------------------------------------------

#: setting of TRL's loss → values that are no such setting
OF_ANOTHER_KIND: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("beta", "epsilon", "entropy_coef", "top_entropy_quantile"), (None, "0.1", float("nan"), True)),
    **dict.fromkeys(("entropy_target", "vespo_k_pos", "sapo_temperature_neg"), (None, "a", float("nan"))),
    **dict.fromkeys(("off_policy_mask_threshold", "delta", "vllm_importance_sampling_clip_max"), ("a", float("nan"))),
    **dict.fromkeys(("cast_lm_head_to_fp32", "use_adaptive_entropy"), (None, "yes")),
    **dict.fromkeys(("loss_type", "vllm_importance_sampling_mode"), (None, 3)),
}


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_setting_of_the_loss_of_another_kind_is_refused_in_one_sentence(name: str) -> None:
    for value in OF_ANOTHER_KIND[name]:
        with pytest.raises(ValueError, match=f"^`{name}` is {re.escape(repr(value))}; it must be (a |true)"):
            config(**{name: value})


#: settings → what the message must say: what was seen, what is allowed (or means the same), which setting
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "misspelt key": ({"learning_rat": 1.0}, ("LabConfig", "'learning_rat'", "'learning_rate'")),
    "unknown key": ({"zzzzzz": 1}, ("LabConfig", "'zzzzzz'")),
    "misspelt in objective": (
        {"objective": {"name": "grpo", "surogate": "clipped"}},
        ("`objective`", "'surogate'", "'surrogate'"),
    ),
    "misspelt in advantage": ({"advantage": {"name": "group_zscore", "eps": 1}}, ("`advantage`", "'eps'", "epsilon")),
    "misspelt in kl": ({"kl": {"estimater": "k1"}}, ("`kl`", "'estimater'", "'estimator'")),
    "misspelt in update": ({"update": {"dead_group": "skip"}}, ("`update`", "'dead_group'", "'dead_groups'")),
    "budget without bins": ({"update": {"name": "off", "max_tokens": 64}}, ("`update.max_tokens`", "`update: off`")),
    "all rows of all rows": (
        {"update": {"name": "off", "dead_groups": "keep"}},
        ("`update.dead_groups: keep`", "`update: off`"),
    ),
    "empty objective": ({"objective": ""}, ("`objective` is ''", "dr_grpo")),
    "reset that is no switch": ({"reset_optimizer": "maybe"}, ("`reset_optimizer`", "'maybe'")),
    "no part": ({"correction": ["icepop"], "use_vllm": True}, ("`correction` is ['icepop']", "a name")),
    "no part, named": ({"correction": {"name": ["icepop"]}, "use_vllm": True}, ("`correction` is ['icepop']",)),
    "bounds of the bonus": (
        {"entropy_coef_min": 0.5, "entropy_coef_max": 0.1},
        ("`entropy_coef_min` is 0.5", "`entropy_coef_max` is 0.1"),
    ),
    "a power below 0": ({"objective": {"name": "vespo", "k_pos": -1}}, ("`k_pos`", "is -1", "≥ 0")),
    "a difference above 1": (
        {"objective": {"name": "dppo_tv", "threshold_low": 2}},
        ("`objective.threshold_low` is 2", "below 1"),
    ),
    "a slash in a task": ({"objective": "grpo", "tasks": {"a/b": {}}}, ("`tasks`", "'a/b'", "slash")),
    "a task without a name": ({"objective": "grpo", "tasks": {"": {}}}, ("`tasks`", "''", "empty")),
    "a knob of the rule in objective": (
        {"objective": {"name": "pass_at_k", "k": 4}},
        ("`objective.k`", "`advantage: {name: pass_at_k, k: 4}`"),
    ),
    "a cut without a bound of its sets": (
        {"objective": "grpo", "use_vllm": True, "top_p": 0.9},
        ("`top_p`=0.9", "`top_k` of 1 to 64"),
    ),
    "kept sets and a reference": (
        {"objective": "grpo", "use_vllm": True, "vllm_mode": "colocate", "top_k": 8, "beta": 0.1},
        ("`top_k`=8", "`beta`"),
    ),
    "kept sets and norms of scores over all tokens": (
        {"objective": "grpo", "use_vllm": True, "top_k": 8, "advantage": "optimal_token_baseline"},
        ("`top_k`=8", "'optimal_token_baseline'"),
    ),
    "kept sets without an objective": ({"use_vllm": True, "top_k": 8}, ("`top_k`=8", "`objective`")),
    "unknown preset": ({"objective": "dr-grpo"}, ("'dr-grpo'", "dr_grpo")),
    "unknown surrogate": ({"objective": {"name": "grpo", "surrogate": "cliped"}}, ("'cliped'", "clipped")),
    "unknown aggregation": ({"objective": {"name": "grpo", "aggregation": "mean"}}, ("'mean'", "sequence_mean")),
    "unknown ratio": ({"objective": {"name": "grpo", "ratio": "word"}}, ("'word'", "token", "sequence")),
    "unknown advantage": ({"advantage": "zscore"}, ("'zscore'", "group_zscore")),
    "advantage and scale_rewards": (
        {"advantage": "leave_one_out", "scale_rewards": "batch"},
        ("`scale_rewards`='batch'", "`advantage`='leave_one_out'", "leave one out"),
    ),
    "advantage and multi_objective_aggregation": (
        {"advantage": "group_mean", "multi_objective_aggregation": "normalize_then_sum"},
        ("`multi_objective_aggregation`='normalize_then_sum'", "`advantage`='group_mean'"),
    ),
    "a KL in the reward of a rule that divides by it": (
        {"objective": "gdpo", "kl": {"estimator": "k1", "placement": "reward", "coefficient": 0.1}},
        ("`kl.placement`", "'gdpo'", "kl.per: token"),
    ),
    "groups in which pass@k is 0": (
        {"objective": "pass_at_k", "num_generations": 4},
        ("`num_generations` is 4", "fewer than 5", "`advantage.k`"),
    ),
    "advantage without a rule": ({"advantage": {"epsilon": 1e-6}}, ("`advantage.epsilon`", "name a rule")),
    "sampler without its column": (
        {"sampler": {"name": "curriculum", "pass_rate_column": ""}},
        ("`sampler.pass_rate_column`", "curriculum"),
    ),
    "unknown estimator": ({"kl": {"estimator": "k4", "coefficient": 0.1}}, ("'k4'", "k1", "k3", "estimator")),
    "unknown placement": (
        {"kl": {"estimator": "k1", "placement": "advantage", "coefficient": 0.1}},
        ("'advantage'", "loss", "reward", "placement"),
    ),
    "unknown update": ({"update": "of"}, ("'of'", "'off'")),
    "unknown dead_groups": ({"update": {"dead_groups": "drop"}}, ("'drop'", "skip", "keep", "resample", "dead_groups")),
    "no budget": ({"update": {"max_tokens": 0}}, ("`update.max_tokens`", "0")),
    "no word but auto": ({"update": {"max_tokens": "Auto"}}, ("`update.max_tokens`", "'Auto'", "or 'auto'")),
    "auto without bins": ({"update": {"name": "off", "max_tokens": "auto"}}, ("`update.max_tokens`", "`update: off`")),
    "max_rounds alone": ({"update": {"max_rounds": 3}}, ("`update.max_rounds`", "resample")),
    "module that is not there": (
        {"objective": {"name": "grpo", "surrogate": "no_such_module:loss"}},
        ("'no_such_module:loss'", "surrogate", "cannot be loaded"),
    ),
    "surrogate no callable": ({"objective": {"name": "grpo", "surrogate": 3}}, ("`surrogate`", "3", "callable")),
    # objective against TRL's flat settings, written down or not at their default
    "loss_type, default written": (
        {"objective": "dr_grpo", "loss_type": "dapo"},
        ("`loss_type`='dapo'", "`objective`='dr_grpo'", "'dr_grpo'", "leave one out"),
    ),
    "loss_type": ({"objective": "grpo", "loss_type": "bnpo"}, ("`loss_type`='bnpo'", "`objective`='grpo'")),
    "a knob of another surrogate": (
        {"objective": "grpo", "sapo_temperature_neg": 2.0},
        ("`sapo_temperature_neg`=2.0", "no effect", "'Clipped'"),
    ),
    "a knob said twice": (
        {"objective": {"name": "vespo", "k_pos": 1.0}, "vespo_k_pos": 1.5},
        ("`vespo_k_pos`=1.5", "`objective.k_pos`=1.0"),
    ),
    "a temperature of 0": ({"objective": {"name": "sapo", "temperature_pos": 0.0}}, ("`temperature_pos`", "above 0")),
    "loss_type of another": ({"objective": "grpo", "loss_type": "sapo"}, ("`loss_type`='sapo'", "`objective`='grpo'")),
    "loss_type beside reinforce": (
        {"objective": "reinforce", "loss_type": "grpo"},
        ("`loss_type`='grpo'", "`objective`='reinforce'", "no counterpart"),
    ),
    "scale_rewards, default written": (
        {"objective": "dr_grpo", "scale_rewards": "group"},
        ("`scale_rewards`='group'", "`advantage`='group_mean'", "'none'"),
    ),
    "scale_rewards": ({"objective": "grpo", "scale_rewards": "none"}, ("`scale_rewards`='none'", "'group_zscore'")),
    "importance_sampling_level": (
        {"objective": "gspo", "importance_sampling_level": "token"},
        ("`importance_sampling_level`='token'", "'sequence'"),
    ),
    "epsilon": (
        {"objective": {"name": "grpo", "epsilon": 0.1}, "epsilon": 0.3},
        ("`epsilon`=0.3", "`objective.epsilon`=0.1"),
    ),
    "epsilon, default written": (
        {"objective": {"name": "grpo", "epsilon": 0.1}, "epsilon": 0.2},
        ("`epsilon`=0.2", "`objective.epsilon`=0.1"),
    ),
    "delta": ({"objective": {"name": "grpo", "delta": 3.0}, "delta": 4.0}, ("`delta`=4.0", "`objective.delta`=3.0")),
    # the same thing said twice, or not at all
    "kl without coefficient": ({"kl": {"estimator": "k2"}}, ("`kl`", "coefficient", "`beta`")),
    "kl.coefficient and beta": (
        {"kl": {"estimator": "k2", "coefficient": 0.1}, "beta": 0.2},
        ("`kl.coefficient` is 0.1", "`beta` is 0.2"),
    ),
    "kl beside TRL's loss": (
        {"kl": {"estimator": "k2", "coefficient": 0.1}, "delta": 1.1},
        ("`kl`", "delta=1.1", "`beta`"),
    ),
    "kl as a number": ({"kl": 0.1}, ("`kl.estimator` is 0.1", "{estimator: k2, coefficient: 0.1}")),
    "epsilon of an advantage object": (
        {"advantage": {"name": my_surrogate, "epsilon": 1e-4}},
        ("`advantage.epsilon`", "no effect"),
    ),
    # batch sizes
    "batch does not divide": (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_generations": 8},
        ("4 × 1 × 3 = 12", "`num_generations` = 8", "`gradient_accumulation_steps` 2 or 4", "size` 8", "3, 4, 6, 12"),
    ),
    "steps_per_generation does not divide": (
        {"per_device_train_batch_size": 2, "steps_per_generation": 3, "num_generations": 4},
        ("2 × 1 × 3 = 6", "`steps_per_generation` 2 or 4"),
    ),
    "generation_batch_size does not divide": (
        {"per_device_train_batch_size": 4, "generation_batch_size": 18, "num_generations": 6},
        ("`generation_batch_size` is 18", "4 × 1 = 4", "= 6", "12 or 24"),
    ),
    "both batch settings": (
        {"generation_batch_size": 32, "steps_per_generation": 2},  # 16 would agree
        ("`generation_batch_size`=32", "`steps_per_generation`=2", "leave one out"),
    ),
    "eval batch does not divide": (
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6, "num_generations_eval": 4},
        ("6 × 1 = 6", "`num_generations_eval` = 4", "`per_device_eval_batch_size` 4 or 8", "1, 2, 3, 6"),
    ),
    "a cast that lasts": (
        {"use_transformers_continuous_batching": True, "bf16": True},
        ("`use_transformers_continuous_batching` with `bf16`", "leaves it so", "`bf16: false`", "`use_vllm`"),
    ),
    "one generation": ({"num_generations": 1}, ("`num_generations` is 1", "at least 2")),
    "no generation": ({"num_generations": 0}, ("`num_generations` is 0",)),
    "no rows": ({"per_device_train_batch_size": 0}, ("`per_device_train_batch_size` is 0",)),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    settings, parts = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        config(**settings)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_trls_settings_of_the_loss_make_parts_beside_an_objective_and_without() -> None:
    """Once refused beside `objective`."""
    gates = {"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2}
    steered = {"use_adaptive_entropy": True, "entropy_target": 0.5, "entropy_coef_delta": 0.1, "entropy_coef_max": 0.3}
    for name in ({"objective": "grpo"}, {"loss_type": "grpo"}):
        found = config(**name, **gates, entropy_coef=0.01).algorithm
        assert found.objective.gates == (OffPolicyMask(0.5), TopEntropy(0.2))
        assert found.objective.entropy == EntropyBonus(0.01)
        assert found.names["gates"] == "OffPolicyMask(threshold=0.5), TopEntropy"
        assert found.names["entropy"] == "entropy_coef=0.01"
        bonus = config(**name, **steered).algorithm.objective.entropy
        assert bonus == EntropyBonus(0.0, AdaptiveEntropy(0.5, 0.1, 0.0, 0.3))


def test_a_papers_bounds_hold_where_none_is_written() -> None:
    bounds = {"luspo": (2e-3, 2.5e-3), "gspo_token": (3e-4, 4e-4), "scale_rl": (0.2, 5.0)}
    for name, expected in bounds.items():
        found = config(objective=name)
        assert (found.epsilon, found.epsilon_high) == expected
        found.max_steps = 7  # parsed anew
        assert (found.algorithm.objective.surrogate.epsilon, found.epsilon_high) == expected
    assert config(objective="luspo", epsilon=0.1).algorithm.objective.surrogate == Clipped(0.1)
    assert config(objective={"name": "luspo", "epsilon": 0.1}).algorithm.objective.surrogate == Clipped(0.1)
    of_task = config(objective="luspo", tasks={"a": {"objective": "grpo"}, "b": {}}).algorithm.objective.tasks
    assert [task.surrogate for task in of_task] == [Clipped(), Clipped(2e-3, 2.5e-3)]


def test_what_a_paper_has_and_the_run_does_not_is_said() -> None:
    def said(**settings: Any) -> str | None:
        found = config(**settings)
        return other_than_the_paper(found, found.lab_settings.objective, found.algorithm.objective.surrogate)

    assert "{name: gspo, epsilon: 0.0003, epsilon_high: 0.0004}" in (said(objective="gspo") or "")
    assert "{name: cispo, epsilon: 5.0}" in (said(objective="cispo") or "")
    for settings in (
        {"objective": "grpo"},
        {"objective": "luspo"},
        {"objective": "gspo", "epsilon": 0.2},
        {"objective": {"name": "dapo", "epsilon_high": 0.3}},
        {"objective": {"name": "gspo", "surrogate": "unclipped"}},
    ):
        assert said(**settings) is None


def test_normalize_then_sum_is_the_rule_gdpo() -> None:
    apart = {"multi_objective_aggregation": "normalize_then_sum"}
    for found in (config(objective="dr_grpo", **apart), config(objective="dr_grpo", advantage="gdpo")):
        assert found.algorithm.advantage == GDPO()
        assert found.multi_objective_aggregation == "normalize_then_sum"
    assert config(objective="grpo", advantage={"epsilon": 1e-6}, **apart).algorithm.advantage == GDPO(1e-6)
    for settings in ({"objective": "ppo"}, {"objective": "grpo", "advantage": "group_mean"}):
        with pytest.raises(
            ValueError, match="`multi_objective_aggregation`='normalize_then_sum' contradicts `advantage`"
        ):
            config(**settings, **apart)


@pytest.mark.parametrize(
    ("flat", "own", "made"),
    [
        ({"sapo_temperature_neg": 2.0}, {"name": "sapo", "temperature_neg": 2.0}, SoftGate(2.0, 1.0)),
        ({"vespo_k_pos": 1.0}, {"name": "vespo", "k_pos": 1.0}, GammaWeight(1.0)),
        ({"epsilon_high": 2.5e-3, "epsilon": 2e-3}, {"name": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
         Clipped(2e-3, 2.5e-3)),
    ],
    ids=["sapo", "vespo", "luspo"],
)  # fmt: skip
def test_a_loss_of_trls_is_a_preset_with_the_same_knobs(flat: dict[str, Any], own: dict[str, Any], made: Any) -> None:
    name = own["name"]
    level = "sequence" if name == "luspo" else "token"
    drop_in = config(loss_type=name, importance_sampling_level=level, **flat)
    beside, written = config(objective=name, **flat), config(objective=own)
    for found in (drop_in, beside, written):
        assert found.algorithm.objective.surrogate == made
        assert (found.loss_type, found.importance_sampling_level) == (name, level)
        assert {key: getattr(found, key) for key in flat} == flat
    parts = [(o.aggregate, o.ratio, o.gates) for o in (f.algorithm.objective for f in (drop_in, beside, written))]
    assert parts[0] == parts[1] == parts[2]


@pytest.mark.parametrize("wrong", [{"learning_rat": 1.0}, {"kl": {"estimater": "k2"}}], ids=str)
def test_an_unknown_key_is_also_a_type_error(wrong: dict[str, Any]) -> None:
    """Python calls a wrong keyword a ``TypeError``; who catches that still does."""
    with pytest.raises(TypeError):
        config(**wrong)


def test_batch_sizes_count_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="2 × 3 × 1 = 6 completions"):
        config(per_device_train_batch_size=2, num_generations=4)


def test_every_number_that_is_named_divides() -> None:
    """What the message proposes is accepted: all small sizes."""

    for size in range(1, 7):
        for steps in range(1, 6):
            for group in range(2, 9):
                if size * steps % group == 0:
                    continue
                sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
                with pytest.raises(ValueError) as caught:
                    config(**sizes, num_generations=group)
                said = str(caught.value).split("What would do: ")[1]
                for name, values in re.findall(r"`(\w+)` ([\d, or]+\d)", said):
                    for value in re.findall(r"\d+", values):
                        changed = {**sizes, "num_generations": group, name: int(value)}
                        batch = changed["per_device_train_batch_size"] * changed["gradient_accumulation_steps"]
                        assert batch % changed["num_generations"] == 0, str(caught.value)


# -- acceptances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "dr_grpo", "loss_type": "dr_grpo", "scale_rewards": "none"},
        {"objective": "gspo", "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"objective": {"name": "grpo", "epsilon": 0.1}, "epsilon": 0.1},
        {"kl": {"estimator": "k2", "coefficient": 0.1}, "beta": 0.1},
        {"kl": {"estimator": "k2"}, "beta": 0.1},
        {"kl": "k2", "beta": 0.1},
        {"objective": "cispo", "epsilon_high": 5.0},
    ],
    ids=str,
)
def test_saying_the_same_twice_is_no_contradiction(settings: dict[str, Any]) -> None:
    config(**settings)


def test_the_objective_stands_in_trls_fields_too() -> None:
    found = config(objective="dr_grpo", kl={"estimator": "k2", "coefficient": 0.3})
    assert (found.loss_type, found.scale_rewards, found.beta) == ("dr_grpo", "none", 0.3)
    assert config(objective="gspo").importance_sampling_level == "sequence"
    assert config(objective={"name": "grpo", "epsilon": 0.1}).epsilon == 0.1
    assert config(advantage="batch_zscore").scale_rewards == "batch"
    assert config(advantage="group_mean", scale_rewards="none").scale_rewards == "none"


def test_without_objective_everything_is_as_in_trl() -> None:
    ours, theirs = config(), GRPOConfig("unused", use_cpu=True, bf16=False, report_to="none")
    names = {f.name for f in dataclasses.fields(theirs)}
    added = {f.name: f.default for f in dataclasses.fields(ours) if f.name not in names}
    assert {"objective", "advantage", "kl", "update"} <= set(added)
    on = {name: value for name, value in added.items() if value is not None}
    assert on == {"save_checksums": True}, (
        "a setting of ours is on by default"
    )  # that one reads a checkpoint's files, no more
    for field in dataclasses.fields(theirs):
        if field.name != "logging_dir":
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name


@pytest.mark.parametrize("spelling", ["off", False, {"name": "off"}, '{"name": "off"}'], ids=str)
def test_update_off_in_every_spelling(spelling: Any) -> None:
    """YAML 1.1 reads a bare ``off`` as false."""
    assert config(update=spelling).lab_settings.update.is_off


# -- parsers -----------------------------------------------------------------------------------------------------------


def test_a_contradiction_on_the_command_line_is_refused() -> None:
    """A parser writes every field, so only a value that is not the default is known to be the user's."""
    line = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    with pytest.raises(ValueError, match="`loss_type`='bnpo' contradicts `objective`='grpo'"):
        TrlParser(LabConfig).parse_args_into_dataclasses(args=[*line, "--objective", "grpo", "--loss_type", "bnpo"])


def test_our_fields_are_those_that_trl_lacks() -> None:
    fields = [{field.name for field in dataclasses.fields(kind)} for kind in (LabConfig, GRPOConfig)]
    assert set(OUR_FIELDS) == fields[0] - fields[1]


# -- copies ------------------------------------------------------------------------------------------------------------


def test_json_round_trip_with_parts_by_name() -> None:
    written = json.loads(json.dumps(config(objective={"name": "grpo", "surrogate": my_surrogate}).to_dict()))
    assert written["objective"]["surrogate"] == f"{__name__}:my_surrogate"
    names = ("objective", "advantage", "kl", "update", "loss_type", "scale_rewards", "beta", "epsilon")
    again = config(**{name: written[name] for name in names})
    assert again.algorithm.objective.surrogate is my_surrogate


def test_json_of_every_kind_of_part() -> None:
    """A function, a class, an object: all become text; ``to_json_string`` works (it is what gets logged and saved)."""
    for part in (my_surrogate, Clipped, Clipped(0.2, 0.2), lambda batch: batch.logps):
        text = config(objective={"name": "grpo", "surrogate": part}).to_json_string()
        assert ":" in json.loads(text)["objective"]["surrogate"]


def test_a_setting_of_an_earlier_release_is_named_with_a_pointer() -> None:
    with pytest.raises(ValueError, match=r"`LabConfig` has no setting 'max_prompt_length'.*release notes of trl"):
        LabConfig("o", max_prompt_length=1)
