"""What a model brings that keeps rows from being left out: read off real (tiny, random) models of several families."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, PrefixTuningConfig, PromptTuningConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    DbrxConfig,
    Lfm2Config,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    xLSTMConfig,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.exactness.model_conditions import (
    RandomnessWatch,
    dropout_rate,
    layer_drop_rate,
    mixes_rows,
    moves_positions,
    padding_reaches_state,
    router_noise,
    shared_dropout_rate,
)
from parity.harness import arguments, assert_same_movement, mixed_reward, problems, train

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1}
#: config, dropout, layer drop, router noise, whether a training forward draws random numbers
MODELS: dict[str, tuple[PreTrainedConfig, float, float, float, bool]] = {
    "qwen2": (Qwen2Config(**SIZES), 0.0, 0.0, 0.0, False),
    "qwen2 attention_dropout": (Qwen2Config(**SIZES, attention_dropout=0.25), 0.25, 0.0, 0.0, True),
    "qwen2_moe": (
        Qwen2MoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8), 0.0, 0.0, 0.0, False,
    ),
    "mixtral": (MixtralConfig(**EXPERTS), 0.0, 0.0, 0.0, False),
    "mixtral router_jitter_noise": (MixtralConfig(**EXPERTS, router_jitter_noise=0.125), 0.0, 0.0, 0.125, True),
    "opt layerdrop": (
        OPTConfig(
            vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, layerdrop=0.5,
        ), 0.0, 0.5, 0.0, True,
    ),
    "biogpt": (
        BioGptConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, layerdrop=0.25,
                     hidden_dropout_prob=0.125, attention_probs_dropout_prob=0.0, activation_dropout=0.0),
        0.125, 0.25, 0.0, True,
    ),
    "dbrx moe_jitter_eps": (
        DbrxConfig(
            d_model=16, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=64, resid_pdrop=0.0, emb_pdrop=0.0,
            attn_config={"kv_n_heads": 2, "attn_pdrop": 0.0, "rope_theta": 10_000.0, "clip_qkv": 8},
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.125},
        ), 0.0, 0.0, 0.125, True,
    ),
    # its router draws its experts in training, and no setting says so: only the watch sees it
    "phimoe": (
        PhimoeConfig(
            **{**EXPERTS, "num_experts_per_tok": 2}, router_jitter_noise=0.0, input_jitter_noise=0.0
        ), 0.0, 0.0, 0.0, True,
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(MODELS[name][0])
    return model.train()


@pytest.mark.parametrize("name", MODELS)
def test_rates_are_those_of_the_config_whatever_the_family_calls_them(name: str) -> None:
    model, (_, dropout, layer_drop, noise, _) = built(name), MODELS[name]
    assert (dropout_rate(model), layer_drop_rate(model), router_noise(model)) == (dropout, layer_drop, noise)
    assert not mixes_rows(model, "no")
    assert ("from the attention mask" in moves_positions(model)) is (name in ("opt layerdrop", "biogpt"))


@pytest.mark.parametrize("name", MODELS)
def test_the_watch_sees_every_random_forward_and_no_other(name: str) -> None:
    model, is_random = built(name), MODELS[name][4]
    watch = RandomnessWatch(torch.device("cpu"))
    torch.rand(1)  # drawn outside: not the forward's
    watch.start()
    model(input_ids=torch.arange(3, 15).unsqueeze(0)).logits.sum().backward()
    watch.stop()
    torch.rand(1)
    assert watch.drawn is is_random


def test_the_watch_keeps_what_it_saw() -> None:
    watch = RandomnessWatch(torch.device("cpu"))
    for draw in (True, False):
        watch.start()
        torch.rand(1) if draw else None
        watch.stop()
    assert watch.drawn


def test_layers_that_mix_rows() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert not mixes_rows(plain, "bf16")
    assert mixes_rows(plain, "fp8")
    assert mixes_rows(nn.Sequential(plain, nn.BatchNorm1d(2)), "no")
    limited = nn.Linear(2, 2)
    limited.expert_capacity = 4  # type: ignore[assignment]  # as Switch's and NLLB's routers keep it
    assert mixes_rows(nn.Sequential(limited), "no")


def test_adapters_and_submodules_are_read() -> None:
    inner = nn.Linear(2, 2)
    inner.rank_dropout = {"default": 0.5}  # type: ignore[assignment]  # as PEFT's LoKr layers keep it
    assert dropout_rate(nn.Sequential(inner, nn.Dropout(0.25))) == 0.25
    assert shared_dropout_rate(nn.Sequential(inner, nn.Dropout(0.25))) == 0.5, "one draw for all rows"
    assert (dropout_rate(nn.Dropout2d(0.25)), shared_dropout_rate(nn.Dropout2d(0.25))) == (0.0, 0.25)
    assert dropout_rate(nn.Sequential(nn.Dropout(0.25))) == 0.25
    inner.drop_last = True  # type: ignore[assignment]  # no rate
    inner.rank_dropout = {"default": None}  # type: ignore[assignment]
    assert dropout_rate(inner) == shared_dropout_rate(inner) == 0.0


def saved(name: str, folder: Path) -> Path:
    _, tokenizer = tiny_model("qwen2")
    config = MODELS[name][0]
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), tokenizer.eos_token_id, None
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("name", "reason", "steps_in_bins"),
    [
        ("mixtral", None, 3),
        ("mixtral router_jitter_noise", "router_jitter_noise=0.125", 0),
        ("qwen2 attention_dropout", None, 3),
        ("opt layerdrop", "layerdrop=0.5", 0),
        ("phimoe", "drew random numbers in the first step", 1),
    ],
)
def test_in_training(
    name: str, reason: str | None, steps_in_bins: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is named once, and from then on every row is computed in TRL's batches."""
    caplog.set_level("INFO", logger="grpo_lab")
    config = LabConfig(
        **arguments(tmp_path / "out", max_steps=3, learning_rate=1e-3, router_aux_loss_coef=0.0), objective="dr_grpo"
    )
    run = train(LabTrainer, config, saved(name, tmp_path / "model"))
    shares = [row["update/computed_share"] for row in run.history if "loss" in row]
    assert [share < 1 for share in shares] == [True] * steps_in_bins + [False] * (3 - steps_in_bins)
    found = run.trainer.exact_update.verdict.now()
    assert found.stock == found.all_rows
    if reason is None:
        assert found.stock is None
    else:
        assert caplog.text.count(reason) == 1


