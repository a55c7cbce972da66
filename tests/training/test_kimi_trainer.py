"""Kimi's mirror descent and R1-Zero through the real trainer: the update against loops in float64, the optimizer reset,
declared rewards, reward schedules over a resume. Scripted completions, so runs differ by their update only."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lab import KimiTrainer, LabConfig, LabTrainer, R1ZeroTrainer
from grpo_lab.data import word_problems
from grpo_lab.rewards import AccuracyReward, KimiLengthReward, LanguageConsistencyReward
from grpo_lab.testing import ScriptedRollout, tiny_model
from grpo_lab.trainer.ports import Phase
from grpo_lab.trainer.step.iteration import OptimizerReset, empty_optimizer
from tolerance import log_prob_gap, movement_gap, two_walks

pytestmark = pytest.mark.slow

MIRROR = {"name": "mirror_descent", "tau": 0.5}


def accuracy_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some right, some wrong, some groups dead; a stand-in for a judge (the real one is tested elsewhere)."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


class Moments(TrainerCallback):
    """Optimizer entries and log rows, as another callback of the run sees them after each step."""

    def __init__(self) -> None:
        self.entries: list[int] = []

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        self.entries.append(len(optimizer.state))


def build(
    folder: Path,
    kind: type[LabTrainer] = LabTrainer,
    rewards: Any = accuracy_reward,
    double: bool = False,
    **settings: Any,
) -> LabTrainer:
    model, tokenizer = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)
    if double:
        model = model.double()
    written = {
        "max_steps": 4, "num_iterations": 2, "per_device_train_batch_size": 8, "num_generations": 4,
        "learning_rate": 0.01, "max_completion_length": 12, "optim": "sgd", "lr_scheduler_type": "constant",
        "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "max_grad_norm": 0.0,
    }  # fmt: skip
    return kind(
        model,
        rewards,
        LabConfig(str(folder), **{**written, **settings}),
        word_problems(32, seed=0),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(list(range(300, 400)), [3, 7, 12], end_id=tokenizer.eos_token_id),
        callbacks=[Moments()],
    )


def moments(trainer: LabTrainer) -> list[int]:
    return next(c.entries for c in trainer.callback_handler.callbacks if isinstance(c, Moments))


def weights(trainer: LabTrainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def response_logps(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """log π of each token of one response, forwarded alone, without padding."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


class Recorded:
    """The scripted rollout, which remembers what it handed out."""

    def __init__(self, script: ScriptedRollout) -> None:
        self.script, self.made = script, []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        out = self.script(prompts, trainer)
        self.made.append(list(zip(out["prompt_ids"], out["completion_ids"])))
        return out


def by_hand(model: Any, rows: list[Any], advantages: Tensor, tau: float) -> Tensor:
    """The weights after two steps of plain gradient descent on the written formula."""
    old = [response_logps(model, *row).sum().detach() for row in rows]
    for _ in range(2):
        loss = torch.zeros((), dtype=torch.float64)
        for (prompt, completion), advantage, before in zip(rows, advantages, old):
            response = response_logps(model, prompt, completion).sum()
            loss = loss - advantage * response / 8 + tau / 2 * (response - before) ** 2 / 8
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart_and_bound(ours: LabTrainer, theirs: LabTrainer, start: Tensor, tau: float) -> tuple[float, float]:
    """Relative to what training did, and what float32 may make of it: a pull adds τ·(log π − log π_old) over 12 tokens,
    each off by a log-prob's error, beside |Â| of about 0.4."""
    apart, moved = (weights(ours) - weights(theirs)).norm().item(), (weights(theirs) - start).norm().item()
    bound = movement_gap(torch.float32, weights(theirs).norm().item(), moved, steps=theirs.state.global_step, nats=7.0)
    pull = tau * 12**0.5 * log_prob_gap(torch.float32, nats=7.0, width=32) / 0.4
    return apart / moved, bound + pull


@pytest.mark.parametrize("update", [None, "off"])
def test_two_updates_of_an_iteration_are_the_written_formula(tmp_path: Path, update: Any) -> None:
    """−Â·log π(y) + (τ/2)(log π(y) − log π_i(y))², averaged over the 8 responses, by loops in float64, SGD 0.01."""
    trainer = build(tmp_path, objective=MIRROR, max_steps=2, double=True, update=update)
    trainer.rollout_func = rollout = Recorded(trainer.rollout_func)
    reference, _ = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)
    reference = reference.double().train()
    start = torch.cat([p.detach().flatten() for p in reference.parameters()])
    trainer.train()
    (rows,) = rollout.made
    values = torch.tensor(accuracy_reward([c for _, c in rows]), dtype=torch.float64).view(2, 4)
    advantages = (values - values.mean(1, keepdim=True)).flatten()
    assert (advantages != 0).any()
    expected = by_hand(reference, rows, advantages, tau=0.5)
    moved = weights(trainer)
    # TRL's head rounds log-probs to float32, now and before, 12 of 7 nats a response; τ/2 · 2 of that beside |Â|
    rounded = 7.0 * 12**0.5 * two_walks(torch.float32, 1)
    bound = 0.5 * rounded / advantages.square().mean().sqrt()
    assert (moved - expected).norm() <= bound * (expected - start).norm()
    weaker = by_hand(
        tiny_model("qwen2", hidden_size=32, initializer_range=0.2)[0].double().train(), rows, advantages, 0.49
    )
    assert (moved - weaker).norm() > 10 * bound * (expected - start).norm(), "a pull that is 2 % weaker must be seen"


