"""The reasoning in a model's text: what stands in ``<think>…</think>``, else the whole text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.rewards.completion import completion_text

__all__ = ["reasoning_in", "reasoning_of"]

_PARSED = ("reasoning_content", "thinking")  # where TRL's response parsing puts what stood between the tags

_OPEN, _CLOSE = "<think>", "</think>"


def reasoning_of(text: str) -> str:
    """All ``<think>…</think>`` contents of ``text``, in order; the whole text where there is no tag.

    Half a block is a block: without its opening tag (many chat templates write that into the prompt) it begins with the
    text, without its closing tag (stopped by the token budget) it ends with it. An empty block is empty reasoning, so that
    reasoning outside the tags is not mistaken for it.
    """
    first_open, first_close = text.find(_OPEN), text.find(_CLOSE)
    if first_open < 0 and first_close < 0:
        return text
    if first_close >= 0 and not 0 <= first_open < first_close:
        text = _OPEN + text
    blocks = [after.split(_CLOSE, 1)[0] for after in text.split(_OPEN)[1:]]
    return "\n".join(blocks)


def reasoning_in(completion: Any) -> str:
    """The reasoning of a completion in either of TRL's shapes: a string, or messages, parsed or not."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], Mapping):
        for key in _PARSED:
            if isinstance(completion[-1].get(key), str):
                return str(completion[-1][key])
    return reasoning_of(completion_text(completion))
