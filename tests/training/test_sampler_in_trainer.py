"""``sampler`` in a real training: TRL's shape, the formula's distribution, exact resume, the floor, and clear refusals.

The reward is right for the first ``number % 5`` completions of a group of four, so problem i has a success rate of
min(i % 5, 4) / 4 whoever sees it, and every draw after the first depends on what was seen before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.curation import PrioritizedSampler
from grpo_lab.curation.samplers import inclusion_probabilities
from grpo_lab.trainer.generation.prompt_order import outcomes
from grpo_lab.trainer.resume.state import read_state
from parity.harness import arguments, problems, train, with_entry

GROUP = 4

pytestmark = pytest.mark.slow


class Judge:
    """The reward of the module docstring; keeps the prompts of every generation batch in order."""

    measures_correctness = True
    __name__ = "judge"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, prompts: list[str], number: list[int], **_: Any) -> list[float]:
        self.batches.append(number[::GROUP])
        return [float(place % GROUP < n % 5) for place, n in enumerate(number)]


def run(folder: Path, model: Path, sampler: Any, resume: str | None = None, rows: int = 12, **changes: Any) -> Any:
    judge = Judge()
    args = LabConfig(**arguments(folder, **{"learning_rate": 0.01, **changes}), sampler=sampler)
    data = problems(rows).add_column("pass_rate", [(n % 5) / 4 for n in range(rows)])
    data = data.add_column("mistaken", [1 - (n % 5) / 4 for n in range(rows)])
    trainer: Any = None

    def keep(built: Any) -> None:
        nonlocal trainer
        trainer = built
        if resume is not None:
            start = built.train
            built.train = lambda: start(resume_from_checkpoint=resume)

    train(LabTrainer, args, model, reward=judge, train_dataset=data, prepare=keep)
    return judge.batches, trainer


def test_prioritized_serves_groups_and_follows_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    batches, trainer = run(tmp_path, tiny_folder, "prioritized", max_steps=8)
    sampler = trainer.parts.prompts.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert all(len(set(batch)) == 3 for batch in batches)
    assert len(batches) == 8
    seen = {number for batch in batches for number in batch}
    for number in seen:  # s_i by hand: successes / trials, the decay cancels as every visit shows the same rate
        assert sampler.success_rates[number].item() == pytest.approx(min(number % 5, 4) / 4)
    for number in set(range(12)) - seen:
        assert sampler.success_rates[number] == 0
        assert sampler.trials[number] == 0
    expected = [max(1 - s, 0.05) for s in sampler.success_rates.tolist()]
    assert sampler.weights.tolist() == pytest.approx(expected)
    shares = [row["sampler/seen_share"] for row in trainer.state.log_history if "sampler/seen_share" in row]
    assert shares[-1] == pytest.approx(len(seen) / 12)
    floors = [row["sampler/at_floor_share"] for row in trainer.state.log_history if "sampler/at_floor_share" in row]
    assert floors[-1] == pytest.approx(sum(1 - s <= 0.05 for s in sampler.success_rates.tolist()) / 12)


@pytest.mark.thorough
@pytest.mark.slow
def test_draws_follow_the_formula_in_a_long_run(tiny_folder: Path, tmp_path: Path) -> None:
    """Once every s_i is known, problem i is in a round with probability min(1, k·w_i): counts against that mean."""
    batches, trainer = run(
        tmp_path, tiny_folder, {"name": "prioritized", "floor": 0.1}, rows=24, max_steps=150, learning_rate=0.0
    )
    sampler = trainer.parts.prompts.sampler
    assert set(range(24)) == {number for batch in batches for number in batch}  # nobody starves
    known = next(i for i in range(150) if len({n for batch in batches[:i] for n in batch}) == 24) + 2
    counts = Counter(number for batch in batches[known:] for number in batch)
    chance = inclusion_probabilities(sampler.weights, 3)
    trials = len(batches) - known
    assert trials > 60
    for number in range(24):
        mean = trials * chance[number].item()
        spread = (trials * chance[number].item() * (1 - chance[number].item())) ** 0.5
        assert abs(counts[number] - mean) < 4.5 * spread + 1, (number, counts[number], mean)
    easy = sum(counts[n] for n in range(24) if n % 5 == 4)
    hard = sum(counts[n] for n in range(24) if n % 5 == 0)
    assert 0 < easy < 0.35 * hard  # 4 easy problems of weight 0.1, 5 hard ones of weight 1: 0.08 expected


@pytest.mark.thorough(but="prioritized")
@pytest.mark.parametrize(
    ("sampler", "changes"),
    [
        ({"name": "prioritized", "decay": 0.5}, {}),
        ({"name": "prioritized", "pass_rate_column": "mistaken"}, {"num_iterations": 2}),
        ("curriculum", {}),
        (
            {"name": "uniform_then_hard", "uniform_rounds": 3},
            {"per_device_train_batch_size": 12, "steps_per_generation": 1, "gradient_accumulation_steps": 1},
        ),
    ],
    ids=["prioritized", "prioritized-two-iterations", "curriculum", "uniform-then-hard"],
)
@pytest.mark.slow
def test_the_order_after_a_resume_is_that_of_the_whole_run(
    tiny_folder: Path, tmp_path: Path, sampler: Any, changes: dict[str, Any]
) -> None:
    """12 problems, 3 a batch: an epoch is four batches, so checkpoint 4 (8) lies on an epoch's end."""
    iterations = changes.get("num_iterations", 1)
    options = {**changes, "max_steps": 10 * iterations, "save_strategy": "steps", "save_steps": 1}
    whole, _ = run(tmp_path / "whole", tiny_folder, sampler, **options)
    for steps in (3, 4, 6):
        place = str(tmp_path / "whole" / f"checkpoint-{steps * iterations}")
        again, trainer = run(tmp_path / f"again{steps}", tiny_folder, sampler, resume=place, **options)
        assert again == whole[steps:], steps
        assert trainer.state.global_step == 10 * iterations