def test_at_tau_zero_it_is_the_plain_policy_gradient(tmp_path: Path) -> None:
    mirror = build(tmp_path, objective={**MIRROR, "tau": 0.0})
    plain = build(
        tmp_path, objective={"name": "reinforce", "aggregation": "sequence_sum"}, update={"dead_groups": "keep"}
    )
    pulled = build(tmp_path, objective=MIRROR)
    for trainer in (mirror, plain, pulled):
        trainer.train()
    start = weights(build(tmp_path, objective=MIRROR))
    apart, bound = apart_and_bound(mirror, plain, start, tau=0.0)
    assert apart <= bound
    assert apart_and_bound(pulled, plain, start, tau=0.0)[0] > 10 * bound, "a pull must be seen"


def test_the_exact_update_computes_all_rows_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="grpo_lab"):
        binned = build(tmp_path, objective=MIRROR)
        binned.train()
    off = build(tmp_path, objective=MIRROR, update="off")
    off.train()
    assert "the surrogate `MirrorDescent`: the loss of a row does not vanish where its advantage is zero" in caplog.text
    shares = [row["update/live_share"] for row in binned.state.log_history if "update/live_share" in row]
    assert shares == [1.0] * 4
    start = weights(build(tmp_path, objective=MIRROR))
    apart, bound = apart_and_bound(binned, off, start, tau=0.5)
    assert apart <= bound < 1e-2


def test_the_optimizer_is_empty_after_each_iteration(tmp_path: Path) -> None:
    """Two updates per generation: full after the first, empty after the second."""
    trainer = build(tmp_path, KimiTrainer, optim="adamw_torch", learning_rate=1e-3, objective=MIRROR)
    trainer.train()
    full = len(list(trainer.model.parameters()))
    assert moments(trainer) == [full, 0, full, 0]
    kept = build(
        tmp_path, KimiTrainer, optim="adamw_torch", learning_rate=1e-3, objective=MIRROR, reset_optimizer=False
    )
    kept.train()
    assert moments(kept) == [full] * 4
    assert (weights(kept) - weights(trainer)).abs().max() > 1e-5


def test_a_reset_is_a_new_optimizer(tmp_path: Path) -> None:
    """One update per iteration: each AdamW step is a first step, lr · g/(|g| + ε), as from a new AdamW each time."""
    trainer = build(
        tmp_path, reset_optimizer=True, optim="adamw_torch", num_iterations=1, max_steps=3, learning_rate=1e-3
    )
    start = weights(trainer).clone()
    trainer.train()
    largest = (weights(trainer) - start).abs().max().item()
    # three sign steps of 1e-3 in the same direction somewhere: each short by ε/|g|, where the largest |g| is above 1e-5
    assert largest == pytest.approx(3e-3, rel=1e-8 / 1e-5)


def test_state_that_a_reset_would_not_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="`reset_optimizer` is on with DeepSpeed"):
        OptimizerReset(SimpleNamespace(is_deepspeed_enabled=True))  # type: ignore[arg-type]
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [parameter], "k": 0}], lr=0.1, momentum=0.9)
    args = SimpleNamespace(steps_per_generation=1, optim="schedule_free_sgd")
    reset = OptimizerReset(SimpleNamespace(is_deepspeed_enabled=False, args=args, phase=Phase(1, 1, 1, done=1)))  # type: ignore[arg-type]
    reset.on_train_begin(None, None, None, optimizer=optimizer)
    parameter.grad = torch.ones(2)
    optimizer.step()
    reset.on_step_end(None, None, None, optimizer=optimizer)
    assert not optimizer.state
    optimizer.param_groups[0]["k"] = 1
    with pytest.raises(ValueError, match=r"keeps state in its parameter groups \('k'\)"):
        reset.on_step_end(None, None, None, optimizer=optimizer)
    empty_optimizer(optimizer)


def test_one_update_per_iteration_says_that_tau_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="grpo_lab"):
        build(tmp_path, objective=MIRROR, num_iterations=1)
    assert "`objective.tau` has no effect: each generation batch gets a single update" in caplog.text


def test_kimi_trainer_adds_the_length_reward_after_its_warm_up(tmp_path: Path) -> None:
    class Mine(KimiTrainer):
        length_weight, length_warmup_steps = 0.25, 2

    trainer = build(tmp_path, Mine, reward_weights=[2.0])
    assert trainer.reward_func_names == ["accuracy_reward", "kimi_length_reward"]
    assert trainer.reward_weights.tolist() == [2.0, 1.0]
    assert trainer.algorithm.names["objective"] == "mirror_descent"
    trainer.train()
    rows = [row for row in trainer.state.log_history if "rewards/kimi_length_reward/mean" in row]
    assert [row["reward_weights/kimi_length_reward"] for row in rows] == [0.0, 0.25]  # two generations of two updates
    assert rows[0]["rewards/kimi_length_reward/std"] == 0.0
    assert rows[-1]["rewards/kimi_length_reward/std"] > 0.0


