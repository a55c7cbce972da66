"""Problems whose answer can be guessed.

A problem is guessable if one of 8 tries *without reasoning* is right. Kimi k1.5 (section 2.1) removes these as "easy
to hack": a rollout could be rewarded for a wrong way to the right answer. The report gives the 8 tries; the wording of
the request is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.curation.pass_rate import Generate, PassRate, Problem, Rendered, Score, pass_rates

ANSWER_ONLY = "Give only the final answer. No explanation, no working, no other words.\nAnswer:"


def guess_rates(
    problems: Sequence[Problem],
    generate: Generate,
    score: Score,
    tries: int = 8,
    *,
    request: str = ANSWER_ONLY,
    prompt_column: str = "prompt",
    path: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    success_at: float = 1.0,
    batch_size: int = 32,
    progress: bool = True,
    rendered: Rendered | None = None,
) -> list[PassRate]:
    """Pass rates of the problems with `request` added to every prompt; arguments as in `pass_rates`.

    `generate` should allow few tokens (an answer's worth, say 32), or the model reasons all the same, and a chat
    template's thinking has to be off.
    """
    asked = [{**problem, prompt_column: answer_only(problem[prompt_column], request)} for problem in problems]
    return pass_rates(
        asked,
        generate,
        score,
        tries,
        path=path,
        settings={**(settings or {}), "request": request},
        success_at=success_at,
        batch_size=batch_size,
        prompt_column=prompt_column,
        progress=progress,
        label="guesses",
        rendered=rendered,
    )


def guessable(rates: Sequence[PassRate]) -> list[bool]:
    """Which problems were right in at least one try."""
    return [rate.successes > 0 for rate in rates]


def answer_only(prompt: Any, request: str = ANSWER_ONLY) -> Any:
    """The prompt with the request after its text, or after the last user message of a message list."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{request}"
    messages = [dict(message) for message in prompt]
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            message["content"] = f"{message['content']}\n\n{request}"
            return messages
    raise ValueError("a prompt is a string or a message list with a user message whose content is text")
