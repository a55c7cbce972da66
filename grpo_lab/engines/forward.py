"""Log-probs from the model's own forward: the reference for an engine's log-probs, and those of generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_lab.batch import padded

#: Token ids [row][token]; rows may have different lengths.
Rows = Sequence[Sequence[int]]


def forward_logprobs(model: Callable[..., Any], prompt_ids: Rows, completion_ids: Rows) -> list[list[float]]:
    """Compute the log-prob of every completion token under a causal LM, in nats at temperature 1.

    The rows go through the model in one forward, a batch ``[B, T]`` padded on the right, where no token of a row
    attends to padding. The log-softmax is computed in float32. The model must be in evaluation mode, since dropout
    would change the result. Gradients are not switched off here: without ``torch.no_grad`` around the call the forward
    keeps its activations. Under FSDP or ZeRO-3 every rank must call this at the same time.

    Returns:
        Log-probs ``[row][token]``, one for each token of ``completion_ids``.
    """
    rows = [list(p) + list(c) for p, c in zip(prompt_ids, completion_ids, strict=True)]
    device = next(iter(model.parameters())).device  # type: ignore[attr-defined]
    ids, mask = padded(rows, 0, device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    picked = []
    for row, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
        first = len(prompt) - 1
        scores = logits[row, first : first + len(completion)].float().log_softmax(-1)
        tokens = torch.tensor(list(completion), device=device, dtype=torch.long)
        picked.append(scores.gather(-1, tokens[:, None])[:, 0].tolist())
    return picked
