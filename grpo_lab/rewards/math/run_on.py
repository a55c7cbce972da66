"""Find run-on text: after its own answer, a completion goes on with another turn, or with a new task that it sets
itself."""

from __future__ import annotations

import re

_CONTROL = re.compile(
    r"<[|｜][^<>\n]{1,40}[|｜]>|</?s>|<eos>|<pad>|</?(?:start|end)_of_turn>|<bos>|\[/?INST\]|<</?SYS>>|</answer>(?=\s*<think>)"
)
_HEAD_MARKS = re.compile(r"[#>*_\-=~ \t\d.)\u2022$\]\\]{0,12}")
_NEW_TASK = re.compile(
    r"(?:(?:a|an|the|my|our|here(?:'s| is| are)|new|next|another|similar|follow[- ]?up|bonus|extra|sample|practice|test"
    r"|your)\s){0,4}(?:(?:math|word|example|similar|more|related)\s){0,2}(?:q|questions?|problems?|exercises?|examples?"
    r"|puzzles?|riddles?|tasks?|instructions?|quiz|queries|query|prompt|input|user|human|student|teacher|assistant|system"
    r"|turn)"
    r"\s*[#(]?\s*(?:\d{1,4}|[ivx]{1,4}\b)?\)?\s*[*_]{0,2}\s*(?:[:.\-–—]|$)",
    re.IGNORECASE,
)
_NEW_TASK_PHRASE = re.compile(
    r"(?:your turn\b|now you try|now,? (?:let'?s|please|try to|can you) (?:solve|answer|try|consider)"
    r"|try (?:this|another|the (?:next|following))\b"
    r"|(?:please )?(?:answer|solve) (?:this|the (?:next|following)|another)\b"
    r"|let'?s (?:try|do|solve|move on to|look at) (?:another|a new|the next|a similar)"
    r"|(?:here(?:'s| is)|this is) (?:another|a new|the next|a similar|a different)\b"
    r"|consider (?:the following|another) (?:problem|question)|(?:next|another) (?:question|problem|example)\b"
    r"|(?:new|similar) (?:question|problem)s?\b|in this (?:task|problem),? you)",
    re.IGNORECASE,
)
_SELF_TALK_WORDS = (
    "wait but hmm is isn't does doesn't do did so therefore ok okay now however can could should would are am was were "
    "let let's right really why hold or and then check correct maybe actually have has i we no yes oh um well since"
)
_SELF_TALK = frozenset(_SELF_TALK_WORDS.split())
_LOOK_AHEAD = 160
_NEXT_TURN = re.compile(
    rf"{_CONTROL.pattern}|^[#* \t]{{0,6}}(?:user|human|instruction)[*]{{0,2}}:", re.IGNORECASE | re.MULTILINE
)
_TURN_SIGNS = "<| </ <s> <eos <pad <start <end <bos inst] sys> user human instruction"


def next_turn_start(text: str) -> int:
    """Return the index where another speaker's turn begins after the model's own text; `len(text)` without one. Signs
    of a turn before the model's first words do not count."""
    lower = text.lower()  # whatever `_NEXT_TURN` finds holds one of `_TURN_SIGNS`; most texts hold none
    if text.isascii() and not any(sign in lower for sign in _TURN_SIGNS.split()):
        return len(text)
    said = len(text) - len(text.lstrip())
    for mark in _NEXT_TURN.finditer(text, said):
        if text[said : mark.start()].strip():
            return mark.start()
        said = mark.end()
    return len(text)


def _opens_new_task(line: str) -> bool:
    """Return whether a line sets a new task: `Question 2:`, `### Problem`, `Now you try`."""
    head = line[:_LOOK_AHEAD]
    body = head[_HEAD_MARKS.match(head).end() :]  # type: ignore[union-attr]  # the pattern matches the empty string
    return bool(_NEW_TASK.match(body) or _NEW_TASK_PHRASE.match(body))


def _asks_a_question(line: str) -> bool:
    """Return whether a line is a question to somebody else, and not the model's to itself (`Wait, is that right?`)."""
    line = line.strip().rstrip("*_\"' ")
    first = None
    if len(line) >= 24 and line.endswith("?"):
        first = re.search(r"[A-Za-z']+", line[:_LOOK_AHEAD])
    return first is not None and first[0].lower() not in _SELF_TALK


def run_on_start(text: str, answer_end: int) -> int:
    """Return the index at which run-on text begins, searched from `answer_end`, the end of the first answer on;
    `len(text)` if there is none. Signs are a control token, and a line that sets a new task or asks a question."""
    control = _CONTROL.search(text, answer_end)
    limit = control.start() if control else len(text)
    if _opens_new_task(text[answer_end : min(limit, answer_end + _LOOK_AHEAD)].partition("\n")[0]):
        return answer_end
    line_end = text.find("\n", answer_end, limit)
    while line_end != -1:
        line_start = line_end + 1
        line_end = text.find("\n", line_end + 1, limit)
        line = text[line_start : limit if line_end == -1 else line_end]
        if _opens_new_task(line) or _asks_a_question(line):
            return line_start
    return limit
