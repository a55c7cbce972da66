"""A random process reward model of Hugging Face's token-classification kind, with a tokenizer that is not the
policy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForTokenClassification


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: no token of it is one of the policy's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(["<s>", "<pad>", *letters])}, merges=[])
    )
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", pad_token="<pad>")


def judge_model(**changes: Any) -> Qwen2ForTokenClassification:
    settings = {
        "vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "classifier_dropout": 0.5,
        "id2label": {0: "bad", 1: "good"}, **changes,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Qwen2ForTokenClassification(Qwen2Config(**settings))


def saved_judge(place: Path) -> Path:
    judge_model().save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place
