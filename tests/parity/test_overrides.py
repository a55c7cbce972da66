"""A team's method around the loss, the log-probs or the backward, and holes that one makes in the masks: trained as
stock TRL trains them.

Each case is written once and put on stock and on ours, drop-in and with ``objective``. What stands around TRL's
micro-batches gets TRL's micro-batches; a hole costs no bin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import DrGRPOTrainer, LabConfig, LabTrainer
from parity.harness import Run, arguments, assert_same_movement, problems, train

SETTINGS = {"max_steps": 2, "gradient_accumulation_steps": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "drop-in": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "objective": {"objective": "dr_grpo"},
}


def scaled(base: Any) -> Any:
    class Scaled(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * 0.5

    return Scaled


def clamped(base: Any) -> Any:
    class Clamped(base):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs).clamp(min=0.02)

    return Clamped


def mixed_in(base: Any) -> Any:
    class Half:
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * 0.5  # type: ignore[misc]

    return type("MixedIn", (Half, base), {})


def behind(base: Any) -> Any:
    """Their trainer stands behind ours among the bases."""
    theirs = scaled(GRPOTrainer)
    return theirs if base is GRPOTrainer else type("Behind", (base, theirs), {})


def step_behind(base: Any) -> Any:
    theirs = half_step(GRPOTrainer)
    return theirs if base is GRPOTrainer else type("StepBehind", (base, theirs), {})


def own_loss(base: Any) -> Any:
    class OwnLoss(base):  # type: ignore[misc]
        def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super()._compute_loss(*args, **kwargs) * 0.5

    return OwnLoss


def cooled(base: Any) -> Any:
    class Cooled(base):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logps, *more = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * 0.5, *more

    return Cooled


def own_step(base: Any, factor: float = 1.0) -> Any:
    """As HF writes it, without TRL's ``_step += 1``: every micro-batch is of a generation of its own."""

    class OwnStep(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            self.accelerator.backward(loss * factor)
            return loss.detach()

    return OwnStep


def half_step(base: Any) -> Any:
    return own_step(base, 0.5)


def on_the_object(method: str) -> Callable[[Any], None]:
    def prepare(trainer: Any) -> None:
        original = getattr(trainer, method)

        @functools.wraps(original)
        def half(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) * 0.5

        setattr(trainer, method, functools.partial(half) if method == "compute_loss" else half)

    return prepare


def holed(base: Any, field: str = "completion_mask", places: slice = slice(2)) -> Any:
    class Holed(base):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            batch[field][:, places] = 0
            return batch

    return Holed


def routes(kind: Any, settings: dict[str, Any], folder: Path, tiny: Path, **options: Any) -> Iterator[Run]:
    """Ours, drop-in and with ``objective``; each has moved as stock did."""
    kwargs = arguments(folder, **SETTINGS, **settings)
    stock = train(kind(GRPOTrainer), GRPOConfig(**kwargs, **ROUTES["drop-in"]), tiny, **options)
    for route in ROUTES.values():
        ours = train(kind(LabTrainer), LabConfig(**kwargs, **route), tiny, **options)
        assert_same_movement(ours, stock)
        yield ours


@pytest.mark.not_fast(but="own_step-OwnStep.training_step")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (scaled, "Scaled.compute_loss"),
        (clamped, "Clamped.compute_loss"),
        (mixed_in, "Half.compute_loss"),
        (behind, "Scaled.compute_loss"),
        (own_loss, "OwnLoss._compute_loss"),
        (cooled, "Cooled._get_per_token_logps_and_entropies"),
        (own_step, "OwnStep.training_step"),
        (half_step, "OwnStep.training_step"),
        (step_behind, "OwnStep.training_step"),
    ],
)
def test_what_stands_around_trls_micro_batches_gets_them(
    kind: Any, named: str, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ours in routes(kind, {}, tmp_path, tiny_folder):
        assert caplog.text.count(f"micro-batches stay as TRL cut them: `{named}`") == 1
        caplog.clear()
        assert f"={named}" in ours.trainer.algorithm.describe()
        assert [row["update/computed_share"] for row in ours.history if "loss" in row] == [1.0, 1.0]


@pytest.mark.not_fast
@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
def test_a_method_that_is_set_on_the_object(
    method: str, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ours in routes(lambda base: base, {}, tmp_path, tiny_folder, prepare=on_the_object(method)):
        assert caplog.text.count(f"micro-batches stay as TRL cut them: `trainer.{method}`") == 1
        caplog.clear()
        assert f"loss=trainer.{method}" in ours.trainer.algorithm.with_hooks(ours.trainer).describe()


@pytest.mark.not_fast
def test_a_named_trainers_subclass(tiny_folder: Path, tmp_path: Path) -> None:
    kwargs = arguments(tmp_path, **SETTINGS)
    stock = train(scaled(GRPOTrainer), GRPOConfig(**kwargs, **ROUTES["drop-in"]), tiny_folder)
    assert_same_movement(train(scaled(DrGRPOTrainer), LabConfig(**kwargs), tiny_folder), stock)


def test_a_step_around_trls_keeps_the_bins(tiny_folder: Path, tmp_path: Path) -> None:
    class Timed(LabTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    ours = train(Timed, LabConfig(**arguments(tmp_path, max_steps=1), objective="dr_grpo"), tiny_folder)
    assert ours.history[0]["update/computed_share"] < 1


def test_a_loss_that_nobody_would_call_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    theirs = own_loss(GRPOTrainer)
    with pytest.raises(
        ValueError, match=r"`OwnLoss._compute_loss` would never be called: .* `class Ours\(OwnLoss, LabT"
    ):
        train(type("Ours", (LabTrainer, theirs), {}), LabConfig(**arguments(tmp_path)), tiny_folder)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("places", "field", "changes"),
    [
        (slice(2), "completion_mask", {}),
        (slice(1, 3), "completion_mask", {}),
        (slice(2), "completion_mask", {"num_iterations": 2}),
        (slice(1, 3), "completion_mask", {"beta": 0.1, "steps_per_generation": 4}),
        (slice(-3, -1), "prompt_mask", {}),
    ],
)
def test_a_hole_is_no_shorter_row(
    places: slice, field: str, changes: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    for ours in routes(lambda base: holed(base, field, places), changes, tmp_path, tiny_folder):
        assert all(row["update/padding_share"] < 0.5 for row in ours.history if "loss" in row), "not in bins"


@pytest.mark.not_fast
def test_a_hole_that_is_made_on_the_object(tiny_folder: Path, tmp_path: Path) -> None:
    """Old log-probs are of the row without it: they are made at generation there, as for an override."""

    def prepare(trainer: Any) -> None:
        original = trainer._generate_and_score_completions

        def with_hole(inputs: Any) -> Any:
            batch = original(inputs)
            batch["completion_mask"][:, 1:3] = 0
            return batch

        trainer._generate_and_score_completions = with_hole

    changes = {"num_iterations": 2}
    assert len([*routes(lambda base: base, changes, tmp_path, tiny_folder, prepare=prepare)]) == 2


@pytest.mark.not_fast
def test_a_hole_in_a_resampled_batch(tiny_folder: Path, tmp_path: Path) -> None:
    """Rows of several generations keep the positions of their own, in bins and in TRL's batches."""

    class InTrls(holed(LabTrainer, places=slice(1, 3))):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    kwargs = {**arguments(tmp_path, **SETTINGS), "objective": "dr_grpo", "update": {"dead_groups": "resample"}}
    ours, theirs = (
        train(kind, LabConfig(**kwargs), tiny_folder, train_dataset=problems(24)) for kind in (InTrls.__base__, InTrls)
    )
    assert_same_movement(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "moe"])
@pytest.mark.slow
def test_a_hole_in_other_models(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    settings = {"router_aux_loss_coef": 0.0, "learning_rate": 0.3}
    assert len([*routes(lambda base: holed(base, places=slice(1, 3)), settings, tmp_path, models[name])]) == 2
