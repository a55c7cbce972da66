"""A model on disk, or on the hub: loaded, and measured on held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_lab.evaluation import EvaluationResult, evaluate
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.recipe import EvaluationSection


def load_saved_model(model: str, use_cpu: bool) -> tuple[Any, Any]:
    """A saved model (LoRA adapters too) and its tokenizer, on the accelerator where there is one.

    Raises: ValueError where there is no such model.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind: Any = AutoPeftModelForCausalLM if (Path(model) / "adapter_config.json").is_file() else AutoModelForCausalLM
    device = "cpu" if use_cpu or not torch.cuda.is_available() else "cuda"
    with parts.loading(model):
        loaded = kind.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    return loaded.to(device).eval(), tokenizer


def evaluate_saved_model(
    model: str, section: EvaluationSection, target: Path, *, use_cpu: bool, max_new_tokens: int, seed: int
) -> EvaluationResult:
    """Held-out accuracy by a recipe's ``evaluation``, written to ``target``.

    Args: max_new_tokens: where ``section`` does not say.
    """
    loaded, tokenizer = load_saved_model(model, use_cpu)
    result = evaluate(
        loaded,
        tokenizer,
        parts.load_rows(section.data, "evaluation.data"),
        reward=parts.build_reward(section.reward, "evaluation.reward"),
        max_new_tokens=section.max_new_tokens or max_new_tokens,
        batch_size=section.batch_size,
        n_samples=section.n_samples,
        temperature=section.temperature,
        seed=seed,
    )
    result.write(target)
    return result
