"""The court: a sampler that holds old weights, conditions of a lab, and the report by hand."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.data import word_problems
from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.labs.arms import Arms
from grpo_lab.labs.court import collapsed, comparisons, excludes_zero, report, table, verdicts, whole_seeds
from grpo_lab.labs.lab_file import LabFile
from grpo_lab.labs.old_weights import OldWeights, OldWeightsTrainer, RatioToSampler
from grpo_lab.settings import read
from grpo_lab.testing import tiny_model

STEPS = 3


def spread_of_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [(sum(ids) % 17) / 17 for ids in completion_ids]


class Seen(RatioToSampler):
    """Keeps the policy's weights before each generation batch, and what each batch carries."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        batch = super()._generate_and_score_completions(inputs)
        self.seen = [*getattr(self, "seen", []), (weights, batch)]
        return batch


def trained(
    folder: Path,
    kind: type[LabTrainer] = LabTrainer,
    sampler: OldWeights | None = None,
    begin: Path | None = None,
    **more: Any,
) -> Any:
    model, tokenizer = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)
    how: Any = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    how |= {"max_steps": STEPS, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    how |= {"learning_rate": 0.05, "lr_scheduler_type": "constant", "gradient_checkpointing": False, "seed": 5, **more}
    trainer = kind(
        model=model,
        reward_funcs=spread_of_ids,
        args=LabConfig(str(folder), objective="grpo", logging_steps=1, **how),
        train_dataset=word_problems(n=16, seed=0),
        processing_class=tokenizer,
        callbacks=None if sampler is None else [sampler],
    )
    trainer.train(resume_from_checkpoint=None if begin is None else str(begin))
    return trainer


def flat(trainer: Any) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


@pytest.mark.slow
def test_the_policys_own_weights_are_an_ordinary_run_to_the_bit(tmp_path: Path) -> None:
    ordinary = flat(trained(tmp_path / "a"))
    for kind in (OldWeightsTrainer, RatioToSampler):
        assert torch.equal(flat(trained(tmp_path / "b", kind, OldWeights())), ordinary)
    assert not torch.equal(flat(trained(tmp_path / "c", RatioToSampler, OldWeights(batches=1))), ordinary)


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "rounded"), [(1, False), (2, False), (0, True), (1, True)])
def test_the_batch_carries_the_log_probs_of_the_weights_that_are_held(
    batches: int, rounded: bool, tmp_path: Path
) -> None:
    """Batch n is of the policy before batch n − k, the first k of the start; and of nobody else's weights."""
    trainer = trained(tmp_path, Seen, OldWeights(batches, rounded))
    model = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)[0].eval()
    for n, (_, batch) in enumerate(trainer.seen):
        prompts, completions = (
            [ids[mask.bool()].tolist() for ids, mask in zip(batch[f"{of}_ids"], batch[f"{of}_mask"], strict=True)]
            for of in ("prompt", "completion")
        )

        def log_probs(
            at: int, completions: list[list[int]] = completions, prompts: list[list[int]] = prompts
        ) -> list[Tensor]:
            weights = trainer.seen[at][0]
            held = {name: weight.bfloat16().float() if rounded else weight for name, weight in weights.items()}
            model.load_state_dict(held, strict=False)
            head = model.lm_head.register_forward_hook(
                lambda _m, _i, logits: logits.bfloat16().float() if rounded else logits
            )
            with torch.no_grad():
                found = forward_logprobs(model, prompts, completions)
            head.remove()
            return [torch.tensor(row) for row in found]

        held = max(0, n - batches)
        reported = [row[: len(ids)] for row, ids in zip(batch["sampling_per_token_logps"], completions, strict=True)]
        for row, expected in zip(reported, log_probs(held), strict=True):
            assert row == pytest.approx(expected, abs=1e-5)
        if n != held:
            assert any((row - other).abs().max() > 1e-3 for row, other in zip(reported, log_probs(n), strict=True))
        assert torch.equal(batch["old_per_token_logps"], batch["sampling_per_token_logps"])


@pytest.mark.slow
def test_a_resumed_run_samples_from_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    saves: Any = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = trained(tmp_path / "a", RatioToSampler, OldWeights(batches=2), **saves)
    place = tmp_path / "a" / "checkpoint-2"
    resumed = trained(tmp_path / "b", RatioToSampler, OldWeights(batches=2), begin=place, **saves)
    assert torch.equal(flat(resumed), flat(whole))


