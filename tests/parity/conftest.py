"""Random models that are saved once for all tests of parity."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo_lab.testing import CHAT_TEMPLATE, tiny_model
from parity.tiny_vlm import save_tiny_llava

#: a template that TRL knows to parse tool calls of
TOOL_TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved random models by name. A tenth of the vocabulary ends a completion, so that lengths vary."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: root / name
        for name in ("text", "qwen3", "llama", "gpt2", "opt", "dropout", "moe", "tools", "reward", "adapter", "llava")
    }
    policy, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, max_positions=2048, initializer_range=0.2)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"max_position_embeddings": 512, "initializer_range": 0.2, **heads, **ends}
    others = ("initializer_range", "intermediate_size", "num_key_value_heads")
    of_opt = {name: size for name, size in sizes.items() if name not in others}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    torch.manual_seed(0)
    built = {
        "text": policy,
        "tools": policy,
        "dropout": Qwen2ForCausalLM(Qwen2Config(**sizes, attention_dropout=0.1)),
        "qwen3": tiny_model("qwen3", hidden_size=32, num_layers=2, initializer_range=0.2)[0],
        "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "gpt2": GPT2LMHeadModel(GPT2Config(**sizes, n_positions=512, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
        "opt": OPTForCausalLM(OPTConfig(**of_opt, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2, dropout=0.0)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)),
        "reward": Qwen2ForSequenceClassification(Qwen2Config(**sizes, num_labels=1)),
    }
    for name, model in built.items():
        if name != "reward":
            model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 200)]
        model.save_pretrained(folders[name])
        tokenizer.chat_template = TOOL_TEMPLATE if name == "tools" else CHAT_TEMPLATE
        tokenizer.save_pretrained(folders[name])
    save_tiny_llava(folders["llava"])
    adapted = get_peft_model(policy, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False))
    adapted.save_pretrained(folders["adapter"])
    return folders
