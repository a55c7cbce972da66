"""PPO with a critic on one process: a float64 oracle, what is saved, what is refused, and who must not see the
critic."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo_oracle
from grpo_lab import LabConfig, PPOTrainer
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.critic import Critic, load_critic, save_critic
from parity.harness import LENGTHS, Run, arguments, assert_same_movement, problems, train
from ppo_oracle import Interleaved
from tolerance import loss_gap, metric_gap


def run(folder: Path, out: Path, critic: Path, **changes: Any) -> tuple[Run, Interleaved]:
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    rollout = Interleaved(range(20, 90), LENGTHS, end_id=eos, truncated_share=0.3)
    args = LabConfig(**{**arguments(out, max_steps=4), **ppo_oracle.settings(critic), **changes})
    return train(PPOTrainer, args, folder, rollout=rollout, reward=ppo_oracle.scripted_reward), rollout


@pytest.mark.not_fast
@pytest.mark.parametrize("kind", ppo_oracle.KINDS)
@pytest.mark.parametrize("update", ["exact", "off"])
def test_weights_and_losses_are_a_float64_oracles(kind: str, update: str, tiny_folder: Path, tmp_path: Path) -> None:
    critic = ppo_oracle.critic_folder(tmp_path / "critic", kind)
    ours, rollout = run(tiny_folder, tmp_path / "out", critic, update=update)
    eos = ours.trainer.processing_class.eos_token_id
    oracle = ppo_oracle.replayed(tiny_folder, critic, kind, eos, rollout.batches, 4)
    assert set(oracle.state()) == set(ours.weights)
    first = ppo_oracle.Oracle(tiny_folder, critic, kind, eos).state()
    start = {name: value.float() for name, value in first.items()}
    expected = Run([], [], oracle.state(), start, [{"step": 4}], None)
    assert_same_movement(Run([], [], ours.weights, start, [], None), expected)
    moved = {name: value for name, value in expected.weights.items() if "critic" in name}
    assert_same_movement(Run([], [], ours.weights, start, [], None), Run([], [], moved, start, [{"step": 4}], None))
    steps = [row for row in ours.history if "value/loss" in row]
    for row, (policy, value) in zip(steps, oracle.losses, strict=True):
        # means over 12 rows of up to 30 tokens; a whitened advantage is of size 1, a value loss ½(V − R)² of its own
        assert row["value/loss"] == pytest.approx(value, rel=0, abs=metric_gap(torch.float32, 4, 12 * 30, 2 * value))
        bound = loss_gap(torch.float32, 1 + 2 * ppo_oracle.VF * value, 12 * 30, steps=4)
        assert row["loss"] == pytest.approx(policy + ppo_oracle.VF * value, rel=0, abs=bound)
    assert any(row["value/clip_fraction"] > 0 for row in steps)
    assert any(row.get("ppo/kl_reward", 0) < 0 for row in steps)
    assert max(oracle.approx_kl) > 1e-4
    for row, moved in zip(steps, oracle.approx_kl, strict=True):
        # ½d²: an error of d changes it by d times as much
        assert row["policy/approx_kl"] == pytest.approx(moved, rel=1e-3, abs=metric_gap(torch.float32, 4, 12 * 30, 1.0))
    logged = [row for row in ours.history if "value/return_mean" in row]
    for row, wanted in zip(logged, oracle.generations, strict=True):
        # "ppo/shaped_reward", "ppo/task_reward", "ppo/kl_reward", "value/return_mean", "value/explained_variance"
        for name, number in wanted.items():
            assert row[name] == pytest.approx(number, rel=1e-3, abs=metric_gap(torch.float32, 4, 12 * 30, 4.0)), name


def small(folder: Path, out: Path, **changes: Any) -> PPOTrainer:
    """A real run: the policy generates from text prompts of several lengths."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = {
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "max_completion_length": 6,
        "max_steps": 2,
        "gradient_accumulation_steps": 2,
    }
    options = {
        name: changes.pop(name)
        for name in ("peft_config", "eval_dataset", "reward_processing_classes")
        if name in changes
    }
    kind, reward = changes.pop("kind", PPOTrainer), changes.pop("reward", ppo_oracle.scripted_reward)
    config = LabConfig(**arguments(out, **{**args, "value": {}, **changes}))
    return kind(  # type: ignore[no-any-return]
        str(folder), reward, config, problems(), processing_class=tokenizer, **options
    )  # fmt: skip


def copied(parameters: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in parameters}


