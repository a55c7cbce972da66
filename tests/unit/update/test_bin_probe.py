"""The model itself is asked whether its log-probs are the same in bins as in TRL's batches: real (tiny, random) models
of many families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CpmAntConfig,
    DogeConfig,
    GPT2Config,
    Lfm2Config,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
    RoFormerConfig,
    RwkvConfig,
    TrOCRConfig,
    XLNetConfig,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model, tiny_tokenizer
from parity.harness import arguments, mixed_reward, movement_bound, movement_difference, problems, train

pytestmark = pytest.mark.not_fast

WORDS = len(tiny_tokenizer())
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
#: config, whether a row's log-probs are other ones in a bin
MODELS: dict[str, tuple[PreTrainedConfig, bool]] = {
    "bert": (BertConfig(**ENCODER), True),
    "roberta as decoder": (RobertaConfig(**ENCODER, is_decoder=True), True),
    "xlnet": (XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=2, n_head=2, d_inner=16, dropout=0.0), True),
    "roformer": (RoFormerConfig(**ENCODER), True),
    "cpmant": (
        CpmAntConfig(vocab_size=WORDS, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=16,
                     num_hidden_layers=2, dropout_p=0.0), True,
    ),
    "trocr": (
        TrOCRConfig(vocab_size=WORDS, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=16,
                    max_position_embeddings=64, dropout=0.0), True,
    ),
    "doge": (DogeConfig(**SIZES), True),
    "rwkv": (RwkvConfig(vocab_size=WORDS, context_length=64, hidden_size=32, num_hidden_layers=2), True),
    "bert as decoder": (BertConfig(**ENCODER, is_decoder=True), False),
    "qwen2": (Qwen2Config(**SIZES), False),
    "gpt2": (
        GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
                   attn_pdrop=0.0), False,
    ),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1), False),
    "mamba": (MambaConfig(vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2), False),
    "lfm2": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), False),
}  # fmt: skip


def built(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name][0]))  # the trainer writes token ids into it
    for parameter in model.parameters():  # a fresh model is nearly uniform, whatever it sees
        if parameter.dim() > 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def trainer(name: str, folder: Path, **changes: Any) -> LabTrainer:
    args = LabConfig(**arguments(folder, router_aux_loss_coef=0.0, **changes), objective="dr_grpo")
    return LabTrainer(
        model=built(name),
        reward_funcs=mixed_reward(),
        args=args,
        train_dataset=problems(),
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "float32") for name in MODELS), *((name, "autocast") for name in ("bert", "doge", "qwen2", "mamba"))],
)
def test_the_model_answers(name: str, precision: str, tmp_path: Path) -> None:
    """By orders of magnitude on either side of the bound, also where training runs in bfloat16: the weights are
    float32."""
    asked = trainer(name, tmp_path, bf16=precision == "autocast")
    if precision == "autocast":
        asked.model = asked.accelerator.prepare(asked.model)
    asked.model.train()
    asked.model.get_input_embeddings().eval()
    modes = [module.training for module in asked.model.modules()]
    state = torch.get_rng_state()
    apart, bound = asked.exact_update.verdict.probe._measured()
    print(f"{name}: {apart:.1e} nats per token apart, bound {bound:.1e}")
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in asked.model.modules()] == modes
    assert all(parameter.grad is None for parameter in asked.model.parameters())
    assert (apart > 5 * bound) if MODELS[name][1] else (apart < bound / 5)


def test_half_weights_are_given_their_rounding(tmp_path: Path) -> None:
    asked = trainer("qwen2", tmp_path)
    asked.model.to(torch.bfloat16)
    apart, bound = asked.exact_update.verdict.probe._measured()
    assert apart <= bound
    assert bound >= 0.1


def test_too_few_positions_are_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="grpo_lab")
    asked = trainer("qwen2", tmp_path)
    asked.model.config.max_position_embeddings = 15
    assert asked.exact_update.verdict.now().stock is None
    assert caplog.text.count("not asked: whether the model's log-probs") == 1


@pytest.mark.parametrize("name", ["bert", "doge"])
def test_what_differs_in_bins_is_trained_as_stock_does(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    built(name).save_pretrained(folder)
    tiny_model()[1].save_pretrained(folder)
    settings = arguments(tmp_path / "out", max_steps=2, learning_rate=1e-2, router_aux_loss_coef=0.0)
    stock = train(GRPOTrainer, GRPOConfig(**settings, loss_type="dr_grpo", scale_rewards="none"), folder)
    ours = train(LabTrainer, LabConfig(**settings, objective="dr_grpo"), folder)
    assert movement_difference(ours, stock) <= movement_bound(stock)
    assert caplog.text.count("the model's log-probs of a row depend on how it is padded") == 1
