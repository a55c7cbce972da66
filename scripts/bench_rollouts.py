"""Rollouts: transformers' ``generate`` against vLLM, and one request with n = G against G requests, in one run.

    python scripts/bench_rollouts.py                 # CPU, about 3 minutes on two cores
    python scripts/bench_rollouts.py --shape 0.5B    # on a GPU

All ways use the same model, the same prompts (with the token lengths of real GSM8K questions) and the same number of
tokens for every completion, so that they do equal work. Each way runs once to warm up, and then ``--repeats`` times in
turn with the others. Printed are medians: seconds, new tokens a second, the speed-up against transformers, and the
number of prompt tokens computed. vLLM's are counted in its own scheduler; transformers computes every padded prompt G
times.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_shapes import build
from bench_tables import spread
from bench_update_sides import LENGTHS
from transformers import AutoModelForCausalLM

from grpo_lab.batch import padded
from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory

GROUP = 8


def questions(count: int, vocabulary: int) -> list[list[int]]:
    """Return ``count`` prompts of random tokens, each as long as a real GSM8K question."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(20, vocabulary, (LENGTHS[i][0],), generator=draw).tolist() for i in range(count)]


class PromptTokens:
    """Counts the tokens that vLLM's scheduler has the engine compute."""

    def __init__(self, engine: Any) -> None:
        self.computed = 0
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = counting

    def take(self, decoded: int) -> int:
        """Return the number of prompt tokens computed since the last call: all tokens without the ``decoded`` ones."""
        computed = self.computed
        self.computed = 0
        return computed - decoded


def with_transformers(model: Any, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    """Return a function that completes all prompts by ``generate``, and returns the number of prompt tokens
    computed."""

    def generate() -> int:
        rows = [ids for ids in prompts for _ in range(GROUP)]
        ids, mask = padded(rows, 0, model.device, left=True)
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0,
                min_new_tokens=tokens, max_new_tokens=tokens,
            )  # fmt: skip
        assert out.shape[1] == ids.shape[1] + tokens
        return ids.numel()

    return generate


def with_engine(
    engine: Any, counter: PromptTokens, prompts: list[list[int]], tokens: int, folded: bool
) -> Callable[[], int]:
    """Return a function that completes all prompts by vLLM, and returns the number of prompt tokens computed.
    ``folded``: our engine makes one request with n = G of G equal prompts; else vLLM gets G requests."""
    from vllm import SamplingParams

    def generate() -> int:
        parameters = SamplingParams(n=1, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        rows = [{"prompt_token_ids": ids} for ids in prompts for _ in range(GROUP)]
        engine.reset_prefix_cache()
        if folded:
            outputs = engine.generate(rows, parameters)
        else:
            outputs = engine.llm.generate(rows, sampling_params=parameters, use_tqdm=False)
        made = [output.outputs[0].token_ids for output in outputs]
        assert all(len(ids) == tokens for ids in made)
        return counter.take(sum(len(ids) - 1 for ids in made))

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="10M", choices=["10M", "0.5B", "1.5B"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="of every completion")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        size = build(Path(folder), args.shape)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        prompts = questions(args.prompts, model.config.vocab_size)
        ways = {"transformers generate": with_transformers(model, prompts, args.tokens)}
        for caching in (False, True):
            options = EngineOptions(prefix_caching=caching, max_model_len=1024, kv_cache_gib=0.5)
            engine = engine_factory(options, trainer_dtype=dtype)(model=folder, skip_tokenizer_init=True, seed=0)
            counter = PromptTokens(engine)
            for folded in (False, True):
                name = f"vLLM, {'n = G' if folded else 'G requests'}, prefix caching {'on' if caching else 'off'}"
                ways[name] = with_engine(engine, counter, prompts, args.tokens, folded)
        report(size, args, prompts, measured(ways, args.repeats))


def measured(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, tuple[list[float], int]]:
    """Run all ways in turn, once to warm up and ``repeats`` times; return name → (seconds of each repeat, prompt tokens
    computed)."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    prefill: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            prefill[name] = way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: (seconds[name], prefill[name]) for name in ways}


def report(
    size: int, args: argparse.Namespace, prompts: list[list[int]], found: dict[str, tuple[list[float], int]]
) -> None:
    """Print the machine, the sizes, and a line of the table for each way."""
    made = len(prompts) * GROUP * args.tokens
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(
        f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}; Qwen2 of {size / 1e6:.1f} M parameters"
    )
    print(
        f"{len(prompts)} prompts x {GROUP} completions x {args.tokens} tokens; {sum(map(len, prompts))} prompt tokens\n"
    )
    print("| way | seconds | new tokens/s | against transformers | prompt tokens computed |\n|---|---|---|---|---|")
    slowest = found["transformers generate"][0]
    for name, (seconds, prefill) in found.items():
        faster = spread([slow / fast for slow, fast in zip(slowest, seconds, strict=True)])
        rate = made / statistics.median(seconds)
        print(f"| {name} | {spread(seconds)} | {rate:,.0f} | {faster} | {prefill:,} |")


if __name__ == "__main__":
    main()
