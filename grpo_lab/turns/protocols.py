"""What the loop over turns asks of an engine, and a turn as tokens and as a message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class TurnTokens:
    """Tokens as an engine wrote them for a turn, or such as stand between.

    Args:
        ids: the tokens.
        logprobs: their log-probs in nats, NaN where ``mask`` is 0; ``None``: the engine gives none.
        version: optimizer steps that the policy had taken.
        mask: 1 for a token that the policy wrote, 0 for another's; ``None``: it wrote all.
    """

    ids: list[int]
    logprobs: Sequence[float | None] | None
    version: int
    mask: list[int] | None = None

    @property
    def written(self) -> list[int]:
        """The mask, also where it is ``None``."""
        if self.mask is None:
            return [1] * len(self.ids)
        return self.mask

    @classmethod
    def foreign(cls, ids: Sequence[int]) -> TurnTokens:
        """Return tokens that the policy did not write."""
        return cls(list(ids), [math.nan] * len(ids), 0, [0] * len(ids))

    def then(self, later: TurnTokens) -> TurnTokens:
        """Return these tokens with later ones behind them, whose version it has."""
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
    """An engine whose requests end one by one."""

    #: Whether requests are only answered all together. Then the loop hands in what is ready, and waits for all of it.
    in_rounds: bool

    def submit(self, key: int, ids: list[int], room: int) -> None:
        """Ask for at most ``room`` tokens that follow ``ids``. ``key`` names the request."""

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Return what has ended. Wait at most ``wait`` seconds if nothing has; in rounds, as long as they take."""
