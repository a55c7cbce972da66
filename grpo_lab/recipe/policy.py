"""Checks of a model without its weights, as the trainer makes them: before anything is loaded or evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import GenerationConfig

from grpo_lab.engines.weights.adapter import lora_of
from grpo_lab.io import is_local, looks_local
from grpo_lab.recipe.data import not_asked_again
from grpo_lab.recipe.models import load_model, loading, lora_config, model_class
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.trainer.exactness.shared_prompts import refuse_unshared, why_unshared
from grpo_lab.trainer.generation.in_step import refuse_generation


def meta_model(section: ModelSection) -> Any:
    """Return the section's model without weights (on torch's meta device, with its LoRA), or text that says why it
    cannot be made. The configuration of a hub name is taken from the cache, or from the hub."""
    from peft import get_peft_model

    if section.path is None:
        with torch.device("meta"):
            model = load_model(section, seed=0)[0]
    else:
        model = _of_path(section.path)
    if isinstance(model, str):
        return model
    if not hasattr(model.config.get_text_config(), "num_attention_heads"):
        return f"{section.name!r} is no transformer"
    with torch.device("meta"):
        if section.lora is None:
            return model
        return get_peft_model(model.to("meta"), lora_config(section))


def _of_path(path: str) -> Any:
    """Return the saved model at ``path`` without weights, or text that says why it cannot be made."""
    if (Path(path) / "adapter_config.json").is_file() or (looks_local(path) and not is_local(path)):
        return f"{path!r} is an adapter, or not here yet"
    try:
        with torch.device("meta"), loading(path):
            kind, config = model_class(path, local_files_only=datasets.config.HF_HUB_OFFLINE)
            return kind.from_config(config)
    except ValueError as error:
        if is_local(path):
            raise
        not_asked_again(error)
        return f"the config of {path!r} is not in the cache, and the hub cannot be asked"


def check_policy(section: ModelSection, config: Any) -> None:
    """Raise ValueError if a setting in ``config`` asks for what the model does not allow, as the trainer would.

    Three settings are checked: ``update.share_prompts: on`` (prompts that cannot be shared), ``rollout.sync: adapter``
    (an adapter that cannot be sent alone) and ``rollout.generate``. Nothing is checked if the model's configuration is
    not known here.
    """
    settings = config.lab_settings
    shares = settings.update.share_prompts == "on"
    sends = config.use_vllm and settings.rollout.sync == "adapter"
    generates = settings.rollout.generate in ("groups", "compiled")
    if not (shares or sends or generates):
        return
    model = meta_model(section)
    if isinstance(model, str):
        return
    model.train()
    if sends:
        lora_of(model)
    if shares:
        attention = (config.model_init_kwargs or {}).get("attn_implementation")
        refuse_unshared(why_unshared(model, attention))
    if generates:
        asked = GenerationConfig(max_new_tokens=config.max_completion_length or 1)
        refuse_generation(settings.rollout.generate, model, asked)