@pytest.mark.not_fast
def test_an_adapter_a_critic_in_full_and_a_warm_up(tiny_folder: Path, tmp_path: Path) -> None:
    """Two steps of the critic alone: the policy keeps its bits and has no moments. What is saved is an adapter, and a
    critic beside it."""
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    value = {"model": "copy", "warmup_steps": 2, "learning_rate": 0.01}
    trainer = small(tiny_folder, tmp_path / "out", value=value, peft_config=lora, weight_decay=0.1)
    critic = trainer.parts.critic
    assert critic is not None
    assert not any("lora" in name for name, _ in critic.named_parameters())
    before, start = copied(trainer.model.named_parameters()), copied(critic.named_parameters())
    trainer.train()
    policy = {name: value for name, value in trainer.model.named_parameters() if not trl_bridge.is_critics(name)}
    assert all(torch.equal(value, before[name]) for name, value in policy.items())
    assert not any(value in trainer.optimizer.state for value in policy.values())
    moved = [name for name, value in critic.named_parameters() if not torch.equal(value, start[name])]
    assert len(moved) > len(start) // 2  # its first step moves the head alone, which starts at 0
    rates = Counter(group["lr"] for group in trainer.optimizer.param_groups for _ in group["params"])
    assert rates == {1e-3: sum(p.requires_grad for p in policy.values()), 0.01: len(start)}
    trainer.save_model(str(tmp_path / "saved"))
    assert not any("critic" in name for name in load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    again = load_critic(tmp_path / "saved" / "critic").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in critic.state_dict().items())
    streamed = [name for name, _ in trl_bridge.without_critic(trainer.model.named_parameters())]
    assert len(streamed) == len(policy)


@pytest.mark.not_fast
def test_saved_evaluated_and_followed_by_its_reference(tiny_folder: Path, tmp_path: Path) -> None:
    trainer = small(
        tiny_folder, tmp_path / "out", eval_dataset=problems(4), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=1.0,
        kl={"estimator": "k1", "placement": "reward", "coefficient": 0.1}, num_iterations=2,
    )  # fmt: skip
    trainer.train()
    policy = dict(trl_bridge.without_critic(trainer.model.named_parameters()))
    assert all(torch.equal(value, policy[name]) for name, value in trainer.ref_model.named_parameters())
    judged = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(judged) == 2
    assert all(row["eval_value/loss"] >= 0 and "eval_ppo/kl_reward" in row for row in judged)
    for save in (trainer.save_model, trainer.model.save_pretrained):
        save(str(tmp_path / "saved"))
        loaded, told = AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", dtype=torch.float32, output_loading_info=True
        )
        assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(value, policy[name]) for name, value in loaded.named_parameters())
    again = small(tmp_path / "saved", tmp_path / "again", value={"model": str(tmp_path / "saved" / "critic")})
    assert again.parts.critic is not None
    assert trainer.parts.critic is not None
    assert torch.equal(again.parts.critic.head.weight, trainer.parts.critic.head.weight)
    assert (again.parts.critic.head.weight != 0).any()


def falling() -> Any:
    """Less in every call, and the same for all: the first checkpoint is the best."""
    calls: list[int] = []

    def falling_reward(completions: list[Any], **_: Any) -> list[float]:
        calls.append(1)
        return [1.0 / len(calls)] * len(completions)

    return falling_reward


