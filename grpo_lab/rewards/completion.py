"""Read the parts of a completion (text, reasoning, program, answer) from either of TRL's formats, a string or messages.

``RowReward`` is the base class of rewards of one completion and its row's columns. ``ThinkFormatReward`` judges the
layout, ``ModeFollowingReward`` whether the completion thinks as its prompt asks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

THINK, END_OF_THINK = "<think>", "</think>"
_FENCE = re.compile(r"^([ \t]{0,8})(`{3,}|~{3,})[ \t]*([^\s`]{0,30})")
_PYTHON = re.compile(r"\{?\.?(?:i?python|py)[\d.]*\}?")
_QUOTES = re.compile(r"\"\"\"|'''")
_LOOK_AHEAD = 400
"""A fence inside a string in triple quotes belongs to that string only if the string ends within this many lines."""


class RowReward(ABC):
    """Base class of a reward that judges one completion by its row's columns; a subclass implements ``score``."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that ``score`` gets beside the text. ``LabTrainer`` checks that the data set has them before anything is
    loaded."""
    __name__: str
    """Name under which TRL logs this reward."""

    def __repr__(self) -> str:
        own = ((name, value) for name, value in vars(self).items() if not name.startswith("_") and name != "tokenizer")
        settings = (f"{name}={value!r}" for name, value in own)
        return f"{type(self).__name__}({', '.join(settings)})"

    @abstractmethod
    def score(self, text: str, *row: Any) -> float | None:
        """Return the reward of one completion; ``None`` if the row's columns hold nothing to judge it by."""

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        """Return the rewards in order. Raises ValueError if completions or columns are missing, or differ in length."""
        lists: dict[str, Any] = {"completions": completions, **{name: columns.get(name) for name in self.columns}}
        if any(values is None for values in lists.values()):
            needed = ["completions=[...]", *(f"the column {name!r}" for name in self.columns)]
            raise ValueError(f"{type(self).__name__} needs {' and '.join(needed)}")
        counts = {name: len(values) for name, values in lists.items()}
        if len({*counts.values()}) > 1:
            raise ValueError(f"{type(self).__name__} got {counts}; they must be one to one")
        texts = self.texts(completions or (), columns.get("completion_ids"))
        return [self.score(text, *row) for text, *row in zip(texts, *list(lists.values())[1:], strict=True)]

    def texts(self, completions: Sequence[Any], completion_ids: Sequence[Any] | None) -> list[str]:
        """Return the part of each completion that is judged."""
        return [completion_text(completion) for completion in completions]


def completion_text(completion: Any) -> str:
    """Return a plain string as it is; of a message list, the text (or text parts) of the last assistant message."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, dict) for message in completion):
        said = [message for message in completion if message.get("role", "assistant") == "assistant"]
        if said:
            return _content_text(said[-1].get("content"))
        return ""
    raise ValueError(
        f"a completion must be a string or a list of message dicts; got {type(completion).__name__}: "
        f"{completion!r:.200}"
    )


def prompt_text(prompt: Any) -> str:
    """Return a plain string as it is; of a message list, the text of all messages."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_content_text(message.get("content")) for message in prompt or ())


