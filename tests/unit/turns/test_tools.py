"""Calls of tools: hostile ones in threads, processes and coroutines, TRL's order and texts, limits, side by side."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_tools as hostile
import pytest
from trl import GRPOTrainer

from grpo_lab.sandbox.workers import VerifierError
from grpo_lab.threads import in_thread
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.trajectory import Call
from grpo_lab.turns.turn_settings import TurnSettings, in_process, repeatable


def words(text: str, most: int) -> tuple[str, bool]:
    """As ``ChatDialogue.cut``, with letters for tokens."""
    return (text[:most] + "…", True) if len(text) > most else (text, False)


def wanted(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def named(*tools: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {tool.__name__: tool for tool in tools}


@pytest.fixture
def tool_calls() -> Iterator[Callable[..., ToolCalls]]:
    made: list[ToolCalls] = []

    def build(**settings: Any) -> ToolCalls:
        made.append(ToolCalls(TurnSettings(**settings), words))
        return made[-1]

    yield build
    for one in made:
        one.close()


def begun(calls: ToolCalls, *turn: Any) -> Future[list[Call]]:
    return in_thread(partial(calls.make, *turn), "turns: calls")


def result(future: Future[list[Call]]) -> list[Call]:
    return future.result(timeout=60)


def said(calls: list[Call]) -> list[Any]:
    return [call.answer for call in calls]


PLACES = [hostile.in_thread, hostile.in_own_process, hostile.as_async, hostile.as_async_in_process]
ERROR = "{'error': %r}"
#: kind → the answer, or what it begins with (…), and the failure
ANSWERS: dict[str, tuple[Any, str | None]] = {
    "raise": (ERROR % "it's wrong", "raised"),
    "raise_mute": (ERROR % "MuteError", "raised"),
    "exit": (ERROR % "3", "raised"),
    "interrupt": (ERROR % "", "raised"),
    "print": ("done: print", None),
    "children": ("done: children", None),
    "megabytes": ("0123456789" * 1_000_000, None),
    "nul": ("a\ufffdb\ufffdc", None),
    "none": ("None", None),
    "mute": (ERROR % "no text", "raised"),
    "bytes": ("b'\\xff'", None),
    "loud": ("loud", None),
    "nested": (ERROR % "maximum recursion depth exceeded while getting the repr of an object", "raised"),
    "wide": (str({str(n): [n] * 10 for n in range(5_000)}), None),
    "blocks": ([{"type": "text", "text": "an image"}, {"type": "image", "image": "x.png"}], None),
    "fork": ("done: fork", None),
}


@pytest.mark.not_fast
@pytest.mark.parametrize("tool", PLACES, ids=lambda tool: tool.__name__)
def test_hostile_tools(tool: Callable[..., Any], tool_calls: Any) -> None:
    calls = tool_calls(tool_seconds=1)
    calls.make([wanted(tool.__name__, kind="first")], named(tool))
    (call,) = calls.make([wanted(tool.__name__, kind="hang")], named(tool))
    assert (call.answer, call.failure, call.tries) == (ERROR % "no answer within 1 s", "timed_out", 1)
    calls = tool_calls(tool_seconds=50)
    futures = {kind: begun(calls, [wanted(tool.__name__, kind=kind)], named(tool)) for kind in ANSWERS}
    for kind, (answer, failure) in ANSWERS.items():
        (call,) = result(futures[kind])
        assert (call.answer, call.failure, call.tries) == (answer, failure, 1), kind
        assert type(call.answer) in (str, list)
        assert call.seconds < 20
    (after,) = calls.make([wanted(tool.__name__, kind="good")], named(tool))
    assert (after.answer, after.failure) == ("done: good", None)


# -- TRL's loop on the same calls --------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    return a + b


def fails(a: int) -> None:
    raise RuntimeError(f"no {a}")


async def slow(a: int) -> str:
    await asyncio.sleep(0.02)
    return f"slow {a}"


async def quick(a: int) -> dict[str, int]:
    return {"a": a}


async def falls(a: int) -> None:
    raise KeyError(a)


TRANSCRIPTS = [
    [wanted("slow", a=1), wanted("add", a=1, b=2), wanted("quick", a=2), wanted("fails", a=3), wanted("add", a=3, b=4)],
    [wanted("falls", a=1), wanted("slow", wrong=1), wanted("quick"), wanted("none", a=1), wanted("add", a=1)],
    [{"type": "custom", "name": "x"}, wanted("slow", a=3), {"type": "other"}, wanted("add", a="a", b="b")],
    [{"type": "function", "function": {"name": "add", "arguments": "1, 2"}}, wanted("quick", a=5)],
    [{"type": "function", "function": {"name": "add", "arguments": [1]}}, wanted("slow", a=5, b=6)],
    [{"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "none"}}],
    [{"type": "function", "function": {"name": "quick", "arguments": None}}],
]


def of_trl(calls: list[dict[str, Any]], tools: dict[str, Callable[..., Any]]) -> tuple[list[dict[str, Any]], int]:
    """The tools' messages that TRL's own loop makes of one turn, and how many calls it counts as failed."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    stub = SimpleNamespace(
        max_tool_calling_iterations=1,
        _sync_tool_dicts=[{name: tool for name, tool in tools.items() if not asyncio.iscoroutinefunction(tool)}],
        _async_tool_dicts=[{name: tool for name, tool in tools.items() if asyncio.iscoroutinefunction(tool)}],
        async_loop=loop,
        _get_tool_suffix_ids=lambda messages: [7],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_generation=SimpleNamespace(
            llm=SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=100)))
        ),
        max_completion_length=100,
        _is_vlm=False,
        tools=list(tools.values()),
        environment_factories=None,
        _generate_single_turn=lambda ids, *_, **__: ([[]] * len(ids), None),
    )
    completions = [[{"role": "assistant", "content": "", "tool_calls": calls}]]
    prompts = [[{"role": "user", "content": "?"}]]
    made = GRPOTrainer._tool_call_loop(stub, prompts, [[1]], [[2]], completions, None, None, {})
    loop.call_soon_threadsafe(loop.stop)
    return made[1][0][1:], made[5]


