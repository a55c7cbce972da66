"""Messages to be shown: the question of a prompt, and a completion in turns, which an outcome keeps as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

SHOWN_OF_A_TURN = 60
"""Characters of a turn's calls, and of what the tools said, in its heading."""


def question_in(prompt: Any) -> str:
    """Return what a reader wants to see of a prompt: a string itself, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message["role"] == "user"] or list(prompt)
    content = asked[-1]["content"]
    if isinstance(content, str):
        return content
    return json.dumps(content, default=str, ensure_ascii=False)


def last_words(messages: list[dict[str, Any]] | None, text: str) -> str:
    """Return the text that holds the answer of a completion: its last message, if it has several turns."""
    if not messages:
        return text
    return str(messages[-1].get("content") or "")


def transcript_of(messages: list[dict[str, Any]] | None) -> str | None:
    """Return the messages of a completion in turns as JSON; None for one text."""
    if messages is None:
        return None
    return json.dumps(messages, default=str)


def messages_in(transcript: str | None) -> list[Mapping[str, Any]]:
    """Return the messages of a transcript; none where it is missing or was written by somebody else."""
    try:
        found = json.loads(transcript or "[]")
    except ValueError:
        return []
    if not isinstance(found, list):
        return []
    return [message for message in found if isinstance(message, Mapping)]


class ShownTurn(NamedTuple):
    """A turn to be shown: what the policy wrote, its calls in words, and what the tools said."""

    text: str
    calls: list[str]
    answers: list[str]

    @property
    def heading(self) -> str:
        """Calls and what the tools said, in one line: ``north() → key east``."""
        called = _in_one_line(self.calls)
        if not self.answers:
            return called
        return f"{called} → {_in_one_line(self.answers)}"


def turns_in(transcript: str | None) -> list[ShownTurn]:
    """Return the turns of a transcript: an assistant's message each, with the tools' messages behind it. Empty for
    None, or for a text that is no list of messages."""
    found: list[ShownTurn] = []
    for message in messages_in(transcript):
        content = str(message.get("content") or "")
        if message.get("role") != "tool" or not found:
            found.append(ShownTurn(content, [_call_in_words(call) for call in message.get("tool_calls") or ()], []))
        else:
            found[-1].answers.append(content)
    return found


def _call_in_words(call: Mapping[str, Any]) -> str:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        said = ", ".join(f"{name}={_value_in_words(value)}" for name, value in arguments.items())
    else:
        said = _value_in_words(arguments)
    return f"{function.get('name')}({said})"


def _value_in_words(value: Any) -> str:
    """Return the value as JSON, but a text of several lines (a program) as it was written."""
    if isinstance(value, str) and "\n" in value:
        return f"\n{value}\n"
    return json.dumps(value, ensure_ascii=False)


def _in_one_line(texts: list[str]) -> str:
    line = " ".join(", ".join(texts).split())
    if len(line) <= SHOWN_OF_A_TURN:
        return line
    return f"{line[: SHOWN_OF_A_TURN - 1]}…"
