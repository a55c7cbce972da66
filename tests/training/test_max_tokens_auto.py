"""``update.max_tokens: auto``: a number by the device's memory, and a bin that runs out of it loses nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.resume.state import read_state
from grpo_lab.trainer.step import budget as budgets
from grpo_lab.trainer.step.budget import ForwardBudget
from parity.harness import Run, arguments, mixed_reward, problems, train

#: of a gradient, and what another order of sums makes of it in float32
NEAR = 1e-6
#: what differs between two runs of the same numbers
CLOCKS = ("runtime", "per_second", "step_time", "epoch_time")


class Memory:
    """A device whose bins take so many bytes a token."""

    def __init__(self, room: int, each: int = 10) -> None:
        self.room, self.each, self.largest = room, each, 0

    def taken(self) -> int:
        return 1000

    def forget_peak(self) -> None:
        self.largest = 0

    def peak(self) -> int:
        return 1000 + self.each * self.largest

    def free(self) -> int:
        return self.room

    def give_back(self) -> None:
        pass


def trained(folder: Path, model: Path, prepare: Callable[[Any], None] | None = None, **changes: Any) -> Run:
    lab = {"objective": "dr_grpo", **{key: changes.pop(key) for key in ("objective", "update") if key in changes}}
    lab["update"] = {"share_prompts": "off", **lab.get("update", {})}
    args = LabConfig(**arguments(folder, **{"per_device_train_batch_size": 8, "max_steps": 2, **changes}), **lab)
    gradients: list[torch.Tensor] = []

    def watched(trainer: Any) -> None:
        def keep(*_: Any, **__: Any) -> None:
            parts = [one.grad.flatten() for one in trainer.model.parameters() if one.grad is not None]
            gradients.append(torch.cat(parts))

        trainer.add_callback(type("Keeps", (TrainerCallback,), {"on_pre_optimizer_step": keep}))
        if prepare is not None:
            prepare(trainer)

    found = train(LabTrainer, args, model, prepare=watched)
    found.trainer.gradients = gradients
    return found


def apart(one: Run, other: Run, step: int) -> float:
    """Of their gradients in a step that both begin with the same weights."""
    mine, theirs = (run.trainer.gradients[step].double() for run in (one, other))
    return float((mine - theirs).norm() / theirs.norm())


def beginning_with(tokens: int) -> Callable[[Any], None]:
    """As a run goes on whose checkpoint knows a number."""

    def prepare(trainer: Any) -> None:
        trainer.exact_update.budget._loaded = {"tokens": tokens, "measured": None}

    return prepare


def out_of_memory_in(
    where: str, tokens: int = 100, step: int = 0, times: int = 1, number: int = 3, seen: list[Any] | None = None
) -> Callable[[Any], None]:
    """``torch.OutOfMemoryError`` in the third bin of a step (and the first of a second attempt): in the model's
    forward, or in a backward that has gone through all layers but the lowest."""

    def prepare(trainer: Any) -> None:
        beginning_with(tokens)(trainer)
        count = {"bins": 0, "raised": 0}

        def break_off() -> None:
            count["raised"] += 1
            grown = [one for one in trainer.model.parameters() if one.grad is not None]
            if seen is not None:
                seen.append(len(grown))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        def due() -> bool:
            at = trainer.state.global_step == step and count["raised"] < times
            return at and count["bins"] >= number

        def forward(_module: Any, _args: Any) -> None:
            here = trainer.model.training and trainer.state.global_step == step
            if here and torch.is_grad_enabled() == (where != "look"):
                count["bins"] += 1
                if where != "backward" and due():
                    break_off()

        def backward(gradient: torch.Tensor) -> torch.Tensor:
            if where == "backward" and due():
                break_off()
            return gradient

        trainer.model.register_forward_pre_hook(forward)
        trainer.model.get_input_embeddings().weight.register_hook(backward)

    return prepare


def logged(run: Run) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not any(clock in name for clock in CLOCKS)}
        for row in run.history
    ]


def assert_same(one: Run, other: Run) -> None:
    """To the bit, what is logged included."""
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())
    assert logged(one) == logged(other)


SHAPES: dict[str, dict[str, Any]] = {
    "a step a batch": {},
    "a batch outlives a step": {"steps_per_generation": 6, "gradient_accumulation_steps": 3},
    "two passes": {"num_iterations": 2},
    "prompts once": {"update": {"share_prompts": "on"}},
    "weights of tokens": {"token_weights_every": 1},
}


@pytest.mark.not_fast(but="backward-a step a batch")
@pytest.mark.thorough(but=["*-a step a batch", "backward-prompts once", "backward-weights of tokens"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_the_third_bin(
    where: str, shape: str, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first step: from there on it is the run with half the tokens, to the bit."""
    changes = dict(SHAPES[shape])
    update, seen = changes.pop("update", {}), list[Any]()
    planted = out_of_memory_in(where, seen=seen)
    broken = trained(tmp_path / "o", tiny_folder, planted, update={"max_tokens": "auto", **update}, **changes)
    assert seen == [len(list(broken.trainer.model.parameters()))], "gradients of two bins stood there"
    (line,) = [r.getMessage() for r in caplog.records if "out of memory" in r.getMessage()]
    tokens = broken.trainer.exact_update.budget.tokens
    assert f"planned anew with {tokens}" in line
    assert tokens < 100
    half = trained(tmp_path / "h", tiny_folder, update={"max_tokens": tokens, **update}, **changes)
    assert_same(broken, half)
    asked = {"max_tokens": "auto", **update}
    whole = trained(tmp_path / "w", tiny_folder, beginning_with(100), update=asked, **changes)
    assert 0.0 < apart(broken, whole, 0) < NEAR
    if "token_weights_every" in changes:
        lines = [(tmp_path / run / "token_weights.jsonl").read_text() for run in ("o", "h")]
        assert lines[0] == lines[1]


