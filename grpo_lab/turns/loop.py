"""The loop over turns: each trajectory goes on as soon as its own tools have answered.

Where a trajectory is:

    waiting ──▶ ready ── asked ──▶ at the engine ── it calls tools ──▶ at the tools ── they answered ──▶ ready
                                         │                                  │
                                         └── no call, or a limit            └── no room for the answers
                                                  ▼                                  ▼
                                                ended                              ended

Rooms are TRL's: the answers of a turn are taken back if they exceed ``max_completion_length`` or fill the context, and
the trajectory then ends as it was; own tokens are cut to what is left. With an engine that answers in rounds the loop
asks for all that is ready, in the order of the batch, once every tool has answered. So the draws come in the order of
TRL's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_lab.engines.thinking_budget import ThinkingBudget
from grpo_lab.threads import in_thread
from grpo_lab.turns.dialogue import ChatDialogue
from grpo_lab.turns.journal import TurnJournal
from grpo_lab.turns.protocols import TurnEngine, TurnTokens
from grpo_lab.turns.thinking import BudgetedTurns
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.trajectory import Call, Trajectory
from grpo_lab.turns.turn_settings import TurnSettings

#: Seconds of one wait for the engine: while tools are at work, and else.
SHORT_LOOK = 0.005
LONG_LOOK = 1.0
#: What the policy is told of a call that cannot be read (``rollout.turns.unparsable: answer``).
UNREADABLE = {"error": "The tool call could not be read: it is no valid JSON with a name and arguments."}


@dataclass(frozen=True)
class LoopLimits:
    """Limits of the trajectories of one batch, in tokens and turns.

    Args:
        settings: limits of a turn, and what a call that cannot be read does (``rollout.turns``).
        max_turns: turns that the policy may write.
        completion: tokens of a completion, tool answers included (``max_completion_length``).
        context: tokens of prompt and completion that the engine takes.
        ends: tokens that end a turn.
    """

    settings: TurnSettings
    max_turns: int
    completion: int
    context: int
    ends: Collection[int]

    def room(self, one: Trajectory) -> int:
        """Return how many tokens the next turn may have."""
        left = self.completion - len(one.ids)
        if self.settings.turn_tokens is None:
            return left
        return min(left, self.settings.turn_tokens)

    def admit(self, one: Trajectory, foreign: Sequence[int]) -> bool:
        """Return whether tokens of tools fit behind a trajectory, and leave the engine something to write."""
        completion = len(one.ids) + len(foreign)
        return completion <= self.completion and len(one.prompt) + completion < self.context


@dataclass(frozen=True)
class Offer:
    """What a trajectory may call: the tools by name, and as the template was told of them (``schemas``)."""

    tools: Mapping[str, Callable[..., Any]]
    schemas: Any = None


class TurnLoop:
    """The trajectories of one batch, on their way.

    Args:
        trajectories: they are replaced in this list as they go on. After an error it holds how far each has come, and a
            new loop goes on from there.
        offers: what each of them may call.
        thinking: budget of thinking in each turn, where it leaves room for an answer.
        journal: stands before engine and tools.
    """

    def __init__(
        self,
        trajectories: list[Trajectory],
        offers: Sequence[Offer],
        engine: TurnEngine,
        dialogue: ChatDialogue,
        tools: ToolCalls,
        limits: LoopLimits,
        thinking: ThinkingBudget | None = None,
        journal: TurnJournal | None = None,
    ) -> None:
        self.trajectories = trajectories
        self.offers = offers
        self.engine = engine
        if journal is not None:
            self.engine = journal.engine(self.engine)
        if thinking is not None:
            self.engine = BudgetedTurns(self.engine, thinking)
        self.dialogue = dialogue
        self.tools = tools
        self.limits = limits
        self.journal = journal
        self._waiting = deque(key for key, one in enumerate(trajectories) if one.ended is None)
        self._ready = set[int]()
        self._at_engine = set[int]()
        self._at_tools: dict[int, Future[list[Call]]] = {}

    def run(self) -> list[Trajectory]:
        """Go on until every trajectory has ended. An error is raised once the tools at work have answered."""
        try:
            while self._waiting or self._on_their_way:
                self._begin()
                self._hear_tools()
                self._ask()
                self._hear_engine()
        except Exception:
            wait(self._at_tools.values())
            self._take_answers()
            raise
        return self.trajectories

    @property
    def _on_their_way(self) -> int:
        return len(self._ready) + len(self._at_engine) + len(self._at_tools)

    def _begin(self) -> None:
        """Begin what waits, as far as ``max_concurrent`` allows."""
        most = self.limits.settings.max_concurrent or len(self.trajectories)
        while self._waiting and self._on_their_way < most:
            self._ready.add(self._waiting.popleft())

    def _hear_tools(self) -> None:
        """Take the answers that are there. Wait for all of them if the engine answers in rounds, and for one if the
        engine has nothing to do."""
        if self.engine.in_rounds:
            wait(self._at_tools.values())
        elif not self._ready and not self._at_engine:
            wait(self._at_tools.values(), return_when=FIRST_COMPLETED)
        self._take_answers()

    def _take_answers(self) -> None:
        for key in [key for key, answer in self._at_tools.items() if answer.done()]:
            self._answer(key, self._at_tools.pop(key).result())

    def _ask(self) -> None:
        """Ask the engine for all that is ready. Nothing is drawn where no token fits, except in rounds, as in TRL's."""
        for key in sorted(self._ready):
            self._ready.remove(key)
            one = self.trajectories[key]
            room = self.limits.room(one)
            if room == 0 and not self.engine.in_rounds:
                self._end(key, one, "completion")
                continue
            self._at_engine.add(key)
            self.engine.submit(key, one.so_far, room)

    def _hear_engine(self) -> None:
        """Take the turns that are written."""
        if not self._at_engine:
            return
        look = LONG_LOOK
        if self._at_tools:
            look = SHORT_LOOK
        for key, made in self.engine.collect(look):
            self._at_engine.remove(key)
            self._end_turn(key, made.within(self.limits.room(self.trajectories[key])))

    def _end_turn(self, key: int, written: TurnTokens) -> None:
        """Add a turn to its trajectory; then call its tools, or end."""
        before = self.trajectories[key]
        if not written.ids:
            self._end(key, before, "completion")
            return
        one = before.with_own(written)
        parsed = self.dialogue.parsed(written.ids, before.so_far, self.offers[key].schemas)
        unreadable = parsed.unparsable
        cut = self._cut(before, written)
        last = one.turns[-1]
        if cut == "turn_tokens":
            last = replace(last, limit=cut)
        one = replace(one, messages=[*one.messages, parsed.message], turns=(*one.turns[:-1], last))
        self.trajectories[key] = one
        calls = parsed.message.get("tool_calls")
        answered = bool(calls) or (unreadable and self.limits.settings.unparsable == "answer")
        if answered and len(one.turns) >= self.limits.max_turns:
            self._end(key, one, "turns")
        elif calls:
            self._call(key, calls)
        elif answered:
            self._answer(key, [Call("unknown", None, UNREADABLE, failure="unparsable", tries=0)])
        elif cut is not None:
            self._end(key, one, cut)
        elif unreadable:
            self._end(key, one, "unparsable")
        else:
            self._end(key, one, "answered")

    def _cut(self, before: Trajectory, written: TurnTokens) -> str | None:
        """Return the limit that cut a turn: ``completion`` (the context, too) or ``turn_tokens``; None if none did."""
        if written.ids[-1] in self.limits.ends:
            return None
        whole = len(before.ids) + len(written.ids)
        if whole >= self.limits.completion or len(before.prompt) + whole >= self.limits.context:
            return "completion"
        if len(written.ids) == self.limits.settings.turn_tokens:
            return "turn_tokens"
        return None

    def _call(self, key: int, calls: Sequence[Mapping[str, Any]]) -> None:
        """Begin a turn's calls, in a thread of their own."""
        work = partial(self.tools.make, calls, self.offers[key].tools)
        if self.journal is not None:
            work = partial(self.journal.make, key, calls, self.offers[key].tools, self.tools.make)
        self._at_tools[key] = in_thread(work, "turns: calls")

    def _answer(self, key: int, calls: Sequence[Call]) -> None:
        """Put the answers of a turn's calls behind it, if there is room for them."""
        one = self.trajectories[key]
        last = replace(one.turns[-1], calls=tuple(calls))
        if any(call.cut for call in calls):
            last = replace(last, limit="tool_tokens")
        one = replace(one, turns=(*one.turns[:-1], last))
        messages = [message_of(call) for call in calls]
        ids = self.dialogue.answers(messages, one.so_far)
        if not self.limits.admit(one, ids):
            self._end(key, one, "completion")
            return
        self.trajectories[key] = replace(one.with_foreign(ids), messages=[*one.messages, *messages])
        self._ready.add(key)

    def _end(self, key: int, one: Trajectory, reason: str) -> None:
        turns = one.turns
        if turns:
            turns = (*turns[:-1], replace(turns[-1], ended=reason))
        self.trajectories[key] = replace(one, turns=turns, ended=reason)


def message_of(call: Call) -> dict[str, Any]:
    """Return the message that tells the policy a tool's answer, as TRL writes it: a list as it is, else text."""
    content = call.answer
    if not isinstance(content, list):
        content = str(content)
    return {"role": "tool", "name": call.name, "content": content}
