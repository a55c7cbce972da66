"""The text of a completion or a prompt, whichever of TRL's two shapes it comes in.

The reasoning in a model's text: what stands in ``<think>…</think>``, else the whole text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def completion_text(completion: Any) -> str:
    """A plain string as it is; of a message list the last assistant message (its text parts, when it has parts)."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, dict) for message in completion):
        said = [message for message in completion if message.get("role", "assistant") == "assistant"]
        return _content_text(said[-1].get("content")) if said else ""
    raise ValueError(
        f"a completion must be a string or a list of message dicts; got {type(completion).__name__}: {completion!r:.200}"
    )


def prompt_text(prompt: Any) -> str:
    """A plain string as it is; of a message list all that is said in it."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content_text(message.get("content")) for message in prompt or ())


def _content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, dict | str) for part in content):
        return "".join(_part_text(part) for part in content)
    raise ValueError(
        f"a message's content must be a string, None or a list of parts; got {type(content).__name__}: {content!r:.200}"
    )


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if part.get("type", "text") == "text" else None
    return text if isinstance(text, str) else ""


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
