"""SFT goes through the model in packed rows, and through the head where a token is trained on: the training is
TRL's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.trainer import distillation_trainer
from trl.trainer import utils as trl_utils

from grpo_lab.engines.generators import render_prompt
from grpo_lab.testing import THINKING_TEMPLATE, TOOLS_TEMPLATE, tiny_model
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.supervised import methods
from grpo_lab.trainer.supervised.methods import train_by
from grpo_lab.trainer.supervised.packed_sft import PackedSFTTrainer, common_tokens
from grpo_lab.trainer.trl_bridge.forwards import scored_alone

ROWS = [{"prompt": "2+3=" + "1+" * (7 * i % 11), "completion": "5" * (1 + 13 * i % 29)} for i in range(32)]
ARGUMENTS = {
    "max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "bf16": False, "use_cpu": True,
    "logging_steps": 2, "lr_scheduler_type": "constant",
}  # fmt: skip


class Logs(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.rows.append(dict(logs))


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type, **more: Any) -> tuple[Any, list[Any], list[Any]]:
    """Weights, logs, and of each forward the shape of its input with how many positions reached the head."""
    seen: list[Any] = []
    forward, head = SFTTrainer.compute_loss, trl_utils._ChunkedLogProbFunction

    def looked_at(self: Any, model: Any, inputs: Any, *rest: Any, **how: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return forward(self, model, inputs, *rest, **how)

    class Counting:
        @staticmethod
        def apply(hidden: torch.Tensor, *rest: Any) -> Any:
            if seen and len(seen[-1]) == 2:  # else it is a forward that only compares
                seen[-1] = (*seen[-1], hidden.size(0))
            return head.apply(hidden, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(methods, "PackedSFTTrainer", kind)
        patch.setattr(SFTTrainer, "compute_loss", looked_at)
        patch.setattr(trl_utils, "_ChunkedLogProbFunction", Counting)
        methods.trl_of.cache_clear()
        (model, tokenizer), logs = tiny_model(hidden_size=16, num_layers=1, num_heads=2), Logs()
        model.double()
        train_by("sft", model, tokenizer, Dataset.from_list(ROWS), folder, {**ARGUMENTS, **more}, [logs])
    methods.trl_of.cache_clear()
    return model, logs.rows, seen


@pytest.mark.not_fast
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_training_is_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int) -> None:
    """In float64, but for TRL's head, which sums in float32: Adam makes 1e-2 a step of the smallest gradient, of which
    what is summed in another order is off by 1e-7."""
    more = {
        "gradient_accumulation_steps": accumulated,
        "max_steps": 6 // accumulated,
        "logging_steps": 2 // accumulated,
    }
    stock, stock_logs, whole = trained(tmp_path / "stock", monkeypatch, SFTTrainer, **more)
    ours, our_logs, packed = trained(tmp_path / "ours", monkeypatch, PackedSFTTrainer, **more)
    assert_same(stock, ours, stock_logs, our_logs)
    assert [shape[0] for shape in whole] == [8] * 6
    assert [shape[0] for shape in packed] == [1] * 6
    assert ours.config._attn_implementation == stock.config._attn_implementation == "sdpa"
    logged = [line["num_tokens"] for line in our_logs if "num_tokens" in line][-1]
    # all rows begin with "2+3=", which is computed once instead of eight times
    assert sum(shape[1] for shape in packed) <= logged - 4 * (48 - 6)
    assert sum(shape[1] for shape in packed) < 0.8 * sum(a * b for a, b, _ in whole)  # nothing is padded
    targets = sum(shape[2] for shape in whole)
    assert targets == sum(shape[2] for shape in packed)  # both without positions that have no label
    assert targets < 0.7 * sum(a * (b - 1) for a, b, _ in whole)


def assert_same(stock: Any, ours: Any, stock_logs: list[Any], our_logs: list[Any]) -> None:
    for (name, expected), found in zip(stock.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.allclose(expected, found, atol=1e-5), name
    for one, other in zip(stock_logs[:-1], our_logs[:-1], strict=True):
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm"):
            assert one.get(name) == pytest.approx(other.get(name), rel=1e-5), name


@pytest.mark.not_fast
def test_a_model_that_reads_more_than_its_attention_sees_is_trained_as_by_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Planted: positions that go on from row to row. The first rows, computed both ways, tell it."""
    right = trl_bridge.packed_row

    def wrong(*given: Any) -> trl_bridge.PackedRow | None:
        made = right(*given)
        assert made is not None
        return replace(made, position_ids=7 * torch.arange(made.input_ids.size(1)).unsqueeze(0))

    stock, stock_logs, whole = trained(tmp_path / "stock", monkeypatch, SFTTrainer, max_steps=2)
    monkeypatch.setattr(trl_bridge, "packed_row", wrong)
    ours, our_logs, found = trained(tmp_path / "ours", monkeypatch, PackedSFTTrainer, max_steps=2)
    assert_same(stock, ours, stock_logs, our_logs)
    assert found == whole
    assert "log-probs of packed rows differ" in caplog.text


