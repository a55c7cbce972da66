"""Settings of turns (``rollout: {turns: …}``), and marks of a team on its tools and environments.

    @repeatable                 a call may be made twice: it changes nothing outside, or the same thing each time
    @in_process                 a call runs in a process of its own, which is killed when it takes too long: a tool that
                                may crash, spin, call ``os._exit`` or use ``signal.alarm``

An environment is TRL's (``reset``, public methods as tools, ``get_reward``). What it may offer beside that:

    turn_rewards() -> list      a score, or None, for each turn so far (``rewards/turn_scores.py``)
    state_dict() -> dict        plain numbers, texts, lists and mappings; with ``load_state_dict(state)`` a killed run
                                goes on inside a trajectory
    deterministic = True        the same calls after the same ``reset`` give the same answers: a killed run may replay
                                them instead
    repeatable = True           calls that were on their way when a run was killed may be made again
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from grpo_lab.settings import NULL_IS_DEFAULT, Count, Positive, Seconds, settings

Tool = TypeVar("Tool", bound=Callable[..., Any])

#: What stands behind a tool's answer that was cut.
CUT_MARK = "\n[… cut: {missing} of {whole} characters left out]"
#: Name of the column that every reward gets in a run with ``rollout.turns``: the ``Turn`` objects of each completion.
TURNS_COLUMN = "turns"


@settings()
class TurnSettings:
    """``rollout.turns``: trajectories that go on as soon as their own tools have answered, and their limits.

    Args:
        max_turns: turns that the policy may write, the first included; ``None``: TRL's
            ``max_tool_calling_iterations`` + 1.
        turn_tokens: most tokens of one turn of the policy; ``None``: only ``max_completion_length`` counts.
        tool_tokens: most tokens of the text of one tool's answer; the rest is cut, with a mark.
        tool_seconds: seconds after which a call is given up. A tool in a process is killed then; one in a thread
            cannot be, and is left alone.
        retries: how often a call that raised or was given up is made again, if the tool says that it may be repeated.
        threads: how many calls of sync tools run at the same time; 1 for tools that share what is not safe in threads.
        max_concurrent: how many trajectories are on their way at the same time; ``None``: all of the batch.
        unparsable: what a turn with a call that cannot be read does: ``end`` the trajectory, or ``answer`` the policy
            with an error, as a tool would.
        earlier_thinking: what becomes of thinking in earlier turns: ``keep`` its tokens, as they were written, or
            ``refuse`` a template that would drop them.
        journal: write down what engine and tools answer, for a run that is killed (``turns/journal.py``).
    """

    max_turns: Positive | None = None
    turn_tokens: Positive | None = None
    tool_tokens: Positive | None = None
    tool_seconds: Annotated[Seconds, NULL_IS_DEFAULT] = 60.0
    retries: Annotated[Count, NULL_IS_DEFAULT] = 0
    threads: Annotated[Positive, NULL_IS_DEFAULT] = 32
    max_concurrent: Positive | None = None
    unparsable: Literal["end", "answer"] = "end"
    earlier_thinking: Literal["keep", "refuse"] = "keep"
    journal: Annotated[bool, NULL_IS_DEFAULT] = True


def repeatable(tool: Tool) -> Tool:
    """Mark a tool whose calls may be repeated: they change nothing outside, or the same thing each time."""
    tool.repeatable = True  # type: ignore[attr-defined]
    return tool


def in_process(tool: Tool) -> Tool:
    """Mark a tool that runs in a process of its own: a function of a module, with plain values for arguments. The
    process does not get the run's environment variables, so no keys. A method of an environment cannot run there, since
    its object lives in the trainer."""
    tool.in_process = True  # type: ignore[attr-defined]
    return tool


def may_repeat(tool: Callable[..., Any]) -> bool:
    """Return whether a call of the tool may be made again: it is marked, or a method of a repeatable environment."""
    owner = getattr(tool, "__self__", None)
    return bool(getattr(tool, "repeatable", False) or getattr(owner, "repeatable", False))


def runs_in_process(tool: Callable[..., Any]) -> bool:
    """Return whether the tool is marked with ``in_process``."""
    return bool(getattr(tool, "in_process", False))


def has_state(environment: Any) -> bool:
    """Return whether the environment offers ``state_dict`` and ``load_state_dict``."""
    return hasattr(environment, "state_dict") and hasattr(environment, "load_state_dict")


def goes_on(environment: Any) -> bool:
    """Return whether a killed run can go on inside a trajectory with this environment, or with none (``None``)."""
    return environment is None or has_state(environment) or bool(getattr(environment, "deterministic", False))


def plain_state(environment: Any) -> Any:
    """Return ``environment.state_dict()``, or ``None`` if it offers none. Raises ValueError if the state would change
    on the way through JSON."""
    if not has_state(environment):
        return None
    state = environment.state_dict()
    try:
        kept = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError):
        kept = None
    if kept is None or kept != state:
        raise ValueError(
            f"`state_dict` of {type(environment).__name__} holds more than plain values: finite numbers, texts, lists, "
            "and mappings with texts as keys can be kept for a resume"
        )
    return state
