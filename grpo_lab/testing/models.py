"""Real Qwen2 and Qwen3 models, random and small enough for a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ARCHITECTURES = ("qwen2", "qwen3")


def tiny_model(
    architecture: str = "qwen2",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    max_positions: int = 512,
    tie_embeddings: bool = True,
    initializer_range: float = 0.02,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A random ``Qwen2ForCausalLM`` or ``Qwen3ForCausalLM`` in float32, with a tokenizer that has a chat template.

    Args:
        num_kv_heads: None for as many as ``num_heads``; fewer gives grouped-query attention.
        intermediate_size: None for ``4 * hidden_size`` (the MLP is gated: three matrices of that width).
        tie_embeddings: input and output embeddings are one matrix.
        initializer_range: standard deviation of the random weights. transformers' 0.02 is made for wide models; a
            narrow one learns faster from about ``1 / sqrt(hidden_size)``.
        tokenizer: None for ``tiny_tokenizer()``; else a local tokenizer folder or a loaded tokenizer, and the model is
            built around its vocabulary.
        seed: same arguments and seed, same weights. The global random state is left as it was.

    Raises:
        ValueError: unknown architecture, sizes that do not divide, a tokenizer folder that is not there.
    """
    if num_kv_heads is None:
        num_kv_heads = num_heads
    _check(architecture, hidden_size, num_heads, num_kv_heads)
    words = _load_tokenizer(tokenizer)
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size if intermediate_size is None else intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "initializer_range": initializer_range,
        "pad_token_id": words.pad_token_id,
        "eos_token_id": words.eos_token_id,
        "bos_token_id": None,
    }
    return _build(architecture, sizes, seed), words


def _check(architecture: str, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; allowed: {', '.join(ARCHITECTURES)}")
    if hidden_size % (2 * num_heads):
        raise ValueError(
            f"hidden_size {hidden_size} / num_heads {num_heads} is no even whole number, as rotary positions need"
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}")


def _load_tokenizer(tokenizer: str | Path | PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        return tiny_tokenizer()
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    folder = Path(tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer {str(tokenizer)!r} is no local folder with a tokenizer.json (setting: tokenizer)")
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def _build(architecture: str, sizes: dict[str, Any], seed: int) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture == "qwen2":
        del sizes["head_dim"]  # Qwen2 has no such setting
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).float()
    return model