def _content_text(content: Any) -> str:
    """Return the text of a message's content, which is a text, None, or a list of parts with their types."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, dict | str) for part in content):
        parts = ({"text": part} if isinstance(part, str) else part for part in content)
        texts = (part.get("text") for part in parts if part.get("type", "text") == "text")
        return "".join(text for text in texts if isinstance(text, str))
    raise ValueError(
        f"a message's content is text, None or a list of parts; got {type(content).__name__} {content!r:.200}"
    )


def reasoning_of(text: str) -> str:
    """Return all ``<think>…</think>`` contents of ``text``, in order; the whole text if there is no tag.

    A block with one tag counts, too. Without its opening tag (many chat templates write that into the prompt) it begins
    where the text begins. Without its closing tag (stopped by the token budget) it reaches to the end of the text. An
    empty block is empty reasoning: text outside the tags is not taken for reasoning.
    """
    if THINK not in text and END_OF_THINK not in text:
        return text
    if END_OF_THINK in text and THINK not in text.partition(END_OF_THINK)[0]:
        text = THINK + text
    return "\n".join(after.split(END_OF_THINK, 1)[0] for after in text.split(THINK)[1:])


def parsed_reasoning(completion: Any) -> str | None:
    """Return the reasoning that TRL's response parsing has moved out of the last message's content; None if there is
    none."""
    if isinstance(completion, list) and completion and isinstance(completion[-1], Mapping):
        for key in ("reasoning_content", "thinking"):
            if isinstance(completion[-1].get(key), str):
                return str(completion[-1][key])
    return None


def whole_text(completion: Any, ids: Sequence[int] | None = None, tokenizer: Any = None, opening: str = THINK) -> str:
    """Return a completion as the model wrote it, with its reasoning in tags.

    TRL's response parsing moves the reasoning of a message out of its content. Such a message is decoded from its token
    ids. Without these or the tokenizer, its parts are joined again: ``opening``, reasoning, ``</think>``, content.

    Args:
        completion: a text, or a list of messages, of which the last one is read.
        ids: the completion's token ids.
        tokenizer: the one that made them.
        opening: tag to put before joined reasoning; empty if the prompt has opened it.
    """
    text = completion_text(completion)
    if isinstance(completion, str):
        return text
    reasoning = parsed_reasoning(completion)
    if ids is not None and tokenizer is not None and len(completion) == 1:
        decoded = str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        if END_OF_THINK in decoded and (reasoning is not None or END_OF_THINK not in text):
            return decoded
    if reasoning is None:
        return text
    return f"{opening}{reasoning}{END_OF_THINK}{text}"


def reasoning_in(completion: Any, untagged: bool = True) -> str:
    """Return the reasoning of a completion: what TRL's response parsing has found, else what is between thinking tags.
    A completion without either is reasoning as a whole if ``untagged``, else it has none (an empty text)."""
    reasoning = parsed_reasoning(completion)
    if reasoning is not None:
        return reasoning
    text = completion_text(completion)
    if untagged or THINK in text or END_OF_THINK in text:
        return reasoning_of(text)
    return ""


_REFLECTION = re.compile(r"\b(?:wait|mistake|however|but|retry|error|verify|wrong|evaluate|check)\b", re.IGNORECASE)


def reflects(text: str) -> bool:
    """Return whether ``text`` has one of the words of reflection that DeepSeek-R1 (arXiv 2501.12948v2) counts over
    training. A base model writes them, too (arXiv 2503.20783): only a change in their number says something."""
    return _REFLECTION.search(text) is not None


def program_text(completion: str) -> str:
    """Return the program in a completion: the last fenced block in Python, else the last without a language, else the
    last of any language; without blocks the inside of the last closed ``<answer>``, else the whole text.

    Text before the last ``</think>`` is ignored. A last block that is never closed reaches to the end of the text, or
    to a line that ends with the closing fence. A byte order mark is removed.
    """
    text = completion.rpartition(END_OF_THINK)[2]
    blocks = fenced_blocks(text)
    for wanted in (_PYTHON.fullmatch, "".__eq__, lambda language: True):
        chosen = [block for language, block in blocks if wanted(language)]
        if chosen:
            return chosen[-1].lstrip("\ufeff")
    _, opened, answer = text.rpartition("<answer>")
    inside, closed, _ = answer.partition("</answer>")
    return (inside if opened and closed else text).lstrip("\ufeff")


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language in lower case, inside) of every fenced block, in order. The indentation of the opening fence is
    removed from the lines of its block.

    In a block of Python, a fence inside a triple-quoted string is part of that string. Outside of one, a fence with a
    language begins a new block, and the block before it ends there.
    """
    blocks = _Blocks(text.split("\n"))
    for place in range(len(blocks.lines)):
        blocks.read_line(place)
    if blocks.opened is not None:
        blocks.close_unclosed(blocks.opened)
    return blocks.found


