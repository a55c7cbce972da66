"""A group's prompt computed once gives the log-probs and gradients of unshared rows."""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import Tensor
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from trl.trainer import utils as trl_utils

from golden.in_double import Head, _angles, _norm
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.shared_prompts import _of_run, why_unshared
from grpo_lab.trainer.trl_bridge import shared_attention
from parity.harness import Run, arguments, movement_bound, movement_difference, train, weight_difference

FAMILIES = {
    "Qwen2": (modeling_qwen2, "Qwen2RMSNorm", "Qwen2RotaryEmbedding"),
    "Qwen3": (modeling_qwen3, "Qwen3RMSNorm", "Qwen3RotaryEmbedding"),
    "Llama": (modeling_llama, "LlamaRMSNorm", "LlamaRotaryEmbedding"),
}
#: prompts, and the completions' lengths of each
CASES: dict[str, dict[int, tuple[int, ...]]] = {
    "uneven": {7: (5, 1, 9, 3)},
    "one token each": {6: (1, 1, 1)},
    "one live": {6: (4,)},
    "two groups and a row of its own": {5: (2, 6, 2), 3: (4, 4), 9: (3,)},
    "a prompt of one token": {1: (3, 5)},
    "rows of their own": {5: (2,), 8: (7,), 3: (4,), 1: (1,)},
}


@contextlib.contextmanager
def in_double(family: str) -> Any:
    module, norm, rotary = FAMILIES[family]
    with (
        mock.patch.object(getattr(module, norm), "forward", _norm),
        mock.patch.object(getattr(module, rotary), "forward", _angles),
        mock.patch.object(trl_utils, "_ChunkedLogProbFunction", Head),
    ):
        yield


