"""Generation in compiled forwards of few shapes: what a token is drawn from is what the model says of the row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import CompileConfig, LlamaConfig, Qwen2Config, Qwen3Config

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines import compiled
from grpo_lab.engines.compiled import CompiledGenerate, power_of_two, refuse_compiled
from grpo_lab.engines.generators import plain_generation_config
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.generation import in_step
from unit.generation.test_generate import END, PAD, ROUNDED, Scores, model_of, prompts


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and length of the cache of every forward that was compiled, in order: what torch would capture."""
    seen: list[tuple[int, int]] = []

    def through(call: Any, **_: Any) -> Any:
        def forward(**inputs: Any) -> Any:
            cache = inputs["past_key_values"]
            seen.append((len(inputs["input_ids"]), cache.layers[0].keys.size(2)))
            return call(**inputs)

        return forward

    monkeypatch.setattr(torch, "compile", through)
    return seen


def on_any_device() -> CompileConfig:
    config = CompileConfig()
    config._compile_all_devices = True
    return config


def made(how: CompiledGenerate, model: Any, ids: Tensor, mask: Tensor, tokens: int) -> tuple[Tensor, Scores]:
    scores, config = Scores(model), plain_generation_config(1.0, tokens, [END], PAD)
    torch.manual_seed(1)
    with torch.no_grad():
        return how(model.generate, model, ids, mask, config, logits_processor=[scores]), scores


@pytest.mark.not_fast
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config, LlamaConfig])
def test_each_token_is_drawn_from_what_the_row_alone_says(
    config: type, forwards: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "STRETCH", 8)
    model, (ids, mask) = model_of(config), prompts(5, 4)
    out, scores = made(CompiledGenerate(on_any_device()), model, ids, mask, 30)
    assert scores.gap < ROUNDED
    written = out[:, ids.size(1) :]
    lengths = [row.index(END) + 1 if END in row else 30 for row in written.tolist()]
    assert min(lengths) < 8 < max(lengths), lengths
    assert all((row[length:] == PAD).all() for row, length in zip(written, lengths, strict=True))
    assert (out[:, : ids.size(1)] == ids).all()
    # a batch has a power of two of rows, the least that holds those that had not ended when a stretch began
    expected = [power_of_two(sum(length > step // 8 * 8 for length in lengths)) for step in range(len(scores.rows))]
    assert scores.rows == expected
    assert scores.rows[0] == 32
    assert scores.rows[-1] < 32
    assert {length for _, length in forwards} == {power_of_two(ids.size(1) + 30)}
    assert {rows for rows, _ in forwards} == set(expected)


@pytest.mark.not_fast
@pytest.mark.parametrize("fault", ["rows", "prompts"])
def test_the_test_sees_a_fault(fault: str, forwards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "STRETCH", 8)
    choose, fill = compiled.StaticRoom.choose, compiled.StaticRoom.fill
    if fault == "rows":  # the first rows stay, whichever ended
        monkeypatch.setattr(compiled.StaticRoom, "choose", lambda self, rows, length: choose(self, rows * 0, length))
    else:  # a group reads its neighbour's prompt
        monkeypatch.setattr(compiled.StaticRoom, "fill", lambda self, read, rows: fill(self, read, rows.roll(4)))
    model, (ids, mask) = model_of(), prompts(5, 4)
    assert made(CompiledGenerate(on_any_device()), model, ids, mask, 30)[1].gap > 100 * ROUNDED


def test_greedy_is_transformers_and_the_room_is_kept(forwards: list[tuple[int, int]]) -> None:
    model, (ids, mask) = model_of(), prompts(6, 3)
    config = plain_generation_config(0.0, 40, [END], PAD)
    how = CompiledGenerate(on_any_device())
    rooms = set()
    for sent in (ids, ids[:17], ids + 1):
        sent = sent.where(mask[: len(sent)].bool(), PAD)
        with torch.no_grad():
            ours = how(model.generate, model, sent, mask[: len(sent)], config)
            theirs = model.generate(input_ids=sent, attention_mask=mask[: len(sent)], generation_config=config)
        assert torch.equal(ours[:, : theirs.size(1)], theirs)
        assert (ours[:, theirs.size(1) :] == PAD).all()
        rooms.add(id(how.room))
    assert len(rooms) == 1
    assert len(set(forwards)) <= 6


def test_one_token_prompts(forwards: list[Any]) -> None:
    model = model_of()
    ids = torch.tensor([[5], [5], [9]])
    out, scores = made(CompiledGenerate(on_any_device()), model, ids, torch.ones_like(ids), 12)
    assert scores.gap < ROUNDED
    assert torch.equal(out[:, :1], ids)


@pytest.mark.not_fast
def test_nan_of_an_earlier_batch_is_no_part_of_the_next(forwards: list[Any]) -> None:
    model, (ids, mask) = model_of(), prompts(3, 2)
    how = CompiledGenerate(on_any_device())
    assert made(how, model, ids, mask, 9)[1].gap < ROUNDED
    assert how.room is not None
    for whole in how.room._whole:
        for part in whole:
            part.fill_(float("nan"))
    assert made(how, model, ids, mask, 9)[1].gap < ROUNDED


def test_what_cannot_be_compiled_is_refused() -> None:
    plain = plain_generation_config(1.0, 4, [END], PAD)
    beams = plain_generation_config(1.0, 4, [END], PAD)
    beams.num_beams = 2
    refuse_compiled(model_of(), plain)
    with pytest.raises(ValueError, match=r"'compiled', and the generation config asks for .*num_beams"):
        refuse_compiled(model_of(), beams)
    closed = model_of()
    closed._can_compile_fullgraph = False
    with pytest.raises(ValueError, match="cannot be compiled as a whole; leave it out"):
        refuse_compiled(closed, plain)


@pytest.mark.parametrize(("least", "found"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_power_of_two(least: int, found: int) -> None:
    assert power_of_two(least) == found


@pytest.mark.not_fast
def test_a_training_with_lora_generates_so_and_a_cpu_is_refused(
    forwards: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two steps by TRL's own call; the settings of a run reach its tokens."""
    model, tokenizer = tiny_model("qwen2")
    rows = Dataset.from_dict({"prompt": ["one two", "three four five", "six"] * 2})
    trainer = LabTrainer(
        model=model,
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),
        processing_class=tokenizer,
        train_dataset=rows,
        reward_funcs=lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        args=LabConfig(
            output_dir=str(tmp_path), objective="dr_grpo", rollout={"generate": "compiled"}, max_steps=2,
            num_generations=3, per_device_train_batch_size=6, max_completion_length=10, report_to="none",
            use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"'compiled', and on a CPU .*set it to 'groups'"):
        trainer.train()
    assert not forwards
    monkeypatch.setattr(in_step, "_COMPILED", {trainer.model: CompiledGenerate(on_any_device())})
    trainer.train()
    assert trainer.state.global_step == 2
    assert {rows for rows, _ in forwards} <= {1, 2, 4, 8}
    assert forwards