@pytest.mark.slow
def test_the_best_checkpoints_critic_a_kl_a_completion_and_its_controller(tiny_folder: Path, tmp_path: Path) -> None:
    """The critic of the best checkpoint comes with its policy; a KL charged a completion stands in the curves; in the
    warm-up β stays."""
    kl = {"estimator": "k1", "placement": "reward", "per": "sequence", "coefficient": 0.5, "target": 0.1}
    trainer = small(
        tiny_folder, tmp_path / "out", reward=falling(), kl=kl, value={"warmup_steps": 1, "learning_rate": 0.05},
        max_steps=3, learning_rate=0.02, eval_dataset=problems(4), eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_rewards/falling_reward/mean", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.parts.critic is not None
    best = tmp_path / "out" / "checkpoint-1"
    assert Path(trainer.state.best_model_checkpoint) == best
    critic = trainer.parts.critic.state_dict()
    for step, same in ((1, True), (3, False)):
        saved = load_file(tmp_path / "out" / f"checkpoint-{step}" / "critic" / "critic.safetensors")
        assert all(torch.equal(value, critic[name]) for name, value in saved.items()) is same
    rows = [row for row in trainer.state.log_history if "loss" in row]
    # KL 0, below the target: × (1 − 0.1 · 0.2) after each batch, but not after the warm-up's
    assert [row["kl/beta"] for row in rows] == pytest.approx([0.5, 0.5, 0.49], rel=1e-6)
    assert rows[2]["kl/reward_penalty"] != 0
    for row in rows:
        charged = -row["kl/beta"] * row["kl/reward_penalty"]
        assert row["ppo/kl_reward"] == pytest.approx(charged, rel=1e-5, abs=1e-7)
        assert row["ppo/task_reward"] == pytest.approx(row["rewards/falling_reward/mean"], rel=1e-6)
        assert row["ppo/shaped_reward"] == pytest.approx(row["ppo/task_reward"] + charged, rel=1e-5)
    # a policy's own file lacks the whole critic, and HF is not told that anything is missing; a part of one is
    state = trainer.model.state_dict()
    policy = dict(trl_bridge.without_critic(state.items()))
    assert not trainer.model.load_state_dict(policy, strict=False).missing_keys
    half = {name: value for name, value in state.items() if not name.endswith("head.bias")}
    assert trainer.model.load_state_dict(half, strict=False).missing_keys == [f"{trl_bridge.CRITIC}.head.bias"]


class Watched(PPOTrainer):
    """Keeps texts and rewards of each generation."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        values = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.__dict__.setdefault("seen", []).append(([p + c for p, c in zip(prompts, completions)], values))
        return values


@pytest.mark.slow
def test_a_reward_model_with_a_tokenizer_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """Texts are decoded and encoded again, as ``reward_processing_classes`` says: TRL's, with nothing of ours."""
    words = AutoTokenizer.from_pretrained(tiny_folder)
    own = words.train_new_from_iterator([[f"Add {n} and {n + 1}." for n in range(50)]], vocab_size=300)
    own.pad_token = own.eos_token
    config = AutoConfig.from_pretrained(tiny_folder, num_labels=1, vocab_size=len(own), pad_token_id=own.pad_token_id)
    judge = AutoModelForSequenceClassification.from_config(config).eval()
    trainer = small(
        tiny_folder, tmp_path / "out", kind=Watched, reward=judge, reward_processing_classes=own, max_steps=1
    )
    trainer.train()
    ((texts, values),) = trainer.seen  # type: ignore[attr-defined]
    assert own(texts[0])["input_ids"] != words(texts[0])["input_ids"]
    for text, value in zip(texts, values[:, 0], strict=True):
        with torch.no_grad():
            alone = judge(**own(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0]
        assert value.item() == pytest.approx(alone.item(), abs=1e-5)  # padded to the longest, in float32


def test_what_would_not_train_the_critic_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    class Own(PPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    with pytest.raises(ValueError, match=r"`_compute_loss` is overridden.*never learn"):
        small(tiny_folder, tmp_path, kind=Own)
    with pytest.raises(ValueError, match=r"`value\.model` is '/no/where': no such folder.*'head' or 'copy'"):
        small(tiny_folder, tmp_path, value={"model": "/no/where"})
    other = ppo_oracle.critic_folder(tmp_path / "critic", "network")
    wide = Critic(48)
    save_critic(tmp_path / "wide", wide, {f"{trl_bridge.CRITIC}.{name}": v for name, v in wide.state_dict().items()})
    with pytest.raises(ValueError, match=r"a head for hidden states of width 48, and the policy's have 32"):
        small(tiny_folder, tmp_path, value={"model": str(tmp_path / "wide")})
    (other / "critic.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no critic that can be loaded"):
        small(tiny_folder, tmp_path, value={"model": str(other)})


@pytest.mark.slow
def test_a_reference_that_follows_takes_the_policy_and_not_its_critic(tiny_folder: Path, tmp_path: Path) -> None:
    kl = {"estimator": "k1", "placement": "reward", "coefficient": 0.1, "per": "sequence"}
    trainer = small(tiny_folder, tmp_path / "out", kl=kl, reference_every=2)
    trainer.train()
    policy = dict(trl_bridge.without_critic(trainer.model.named_parameters()))
    reference = dict(trainer.ref_model.named_parameters())
    assert set(policy) == set(reference)
    assert all(torch.equal(value, reference[name]) for name, value in policy.items())
    assert trainer.parts.critic is not None
    first, second = (row for row in trainer.state.log_history if "ppo/task_reward" in row)
    assert first["ppo/kl_reward"] == pytest.approx(0, abs=1e-5)  # policy and reference are one; 6 tokens, float32
    assert abs(second["ppo/kl_reward"]) > 1e-3
    for row in (first, second):  # a KL on the last token is no reward of the task
        task = row["rewards/scripted_reward/mean"]
        assert row["ppo/task_reward"] == pytest.approx(task, abs=1e-6)
        assert row["ppo/shaped_reward"] == pytest.approx(task + row["ppo/kl_reward"], abs=1e-6)
