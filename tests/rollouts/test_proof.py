"""The arithmetic of the sync proof, and reading tensors back from layers that hide them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.weights.proof import SyncGap, TensorDifference, differing_tensors, judge, sync_gap, tolerance_for
from grpo_lab.engines.weights.sync import (
    WeightSyncError,
    copied,
    engine_tensors,
    missing_tensors,
    repack_tied,
    trainer_names,
)


def test_gap_by_hand() -> None:
    # |-1 + 1.5| + |-2 + 2| + |-0.25 + 0| = 0.75 over 3 tokens; rows of different length weigh by their tokens.
    gap = sync_gap([[-1.0, -2.0], [-0.25]], [[-1.5, -2.0], [0.0]])
    assert gap == SyncGap(mean=0.25, largest=0.5, tokens=3)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_missing_or_broken_log_prob_is_a_fault(value: float | None) -> None:
    with pytest.raises(EngineFault, match="completion 1, position 0"):
        sync_gap([[-1.0], [value]], [[-1.0], [-1.0]])


def test_nan_of_the_trainer_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="trainer nan"):
        sync_gap([[-1.0]], [[math.nan]])


@pytest.mark.parametrize(("engine", "trainer"), [([[-1.0]], []), ([[-1.0]], [[-1.0, -1.0]]), ([[]], [[]]), ([], [])])
def test_shapes_that_prove_nothing_are_refused(engine: list[list[float]], trainer: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument|no token"):
        sync_gap(engine, trainer)


def test_tolerance_is_that_of_the_coarsest_dtype() -> None:
    assert tolerance_for(torch.float32, torch.float32) < tolerance_for(torch.float16)
    assert tolerance_for(torch.float32, torch.bfloat16) == tolerance_for(torch.bfloat16)
    with pytest.raises(ValueError, match="float64"):
        tolerance_for(torch.float64)


def test_judge_names_gap_and_tensors() -> None:
    close, wide = SyncGap(1e-6, 1e-5, 10), SyncGap(0.3, 1.0, 10)
    stale = [TensorDifference("lm_head.weight", 0.1, 0.2)]
    judge(close, [], tolerance=1e-4)
    with pytest.raises(WeightSyncError, match=r"holds other weights(.|\n)*lm_head.weight: relative 0.1"):
        judge(close, stale, tolerance=1e-4)
    with pytest.raises(WeightSyncError, match=r"gap 0.3 nats(.|\n)*tolerance 0.0001(.|\n)*lm_head.weight"):
        judge(wide, stale, tolerance=1e-4)
    with pytest.raises(WeightSyncError, match=r"gap 0\.3 nats(.|\n)*No tensor that can be read differs"):
        judge(wide, [], tolerance=1e-4)


def test_forward_log_probs_equal_one_row_at_a_time_in_float64() -> None:
    """Ragged, right-padded batch against the unpadded rows in float64, each computed on its own."""
    from grpo_lab.testing import tiny_model

    model, _ = tiny_model("qwen3", hidden_size=32, num_heads=2, initializer_range=0.3)
    prompts, completions = [[5, 6, 7], [9]], [[8, 9], [4, 3, 2, 11]]
    picked = forward_logprobs(model.eval(), prompts, completions)
    exact = model.double()
    for prompt, completion, ours in zip(prompts, completions, picked, strict=True):
        logits = exact(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        theirs = [logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
        assert ours == pytest.approx(theirs, abs=1e-5)  # float32 logits against float64


class PackingMethod:
    """Stands for vLLM's quant_method on a CPU: after loading, a private copy is what is multiplied with."""

    def process_weights_after_loading(self, layer: Any) -> None:
        private = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, private, bias)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.cpu_linear(x, layer.weight, bias)


class Packed(nn.Module):
    """A layer like those of the CPU build; with `keep=False` it gives up its weight."""

    def __init__(self, weight: nn.Parameter, *, keep: bool, vocabulary: int | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.input_size_per_partition = weight.shape[1]
        self.quant_method = PackingMethod()
        if vocabulary is not None:
            self.org_vocab_size = vocabulary
        self.quant_method.process_weights_after_loading(self)
        if not keep:
            self.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)


class ParallelLMHead(Packed):
    """Named as in vLLM."""


class Engine(nn.Module):
    """Embedding of 5 rows padded to 8, a tied head, one fused layer of three parts."""

    def __init__(self, trainer: dict[str, torch.Tensor]) -> None:
        super().__init__()
        table = torch.zeros(8, 6)
        table[:5] = trainer["model.embed_tokens.weight"]
        fused = torch.cat([trainer[f"model.{part}_proj.weight"] for part in "qkv"])
        self.model = nn.Module()
        self.model.embed_tokens = Packed(nn.Parameter(table, requires_grad=False), keep=True, vocabulary=5)
        self.model.qkv_proj = Packed(nn.Parameter(fused, requires_grad=False), keep=False)
        self.lm_head = ParallelLMHead(self.model.embed_tokens.weight, keep=True, vocabulary=5)