@pytest.mark.not_fast
def test_out_of_memory_in_the_look(tiny_folder: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"silent_rows": "skip"}
    broken = trained(tmp_path / "o", tiny_folder, out_of_memory_in("look"), update={"max_tokens": "auto", **asked})
    tokens = broken.trainer.exact_update.budget.tokens
    assert tokens < 100
    assert_same(broken, trained(tmp_path / "h", tiny_folder, update={"max_tokens": tokens, **asked}))


@pytest.mark.not_fast
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_later_steps_run_out_of_memory_too(where: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Twice in one step, which is the third."""
    asked = {"max_tokens": "auto"}
    more = {"max_steps": 3, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 3}
    planted = out_of_memory_in(where, tokens=300, step=2, times=2)
    broken = trained(tmp_path / "o", tiny_folder, planted, update=asked, **more)
    whole = trained(tmp_path / "w", tiny_folder, beginning_with(300), update=asked, **more)
    assert broken.trainer.exact_update.budget.tokens <= 75
    assert 0.0 < apart(broken, whole, 2) < NEAR
    assert logged(broken)[:2] == logged(whole)[:2]


@pytest.mark.not_fast
def test_gradients_of_somebody_else_are_not_dropped(tiny_folder: Path, tmp_path: Path) -> None:
    def prepare(trainer: Any) -> None:
        out_of_memory_in("forward")(trainer)

        def grow(*_: Any) -> None:
            for one in trainer.model.parameters():
                one.grad = torch.ones_like(one)

        trainer.callback_handler.add_callback(
            type("Grows", (TrainerCallback,), {"on_step_begin": lambda self, *a, **k: grow()})
        )

    with pytest.raises(RuntimeError, match="there were gradients before it"):
        trained(tmp_path, tiny_folder, prepare, update={"max_tokens": "auto"})


@pytest.mark.not_fast
@pytest.mark.parametrize("asked", [100, None])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_number_is_not_halved_but_named(where: str, asked: int | None, tiny_folder: Path, tmp_path: Path) -> None:
    """In the last bin, too, whose backward is HF's."""
    for bins in (1, 2):
        planted = out_of_memory_in(where, number=bins)
        with pytest.raises(torch.OutOfMemoryError) as said:
            trained(tmp_path, tiny_folder, planted, update={"max_tokens": asked})
        tokens = int(str(said.value).split("in a bin of ")[1].split()[0])
        assert tokens <= (asked or 10_000)
        assert f"set `update.max_tokens: {tokens // 2}`, or `auto`" in str(said.value)
        assert "CUDA out of memory. Tried" in str(said.value)


@pytest.mark.not_fast
def test_a_row_that_does_not_fit_alone(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"a row of \d+ tokens alone does not fit") as said:
        trained(tmp_path, tiny_folder, out_of_memory_in("forward", times=99), update={"max_tokens": "auto"})
    assert "max_completion_length" in str(said.value)


@pytest.mark.not_fast
def test_without_memory_statistics_it_is_the_stock_micro_batch(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        auto = trained(tmp_path / "a", tiny_folder, update={"max_tokens": "auto"})
    assert_same(auto, trained(tmp_path / "d", tiny_folder))
    (line,) = [r.getMessage() for r in caplog.records if "max_tokens: auto" in r.getMessage()]
    assert "a cpu has no statistics of its memory" in line
    assert auto.trainer.exact_update.described()["max_tokens"] == "auto: as a stock micro-batch"


def measured_by(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets.DeviceMemory, "of", lambda device: memory)
    monkeypatch.setattr(budgets, "to_come", lambda model, optimizer: 0)
    begins = ForwardBudget.bin_begins

    def bin_begins(self: Any, tokens: int) -> None:
        begins(self, tokens)
        memory.largest = tokens

    monkeypatch.setattr(ForwardBudget, "bin_begins", bin_begins)


def bins_of(run: Run) -> list[float]:
    return [row["update/tokens_computed"] for row in run.history if "update/tokens_computed" in row]


@pytest.mark.not_fast
def test_the_number_that_the_memory_holds(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """10 bytes a token, 20,000 free: 1,600 tokens. It holds from the second generation batch on, in one forward a
    step."""
    forwards: list[int] = []

    def prepare(trainer: Any) -> None:
        def count(_module: Any, _args: Any) -> None:
            if torch.is_grad_enabled() and trainer.model.training:
                forwards.append(trainer.state.global_step)

        trainer.model.register_forward_pre_hook(count)

    fixed = trained(tmp_path / "d", tiny_folder)
    measured_by(Memory(room=20_000), monkeypatch)
    with caplog.at_level(logging.INFO):
        auto = trained(tmp_path / "a", tiny_folder, prepare, update={"max_tokens": "auto"})
    assert auto.trainer.exact_update.budget.tokens == 1600
    assert auto.trainer.exact_update.described()["max_tokens"] == 1600
    assert len([r for r in caplog.records if "1600 tokens a forward from here on" in r.getMessage()]) == 1
    assert forwards.count(1) == 1
    assert forwards.count(0) > 1
    assert apart(auto, fixed, 0) == 0.0
    assert 0.0 < apart(auto, fixed, 1) < NEAR


def sampled(folder: Path, start: Path, checkpoint: Path | None = None) -> LabTrainer:
    """Completions are the model's own, so that another weight shows in all later ones."""
    args = LabConfig(
        **arguments(folder, save_strategy="steps", save_steps=1, steps_per_generation=6, optim="adamw_torch"),
        objective="dr_grpo", update={"max_tokens": "auto"},
    )  # fmt: skip
    tokenizer, model = AutoTokenizer.from_pretrained(start), AutoModelForCausalLM.from_pretrained(start)
    trainer = LabTrainer(model, mixed_reward(), args, problems(), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


@pytest.mark.not_fast
def test_a_resumed_run_has_the_number_of_its_checkpoint(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a generation batch, whose bins are still those of the first number, and on a device with other room."""
    measured_by(Memory(room=8_000), monkeypatch)
    whole = sampled(tmp_path / "a", tiny_folder)
    places = [tmp_path / "a" / f"checkpoint-{step}" for step in (1, 2)]
    entries = [read_state(place).entries["budget"] for place in places]
    assert entries == [{"tokens": None, "measured": 640}, {"tokens": 640, "measured": None}]
    measured_by(Memory(room=100), monkeypatch)
    for number, place in enumerate(places):
        resumed = sampled(tmp_path / f"b{number}", tiny_folder, place)
        assert resumed.exact_update.budget.tokens == 640
        for name, value in resumed.model.state_dict().items():
            assert torch.equal(value, whole.model.state_dict()[name]), (place, name)


def port(memory: Any, others: list[int]) -> Any:
    """A rank of several: ``others`` have measured these."""

    def gather(own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, torch.tensor(others, dtype=own.dtype)])

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=gather, optimizer_step_was_skipped=False)
    settings = SimpleNamespace(update=SimpleNamespace(max_tokens="auto"))
    recorder = SimpleNamespace(say=lambda *_, **__: None)
    model = torch.nn.Linear(4, 4, bias=False)
    made = SimpleNamespace(
        accelerator=accelerator, lab_settings=settings, recorder=recorder, model=model,
        optimizer=torch.optim.AdamW(model.parameters()), phase=SimpleNamespace(at_end=True),
    )  # fmt: skip
    found = ForwardBudget(made)
    found.memory = memory
    return found


@pytest.mark.parametrize(
    ("bins", "others", "expected"),
    [
        ([300, 200], [], 800),  # the second one says it: 20 bytes a token beside gradients
        ([300], [], 533),  # the only one, gradients and all: 30 bytes a token
        ([300, 200], [700, 900], 700),  # the least of all ranks
        ([300, 200, 0], [], 800),  # a stand-in says nothing
        ([0], [500], 500),  # this rank had nothing else
        ([0], [budgets.UNKNOWN], None),  # nor had the others: the next step is asked
        ([5000, 4000], [], 5000),  # never fewer than what has fit
    ],
)
def test_what_is_measured(bins: list[int], others: list[int], expected: int | None) -> None:
    memory = Memory(room=20_000)
    found = port(memory, others)
    for number, tokens in enumerate(bins):
        found.bin_begins(tokens)
        memory.largest, memory.each = tokens, 20 if number else 30
    found.on_pre_optimizer_step()
    found.on_optimizer_step()
    found._trainer.optimizer.state = {}
    found._trainer.model.weight.requires_grad_(False)
    found.on_step_end()
    assert found.tokens == expected


def test_what_is_still_to_come_is_left_free() -> None:
    """64 bytes of weights: gradients, and moments where the optimizer has some of others."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    assert budgets.to_come(model, optimizer) == 128
    model[0](torch.ones(1, 4)).sum().backward()
    assert budgets.to_come(model, optimizer) == 64
    optimizer.step()
    assert budgets.to_come(model, optimizer) == 64 + 2 * 64
    model[1].weight.requires_grad_(False)
    assert budgets.to_come(model, optimizer) == 0


def test_a_step_that_was_left_out_says_nothing() -> None:
    memory = Memory(room=20_000)
    found = port(memory, [])
    found.bin_begins(300)
    memory.largest = 300
    found._trainer.accelerator.optimizer_step_was_skipped = True
    found.on_optimizer_step()
    found.on_step_end()
    assert (found.tokens, found._measured) == (None, None)
