"""A trajectory: the tokens and messages of one rollout over several turns, and what happened in each turn.

A turn is what the policy writes until it stops, and the answers of the tools that it called. The completion of a
trajectory is then

    own tokens of turn 1 | tool answers | own tokens of turn 2 | tool answers | …

Tool answers carry no loss: ``mask`` is 0 there and ``logprobs`` NaN.

Tokens are only ever appended. Text is never tokenized a second time, so what the policy saw before a turn is the
beginning of what it saw before the next one. Each turn keeps a checksum of the tokens before it, by which ``unbroken``
checks the finished row.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab.turns.protocols import TurnTokens


class CutAnew(ValueError):
    """Raised if tokens of an earlier turn would be others than those that the policy saw, as text would be tokenized a
    second time."""


@dataclass(frozen=True)
class Call:
    """Call of a tool, and its answer.

    Args:
        name: name of the tool as the policy wrote it.
        arguments: its arguments as the policy wrote them, parsed.
        answer: content of the tool's message to the policy, cut to the limit.
        failure: why there is no proper answer: ``raised``, ``timed_out``, ``unknown`` (no such tool), ``unparsable``,
            ``interrupted`` (the run was killed meanwhile); ``None``: the tool has answered.
        seconds: wall-clock seconds of all tries together.
        tries: how often the tool was called.
        cut: whether the answer was longer than allowed.
    """

    name: str
    arguments: Any
    answer: Any
    failure: str | None = None
    seconds: float = 0.0
    tries: int = 1
    cut: bool = False


@dataclass(frozen=True)
class Turn:
    """Turn of the policy, and the calls that it made.

    Args:
        first: index of its first own token in the completion.
        end: index behind its last own token, so that it has ``end - first`` tokens.
        version: optimizer steps that the policy had taken when it wrote this turn.
        calls: its calls of tools, in the order of their answers.
        limit: limit that this turn reached: ``turn_tokens`` (its own tokens), ``tool_tokens`` (an answer), or ``None``.
        inserted: number of its tokens that a thinking budget put there, which carry no loss.
        ended: why the trajectory ended with this turn (``Trajectory.ended``); ``None``: it went on.
        seen: checksum of the tokens before it, prompt included (``checksum``).
    """

    first: int
    end: int
    version: int
    calls: tuple[Call, ...] = ()
    limit: str | None = None
    inserted: int = 0
    ended: str | None = None
    seen: int = 0


@dataclass(frozen=True)
class Trajectory:
    """A rollout as far as it has come. ``ids``, ``mask`` and ``logprobs`` have one entry per token of the completion.

    Args:
        prompt: tokens of the prompt.
        ids: tokens of the completion so far, tool answers included.
        mask: 1 for a token that the policy wrote, 0 for tool answers and inserted text.
        logprobs: log-prob of each token under the policy that sampled it, in nats; NaN where ``mask`` is 0; ``None``
            where the engine gave none.
        messages: the assistant's and the tools' messages, as TRL's rewards get them.
        turns: turns so far.
        ended: why it has ended: ``answered`` (its last turn calls no tool), ``turns`` (limit of turns), ``completion``
            (no room left in ``max_completion_length`` or in the context), ``turn_tokens`` (its last turn was cut at
            that limit, and calls no tool), ``unparsable`` (a call could not be read); ``None``: it goes on.
    """

    prompt: list[int]
    ids: list[int]
    mask: list[int]
    logprobs: Sequence[float | None] | None
    messages: list[dict[str, Any]]
    turns: tuple[Turn, ...] = ()
    ended: str | None = None

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> Trajectory:
        """Make the trajectory of a prompt, with no token yet."""
        return cls(list(prompt), [], [], [], [])

    @property
    def so_far(self) -> list[int]:
        """Return the tokens that the engine goes on from: the prompt's and the completion's."""
        return [*self.prompt, *self.ids]

    def with_own(self, made: TurnTokens) -> Trajectory:
        """Return the trajectory with one more turn of the policy. Its message and calls must be added to it."""
        first = len(self.ids)
        turn = Turn(
            first,
            first + len(made.ids),
            made.version,
            inserted=made.written.count(0),
            seen=checksum(self.so_far),
        )
        return replace(self._longer(made), turns=(*self.turns, turn))

    def with_foreign(self, ids: Sequence[int]) -> Trajectory:
        """Return the trajectory with tokens that the policy did not write (tool answers)."""
        return self._longer(TurnTokens.foreign(ids))

    def with_last_turn(self, **changes: Any) -> Trajectory:
        """Return the trajectory with these fields of its last turn changed."""
        return replace(self, turns=(*self.turns[:-1], replace(self.turns[-1], **changes)))

    def _longer(self, more: TurnTokens) -> Trajectory:
        whole = TurnTokens(self.ids, self.logprobs, more.version, self.mask).then(more)
        return replace(self, ids=whole.ids, mask=whole.written, logprobs=whole.logprobs)


def calls_of(turns: Iterable[Turn]) -> list[Call]:
    """Return the calls of some turns."""
    return [call for turn in turns for call in turn.calls]


def checksum(ids: Sequence[int], begun: int = 0) -> int:
    """Return the CRC-32 of token ids. ``begun`` is the checksum of those before them."""
    return zlib.crc32(array("q", ids).tobytes(), begun)


def unbroken(turns: Sequence[Turn], prompt: Sequence[int], completion: Sequence[int], template: str) -> None:
    """Raise ``CutAnew`` if the tokens of a finished row, ``prompt`` and ``completion``, do not begin with what the
    policy saw before each of its turns. ``template``: name of the chat template, for the message."""
    known = checksum(prompt)
    end = 0
    for number, turn in enumerate(turns, start=1):
        known = checksum(completion[end : turn.first], known)
        end = turn.first
        if known != turn.seen:
            raise CutAnew(
                f"the row's tokens before turn {number} are not those that the policy saw (template {template}): "
                "they were cut anew, and their log-probs would belong to other tokens"
            )
