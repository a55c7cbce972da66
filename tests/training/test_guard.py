"""Planted NaN and infinities: the step is left out to the bit, counted, its batch kept; so many in a row stop the run.

The metrics: `guard/left_out`, `guard/loss`, `guard/gradient`, `guard/reward`, `guard/log_prob`, `guard/advantage`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from distributed.guard_worker import EACH, STEPS, Plant, build, shares, state_of
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.rewards import step_reward
from grpo_lab.trainer.ports import Faults
from grpo_lab.trainer.scoring.scored import without_faulty
from grpo_lab.trainer.step import bad_step
from grpo_lab.trainer.step.bad_step import read_bad_step
from grpo_lab.trainer.step.guard import NumbersError, last_good
from parity.harness import arguments, with_entry
from parity.test_overrides import own_step


@pytest.fixture(scope="module")
def each(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plant, Path]:
    """One training with each kind in a step of its own."""
    plant, folder = Plant(EACH), tmp_path_factory.mktemp("each")
    build(tiny_folder, folder, plant).train()
    return plant, folder


@pytest.mark.not_fast
def test_a_bad_step_moves_nothing_and_the_next_does(each: tuple[Plant, Path]) -> None:
    plant, _ = each
    assert plant.moved == [step not in EACH for step in range(1, STEPS + 1)]  # weights, moments, AdamW's counts
    assert plant.schedule == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert state_of(plant.trainer).isfinite().all()
    assert plant.trainer.state.global_step == STEPS


def test_reasons_are_counted_from_the_first_one_on(each: tuple[Plant, Path]) -> None:
    trainer = each[0].trainer
    assert shares(trainer, "left_out") == [None, 1, 0, 1, 0, 1, 0, 1, 0]
    for step, kind in EACH.items():
        expected = [None] + [float(at == step) for at in range(2, STEPS + 1)]
        assert shares(trainer, kind) == expected, kind
    assert shares(trainer, "advantage") == [None] + [0.0] * (STEPS - 1)
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    not_numbers = {step for step, loss in losses.items() if math.isnan(loss)}
    assert not_numbers == {step for step, kind in EACH.items() if kind == "loss"}


def test_the_batch_is_kept_and_read_back(each: tuple[Plant, Path]) -> None:
    folder = each[1] / "bad_steps"
    assert sorted(place.name for place in folder.iterdir()) == [f"step-{step:06d}" for step in EACH]
    for step, kind in EACH.items():
        facts, (tensors,) = read_bad_step(folder / f"step-{step:06d}")
        assert (facts["step"], facts["not_finite"], facts["in_a_row"]) == (step, [kind], 1)
        rows = facts["of_rank"][0]["rows"]
        assert len(rows) == tensors["completion_ids"].size(0) == 8  # 4 rows of each of 2 micro-batches
        for row, ids, mask in zip(rows, tensors["completion_ids"], tensors["completion_mask"], strict=True):
            tokens = ids[mask.bool()].tolist()
            assert len(tokens) == 3
            assert tokens[2] == 40
            reward = None if row["rewards"] is None else row["rewards"][0]
            assert kind == "reward" or reward == pytest.approx((sum(tokens) % 7) / 7, abs=1e-7)
        assert math.isfinite(float(facts["grad_norm"])) is (kind != "gradient")
    reward, _ = read_bad_step(folder / "step-000006")
    assert reward["of_rank"][0]["said"] == ["reward function 'planted' returned -inf for completion 7 of 8"]
    infinite = [(row["not_finite"], row["rewards"] == ["-inf"]) for row in reward["of_rank"][0]["rows"]]
    assert infinite == [(["rewards"], True), *[([], False)] * 7]  # the bad row comes first, and says what it got
    log_prob, _ = read_bad_step(folder / "step-000008")
    assert log_prob["of_rank"][0]["said"] == ["the engine's log-prob of token 1 of completion 7 is inf"]
    odd = [row["not_finite"] for row in log_prob["of_rank"][0]["rows"]]
    assert odd == [["sampling_per_token_logps"], *[[]] * 7]  # the bad row comes first


@pytest.mark.slow
def test_a_bad_generation_batch_counts_once_and_survives_a_resume(tiny_folder: Path, tmp_path: Path) -> None:
    """Two updates on each generation batch: the first batch has an infinite reward; of the second one update has a NaN
    loss."""
    twice = {"steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 1}
    plant = Plant({1: "reward", 3: "loss"})
    whole = build(tiny_folder, tmp_path / "whole", plant, guard={"max_bad_steps": 3}, **twice)
    whole.train()
    assert plant.moved == [False, False, False, True]
    assert shares(whole, "reward") == [1, 1, 0, 0]
    assert read_bad_step(tmp_path / "whole" / "bad_steps" / "step-000003")[0]["in_a_row"] == 2
    assert not (tmp_path / "whole" / "bad_steps" / "step-000002").exists()
    again = Plant({3: "loss"})
    resumed = build(tiny_folder, tmp_path / "again", again, **twice)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert again.moved == [False, False, True]  # step 2 is of the bad batch
    assert torch.equal(state_of(resumed), state_of(whole))
    with_entry(tmp_path / "whole" / "checkpoint-1", "guard", {"in_a_row": 1})
    said = r"entry `guard` of .*grpo_lab_state.json cannot be used .*take the entry out: the count"
    with pytest.raises(ValueError, match=said):
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))


@pytest.mark.slow
def test_three_in_a_row_stop_and_the_run_goes_on_from_the_named_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "lr_scheduler_type": "constant"}
    plant = Plant(dict.fromkeys((3, 4, 5), "gradient"))
    trainer = build(tiny_folder, tmp_path / "stopped", plant, **saved)
    with pytest.raises(NumbersError) as stopped:
        trainer.train()
    said, named = str(stopped.value), str(tmp_path / "stopped" / "checkpoint-2")
    assert said.startswith("3 optimizer steps in a row could not be taken, the last one 5: gradient not finite")
    assert "guard.max_bad_steps" in said
    assert "The weights are as after step 2." in said
    assert f"Last good checkpoint: {named};" in said
    assert trainer.state.global_step == 4
    clean = build(tiny_folder, tmp_path / "clean", Plant({}), **saved)
    clean.train()
    mended = build(tiny_folder, tmp_path / "mended", Plant({}), **saved)
    mended.train(resume_from_checkpoint=named)
    assert torch.equal(state_of(mended), state_of(clean))
    assert shares(mended, "left_out") == [None] * 6  # finite throughout: nothing more is logged than without a guard
    plant.bad.clear()
    trainer.train(resume_from_checkpoint=named)  # as the error says, in the same process
    assert torch.equal(state_of(trainer), state_of(clean))


@pytest.mark.slow
def test_a_bad_step_inside_a_logging_window(tiny_folder: Path, tmp_path: Path) -> None:
    """Windows of 3 steps: of the first, step 2 has a NaN loss; in the second, step 5 has finite gradients of 1e25,
    whose squares overflow."""
    windows = {"max_steps": 6, "logging_steps": 3, "logging_nan_inf_filter": False}
    windows |= {"save_strategy": "steps", "save_steps": 1}

    def run(folder: Path, checkpoint: str | None) -> Any:
        trainer = build(tiny_folder, folder, Plant({2: "loss"}), **windows)
        first = next(trainer.model.parameters())
        first.register_hook(lambda grad: torch.full_like(grad, 1e25) if trainer.state.global_step == 4 else grad)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "whole", None)
    resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-1"))
    # a resume inside of the first window, before anything was bad, counts its first step, too
    for trainer in (whole, resumed):
        assert shares(trainer, "left_out") == pytest.approx([1 / 3, 1 / 3])
        assert shares(trainer, "loss") == pytest.approx([1 / 3, 0])
        assert shares(trainer, "gradient") == pytest.approx([0, 1 / 3])
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert [math.isfinite(loss) for loss in losses] == [False, True]
    assert torch.equal(state_of(resumed), state_of(whole))


@pytest.mark.not_fast
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_subclass_that_writes_the_training_step_itself(accumulation: int, tiny_folder: Path, tmp_path: Path) -> None:
    """TRL's ``_step`` stands still there: it counted as before every bad batch, and no step was taken."""
    plant = Plant({2: "reward", 4: "log_prob"})
    changes = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8 // accumulation}
    changes["max_steps"] = 5
    trainer = build(tiny_folder, tmp_path, plant, own_step(LabTrainer), **changes)
    trainer.train()
    assert plant.moved == [True, False, True, False, True]
    assert shares(trainer, "reward") == [None, 1, 0, 0, 0]
    assert shares(trainer, "log_prob") == [None, 0, 0, 1, 0]
    facts, (tensors,) = read_bad_step(tmp_path / "bad_steps" / "step-000002")
    assert [row["micro_batch"] for row in facts["of_rank"][0]["rows"][:1]] == [0]
    assert facts["of_rank"][0]["rows"][0]["not_finite"] == ["rewards"]
    assert tensors["completion_ids"].size(0) == 8


