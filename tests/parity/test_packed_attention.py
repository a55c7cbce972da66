"""FlexAttention and flash kernels on packed rows: what a CPU can show of them.

FlexAttention is PyTorch's unfused one, which reads the mask that a kernel gets. A flash kernel is the loop that its
documentation promises (causal, aligned at the end of queries and keys), below transformers' own function.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from transformers import AttentionInterface, AutoModelForCausalLM, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import WrappedFlexAttention

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.exactness.shared_prompts import why_unshared
from grpo_lab.trainer.trl_bridge import flex_mask, forwards, varlen
from grpo_lab.trainer.trl_bridge.packed_layout import PackedGroup, Spans
from parity import harness
from parity.harness import Run, arguments, movement_bound, movement_difference, train
from parity.test_shared_prompts import CASES, FAMILIES, apart, bins_packed, gradients, in_double, network

FLASH = "flash_attention_2"
CPU = torch.device("cpu")


def random_groups(draw: Generator, most: int = 400) -> tuple[list[PackedGroup], int]:
    """Some prompts and completions, each a run of places behind the one before it, and how many they are."""
    groups, length = [], 0
    for _ in range(int(draw.integers(1, 6))):
        sizes = draw.integers(1, int(draw.choice([4, 130, most])), size=int(draw.integers(2, 8)))
        runs = [length + end - size + np.arange(size) for size, end in zip(sizes, sizes.cumsum(), strict=True)]
        groups.append(PackedGroup(runs[0], runs[1:]))
        length += int(sizes.sum())
    return groups, length


def dense(groups: list[PackedGroup], length: int) -> Tensor:
    """Who sees whom, pair by pair, from the groups alone."""
    seen = torch.eye(length, dtype=torch.bool)
    for group in groups:
        seen[np.ix_(group.prompt, group.prompt)] = torch.ones(2 * [group.prompt.size]).tril().bool()
        for own in group.completions:
            seen[np.ix_(own, group.prompt)] = True
            seen[np.ix_(own, own)] = torch.ones(own.size, own.size).tril().bool()
            seen[own, own[0]] = False
    return seen


# -- FlexAttention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_mask_of_blocks_is_what_pytorch_makes_of_every_pair(seed: int) -> None:
    groups, length = random_groups(np.random.default_rng(seed))
    filled = flex_mask.on_ladder(length)
    made = flex_mask.block_mask(Spans.of(groups), filled, CPU)
    expected = flex.create_block_mask(made.mask_mod, None, None, filled, filled, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(made, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(expected, f"{name}_num_blocks")), name
        assert torch.equal(getattr(made, f"{name}_indices"), getattr(expected, f"{name}_indices")), name
    pairs = flex.create_mask(made.mask_mod, None, None, filled, filled, device="cpu")[0, 0]
    assert torch.equal(pairs, dense(groups, filled)), "a token that fills up sees itself alone"


def test_a_row_is_filled_up_by_little_and_to_few_lengths() -> None:
    lengths = np.arange(1, 1 << 16)
    filled = np.asarray([flex_mask.on_ladder(int(length)) for length in lengths])
    more = filled - lengths
    assert (filled % flex_mask.BLOCK == 0).all()
    assert (more >= 0).all()
    assert (more[256:] < np.maximum(flex_mask.BLOCK, filled[256:] / flex_mask.RUNGS)).all()
    assert np.unique(filled[:4096]).size == 31
    assert np.unique(filled[4096:]).size == 4 * flex_mask.RUNGS
    draw = np.random.default_rng(0)
    seen = {flex_mask.on_ladder(random_groups(draw)[1]) for _ in range(200)}
    assert len(seen) <= np.unique(filled[: max(seen)]).size


@pytest.mark.not_fast
def test_it_compiles_as_often_as_there_are_modes_and_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the first length, once a mode (with and without gradients) for all others; how the mask is made and that
    `training` changes, which makes transformers' wrapper anew, compile nothing."""
    graphs: list[int] = []

    def counting(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    compile_it = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_it(function, backend=counting))
    monkeypatch.setattr(WrappedFlexAttention, "_instance", None)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    draw, module = np.random.default_rng(1), torch.nn.Identity()
    lengths = set()
    for step in range(24):
        groups, length = random_groups(draw, most=200)
        filled = flex_mask.on_ladder(length)
        heads = [torch.randn(1, n, filled, 16, requires_grad=step % 2 == 0) for n in (4, 2, 2)]
        mask = flex_mask.block_mask(Spans.of(groups), filled, CPU)
        with torch.set_grad_enabled(step % 2 == 0):
            trl_bridge.flex_attend(module.train(step % 3 == 0), *heads, mask)
        lengths.add(filled)
    assert len(lengths) > 5
    assert len(graphs) == 3


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's unfused FlexAttention, whose backward is refused on CPUs only because nobody fused it there."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex.flex_attention)
    monkeypatch.setattr(flex_mask, "CLOCK", flex_mask.CompileClock())
    monkeypatch.setattr(trl_bridge, "CLOCK", flex_mask.CLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is unfused
        yield


def test_what_fills_a_row_up_is_finite_and_changes_no_number(unfused: None) -> None:
    """Other tokens there: every log-prob and gradient is what it was, to the bit."""
    right, found = trl_bridge.packed_row, []

    def other(*given: Any) -> Any:
        made = right(*given)
        assert made is not None
        assert made.input_ids.size(1) == 256
        made.input_ids[:, -150:] = torch.arange(150) % 60
        return made

    model = network("Qwen2")
    for pack in (right, other):
        with mock.patch.object(trl_bridge, "packed_row", pack):
            logps, grads = gradients(model, "uneven", trl_bridge.FLEX)
        assert all(bool(grad.isfinite().all()) for grad in grads)
        found.append([logps, *grads])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def trained(tiny: Path, out: Path, share: str, attention: str = "sdpa", **changes: Any) -> Run:
    update = {"max_tokens": 2000, "share_prompts": share}
    args = LabConfig(**arguments(out, **changes), objective="dr_grpo", update=update)
    loaded = functools.partial(AutoModelForCausalLM.from_pretrained, attn_implementation=attention)
    with mock.patch.object(harness, "AutoModelForCausalLM", mock.Mock(from_pretrained=loaded)):
        return train(LabTrainer, args, tiny)


@pytest.mark.not_fast
def test_a_kernel_that_compiles_for_long_gives_way_to_tiles(
    unfused: None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call of attention takes two seconds by the clock: after 6 the next bin is read in tiles, and it is said."""
    monkeypatch.setattr("grpo_lab.trainer.exactness.shared_prompts._of_run", lambda trainer: "")
    ticks = iter(range(0, 100_000, 2))
    monkeypatch.setattr(flex_mask.CLOCK, "now", lambda: float(next(ticks)))
    off = trained(tiny_folder, tmp_path / "off", "off")
    seen = bins_packed(monkeypatch)
    on = trained(tiny_folder, tmp_path / "on", "on", trl_bridge.FLEX)
    forms = [type(packed.seen).__name__ for packed in seen if packed is not None]
    assert set(forms) == {"BlockMask", "Tiles"}
    assert "BlockMask" not in forms[forms.index("Tiles") :]
    assert movement_difference(on, off) <= movement_bound(off)
    said = "packed rows are read in tiles by `sdpa` from now on: FlexAttention compiled too much: 6 compilations, 12 s"
    assert caplog.text.count(said) == 1


# -- flash kernels -----------------------------------------------------------------------------------------------------


def by_the_letter(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float | None = None, causal: bool = False, dropout_p: float = 0.0,
) -> Tensor:  # fmt: skip
    """``flash_attn_varlen_func``: sequence after sequence, keys for several heads of queries, causal from the end."""
    assert causal
    assert dropout_p == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    assert (len(q), len(k)) == (cu_seqlens_q[-1], cu_seqlens_k[-1])
    made = []
    for i in range(len(cu_seqlens_q) - 1):
        own = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]].transpose(0, 1)
        keys, values = (part[cu_seqlens_k[i] : cu_seqlens_k[i + 1]].transpose(0, 1) for part in (k, v))
        keys, values = (part.repeat_interleave(len(own) // len(part), 0) for part in (keys, values))
        scores = own @ keys.transpose(1, 2) * (softmax_scale or q.size(2) ** -0.5)
        late = torch.ones(own.size(1), keys.size(1)).triu(keys.size(1) - own.size(1) + 1).bool()
        made.append((scores.masked_fill(late, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(made)


def padded(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, dropout_p: float = 0.0
) -> Tensor:
    """``flash_attn_func``: as many queries as keys."""
    ends = torch.arange(q.size(0) + 1, dtype=torch.int32) * q.size(1)
    rows = (part.flatten(0, 1) for part in (q, k, v))
    return by_the_letter(*rows, ends, ends, q.size(1), q.size(1), softmax_scale, causal, dropout_p).view_as(q)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with flash attention: transformers' function and its arguments, the kernel by the letter."""
    process = modeling_flash_attention_utils._lazy_define_process_function(by_the_letter)
    around = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    functions = (padded, by_the_letter, None, *around), process
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: functions)
    monkeypatch.setattr(varlen, "lazy_import_flash_attention", lambda *_: functions)
    monkeypatch.setitem(AttentionInterface._global_mapping, FLASH, flash_attention_forward)
    dispatch = "_flash_attn_can_dispatch"
    monkeypatch.setattr(f"transformers.modeling_utils.PreTrainedModel.{dispatch}", lambda *_, **__: True)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", lambda *_, **__: functions)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_a_flash_kernel_in_double(family: str, case: str, flash: None) -> None:
    with in_double(family):
        assert apart(network(family).double(), case, FLASH) < 1e-10


def attention_layer() -> Any:
    """What transformers asks of a layer's attention."""
    module: Any = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.config, module.is_causal = SimpleNamespace(_attn_implementation=FLASH), True
    return module


@pytest.mark.parametrize("seed", range(4))
def test_a_flash_kernel_sees_what_every_pair_says(seed: int, flash: None) -> None:
    """On random groups: the packed call against attention under the mask of all pairs, and both gradients."""
    groups, length = random_groups(np.random.default_rng(seed), most=40)
    trl_bridge.served_as(FLASH)
    module = attention_layer()
    heads = [torch.randn(1, n, length, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)]
    row = varlen.Varlen.of(Spans.of(groups), CPU)
    one, _ = AttentionInterface._global_mapping[FLASH](module, *heads, torch.ones(1, 1, 1, 1), shared_prompts=row)
    mask = dense(groups, length) & ~torch.eye(length, dtype=torch.bool) | own_key(groups, length)
    other = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    weights = torch.randn(one.shape, dtype=torch.float64)
    first, second = (torch.autograd.grad((made * weights).sum(), heads) for made in (one, other))
    for found, expected in zip((one, *first), (other, *second), strict=True):
        assert float((found - expected).detach().abs().max()) < 1e-12


def own_key(groups: list[PackedGroup], length: int) -> Tensor:
    """Each token sees its own key, but for the heads."""
    sees = torch.ones(length, dtype=torch.bool)
    sees[[int(own[0]) for group in groups for own in group.completions]] = False
    return torch.diag(sees)


def test_gradient_checkpointing_calls_the_kernel_with_the_same_row(flash: None) -> None:
    with in_double("Qwen2"):
        plain, model = network("Qwen2").double(), network("Qwen2").double()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        _, expected = gradients(plain, "uneven", True)
        _, found = gradients(model, "uneven", FLASH)
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) < 1e-10


