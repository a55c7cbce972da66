"""The part of a completion that answers: inside its last ``<answer>``, else its last fenced block, else all of it."""

from __future__ import annotations

from grpo_lab.rewards.program_text import fenced_blocks

_OPEN, _CLOSE = "<answer>", "</answer>"


def answer_block(completion: str) -> str:
    """What stands before the last ``</think>`` is not looked at; an ``<answer>`` that is never closed reaches to the end."""
    text = completion.rpartition("</think>")[2]
    _, marked, answer = text.rpartition(_OPEN)
    if marked:
        return answer.partition(_CLOSE)[0]
    blocks = fenced_blocks(text)
    return blocks[-1][1] if blocks else text


__all__ = ["answer_block"]
