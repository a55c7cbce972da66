"""What of a LoRA goes to an engine by itself, what is refused, and its files: without an engine."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo_lab import LabConfig
from grpo_lab.engines.vllm.engine import LORA_RANKS, lora_arguments
from grpo_lab.engines.weights.adapter import AdapterFiles, adapter_tensors, lora_of, max_rank
from grpo_lab.engines.weights.proof import PROBE_TOKENS, cached_prompt
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.generation.trl_engine import engine_class


def adapted(**changes: Any) -> Any:
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(tiny_model("qwen2")[0], LoraConfig(**{**given, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, r"`modules_to_save` of LoRA \(\['lm_head'\]\)"),
        ({"use_dora": True}, r"`use_dora` of LoRA \(True\)"),
        ({"bias": "lora_only"}, r"`bias` of LoRA \('lora_only'\)"),
        ({"lora_bias": True}, r"`lora_bias` of LoRA"),
        ({"rank_pattern": {"q_proj": 8}}, r"`rank_pattern` of LoRA"),  # vLLM scales all by lora_alpha / r
        ({"alpha_pattern": {"q_proj": 8}}, r"`alpha_pattern` of LoRA"),
        ({"trainable_token_indices": [1, 2]}, r"`trainable_token_indices` of LoRA"),
        ({"init_lora_weights": "pissa"}, r"`init_lora_weights` 'pissa' changes the base weights"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"the adapter is on model\.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"the adapter is on lm_head"),
        ({"r": 513}, r"a rank of at most 512, got 513"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"`rollout\.sync: adapter`.*{said}.*`rollout\.sync: merged`"):
        lora_of(adapted(**changes))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("changes", "right_where_tied"),
    [
        ({"trainable_token_indices": [1, 2, 3]}, True),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, True),
        ({"modules_to_save": ["norm"]}, True),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "lm_head"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"trainable_token_indices": {"lm_head": [1, 2]}}, False),
    ],
)
def test_merged_weights_are_those_of_the_model_or_refused(
    tied: bool, changes: dict[str, Any], right_where_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine takes them, which ties head and embedding where the config says so: trained tokens were sent under
    names that no engine knows, and an untied head was met after the first step."""
    given = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = get_peft_model(tiny_model("qwen2", tie_embeddings=tied)[0], LoraConfig(**{**given, **changes})).eval()
    engine = tiny_model("qwen2", tie_embeddings=tied)[0].eval()
    table = dict(engine.named_parameters())
    kind = engine_class(LabConfig(use_cpu=True).lab_settings.rollout, None)
    monkeypatch.setattr("grpo_lab.trainer.generation.trl_engine.start_engine", lambda *_: None)
    sent = object.__new__(kind)
    sent.model, sent.mode = model, "colocate"
    sent._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: contextlib.nullcontext())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, tensor in sent._iter_named_params():
            if name in table or not tied:
                table[name].copy_(tensor)
        alike = torch.allclose(engine(ids).logits, model(ids).logits, atol=1e-4)
    assert alike == (right_where_tied or not tied)
    with contextlib.nullcontext() if alike else pytest.raises(ValueError, match=r"ties .*`ensure_weight_tying: true`"):
        sent._init_vllm()


def test_several_adapters_none_and_no_lora_are_refused() -> None:
    from peft import IA3Config

    with pytest.raises(ValueError, match="the model has no adapter: give a `peft_config`"):
        lora_of(tiny_model("qwen2")[0])
    two = adapted()
    two.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))
    assert lora_of(two) == ("default", 4)  # as TRL's copy for the reference: there, and not active
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"active are \['default', 'other'\]: activate one"):
        lora_of(two)
    other = get_peft_model(tiny_model("qwen2")[0], IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"serves LoRA, and the adapter is a IA3Config"):
        lora_of(other)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"lora_dropout": 0.1},
        {"target_modules": "all-linear"},
    ],
)
def test_a_plain_lora_is_served(changes: dict[str, Any]) -> None:
    assert lora_of(adapted(**changes)) == ("default", 4)


def test_the_next_rank_that_vllm_has_is_asked_for() -> None:
    assert [max_rank(rank) for rank in (1, 2, 8, 9, 320, 321)] == [1, 8, 8, 16, 320, 512]
    assert lora_arguments(None) == {}  # an engine of merged weights is started as ever
    assert lora_arguments(8) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    assert list(LORA_RANKS) == sorted(LORA_RANKS)


