"""The KL penalty in the reward at trainer level, against the formula over single numbers in float64."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from metrics_oracle import in_float64
from parity.harness import arguments, mixed_reward, movement_bound, movement_difference, train

LENGTHS = (3, 5, 9, 14)


class WithTools(ScriptedRollout):
    """Every third token comes from a tool."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = super().__call__(prompts, trainer)
        return {**made, "env_mask": [own_tokens(ids) for ids in made["completion_ids"]]}


def own_tokens(ids: list[int]) -> list[int]:
    return [int(place % 3 != 1) for place in range(len(ids))]


class Watched(LabTrainer):
    """Keeps what each generation batch gave, and the KL of its rows by a forward of each row alone in float64."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        policy, reference = (in_float64(model) for model in (self.model, self.ref_model))
        rollout = self.args.script
        completions = [rollout.completion(rollout.calls - 1, row) for row in range(len(inputs))]
        tools = isinstance(rollout, WithTools)
        penalties, of_tokens = [], []
        for row, ids in enumerate(completions):
            prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            own = own_tokens(ids) if tools else [1] * len(ids)
            new, ref = (row_log_probs(model, prompt, ids) for model in (policy, reference))
            of_tokens.append([a - b if mine else 0.0 for a, b, mine in zip(new, ref, own, strict=True)])
            penalties.append(sum(of_tokens[-1]))
        rewards = mixed_reward()(prompts=[], completion_ids=completions, number=[row["number"] for row in inputs])
        seen = {"output": output, "completions": completions, "penalties": penalties, "rewards": rewards}
        seen |= {"of_tokens": of_tokens, "logged": list(self._logs["advantages"])}
        self.__dict__.setdefault("seen", []).append(seen)
        return output


@torch.no_grad()
def row_log_probs(model: Any, prompt: list[int], ids: list[int]) -> list[float]:
    scores = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return [scores[len(prompt) - 1 + place, token].item() for place, token in enumerate(ids)]


def leave_one_out(rewards: list[float], group_size: int = 4) -> list[float]:
    found = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        found += [reward - (sum(group) - reward) / (len(group) - 1) for reward in group]
    return found


@pytest.mark.not_fast
@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_cut_completions_pay_for_their_kl(tools: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """Half of the completions are cut and masked: they carry no loss, but stand in the baseline of the others."""
    beta = 0.5
    config = LabConfig(
        **arguments(tmp_path, max_steps=3, learning_rate=0.3, mask_truncated_completions=True),
        objective={"name": "dr_grpo", "advantage": "leave_one_out"},
        kl={"estimator": "k1", "placement": "reward", "coefficient": beta},
    )
    config.script = (WithTools if tools else ScriptedRollout)(range(20, 90), LENGTHS, end_id=0, truncated_share=0.5)
    run = train(Watched, config, tiny_folder, rollout=config.script, prepare=end_token)
    logged = [row for row in run.history if "loss" in row]
    for seen, row in zip(
        run.trainer.seen[1:], logged[1:], strict=True
    ):  # in the first step the policy is the reference
        assert max(map(abs, seen["penalties"])) > 0.2, "no KL: nothing was compared"
        rewards = [r - beta * k for r, k in zip(seen["rewards"], seen["penalties"], strict=True)]
        # float32 log-probs of both models: 1e-5 a token at the most, fourteen tokens
        assert seen["output"]["advantages"].tolist() == pytest.approx(leave_one_out(rewards), abs=beta * 2 * 14e-5)
        assert row["kl/reward_penalty"] == pytest.approx(statistics.fmean(seen["penalties"]), abs=2 * 14e-5)
        own = [sum(own_tokens(ids)) if tools else len(ids) for ids in seen["completions"]]
        kept = [ids[-1] == run.trainer._tokenizer.eos_token_id for ids in seen["completions"]]
        assert any(kept)
        assert not all(kept)
        mask = seen["output"]["completion_mask"].bool()
        mask = mask & seen["output"]["tool_mask"].bool()
        assert mask.sum(1).tolist() == [n * whole for n, whole in zip(own, kept, strict=True)]
        assert seen["output"]["num_items_in_batch"].item() == sum(mask.sum(1).tolist())
        assert row["completions/mean_length"] == pytest.approx(statistics.fmean(own))
        assert row["completions/truncated_share"] == pytest.approx(1 - statistics.fmean(kept))


def end_token(trainer: Any) -> None:
    trainer.args.script.end_id = trainer._tokenizer.eos_token_id


def one_after_first(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Something to learn from in the first generation batch, then 1."""
    return [1.0 if trainer_state.global_step else float(sum(ids) % 3) for ids in completion_ids]


@pytest.mark.not_fast
def test_a_small_penalty_on_a_large_reward_keeps_its_digits(tiny_folder: Path, tmp_path: Path) -> None:
    """Rewards of 1 less 1e-5 · KL: in float32 the z-score of that was off by up to 6e-4. Expected: from the same
    log-probs, in float64."""
    beta = 1e-5
    config = LabConfig(
        **arguments(tmp_path, max_steps=4, num_iterations=2, learning_rate=0.3),
        objective={"name": "dr_grpo", "advantage": "group_zscore"},
        kl={"estimator": "k3", "placement": "reward", "coefficient": beta},
    )
    config.script = ScriptedRollout(range(20, 90), LENGTHS, end_id=0)
    run = train(Watched, config, tiny_folder, rollout=config.script, prepare=end_token, reward=one_after_first)
    output = run.trainer.seen[-1]["output"]
    rewards = []
    for row in range(output["completion_mask"].size(0)):
        kl = 0.0
        for t in range(int(output["completion_mask"][row].sum())):
            x = output["ref_per_token_logps"][row, t].double() - output["old_per_token_logps"][row, t].double()
            kl += (x.exp() - x - 1).item()
        rewards.append(1 - beta * kl)
    expected = []
    for start in range(0, len(rewards), 4):
        group = rewards[start : start + 4]
        expected += [(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) for r in group]
    assert max(map(abs, expected)) > 1e-2, "no KL: nothing was compared"
    assert output["advantages"].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)  # float32 of one number