@pytest.mark.not_fast
def test_a_critics_gradient_and_advantages_of_a_rule(tiny_folder: Path, tmp_path: Path) -> None:
    class Overflows(LabTrainer):
        def compute_advantages(self, table: Any) -> Tensor:
            found = super().compute_advantages(table)
            return found / 0.0 if self.state.global_step == 2 else found

    plant = Plant({})
    trainer = build(tiny_folder, tmp_path, plant, Overflows, objective=None, value={"model": "head"}, max_steps=4)
    (critic,) = [p for name, p in trainer.model.named_parameters() if "grpo_lab_critic" in name and p.dim() == 2]
    critic.register_hook(lambda grad: grad * (math.nan if trainer.state.global_step == 0 else 1.0))
    trainer.train()
    assert plant.moved == [False, True, False, True]
    assert shares(trainer, "gradient")[:2] == [1, 0]
    assert shares(trainer, "advantage") == [0, 0, 1, 0]


@pytest.mark.not_fast
def test_an_infinite_score_of_a_step(tiny_folder: Path, tmp_path: Path) -> None:
    """A step reward's stands for its completion; a number that float32 has not is infinite, too."""
    plant = Plant({})

    @step_reward
    def scored(completion_ids: list[list[int]], **_: Any) -> list[list[tuple[int, float]]]:
        bad = {0: math.inf, 2: -1e39}.get(plant.trainer.state.global_step)
        steps = [[(1, sum(ids) % 7 / 7), (2, sum(ids) % 5 / 5)] for ids in completion_ids]
        return steps if bad is None else [*steps[:-1], [(1, -math.inf), (2, bad)]]

    trainer = build(tiny_folder, tmp_path, plant, reward=scored, objective="grpo", advantage="process", max_steps=4)
    trainer.train()
    assert plant.moved == [False, True, False, True]
    assert shares(trainer, "reward") == [1, 0, 1, 0]
    facts, _ = read_bad_step(tmp_path / "bad_steps" / "step-000001")
    assert facts["of_rank"][0]["said"] == ["reward function 'scored' returned -inf for completion 7 of 8"]
    off: dict[str, Any] = {"reward": scored, "objective": "grpo", "advantage": "process", "guard": "off"}
    with pytest.raises(ValueError, match="gave -inf to a step of completion 7"):  # as it always was
        build(tiny_folder, tmp_path / "off", plant, **off).train()