def trainer_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"embed_tokens": (5, 6), "q_proj": (4, 6), "k_proj": (2, 6), "v_proj": (2, 6)}
    return {f"model.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def test_packed_weights_are_read_back_to_the_last_bit() -> None:
    trainer = trainer_tensors()
    engine = Engine(trainer)
    read = dict(engine_tensors(engine))
    assert set(read) == {"model.embed_tokens.weight", "model.qkv_proj.weight", "lm_head.weight"}
    assert torch.equal(read["lm_head.weight"], trainer["model.embed_tokens.weight"])
    assert differing_tensors(engine, trainer.items()) == []


def test_nan_in_the_trainers_own_weights_is_named() -> None:
    """On both sides it is no difference, and no proof either; on the engine's alone it is a difference."""
    trainer = trainer_tensors()
    trainer["model.k_proj.weight"][1, 2] = math.nan
    with pytest.raises(FloatingPointError, match=r"trainer's own weights .*model\.k_proj\.weight"):
        differing_tensors(Engine(trainer), trainer.items())
    (found,) = differing_tensors(Engine(trainer), trainer_tensors().items())
    assert (found.name, found.relative) == ("model.k_proj.weight", math.inf)


def test_stale_tied_head_is_found_by_what_it_computes_and_repaired() -> None:
    trainer = trainer_tensors()
    engine = Engine(trainer)
    moved = {**trainer, "model.embed_tokens.weight": trainer["model.embed_tokens.weight"] * 1.5}
    engine.model.embed_tokens.weight[:5] = moved["model.embed_tokens.weight"]  # type: ignore[union-attr, index, operator]
    found = differing_tensors(engine, moved.items())
    # ||W - 1.5 W|| / ||1.5 W|| = 1/3
    assert [entry.name for entry in found] == ["lm_head.weight"]
    assert found[0].relative == pytest.approx(1 / 3, rel=1e-6)
    assert repack_tied(engine) == ["lm_head"]
    assert differing_tensors(engine, moved.items()) == []


def test_one_stale_part_of_a_fused_layer_is_named() -> None:
    trainer = trainer_tensors()
    engine = Engine(trainer)
    trainer["model.k_proj.weight"] = trainer["model.k_proj.weight"] + 2**-20
    assert [entry.name for entry in differing_tensors(engine, trainer.items())] == ["model.k_proj.weight"]


def test_missing_tensors_are_named_as_the_trainer_names_them() -> None:
    engine = Engine(trainer_tensors())
    brought = set(trainer_tensors())
    assert missing_tensors(engine, brought) == []
    assert missing_tensors(engine, brought - {"model.v_proj.weight"}) == ["model.v_proj.weight"]


def test_trainer_names_of_fused_and_plain_tensors() -> None:
    fused = {"gate_up_proj": ["gate_proj", "up_proj"]}
    assert trainer_names("a.0.gate_up_proj.weight", fused) == ["a.0.gate_proj.weight", "a.0.up_proj.weight"]
    assert trainer_names("a.0.norm.weight", fused) == ["a.0.norm.weight"]


def test_stream_is_copied_before_it_is_handed_over() -> None:
    """A stream that reuses its tensor (merged LoRA, gathered shards) must not change what was handed over."""

    def stream() -> Any:
        buffer = torch.zeros(2)
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield f"t{value:.0f}", buffer

    names: dict[str, str] = {}
    held = dict(copied(stream(), names))
    assert names == {"t1": "[2]", "t2": "[2]"}
    assert held["t1"].tolist() == [1.0, 1.0]


def test_engine_without_packing_needs_no_repair() -> None:
    from grpo_lab.engines.weights.sync import needs_repair

    def llm(model: nn.Module) -> Any:
        runner = SimpleNamespace(get_model=lambda: model)
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=worker))

    assert not needs_repair(llm(nn.Linear(2, 2)))
    assert needs_repair(llm(Engine(trainer_tensors())))


def test_every_tensor_of_a_cache_is_cleared_of_nan() -> None:
    """Attention has one tensor a layer, a layer with a state several."""
    from grpo_lab.engines.weights.sync import clear_cache

    caches = [torch.full((2, 3), math.nan), [torch.full((2,), math.inf), torch.ones(4)]]
    clear_cache(SimpleNamespace(kv_caches=caches))
    assert [int(caches[0].abs().sum()), *(int(part.abs().sum()) for part in caches[1])] == [0, 0, 0]  # type: ignore[union-attr]
