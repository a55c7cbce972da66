"""A journal of one generation batch: what the engine and the tools have answered. With it a run that was killed goes on
inside its trajectories, and makes no call twice.

One file of JSON lines for each rank and batch; a kill at any byte loses at most the last line.

    the first line               what must be the same in the run that reads it
    key, request, sent, tokens   what the engine wrote
    key, turn, calls             calls that are about to be made
      …, answers, state          what they answered, and the environment's ``state_dict()`` after them
    key, forgotten               what stands above of this trajectory does not count

In a resumed run the loop begins anew. It asks engine and tools in the same order as before, and the journal answers in
their place as far as it goes. So limits, masks and messages come out as they were. No engine at all (``in_rounds``) is
asked again: from the checkpoint's random numbers it draws the same tokens, and only calls are answered here.

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
    """The journal of one generation batch on one rank. The loop knows nothing of it but ``engine`` and ``make``.

    Args:
        file: its place. If a journal with the same ``header`` is there, it is gone on with; any other is replaced.
        header: plain values that decide the batch: step, prompts, settings, weights.
        environments: the environment of each trajectory; ``None``: there are none.
        say: gets a sentence about what was found.
        draw_anew: called before the first request that a journal with answers leaves to the engine, so that the engine
            does not draw once more from the random numbers of the answers that are kept.

    Raises:
        ValueError: an answer or a state is to be written that is not plain; or a ``deterministic`` environment answers
            otherwise than before (``make``).
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
        self.answered_of = Counter[int]()  # requests
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
        """Return the engine that the loop asks instead: with the answers that were written down before the kill."""
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
        """Make the calls of a turn of trajectory ``key``, by ``make(calls, tools)`` (``ToolCalls.make``) as far as
        nothing is known of them. Called from any thread."""
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
        rest = iter(make([call for call, answer in zip(calls, answers, strict=True) if answer is None], tools))
        whole = [next(rest) if one is None else one for one in answers]
        self.append({**entry, "answers": [kept(one) for one in whole], "state": plain_state(environment)})
        return whole

    def _answered(
        self, known: Mapping[str, Any], calls: Calls, tools: Tools, environment: Any, make: Make
    ) -> list[Call]:
        """Answer a turn's calls as before the kill. An environment without ``state_dict`` is asked once more, so that
        it comes to the same state."""
        before = [Call(**one) for one in known["answers"]]
        again = [call for call in calls if is_rebuilt(Wanted.read(call, tools), environment)]
        names = {Wanted.read(call, tools).name for call in again}
        rest = iter(make(again, tools))
        whole = [next(rest) if one.name in names else one for one in before]
        if has_state(environment):
            environment.load_state_dict(known["state"])
        elif getattr(environment, "deterministic", False):
            check_same(environment, before, whole)
        return whole

    def append(self, entry: Mapping[str, Any]) -> None:
        line = as_text(entry)
        with self._lock:
            append_batch(self._file, [line])

    def forget(self, key: int, why: str) -> None:
        """Drop what is known of a trajectory from here on."""
        self._say(f"{self._file.name}: the rest of trajectory {key} is not used: {why}")
        self._drop(key)
        self.append({"key": key, "forgotten": True})

    def _drop(self, key: int) -> None:
        for entries in (self.requests, self._calls):
            for place in list(entries):  # a copy: other trajectories take theirs out meanwhile
                if place[0] == key:
                    del entries[place]


class RememberingEngine:
    """An engine that streams, behind what its journal holds."""

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
    """Return whether the call is one of those by which its environment comes to its state again."""
    own = environment is not None and getattr(call.tool, "__self__", None) is environment
    return own and not has_state(environment)


def interrupted(call: Wanted, environment: Any) -> Call | None:
    """Return the answer of a call that was on its way at the kill; ``None``: it is to be made."""
    if call.tool is None or may_repeat(call.tool) or is_rebuilt(call, environment):
        return None
    return Call(call.name, call.arguments, str({"error": INTERRUPTED}), failure="interrupted")


def check_same(environment: Any, before: Sequence[Call], now: Sequence[Call]) -> None:
    for then, call in zip(before, now, strict=True):
        if as_text(then.answer) != as_text(call.answer):
            raise ValueError(
                f"{type(environment).__name__} says that it is `deterministic`, and its tool {call.name} answers "
                f"{call.answer!r} where it answered {then.answer!r} before the kill: take that mark away, and remove "
                "the journal to draw the batch anew"
            )


def kept(call: Call) -> dict[str, Any]:
    """Return a call as it is written down."""
    try:
        json.dumps(call.answer)
    except TypeError as error:
        raise ValueError(
            f"the answer of the tool {call.name} cannot be kept for a resume, since it holds more than plain values "
            f"({error}): answer with text, or set `rollout.turns.journal` to false"
        ) from error
    return vars(call)


def as_text(value: Any) -> str:
    return json.dumps(value, default=repr)