def test_a_kernel_that_aligns_at_the_beginning_is_seen(flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its query i sees i keys: flash attention before 2.1, which the comparison of the first shared bin refuses."""
    at_the_end = torch.Tensor.triu

    def at_the_beginning(ones: Tensor, diagonal: int = 0) -> Tensor:
        return at_the_end(ones, 1)

    monkeypatch.setattr(torch.Tensor, "triu", at_the_beginning)
    with in_double("Qwen2"):
        assert apart(network("Qwen2").double(), "uneven", FLASH) > 1e-3


@pytest.mark.not_fast
@pytest.mark.parametrize("share", ["on", "auto"])
def test_a_training_with_a_flash_kernel(
    share: str, flash: None, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = trained(tiny_folder, tmp_path / "off", "off")
    seen = bins_packed(monkeypatch)
    run = trained(tiny_folder, tmp_path / share, share, FLASH)
    assert {type(packed.seen) for packed in seen if packed is not None} == {varlen.Varlen}
    assert movement_difference(run, off) <= movement_bound(off)
    assert run.trainer.model.config._attn_implementation == FLASH


def test_what_has_no_call_for_sequences_is_refused(flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("Qwen2")
    model.config._attn_implementation = FLASH
    assert why_unshared(model) == ""
    monkeypatch.setattr(varlen, "lazy_import_flash_attention", lambda *_: ((None,) * 5, None))
    assert "'flash_attention_2' has no call for sequences of any lengths" in why_unshared(model)
    model.config._attn_implementation = f"paged|{FLASH}"
    assert "attention is 'paged|flash_attention_2'" in why_unshared(model)


def test_a_function_is_wrapped_once_and_is_what_it_was_without_a_packed_row(flash: None) -> None:
    assert [trl_bridge.served_as(FLASH), trl_bridge.served_as(FLASH)] == [FLASH, FLASH]
    wrapped = AttentionInterface._global_mapping[FLASH]
    module = attention_layer()
    heads = [torch.randn(2, n, 5, 8) for n in (4, 2, 2)]
    assert torch.equal(wrapped(module, *heads, None)[0], flash_attention_forward(module, *heads, None)[0])


# -- cuDNN's attention, which plans for every shape ------------------------------------------------------------------


@pytest.mark.parametrize("update", ["on", "off", "rows"])
def test_a_step_keeps_out_of_it_there_and_back(
    update: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: every layer of a step, and every one that its checkpointed backward computes again. ``update: off``
    is TRL's own."""
    seen: list[bool] = []

    def as_on_a_gpu(_: torch.device) -> Any:
        return forwards.of_any_shape(torch.device("cuda"))

    def looked_at(trainer: Any) -> None:
        monkeypatch.setattr(trl_bridge, "of_any_shape", as_on_a_gpu)
        for layer in trainer.model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))

    settings = {"on": {"share_prompts": "on"}, "off": "off", "rows": {"share_prompts": "off"}}
    args = LabConfig(**arguments(tmp_path, max_steps=1, gradient_checkpointing=True), update=settings[update])
    train(LabTrainer, args, tiny_folder, prepare=looked_at)
    assert len(seen) > 4
    assert set(seen) == {update == "off"}
    assert torch.backends.cuda.cudnn_sdp_enabled()