@pytest.mark.parametrize("calls", TRANSCRIPTS)
def test_the_transcript_is_that_of_trls_loop(calls: list[dict[str, Any]], tool_calls: Any) -> None:
    tools = named(add, fails, slow, quick, falls)
    stock, failures = of_trl(calls, tools)
    ours = tool_calls().make(calls, tools)
    assert [{"role": "tool", "name": call.name, "content": call.answer} for call in ours] == stock
    assert sum(call.failure is not None for call in ours) == failures
    assert {call.failure for call in ours} <= {None, "raised", "unknown", "unparsable"}


def test_the_flat_form_and_what_is_no_call(tool_calls: Any) -> None:
    calls = [{"name": "add", "arguments": {"a": 1, "b": 2}}, "add", {"function": "add"}, {}, {"name": ["add"]}]
    made = tool_calls().make(calls, named(add))
    assert [call.failure for call in made] == [None, *["unknown"] * 4]
    assert made[0].answer == "3"
    assert [call.tries for call in made] == [1, 0, 0, 0, 0]
    assert all(isinstance(call.name, str) for call in made)


def test_sync_tools_of_a_turn_run_one_after_the_other_and_async_ones_side_by_side(tool_calls: Any) -> None:
    running: list[int] = []
    most: list[int] = []

    def alone() -> None:
        running.append(1)
        time.sleep(0.02)
        most.append(len(running))
        running.pop()

    async def beside() -> None:
        await asyncio.sleep(0.2)

    began = time.monotonic()
    calls = tool_calls().make([wanted("beside"), wanted("alone")] * 5, named(alone, beside))
    assert [call.name for call in calls] == ["alone"] * 5 + ["beside"] * 5
    assert most == [1] * 5
    assert time.monotonic() - began < 5 * 0.2


# -- side by side ------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_trajectories_take_about_the_longest_chain(tool_calls: Any) -> None:
    calls = tool_calls()

    def work(seconds: float) -> None:
        time.sleep(seconds)

    chains = [[0.05 + 0.95 * (row * step % 7 / 6) ** 3 for step in range(3)] for row in range(32)]
    began = time.monotonic()
    futures = [begun(calls, [wanted("work", seconds=one) for one in chain], named(work)) for chain in chains]
    made = [result(future) for future in futures]
    took = time.monotonic() - began
    longest = max(map(sum, chains))
    assert longest <= took < 1.5 * longest + 1
    assert sum(map(sum, chains)) > 5 * longest
    for chain, done in zip(chains, made, strict=True):
        assert [call.seconds for call in done] == pytest.approx(chain, abs=0.5)


@pytest.mark.not_fast
def test_hanging_calls_give_their_places_back(tool_calls: Any) -> None:
    calls = tool_calls(threads=4, tool_seconds=0.4)
    futures = [begun(calls, [wanted("in_thread", kind="hang")], named(hostile.in_thread)) for _ in range(40)]
    (last,) = calls.make([wanted("in_thread", kind="41st")], named(hostile.in_thread))
    assert last.answer == "done: 41st"
    assert {result(future)[0].failure for future in futures} == {"timed_out"}
    assert len(futures) == 40


