"""The text of a completion or a prompt, whichever of TRL's two shapes it comes in."""

from __future__ import annotations

from collections.abc import Sequence
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
