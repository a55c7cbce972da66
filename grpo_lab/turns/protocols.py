"""What the loop over turns asks of others: an engine that streams, a template that joins messages, tools that answer,
and a journal that remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_lab.turns.trajectory import Call


@dataclass(frozen=True)
class TurnTokens:
    """What an engine wrote for one request: tokens, their log-probs (``None``: it gives none), and the optimizer steps
    that its policy had taken."""

    ids: list[int]
    logprobs: list[float | None] | None
    version: int


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
        """Return what has ended. Wait at most ``wait`` seconds if nothing has; with ``in_rounds``, answer all."""


class Dialogue(Protocol):
    """How messages become tokens and tokens become messages, for one tokenizer and template."""

    def parsed(self, ids: list[int], prefix: list[int], tools: Any) -> ParsedTurn:
        """Return the assistant's message of a turn's tokens. ``prefix`` are all tokens before it. Never raises."""

    def answers(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        """Return the tokens that follow a turn: its end if it was cut by a limit, the tools' messages, and the header
        of the next turn. ``before`` are all tokens up to there. Raise ``CutAnew`` where the template would cut earlier
        tokens anew."""

    def cut(self, text: str, tokens: int) -> tuple[str, bool]:
        """Return ``text`` with at most ``tokens`` tokens and a mark behind it, and whether it was cut."""


class Tools(Protocol):
    """Calls of tools, each with its limits."""

    def check(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Refuse what cannot run as it is marked, before the first step. ``tools``: all of the run, by name."""

    def begin(self, calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Callable[..., Any]]) -> Future[list[Call]]:
        """Make the calls of one turn, one after the other, async ones side by side. Never raises for a tool's fault."""

    def close(self) -> None:
        """End threads, processes and event loops."""


class Journal(Protocol):
    """What outlives a kill. It stands before the engine and before the tools, and gives their answers again to a loop
    that begins anew. The loop itself knows nothing of it but these two."""

    def engine(self, engine: TurnEngine) -> TurnEngine:
        """Return the engine that the loop asks instead: with the answers that were written down before the kill."""

    def begin(
        self,
        key: int,
        calls: Sequence[Mapping[str, Any]],
        tools: Mapping[str, Callable[..., Any]],
        make: Callable[..., Future[list[Call]]],
    ) -> Future[list[Call]]:
        """Answer the calls of trajectory ``key`` (its place in the batch), in place of ``Tools.begin``, which is
        ``make(calls, tools)``: with what is known of them, and by making the rest."""
