"""Shared prompts: the forward and backward of one group, its prompt computed once against eight times.

Same weights, rows and loss (a fixed weight a log-prob) through the update's own functions; gradients are compared in
every cell. Sides take turns, the first pass is left out, medians of the rest.

    python scripts/bench_shared_prompts.py            # an idle core
    python scripts/bench_shared_prompts.py --tiny     # does it run: two cells of a tiny model
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from grpo_lab.trainer import trl_bridge

GROUP = 8


def network(hidden: int, layers: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=max(hidden // 128, 1), max_position_embeddings=4096,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def rows(prompt: int, completion: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and positions of a group; completions of half to the whole length."""
    ids = torch.randint(vocabulary, (GROUP, prompt + completion))
    ids[:, :prompt] = ids[0, :prompt]
    labels = ids.clone()
    labels[:, :prompt] = -100
    for row, end in enumerate(torch.linspace(completion // 2, completion, GROUP).long().tolist()):
        labels[row, prompt + end :] = -100
    return ids, labels, torch.arange(ids.size(1)).expand_as(ids)


def timed(model: Any, log_probs: Callable[[], Tensor]) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    start = time.perf_counter()
    found = log_probs()
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * weights).sum().backward()
    return time.perf_counter() - start, [p.grad.clone() for p in model.parameters()]


def cell(model: Any, prompt: int, completion: int, passes: int) -> str:
    trainer: Any = SimpleNamespace(accelerator=Accelerator(cpu=True), model=model)
    ids, labels, positions = rows(prompt, completion, model.config.vocab_size)

    def shared() -> Tensor:
        packed = trl_bridge.packed_row(ids, labels, positions)
        assert packed is not None
        return trl_bridge.shared_log_probs(trainer, model, packed, ids.shape)[0]

    def unshared() -> Tensor:
        return trl_bridge.completion_log_probs(trainer, model, ids, labels, positions)[0]

    times: dict[Any, list[float]] = {shared: [], unshared: []}
    gradients: dict[Any, list[Tensor]] = {}
    for _ in range(passes + 1):
        for side in times:
            seconds, gradients[side] = timed(model, side)
            times[side].append(seconds)
    ours, theirs = (statistics.median(times[side][1:]) for side in (shared, unshared))
    gap = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients[shared], gradients[unshared], strict=True)
    )
    return f"| {prompt} | {completion} | {theirs:.3f} | {ours:.3f} | {theirs / ours:.2f} | {gap:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    model = network(64, 2, 200) if tiny else network(256, 6, 8000)
    model.set_attn_implementation(trl_bridge.SHARED_PROMPT)  # `sdpa` itself for unshared rows
    print(f"G {GROUP}, {sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads\n")
    print("| prompt | completion | unshared, s | shared, s | ratio | gradients apart |\n|---|---|---|---|---|---|")
    for prompt in (16, 64) if tiny else (64, 256, 1024):
        print(cell(model, prompt, 16 if tiny else 128, passes=1 if tiny else 5), flush=True)


if __name__ == "__main__":
    main()