def test_no_more_than_threads_run_at_the_same_time(tool_calls: Any) -> None:
    running: list[int] = []
    most: list[int] = []

    def work() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    calls = tool_calls(threads=2)
    for future in [begun(calls, [wanted("work")], named(work)) for _ in range(8)]:
        result(future)
    assert max(most) == 2


@pytest.mark.not_fast
def test_no_more_than_threads_processes_are_started(tool_calls: Any) -> None:
    calls = tool_calls(threads=2)
    tools = named(hostile.own_pid, hostile.own_pid_later)
    futures = [begun(calls, [wanted(name)] * 3, tools) for name in tools for _ in range(4)]
    assert len({pid for future in futures for pid in said(result(future))}) <= 4  # two a tool


# -- limits ------------------------------------------------------------------------------------------------------------


def test_only_a_repeatable_tool_is_called_again(tool_calls: Any) -> None:
    counted: list[str] = []

    class Environment:
        repeatable = True

        def step(self) -> None:
            counted.append("step")
            raise ValueError("no")

    def once() -> None:
        counted.append("once")
        raise ValueError("no")

    hostile.third_time.calls = 0  # type: ignore[attr-defined]
    tools = {"step": Environment().step, "once": once, "third_time": hostile.third_time}
    calls = [wanted("step"), wanted("once"), wanted("third_time", counts={})]
    made = tool_calls(retries=3).make(calls, tools)
    assert [(call.failure, call.tries) for call in made] == [("raised", 4), ("raised", 1), (None, 3)]
    assert made[2].answer == "at last"
    assert made[2].arguments == {"counts": {}}  # the tool changed its own copy
    assert counted == ["step"] * 4 + ["once"]


@pytest.mark.not_fast
def test_a_call_that_is_given_up_is_made_again(tool_calls: Any) -> None:
    begun: list[int] = []

    @repeatable
    def first_hangs() -> str:
        begun.append(1)
        if len(begun) == 1:
            time.sleep(hostile.FOREVER)
        return "second"

    (call,) = tool_calls(retries=1, tool_seconds=0.2).make([wanted("first_hangs")], named(first_hangs))
    assert (call.answer, call.failure, call.tries) == ("second", None, 2)
    assert call.seconds >= 0.2


def test_texts_are_cut_and_said_to_be(tool_calls: Any) -> None:
    def tell(kind: str) -> Any:
        if kind == "raise":
            raise ValueError("x" * 100)
        return hostile.answer_of(kind)

    kinds = ["short", "megabytes", "raise", "blocks"]
    made = tool_calls(tool_tokens=15).make([wanted("tell", kind=kind) for kind in kinds], named(tell))
    assert [call.cut for call in made] == [False, True, True, False]
    assert said(made)[:3] == ["done: short", "012345678901234…", "{'error': 'xxxx…"]
    assert said(made)[3] == hostile.answer_of("blocks")
    (blocks,) = tool_calls(tool_tokens=2).make([wanted("tell", kind="blocks")], named(tell))
    assert blocks.cut
    assert blocks.answer == [{"type": "text", "text": "an…"}, {"type": "image", "image": "x.png"}]


# -- event loop --------------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_async_tools_that_block_or_will_not_be_cancelled_cost_only_themselves(tool_calls: Any) -> None:
    tools = named(hostile.block, hostile.stubborn, hostile.to_thread, quick)
    calls = tool_calls(tool_seconds=0.3)
    for name in ("stubborn", "to_thread", "block"):
        (call,) = calls.make([wanted(name)], tools)
        assert call.failure == "timed_out"
        (after,) = calls.make([wanted("quick", a=1)], tools)
        assert after.answer == "{'a': 1}"


def test_a_task_that_a_tool_leaves_behind_cannot_end_the_loop(tool_calls: Any) -> None:
    async def leave() -> str:
        async def leaves() -> None:
            raise SystemExit

        left.append(asyncio.create_task(leaves()))
        return "left"

    left: list[Any] = []
    calls = tool_calls(tool_seconds=5)
    for _ in range(3):
        (call,) = calls.make([wanted("leave")], named(leave))
        assert call.answer == "left"
    assert {type(task.exception()) for task in left} == {SystemExit}