def group_zscore(rewards: list[float]) -> list[float]:
    groups = [rewards[start : start + 4] for start in range(0, len(rewards), 4)]
    return [(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) for group in groups for r in group]


def to_go(kls: list[float], own: list[int], beta: float, gamma: float) -> list[float]:
    """−β·Σ γ^n k over own tokens from t on."""
    found = []
    for t in range(len(kls)):
        later = [s for s in range(t, len(kls)) if own[s]]
        found.append(-beta * sum(gamma**n * kls[s] for n, s in enumerate(later)))
    return found


@pytest.mark.not_fast
@pytest.mark.parametrize("tools", [False, True], ids=["text", "tools"])
def test_every_token_pays_for_what_comes_after_it(tools: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """The rule sees rewards only; −β·(KL to go) is added to its answer, in bins and in TRL's batches alike."""
    beta, gamma, runs = 0.5, 0.9, []
    for update in ("exact", "off"):
        config = LabConfig(
            **arguments(tmp_path, max_steps=3, learning_rate=0.3, mask_truncated_completions=True),
            objective={"name": "dr_grpo", "advantage": "leave_one_out"},
            kl={"estimator": "k1", "placement": "reward", "coefficient": beta, "per": "token", "gamma": gamma},
            update=update,
        )
        config.script = (WithTools if tools else ScriptedRollout)(range(20, 90), LENGTHS, end_id=0, truncated_share=0.4)
        run = train(Watched, config, tiny_folder, rollout=config.script, prepare=end_token)
        runs.append(run)
        logged = [row for row in run.history if "loss" in row]
        for seen, row in zip(run.trainer.seen[1:], logged[1:], strict=True):
            assert max(map(abs, seen["penalties"])) > 0.2, "no KL: nothing was compared"
            assert row["kl/reward_penalty"] == pytest.approx(statistics.fmean(seen["penalties"]), abs=2 * 14e-5)
            kept = [ids[-1] == run.trainer._tokenizer.eos_token_id for ids in seen["completions"]]
            for i, (base, ids) in enumerate(zip(leave_one_out(seen["rewards"]), seen["completions"], strict=True)):
                own = own_tokens(ids) if tools else [1] * len(ids)
                extra = to_go(seen["of_tokens"][i], own, beta, gamma)
                found = seen["output"]["advantages"][i].tolist()
                mine = [t for t in range(len(ids)) if own[t]]
                expected = [base + extra[t] for t in mine]
                # float32 log-probs of both models: 1e-5 a token at the most, fourteen tokens
                assert [found[t] for t in mine] == pytest.approx(expected, abs=beta * 2 * 14e-5)
                mean = statistics.fmean(expected) if kept[i] else 0.0  # a cut completion has no loss token
                assert seen["logged"][i] == pytest.approx(mean, abs=beta * 2 * 14e-5)
    assert movement_difference(runs[0], runs[1]) <= movement_bound(runs[1])


@pytest.mark.not_fast
def test_added_to_trls_own_advantages_and_to_resampled_ones(tiny_folder: Path, tmp_path: Path) -> None:
    """No rule of ours: TRL's z-score plus the KL to go; ``resample`` selects by rewards, although every token has an
    advantage."""
    beta = 0.5
    config = LabConfig(
        **arguments(tmp_path, max_steps=3, learning_rate=0.3),
        kl={"estimator": "k1_clamped", "placement": "reward", "coefficient": beta, "per": "token"},
    )
    config.script = ScriptedRollout(range(20, 90), LENGTHS, end_id=0)
    run = train(Watched, config, tiny_folder, rollout=config.script, prepare=end_token)
    for seen in run.trainer.seen[1:]:
        for i, (base, kls) in enumerate(zip(group_zscore(seen["rewards"]), seen["of_tokens"], strict=True)):
            extra = to_go([max(kl, 0.0) for kl in kls], [1] * len(kls), beta, 1.0)
            expected = [base + value for value in extra]
            # the z-score: float32 TRL against ours, rewards of size 1 over a standard deviation of at least 0.1 (or 0)
            assert seen["output"]["advantages"][i].tolist()[: len(kls)] == pytest.approx(
                expected, abs=beta * 3e-4 + 2e-5
            )
    selected = LabConfig(
        **arguments(tmp_path, max_steps=2, learning_rate=0.3),
        objective="dr_grpo",
        kl={"estimator": "k3", "placement": "reward", "coefficient": beta, "per": "token"},
        update={"dead_groups": "resample", "max_rounds": 9},
    )
    history = train(LabTrainer, selected, tiny_folder).history
    assert max(row.get("update/resample_rounds", 0) for row in history) > 1
    assert [row["update/live_share"] for row in history if "update/live_share" in row] == [1.0] * 2
