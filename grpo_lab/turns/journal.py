"""A journal of one generation batch: what the engine and the tools have answered. With it a run that was killed goes on
inside its trajectories, and makes no call twice.

Each rank writes one file of JSON lines for each batch; a kill at any byte loses at most the last line. ``key`` is the
index of a trajectory:

    the first line               the header: what must be the same in the run that reads the file
    key, request, sent, tokens   the engine's answer to a request of a trajectory; ``sent``: checksum of what was sent
    key, turn, calls             calls of a turn that are about to be made
      …, answers, state          the same calls with their answers, and the environment's ``state_dict()`` after them
    key, forgotten               all lines of this trajectory so far do not count

In a resumed run the loop begins anew. It asks engine and tools in the same order as before, and the journal answers in
their place as long as it has an answer. So limits, masks and messages come out as they were. Only engines that stream
are answered for (``RememberingEngine``). An engine that answers in rounds (``in_rounds``) is asked again, since it
draws the same tokens from the checkpoint's random numbers; then only calls are answered here.

What happens to a call in a resumed run:

    the call is of                        answered                       on its way at the kill
    a tool, or an environment with        as before; the environment's   made again if ``may_repeat``, else answered
    ``state_dict``                        state is loaded                with ``failure="interrupted"``
    a ``deterministic`` environment       made again, and compared       made again
    an environment that offers neither    its groups are drawn anew: a streaming engine's requests are not kept
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.io import append_batch, cut_to_whole_batches, no_link
from grpo_lab.turns.protocols import TurnEngine, TurnTokens
from grpo_lab.turns.tools import Wanted
from grpo_lab.turns.trajectory import Call, checksum
from grpo_lab.turns.turn_settings import goes_on, has_state, may_repeat, plain_state

Calls = Sequence[Mapping[str, Any]]
Tools = Mapping[str, Callable[..., Any]]
Make = Callable[[Calls, Tools], list[Call]]
Entries = dict[tuple[int, int], dict[str, Any]]

#: What the policy is told of a call that is not made a second time.
INTERRUPTED = "The call was interrupted. It is not known whether it was carried out, and it is not repeated."


class TurnJournal:
    """The journal of one generation batch on one rank. The loop uses its ``engine`` and ``make`` alone.

    Args:
        file: path of the journal. If one with the same ``header`` is there, it is continued; any other is replaced.
        header: plain values that decide the batch: step, prompts, settings, weights.
        environments: the environment of each trajectory; ``None``: there are none.
        say: function that is called with a sentence about what was found, for the log.
        draw_anew: function that is called before the first request that a journal with answers leaves to the engine. It
            must change the engine's random numbers, since those of the kept answers would be drawn once more.

    Attributes:
        requests: (key, request) → an answer of the engine from before the kill that is not used up.
        answered_of: key → number of requests that have been answered.
        environments: key → environment.
    """

    def __init__(
        self,
        file: Path,
        header: Mapping[str, Any],
        environments: Sequence[Any] | None,
        say: Callable[[str], None],
        draw_anew: Callable[[], None] = lambda: None,
    ) -> None:
        self.requests: Entries = {}
        self.answered_of = Counter[int]()
        self.draw_anew = draw_anew
        self._calls: Entries = {}
        self._turns_of = Counter[int]()
        self.environments = dict(enumerate(environments or ()))
        self._say = say
        self._streams = False
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(file, "a+b", opener=no_link)  # noqa: SIM115 (``close``)
        self._read(json.loads(json.dumps(header)))

    def _read(self, header: dict[str, Any]) -> None:
        """Read the entries of the file; begin it anew if it is empty or of another batch."""
        cut_to_whole_batches(self._file)
        self._file.seek(0)
        lines = [json.loads(line) for line in self._file]
        if lines and lines[0] != header:
            changed = [name for name in {**lines[0], **header} if lines[0].get(name) != header.get(name)]
            self._say(f"{self._file.name} is of another batch ({', '.join(changed)}): its answers are not used")
            self._file.truncate(0)
            lines = []
        if not lines:
            self.append(header)
        for entry in lines[1:]:
            if "tokens" in entry:
                self.requests[entry["key"], entry["request"]] = entry
            elif "calls" in entry:
                self._calls[entry["key"], entry["turn"]] = entry
            else:
                self._drop(entry["key"])
        if lines[1:]:
            answered = sum("answers" in entry for entry in self._calls.values())
            self._say(
                f"{self._file.name}: goes on inside this generation batch with {len(self.requests)} answers of the "
                f"engine and with the calls of {answered} turns"
            )

    def close(self) -> None:
        self._file.close()

    def engine(self, engine: TurnEngine) -> TurnEngine:
        """Return the engine that the loop is to ask instead of ``engine``: it answers from the journal as long as that
        has an answer. An engine that answers in rounds is returned as it is."""
        if engine.in_rounds:
            return engine
        self._streams = True
        lost = {type(one).__name__ for one in self.environments.values() if not goes_on(one)}
        if lost and (self.requests or self._calls):
            self._say(
                f"groups of {', '.join(sorted(lost))} are drawn anew: an environment goes on with `state_dict` and "
                "`load_state_dict`, or if it is marked `deterministic`"
            )
        return RememberingEngine(self, engine)

    def make(self, key: int, calls: Calls, tools: Tools, make: Make) -> list[Call]:
        """Return the calls of a turn of trajectory ``key`` with their answers: those from before the kill, if there are
        any, else made by ``make`` and written down. Any thread may call this.

        Args:
            key: index of the trajectory.
            calls: ``tool_calls`` of the policy's message.
            tools: name → function.
            make: ``ToolCalls.make``.

        Raises:
            ValueError: an answer or a state is no plain value, or a ``deterministic`` environment answers otherwise
                than before the kill.
        """
        environment = self.environments.get(key)
        if self._streams and not goes_on(environment):
            return make(calls, tools)
        self._turns_of[key] += 1
        entry = {"key": key, "turn": self._turns_of[key], "calls": calls}
        known = self._calls.pop((key, self._turns_of[key]), None)
        if known is not None and as_text(known["calls"]) != as_text(calls):
            self.forget(key, "the policy makes other calls")
            known = None
        answers: list[Call | None] = [None] * len(calls)
        if known is None:
            self.append(entry)
        elif "answers" in known:
            return self._answered(known, calls, tools, environment, make)
        else:
            answers = [interrupted(Wanted.read(call, tools), environment) for call in calls]
        made = iter(make([call for call, answer in zip(calls, answers, strict=True) if answer is None], tools))
        answered = [next(made) if answer is None else answer for answer in answers]
        self.append({**entry, "answers": [kept(one) for one in answered], "state": plain_state(environment)})
        return answered

    def _answered(
        self, known: Mapping[str, Any], calls: Calls, tools: Tools, environment: Any, make: Make
    ) -> list[Call]:
        """Return a turn's calls with the answers from before the kill, and bring the environment to its state then, by
        its ``state_dict``, or by making its calls once more if it has none.

        Args:
            known: the journal's entry of the turn.
            calls, tools, make: see ``make``.
            environment: the trajectory's environment, or ``None``.
        """
        before = [Call(**one) for one in known["answers"]]
        again = [call for call in calls if is_rebuilt(Wanted.read(call, tools), environment)]
        names = {Wanted.read(call, tools).name for call in again}
        made = iter(make(again, tools))
        answered = [next(made) if one.name in names else one for one in before]
        if has_state(environment):
            environment.load_state_dict(known["state"])
        elif getattr(environment, "deterministic", False):
            check_same(environment, before, answered)
        return answered

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line."""
        line = as_text(entry)
        with self._lock:
            append_batch(self._file, [line])

    def forget(self, key: int, why: str) -> None:
        """Drop all further answers of a trajectory, and write into the file that they do not count. ``why``: the
        reason, for the log."""
        self._say(f"{self._file.name}: the rest of trajectory {key} is not used: {why}")
        self._drop(key)
        self.append({"key": key, "forgotten": True})

    def _drop(self, key: int) -> None:
        for entries in (self.requests, self._calls):
            for place in list(entries):  # a copy, since other threads take entries out meanwhile
                if place[0] == key:
                    del entries[place]


