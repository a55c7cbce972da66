"""Section about completions without an engine, 64 rows of 8 prompts, in three ways: transformers' own ``generate``,
ours by groups, and ours in compiled forwards. The second call of each is timed, since the compiled way compiles in its
first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench_shapes import config_of
from bench_update_sides import synchronize
from transformers import Qwen2ForCausalLM

from gpu_checks.section import Row, Setting, faster
from grpo_lab.engines.compiled import CompiledGenerate
from grpo_lab.engines.generate import generate_by_groups
from grpo_lab.engines.generators import plain_generation_config

GROUPS, GROUP, PROMPT = 8, 8, 64


def section(setting: Setting) -> Iterator[Row]:
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = Qwen2ForCausalLM(config_of("tiny" if setting.tiny else "0.5B")).eval()
    model.to(torch.bfloat16 if setting.gpu else torch.float32)
    stock: Any = model.generate
    ways: dict[str, Callable[..., Any]] = {"stock": stock, "groups": partial(generate_by_groups, stock, model)}
    if setting.gpu:
        ways["compiled"] = partial(CompiledGenerate(), stock, model)
    tokens = 16 if setting.tiny else 128
    seconds = {}
    for name, generate in ways.items():
        first, seconds[name] = (seconds_of(generate, model, tokens) for _ in range(2))
        yield {"side": name, "first call s": first, "s": seconds[name], "ms a token": 1000 * seconds[name] / tokens}
    for name in list(ways)[1:]:
        yield faster(setting, f"decoding, stock over {name}", seconds["stock"], seconds[name])


def seconds_of(generate: Callable[..., Any], model: Qwen2ForCausalLM, tokens: int) -> float:
    """Return the seconds of one call in which every row gets ``tokens`` tokens."""
    ids = torch.randint(2, 100, (GROUPS, PROMPT), device=model.device).repeat_interleave(GROUP, dim=0)
    config = plain_generation_config(1.0, tokens, [], 0)
    synchronize()
    begun = time.perf_counter()
    with torch.no_grad():
        generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    synchronize()
    return time.perf_counter() - begun
