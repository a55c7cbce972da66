"""An evaluation with tools or in an environment: each completion is a trajectory, made as in training.

The model of an evaluation answers many prompts in one call, so trajectories go on in rounds: the tools of a round
answer side by side, then all that go on are asked for together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lab.engines.generators import Completion, CompletionGenerator
from grpo_lab.turns.dialogue import ChatDialogue
from grpo_lab.turns.loop import LoopLimits, Offer, TurnLoop
from grpo_lab.turns.protocols import TurnTokens
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.trajectory import Trajectory
from grpo_lab.turns.turn_settings import TURNS_COLUMN, TurnSettings

Row = Mapping[str, Any]
ROUNDS_APART = 1_000_003
"""What is added to the seed from round to round, so that no round draws what another has drawn."""


class RoundsOf:
    """A ``TurnEngine`` that asks a generator for all rows of a round."""

    in_rounds = True

    def __init__(
        self, generate: CompletionGenerator, temperature: float, seed: int | None, context: int, ends: Sequence[int]
    ) -> None:
        self.generate = generate
        self.temperature = temperature
        self.seed = seed
        self.context = context
        self.ends = frozenset(ends)
        self._asked: dict[int, tuple[list[int], int]] = {}

    def submit(self, key: int, ids: list[int], room: int) -> None:
        self._asked[key] = (ids, room)

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        asked = self._asked
        self._asked = {}
        made = {key: TurnTokens([], [], 0) for key in asked}
        open_rows = [key for key, (_, room) in asked.items() if room > 0]
        while open_rows:
            so_far = [[*asked[key][0], *made[key].ids] for key in open_rows]
            left = [asked[key][1] - len(made[key].ids) for key in open_rows]
            limit = min(max(left), self.context - max(map(len, so_far)))
            found = self._generated(so_far, limit)
            for key, one in zip(open_rows, found, strict=True):
                made[key] = made[key].then(TurnTokens(one.ids, one.logprobs, 0)).within(asked[key][1])
            open_rows = [
                key
                for key, one in zip(open_rows, found, strict=True)
                if len(one.ids) == limit and one.ids[-1] not in self.ends and len(made[key].ids) < asked[key][1]
            ]
        return list(made.items())

    def _generated(self, prompts: list[list[int]], limit: int) -> list[Completion]:
        groups = self.generate(prompts, n=1, temperature=self.temperature, max_new_tokens=limit, seed=self.seed)
        if self.seed is not None:
            self.seed += ROUNDS_APART
        return [one for (one,) in groups]


@dataclass(frozen=True)
class TurnGenerator:
    """Makes the completions of an evaluation with tools or in an environment.

    Args:
        generate: the model; it writes one turn a call.
        dialogue: how its tokenizer and template join messages.
        settings: limits of turns.
        tools: functions that the model may call.
        environment: makes an environment (TRL's ``environment_factory``); each completion has one of its own.
        context: tokens of prompt and completion that the model takes; ``None``: no limit is known.
        ends: tokens that end a turn.
    """

    generate: CompletionGenerator
    dialogue: ChatDialogue
    settings: TurnSettings
    tools: Sequence[Callable[..., Any]] = ()
    environment: Callable[[], Any] | None = None
    context: int | None = None
    ends: Sequence[int] = ()

    def template_kwargs(self) -> dict[str, Any]:
        """Return what the chat template gets beside the messages: the tools, and the template that stands in for one
        that cannot join turns."""
        asked: dict[str, Any] = {"tools": self.schemas()}
        if self.dialogue.chat_template is not None:
            asked["chat_template"] = self.dialogue.chat_template
        return asked

    def schemas(self) -> list[Callable[..., Any]]:
        """Return what the chat template is told that the model may call."""
        if self.environment is None:
            return list(self.tools)
        return [*self.tools, *self._tools_of(self.environment()).values()]

    def observed(self, row: Row) -> Any:
        """Return a row's prompt with what its environment says at the start, as TRL puts it into the last message."""
        if self.environment is None:
            return row["prompt"]
        return with_observation(row, self.environment())

    def written(
        self,
        rows: Sequence[Row],
        prompts: Sequence[list[int]],
        *,
        n: int,
        temperature: float,
        max_new_tokens: int,
        seed: int | None,
    ) -> list[list[Completion]]:
        """Return n completions of each row, whose prompt is in ``prompts`` as tokens. Raise ValueError if a prompt is
        no messages, or if an environment begins otherwise than before."""
        said = [self.observed(row) for row in rows]
        environments = [self._begun(*one) for one in zip(rows, said, strict=True) for _ in range(n)]
        schemas = self.schemas()
        offers = [Offer({**named(self.tools), **self._tools_of(one)}, schemas) for one in environments]
        context = self.context or sys.maxsize
        limits = LoopLimits(
            settings=self.settings,
            max_turns=self.settings.max_turns or sys.maxsize,
            completion=max_new_tokens,
            context=context,
            ends=self.ends,
        )
        begun = [Trajectory.begin(ids) for ids in prompts for _ in range(n)]
        engine = RoundsOf(self.generate, temperature, seed, context, self.ends)
        calls = ToolCalls(self.settings, self.dialogue.cut)
        try:
            calls.check(schemas)
            made = TurnLoop(begun, offers, engine, self.dialogue, calls, limits).run()
        finally:
            calls.close()
        found = [self._completion(*one) for one in zip(made, environments, strict=True)]
        return [found[start : start + n] for start in range(0, len(found), n)]

    def _begun(self, row: Row, said: Any) -> Any:
        """Return a new environment at the start of a row, where it says ``said`` again."""
        if self.environment is None:
            return None
        environment = self.environment()
        if with_observation(row, environment) != said:
            raise ValueError(
                f"{type(environment).__name__}.reset says another thing each time for one row, so the model would be "
                "asked another prompt than the one that is reported: draw from what the row holds, as from a seed in it"
            )
        return environment

    def _tools_of(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Return an environment's methods that are tools, as TRL takes them."""
        if environment is None:
            return {}
        from grpo_lab.trainer.trl_bridge import OFFERED

        hidden = {"reset", "get_reward", *OFFERED}
        members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        names = [name for name, _ in members if name not in hidden and not name.startswith("_")]
        return {name: getattr(environment, name) for name in names}

    def _completion(self, one: Trajectory, environment: Any) -> Completion:
        columns: dict[str, Any] = {TURNS_COLUMN: one.turns}
        if environment is not None:
            columns["environments"] = environment
        logprobs: Any = one.logprobs
        ended = one.ended in ("answered", "unparsable")
        return Completion(one.ids, ended, logprobs, mask=one.mask, messages=one.messages, columns=columns)


def named(tools: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {tool.__name__: tool for tool in tools}


def with_observation(row: Row, environment: Any) -> Any:
    """Reset an environment to a row, and return the row's prompt with what it says."""
    prompt = row["prompt"]
    observation = environment.reset(**row)
    if observation is None:
        return prompt
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": last["content"] + observation}]