def test_what_rows_begin_with() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    assert common_tokens(ids, torch.tensor([[-100, -100, -100, 8], [-100] * 4])) == 3
    assert common_tokens(ids, torch.tensor([[-100, 6, 7, 8], [-100] * 4])) == 1  # a label is scored in each row
    assert common_tokens(ids, ids) == 1
    assert common_tokens(torch.tensor([[4, 6], [5, 6]]), torch.full((2, 2), -100)) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"neftune_noise_alpha": 5.0}, "neftune"), ({"label_smoothing_factor": 0.1}, "label_smoothing"), ({}, "dropout")],
)
def test_what_is_not_packed(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, num_heads=2)
    if said == "dropout":
        model.config.attention_dropout = 0.1
        model.model.layers[0].self_attn.attention_dropout = 0.1
    found: list[Any] = []
    with pytest.raises(ValueError, match="no step was trained"):
        train_by(
            "sft", model, tokenizer, Dataset.from_list(ROWS), tmp_path, {**ARGUMENTS, **settings}, train=found.append
        )
    assert said in found[0].because


def test_only_inside_the_block_and_only_on_a_cpu() -> None:
    before = trl_utils._use_triton, distillation_trainer._use_triton
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert not before[0](cpu)
    with scored_alone():
        for module in (trl_utils, distillation_trainer):
            assert module._use_triton(cpu)
            assert not module._use_triton(other)
    assert (trl_utils._use_triton, distillation_trainer._use_triton) == before


USER, BEGUN = {"role": "user", "content": "2+3"}, {"role": "assistant", "content": "2+3="}
FIVE = [{"role": "assistant", "content": "5"}]
HEAD = "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("continues", [True, False])
def test_a_prompt_that_ends_in_the_assistants_turn(tmp_path: Path, continues: bool) -> None:
    """Where its row says so it is gone on with; else it is closed and another begun, as the model is asked for it."""
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, num_heads=2)
    rows: list[dict[str, Any]] = [{"prompt": [USER, BEGUN], "completion": FIVE}, {"prompt": [USER], "completion": FIVE}]
    rows = [{**row, "continues": number == 0} for number, row in enumerate(rows)] if continues else rows
    found: list[Any] = []
    arguments, data = {**ARGUMENTS, "per_device_train_batch_size": 2}, Dataset.from_list(rows)
    with pytest.raises(ValueError, match="no step was trained"):  # it is only looked at
        train_by("sft", model, tokenizer, data, tmp_path, arguments, train=lambda one: found.extend(one.train_dataset))
    first = f"{HEAD}2+3=5<|im_end|>\n" if continues else f"{HEAD}2+3=<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    assert [tokenizer.decode(row["input_ids"]) for row in found] == [first, f"{HEAD}5<|im_end|>\n"]
    taught = [[t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100] for row in found]
    assert [tokenizer.decode(ids) for ids in taught] == ["5<|im_end|>\n"] * 2
    if not continues:
        asked = render_prompt([USER, BEGUN], tokenizer).ids
        assert found[0]["input_ids"][: len(asked)] == asked