def network(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    config = getattr(transformers, f"{family}Config")(**{**sizes, **heads, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    trl_utils.add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    return model.train()


def trainer_of(model: Any) -> Any:
    return SimpleNamespace(accelerator=Accelerator(cpu=True), model=model, temperature=1.0)


def rows(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """A bin's ids, labels and positions; rows of a group are not neighbours, and padding is an ordinary token."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length, completions in CASES[case].items():
        prompt = torch.randint(60, (length,), generator=generator).tolist()
        made += [(prompt, torch.randint(60, (n,), generator=generator).tolist()) for n in completions]
    made = made[::2] + made[1::2]
    width = max(len(p) + len(c) for p, c in made) + 2
    ids, labels = torch.full((len(made), width), 4), torch.full((len(made), width), -100)
    for i, (p, c) in enumerate(made):
        ids[i, : len(p) + len(c)] = torch.tensor(p + c)
        labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
    return ids, labels, torch.arange(width).expand_as(ids) + 3


def prompts_of(labels: Tensor) -> Tensor:
    return (labels != -100).long().argmax(1)


def gradients(model: Any, case: str, shared: bool | str) -> tuple[Tensor, list[Tensor]]:
    ids, labels, positions = rows(case)
    trainer = trainer_of(model)
    model.zero_grad()
    inner = getattr(model, "get_base_model", lambda: model)()
    name = shared if isinstance(shared, str) else "sdpa"
    inner.set_attn_implementation(trl_bridge.served_as(name) if shared else name)
    if shared:
        packed = trl_bridge.packed_row(ids, labels, positions, prompts_of(labels), trl_bridge.form_of(name))
        assert packed is not None
        logps, entropy = trl_bridge.shared_log_probs(trainer.accelerator, model, packed, ids.shape)
    else:
        logps, entropy = trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, positions)
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(2)).to(logps.dtype)
    (logps * weights).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return torch.stack([logps.detach(), entropy.detach()]), found


def apart(model: Any, case: str, shared: bool | str = True) -> float:
    """Largest difference of log-probs, entropies and gradients, relative to the largest of each."""
    (one, first), (other, second) = gradients(model, case, False), gradients(model, case, shared)
    assert len(first) == len(second) > 0
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip([one, *first], [other, *second], strict=True))


@pytest.mark.not_fast(cases="uneven-Qwen2")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_in_double_nothing_differs(family: str, case: str) -> None:
    with in_double(family):
        assert apart(network(family).double(), case) < 1e-10


@pytest.mark.parametrize("case", CASES)
def test_in_float32_rounding_alone_differs(case: str) -> None:
    assert apart(network("Qwen2"), case) < 1e-5


@pytest.mark.not_fast(but="uneven-Llama")
@pytest.mark.thorough(but=["*-Llama", "uneven-*"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_in_double(family: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask that a GPU's kernel gets, read by PyTorch's own unfused one, whose backward is refused on CPUs only
    because nobody fused it there."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    unfused = torch.nn.attention.flex_attention.flex_attention
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: unfused)
    with in_double(family), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is unfused
        assert apart(network(family).double(), case, trl_bridge.FLEX) < 1e-10


def test_values_of_another_size_than_keys() -> None:
    """Latent attention (DeepSeek): heads of 12 for queries and keys, of 6 for values."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    model = network("DeepseekV3", **latent, num_key_value_heads=4, first_k_dense_replace=3, head_dim=4)
    assert why_unshared(model) == ""
    assert apart(model, "two groups and a row of its own") < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_computes_the_packed_row_again(reentrant: bool) -> None:
    with in_double("Qwen2"):
        plain, model = network("Qwen2").double(), network("Qwen2").double()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        _, expected = gradients(plain, "uneven", False)
        _, found = gradients(model, "uneven", True)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) < 1e-10


def test_an_adapter() -> None:
    with in_double("Qwen2"):
        model = get_peft_model(network("Qwen2"), LoraConfig(r=4, init_lora_weights=False)).double()
        assert apart(model, "two groups and a row of its own") < 1e-10


@pytest.mark.parametrize("fault", ["the next token is seen", "positions count on"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "positions count on":
        right = trl_bridge.packed_row

        def wrong(*given: Any) -> Any:
            made = right(*given)
            made.position_ids.copy_(torch.arange(made.input_ids.size(1))[None])
            return made

        monkeypatch.setattr(trl_bridge, "packed_row", wrong)
    else:
        seen = shared_attention._seen

        def further(held: list[Any], *sizes: int) -> Any:
            """As if each prompt had one token more than it has: a query sees the token after its own."""
            longer = [replace(one, keys=np.append(one.keys, one.queries[0])) for one in held]
            return seen(longer, *sizes)

        monkeypatch.setattr(shared_attention, "_seen", further)
    with in_double("Qwen2"):
        assert apart(network("Qwen2").double(), "uneven") > 1e-3


def test_without_groups_it_is_sdpa() -> None:
    model = network("Qwen2")
    ids, mask = torch.randint(60, (2, 9)), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    expected = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("shared_prompt")
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    assert "shared_prompt" not in model.config.to_json_string(), "what is saved loads without us"


def test_nothing_scored_packs_nothing() -> None:
    ids, labels, positions = rows("uneven")
    assert trl_bridge.packed_row(ids, torch.full_like(labels, -100), positions, prompts_of(labels)) is None


# -- as a setting ------------------------------------------------------------------------------------------------------


def bins_packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    right = trl_bridge.packed_row

    def spy(*given: Any) -> Any:
        seen.append(right(*given))
        return seen[-1]

    monkeypatch.setattr(trl_bridge, "packed_row", spy)
    return seen


def trained(tiny: Path, out: Path, share: str, **changes: Any) -> Run:
    update = {"max_tokens": 2000, "share_prompts": share}
    peft = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
    args = LabConfig(**arguments(out, **changes), objective="dr_grpo", update=update)
    return train(LabTrainer, args, tiny, **peft)


ADAPTER = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"])
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "two passes, KL": {"num_iterations": 2, "beta": 0.04},
    "an adapter, KL, gradient checkpointing": {"beta": 0.04, "gradient_checkpointing": True, "peft_config": ADAPTER},
    "bins of several generations": {
        "per_device_train_batch_size": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 3,
    },
}  # fmt: skip


@pytest.mark.not_fast
@pytest.mark.parametrize("case", TRAININGS, ids=str)
def test_a_training_moves_as_without(
    case: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = bins_packed(monkeypatch)
    off = trained(tiny_folder, tmp_path / "off", "off", **TRAININGS[case])
    assert not seen
    on = trained(tiny_folder, tmp_path / "on", "on", **TRAININGS[case])
    assert any(packed is not None and packed.shares for packed in seen)
    assert movement_difference(on, off) <= movement_bound(off)
    assert on.losses == pytest.approx(off.losses, rel=1e-4, abs=1e-6)


@pytest.mark.not_fast
def test_rows_whose_masks_have_holes_are_planned_as_without(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed row has none: planned as if prompts were shared, such bins would be longer than the budget."""

    class Holed(LabTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            batch["completion_mask"][:2, 1:3] = 0
            return batch

    seen, runs = bins_packed(monkeypatch), []
    for share in ("off", "on"):
        update = {"max_tokens": 100, "share_prompts": share}
        args = LabConfig(**arguments(tmp_path / share), objective="dr_grpo", update=update)
        runs.append(train(Holed, args, tiny_folder))
    assert not seen
    assert weight_difference(*runs) == 0.0


@pytest.mark.not_fast
def test_auto_shares_where_it_is_cheaper(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = bins_packed(monkeypatch)
    off = trained(tiny_folder, tmp_path / "off", "off", beta=0.04)
    auto = trained(tiny_folder, tmp_path / "auto", "auto", beta=0.04)
    assert any(packed is not None and packed.shares for packed in seen)
    assert movement_difference(auto, off) <= movement_bound(off)
    assert auto.trainer.exact_update.described()["share_prompts"] == "auto"
    assert "share_prompts" not in off.trainer.exact_update.described()
    computed = [sum(row["update/tokens_computed"] for row in run.history if "loss" in row) for run in (auto, off)]
    assert computed[0] < computed[1]
    seen.clear()
    monkeypatch.setattr("grpo_lab.trainer.exactness.shared_prompts.cheaper", lambda plain, *_: plain)
    dearer = trained(tiny_folder, tmp_path / "dearer", "auto", beta=0.04)
    assert not seen
    assert weight_difference(dearer, off) == 0.0


@pytest.mark.not_fast
def test_auto_says_why_a_model_is_not_served(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off = trained(tiny_folder, tmp_path / "off", "off", max_steps=2)
    monkeypatch.setattr("grpo_lab.trainer.exactness.shared_prompts.why_unshared", lambda model: "its layers are odd")
    with caplog.at_level("INFO"):
        auto = trained(tiny_folder, tmp_path / "auto", "auto", max_steps=2)
    assert auto.trainer.exact_update.described()["share_prompts"] == "no: its layers are odd"
    assert "each row computes its prompt: its layers are odd" in caplog.text
    assert weight_difference(auto, off) == 0.0


@pytest.mark.not_fast
def test_the_first_shared_bin_is_compared(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    off = trained(tiny_folder, tmp_path / "off", "off")
    attend = shared_attention.attend
    monkeypatch.setattr(shared_attention, "attend", lambda *a, **k: attend(*a, **k) * 1.01)
    with pytest.raises(RuntimeError, match=r"is on, and a log-prob of the first shared bin differs by .* to off"):
        trained(tiny_folder, tmp_path / "on", "on")
    auto = trained(tiny_folder, tmp_path / "auto", "auto")
    assert movement_difference(auto, off) <= movement_bound(off), "its first step is right, too"

    def cannot(*_: Any, **__: Any) -> Any:
        raise TypeError("no such argument")

    monkeypatch.setattr(shared_attention, "score", cannot)
    failed = trained(tiny_folder, tmp_path / "failed", "auto", max_steps=2)
    said = failed.trainer.exact_update.described()["share_prompts"]
    assert said == "no: Qwen2ForCausalLM has no forward for a packed row (TypeError: no such argument)"
    assert auto.trainer.exact_update.described()["share_prompts"].startswith("no: a log-prob of the first shared bin")


def equal_at_first(calls: list[int]) -> Any:
    """All rewards of the first generation are equal: its step has no row that is computed."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(len(prompts))
        return [0.5 if len(calls) == 1 else (sum(ids) % 5) / 4.0 for ids in completion_ids]

    return reward


@pytest.mark.not_fast(but="False-on")
@pytest.mark.parametrize("share", ["on", "auto"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_comparison_waits_for_a_bin_that_scores(
    share: str, bf16: bool, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = bins_packed(monkeypatch)
    runs = []
    for name in ("off", share):
        update = {"max_tokens": 2000, "share_prompts": name}
        args = LabConfig(**arguments(tmp_path / name, bf16=bf16, max_steps=3), objective="dr_grpo", update=update)
        runs.append(train(LabTrainer, args, tiny_folder, reward=equal_at_first([])))
    assert any(packed is not None and packed.shares for packed in seen), "the later steps share"
    assert runs[0].losses[0] == runs[1].losses[0] == 0.0
    if not bf16:
        assert movement_difference(runs[1], runs[0]) <= movement_bound(runs[0])
    monkeypatch.setattr(shared_attention, "attend", lambda *a, attend=shared_attention.attend, **k: attend(*a, **k) * 2)
    args = LabConfig(**arguments(tmp_path / "planted", bf16=bf16), objective="dr_grpo", update={"share_prompts": "on"})
    said = r"is on, and (a|the mean) log-prob of the first shared bin differs by [0-9]"
    with pytest.raises(RuntimeError, match=said):
        train(LabTrainer, args, tiny_folder, reward=equal_at_first([]))


class WithToolAnswers(ScriptedRollout):
    """Some completions begin with what a tool said, some end with it, some have it in between."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        made = super().__call__(prompts, trainer)
        masks = [[1] * len(ids) for ids in made["completion_ids"]]
        for row, mask in enumerate(masks):
            of_tool = (slice(0, 2), slice(-2, None), slice(1, 3))[row % 3]
            mask[of_tool] = [0] * len(mask[of_tool])
        return {**made, "env_mask": masks}


def test_tokens_of_tools_are_counted_as_they_are_computed(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is logged, and what the budget holds, is what the packed rows have: a prompt is shared by completions that
    begin with a tool's answer, and nothing behind the last token with a loss is computed."""
    seen = bins_packed(monkeypatch)
    runs = []
    for share in ("off", "on"):
        update = {"max_tokens": 150, "share_prompts": share}
        args = LabConfig(**arguments(tmp_path / share), objective="dr_grpo", update=update)
        tools = WithToolAnswers(range(20, 90), (3, 5, 9, 14, 21, 30))
        runs.append(train(LabTrainer, args, tiny_folder, rollout=tools))
    off, on = runs
    assert movement_difference(on, off) <= movement_bound(off)
    computed = [packed.input_ids.numel() for packed in seen[1:]]  # the first was for the comparison
    assert sum(computed) == sum(row["update/tokens_computed"] for row in on.history if "loss" in row)
    assert max(computed) <= 150


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "eager": ({}, {"attn_implementation": "eager"}, "attention is 'eager'; prompts are shared by sdpa, flex_att"),
    "sliding window": (
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {}, "sliding_attention",
    ),
    "dropout": ({"attention_dropout": 0.1}, {}, "a dropout of 0.1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_models_that_cannot_be_served(case: str) -> None:
    config, options, words = REFUSED[case]
    model = network("Qwen2", **config)
    if options:
        model.set_attn_implementation(options["attn_implementation"])
    assert words in why_unshared(model)


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("Mistral", {"sliding_window": 8}, "sliding window"),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "eager|sliding_attention|sinks"),
        ("Mamba", {}, "AttentionInterface"),
        ("Bloom", {}, "AttentionInterface"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
        ("Qwen3Next", {"num_experts": 2, "num_experts_per_tok": 1}, "AttentionInterface"),
    ],
)
def test_families_that_cannot_be_served(family: str, config: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "n_head": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    made = getattr(transformers, f"{family}Config")(**sizes, **heads, **config)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(made)
    assert re.search(words, why_unshared(model))


def test_served_families_are_not_refused() -> None:
    assert [why_unshared(network(family)) for family in FAMILIES] == ["", "", ""]


def test_flex_attention_is_served_but_on_a_cpu() -> None:
    model = network("Qwen2")
    model.set_attn_implementation(trl_bridge.FLEX)
    run = trainer_of(model)
    run.lab_settings = SimpleNamespace(update=SimpleNamespace(is_off=False))
    run.algorithm = SimpleNamespace(value=None)
    run.args = None
    assert (why_unshared(model), _of_run(run).split(" (")[0]) == ("", "FlexAttention has no backward on a CPU")


def test_prompt_tuning_is_refused() -> None:
    model = get_peft_model(network("Qwen2"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert "PEFT drops position ids" in why_unshared(model)


def test_a_run_that_cannot_be_served(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`update.share_prompts` is on, and .*`torch.compile`"):
        trained(tiny_folder, tmp_path, "on", torch_compile=True)
    asked = r"`update.share_prompts` is on, and `use_transformers_continuous_batching`|requires transformers>=5\.8"
    with pytest.raises((ValueError, ImportError), match=asked):  # TRL's own refusal
        trained(tiny_folder, tmp_path, "on", use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match=r"`update.share_prompts: on` has no effect with `update: off`"):
        LabConfig(**arguments(tmp_path), objective="dr_grpo", update={"name": "off", "share_prompts": True})
