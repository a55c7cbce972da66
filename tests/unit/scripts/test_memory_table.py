"""The paper arithmetic of scripts/memory_table.py, checked where a CPU can: parameters, saved activations, hand
values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_table as script
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).resolve().parents[3]
#: of the models' config.json on the hub
HEADS = {"0.5B": (14, 2), "1.5B": (12, 2), "3B": (16, 2), "7B": (28, 4)}


def config_of(shape: Any, heads: tuple[int, int]) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        tie_word_embeddings=shape.tied,
    )  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    (shape,) = (shape for shape in script.SHAPES if shape.name == name)
    assert shape.key_value == shape.hidden // HEADS[name][0] * HEADS[name][1]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape, HEADS[name]))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layer = model.model.layers[0]
    assert shape.layer_parameters == sum(p.numel() for p in layer.parameters())


def saved_bytes(config: Qwen2Config, tokens: int, rows: int = 2) -> int:
    """Bytes of distinct storages that autograd keeps of one forward of the decoder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    ids = torch.randint(0, config.vocab_size, (rows, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(256, 512, 64), (128, 1024, 32), (256, 768, 256)])
def test_activations_are_what_autograd_keeps_for_a_layer(sizes: tuple[int, int, int]) -> None:
    """A third layer's share of what 128 further tokens of 2 rows cost: weights, embedding and head cancel out."""
    hidden, intermediate, key_value = sizes

    def slope(layers: int) -> int:
        shape = script.Shape("toy", layers, hidden, intermediate, key_value, 512, True)
        config = config_of(shape, (hidden // 32, key_value // 32))
        return saved_bytes(config, 256) - saved_bytes(config, 128)

    measured = (slope(3) - slope(2)) / (2 * 128)
    formula = script.layer_activation_bytes(script.Shape("toy", 1, hidden, intermediate, key_value, 512, True))
    print(
        f"h {hidden}, I {intermediate}, k {key_value}: autograd keeps {measured:.0f} bytes a token, formula {formula}"
    )
    assert measured == pytest.approx(formula + 8 + 4 * (hidden // 32), rel=0.001)


def test_hand_values() -> None:
    (small,) = (shape for shape in script.SHAPES if shape.name == "0.5B")
    # 24 layers × 2 (K, V) × 128 wide × 2 bytes = 12,288
    assert script.kv_bytes(small) == 12_288
    # 494,032,768 × (4 + 4 + 8 + 2) bytes
    assert script.state_bytes(small, "single") == 494_032_768 * 18
    # 16/8 N + 4 × (a layer + the embedding)
    layer = 2 * 896**2 + 2 * 896 * 128 + 896 + 2 * 128 + 3 * 896 * 4864 + 2 * 896
    assert script.state_bytes(small, "fsdp2") == 2 * 494_032_768 + 4 * (layer + 151_936 * 896)
    # plain logits of 1,000 tokens: 3 float32 tensors of 151,936 numbers a token = 1.82 GB
    assert script.logits_bytes(small, 1000, fused=False) == 1000 * 151_936 * 12
    work = script.Workload(rows=10, prompt=0, completion=100, live_share=0.5)
    gpu = script.Gpu("toy", flops=1e12, bandwidth=1e12, memory=1e9)
    # 10 rows × 50% × 100 tokens × (8 × matmul parameters + 4 × 24 layers × 2 × 896 × 100) FLOPs at 35% of 1e12 a second
    flops = 500 * (8 * small.matmul_parameters + 4 * 24 * 2 * 896 * 100)
    assert script.update_seconds(small, gpu, work, exact=True) == pytest.approx(flops / 0.35e12)


def test_more_of_anything_costs_more() -> None:
    for small, large in zip(script.SHAPES, script.SHAPES[1:]):
        for layout in ("single", "ddp", "zero2", "fsdp2"):
            assert script.state_bytes(small, layout) < script.state_bytes(large, layout)
        assert script.activation_bytes(small, 100, True) < script.activation_bytes(large, 100, True)
        for gpu in script.GPUS:
            assert script.generation_seconds(small, gpu, script.WORK) <= script.generation_seconds(
                large, gpu, script.WORK
            )
            assert script.update_seconds(large, gpu, script.WORK, exact=True) < script.update_seconds(
                large, gpu, script.WORK, exact=False
            )


def test_the_docs_hold_what_the_script_prints() -> None:
    text = (ROOT / "docs" / "from_laptop_to_cluster.md").read_text(encoding="utf-8")
    for table in (script.states_table(), script.fits_table()):
        assert table in text, "run `python scripts/memory_table.py` and paste its tables"
    assert f"{script.STEP_FLOOR * 1e3:.0f} ms" in text