def test_kimi_trainer_leaves_a_given_length_reward_alone() -> None:
    own = KimiLengthReward(weight=0.1)
    assert KimiTrainer.declared_rewards([accuracy_reward, own]) == [accuracy_reward, own]
    judge, added = KimiTrainer.declared_rewards([])
    assert isinstance(judge, AccuracyReward)
    assert added.requires == ("accuracy_reward",)
    assert KimiTrainer.declared_rewards([lambda **_: [0.0]])[1].requires == ("<lambda>",)
    with pytest.raises(ValueError, match="cannot tell which of the rewards"):
        KimiTrainer.declared_rewards([lambda **_: [0.0], build])


def test_r1_zero_trainer_declares_accuracy_format_and_language(tmp_path: Path) -> None:
    class R1(R1ZeroTrainer):
        language = "en"

    trainer = build(tmp_path, R1, rewards=None, num_iterations=1, max_steps=1)
    assert trainer.reward_func_names == ["accuracy_reward", "think_format_reward", "language_consistency_reward"]
    assert trainer.algorithm.names["objective"] == "grpo"
    trainer.train()
    assert "rewards/language_consistency_reward/mean" in trainer.state.log_history[0]
    assert [type(r).__name__ for r in R1ZeroTrainer.declared_rewards([])] == ["AccuracyReward", "ThinkFormatReward"]
    own = [accuracy_reward, LanguageConsistencyReward("fr")]
    assert R1.declared_rewards(own) == own


LINEAR = {"accuracy_reward": {"kind": "linear", "start": 0, "end": 4, "value": 2.0}}


@pytest.mark.parametrize(
    ("rewards", "settings", "seen"),
    [
        (
            [accuracy_reward, KimiLengthReward(0.5, warmup_steps=3)],
            {"objective": MIRROR, "reset_optimizer": True},
            {"kimi_length_reward": [0.0, 0.0, 0.0, 0.5]},
        ),
        (
            accuracy_reward,
            {"objective": "dr_grpo", "reward_schedules": LINEAR},
            {"accuracy_reward": [0.0, 0.5, 1.0, 1.5]},  # 2.0 · step/4
        ),
    ],
    ids=["warm-up", "schedule"],
)
def test_a_weight_of_a_reward_is_logged_and_goes_on_after_a_resume(
    rewards: Any, settings: dict[str, Any], seen: dict[str, list[float]], tmp_path: Path
) -> None:
    """Four updates, resumed after two: weights and rewards of the uninterrupted run."""
    settings = {"rewards": rewards, "num_iterations": 1, **settings}
    whole = build(tmp_path / "whole", **settings, save_strategy="steps", save_steps=2)
    whole.train()
    again = build(tmp_path / "again", **settings)
    again.rollout_func.calls = 2
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for trainer in (whole, again):
        rows = [row for row in trainer.state.log_history if "reward" in row]
        assert {name: [row[f"reward_weights/{name}"] for row in rows] for name in seen} == seen
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize(
    ("settings", "rewards", "message"),
    [
        ({"reward_schedules": {"acuracy_reward": 1.0}}, accuracy_reward, "did you mean 'accuracy_reward'"),
        (
            {"reward_schedules": {"accuracy_reward": {"kind": "warmpu"}}},
            accuracy_reward,
            "`reward_schedules.accuracy_reward`",
        ),
        (
            {"reward_schedules": {"accuracy_reward": 1.0}, "reward_weights": [2.0]},
            accuracy_reward,
            "two names for one number",
        ),
        (
            {"reward_schedules": {"kimi_length_reward": 1.0}},
            [accuracy_reward, KimiLengthReward()],
            "carries a weight and a warm-up of its own",
        ),
        ({"reward_schedules": 3}, accuracy_reward, "must be a mapping"),
        ({"objective": {"name": "mirror_descent", "epsilon": 0.2}}, accuracy_reward, "`objective.epsilon`=0.2 has no "
            "effect"),
        ({"objective": {"name": "grpo", "tau": 0.2}}, accuracy_reward, "`objective.tau`=0.2 has no effect"),
        ({"objective": {**MIRROR, "ratio": "sequence"}}, accuracy_reward, "`objective.ratio`='sequence' has no effect"),
        ({"objective": {**MIRROR, "tau": -1.0}}, accuracy_reward, "`objective.tau` is -1.0"),
        (
            {"objective": MIRROR, "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
            accuracy_reward,
            "objective 'mirror_descent' is about whole responses",
        ),
    ],
)  # fmt: skip
def test_bad_settings_are_named(tmp_path: Path, settings: dict[str, Any], rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(tmp_path, rewards=rewards, **settings)