class RememberingEngine:
    """A ``TurnEngine`` that answers from its journal as long as that has an answer. It passes all other requests on to
    an engine that streams, and writes the answers of that into the journal."""

    in_rounds = False

    def __init__(self, journal: TurnJournal, engine: TurnEngine) -> None:
        self._journal = journal
        self._engine = engine
        self._holds_answers = bool(journal.requests)
        self._known: list[tuple[int, TurnTokens]] = []
        self._asked: dict[int, int] = {}

    def submit(self, key: int, ids: list[int], room: int) -> None:
        journal = self._journal
        known = journal.requests.pop((key, journal.answered_of[key] + 1), None)
        self._asked[key] = checksum(ids)
        if known is not None and known["sent"] == self._asked[key]:
            self._known.append((key, TurnTokens(**known["tokens"])))
            journal.answered_of[key] += 1
            return
        if known is not None:
            journal.forget(key, "the tokens before are others")
        if self._holds_answers:
            self._holds_answers = False
            journal.draw_anew()
        self._engine.submit(key, ids, room)

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        if self._known:
            known = self._known
            self._known = []
            return known
        answers = self._engine.collect(wait)
        for key, tokens in answers:
            self._journal.answered_of[key] += 1
            entry = {"key": key, "request": self._journal.answered_of[key], "sent": self._asked[key]}
            if goes_on(self._journal.environments.get(key)):
                self._journal.append({**entry, "tokens": vars(tokens)})
        return answers


def is_rebuilt(call: Wanted, environment: Any) -> bool:
    """Return whether a resumed run must make the call once more to bring the environment to its state: the call is one
    of the environment's own, and there is no ``state_dict``."""
    own = environment is not None and getattr(call.tool, "__self__", None) is environment
    return own and not has_state(environment)


def interrupted(call: Wanted, environment: Any) -> Call | None:
    """Return the answer of a call that was on its way at the kill, ``None`` if it is to be made again."""
    if call.tool is None or may_repeat(call.tool) or is_rebuilt(call, environment):
        return None
    return Call(call.name, call.arguments, str({"error": INTERRUPTED}), failure="interrupted")


def check_same(environment: Any, before: Sequence[Call], now: Sequence[Call]) -> None:
    """Raise ValueError if a ``deterministic`` environment answers calls otherwise now than before the kill."""
    for then, call in zip(before, now, strict=True):
        if as_text(then.answer) != as_text(call.answer):
            raise ValueError(
                f"{type(environment).__name__} says that it is `deterministic`, and its tool {call.name} answers "
                f"{call.answer!r} where it answered {then.answer!r} before the kill: take that mark away, and remove "
                "the journal to draw the batch anew"
            )


def kept(call: Call) -> dict[str, Any]:
    """Return a call as it is written into the journal. Raises ValueError if its answer is no plain value."""
    try:
        json.dumps(call.answer)
    except TypeError as error:
        raise ValueError(
            f"the answer of the tool {call.name} cannot be kept for a resume, since it holds more than plain values "
            f"({error}): answer with text, or set `rollout.turns.journal` to false"
        ) from error
    return vars(call)


def as_text(value: Any) -> str:
    """Return a value as JSON, in which anything that JSON does not know is its ``repr``."""
    return json.dumps(value, default=repr)
