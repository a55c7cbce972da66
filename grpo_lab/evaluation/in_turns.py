"""An evaluation with tools or in an environment: each completion is a trajectory, made as in training.

`TurnGenerator` stands where an evaluation has a generator of single texts. It begins a trajectory for each completion
and runs the `TurnLoop` of training over all of them. The model answers many prompts in one call, so trajectories go on
in rounds: all tools of a round answer side by side, then the model is asked for the next turn of every trajectory that
goes on (`RoundsOf`).
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
"""Number added to the seed from round to round, so that rounds do not repeat each other's draws."""


class RoundsOf:
    """A ``TurnEngine`` that asks a generator for the turns of all waiting trajectories in one call.

    Args:
        generate: the model.
        temperature: of sampling; 0 is greedy.
        seed: seed of the first call. Each later call adds ``ROUNDS_APART`` to it; None: calls have no seed.
        context: tokens of prompt and completion that the model takes.
        ends: tokens that end a turn.
    """

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
        """Note that the trajectory ``key``, whose tokens so far are ``ids``, wants a turn of at most ``room``
        tokens."""
        self._asked[key] = (ids, room)

    def collect(self, wait: float) -> list[tuple[int, TurnTokens]]:
        """Generate the turns of everything submitted since the last call, and return them as (key, turn).

        A call of the generator has one limit of tokens for all rows. Rows that reached it before the end of their turn,
        with room left, are asked to go on. ``wait`` is not used: the turns are there when this returns.
        """
        asked = self._asked
        self._asked = {}
        made = {key: TurnTokens([], [], 0) for key in asked}
        unfinished = [key for key, (_, room) in asked.items() if room > 0]
        while unfinished:
            so_far = [[*asked[key][0], *made[key].ids] for key in unfinished]
            left = [asked[key][1] - len(made[key].ids) for key in unfinished]
            limit = min(max(left), self.context - max(map(len, so_far)))
            cut_off = []
            for key, one in zip(unfinished, self._generated(so_far, limit), strict=True):
                room = asked[key][1]
                made[key] = made[key].then(TurnTokens(one.ids, one.logprobs, 0)).within(room)
                at_limit = len(one.ids) == limit and one.ids[-1] not in self.ends
                if at_limit and len(made[key].ids) < room:
                    cut_off.append(key)
            unfinished = cut_off
        return list(made.items())

    def _generated(self, prompts: list[list[int]], limit: int) -> list[Completion]:
        """Return a completion of each prompt, of at most ``limit`` tokens, and move on to the next seed."""
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
        """Return the arguments of the chat template besides the messages: the tools, and a template in place of the
        tokenizer's own if that one cannot join turns."""
        asked: dict[str, Any] = {"tools": self.schemas()}
        if self.dialogue.chat_template is not None:
            asked["chat_template"] = self.dialogue.chat_template
        return asked

    def schemas(self) -> list[Callable[..., Any]]:
        """Return the functions that the chat template describes to the model: the tools, and the environment's methods
        that are tools."""
        if self.environment is None:
            return list(self.tools)
        return [*self.tools, *self._tools_of(self.environment()).values()]

    def observed(self, row: Row) -> Any:
        """Return a row's prompt. What its environment says at the start is added to the last message, as TRL does."""
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
        """Generate n completions of each row.

        Args:
            rows: rows of the data; an environment is reset to its row.
            prompts: the rendered prompt of each row, as tokens.
            n: completions of each row.
            temperature: of sampling; 0 is greedy.
            max_new_tokens: tokens of a completion, the tools' answers included.
            seed: seed of the first call of the model; None: no seed.

        Returns:
            n completions for each row.

        Raises:
            ValueError: an environment says another thing at the start of a row than it said before, or a tool cannot
                run in the process that it is marked for.
        """
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
            trajectories = TurnLoop(begun, offers, engine, self.dialogue, calls, limits).run()
        finally:
            calls.close()
        completions = [self._completion(*one) for one in zip(trajectories, environments, strict=True)]
        return [completions[start : start + n] for start in range(0, len(completions), n)]

    def _begun(self, row: Row, said: Any) -> Any:
        """Return a new environment, reset to a row. Raises ValueError if that makes another prompt than ``said``, the
        one that was rendered."""
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
        """Return the methods of an environment that are tools, by name: the public ones, except those that the run
        calls itself."""
        if environment is None:
            return {}
        from grpo_lab.trainer.trl_bridge import OFFERED

        hidden = {"reset", "get_reward", *OFFERED}
        members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
        names = [name for name, _ in members if name not in hidden and not name.startswith("_")]
        return {name: getattr(environment, name) for name in names}

    def _completion(self, one: Trajectory, environment: Any) -> Completion:
        """Convert a trajectory to a `Completion`. It counts as ended only if the policy stopped by itself, and not at a
        limit."""
        columns: dict[str, Any] = {TURNS_COLUMN: one.turns}
        if environment is not None:
            columns["environments"] = environment
        logprobs: Any = one.logprobs
        ended = one.ended in ("answered", "unparsable")
        return Completion(one.ids, ended, logprobs, mask=one.mask, messages=one.messages, columns=columns)


def named(tools: Sequence[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the tools by their names."""
    return {tool.__name__: tool for tool in tools}


def with_observation(row: Row, environment: Any) -> Any:
    """Reset an environment to a row, and return the row's prompt. What the environment says at the start is added to
    the last message, as TRL does; of text and a list of blocks (images among them) the text becomes a block. Raises
    ValueError if the environment says something and the prompt is a text without messages."""
    prompt = row["prompt"]
    observation = environment.reset(**row)
    if observation is None:
        return prompt
    if isinstance(prompt, str):
        raise ValueError(
            f"{type(environment).__name__}.reset says something, which is added to the last message of a prompt, and "
            "this prompt is text without messages: make prompts of messages (`data.template: chat`), or return None"
        )
    last = prompt[-1]
    content = last["content"]
    if isinstance(content, list) != isinstance(observation, list):
        content = as_blocks(content)
        observation = as_blocks(observation)
    return [*prompt[:-1], {**last, "content": content + observation}]


def as_blocks(content: Any) -> list[Any]:
    """Return a message's content as a list of blocks; a text becomes one block."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}]
