"""The loop over turns, with an engine and tools that answer when the test lets them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest

from grpo_lab.engines.thinking_budget import ThinkingBudget
from grpo_lab.turns.loop import LoopLimits, Offer, TurnLoop
from grpo_lab.turns.protocols import ParsedTurn, TurnTokens
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.trajectory import Call, Trajectory
from grpo_lab.turns.turn_settings import TurnSettings

END, CALL, BROKEN, TOOL = 1, 2, 3, 90
PROMPT = [5, 6, 7]


class Numbers:
    """A dialogue of numbers: a turn with CALL in it calls ``tool`` with what stands behind; an answer is TOOL, n · 80 +
    k and TOOL, where n is the number of messages."""

    def parsed(self, ids: list[int], prefix: list[int], tools: Any) -> ParsedTurn:
        message: dict[str, Any] = {"role": "assistant", "content": str(ids)}
        if CALL in ids:
            argument = ids[ids.index(CALL) + 1]
            message["tool_calls"] = [{"type": "function", "function": {"name": "tool", "arguments": {"a": argument}}}]
        return ParsedTurn(message, BROKEN in ids)

    def answers(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        return [TOOL, *[80] * len(messages), TOOL]

    def cut(self, text: str, tokens: int) -> tuple[str, bool]:
        return text, False


class Engine:
    """Streams: answers one request a look, the last that was asked first. ``script``: (prompt and completion so far) →
    tokens; at most ``room`` of them are written."""

    def __init__(self, script: Callable[[list[int]], list[int]], in_rounds: bool = False) -> None:
        self.script = script
        self.in_rounds = in_rounds
        self.asked: list[tuple[int, list[int], int]] = []
        self.order: list[list[int]] = []

    def submit(self, key: int, ids: list[int], room: int) -> None:
        self.asked.append((key, ids, room))

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        now = self.asked if self.in_rounds else self.asked[-1:]
        self.asked = self.asked[: len(self.asked) - len(now)]
        self.order.append([key for key, _, _ in now])
        made = []
        for key, ids, room in now:
            own = self.script(ids)
            if not self.in_rounds:  # TRL's own call knows no room
                own = own[:room]
            made.append((key, TurnTokens(own, [-float(token) for token in own], version=4)))
        return made


def heard(ids: list[int]) -> int:
    return ids.count(TOOL) // 2


def calls_so_often(times: int) -> Callable[[list[int]], list[int]]:
    """A row's first prompt token says how often it calls the tool: ``times`` more."""
    return lambda ids: [10, CALL, ids[0], END] if heard(ids) < times + ids[0] % 3 else [20, END]


def limits(**changes: Any) -> LoopLimits:
    """``changes``: fields of ``LoopLimits``, or settings of turns."""
    own = {field.name for field in fields(LoopLimits)}
    settings = TurnSettings(**{name: value for name, value in changes.items() if name not in own})
    asked = {name: value for name, value in changes.items() if name in own}
    return LoopLimits(settings, **{"max_turns": 9, "completion": 60, "context": 100, "ends": {END}, **asked})


def looped(
    rows: int, engine: Any, tool: Callable[..., Any], asked: LoopLimits, **more: Any
) -> tuple[list[Trajectory], ToolCalls]:
    tools = ToolCalls(TurnSettings(), Numbers().cut)
    begun = [Trajectory.begin([row, *PROMPT]) for row in range(rows)]
    offers = [Offer({"tool": tool})] * rows
    try:
        return TurnLoop(begun, offers, engine, Numbers(), tools, asked, **more).run(), tools
    finally:
        tools.close()


def plus(a: int) -> int:
    return a + 1


def test_a_trajectory_goes_on_as_soon_as_its_own_tool_has_answered() -> None:
    """Row 0's tool answers only once row 1 has come to its end."""
    ended = threading.Event()

    def tool(a: int) -> str:
        if a == 0:
            assert ended.wait(10)
        return "x"

    def script(ids: list[int]) -> list[int]:
        if ids[0] == 1 and heard(ids) == 3:
            ended.set()
        return calls_so_often(2)(ids)

    made, _ = looped(2, Engine(script), tool, limits())
    assert [len(one.turns) for one in made] == [3, 4]
    assert [one.ended for one in made] == ["answered", "answered"]
    assert all(call.failure is None for one in made for turn in one.turns for call in turn.calls)


