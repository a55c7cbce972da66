"""What a thinking budget does to a model that thinks: budgets 0, 8, 32 and none, on transformers and on vLLM.

A tiny Qwen2 is taught to solve word problems between <think> and </think> (supervised, a few minutes on one core); then
every completion of held-out problems is checked: it obeys the budget, and it ends in an answer.

    python scripts/thinking_budget_table.py [--folder runs/thinking]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from grpo_lab.data import word_problems
from grpo_lab.engines.generators import (
    Completion,
    CompletionGenerator,
    TransformersGenerator,
    VllmGenerator,
    render_prompt,
)
from grpo_lab.engines.thinking_budget import BudgetedGenerator, ThinkingBudget, tokens_of_thinking
from grpo_lab.rewards import AccuracyReward

TEXT = "\n</think>\n"
LENGTH = 64
SETTINGS: dict[str, Any] = {"steps": (1, 3), "largest": 20, "template": "chat", "think": True}


def teach(folder: Path) -> None:
    from grpo_lab.testing import tiny_model
    from grpo_lab.trainer.supervised.methods import cold_start

    model, tokenizer = tiny_model(
        architecture="qwen2",
        hidden_size=96,
        num_heads=3,
        num_layers=2,
        max_positions=256,
        initializer_range=0.06,
        seed=0,
    )
    arguments = {
        "max_steps": 500, "per_device_train_batch_size": 64, "learning_rate": 5e-3, "lr_scheduler_type": "linear",
        "warmup_steps": 30, "adam_beta2": 0.95, "weight_decay": 0.01, "max_length": 256,
        "gradient_checkpointing": False, "logging_steps": 50, "seed": 0, "use_cpu": True, "bf16": False,
    }  # fmt: skip
    cold_start(model, tokenizer, word_problems(10_000, split="cold_start", **SETTINGS), folder, arguments)
    tokenizer.save_pretrained(folder)


def engines(folder: Path, tokenizer: Any) -> dict[str, CompletionGenerator]:
    from transformers import AutoModelForCausalLM

    from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    own = TransformersGenerator(model, tokenizer, 256, progress=False)
    options = EngineOptions(kv_cache_gib=0.25, max_model_len=256)
    engine = engine_factory(options, trainer_dtype=model.dtype)(model=str(folder), seed=0)
    return {
        "transformers": own,
        "vLLM": VllmGenerator(engine, [tokenizer.eos_token_id], logprobs=True),
    }


def row(
    name: str, budget: int | None, prompts: list[str], made: list[Completion], golds: list[str], tokenizer: Any
) -> str:
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in made]
    scores = AccuracyReward(mode="strict")(completions=texts, solution=golds)
    found = (tokens_of_thinking(prompt, one, tokenizer.decode) for prompt, one in zip(prompts, made, strict=True))
    thinking = [tokens or 0 for tokens in found]
    answered = sum(re.search(r"#### -?\d+$", text) is not None for text in texts)
    cut = sum(completion.was_cut for completion in made)
    obeyed = sum(budget is None or tokens <= budget for tokens in thinking)
    n = len(made)
    return (
        f"| {name} | {'none' if budget is None else budget} | {max(thinking)} | {obeyed}/{n} | {cut / n:.3f} | "
        f"{answered / n:.3f} | "
        f"{sum(score == 1.0 for score in scores) / n:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/thinking"))
    parser.add_argument("--problems", type=int, default=200)
    args = parser.parse_args()
    if not (args.folder / "config.json").is_file():
        teach(args.folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    rows = word_problems(args.problems, split="test", **SETTINGS)
    prompts = [render_prompt(prompt, tokenizer) for prompt in rows["prompt"]]
    ids, texts = [prompt.ids for prompt in prompts], [prompt.text for prompt in prompts]
    print(
        "| engine | budget | longest thinking, tokens | obey the budget | cut | end in an answer | right "
        "|\n|---|---|---|---|---|---|---|"
    )
    how: Any = {"n": 1, "temperature": 1.0, "max_new_tokens": LENGTH, "seed": None}
    for name, generator in engines(args.folder, tokenizer).items():
        for budget in (0, 8, 32, None):
            asked = generator
            if budget is not None:
                limits = ThinkingBudget.for_tokenizer(tokenizer, budget, max_completion_length=LENGTH, text=TEXT)
                asked = BudgetedGenerator(generator, limits)
            made = [completion for (completion,) in asked(ids, **how)]
            print(row(name, budget, texts, made, rows["solution"], tokenizer), flush=True)


if __name__ == "__main__":
    main()