class _Blocks:
    """Reader of fenced blocks, line by line; ``found`` collects (language, inside) of each.

    Attributes:
        fences: for each line the fence that it begins with, or None.
        opened: the fence of the block that is being read; None outside of blocks.
        inside: the lines of that block so far.
        quote: the triple quote that is open in that block, or an empty text.
        text_until: a line up to which that open quote is known to reach.
    """

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        # what has a backtick later in its line is no fence; the pattern would need quadratic time to look for one
        found = ((line, _FENCE.match(line)) for line in lines)
        self.fences = [None if one is None or "`" in line[one.end() :] else one for line, one in found]
        self.found: list[tuple[str, str]] = []
        self.opened: re.Match[str] | None = None
        self.inside: list[str] = []
        self.quote = ""
        self.text_until = -1

    def read_line(self, place: int) -> None:
        """Read line ``place``: it opens a block, closes the open one, or belongs to it."""
        line = self.lines[place]
        fence = self.fences[place]
        opened = self.opened
        if opened is None:
            if fence:
                self._open(fence)
            return
        python = not opened[3] or _PYTHON.fullmatch(opened[3].lower()) is not None
        closes = fence and not fence[3] and fence[2].startswith(opened[2])
        if closes and not (python and self.quote and self._ends_its_text(place)):
            self._close(opened)
        elif fence and fence[3] and not self.quote and python:
            self._close(opened)
            self._open(fence)
        else:
            self._keep(line, indentation=len(opened[1]))

    def _keep(self, line: str, indentation: int) -> None:
        """Add a line to the open block, without the fence's indentation, and follow the triple quotes in it."""
        self.inside.append(line[:indentation].lstrip(" \t") + line[indentation:])
        for quote in _QUOTES.findall(line):
            if quote == self.quote:
                self.quote = ""
            else:
                self.quote = self.quote or quote

    def _open(self, fence: re.Match[str]) -> None:
        self.opened = fence
        self.inside = []
        self.quote = ""

    def _close(self, opened: re.Match[str]) -> None:
        self.found.append((opened[3].lower(), "\n".join(self.inside)))
        self.opened = None

    def close_unclosed(self, opened: re.Match[str]) -> None:
        """Close a block that has no closing fence in a line of its own: at a line of text that ends with the fence, or
        else at the last line."""
        mark = opened[2]
        for place, line in enumerate(self.inside):
            bare = line.rstrip()
            if bare.endswith(mark) and bare.count(mark) == 1:
                self.inside = [*self.inside[:place], bare[: -len(mark)]]
                break
        self._close(opened)

    def _ends_its_text(self, place: int) -> bool:
        """Return whether the triple quote that is open at line ``place`` is closed in one of the next lines. Lines of
        blocks that name a language are passed over."""
        if place < self.text_until:
            return True
        apart = False  # inside a block that names its language
        for there in range(place + 1, min(len(self.lines), place + _LOOK_AHEAD)):
            fence = self.fences[there]
            if fence:
                apart = bool(fence[3])
            elif not apart and self.quote in self.lines[there]:
                self.text_until = there
                return True
        return False


def answer_block(completion: str) -> str:
    """Return the inside of the last ``<answer>``, else the last fenced block, else the whole text.

    Text before the last ``</think>`` is ignored; an ``<answer>`` that is never closed reaches to the end.
    """
    text = completion.rpartition(END_OF_THINK)[2]
    _, marked, answer = text.rpartition("<answer>")
    if marked:
        return answer.partition("</answer>")[0]
    blocks = fenced_blocks(text)
    return blocks[-1][1] if blocks else text


_TAG = re.compile(r"</?(?:think|answer)>")
_TAGS = [THINK, END_OF_THINK, "<answer>", "</answer>"]
_LAYOUTS = {
    "think_answer": (_TAGS, [[False, True, False, True, False]]),
    "think": (_TAGS[:2], [[False, True, True]]),
    "modes": (_TAGS[:2], [[False, True, True], [False, False, True]]),
}
"""Form → its tags in order, and the layouts that it allows. A layout says for the text before, between and after the
tags, in order, whether it holds more than white space."""


