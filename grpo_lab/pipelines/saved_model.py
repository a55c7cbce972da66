"""A model on disk, or on the hub: loaded, and measured on held-out rows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.evaluation import EvaluationResult, EvaluationStopped, evaluate
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.recipe import EvaluationSection
from grpo_lab.pipelines.rows import every_argument, load_rows
from grpo_lab.pipelines.tokenizer_files import holds_tokenizer, refuse_no_tokenizer

log = logging.getLogger(__name__)


def load_saved_model(model: str, use_cpu: bool, tokenizer: str | None = None) -> tuple[Any, Any]:
    """A saved model (LoRA adapters too) and its tokenizer, on the accelerator where there is one.

    Args: tokenizer: another tokenizer's folder or hub name. Default: the model's own; an adapter without one has its base's.
    Raises: ValueError where there is no such model, no base of an adapter, or no tokenizer.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    _check_folder(model)
    base = _base_of_adapter(model)
    device = "cpu" if use_cpu or not torch.cuda.is_available() else "cuda"
    words = tokenizer or _tokenizer_of(model, base)
    if base is not None:
        _check_base(model, base)
    with parts.loading(words):
        loaded_tokenizer = AutoTokenizer.from_pretrained(words)
    with parts.loading(model):
        kind: Any = parts.model_class(model)[0] if base is None else AutoPeftModelForCausalLM
        loaded = kind.from_pretrained(model)
    return loaded.to(device).eval(), loaded_tokenizer


def _check_folder(model: str) -> None:
    folder = Path(model)
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"{model!r} is no local folder with a saved model: it holds no config.json or adapter_config.json"
        )


def _base_of_adapter(model: str) -> str | None:
    """Folder or hub name of the model that the adapter in ``model`` belongs to; None for a whole model."""
    file = Path(model) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} does not name the adapter's `base_model_name_or_path` ({error!r})") from error


def _check_base(adapter: str, base: str) -> None:
    from transformers import AutoConfig

    try:
        with parts.loading(base):
            AutoConfig.from_pretrained(base)
    except ValueError as error:
        raise ValueError(
            f"{adapter!r} is an adapter of {base!r} (adapter_config.json), which cannot be loaded: {error}"
        ) from error


def _tokenizer_of(model: str, base: str | None) -> str:
    """Where the tokenizer is: ``model`` itself, or an adapter's base. ValueError for a folder that holds none."""
    if not Path(model).is_dir() or holds_tokenizer(model):
        return model
    if base is not None:
        log.info("%s holds no tokenizer; taking that of its base, %s", model, base)
        return base
    refuse_no_tokenizer(model)
    return model


def evaluate_saved_model(
    model: str,
    section: EvaluationSection,
    target: Path | None,
    *,
    use_cpu: bool,
    max_new_tokens: int,
    seed: int,
    tokenizer: str | None = None,
) -> EvaluationResult:
    """Held-out accuracy by a recipe's ``evaluation``, written to ``target`` (None: not written).

    Args: max_new_tokens: where ``section`` does not say.
    Raises: EvaluationStopped on Ctrl-C, with what was answered until then written as well.
    """
    rows = load_rows(section.data, "evaluation.data")
    reward = parts.build_reward(section.reward, "evaluation.reward")
    loaded, words = load_saved_model(model, use_cpu, tokenizer)
    stop: EvaluationStopped | None = None
    try:
        result = evaluate(
            loaded,
            words,
            rows,
            reward=reward,
            max_new_tokens=section.max_new_tokens or max_new_tokens,
            batch_size=section.batch_size,
            n_samples=section.n_samples,
            temperature=section.temperature,
            seed=seed,
        )
    except EvaluationStopped as stopped:
        result, stop = stopped.result, stopped
    result = replace(result, settings={**about(model, section), **result.settings})
    if target is not None and result.outcomes:
        result.write(target)
    if stop is not None:
        raise EvaluationStopped(result) from None
    return result


def about(model: str, section: EvaluationSection) -> dict[str, Any]:
    """What a score depends on besides the generation, for `summary.json`: rows with every argument, template, judge."""
    arguments = every_argument(section.data)
    mode = getattr(parts.build_reward(section.reward, "evaluation.reward"), "mode", None)  # the default, too
    judge = {"name": section.reward.name, **({} if mode is None else {"mode": mode}), **section.reward.arguments}
    return {
        "model": model,
        "data": {"loader": section.data.loader, **arguments},
        "template": section.data.template,
        "limit": section.data.limit,
        "mode": mode,
        "judge": judge,
    }
