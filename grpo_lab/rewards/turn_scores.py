"""Rewards of turns: a score for each turn of a trajectory (``TurnRewards``, by the environment or by a function), and
one for its failed calls and reached limits (``TurnLimits``).

Both read the column ``turns`` of a run with ``rollout.turns``: the ``Turn`` objects of each completion. A third reward,
``JudgedByEnvironment``, asks the environment for the reward of a whole completion.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lab.rewards.steps import StepReward, StepScores, TokenIds
from grpo_lab.turns.trajectory import Turn
from grpo_lab.turns.turn_settings import TURNS_COLUMN

Scores = Sequence[float | None]


class TurnRewards(StepReward):
    """Step reward with a score for each turn of a completion, placed at the last token that the policy wrote in that
    turn. ``advantage: turn_returns`` makes advantages of these scores.

    Without ``score``, each completion's environment is asked: its method ``turn_rewards()``, or
    ``turn_rewards(turns)``, returns one number a turn, ``None`` for a turn that is not scored. An environment without
    that method scores none. ``LabTrainer`` finds the method by itself, as TRL finds ``get_reward``; name this reward to
    give it a weight. Methods and functions may be ``async def``: those of a batch run concurrently.

    Args:
        score: function ``score(messages, turns, **columns)`` that returns the scores of one completion's turns.
            ``messages`` is the completion as TRL has it, ``turns`` its ``Turn`` objects, and each of the ``columns`` is
            the value of that row.

    Raises:
        ValueError: when called without turns, or if there are not as many scores as turns.
    """

    def __init__(self, score: Callable[..., Any] | None = None) -> None:
        self.score = score
        self.__name__ = str(getattr(score, "__name__", "turn_rewards"))

    def score_steps(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: TokenIds, **columns: Any
    ) -> list[StepScores]:
        turns = turns_of_rows(columns, self.name)
        return self._placed(self._asked(completions, turns, columns), turns)

    def _asked(
        self, completions: Sequence[Any], turns: Sequence[Sequence[Turn]], columns: Mapping[str, Any]
    ) -> list[Any]:
        """Return for each completion the scores that its environment, or the function, gives its turns, unchecked."""
        if self.score is None:
            environments = columns.get("environments")
            if environments is None:
                raise ValueError(
                    f"{self.name} asks environments for the scores of their turns, and this run has none: set "
                    "`environment_factory`, or give a function, TurnRewards(score)"
                )
            return answers_of([_answer(*one) for one in zip(environments, turns, strict=True)])
        rows = [
            {name: values[row] for name, values in columns.items() if isinstance(values, list)}
            for row in range(len(completions))
        ]
        asked = [
            self.score(messages=messages, **{**row, TURNS_COLUMN: own})
            for messages, own, row in zip(completions, turns, rows, strict=True)
        ]
        return answers_of(asked)

    def _placed(self, answers: Sequence[Any], turns: Sequence[Sequence[Turn]]) -> list[StepScores]:
        """Check that each completion has one score a turn, and place each at the turn's last token. A turn without
        tokens is left out."""
        placed = []
        for row, (scores, own) in enumerate(zip(answers, turns, strict=True)):
            if not isinstance(scores, Sequence) or isinstance(scores, str) or len(scores) != len(own):
                raise ValueError(
                    f"{self.name} gave {scores!r} for completion {row}, which has {len(own)} turns; it gives one score "
                    "a turn, None for one that is not scored (`turn_rewards(turns)` is told the turns)"
                )
            placed.append([(turn.end - 1, score) for turn, score in zip(own, scores) if turn.end > turn.first])
        return placed


def _answer(environment: Any, turns: Sequence[Turn]) -> Any:
    """Ask an environment for the scores of its turns."""
    method = getattr(environment, "turn_rewards", None)
    if method is None:
        return [None] * len(turns)
    if inspect.signature(method).parameters:
        return method(turns)
    return method()


def of_environments(kinds: Sequence[type]) -> TurnRewards | None:
    """Return a ``TurnRewards`` that asks the environments, if one of these classes has a method ``turn_rewards``; else
    None."""
    if any(callable(getattr(kind, "turn_rewards", None)) for kind in kinds):
        return TurnRewards()
    return None


def turns_of_rows(columns: Mapping[str, Any], who: str) -> list[Sequence[Turn]]:
    """Return the turns of each completion, from the column ``turns``. Raises ValueError, naming the reward ``who``, if
    there is no such column, as in a run without ``rollout.turns``."""
    found = columns.get(TURNS_COLUMN)
    if found is None or not all(isinstance(turn, Turn) for turns in found for turn in turns):
        raise ValueError(
            f"{who} reads the turns of completions, and this run does not tell them: set `rollout: {{turns: {{}}}}`"
        )
    return list(found)


def by_call(turns: Sequence[Turn], scores: Scores) -> list[float | None]:
    """Sum up scores of calls by turn.

    Args:
        turns: the turns of one completion.
        scores: one score for each answered call of these turns (one that did not fail), in order; None: not scored.

    Returns:
        One score a turn; None for a turn without a scored call.

    Raises:
        ValueError: there are not as many scores as answered calls.
    """
    answered = [sum(call.failure is None for call in turn.calls) for turn in turns]
    if sum(answered) != len(scores):
        raise ValueError(f"{len(scores)} scores were given for {sum(answered)} answered calls; each has one")
    found = list[float | None]()
    end = 0
    for count in answered:
        known = [score for score in scores[end : end + count] if score is not None]
        end += count
        if known:
            found.append(math.fsum(known))
        else:
            found.append(None)
    return found


@dataclass(frozen=True)
class TurnLimits:
    """Reward of failed calls and reached limits: the sum over what happened in a completion's turns, each event worth
    the number below. At least one of them must not be 0.

    Args:
        unparsable: for a turn with a call that cannot be read.
        unknown: for a call of a tool that does not exist.
        raised: for a call whose tool raised an error.
        timed_out: for a call that took longer than ``tool_seconds``.
        turn_tokens: for a turn that reached ``turn_tokens``.
        tool_tokens: for a call whose answer was cut at ``tool_tokens``.
        turns: for a completion that ended at ``max_turns``.
        completion: for a completion that ended for lack of room (``max_completion_length``).
    """

    unparsable: float = 0.0
    unknown: float = 0.0
    raised: float = 0.0
    timed_out: float = 0.0
    turn_tokens: float = 0.0
    tool_tokens: float = 0.0
    turns: float = 0.0
    completion: float = 0.0
    __name__ = "turn_limits"

    def __post_init__(self) -> None:
        worth = asdict(self)
        if not any(worth.values()) or not all(map(math.isfinite, worth.values())):
            raise ValueError(f"`turn_limits` is {worth}; it says in finite numbers what one or more of these are worth")

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the sum for each completion. Raises ValueError if the run has no column ``turns``."""
        worth = asdict(self)
        counted = [events(turns) for turns in turns_of_rows(columns, self.__name__)]
        return [math.fsum(value * found[name] for name, value in worth.items()) for found in counted]


