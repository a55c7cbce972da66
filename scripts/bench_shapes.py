"""Models of the benchmarks: Qwen2 with random weights, in the shapes of real models and smaller ones.

The shapes ``0.5B`` and ``1.5B`` are those of Qwen2.5's config.json; nothing is downloaded. Not a command: the
benchmarks import it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "10M": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}


def config_of(shape: str) -> Qwen2Config:
    """Return the configuration of a shape in `SHAPES`."""
    return Qwen2Config(
        **SHAPES[shape], max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1
    )


def build(folder: Path, shape: str) -> int:
    """Write a random model of ``shape`` into ``folder``, and return its number of parameters."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config_of(shape))
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())
