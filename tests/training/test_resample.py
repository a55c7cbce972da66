"""``update.dead_groups: resample``: the batch is filled with live groups, or as far as the rounds allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from datasets import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.row_table import RowTable
from parity.harness import arguments, mixed_reward, movement_difference, problems, train
from tolerance import movement_gap


def resampling(folder: Path, **update: Any) -> LabConfig:
    return LabConfig(
        **arguments(folder, max_steps=3), objective="dr_grpo", update={"dead_groups": "resample", **update}
    )


def column(run: Any, name: str) -> list[float]:
    return [row[name] for row in run.history if name in row]


def distinct_or_dead(completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
    """Every third prompt is dead; elsewhere values so different that no row sits on its group's mean."""
    return [
        0.5 if n % 3 == 0 else (sum(ids) % 97) / 97 + row * 1e-3
        for row, (n, ids) in enumerate(zip(number, completion_ids, strict=True))
    ]


@pytest.mark.not_fast
def test_batches_hold_live_groups_only(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(LabTrainer, resampling(tmp_path, max_rounds=20), tiny_folder, reward=distinct_or_dead)
    assert column(run, "update/live_share") == [1.0] * 3
    assert sum(column(run, "update/resampled_share")) > 0
    assert max(column(run, "update/resample_rounds")) > 1
    assert column(run, "update/completions_generated") == [
        12.0 * rounds for rounds in column(run, "update/resample_rounds")
    ]


class OnThoseRows(GRPOTrainer):
    """Stock TRL, trained on rows that another run has put together (as TRL's generation returns them, before it
    shuffles)."""

    batches: ClassVar[list[dict[str, Any]]] = []

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        given = self.batches[self.state.global_step]
        return {**output, **{name: value for name, value in given.items() if name in (*output, "num_items_in_batch")}}


@pytest.mark.not_fast
@pytest.mark.parametrize("loss", ["dr_grpo", "dapo"])
def test_a_resampled_batch_is_trained_on_as_stock_would(loss: str, tiny_folder: Path, tmp_path: Path) -> None:
    """The same rows through stock's own update: live groups of several rounds, padded to other widths, one token count
    of them all. Their advantages are written out here: reward minus the group's mean, over std + 1e-4 in dapo."""
    found: list[dict[str, Any]] = []

    class Recording(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            found.append({name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in output.items()})
            return output

    settings = arguments(
        tmp_path, max_steps=3, learning_rate=0.1, scale_rewards="none" if loss == "dr_grpo" else "group"
    )
    args = LabConfig(**settings, objective=loss, update={"dead_groups": "resample", "max_rounds": 20})
    ours = train(Recording, args, tiny_folder, reward=distinct_or_dead)
    assert sum(column(ours, "update/resampled_share")) > 0
    for batch in found:
        values = torch.tensor(
            [(sum(i for i, m in zip(ids, mask) if m) % 97) / 97 for ids, mask in
             zip(batch["completion_ids"].tolist(), batch["completion_mask"].tolist(), strict=True)]
        ).view(-1, 4) + torch.arange(12).view(-1, 4) % 4 * 1e-3  # fmt: skip
        expected = values - values.mean(1, keepdim=True)
        if loss == "dapo":
            expected = expected / (values.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(batch["advantages"].view(-1, 4), expected, rtol=1e-4, atol=1e-5)
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
    OnThoseRows.batches = found
    stock = train(OnThoseRows, GRPOConfig(**settings, loss_type=loss), tiny_folder, reward=distinct_or_dead)
    size = sum(value.double().square().sum().item() for value in stock.weights.values()) ** 0.5
    moved = sum((stock.weights[n].double() - v.double()).square().sum().item() for n, v in stock.start.items()) ** 0.5
    assert movement_difference(ours, stock) <= movement_gap(torch.float32, size, moved, steps=3)


@pytest.mark.not_fast
@pytest.mark.parametrize("rule", ["opo", "gdpo", "optimal_token_baseline"])
def test_rules_of_every_level_find_dead_groups(rule: str, tiny_folder: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    config = LabConfig(
        **args, objective={"name": "dr_grpo", "advantage": rule}, update={"dead_groups": "resample", "max_rounds": 20}
    )
    run = train(LabTrainer, config, tiny_folder, reward=distinct_or_dead)
    assert column(run, "update/live_share") == [1.0] * 2
    assert sum(column(run, "update/resampled_share")) > 0


@pytest.mark.not_fast
def test_rounds_are_bounded(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(LabTrainer, resampling(tmp_path, max_rounds=3), tiny_folder, reward=mixed_reward(dead_every=1))
    assert (
        column(run, "update/resample_rounds") == [3.0] * 3
    )  # every group is dead: three rounds, then on with dead groups
    assert column(run, "update/live_share") == [0.0] * 3
    assert run.losses == [0.0] * 3


@pytest.mark.not_fast
def test_what_is_one_number_a_generation_batch_counts_once_however_many_rounds(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """One window of two batches. The first is dead throughout: 4 rounds, nothing solved; the second lives.

    Weights 0.2 and 0.8: (0.2 + 0.8) / 2, not (4 · 0.2 + 0.8) / 5. Shares are the sampler's at the end of each batch's
    rounds.
    """
    shares: list[tuple[float, float]] = []

    def judge_reward(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
        late = trainer_state.global_step > 0
        return [float(late and place % 4 < 1 + place // 4) for place in range(len(completion_ids))]

    class Watched(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            output = super()._generate_and_score_completions(inputs)
            prompts = self.parts.prompts.sampler
            at_floor = (prompts.weights <= prompts.floor).double().mean().item()
            shares.append(((prompts.trials > 0).double().mean().item(), at_floor))
            return output

    judge_reward.measures_correctness = True
    settings = arguments(tmp_path, max_steps=2, logging_steps=2)
    schedule = {"judge_reward": {"kind": "piecewise", "points": [[0, 0.2], [1, 0.8]]}}
    update, sampler = {"dead_groups": "resample", "max_rounds": 4}, {"name": "prioritized", "floor": 0.6}
    args = LabConfig(**settings, objective="dr_grpo", update=update, reward_schedules=schedule, sampler=sampler)
    run = train(Watched, args, tiny_folder, reward=judge_reward)
    assert column(run, "update/resample_rounds") == [2.5], "four rounds and one"
    assert column(run, "reward_weights/judge_reward") == [pytest.approx(0.5)]
    seen, at_floor = (sum(values) / 2 for values in zip(*shares, strict=True))
    assert column(run, "sampler/seen_share") == [pytest.approx(seen)]
    assert column(run, "sampler/at_floor_share") == [pytest.approx(at_floor)]
    assert at_floor > 0


@pytest.mark.not_fast
def test_nothing_is_drawn_when_all_groups_live(tiny_folder: Path, tmp_path: Path) -> None:
    ours = train(LabTrainer, resampling(tmp_path), tiny_folder, reward=mixed_reward(dead_every=0))
    plain = train(
        LabTrainer,
        LabConfig(**arguments(tmp_path, max_steps=3), objective="dr_grpo"),
        tiny_folder,
        reward=mixed_reward(0),
    )
    assert column(ours, "update/resample_rounds") == [1.0] * 3
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.not_fast
def test_equal_rewards_are_dead_also_where_rounding_makes_advantages_of_them(tiny_folder: Path, tmp_path: Path) -> None:
    """The float32 mean of six rewards of 0.6 is another number, and TRL divides the difference by a std as small."""
    assert torch.full((6,), 0.6).nanmean() != torch.tensor(0.6)
    rounds = []
    for dead in (0.5, 0.6):

        def rewards(completion_ids: list[list[int]], number: list[int], dead: float = dead, **_: Any) -> list[float]:
            live = distinct_or_dead(completion_ids, number)
            return [dead if n % 3 == 0 else value for n, value in zip(number, live, strict=True)]

        changes = {"max_steps": 3, "num_generations": 6}
        args = LabConfig(**arguments(tmp_path, **changes), update={"dead_groups": "resample", "max_rounds": 20})
        rounds.append(column(train(LabTrainer, args, tiny_folder, reward=rewards), "update/resample_rounds"))
    assert rounds[0] == rounds[1]
    assert max(rounds[0]) > 1


@pytest.mark.not_fast
def test_a_kl_penalty_in_the_reward_brings_no_dead_group_to_life(tiny_folder: Path, tmp_path: Path) -> None:
    """Eight steps at a large rate: the policy leaves the reference, so that penalties differ within every group."""
    args = LabConfig(
        **arguments(tmp_path, max_steps=3),
        objective="reinforce",
        kl={"estimator": "k1", "placement": "reward", "coefficient": 0.1},
        update={"dead_groups": "resample", "max_rounds": 20},
    )
    run = train(LabTrainer, args, tiny_folder, reward=distinct_or_dead)
    assert sum(column(run, "update/resampled_share")) > 0
    assert max(column(run, "update/resample_rounds")[1:]) > 1, "from the second step on the penalties differ"


def test_kl_in_the_reward_needs_an_advantage_rule(tiny_folder: Path, tmp_path: Path) -> None:
    args = LabConfig(**arguments(tmp_path), kl={"estimator": "k1", "placement": "reward", "coefficient": 0.1})
    with pytest.raises(ValueError, match=r"kl\.placement.*advantage"):
        train(LabTrainer, args, tiny_folder)


def test_streams_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(problems()))
    with pytest.raises(ValueError, match=r"update\.dead_groups: resample.*IterableDataset"):
        train(LabTrainer, resampling(tmp_path), tiny_folder, train_dataset=stream)


@pytest.mark.not_fast
def test_generation_batches_of_one_step_draw_other_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    """With ``steps_per_generation`` below ``gradient_accumulation_steps`` a step holds several; each needs prompts of
    its own."""
    drawn: list[tuple[int, list[int]]] = []

    class Team(LabTrainer):
        def _generate_and_score(self, inputs: Any) -> dict[str, Any]:
            drawn.append((self.state.global_step, [row["number"] for row in inputs]))
            return super()._generate_and_score(inputs)

    settings = arguments(tmp_path, max_steps=1, steps_per_generation=1, gradient_accumulation_steps=2)
    args = LabConfig(**settings, objective="dr_grpo", update={"dead_groups": "resample", "max_rounds": 9})
    train(Team, args, tiny_folder, reward=mixed_reward(dead_every=1), train_dataset=problems(40))
    first, second = drawn[1:9], drawn[10:]
    assert [step for step, _ in drawn] == [0] * 18
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 2  # one of 40 by chance


@pytest.mark.not_fast
@pytest.mark.parametrize("name", ["exact", "off"])
def test_learned_positions_are_those_at_generation(name: str, tmp_path: Path) -> None:
    """Rounds are padded to other widths; with learned positions a row's log-probs depend on its place, in bins and in
    stock's batches."""
    gaps: list[float] = []

    class Team(LabTrainer):
        def token_loss(self, batch: Any) -> Any:
            if hasattr(self, "parts") and self.state.global_step == 0 and batch.logps.dtype == torch.float32:
                gaps.append(batch.log_ratio[batch.mask].abs().max().item())
            return super().token_loss(batch)

    _, tokenizer = tiny_model("qwen2")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**sizes, **still, **ends, initializer_range=0.2)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    settings = arguments(tmp_path, max_steps=2, num_iterations=2, num_generations=4, gradient_accumulation_steps=2)
    update = {"name": name, "dead_groups": "resample", "max_rounds": 20}
    args = LabConfig(**settings, objective="dr_grpo", update=update)
    run = train(Team, args, tmp_path / "gpt2", reward=distinct_or_dead)
    assert max(column(run, "update/resampled_share")) > 0
    assert gaps
    assert max(gaps) == 0.0, "the first update's policy is the one that made the completions"


def test_padding_of_importance_ratios_is_one() -> None:
    """``loss_type="vespo"`` sums log ratios over padding, too: TRL has exp(0) there."""

    def batch(width: int) -> dict[str, torch.Tensor]:
        ones = torch.ones(1, width, dtype=torch.long)
        prompt = torch.ones(1, 2, dtype=torch.long)
        ids = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": ones, "completion_mask": ones}
        return {**ids, "importance_sampling_ratio": torch.full((1, width), 0.5)}

    ratios = RowTable.of([batch(1), batch(3)]).fields["importance_sampling_ratio"]
    assert ratios.tolist() == [[0.5, 1.0, 1.0], [0.5, 0.5, 0.5]]