def events(turns: Sequence[Turn]) -> Counter[str | None]:
    """Count what happened in a completion's turns, by the names of ``TurnLimits``."""
    found = Counter[str | None]()
    for turn in turns:
        happened = [call.failure for call in turn.calls]
        unparsable = "unparsable" in (*happened, turn.ended)
        found.update(name for name in (*happened, turn.limit, turn.ended) if name not in ("unparsable", "tool_tokens"))
        found.update(unparsable=unparsable, tool_tokens=sum(call.cut for call in turn.calls))
    return found


class JudgedByEnvironment:
    """Reward each completion by what its environment's ``get_reward()`` returns: a number, or None.

    In a training TRL asks environments for it by itself; name this reward (``environment``) to judge an evaluation by
    it.

    Raises:
        ValueError: there are no environments, or one has no ``get_reward``.
    """

    __name__ = "environment"

    def __call__(self, prompts: Any, completions: Any, environments: Any = None, **_: Any) -> list[float | None]:
        if environments is None or not all(hasattr(one, "get_reward") for one in environments):
            raise ValueError(
                "the reward `environment` asks each completion's environment for `get_reward`, and there is none: set "
                "`environment_factory` to one that has it, or name another reward"
            )
        return answers_of([one.get_reward() for one in environments])


def answers_of(asked: Sequence[Any]) -> list[Any]:
    """Return the answers in order. Those that must be awaited are, concurrently, in a thread of their own."""
    if not any(map(inspect.isawaitable, asked)):
        return list(asked)
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop already, as in a notebook
        return thread.submit(asyncio.run, _awaited(asked)).result()


async def _awaited(asked: Sequence[Any]) -> list[Any]:
    async def one_of(answer: Any) -> Any:
        if inspect.isawaitable(answer):
            return await answer
        return answer

    return await asyncio.gather(*map(one_of, asked))