def test_prompts_drawn_past_the_sampler_count_too(tiny_folder: Path, tmp_path: Path) -> None:
    batches, trainer = run(tmp_path, tiny_folder, "prioritized", max_steps=3, update={"dead_groups": "resample"})
    assert len(batches) > 3  # further rounds of `update.dead_groups: resample`
    tried = torch.nonzero(trainer.parts.prompts.sampler.trials).flatten().tolist()
    assert set(tried) == {number for batch in batches for number in batch}


def test_curriculum_goes_from_easy_to_hard(tiny_folder: Path, tmp_path: Path) -> None:
    batches, _ = run(tmp_path, tiny_folder, "curriculum", max_steps=4)
    rates = [(number % 5) / 4 for batch in batches for number in batch]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) == 12


def test_a_floor_lets_easy_problems_come_back_after_the_switch(tiny_folder: Path, tmp_path: Path) -> None:
    def easy(floor: float) -> int:
        setting = {"name": "uniform_then_hard", "uniform_rounds": 0, "hard_below": 0.6, "floor": floor}
        batches, _ = run(tmp_path / str(floor), tiny_folder, setting, max_steps=12)
        return sum((number % 5) / 4 >= 0.6 for batch in batches for number in batch)

    assert easy(0.0) == 0
    assert easy(0.3) > 0  # 36 draws; 4 of 12 problems have 0.3 of the chance: 4.7 expected, none with chance < 1e-2


def test_a_resume_without_the_samplers_state_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run(tmp_path / "run", tiny_folder, "prioritized", **options)
    place = tmp_path / "run" / "checkpoint-1"
    state = read_state(place).entries["sampler"]
    with_entry(place, "sampler", {**state, "shape": {**state["shape"], "seed": 99}})
    with pytest.raises(ValueError, match="resume with the same data, batch settings and seed"):
        run(tmp_path / "run", tiny_folder, "prioritized", resume=str(place), **options)
    with_entry(place, "sampler")
    with pytest.raises(ValueError, match=r"written without `sampler` \(no entry in its grpo_lab_state\.json\)"):
        run(tmp_path / "run", tiny_folder, "prioritized", resume=str(place), **options)


def no_judge(prompts: list[str], **_: Any) -> list[float]:
    return [0.0] * len(prompts)


@pytest.mark.parametrize(
    ("setting", "changes", "message"),
    [
        (
            "curriculum",
            {},
            r"`sampler.pass_rate_column` is 'pass_rate', which `train_dataset` lacks; it has \['prompt'",
        ),
        ({"name": "curriculum", "pass_rate_column": "number"}, {"reward": Judge()}, r"`sampler`: a pass rate is"),
        ("prioritized", {"reward": no_judge}, "needs a reward that measures correctness"),
        (
            "prioritized",
            {"reward": Judge(), "train_dataset": IterableDataset.from_generator(lambda: iter(problems()))},
            "draws rows by number.*IterableDataset",
        ),
        ({"name": "prioritized", "floor": 0.0}, {"reward": Judge()}, "`sampler`: floor=0.0 is not in"),
    ],
)
def test_what_cannot_work_is_refused(
    tiny_folder: Path, tmp_path: Path, setting: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(LabTrainer, LabConfig(**arguments(tmp_path), sampler=setting), tiny_folder, **changes)


@pytest.mark.parametrize("beside", [{"shuffle_dataset": False}, {"ignore_data_skip": True}])
def test_settings_that_contradict_a_sampler_are_refused(tmp_path: Path, beside: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"`{next(iter(beside))}`=(True|False).*`sampler`"):
        LabConfig(**arguments(tmp_path), sampler="prioritized", **beside)


def test_outcomes_count_by_row_and_leave_out_what_is_unknown() -> None:
    rows = torch.tensor([7, 7, 2, 2, 7, -1])
    correct = torch.tensor([1.0, 0.0, 0.5, float("nan"), 1.0, 1.0])
    # row 2: one scorable, 0.5 is not right; row 7: two of three; the row −1 is nobody's
    assert outcomes(rows, correct) == [(2, 0, 1), (7, 2, 3)]


def test_a_second_trainer_may_take_the_data_of_the_first(tiny_folder: Path, tmp_path: Path) -> None:
    _, trainer = run(tmp_path / "a", tiny_folder, "prioritized", max_steps=1)
    data: Dataset = trainer.train_dataset
    train(
        LabTrainer,
        LabConfig(**arguments(tmp_path / "b", max_steps=1), sampler="prioritized"),
        tiny_folder,
        reward=Judge(),
        train_dataset=data,
    )