@pytest.mark.slow
def test_a_run_stops_at_its_tokens(tmp_path: Path) -> None:
    trainer = trained(tmp_path, OldWeightsTrainer, OldWeights(tokens=1))
    assert trainer.state.global_step == 1


def test_arms_are_run_in_every_condition() -> None:
    said = {"about": "x", "recipe": "quickstart/dr_grpo.yaml", "arms": {"a": {"seed": 1, "max_steps": 3}, "b": {}}}
    lab = Arms(read(LabFile, {**said, "conditions": {"1 old": {"max_steps": 4}, "2 old": {}}}), Path("nowhere"))
    options = Namespace(recipe=None, start=None, set=[], folder=Path("nowhere"))
    steps = {arm: lab.changes(arm, 7, options).get("max_steps") for arm in lab.experiment().arms}
    assert steps == {"a, 1 old": 4, "a, 2 old": 3, "b, 1 old": 4, "b, 2 old": None}
    with pytest.raises(ValueError, match="`pairs` has 'a'"):
        read(LabFile, {**said, "conditions": {"x": {}}, "pairs": [["a", "b"]]})
    assert lab.said.once(lab.said.cells) == ["a, 1 old", "a, 2 old", "b, 1 old"]


def run(seed: int, one: float, fallen: float = 0.0) -> dict[str, Any]:
    return {"seed": seed, "after": {"pass@1": one, "pass@16": 0.5, "collapsed": fallen}}


FOUND = {
    "grpo, 0 old": [run(0, 0.50), run(1, 0.52)],
    "grpo, 4 old": [run(0, 0.40), run(1, 0.44)],
    "mine, 0 old": [run(0, 0.51), run(1, 0.53)],
    "mine, 4 old": [run(0, 0.10, 1.0), run(2, 0.20)],
}


def test_the_report_by_hand(tmp_path: Path) -> None:
    """Two seeds: t = 12.706, half width 12.706 · |a − b| / 2. Grpo falls by 10 and 8 points, −9 ± 12.7."""
    conditions = ["0 old", "4 old"]
    assert table(FOUND, ["grpo", "mine"], conditions).splitlines()[2:] == [
        "| grpo | 2 | 0.510 ± 0.127; 0.50; 0 | 0.420 ± 0.254; 0.50; 0 |",
        "| mine | 2 | 0.520 ± 0.127; 0.50; 0 | 0.150 ± 0.635; 0.50; 1 |",
    ]
    planned = comparisons(FOUND, ["grpo", "mine"], conditions)
    assert planned["4 old − 0 old"] == {"grpo": pytest.approx([-10, -8]), "mine": pytest.approx([-41])}
    assert planned["− grpo, 0 old"] == {"mine": pytest.approx([1, 1])}
    assert planned["− grpo, 4 old"] == {"mine": pytest.approx([-30])}  # of the seed that both have
    lines = verdicts({arm: FOUND[arm] for arm in list(FOUND)[:2]}, ["grpo"], conditions).splitlines()
    assert lines[4] == "| grpo | -9.0 ± 12.7 | – | – | – |"
    assert lines[6] == "- 4 old − 0 old: none told from 0, of 1."
    assert lines[-2:] == ["- 0 of 1 intervals exclude 0; by chance 0.1 would.", "- Collapsed: none."]
    assert [len(runs) for runs in whole_seeds(FOUND).values()] == [1, 1, 1, 1]
    assert [excludes_zero(one) for one in ([1.0, 1.1], [1.0], [1.0, 2.0])] == [True, False, False]
    pytest.importorskip("matplotlib")
    assert "| mine | 2 |" in report(FOUND, Namespace(folder=tmp_path))
    assert (tmp_path / "curves.png").is_file()
    assert (tmp_path / "table.md").read_text().startswith("| loss | seeds | 0 old: pass@1")


@pytest.mark.parametrize(
    ("rewards", "fallen"),
    [([0.2, 0.5, 0.6, 0.3], 0), ([0.2, 0.5, 0.6, 0.2], 1), ([0.2, 0.5, float("nan"), 0.6], 1), ([], 1)],
)
def test_a_cell_collapsed_if_it_ends_below_half_of_its_best(rewards: list[float], fallen: int) -> None:
    assert collapsed(None, [{"rewards/accuracy_reward/mean": reward} for reward in rewards]) == fallen
