"""What ``generation_buffer`` relies on inside TRL 1.16 and the Trainer below it, pinned (see ``test_trl_bridge``)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import Trainer, TrainerCallback
from trl import DistillationTrainer, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from contract.test_trl_bridge import batch, build
from grpo_lab.trainer.trl_bridge import METHODS

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2}


@pytest.fixture(scope="module")
def stock(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build(tmp_path_factory.mktemp("stock"), tiny_folder, **SETTINGS, beta=0.04)


@pytest.mark.not_fast
def test_a_batch_is_generated_every_e_micro_batches_and_one_is_taken_by_step(stock: Any) -> None:
    """E = steps_per_generation · num_iterations; a buffer that is there is not made anew inside of E."""
    made = []
    original = stock._generate_and_score_completions
    stock._generate_and_score_completions = lambda rows: made.append(stock._step) or original(rows)
    try:
        stock._step, stock._buffered_inputs = 0, None
        for step in range(17):
            taken = stock._prepare_inputs(batch(stock))
            assert stock._step == step  # training_step counts, not this method
            assert taken is stock._buffered_inputs[step % 4]
            stock._step += 1
    finally:
        del stock._generate_and_score_completions
        stock._step, stock._buffered_inputs = 0, None
    assert made == [0, 8, 16]
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)


def test_a_buffer_is_a_list_of_dicts_that_share_one_token_count(stock: Any) -> None:
    stock._step, stock._buffered_inputs = 0, None
    stock._prepare_inputs(batch(stock))
    buffer, stock._buffered_inputs = stock._buffered_inputs, None
    assert len(buffer) == 4
    assert len({id(rows["num_items_in_batch"]) for rows in buffer}) == 1
    assert all(value is None or type(value) is Tensor for rows in buffer for value in rows.values())
    assert {"old_per_token_logps", "ref_per_token_logps", "advantages"} <= set(buffer[0])


def test_an_epoch_holds_whole_generation_batches(stock: Any) -> None:
    """The dataloader gives each generation batch E times and an epoch ends with one: ``_step`` mod E is HF's batches
    mod E."""
    batches = [tuple(row["number"] for row in rows) for rows in stock.get_train_dataloader()]
    assert len(batches) % 8 == 0
    starts = range(0, len(batches), 8)
    assert all(len(set(batches[start : start + 8])) == 1 for start in starts)
    assert len({batches[start] for start in starts}) == len(batches) // 8


class Seen(TrainerCallback):
    """Whether the trainer holds its running loss when a training begins, and what it is when a checkpoint is
    written."""

    trainer: Any = None

    def __init__(self) -> None:
        self.at: dict[str, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.at["begin"] = (self.trainer._tr_loss.item(), self.trainer._globalstep_last_logged)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.at[f"save {state.global_step}"] = (self.trainer._tr_loss.item(), self.trainer._globalstep_last_logged)


@pytest.mark.not_fast
def test_the_running_loss_is_there_when_training_begins_and_logged_before_a_save(
    tiny_folder: Path, tmp_path: Path
) -> None:
    seen = Seen()
    trainer = build(
        tmp_path, tiny_folder, **SETTINGS, max_steps=3, logging_steps=2, save_strategy="steps", save_steps=1
    )
    seen.trainer = trainer
    trainer.add_callback(seen)
    trainer.train()
    assert seen.at["begin"] == (0.0, 0)
    assert seen.at["save 1"][1] == 0
    assert seen.at["save 2"] == (0.0, 2)
    assert next(iter(trainer.state.log_history[0])) == "loss"


def test_a_resume_loads_before_training_begins_and_random_numbers_after_the_first_batches() -> None:
    prepare = inspect.getsource(Trainer._prepare_for_training)
    assert "self._load_optimizer_and_scheduler(resume_from_checkpoint)" in prepare
    loop = inspect.getsource(Trainer._inner_training_loop)
    order = [
        "_init_training_state(",
        "_prepare_for_training(",
        "self._tr_loss =",
        "on_train_begin(",
        "self._run_epoch(",
    ]
    assert [loop.index(words) for words in order] == sorted(loop.index(words) for words in order)
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.index("self.get_batch_samples(") < epoch.rindex("self._load_rng_state(")


def test_the_loop_begins_where_the_state_says_and_ends_in_one_place() -> None:
    """``resume.going_on``: no epoch is run where none is left; TRL's sampler has one permutation an epoch, and no
    memory of its epoch."""
    loop = inspect.getsource(Trainer._inner_training_loop)
    assert "epochs_trained, steps_trained_in_current_epoch = self._init_training_state(" in loop
    assert "for epoch in range(epochs_trained, num_train_epochs):" in loop
    assert "return self._finalize_training(trial, num_train_samples, start_time)" in loop
    assert "self._total_loss_scalar += self._tr_loss.item()" in inspect.getsource(Trainer._finalize_training)
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.index("self._load_rng_state(") < epoch.index("epoch_iterator = iter(")
    order = inspect.getsource(RepeatSampler.__iter__)
    assert "torch.randperm(self.num_samples, generator=self.generator)" in order
    assert not hasattr(RepeatSampler, "set_epoch")


def test_trl_itself_does_not_save_the_batch() -> None:
    """When it does, ``generation_buffer`` can go."""
    for method in ("_save_checkpoint", "_load_optimizer_and_scheduler"):
        source = inspect.getsource(getattr(GRPOTrainer, method))
        assert "_buffered_inputs" not in source
        assert "_step" not in source.replace("global_step", "")


def test_a_distillation_is_ordered_like_grpo_and_writes_one_batch_an_optimizer_step() -> None:
    """``EpochOrderMixin`` stands before both; ``TokenBudget`` reads the mean length of a step's completions."""
    for name in ("_get_train_sampler", "_init_training_state"):
        known = tuple(inspect.signature(getattr(DistillationTrainer, name)).parameters)
        assert known == METHODS[name]
    assert "return RepeatSampler(" in inspect.getsource(DistillationTrainer._get_train_sampler)
    assert "generate_every = self.args.gradient_accumulation_steps" in inspect.getsource(
        DistillationTrainer._prepare_inputs
    )
    assert 'self._metrics[mode]["completions/mean_length"].append(' in inspect.getsource(DistillationTrainer._generate)