# -- processes ---------------------------------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has reaped yet has)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("how", "failure", "answer"),
    [
        ("_exit", "raised", "the process ended with exit code 3"),
        ("abort", "raised", "the process was ended by SIGABRT"),
        ("spin", "timed_out", "no answer within 1 s"),
        ("sleep", "timed_out", "no answer within 1 s"),
    ],
)
def test_a_process_ends_with_its_children_and_is_replaced(
    how: str, failure: str, answer: str, tool_calls: Any, tmp_path: Path
) -> None:
    calls = tool_calls(tool_seconds=1)
    note = tmp_path / "pids"
    (call,) = calls.make([wanted("crash", how=how, note=str(note))], named(hostile.crash))
    assert (call.failure, call.answer) == (failure, ERROR % answer)
    assert all(gone(int(pid)) for pid in note.read_text().split())
    note.unlink()
    calls.make([wanted("crash", how="_exit", note=str(note))], named(hostile.crash))
    assert note.exists()


@pytest.mark.not_fast
def test_a_process_is_kept_for_the_next_call_and_sees_no_secrets(
    tool_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    calls = tool_calls()
    tools = named(hostile.own_pid, hostile.environment)
    pids = said(calls.make([wanted("own_pid")] * 3, tools))
    assert len(set(pids)) == 1
    assert int(pids[0]) != os.getpid()
    assert said(calls.make([wanted("environment", name="HF_TOKEN")], tools)) == ["None"]
    os.kill(int(pids[0]), 9)  # while it waits
    while Path(f"/proc/{pids[0]}").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    (after,) = said(calls.make([wanted("own_pid")], tools))
    assert after != pids[0]
    calls.close()
    assert gone(int(after))
    with pytest.raises(RuntimeError, match="closed"):
        calls.make([wanted("own_pid")], tools)


@pytest.mark.not_fast
def test_who_forgets_to_close_leaves_no_process_and_no_loop() -> None:
    before = threading.active_count()
    calls = ToolCalls(TurnSettings(), words)
    (call,) = calls.make([wanted("own_pid")], named(hostile.own_pid))
    if os.fork() == 0:
        calls.close()  # not its own
        os._exit(0)
    os.wait()
    assert said(calls.make([wanted("own_pid")], named(hostile.own_pid))) == [call.answer]
    del calls
    gc.collect()
    assert gone(int(call.answer))
    for _ in range(100):
        if threading.active_count() <= before:
            return
        time.sleep(0.05)
    raise AssertionError(threading.enumerate())


def test_tools_that_cannot_run_in_a_process_are_refused(tool_calls: Any) -> None:
    class Environment:
        @in_process
        def step(self) -> None: ...

    @in_process
    def local() -> None: ...

    for tool, why in ((Environment().step, "a method of an object"), (local, "cannot be imported")):
        with pytest.raises(ValueError, match=why):
            tool_calls().check([tool])
        with pytest.raises(ValueError, match=why):
            tool_calls().make([wanted(tool.__name__)], named(tool))


@pytest.mark.not_fast
def test_a_tool_that_cannot_be_imported_in_a_process_ends_the_run(tool_calls: Any, tmp_path: Path) -> None:
    """A module that exists in this process alone."""
    module = type(sys)("only_here")
    exec("def here(): return 1", module.__dict__)
    sys.modules["only_here"] = module
    try:
        here = in_process(module.here)
        with pytest.raises(VerifierError, match="only_here:here could be started"):
            tool_calls().make([wanted("here")], {"here": here})
    finally:
        del sys.modules["only_here"]


PROGRAM = """
import json, os, sys, time
from functools import partial
import hostile_tools as hostile
from grpo_lab.threads import in_thread
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.turn_settings import TurnSettings
tools = {one.__name__: one for one in (hostile.in_thread, hostile.as_async, hostile.to_thread, hostile.block,
                                       hostile.own_pid, hostile.crash)}
calls = ToolCalls(TurnSettings(tool_seconds=0.5), lambda text, most: (text, False))
def call(name, **arguments):
    return in_thread(partial(calls.make, [{"name": name, "arguments": arguments}], tools), name)
pid = call("own_pid").result()[0].answer
hanging = [call("in_thread", kind="hang"), call("as_async", kind="hang"), call("to_thread"), call("block")]
failures = [one.result()[0].failure for one in hanging]
on_the_way = call("crash", how="sleep", note=sys.argv[1])
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
if sys.argv[2] == "close":
    calls.close()
print(json.dumps([int(pid), failures]))
"""


@pytest.mark.not_fast
@pytest.mark.parametrize("end", ["close", "leave"])
def test_nothing_keeps_the_interpreter_from_ending_and_no_process_stays(end: str, tmp_path: Path) -> None:
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "pids"), end],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    pid, failures = json.loads(ran.stdout)
    assert failures == ["timed_out"] * 4
    assert all(gone(one) for one in (pid, *map(int, (tmp_path / "pids").read_text().split())))
    assert "Traceback" not in ran.stderr
