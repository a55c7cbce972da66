"""A checkpoint whose tensors have other names than the model's own.

transformers saves some models (LLaVA and other vision models) under the names of their first release and maps them when it reads them by
``from_pretrained``; ``Trainer`` reads by the model's own names, finds none, warns, and goes on from the weights that the run began with.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel

from grpo_lab.trainer.trl_bridge import is_critics


def load_other_names(trainer: Any, checkpoint: str) -> None:
    """Load a model's own tensors by ``from_pretrained`` where ``Trainer`` has passed any of them over; nothing where it has them all."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return  # adapters; formats of their own
    state, names = model.state_dict(), saved_names(Path(checkpoint))
    there = {state[name].data_ptr() for name in names & state.keys()}  # a tied one is saved once
    passed_over = [name for name, one in state.items() if one.data_ptr() not in there and not is_critics(name)]
    if not names or not passed_over:
        return
    read: Any = type(model).from_pretrained
    whole, found = read(checkpoint, dtype="auto", output_loading_info=True)
    refuse_lacking(found["missing_keys"], (), len(state))
    model.load_state_dict(whole.state_dict(), strict=False)


def refuse_lacking(missing: Collection[str], unexpected: Collection[str], of: int) -> None:
    """A tensor that a checkpoint lacks would stay as the start model has it.

    Raises:
        ValueError: it lacks some, and has not the same under other names (LLaVA's).
    """
    if len(missing) > len(unexpected):
        raise ValueError(
            f"`resume_from_checkpoint`: the checkpoint lacks {len(missing)} of {of} tensors of the model ({min(missing)}, …): it is not "
            "whole, or of another model; take another one (renamed, this one is passed over)"
        )


def saved_names(checkpoint: Path) -> set[str]:
    """Names of the tensors that a checkpoint's safetensors files hold."""
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    one = checkpoint / "model.safetensors"
    if not one.is_file():
        return set()
    with safe_open(one, framework="pt") as file:
        return set(file.keys())


__all__ = ["load_other_names", "refuse_lacking", "saved_names"]
