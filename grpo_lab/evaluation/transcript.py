"""Messages to be shown: the question of a prompt, and a completion in turns, which an outcome keeps as JSON.

`transcript_of` writes that JSON for an outcome; `turns_in` reads it again for a page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

SHOWN_OF_A_TURN = 60
"""Number of characters that a turn's heading has for the calls, and for the tools' answers."""


def question_in(prompt: Any) -> str:
    """Return what a reader wants to see of a prompt: a string as it is, of messages the last one of the user, or the
    last one if none is the user's."""
    if isinstance(prompt, str):
        return prompt
    asked = [message for message in prompt if message["role"] == "user"] or list(prompt)
    content = asked[-1]["content"]
    if isinstance(content, str):
        return content
    return json.dumps(content, default=str, ensure_ascii=False)


def last_words(messages: list[dict[str, Any]] | None, text: str) -> str:
    """Return the text that holds a completion's answer: its last message if it has several turns, else ``text``."""
    if not messages:
        return text
    return str(messages[-1].get("content") or "")


def transcript_of(messages: list[dict[str, Any]] | None) -> str | None:
    """Return the messages of a completion in turns as JSON; None if it is one text."""
    if messages is None:
        return None
    return json.dumps(messages, default=str)


def messages_in(transcript: str | None) -> list[Mapping[str, Any]]:
    """Return the messages of a transcript; empty if there is none, or if it is no list of messages."""
    try:
        found = json.loads(transcript or "[]")
    except ValueError:
        return []
    if not isinstance(found, list):
        return []
    return [message for message in found if isinstance(message, Mapping)]


class ShownTurn(NamedTuple):
    """A turn as a page shows it.

    Attributes:
        text: what the policy wrote.
        calls: its tool calls, as text.
        answers: what the tools answered.
    """

    text: str
    calls: list[str]
    answers: list[str]

    @property
    def heading(self) -> str:
        """Return the calls and the tools' answers in one line: ``north() → key east``."""
        called = _in_one_line(self.calls)
        if not self.answers:
            return called
        return f"{called} → {_in_one_line(self.answers)}"


def turns_in(transcript: str | None) -> list[ShownTurn]:
    """Return the turns of a transcript: each is an assistant's message with the tools' messages behind it. Empty for
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
    """Return a tool call as text: ``name(key=value)``."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        said = ", ".join(f"{name}={_value_in_words(value)}" for name, value in arguments.items())
    else:
        said = _value_in_words(arguments)
    return f"{function.get('name')}({said})"


def _value_in_words(value: Any) -> str:
    """Return a value as JSON. A text of several lines, such as a program, stays as it was written."""
    if isinstance(value, str) and "\n" in value:
        return f"\n{value}\n"
    return json.dumps(value, ensure_ascii=False)


def _in_one_line(texts: list[str]) -> str:
    """Join texts to one line of at most ``SHOWN_OF_A_TURN`` characters."""
    line = " ".join(", ".join(texts).split())
    if len(line) <= SHOWN_OF_A_TURN:
        return line
    return f"{line[: SHOWN_OF_A_TURN - 1]}…"
