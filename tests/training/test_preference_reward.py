"""A preference model: trained by TRL's RewardTrainer, and kept in training by a run of RL that trains against it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import run_pipeline
from grpo_lab.rewards import PreferenceReward
from grpo_lab.rewards.preference import holds_out, orders
from grpo_lab.runs.stage import Workspace
from grpo_lab.runs.stop_requests import Interrupted, StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.supervised import RewardModel
from grpo_lab.trainer.scoring.preference_training import COMPARISONS, FOLDER
from parity.harness import arguments, problems, with_entry

TRAINING = {"max_steps": 30, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "bf16": False, "use_cpu": True}
WORDS = ("red", "green", "blue", "one", "two", "three", "four")


def pair(number: int, prompt: Any = None) -> dict[str, Any]:
    """The chosen one says `good`, and nothing else tells the two apart."""
    said = " ".join(WORDS[(number + turn) % len(WORDS)] for turn in range(number % 3 + 1))
    return {"prompt": prompt or f"Say {number}.", "chosen": f"{said} good", "rejected": f"{said} bad"}


def write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def preference(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A stage `reward_model` on 80 pairs: its model, and its facts."""
    folder = tmp_path_factory.mktemp("preference")
    stage = {"stage": "reward_model", "name": "rm", "model": str(tiny_folder), **TRAINING}
    stage["rows"] = write(folder / "pairs.jsonl", [pair(number) for number in range(80)])
    facts = run_pipeline(pipeline_from({"output_dir": str(folder / "out"), "stages": [stage]}))
    return folder / "out" / "rm" / "model", facts["rm"]


@pytest.mark.not_fast
def test_the_stage_learns_pairs_and_says_how_many_held_out_ones_it_has_right(
    preference: tuple[Path, dict[str, Any]],
) -> None:
    folder, facts = preference
    held = [pair(number) for number in range(80) if holds_out(f"Say {number}.", 0.2)]
    assert (facts["rows"], facts["held_out"]) == (80 - len(held), len(held))
    assert 5 < len(held) < 30
    assert facts["steps"] == 30
    assert facts["pair_accuracy"] == PreferenceReward(str(folder)).pair_accuracy(held) > 0.9


