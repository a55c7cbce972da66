"""Rollouts a second with slow tools: TRL's loop over turns against ``rollout.turns``, on vLLM's engine in the process.

    python scripts/bench_turns.py                    # two idle cores, 2 minutes: 32 trajectories, 8 turns at most
    python scripts/bench_turns.py --tool async       # the same tool as a coroutine
    python scripts/bench_turns.py --tokenizer /work/shared/data/tokenizers/qwen3

A random model of Qwen3's architecture in float32 samples at temperature 1. Each request has a random generator of its
own (vLLM's ``seed``), so that both sides draw the same tokens. Such a model writes no words, so its tool calls are read
from its tokens by a rule, the same for both sides: three turns of four call a tool. The tool sleeps 0.05 to 1 s, seldom
long (0.05 + 0.95 u⁴, with u from a hash of the call). Everything else is the trainers' own: prompts, template, tokens
of the answers, masks.

TRL's ``_generate`` is timed in the second batch; the first one warms up. Printed are seconds and rollouts a second of
each side, their quotient, and how many trajectories are equal in messages, tokens and mask.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import trl
from datasets import Dataset
from trl.trainer import grpo_trainer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import tiny_model

TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
GROUP = 2
stock_parse = grpo_trainer.parse_response


def seconds_of(a: int, b: int) -> float:
    """Return the seconds that a call takes: 0.05 to 1, seldom long, and always the same for the same arguments."""
    share = zlib.crc32(f"{a},{b}".encode()) / 2**32
    return 0.05 + 0.95 * share**4


def look_up(a: int, b: int) -> int:
    """Multiplies two whole numbers, slowly.

    Args:
        a: first factor
        b: second factor

    Returns:
        The product.
    """
    time.sleep(seconds_of(a, b))
    return a * b


async def look_up_async(a: int, b: int) -> int:
    """Multiplies two whole numbers, slowly.

    Args:
        a: first factor
        b: second factor

    Returns:
        The product.
    """
    await asyncio.sleep(seconds_of(a, b))
    return a * b


TOOLS = {"sync": look_up, "async": look_up_async}


def parser_of(tool: str) -> Any:
    """Return a function in the place of TRL's ``parse_response``, which reads a turn's message, with its call of a
    tool, from the turn's tokens."""

    def parsed(tokenizer: Any, ids: list[int], prefix: list[int], **named: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids)
        if "<tool_call>" in text:  # text of the template, which the trainer checks at first
            return stock_parse(tokenizer, ids, prefix=prefix, **named)  # type: ignore[no-any-return]
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if sum(ids) % 4:
            function = {"name": TOOLS[tool].__name__, "arguments": {"a": sum(ids) % 1000, "b": len(prefix)}}
            said["tool_calls"] = [{"type": "function", "function": function}]
        return said

    return parsed


class Timed(LabTrainer):
    """Trainer that notes how long each generation takes, and what it returns: ``batches`` holds a pair for each."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.batches: list[tuple[float, list[Any]]] = []
        super().__init__(*args, **named)

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.perf_counter()
        made = super()._generate(prompts)
        _, ids, mask, messages, *_ = made
        self.batches.append((time.perf_counter() - start, list(zip(ids, mask, messages, strict=True))))
        return made


def saved_model(folder: Path, tokenizer: str | None) -> Path:
    """Save a small random Qwen3 with Qwen3's chat template into ``folder``; 4% of the tokens end a turn."""
    model, words = tiny_model(
        "qwen3", hidden_size=64, num_heads=2, num_layers=2, max_positions=4096, initializer_range=0.2,
        tokenizer=tokenizer,
    )  # fmt: skip
    vocabulary = model.config.vocab_size
    model.generation_config.eos_token_id = [words.eos_token_id, *range(100, 100 + vocabulary // 25)]
    words.chat_template = TEMPLATE
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def generated(model: Path, out: Path, asked: argparse.Namespace, turns: Any) -> tuple[float, list[Any]]:
    """Train two batches, and return seconds and trajectories of the second one. ``turns``: the settings
    ``rollout.turns``; None: TRL's own loop."""
    rollout: dict[str, Any] = {"verify_every": 0, "engine": {"kv_cache_gib": 0.5, "max_model_len": 2048}}
    if turns is not None:
        rollout["turns"] = turns
    config = LabConfig(
        output_dir=str(out), objective="dr_grpo", use_vllm=True, vllm_mode="colocate", rollout=rollout,
        vllm_importance_sampling_correction=False, per_device_train_batch_size=asked.trajectories,
        num_generations=GROUP, max_completion_length=1500, max_tool_calling_iterations=asked.turns - 1, max_steps=2,
        learning_rate=0.0, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    places = range(2 * asked.trajectories // GROUP)
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {n} times 7?"}] for n in places]})
    trainer = Timed(str(model), lambda prompts, **_: [0.0] * len(prompts), config, rows, tools=[TOOLS[asked.tool]])
    trainer.vllm_generation.generation_kwargs["seed"] = 7
    trainer.train()
    return trainer.batches[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8, help="most turns of a trajectory")
    parser.add_argument("--tool", choices=sorted(TOOLS), default="sync")
    parser.add_argument("--tokenizer", help="folder of a tokenizer; default: one made from code")
    asked = parser.parse_args()
    grpo_trainer.parse_response = parser_of(asked.tool)
    with tempfile.TemporaryDirectory() as folder:
        model = saved_model(Path(folder) / "model", asked.tokenizer)
        sides = {
            name: generated(model, Path(folder) / name, asked, turns)
            for name, turns in (("TRL's loop", None), ("rollout.turns", {}))
        }
    for name, (seconds, rows) in sides.items():
        calls = sum(message["role"] == "tool" for _, _, messages in rows for message in messages)
        own = sum(sum(mask) for _, mask, _ in rows)
        print(f"{name:15} {seconds:7.2f} s   {len(rows) / seconds:6.2f} rollouts/s   {calls} calls, {own} own tokens")
    (slow, stock), (fast, ours) = sides.values()
    equal = sum(one == other for one, other in zip(ours, stock, strict=True))
    print(f"{slow / fast:.1f} times as many rollouts a second; {equal} of {len(stock)} trajectories equal")


if __name__ == "__main__":
    main()
