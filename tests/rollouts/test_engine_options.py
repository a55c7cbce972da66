"""Engine and server settings, and what becomes of them on the command line. No engine is started here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from grpo_lab.engines.vllm.engine import GIB, EngineOptions, rank_seed
from grpo_lab.engines.vllm.server import ServerOptions, server_command, server_environment


def test_cpu_defaults_are_written_out() -> None:
    arguments = EngineOptions().llm_arguments(on_cpu=True, trainer_dtype=torch.float32)
    assert arguments == {
        "enable_prefix_caching": True,
        "dtype": "float32",  # the trainer's, not vLLM's own bfloat16
        "kv_cache_memory_bytes": GIB,
        "block_size": 32,
        "enforce_eager": True,
    }


def test_gpu_defaults_leave_the_choice_to_vllm() -> None:
    arguments = EngineOptions().llm_arguments(on_cpu=False, trainer_dtype=torch.float32)
    assert arguments == {"enable_prefix_caching": True, "dtype": "auto", "enforce_eager": False}


def test_a_recipe_s_word_counts_everywhere() -> None:
    options = EngineOptions.from_mapping(
        {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_gib": 0.5, "block_size": 64, "enforce_eager": False}
    )
    for on_cpu in (True, False):
        assert options.llm_arguments(on_cpu=on_cpu, trainer_dtype=torch.float32) == {
            "enable_prefix_caching": True,
            "dtype": "bfloat16",
            "max_model_len": 512,
            "kv_cache_memory_bytes": GIB // 2,
            "block_size": 64,
            "enforce_eager": False,
        }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtyp": "float32"}, "did you mean 'dtype'"),
        ({"dtype": "float64"}, "not one of"),
        ({"kv_cache_gib": 0}, "must be positive"),
        ({"max_model_len": -1}, "must be positive"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions.from_mapping(settings)


def test_page_size_without_a_kernel_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        EngineOptions(block_size=16).llm_arguments(on_cpu=True)
    assert EngineOptions(block_size=16).llm_arguments(on_cpu=False)["block_size"] == 16


def test_ranks_and_neighbouring_seeds_draw_differently() -> None:
    seeds = [rank_seed(seed, rank) for seed in range(100) for rank in range(64)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_server_command_stays_on_this_machine(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.setenv(name, "1")
    command = server_command(ServerOptions("model", port=8123, engine=EngineOptions(seed=7)), on_cpu=on_cpu)
    text = " ".join(command)
    assert "--host 127.0.0.1 --port 8123 --seed 7" in text
    assert "--logprobs-mode processed_logprobs" in text
    assert ("--weight-transfer-config" in text) is not on_cpu
    assert "--enable-prefix-caching" in text
    assert ("--no-enforce-eager" in text) is not on_cpu
    assert "trust" not in text
    assert "--middleware grpo_lab.engines.vllm.access.Guard --allowed-origins [] --disable-fastapi-docs" in text
    environment = server_environment(ServerOptions("model", allow_hosts=("node7",)), "t" * 43, "/tmp/mine")
    assert environment["VLLM_RPC_BASE_PATH"] == "/tmp/mine"
    assert {"RANK", "VLLM_API_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION"}.isdisjoint(environment)
    assert environment["GRPO_LAB_SERVER_TOKEN"] == "t" * 43
    assert environment["GRPO_LAB_SERVER_HOSTS"] == "127.0.0.1,node7"


def test_port_outside_the_allowed_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1024\.\.65535"):
        ServerOptions("model", port=80)


@pytest.mark.not_fast
def test_rollouts_load_neither_vllm_nor_trl() -> None:
    program = (
        "import sys, pkgutil, importlib, grpo_lab.engines as r\n"
        "for m in pkgutil.iter_modules(r.__path__):\n"
        "    if m.name not in ('compiled', 'generate'):\n"  # made of transformers' cache; who needs it loads it then
        "        importlib.import_module('grpo_lab.engines.' + m.name)\n"
        "bad = {'vllm', 'trl', 'transformers', 'math_verify', 'requests'} & set(sys.modules)\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