@pytest.mark.not_fast
def test_weights_that_the_optimizer_breaks(tiny_folder: Path, tmp_path: Path) -> None:
    """Adam in fp16: ε = 1e-8 is 0 there, and so are small squares. All numbers that the guard sees are finite in step
    1, the weights NaN after it."""
    trainer = build(tiny_folder, tmp_path, Plant({}), max_steps=3)
    trainer.model.half()
    with pytest.raises(NumbersError) as stopped:
        trainer.train()
    said = str(stopped.value)
    assert said.startswith("after step 1 the weights hold NaN or infinities, in ")
    assert "After step 0 they were finite" in said
    assert "There is no checkpoint" in said
    assert trainer.state.global_step == 1


class Breaks(TrainerCallback):
    """In one step's optimizer, after everything of the step was looked at: NaN in a moment, or the learning rate is
    none."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            if self.what == "learning rate":
                optimizer.param_groups[0]["lr"] = math.inf
            else:
                next(iter(optimizer.state.values()))["exp_avg"].view(-1)[0] = math.nan


@pytest.mark.not_fast
@pytest.mark.parametrize(("what", "every"), [("moment", 1), ("learning rate", 4)])
def test_what_the_last_step_breaks_is_no_success(what: str, every: int, tiny_folder: Path, tmp_path: Path) -> None:
    """Nothing is generated after it, with one step a generation or four: the training ended, and NaN was saved as its
    model."""
    trainer = build(tiny_folder, tmp_path, Plant({}), max_steps=4, steps_per_generation=2 * every)
    trainer.add_callback(Breaks(4, what))
    with pytest.raises(NumbersError, match="after step 4 the weights hold NaN or infinities, in"):
        trainer.train()
    assert trainer.state.global_step == 4


@pytest.mark.not_fast
@pytest.mark.parametrize(
    "settings",
    [{}, {"objective": None}, {"objective": "ppo", "value": {"model": "head"}}],
    ids=["ours", "drop-in", "critic"],
)
def test_nan_is_in_no_checkpoint_and_the_run_goes_on_from_the_one_before(
    settings: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """With `save_total_limit: 1` the checkpoint before went for it."""
    saved = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 4}
    saved |= {"steps_per_generation": 8}
    trainer = build(tiny_folder, tmp_path, Plant({}), **saved, **settings)
    trainer.add_callback(Breaks(3, "moment"))
    said = r"checkpoint of step 3 is not kept: \S+ holds NaN .*newest whole one is .*checkpoint-2"
    with pytest.raises(NumbersError, match=said):
        trainer.train()
    assert [place.name for place in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = build(tiny_folder, tmp_path, Plant({}), **saved, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert state_of(resumed).isfinite().all()


@pytest.mark.slow
def test_what_is_kept_is_bounded(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_step, "MOST_STEPS", 1)
    monkeypatch.setattr(bad_step, "MOST_ROWS", 3)
    plant = Plant({1: "log_prob", 3: "loss"})
    build(tiny_folder, tmp_path / "some", plant, max_steps=3).train()
    assert plant.moved == [False, True, False]
    (kept,) = (tmp_path / "some" / "bad_steps").iterdir()
    assert read_bad_step(kept)[1][0]["completion_ids"].size(0) == 3
    none = Plant({1: "loss"})
    build(tiny_folder, tmp_path / "none", none, max_steps=1, guard={"save": False}).train()
    assert none.moved == [False]
    assert not (tmp_path / "none" / "bad_steps").exists()


@pytest.mark.slow
def test_where_it_cannot_write_it_says_so_and_goes_on(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad_steps").write_text("in the way")
    plant = Plant({1: "loss"})
    build(tiny_folder, tmp_path, plant, max_steps=2).train()
    assert plant.moved == [False, True]
    assert "its batch could not be kept in" in caplog.text


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "in_force"),
    [
        ({}, None),  # a drop-in run, as stock TRL
        ({"objective": "dapo"}, 3),
        ({"objective": "dapo", "guard": "off"}, None),
        ({"objective": "dapo", "guard": False}, None),  # YAML's off
        ({"guard": {"max_bad_steps": 5}}, 5),
        ({"guard": '{"save": false}'}, 3),
    ],
)
def test_where_it_is_in_force(settings: dict[str, Any], in_force: int | None, tmp_path: Path) -> None:
    found = LabConfig(**arguments(tmp_path), **settings).lab_settings.guard_in_force
    assert (None if found is None else found.max_bad_steps) == in_force


@pytest.mark.parametrize(
    ("guard", "parts"),
    [
        ({"max_bad_step": 3}, ("max_bad_step", "did you mean 'max_bad_steps'")),
        ({"max_bad_steps": 0}, ("guard.max_bad_steps", "at least 1")),
        ("sometimes", ("guard", "sometimes", "'on' or 'off'")),
        ({"name": "off", "save": False}, ("guard.save", "no effect")),
    ],
)
def test_settings_that_are_refused(guard: Any, parts: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        LabConfig(**arguments(tmp_path), guard=guard)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.slow
def test_without_a_guard_nan_goes_into_the_weights_and_the_checkpoint(tiny_folder: Path, tmp_path: Path) -> None:
    """What it is there for; and the plant does what it says."""
    plant = Plant({1: "gradient"})
    build(tiny_folder, tmp_path, plant, max_steps=1, save_strategy="steps", save_steps=1, guard="off").train()
    assert not state_of(plant.trainer).isfinite().all()
    assert (tmp_path / "checkpoint-1").is_dir()


def test_tokens_that_were_put_in_have_no_log_prob_to_look_at() -> None:
    """A thinking budget's own end has NaN there (``rollouts.thinking_budget``); of a sampled token NaN is a fault, None
    is not."""
    faults = Faults()
    found: list[list[float | None]] = [[-1.0, math.nan, None], [math.nan, -1.0, math.inf]]
    without_faulty(found[:1], [[1, 0, 1]], faults)
    assert faults.said == []
    assert math.isnan(found[0][1] or 0.0)
    without_faulty(found, [[1, 0, 1], [1, 1, 1]], faults)
    assert faults.said == ["the engine's log-prob of token 0 of completion 1 is nan"]
    assert found[1] == [None, -1.0, None]
    with pytest.raises(EngineFault, match="token 0 of completion 0 is nan"):
        without_faulty([[math.nan]], None, None)


def test_last_good(tmp_path: Path) -> None:
    assert "There is no checkpoint" in last_good(str(tmp_path), 3)
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        save_file({"weight": torch.zeros(1)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    (tmp_path / "checkpoint-3").mkdir()  # half written
    assert f"{tmp_path}/checkpoint-2;" in last_good(str(tmp_path), 3)
    assert "`grpo-lab train … --resume`" in last_good(str(tmp_path), 3)
    assert f"{tmp_path}/checkpoint-10;" in last_good(str(tmp_path), 10)
    # written while steps were left out: the same weights
    assert f"{tmp_path}/checkpoint-2;" in last_good(str(tmp_path), 1)


@pytest.mark.not_fast
def test_nan_among_the_weights_is_named_before_anything_is_sampled(tiny_folder: Path, tmp_path: Path) -> None:
    """torch's own word, in the generation, is "probability tensor contains either `inf`, `nan` or element < 0"."""
    trainer = build(tiny_folder, tmp_path, Plant({}), max_steps=1)
    name, weight = next(iter(trainer.model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[3] = math.nan
    with pytest.raises(NumbersError, match=rf"hold NaN or infinities, in 1 of \d+ tensors \({name}\)"):
        trainer.train()


SCORES = "scores of the next token are not finite"


@pytest.mark.not_fast
@pytest.mark.parametrize("objective", ["dr_grpo", None])
@pytest.mark.parametrize(
    ("where", "number", "said"),
    [
        ("weight", 3e38, r"though its weights are: the largest is 3e\+38, in model.norm.weight"),
        ("buffer", math.nan, rf"{SCORES}|in 1 of \d+ tensors \(model.rotary_emb.inv_freq\)"),
        ("buffer", math.inf, SCORES),
        ("weight", math.nan, r"hold NaN or infinities, in 1 of \d+ tensors \(model.norm"),
    ],
)
def test_scores_that_are_not_finite_are_named(
    where: str, number: float, said: str, objective: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    """In a drop-in run, too; "probability tensor contains either `inf`, `nan` or element < 0" ended it with code 1."""
    trainer = build(tiny_folder, tmp_path, Plant({}), max_steps=1, objective=objective)
    trainer.rollout_func = None
    tensor = trainer.model.model.norm.weight if where == "weight" else trainer.model.model.rotary_emb.inv_freq
    with torch.no_grad():
        tensor.fill_(number)
    with pytest.raises(NumbersError, match=said):
        trainer.train()
    with pytest.raises(NumbersError, match=SCORES):
        trainer.evaluate(trainer.train_dataset)


def test_fp16s_overflow_is_left_to_its_scaler() -> None:
    from grpo_lab.trainer.trl_bridge import leave_out_step, overflow_of_scaler

    scaler = SimpleNamespace(is_enabled=lambda: True, get_scale=lambda: 65536.0, updates=0)
    scaler.update = lambda: setattr(scaler, "updates", scaler.updates + 1)
    assert overflow_of_scaler(SimpleNamespace(scaler=scaler))
    scaler.get_scale = lambda: 1.0
    assert not overflow_of_scaler(SimpleNamespace(scaler=scaler))
    assert not overflow_of_scaler(SimpleNamespace(scaler=None))
    calls: list[str] = []
    optimizer = SimpleNamespace(step=lambda: calls.append("step"), scaler=scaler, _is_overflow=False)
    leave_out_step(optimizer)
    optimizer.step()
    assert (calls, optimizer._is_overflow, scaler.updates) == ([], True, 1)  # unscaled once, updated once
    optimizer.step()
    assert calls == ["step"]
