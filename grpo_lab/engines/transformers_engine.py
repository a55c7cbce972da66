"""`generate(prompt_ids, max_new_tokens)` on a transformers model, for a thinking budget without vLLM.

Prompts of a batch are padded to the longest, and a batch runs until its longest completion ends. Rows are therefore
taken in order of their prompt's length, `batch_size` at a time, and put back in their own order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from grpo_lab.engines.thinking_budget import Generate
from grpo_lab.finite import FiniteScores


def transformers_generate(
    model: Any, *, pad_id: int, eos_ids: Collection[int], batch_size: int = 64, **sampling: Any
) -> Generate:
    """Sampler over a causal LM; `sampling` goes to `model.generate` (temperature, top_p, ...).

    No log-probs are returned: the trainer computes its own on this path. Inside a trainer, `model` is the unwrapped
    model within TRL's `unwrap_model_for_generation`.
    """

    def generate(prompt_ids: list[list[int]], max_new_tokens: int) -> tuple[list[list[int]], None]:
        order = sorted(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        completions: list[list[int]] = [[] for _ in prompt_ids]
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids, mask = left_padded([prompt_ids[row] for row in rows], pad_id, model.device)
            with torch.no_grad():
                answer = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=max_new_tokens,
                    do_sample=True,
                    pad_token_id=pad_id,
                    eos_token_id=sorted(eos_ids),
                    logits_processor=[FiniteScores()],
                    **sampling,
                )
            for row, whole in zip(rows, answer[:, ids.shape[1] :].tolist(), strict=True):
                completions[row] = until_end(whole, eos_ids)
        return completions, None

    return generate


def left_padded(rows: Sequence[Sequence[int]], pad_id: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged rows -> (ids [B, T], attention mask [B, T]), padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def until_end(ids: Sequence[int], eos_ids: Collection[int]) -> list[int]:
    """The ids up to and with the first end-of-text token; padding stands behind it."""
    for position, token in enumerate(ids):
        if token in eos_ids:
            return list(ids[: position + 1])
    return list(ids)