def test_ids_masks_log_probs_and_messages() -> None:
    (one,), _ = looped(1, Engine(calls_so_often(1)), plus, limits())
    assert one.ids == [10, CALL, 0, END, TOOL, 80, TOOL, 20, END]
    assert one.mask == [1, 1, 1, 1, 0, 0, 0, 1, 1]
    assert one.logprobs is not None
    assert [value for value, own in zip(one.logprobs, one.mask, strict=True) if own] == [-10, -2, 0, -1, -20, -1]
    assert all(math.isnan(value or 0) for value, own in zip(one.logprobs, one.mask, strict=True) if not own)
    assert [message["role"] for message in one.messages] == ["assistant", "tool", "assistant"]
    assert one.messages[1] == {"role": "tool", "name": "tool", "content": "1"}
    assert [(turn.first, turn.end, turn.version, turn.ended) for turn in one.turns] == [
        (0, 4, 4, None),
        (7, 9, 4, "answered"),
    ]


def test_rounds_ask_for_all_that_is_ready_in_the_order_of_the_batch() -> None:
    """The fast rows wait for the slow one: the draws are those of TRL's loop."""

    def tool(a: int) -> int:
        time.sleep(0.05 * (3 - a))
        return a

    engine = Engine(calls_so_often(1), in_rounds=True)
    looped(3, engine, tool, limits())
    assert engine.order == [[0, 1, 2], [0, 1, 2], [1, 2], [2]]


def test_no_more_than_max_concurrent_are_on_their_way() -> None:
    most: list[int] = []

    class Counted(Engine):
        def submit(self, key: int, ids: list[int], room: int) -> None:
            super().submit(key, ids, room)
            most.append(len(self.asked))

    made, _ = looped(6, Counted(calls_so_often(1)), plus, limits(max_concurrent=2))
    assert max(most) == 2
    assert all(one.ended == "answered" for one in made)


#: one call, then an answer; seven tokens with the tool's
ONCE = calls_so_often(1)


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize(
    ("changes", "script", "ids", "reason", "limit"),
    [
        ({"max_turns": 1}, ONCE, [10, CALL, 0, END], "turns", None),
        ({"completion": 6}, ONCE, [10, CALL, 0, END], "completion", None),  # the answer does not fit: taken back
        ({"completion": 7}, ONCE, [10, CALL, 0, END, TOOL, 80, TOOL], "completion", None),  # and nothing behind it
        ({"completion": 8}, ONCE, [10, CALL, 0, END, TOOL, 80, TOOL, 20], "completion", None),
        ({"context": 11}, ONCE, [10, CALL, 0, END], "completion", None),  # 4 of the prompt; one token must be left
        ({"turn_tokens": 1}, ONCE, [10], "turn_tokens", "turn_tokens"),
        ({}, lambda ids: [BROKEN, END], [BROKEN, END], "unparsable", None),
        ({"max_turns": 2, "unparsable": "answer"}, lambda ids: [BROKEN, END],
         [BROKEN, END, TOOL, 80, TOOL, BROKEN, END], "turns", None),
    ],
)  # fmt: skip
def test_limits(in_rounds: bool, changes: dict[str, Any], script: Any, ids: Any, reason: str, limit: Any) -> None:
    (one,), _ = looped(1, Engine(script, in_rounds), plus, limits(**changes))
    assert one.ids == ids
    assert one.ended == reason
    assert one.turns[-1].ended == reason
    assert one.turns[-1].limit == limit
    assert sum(message["role"] == "tool" for message in one.messages) == (TOOL in one.ids)
    assert len(one.ids) == len(one.mask) == len(one.logprobs or [])


def test_calls_whose_answer_was_taken_back_were_made_all_the_same() -> None:
    (one,), _ = looped(1, Engine(ONCE), plus, limits(completion=6))
    assert [call.answer for call in one.turns[0].calls] == ["1"]