def test_each_version_has_a_folder_of_its_own_and_the_newest_two_stay() -> None:
    model = adapted()
    files = AdapterFiles(model)
    folder = files.folder
    for number in (1, 2, 3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(float(number))
        version = files.write(model, adapter_tensors(model.named_parameters(), "default"))
        assert (version.number, version.name) == (number, f"{files.name}-v{number}")
        assert version.folder == folder / f"v{number}"
    assert sorted(path.name for path in folder.iterdir()) == ["v2", "v3"]  # nothing half written beside them
    kept = {number: load_file(folder / f"v{number}" / "adapter_model.safetensors") for number in (2, 3)}
    for number, tensors in kept.items():
        assert len(tensors) == 2 * 2 * 2  # layers, modules, A and B
        assert all((tensor == number).all() for name, tensor in tensors.items() if "lora_B" in name)
    assert folder.stat().st_mode & 0o077 == 0
    del files
    assert not folder.exists()


def test_an_adapter_of_another_name_lies_in_the_same_place() -> None:
    model = adapted()
    model.add_adapter("mine", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("mine")
    files = AdapterFiles(model)
    tensors = adapter_tensors(model.named_parameters(), files.adapter)
    version = files.write(model, tensors)
    assert {path.name for path in version.folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    saved = load_file(version.folder / "adapter_model.safetensors")
    assert {name.replace(".weight", ".mine.weight") for name in saved} == set(tensors)


def test_a_model_that_shows_no_adapter_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"shows no tensors of the adapter 'default'"):
        adapter_tensors(tiny_model("qwen2")[0].named_parameters(), "default")


def test_the_probes_prompt_is_longer_than_two_pages() -> None:
    prompt = cached_prompt([5, 6, 7], 32, 128)
    assert len(prompt) == 65
    assert prompt[:7] == [5, 6, 7, 5, 6, 7, 5]
    assert len(cached_prompt(list(range(200)), 32, 256)) == 65
    assert len(cached_prompt([5], 32, 40)) == 40 - PROBE_TOKENS  # what fits


@pytest.mark.not_fast(cases="changes0-`rollout\\\\.sync` has an effect only with `use_vllm: true`")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_vllm": False}, r"`rollout\.sync` has an effect only with `use_vllm: true`"),
        ({"vllm_enable_sleep_mode": True}, r"`rollout\.sync: adapter` sends no base weights"),
        (
            {"vllm_mode": "server", "rollout": {"sync": "adapter", "server": {"weights": "nccl"}}},
            r"`rollout\.server\.weights` is 'nccl'",
        ),
        ({"rollout": {"sync": "adaptor"}}, r"`rollout\.sync`.*adaptor"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"use_vllm": True, "rollout": {"sync": "adapter"}, "objective": "dr_grpo", "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=said):
        LabConfig(str(tmp_path), **{**given, **changes})


def test_merged_is_the_default(tmp_path: Path) -> None:
    assert LabConfig(str(tmp_path), use_cpu=True).lab_settings.rollout.sync == "merged"


@pytest.mark.skipif(find_spec("vllm") is None, reason="TRL's client of a server asks for vLLM")
@pytest.mark.parametrize(
    ("lora", "replicas", "said"),
    [
        (None, 1, r"takes no adapters: start it with `grpo-lab serve .* --max-lora-rank 16`"),
        ({"max_lora_rank": 8, "max_loras": 2}, 1, r"takes adapters of a rank of at most 8: .* --max-lora-rank 16`"),
        ({"max_lora_rank": 16, "max_loras": 1}, 1, r"holds 1 adapter .* needs 2"),
        ({"max_lora_rank": 16, "max_loras": 2}, 2, r"has 2 replicas"),
    ],
)
def test_a_server_that_cannot_take_it_is_told_how_to_be_started(lora: Any, replicas: int, said: str) -> None:
    from grpo_lab.trainer.generation.server_client import refuse_without_lora

    server = {"lora_config": lora, "parallel_config": {"data_parallel_size": replicas}}
    with pytest.raises(ValueError, match=rf"`rollout\.sync: adapter`: the vLLM server at http://x {said}"):
        refuse_without_lora(16, server, "http://x")
    refuse_without_lora(16, {"lora_config": {"max_lora_rank": 16, "max_loras": 2}}, "http://x")
