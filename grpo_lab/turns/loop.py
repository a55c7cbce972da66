"""The loop over turns: each trajectory goes on as soon as its own tools have answered.

The states of a trajectory (an index into ``TurnLoop.trajectories``), and the methods that move it on:

    waiting ─ _begin ─▶ ready ─ _ask ─▶ at the engine ─ _end_turn ─▶ at the tools ─ _answer ─▶ ready
                                         │                            │
                                         └─ no call, or a limit       └─ no room for the answers
                                              ▼                            ▼
                                            ended                        ended

Limits of length are TRL's: the policy's own tokens are cut to what is left of ``max_completion_length``. If the answers
of a turn exceed it or fill the context, they are left out, and the trajectory ends without them. With an engine that
answers in rounds the loop asks for all that is ready, in the order of the batch, once every tool has answered. So the
engine draws in the order of TRL's loop.
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

#: Seconds of one wait for the engine: while tools are at work, and while none is.
SHORT_LOOK = 0.005
LONG_LOOK = 1.0
#: What the policy is told of a call that cannot be read (``rollout.turns.unparsable: answer``).
UNREADABLE = {"error": "The tool call could not be read: it is no valid JSON with a name and arguments."}


@dataclass(frozen=True)
class LoopLimits:
    """Limits of the trajectories of one batch, in tokens and turns.

    Args:
        settings: limits of a turn, and what happens after a call that cannot be read (``rollout.turns``).
        max_turns: turns that the policy may write.
        completion: tokens of a completion, tool answers included (``max_completion_length``).
        context: tokens of prompt and completion together (the engine's context).
        ends: tokens that end a turn.
    """

    settings: TurnSettings
    max_turns: int
    completion: int
    context: int
    ends: Collection[int]

    def room(self, trajectory: Trajectory) -> int:
        """Return how many tokens the next turn of a trajectory may have."""
        left = self.completion - len(trajectory.ids)
        if self.settings.turn_tokens is None:
            return left
        return min(left, self.settings.turn_tokens)

    def admit(self, trajectory: Trajectory, foreign: Sequence[int]) -> bool:
        """Return whether tool answers, the tokens ``foreign``, fit behind a trajectory: into ``completion``, and with
        at least one token left in ``context``."""
        completion = len(trajectory.ids) + len(foreign)
        return completion <= self.completion and len(trajectory.prompt) + completion < self.context


@dataclass(frozen=True)
class Offer:
    """Tools that a trajectory may call.

    Args:
        tools: name → function.
        schemas: the same tools as the chat template was told of them.
    """

    tools: Mapping[str, Callable[..., Any]]
    schemas: Any = None


class TurnLoop:
    """Takes the trajectories of one batch through their turns.

    Args:
        trajectories: trajectories to go on with. Each is replaced in this list as it goes on, so that after an error
            the list says how far each has come, and a new loop goes on from there.
        offers: the tools of each trajectory.
        engine: writes the turns.
        dialogue: turns tokens into messages, and tools' messages into tokens.
        tools: makes the calls.
        limits: limits of the trajectories.
        thinking: budget of thinking in each turn (``BudgetedTurns``); ``None``: no budget.
        journal: answers in the place of engine and tools what it knows from before a kill; ``None``: no journal.
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
        """Go on until every trajectory has ended, and return all. An error is raised only after the tools at work have
        answered, so that their answers are kept."""
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
        """Make waiting trajectories ready, as far as ``max_concurrent`` allows."""
        most = self.limits.settings.max_concurrent or len(self.trajectories)
        while self._waiting and self._on_their_way < most:
            self._ready.add(self._waiting.popleft())

    def _hear_tools(self) -> None:
        """Take the answers of tools that have come. Before that wait for all of them if the engine answers in rounds,
        or for one if the engine has nothing to do."""
        if self.engine.in_rounds:
            wait(self._at_tools.values())
        elif not self._ready and not self._at_engine:
            wait(self._at_tools.values(), return_when=FIRST_COMPLETED)
        self._take_answers()

    def _take_answers(self) -> None:
        """Take the answers of tools that have come, without waiting."""
        for key in [key for key, answer in self._at_tools.items() if answer.done()]:
            self._answer(key, self._at_tools.pop(key).result())

    def _ask(self) -> None:
        """Ask the engine for a turn of each ready trajectory. One without room for a token ends instead; but an engine
        that answers in rounds is asked for it too, as in TRL's loop."""
        for key in sorted(self._ready):
            self._ready.remove(key)
            trajectory = self.trajectories[key]
            room = self.limits.room(trajectory)
            if room == 0 and not self.engine.in_rounds:
                self._end(key, trajectory, "completion")
                continue
            self._at_engine.add(key)
            self.engine.submit(key, trajectory.so_far, room)

    def _hear_engine(self) -> None:
        """Take the turns that the engine has written."""
        if not self._at_engine:
            return
        look = LONG_LOOK
        if self._at_tools:
            look = SHORT_LOOK
        for key, made in self.engine.collect(look):
            self._at_engine.remove(key)
            self._end_turn(key, made.within(self.limits.room(self.trajectories[key])))

    def _end_turn(self, key: int, written: TurnTokens) -> None:
        """Add the turn ``written`` to trajectory ``key``; then begin its calls of tools, or end the trajectory."""
        before = self.trajectories[key]
        if not written.ids:
            self._end(key, before, "completion")
            return
        parsed = self.dialogue.parsed(written.ids, before.so_far, self.offers[key].schemas)
        trajectory = replace(before.with_own(written), messages=[*before.messages, parsed.message])
        cut = self._cut(before, written)
        if cut == "turn_tokens":
            trajectory = trajectory.with_last_turn(limit=cut)
        self.trajectories[key] = trajectory
        calls = parsed.message.get("tool_calls")
        unreadable = parsed.unparsable
        answered = bool(calls) or (unreadable and self.limits.settings.unparsable == "answer")
        if answered and len(trajectory.turns) >= self.limits.max_turns:
            self._end(key, trajectory, "turns")
        elif calls:
            self._call(key, calls)
        elif answered:
            self._answer(key, [Call("unknown", None, UNREADABLE, failure="unparsable", tries=0)])
        elif cut is not None:
            self._end(key, trajectory, cut)
        elif unreadable:
            self._end(key, trajectory, "unparsable")
        else:
            self._end(key, trajectory, "answered")

    def _cut(self, before: Trajectory, written: TurnTokens) -> str | None:
        """Return the limit that cut the turn ``written`` after the trajectory ``before``: ``completion`` (also for the
        context) or ``turn_tokens``; None if none did."""
        if written.ids[-1] in self.limits.ends:
            return None
        whole = len(before.ids) + len(written.ids)
        if whole >= self.limits.completion or len(before.prompt) + whole >= self.limits.context:
            return "completion"
        if len(written.ids) == self.limits.settings.turn_tokens:
            return "turn_tokens"
        return None

    def _call(self, key: int, calls: Sequence[Mapping[str, Any]]) -> None:
        """Begin a turn's calls of tools, in a thread of their own."""
        work = partial(self.tools.make, calls, self.offers[key].tools)
        if self.journal is not None:
            work = partial(self.journal.make, key, calls, self.offers[key].tools, self.tools.make)
        self._at_tools[key] = in_thread(work, "turns: calls")

    def _answer(self, key: int, calls: Sequence[Call]) -> None:
        """Put the answers of a turn's calls behind it, after which the trajectory is ready; end it if there is no room
        for them."""
        trajectory = self.trajectories[key].with_last_turn(calls=tuple(calls))
        if any(call.cut for call in calls):
            trajectory = trajectory.with_last_turn(limit="tool_tokens")
        messages = [message_of(call) for call in calls]
        ids = self.dialogue.answers(messages, trajectory.so_far)
        if not self.limits.admit(trajectory, ids):
            self._end(key, trajectory, "completion")
            return
        self.trajectories[key] = replace(trajectory.with_foreign(ids), messages=[*trajectory.messages, *messages])
        self._ready.add(key)

    def _end(self, key: int, trajectory: Trajectory, reason: str) -> None:
        """End ``trajectory``, whose index is ``key``, for a reason (``Trajectory.ended``)."""
        if trajectory.turns:
            trajectory = trajectory.with_last_turn(ended=reason)
        self.trajectories[key] = replace(trajectory, ended=reason)


def message_of(call: Call) -> dict[str, Any]:
    """Return the message with which a tool answers the policy, as TRL writes it: a list as it is, else text."""
    content = call.answer
    if not isinstance(content, list):
        content = str(content)
    return {"role": "tool", "name": call.name, "content": content}
