"""Interface of engines for the loop over turns, and a turn as tokens and as a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TurnTokens:
    """Tokens of a trajectory: those that an engine wrote for a turn, or tool answers and inserted text.

    Args:
        ids: the tokens.
        logprobs: their log-probs in nats, NaN where ``mask`` is 0; ``None``: the engine gives none.
        version: optimizer steps that the policy had taken; 0 for tokens that it did not write.
        mask: 1 for a token that the policy wrote, 0 for another; ``None``: it wrote all.
    """

    ids: list[int]
    logprobs: Sequence[float | None] | None
    version: int
    mask: list[int] | None = None

    @property
    def written(self) -> list[int]:
        """Return the mask as a list, all 1 where it is ``None``."""
        if self.mask is None:
            return [1] * len(self.ids)
        return self.mask

    @classmethod
    def foreign(cls, ids: Sequence[int]) -> TurnTokens:
        """Make tokens that the policy did not write: ``mask`` 0, log-probs NaN."""
        return cls(list(ids), [math.nan] * len(ids), 0, [0] * len(ids))

    def then(self, later: TurnTokens) -> TurnTokens:
        """Return these tokens with ``later`` behind them. The version is that of ``later``."""
        logprobs = None
        if self.logprobs is not None and later.logprobs is not None:
            logprobs = [*self.logprobs, *later.logprobs]
        return TurnTokens([*self.ids, *later.ids], logprobs, later.version, [*self.written, *later.written])

    def within(self, room: int) -> TurnTokens:
        """Return the first ``room`` tokens."""
        logprobs = None
        if self.logprobs is not None:
            logprobs = self.logprobs[:room]
        return TurnTokens(self.ids[:room], logprobs, self.version, self.written[:room])


@dataclass(frozen=True)
class ParsedTurn:
    """A turn as a message.

    Args:
        message: the assistant's message as rewards get it, with ``tool_calls`` if it calls tools.
        unparsable: whether it began a call that cannot be read. Its text is then the message's content.
    """

    message: dict[str, Any]
    unparsable: bool = False


class TurnEngine(Protocol):
    """An engine that writes turns: the loop submits requests and collects those that have ended."""

    #: Whether requests are only answered all together. The loop then submits all that is ready, and waits for all.
    in_rounds: bool

    def submit(self, key: int, ids: list[int], room: int) -> None:
        """Ask for at most ``room`` tokens that follow ``ids``. ``key`` names the request: the index of its
        trajectory."""

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Return (key, tokens) of the requests that have ended. If none has, wait for one for at most ``wait`` seconds;
        an engine that answers in rounds waits for all."""