@pytest.mark.parametrize("form", ["text", "messages"])
def test_scores_and_loss_are_those_of_trls_trainer(
    form: str, preference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """What RewardTrainer reads and computes of four pairs, against ours, padded together."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    folder, pairs = preference[0], [pair(number) for number in range(4)]
    if form == "messages":
        of = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
        pairs = [{name: [{"role": of[name], "content": text}] for name, text in one.items()} for one in pairs]
    ours = PreferenceReward(str(folder), learning_rate=0.0)
    config = RewardConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_length=None)
    trainer = RewardTrainer(
        ours.classifier, config, train_dataset=Dataset.from_list(pairs), processing_class=ours.tokenizer
    )
    rows = list(trainer.train_dataset)
    assert [row["chosen_ids"] for row in rows] == [ours.ids(one["prompt"], one["chosen"]) for one in pairs]
    batch = trainer.data_collator([{k: row[k] for k in ("chosen_ids", "rejected_ids")} for row in rows])
    expected = trainer.compute_loss(ours.classifier, batch).item()
    first, second = (ours.scores([(one["prompt"], one[side]) for one in pairs]) for side in ("chosen", "rejected"))
    margins = torch.tensor(first) - torch.tensor(second)
    assert -torch.nn.functional.logsigmoid(margins).mean().item() == pytest.approx(expected, rel=1e-5)


class Judge:
    """Better: a larger sum of token ids."""

    __name__ = "judge"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 97) for ids in completion_ids]


def run(folder: Path, start: Path, model: Path, reward: dict[str, Any], steps: int = 5, **settings: Any) -> Any:
    settings = {"max_steps": steps, "save_strategy": "steps", "save_steps": 3, "learning_rate": 1e-3, **settings}
    args = LabConfig(**arguments(folder, objective="dr_grpo", max_completion_length=8, **settings))
    rewards = [PreferenceReward(str(model), judge="judge", steps=2, **reward), Judge()]
    return LabTrainer(
        AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        rewards,
        args,
        problems(16),
        processing_class=AutoTokenizer.from_pretrained(start),
    )


def weights(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def seen(trainer: Any) -> list[tuple[Any, ...]]:
    names = ("loss", "preference/pair_accuracy", "preference/comparisons", "rewards/preference_reward/mean")
    return [tuple(row.get(name) for name in names) for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
def test_a_run_keeps_it_in_training_and_a_resumed_run_goes_on_with_it(
    preference: tuple[Path, dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    """To the bit: policy, preference model, comparisons, what is logged. Old comparisons are among those it learns."""
    model, old = preference[0], write(tmp_path / "old.jsonl", [pair(number) for number in range(9)])
    kept = {"every": 2, "comparisons": old, "learning_rate": 1e-2, "noise": 0.3, "held_out": 0.4}
    whole = run(tmp_path / "whole", tiny_folder, model, kept)
    whole.train()
    part = whole.parts.preference
    assert part.trained == 4
    mine = [one for one in part.pairs if one["prompt"].startswith("Say")]
    assert 0 < len(mine) < 9
    assert len(part.pairs) > len(mine) + 10
    assert not any(holds_out(one["prompt"], 0.4) for one in part.pairs)
    assert not torch.equal(weights(whole.reward_funcs[0].classifier), weights(PreferenceReward(str(model)).classifier))
    assert all(0.0 <= row[1] <= 1.0 for row in seen(whole) if row[1] is not None)
    assert any(row[1] is not None for row in seen(whole))

    again = run(tmp_path / "again", tiny_folder, model, kept)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(weights(again.model), weights(whole.model))
    assert torch.equal(weights(again.reward_funcs[0].classifier), weights(whole.reward_funcs[0].classifier))
    assert again.parts.preference.pairs == part.pairs
    assert seen(again) == seen(whole)
    whole.save_final(tmp_path / "whole")
    last = PreferenceReward(
        str(tmp_path / "whole" / FOLDER), comparisons=str(tmp_path / "whole" / FOLDER / COMPARISONS)
    )
    assert torch.equal(weights(last.classifier), weights(whole.reward_funcs[0].classifier))
    assert (last.held_out, len(last.earlier())) == (0.2, sum(not holds_out(one["prompt"], 0.2) for one in part.pairs))
    place = tmp_path / "whole" / "checkpoint-3" / FOLDER
    assert 0 < len((place / COMPARISONS).read_text().splitlines()) < len(part.pairs)
    PreferenceReward(str(place))  # a reward model by itself
    whole.train()  # anew: from the comparisons of the start
    assert seen(whole)[0][2] == seen(again)[0][2] < seen(again)[-1][2]

    with_entry(tmp_path / "whole" / "checkpoint-3", "preference")
    with pytest.raises(ValueError, match="written without a preference model that is kept in training"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


@pytest.mark.slow
def test_frozen_it_is_measured_and_stays_as_it_is(
    preference: tuple[Path, dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    frozen = run(tmp_path, tiny_folder, preference[0], {"held_out": 0.5}, steps=2, save_strategy="no")
    before = weights(frozen.reward_funcs[0].classifier)
    frozen.train()
    assert torch.equal(weights(frozen.reward_funcs[0].classifier), before)
    assert frozen.parts.preference.pairs == []
    assert any(row[1] is not None for row in seen(frozen))
    assert all(row[2] is None for row in seen(frozen))


def test_orders_by_hand() -> None:
    assert list(orders([1.0, 0.0, 1.0, float("nan"), 2.0, 2.0], 3)) == [[(0, 1), (2, 1)], []]


@pytest.mark.not_fast
def test_what_it_refuses(preference: tuple[Path, dict[str, Any]], tiny_folder: Path, tmp_path: Path) -> None:
    folder = str(preference[0])
    with pytest.raises(ValueError, match=r"only grpo_lab\.LabTrainer keeps a reward model in training"):
        PreferenceReward(folder, judge="judge", every=1)(prompts=["p"], completions=["c"])
    with pytest.raises(ValueError, match="a `judge` that says which completion is better"):
        PreferenceReward(folder, every=1)
    with pytest.raises(ValueError, match=r"holds Qwen2ForCausalLM; .*`AutoModelForSequenceClassification`"):
        PreferenceReward(str(tiny_folder))
    reward = PreferenceReward(folder, judge="judge")
    with pytest.raises(ValueError, match=r"`judge` of the preference model is 'judge', which no other reward is"):
        LabTrainer(str(tiny_folder), reward, LabConfig(**arguments(tmp_path)), problems())
    bad = PreferenceReward(folder, comparisons=write(tmp_path / "bad.jsonl", [{"prompt": "p"}]))
    with pytest.raises(ValueError, match=r"line 1: it has no `chosen`"):
        bad.earlier()
    stage = {"stage": "reward_model", "name": "rm", "model": str(tiny_folder), "held_out": 1.0, **TRAINING}
    stage["rows"] = write(tmp_path / "one.jsonl", [pair(1)])
    recipe = pipeline_from({"output_dir": str(tmp_path / "out"), "stages": [stage]})
    with pytest.raises(ValueError, match=r"of 1 pairs in .* all are held out"):
        run_pipeline(recipe)


def test_in_stock_trl_it_is_an_ordinary_reward(preference: tuple[Path, dict[str, Any]]) -> None:
    reward = PreferenceReward(str(preference[0]))
    again = pickle.loads(pickle.dumps(reward))
    texts: dict[str, Any] = {"prompts": ["Say 1."] * 3, "completions": ["red good", "red bad", "red " * 600]}
    good, bad, too_long = again(**texts)
    assert good > bad
    assert too_long is None
    assert reward(**texts)[:2] == [good, bad]


@pytest.mark.not_fast
def test_the_stage_is_stopped_and_gone_on_with_to_the_bit(
    preference: tuple[Path, dict[str, Any]], tiny_folder: Path, tmp_path: Path
) -> None:
    rows = write(tmp_path / "pairs.jsonl", [pair(number) for number in range(80)])
    stage = read(RewardModel, {"model": str(tiny_folder), "rows": rows, **TRAINING})
    looks, stop = iter(range(100)), StopRequests(tmp_path)
    stop.asked = lambda: "SIGTERM" if next(looks) > 12 else None  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        stage.run(Workspace(tmp_path, stop))
    facts = stage.run(Workspace(tmp_path, StopRequests(tmp_path)))
    assert facts == preference[1]
    found, whole = (PreferenceReward(str(folder)).classifier for folder in (tmp_path / "model", preference[0]))
    assert torch.equal(weights(found), weights(whole))