def test_an_error_of_the_engine_leaves_no_call_on_its_way_and_the_loop_can_go_on() -> None:
    calls: list[int] = []
    before = set(threading.enumerate())  # hanging tools of other tests

    def tool(a: int) -> int:
        time.sleep(0.2)
        calls.append(a)
        return a

    class Gone(Engine):
        lost = True

        def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
            if self.lost and len(self.order) == 2:
                raise ConnectionError("gone")
            return super().collect(wait)

    engine = Gone(lambda ids: [10, CALL, ids[0], END] if heard(ids) < 1 else [20, END])
    tools = ToolCalls(TurnSettings(), Numbers().cut)
    begun = [Trajectory.begin([row, *PROMPT]) for row in range(3)]
    parts = (Numbers(), tools, limits())
    with pytest.raises(ConnectionError, match="gone"):
        TurnLoop(begun, [Offer({"tool": tool})] * 3, engine, *parts).run()
    assert len(calls) == 2  # of the two rows that the engine had answered
    assert sorted(heard(one.ids) for one in begun) == [0, 1, 1]
    fresh = Gone(engine.script)
    fresh.lost = False
    TurnLoop(begun, [Offer({"tool": tool})] * 3, fresh, *parts).run()
    assert sorted(calls) == [0, 1, 2]  # none was made twice
    assert [one.ended for one in begun] == ["answered"] * 3
    tools.close()
    at_work = [thread for thread in threading.enumerate() if thread.name == "turns: tool" and thread not in before]
    for thread in at_work:
        thread.join(5)
    assert not any(thread.is_alive() for thread in at_work)


def budget(tokens: int) -> ThinkingBudget:
    words = {50: "thought", 60: "</think>", END: "", 20: "answer"}

    def decode(ids: list[int]) -> str:
        return " ".join(words.get(token, "x") for token in ids)

    return ThinkingBudget(tokens, (60,), 40, {END}, decode)


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize(
    ("tokens", "own", "masks", "inserted"),
    [
        (2, [50, 50, 60, 20, END], [1, 1, 0, 1, 1], 1),  # cut in each of the two turns
        (0, [60, 20, END], [0, 1, 1], 1),
        (9, [50, 50, 50, 50, 60, 20, END], [1] * 7, 0),  # closed in time
    ],
)
def test_thinking_has_a_budget_in_each_turn(
    in_rounds: bool, tokens: int, own: list[int], masks: list[int], inserted: int
) -> None:
    def script(ids: list[int]) -> list[int]:
        here = len(ids) - 1 - ids[::-1].index(TOOL) if TOOL in ids else 3
        behind = ids[here + 1 :]
        whole = [50, 50, 50, 50, 60, 20, END]
        if 60 in behind:
            return [20, END]
        return whole[len(behind) :]

    class Thinks(Numbers):
        def parsed(self, ids: list[int], prefix: list[int], tools: Any) -> ParsedTurn:
            call = {"type": "function", "function": {"name": "tool", "arguments": {"a": 0}}}
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            if TOOL not in prefix:
                message["tool_calls"] = [call]
            return ParsedTurn(message)

    tools = ToolCalls(TurnSettings(), Numbers().cut)
    begun = [Trajectory.begin([0, *PROMPT])]
    loop = TurnLoop(
        begun, [Offer({"tool": plus})], Engine(script, in_rounds), Thinks(), tools, limits(), budget(tokens)
    )
    (one,) = loop.run()
    tools.close()
    assert one.ids == [*own, TOOL, 80, TOOL, *own]
    assert one.mask == [*masks, 0, 0, 0, *masks]
    assert [turn.inserted for turn in one.turns] == [inserted, inserted]
    assert [turn.end - turn.first for turn in one.turns] == [len(own), len(own)]


def test_without_room_for_an_answer_thinking_is_not_cut() -> None:
    (one,), _ = looped(1, Engine(lambda ids: [50] * 9), plus, limits(completion=3), thinking=budget(2))
    assert one.ids == [50, 50, 50]
    assert one.mask == [1, 1, 1]


def test_a_journal_stands_before_engine_and_tools() -> None:
    said: list[str] = []

    class Notes:
        def engine(self, engine: Any) -> Any:
            said.append("engine")
            return engine

        def make(self, key: int, calls: Any, tools: Any, make: Callable[..., list[Call]]) -> Any:
            said.append(f"calls of {key}")
            return make(calls, tools)

    looped(2, Engine(ONCE), plus, limits(), journal=Notes())
    assert said[0] == "engine"
    assert sorted(said[1:]) == ["calls of 0", "calls of 1", "calls of 1"]
