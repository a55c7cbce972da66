"""Small checkpoints on disk for the engine tests: random ones of three architectures, and a real pretrained one.

vLLM's CPU attention has kernels for head sizes 32, 64, 80, ... only; it starts with others and fails at the first
token. stories260K has heads of 8, so it is widened here without changing the function it computes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = ("qwen2", "qwen3", "llama")


def data_folder() -> Path | None:
    """Folder of the real data: $GRPO_LAB_DATA, else ../shared/data beside the checkout, else None."""
    named = os.environ.get("GRPO_LAB_DATA")
    candidates = [Path(named)] if named else []
    candidates.append(Path(__file__).resolve().parents[3] / "shared" / "data")
    return next((folder for folder in candidates if folder.is_dir()), None)


def servable(folder: Path, architecture: str = "qwen2", **sizes: Any) -> str:
    """Write a tiny model with heads of 32, the smallest that vLLM's CPU kernels have, and its tokenizer -> the
    folder."""
    from grpo_lab.testing import tiny_model

    for part in tiny_model(architecture, **{"hidden_size": 64, "num_heads": 2, "num_layers": 2, **sizes}):
        part.save_pretrained(folder)
    return str(folder)


def random_checkpoint(folder: Path, architecture: str, *, tied: bool, seed: int = 0) -> Path:
    """Write a random 2-layer model of ~0.4 M parameters (float32, heads of 32) and its tokenizer -> the folder."""
    from grpo_lab.testing import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    if architecture == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            initializer_range=0.05,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        model = LlamaForCausalLM(config)
    else:
        model, tokenizer = tiny_model(
            architecture,
            hidden_size=128,
            num_heads=4,
            num_kv_heads=2,
            intermediate_size=256,
            tie_embeddings=tied,
            initializer_range=0.05,
            seed=seed,
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def widened_rows(weight: torch.Tensor, narrow: int, wide: int, scale: float) -> torch.Tensor:
    """[heads * narrow, hidden] -> [heads * wide, hidden]: the rotary pairs keep their frequency, the rest is zero.

    Rotary pair i of n/2 turns at theta^(-2i/n). In a head of size w = r*n the pair r*i turns at theta^(-2ri/w), the
    same. Pair i sits in the rows i and i + n/2.
    """
    hidden = weight.shape[1]
    heads = weight.view(-1, narrow, hidden)
    out = weight.new_zeros(heads.shape[0], wide, hidden)
    pairs = torch.arange(narrow // 2)
    step = wide // narrow
    out[:, pairs * step] = heads[:, pairs] * scale
    out[:, pairs * step + wide // 2] = heads[:, pairs + narrow // 2] * scale
    return out.reshape(-1, hidden)


def widened_stories(folder: Path, wide: int = 32) -> Path | None:
    """stories260K with heads of size `wide` instead of 8 -> the folder, or None where the data is not there.

    Exactly the same function: queries are scaled by sqrt(wide / 8) = 2, which is exact in binary, because attention
    divides by the square root of the head size. The padding dimensions are zero in q, k and v.
    """
    from safetensors.torch import load_file, save_file

    data = data_folder()
    if data is None or not (data / "models" / "stories260K").is_dir():
        return None
    source = data / "models" / "stories260K"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    narrow = config["head_dim"]
    config["head_dim"] = wide
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            scale = (wide / narrow) ** 0.5 if "q_proj" in name else 1.0
            tensors[name] = widened_rows(tensor, narrow, wide, scale)
        elif name.endswith("v_proj.weight"):
            out = tensor.new_zeros(tensor.shape[0] // narrow, wide, tensor.shape[1])
            out[:, :narrow] = tensor.view(-1, narrow, tensor.shape[1])
            tensors[name] = out.reshape(-1, tensor.shape[1])
        elif name.endswith("o_proj.weight"):
            out = tensor.new_zeros(tensor.shape[0], tensor.shape[1] // narrow, wide)
            out[:, :, :narrow] = tensor.view(tensor.shape[0], -1, narrow)
            tensors[name] = out.reshape(tensor.shape[0], -1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
