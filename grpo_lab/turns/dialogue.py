"""Messages as tokens and tokens as messages, for one tokenizer and chat template.

    … <|im_end|>  |  \\n<|im_start|>user\\n<tool_response>\\n42\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
    own tokens    |  answers(messages): cut off a short conversation, behind the end of its assistant's turn

The tokens are those of TRL's loop, except in four cases:

    1. A turn that a limit cut gets its end token.
    2. If the answers begin with the token that the policy stopped at (GLM's ``<|observation|>``), it is not repeated.
    3. A token other than the ``eos_token`` that ends a turn (Gemma's ``<turn|>``) counts as its end, and keeps the line
       break behind it.
    4. A tool's text cannot forge a turn: ``<|im_end|>`` in it is encoded as the characters that it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from grpo_lab.turns.protocols import ParsedTurn
from grpo_lab.turns.trajectory import CutAnew
from grpo_lab.turns.turn_settings import CUT_MARK
from grpo_lab.visible import encodable

#: A character that Unicode reserves for a program's own use. It is put into a mark such as ``<|im_end|>`` in a tool's
#: text, whose two pieces are then tokenized separately (`ChatDialogue.encoded`).
SEAM = "\ufdd0"
#: Name of the tool in short conversations that are rendered to see how a template writes.
PROBE = "probe_tool_7d1f"
#: Keys under which a parsed message may have its thinking.
THOUGHTS = ("reasoning_content", "thinking")


class ChatDialogue:
    """Converts messages to tokens and tokens to messages, for one tokenizer and chat template.

    Args:
        tokenizer: a fast tokenizer of ``transformers``.
        parse: ``parse(tokenizer, ids, prefix=, tools=)`` returns a message (TRL's ``parse_response``).
        ends: ids of tokens that end a turn (the trainer's ``eos_token_ids``).
        chat_template: template to use instead of the tokenizer's (TRL's training template); ``None``: the tokenizer's.
        template_kwargs: further arguments of the template (``chat_template_kwargs``).
    """

    def __init__(
        self,
        tokenizer: Any,
        parse: Callable[..., dict[str, Any]],
        ends: Collection[int],
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.parse = parse
        self.ends = frozenset(ends)
        self.chat_template = chat_template
        self.template_kwargs = dict(template_kwargs or {})
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__

    def parsed(self, ids: list[int], prefix: list[int], tools: Any) -> ParsedTurn:
        """Return the message of a turn's tokens ``ids``, and whether it begins a call that cannot be read. Text that
        cannot be parsed becomes the content of the message; no error is raised.

        Args:
            ids: tokens of the turn.
            prefix: all tokens before it.
            tools: the tools as the template was told of them.
        """
        if not ids:  # TRL's parser takes no tokens for a batch of no texts
            return ParsedTurn({"role": "assistant", "content": ""})
        try:
            message = self.parse(self.tokenizer, ids, prefix=prefix, tools=tools)
        except (ValueError, TypeError, RecursionError):  # RecursionError: arguments nested beyond Python's stack
            message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        if message.get("tool_calls"):
            return ParsedTurn(message)
        text = self.tokenizer.decode(ids)
        for key in THOUGHTS:
            text = text.replace(str(message.get(key) or ""), "", 1)
        return ParsedTurn(message, self._begins_call(text, tools or ()))

    def answers(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        """Return the tokens that follow a turn: its end if a limit cut it, the tools' messages, and the header of the
        next turn.

        A short conversation whose last message calls a tool is rendered without and with the answers behind it. The
        result is what its tokens have more with them. Raises ``CutAnew`` if the template then also writes that last
        message differently.

        Args:
            messages: the tools' messages.
            before: all tokens up to the end of the turn.
        """
        defused = [self._defused(message) for message in messages]
        asked = calling(defused[0].get("name", PROBE))
        alone, joined = self._without_and_with(asked, defused)
        if joined[: len(alone)] != alone:  # once more: a template that writes the date may have been called at midnight
            alone, joined = self._without_and_with(asked, defused)
        if joined[: len(alone)] != alone:
            raise CutAnew(
                f"the chat template of {self.name} writes the assistant's message of a turn differently once a tool "
                "has answered it, so that its tokens would be cut anew: take another template, as TRL's "
                "get_training_chat_template(tokenizer)"
            )
        added = joined[len(alone) :]
        stopped_at = before[-1] if before and before[-1] in self.ends else None
        if stopped_at is None and self._writes_ends:
            return [alone[-1], *added]
        if stopped_at in self._template_ends and added[:1] == [stopped_at]:
            return added[1:]
        return added

    def cut(self, text: str, tokens: int) -> tuple[str, bool]:
        """Cut a text to at most ``tokens`` tokens. Return its beginning with a mark behind it (``CUT_MARK``), or all of
        it, and whether it was cut.

        No more characters are encoded than so many tokens can have, so that a text of 10 MB costs no more than its
        beginning.
        """
        text = readable(text)
        kept = text[: tokens * self._longest_token + 1]
        spans = self._spans(kept)
        while len(spans) > tokens:
            # Two tokens of one character have the same span: the cut then is before the character.
            end = min(spans[tokens][0], spans[tokens - 1][1], len(kept) - 1)
            kept = kept[:end]
            spans = self._spans(kept)
        if len(kept) == len(text):
            return text, False
        return kept + CUT_MARK.format(missing=len(text) - len(kept), whole=len(text)), True

    def rendered(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Return messages as the template writes them. ``how``: further arguments of ``apply_chat_template``."""
        options = {**self.template_kwargs, **how}
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, chat_template=self.chat_template, **options
        )
        return str(text)

    def encoded(self, text: str) -> list[int]:
        """Return the tokens of a rendered text. Its pieces between seams are tokenized separately."""
        ids: list[int] = []
        for piece in text.split(SEAM):
            ids += self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def source(self) -> str:
        """Return the source text of the chat template."""
        return str(self.tokenizer.get_chat_template(self.chat_template))

    @cached_property
    def call_mark(self) -> str:
        """Return what the template writes before the name of a called tool: a token of its own such as ``<tool_call>``,
        else text."""
        plain = self.rendered([*calling(PROBE)[:1], {"role": "assistant", "content": "\u2606"}])
        call = self.rendered(calling(PROBE))
        begin = next(place for place, pair in enumerate(zip(plain, call, strict=False)) if pair[0] != pair[1])
        opening = call[begin : call.index(PROBE)]
        mark = self._marks.search(opening)
        return mark[0] if mark else opening.strip()

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        """Return a pattern of all marks: special tokens, and other added tokens that the template's source has."""
        added = [
            token.content
            for token in self.tokenizer.added_tokens_decoder.values()
            if token.special or token.content in self.source
        ]
        marks = [content for content in added if len(content.strip()) > 1]
        marks.sort(key=len, reverse=True)
        return re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    @cached_property
    def _template_ends(self) -> frozenset[int]:
        """Return the tokens of ``ends`` that the tokenizer has as added tokens. The others may also be part of text."""
        return self.ends & frozenset(self.tokenizer.added_tokens_decoder)

    @cached_property
    def _writes_ends(self) -> bool:
        """Return whether the template ends an assistant's turn with one of ``ends``."""
        tail = self.rendered(calling(PROBE)).rpartition(PROBE)[2]
        return any(token in self._template_ends for token in self.encoded(tail))

    @cached_property
    def _longest_token(self) -> int:
        """Return the largest number of characters of a token in the vocabulary."""
        return max(map(len, self.tokenizer.get_vocab()))

    def _without_and_with(self, asked: list[dict[str, Any]], answers: list[Any]) -> tuple[list[int], list[int]]:
        """Return the tokens of the conversation ``asked`` up to the end of its last turn, and with ``answers`` and the
        next header behind it."""
        alone = self.encoded(self.rendered(asked))
        joined = self.encoded(self.rendered([*asked, *answers], add_generation_prompt=True))
        if self._writes_ends:
            last = max(place for place, token in enumerate(alone) if token in self._template_ends)
            alone = alone[: last + 1]
        return alone, joined

    def _begins_call(self, text: str, tools: Sequence[Any]) -> bool:
        """Return whether a text begins a call: it has the template's ``call_mark``. If that is plain text (Llama's
        ``{"name": "``), a tool's name must follow, since an answer may have such text too."""
        if self._marks.fullmatch(self.call_mark):
            return self.call_mark in text
        return bool(self.call_mark) and any(self.call_mark + tool_name(tool) in text for tool in tools)

    def _defused(self, value: Any) -> Any:
        """Return a value in whose texts every mark has a seam, so that no mark is encoded as its token."""
        if isinstance(value, Mapping):
            return {key: self._defused(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._defused(entry) for entry in value]
        if not isinstance(value, str):
            return value
        text = readable(value)
        whole = ""
        while whole != text:  # what a seam leaves of one mark may be another
            whole = text
            text = self._marks.sub(lambda mark: mark[0][0] + SEAM + mark[0][1:], whole)
        return text

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return (begin, end) of each token of a tool's text, in characters of the text."""
        spans: list[tuple[int, int]] = []
        begin = 0
        for piece in self._defused(text).split(SEAM):
            encoding = self.tokenizer(piece, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
            spans += [(begin + first, begin + end) for first, end in encoding["offset_mapping"]]
            begin += len(piece)
        return spans


def calling(name: str) -> list[dict[str, Any]]:
    """Return the shortest conversation whose last message calls the tool ``name``, without arguments."""
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def readable(text: str) -> str:
    """Return a text that every tokenizer takes: lone surrogates, and our own ``SEAM``, become U+FFFD."""
    return str(encodable(text)).replace(SEAM, "\ufffd")


def tool_name(tool: Any) -> str:
    """Return the name of a tool, given as a function or as a JSON schema."""
    if isinstance(tool, Mapping):
        return str(tool.get("function", tool).get("name", ""))
    return str(getattr(tool, "__name__", ""))