TURNS = [{"prompt": [USER], "completion": FIVE}, {"prompt": [USER, BEGUN], "completion": FIVE}]


@pytest.mark.parametrize("template", [None, THINKING_TEMPLATE])
@pytest.mark.parametrize("settings", [{}, {"completion_only_loss": False}, {"max_length": 8}, {"max_length": None}])
def test_rows_are_trls_rows(tmp_path: Path, template: str | None, settings: dict[str, Any]) -> None:
    """Many at once, in our way, as one by one in TRL's: ids and labels."""
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, num_heads=2)
    if template is not None:
        tokenizer.chat_template = template  # its generation prompt is not the beginning of the answer's turn
    told = {"enable_thinking": False}
    arguments = {**ARGUMENTS, "per_device_train_batch_size": 2, **settings}
    data, found = Dataset.from_list(TURNS), []
    with pytest.raises(ValueError, match="no step was trained"):
        train_by(
            "sft", model, tokenizer, data, tmp_path, arguments, chat_template_kwargs=told,
            train=lambda one: found.extend(one.train_dataset),
        )  # fmt: skip
    config = SFTConfig(**{"output_dir": str(tmp_path), "report_to": "none", **arguments})
    data = data.add_column("chat_template_kwargs", [told] * len(data))
    stock = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train_dataset
    for name in ("input_ids", "labels"):
        assert [row[name] for row in found] == list(stock[name]), name


@pytest.mark.parametrize("method", ["dpo", "simpo"])
def test_pairs_after_an_assistants_message_have_the_prompt_that_is_sampled_from(tmp_path: Path, method: str) -> None:
    """SimPO's trainer would leave the message open, and learn its end with each answer."""
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, num_heads=2)
    pair = {"prompt": [USER, BEGUN], "chosen": FIVE, "rejected": [{"role": "assistant", "content": "6"}]}
    found: list[Any] = []
    arguments = {"per_device_train_batch_size": 1, "use_cpu": True, "bf16": False}
    parts = {"ref_model": deepcopy(model)} if method == "dpo" else {}
    with pytest.raises(ValueError, match="no step was trained"):
        train_by(
            method, model, tokenizer, Dataset.from_list([pair]), tmp_path, arguments,
            train=lambda one: found.extend(one.train_dataset), **parts,
        )  # fmt: skip
    asked = render_prompt([USER, BEGUN], tokenizer)
    name = {"dpo": "prompt_ids", "simpo": "prompt_input_ids"}[method]
    assert found[0][name] == asked.ids
    if method == "dpo":
        assert tokenizer.decode(found[0]["chosen_ids"]) == "5<|im_end|>\n"
    else:
        assert tokenizer.decode([t for t in found[0]["chosen_labels"] if t != -100]).startswith("5<|im_end|>")


@pytest.mark.parametrize(("only", "said"), [(False, 1), (True, 0)])
def test_training_on_what_tools_said_is_told_once(
    only: bool, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = tiny_model(hidden_size=16, num_layers=1, num_heads=2)
    tokenizer.chat_template = TOOLS_TEMPLATE
    completion = [
        {"role": "assistant", "content": "I ask."},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "3 + 4"}], "completion": completion}] * 4)
    arguments = {**ARGUMENTS, "max_steps": 1, "per_device_train_batch_size": 4, "assistant_only_loss": only}
    train_by("sft", model, tokenizer, rows, tmp_path, arguments, where="cold_start")
    told = [text for text in caplog.messages if "`cold_start.assistant_only_loss: true`" in text]
    assert len(told) == said