class ThinkFormatReward(RowReward):
    """Reward 1.0 for a completion in the layout of ``form`` with nothing around it, else 0.0.

        form="think_answer"   <think> reasoning </think> <answer> answer </answer>
        form="think"          <think> reasoning </think> answer
        form="modes"          the same, or Qwen3's without thinking: <think> </think> answer

    Each tag occurs exactly once, in this order. White space is allowed around and between; both parts hold more than
    white space. Source: DeepSeek-R1 (arXiv 2501.12948), section 2.2.2 (format reward) and table 1 (template); Qwen3
    (2505.09388), table 9. How we differ: TRL's `think_format_reward` knows the second layout only and accepts empty
    parts. If TRL parses responses, the layout is read from the tokens (`LabTrainer` gives the tokenizer). In stock TRL
    it is rebuilt from the message, which does not say whether there was an empty block, or two.

    Args:
        form: `"think_answer"`, `"think"` or `"modes"`.
        think_opened: who writes the first `<think>`. `"completion"`: the model. `"prompt"`: the chat template did, so
            the completion must not repeat it.
    """

    __name__ = "think_format_reward"
    reads_tokens: ClassVar[bool] = True
    """Whether the reward reads tokens: `LabTrainer` then sets `tokenizer` to its own."""
    tokenizer: Any = None

    def __init__(
        self,
        form: Literal["think_answer", "think", "modes"] = "think_answer",
        *,
        think_opened: Literal["completion", "prompt"] = "completion",
    ) -> None:
        if form not in _LAYOUTS:
            raise ValueError(f"form must be one of {list(_LAYOUTS)}; got {form!r}")
        if think_opened not in ("completion", "prompt"):
            raise ValueError(f"think_opened must be 'completion' or 'prompt'; got {think_opened!r}")
        self.form = form
        self.think_opened = think_opened

    def texts(self, completions: Sequence[Any], completion_ids: Sequence[Any] | None) -> list[str]:
        """Return the completions as the model wrote them, with the tags of their reasoning (`whole_text`)."""
        if completion_ids is None:
            ids: Sequence[Any] = [None] * len(completions)
        else:
            ids = completion_ids
        opening = ""
        if self.think_opened != "prompt":
            opening = THINK
        both = zip(completions, ids, strict=True)
        return [whole_text(completion, own, self.tokenizer, opening) for completion, own in both]

    def score(self, text: str, *row: Any) -> float:
        if self.think_opened == "prompt":
            text = THINK + text
        tags, filled = _LAYOUTS[self.form]
        return float(_TAG.findall(text) == tags and [bool(part.strip()) for part in _TAG.split(text)] in filled)


_FLAG = re.compile(r"(?<!\S)/(no_)?think(?![\w/])")


def asks_to_think(prompt: Any) -> bool:
    """Return whether a prompt asks for thinking. The last `/think` or `/no_think` in a system or user turn decides; a
    prompt without one asks for it.

    In a prompt that is one text, turns cannot be told apart, so all of it counts. A flag is a word of its own.
    """
    turns = prompt
    if not isinstance(prompt, str):
        turns = [turn for turn in prompt if turn.get("role") != "assistant"]
    flags: list[str] = ["", *_FLAG.findall(prompt_text(turns))]
    return flags[-1] == ""


class ModeFollowingReward:
    """Reward 1.0 for a completion that thinks if and only if its prompt asks for it (`asks_to_think`), else 0.0.

    A completion thinks if its `<think>` block, closed or not, holds more than white space. `ThinkFormatReward("modes")`
    judges the layout. Source: Qwen3 (arXiv 2505.09388), sections 4.3 and 4.4. A chat template's `enable_thinking`
    leaves no flag in the prompt, so this reward does not see it.
    """

    __name__ = "mode_following_reward"

    def __repr__(self) -> str:
        return "ModeFollowingReward()"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the rewards in order."""
        thinks = [bool(reasoning_in(completion, untagged=False).strip()) for completion in completions]
        return [float(did == asks_to_think(prompt)) for did, prompt in zip(thinks, prompts, strict=True)]
