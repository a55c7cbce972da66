"""The journal of turns: a loop that is killed and begun anew gets the same answers, and makes no call twice."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.turns.journal import INTERRUPTED, TurnJournal
from grpo_lab.turns.loop import LoopLimits, Offer, TurnLoop
from grpo_lab.turns.protocols import ParsedTurn, TurnTokens
from grpo_lab.turns.tools import Wanted
from grpo_lab.turns.trajectory import Call, Trajectory
from grpo_lab.turns.turn_settings import TurnSettings, plain_state, repeatable

HEADER = {"step": 3, "prompts": "abc", "temperature": 0.7}
PROMPTS = [[1, 2], [3], [4, 5, 6]]
END, CALL = 0, 9


class Drawn:
    """Draws from the tokens before (``life`` 0), or otherwise in each life; every third turn ends the trajectory."""

    def __init__(self, in_rounds: bool = False, life: int = 0) -> None:
        self.in_rounds = in_rounds
        self.life = life
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self._waiting: list[tuple[int, TurnTokens]] = []

    def submit(self, key: int, ids: list[int], room: int) -> None:
        self.asked.append((key, tuple(ids)))
        drawn = hashlib.sha256(f"{ids} {self.life}".encode()).digest()
        last = END if ids.count(CALL) == 2 else CALL
        made = [20 + drawn[0], 20 + drawn[1], last]
        self._waiting.append((key, TurnTokens(made, [-drawn[2] / 7, math.nan, None], 3)))

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        answers = self._waiting
        self._waiting = []
        return answers


class Words:
    """Tokens as messages: one that ends with ``CALL`` calls ``write`` with the token before, and ``look``."""

    def parsed(self, ids: list[int], prefix: list[int], tools: Any) -> ParsedTurn:
        message: dict[str, Any] = {"role": "assistant", "content": str(ids)}
        if ids[-1] == CALL:
            named = [("write", {"n": ids[-2]}), ("look", {})]
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in named
            ]
        return ParsedTurn(message)

    def answers(self, messages: Sequence[Mapping[str, Any]], before: Sequence[int]) -> list[int]:
        return [300 + len(str(one["content"])) for one in messages]

    def cut(self, text: str, tokens: int) -> tuple[str, bool]:
        return text, False


class AtOnce:
    """Makes calls without threads of their own."""

    def make(self, calls: Sequence[Mapping[str, Any]], tools: Mapping[str, Callable[..., Any]]) -> list[Call]:
        read = [Wanted.read(call, tools) for call in calls]
        return [Call(one.name, one.arguments, str(one.tool(**one.arguments))) for one in read if one.tool]


class World:
    """An environment with everything; the tests take away what they do not want."""

    def __init__(self, said: list[Any]) -> None:
        self.seen: list[int] = []
        self.said = said

    def write(self, n: int) -> str:
        self.seen.append(n)
        self.said.append(n)
        return f"{sum(self.seen)} after {len(self.seen)}"

    def look(self) -> str:
        return str(self.seen)


class Kept(World):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Replayed(World):
    deterministic = True


def play(
    file: Path,
    engine: Drawn,
    worlds: list[Any] | None,
    tools: list[dict[str, Any]],
    said: Callable[[str], None] = lambda words: None,
    header: Mapping[str, Any] = HEADER,
) -> list[Trajectory]:
    journal = TurnJournal(file, header, worlds, said)
    limits = LoopLimits(TurnSettings(), max_turns=9, completion=60, context=90, ends={END})
    offers = [Offer(one) for one in tools]
    loop = TurnLoop(
        [Trajectory.begin(ids) for ids in PROMPTS], offers, engine, Words(), AtOnce(), limits, None, journal
    )
    try:
        return loop.run()
    finally:
        journal.close()


def of_worlds(worlds: list[Any]) -> list[dict[str, Any]]:
    return [{"write": one.write, "look": one.look} for one in worlds]


def comparable(made: list[Trajectory]) -> str:
    return repr(made)  # NaN is not equal to itself


@pytest.mark.not_fast
@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("kind", [None, Kept, Replayed])
def test_a_kill_at_any_byte_loses_no_answer_and_makes_no_call_twice(
    tmp_path: Path, in_rounds: bool, kind: type | None
) -> None:
    """The engine draws otherwise in each life: what is the same afterwards came from the journal."""
    whole = tmp_path / "whole"
    effects: list[tuple[int, Any]] = []  # (bytes of the journal when the call was made, what was written)

    def begin(file: Path, life: int, sink: Callable[[Any], None]) -> tuple[Drawn, list[Trajectory]]:
        engine = Drawn(in_rounds, 0 if in_rounds else life)

        class Sink(list[Any]):
            def append(self, value: Any) -> None:
                sink(value)

        if kind is not None:
            worlds: Any = [kind(Sink()) for _ in PROMPTS]
            return engine, play(file, engine, worlds, of_worlds(worlds))
        own = [World(Sink()) for _ in PROMPTS]  # their methods as tools without environment
        return engine, play(file, engine, None, of_worlds(own))

    asked, right = begin(whole, 0, lambda value: effects.append((whole.stat().st_size, value)))
    content = whole.read_bytes()
    ends = [place for place, byte in enumerate(content) if byte == ord("\n")]
    for cut in sorted({0, *ends, *[end + 1 for end in ends], *range(30, len(content), 211)}):
        torn = tmp_path / "torn"
        torn.write_bytes(content[:cut])
        kept = [json.loads(line) for line in content[:cut].splitlines(keepends=True) if line.endswith(b"\n")]
        before = [value for at, value in effects if at <= cut]
        after: list[Any] = []
        engine, made = begin(torn, 1, after.append)
        answered = sum("tokens" in one for one in kept)
        if not in_rounds:
            assert len(engine.asked) == len(asked.asked) - answered
        if kind is not Replayed:
            repeated = [value for value in after if value in before]
            assert repeated == []
            interrupted = [call for one in made for turn in one.turns for call in turn.calls if call.failure]
            assert len(interrupted) <= 2 * len(PROMPTS)
            assert all(call.failure == "interrupted" and INTERRUPTED in call.answer for call in interrupted)
        elif in_rounds:
            assert comparable(made) == comparable(right)  # every call is made again
        again, same = begin(torn, 2, lambda value: None)  # a second kill, at the end: all is there
        assert comparable(same) == comparable(made)
        assert in_rounds or again.asked == []


def test_a_call_on_its_way_is_made_again_only_if_it_may_be(tmp_path: Path) -> None:
    made: list[int] = []

    def write(n: int) -> str:
        made.append(n)
        return "done"

    looks = repeatable(lambda: "seen")
    file = tmp_path / "j"
    tools = [{"write": write, "look": looks}] * len(PROMPTS)
    play(file, Drawn(), None, tools)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"answers"' not in line or json.loads(line)["turn"] != 1))
    made.clear()
    found = play(file, Drawn(life=1), None, tools)
    for one in found:
        first, look = one.turns[0].calls
        assert (first.failure, look.failure, look.answer) == ("interrupted", None, "seen")
        assert first.answer == str({"error": INTERRUPTED})
        assert [call.answer for turn in one.turns[1:] for call in turn.calls if call.name == "write"] == ["done"]
    assert len(made) == len(PROMPTS)  # the second turns' calls, since other tokens stand before them


def test_an_environment_that_offers_nothing_is_drawn_anew_as_a_group(tmp_path: Path) -> None:
    words: list[str] = []
    worlds: list[Any] = [World([]), World([]), Kept([])]
    play(tmp_path / "j", Drawn(), worlds, of_worlds(worlds))
    worlds = [World([]), World([]), Kept([])]
    engine = Drawn(life=1)
    made = play(tmp_path / "j", engine, worlds, of_worlds(worlds), words.append)
    assert {key for key, _ in engine.asked} == {0, 1}
    assert worlds[2].seen == [one.ids[1] for one in [made[2]]] + [made[2].ids[6]]
    assert any("groups of World are drawn anew" in one for one in words)


@pytest.mark.parametrize(
    ("name", "value"), [("step", 2), ("prompts", "abd"), ("temperature", 1.0)], ids=["step", "prompts", "settings"]
)
def test_a_journal_of_another_batch_is_not_used(tmp_path: Path, name: str, value: Any) -> None:
    words: list[str] = []
    tools = [{"write": lambda n: "ok", "look": lambda: "ok"}] * len(PROMPTS)
    play(tmp_path / "j", Drawn(), None, tools)
    engine = Drawn(life=1)
    play(tmp_path / "j", engine, None, tools, words.append, {**HEADER, name: value})
    assert len(engine.asked) == 9
    assert len(words) == 1
    assert f"is of another batch ({name})" in words[0]


def test_a_false_mark_is_named(tmp_path: Path) -> None:
    class False_mark(Replayed):
        def look(self) -> str:
            return str(time.monotonic_ns())

    worlds: list[Any] = [False_mark([]) for _ in PROMPTS]
    play(tmp_path / "j", Drawn(), worlds, of_worlds(worlds))
    worlds = [False_mark([]) for _ in PROMPTS]
    with pytest.raises(ValueError, match="False_mark says that it is `deterministic`, and its tool look answers"):
        play(tmp_path / "j", Drawn(), worlds, of_worlds(worlds))


@pytest.mark.parametrize("state", [{1: "a"}, {"a": (1, 2)}, {"a": math.nan}, {"a": {3}}, {"a": b""}])
def test_a_state_that_is_not_plain_is_refused(state: Any) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match="`state_dict` of Odd holds more than plain values"):
        plain_state(Odd())


def test_what_a_policy_writes_ends_no_run_and_what_a_tool_answers_is_checked(tmp_path: Path) -> None:
    journal = TurnJournal(tmp_path / "j", HEADER, None, print)
    for odd in [{"function": 3}, {"type": "image"}, {}, {"function": {"name": ["a"], "arguments": {"x": math.nan}}}]:
        assert journal.make(0, [odd], {}, lambda calls, tools: [Call("unknown", None, "no")])
    with pytest.raises(ValueError, match="the tool picture cannot be kept for a resume"):
        journal.make(1, [{"name": "picture"}], {}, lambda calls, tools: [Call("picture", {}, [b"..."])])
    journal.close()


def test_a_lost_server_is_asked_again_and_counts_once(tmp_path: Path) -> None:
    """A new loop of this process goes on with the same journal."""
    journal = TurnJournal(tmp_path / "j", HEADER, None, print)
    engine = Drawn()
    first = journal.engine(engine)
    first.submit(0, [1], 9)
    second = journal.engine(engine)  # the request was lost
    engine._waiting.clear()
    second.submit(0, [1], 9)
    second.collect(0)
    journal.close()
    again = TurnJournal(tmp_path / "j", HEADER, None, print)
    assert list(again.requests) == [(0, 1)]
    again.close()