def without_layer_drop(name: str) -> PreTrainedConfig:
    config = copy.deepcopy(MODELS[name][0])
    config.layerdrop = 0.0
    return config


def scaled_rope(kind: str, **more: Any) -> PreTrainedConfig:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4, **more}
    return Qwen2Config(**SIZES, rope_parameters=rope)


def as_fp8(trainer: Any) -> None:
    trainer.accelerator.state._mixed_precision = "fp8"


def with_batch_norm(trainer: Any) -> None:
    trainer.model.add_module("norm", nn.BatchNorm1d(2))


def with_capacity(trainer: Any) -> None:
    trainer.model.lm_head.expert_capacity = 4


def drawing(trainer: Any) -> None:
    trainer.model.model.layers[0].register_forward_hook(lambda _m, _i, output: (torch.rand(1), output)[1])


LONG = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
#: what is in the way → config, adapter, what is done to the trainer, settings, and the words that name it
CAUSES: dict[str, tuple[Any, Any, Any, dict[str, Any], str]] = {
    "dynamic": (scaled_rope("dynamic"), None, None, {}, "rope_type 'dynamic'"),
    "longrope": (scaled_rope("longrope", **LONG), None, None, {}, "rope_type 'longrope'"),
    "opt": (without_layer_drop("opt layerdrop"), None, None, {}, "learned positions from the attention mask"),
    "prompt tuning": (
        SIZES, PromptTuningConfig(num_virtual_tokens=3), None, {}, "virtual tokens .*`PromptTuningConfig`",
    ),
    "prefix tuning": (
        SIZES, PrefixTuningConfig(num_virtual_tokens=3), None, {}, "virtual tokens .*`PrefixTuningConfig`",
    ),
    "batch norm": (SIZES, None, with_batch_norm, {}, "batch norm"),
    "capacity": (SIZES, None, with_capacity, {}, "`expert_capacity`"),
    "fp8": (SIZES, None, as_fp8, {}, "in fp8 .*`mixed_precision`"),
    "dbrx": (MODELS["dbrx moe_jitter_eps"][0], None, None, {}, "DBRX calls it moe_jitter_eps"),
    "lokr": (SIZES, LoKrConfig(target_modules=["q_proj"], rank_dropout=0.1), None, {}, "rank_dropout"),
    "loha": (SIZES, LoHaConfig(target_modules=["q_proj"], module_dropout=0.1), None, {}, "module_dropout"),
    "draws": (Qwen2Config(**SIZES, attention_dropout=0.25), None, drawing, {}, "random numbers beside torch's dropout"),
    "same draws": (
        Qwen2Config(**SIZES, attention_dropout=0.25), None, None, {"update": {"randomness": "same_draws"}}, "p=0.25",
    ),
    "neftune": (SIZES, None, None, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    "experts' loss": (MODELS["mixtral"][0], None, None, {"router_aux_loss_coef": 0.05}, "router_aux_loss_coef=0.05"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_the_reason_names_the_cause(cause: str, tmp_path: Path) -> None:
    """Prompt tuning and OPT were told of rotary scaling, fp8 of layers that no setting changes, DBRX of a setting that
    it has not."""
    given, adapter, prepare, settings, words = CAUSES[cause]
    _, tokenizer = tiny_model("qwen2")
    config = copy.deepcopy(Qwen2Config(**given) if isinstance(given, dict) else given)
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), tokenizer.eos_token_id, None
    if adapter is not None:
        adapter.task_type = "CAUSAL_LM"
    args = LabConfig(**{**arguments(tmp_path, router_aux_loss_coef=0.0), **settings}, objective="dr_grpo")
    trainer = LabTrainer(
        AutoModelForCausalLM.from_config(config),
        mixed_reward(),
        args,
        problems(),
        processing_class=tokenizer,
        peft_config=adapter,
    )
    precision = trainer.accelerator.state._mixed_precision
    try:
        (prepare or (lambda _: None))(trainer)
        trainer.model.train()
        assert re.search(words, str(trainer.exact_update.verdict.now().stock))
    finally:
        trainer.accelerator.state._mixed_precision = precision


STATES: dict[str, tuple[PreTrainedConfig, bool]] = {
    "rwkv": (RwkvConfig(vocab_size=64, context_length=64, hidden_size=32, num_hidden_layers=2), True),
    "recurrent_gemma": (
        RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 3}, lru_width=16, head_dim=8, attention_window_size=64),
        True,
    ),
    "xlstm": (xLSTMConfig(vocab_size=64, hidden_size=64, num_heads=2, num_hidden_layers=2), True),
    "mamba": (MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2), False),
    "mamba2": (
        Mamba2Config(vocab_size=64, hidden_size=16, num_heads=4, head_dim=8, state_size=4, n_groups=1,
                     num_hidden_layers=2),
        False,
    ),
    "qwen3_5": (
        Qwen3_5TextConfig(
            **{**SIZES, "num_hidden_layers": 4}, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=8,
        ), False,
    ),
    "lfm2": (Lfm2Config(**{**SIZES, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]), False),
    "qwen2": (Qwen2Config(**SIZES), False),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_runs_through_padding_is_what_the_model_does(name: str) -> None:
    """The same row with TRL's padding and mask, and with other tokens under the mask: does a real token's log-prob
    change? In float32 by nothing at all where padding is zeroed or not attended to, and by far more than rounding where
    a state runs through it."""
    config, reads = STATES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # a fresh model may forget at once, or have gates of 0
        parameter.data += 0.2 * torch.randn_like(parameter)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    row = torch.randint(3, 64, (1, 10))
    with torch.no_grad():
        found = [
            model(input_ids=row.masked_fill(mask == 0, pad), attention_mask=mask, use_cache=False).logits[:, 4:]
            for pad in (0, 5)
        ]
    assert bool((found[0] - found[1]).abs().max() > 1e-3) is reads
    assert padding_reaches_state(model) is reads


@pytest.mark.not_fast
def test_a_recurrent_model_keeps_trls_batches_and_equals_stock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MODELS["rwkv"] = (STATES["rwkv"][0], 0.0, 0.0, 0.0, False)
    folder = saved("rwkv", tmp_path / "model")
    settings = arguments(tmp_path / "out", max_steps=2, learning_rate=1e-2)
    stock = train(GRPOTrainer, GRPOConfig(**settings, loss_type="dr_grpo", scale_rewards="none"), folder)
    ours = train(LabTrainer, LabConfig(**settings, objective="dr_grpo"), folder)
    assert_same_movement(ours, stock)
    assert caplog.text.count("carries a recurrent state through padding") == 1


def test_one_rank_that_drew_decides_for_all() -> None:
    flags: Any = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda mine: torch.cat([mine, torch.ones_like(mine)])
    )
    assert RandomnessWatch(torch.device("cpu")).drawn_anywhere(flags)
