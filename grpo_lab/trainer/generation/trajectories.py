"""``rollout: {turns: …}``: completions with tools or an environment are trajectories that go on by themselves.

    steps of TRL's ``_generate``           what happens in them here
    1. tokenize the prompts
    2. ``_generate_single_turn``           weight sync; with vLLM: generate whole trajectories; then the sync's proof
    3. parse the first turns
    4. ``_tool_call_loop``                 return the trajectories; without vLLM: generate them now, in rounds
    5. count tokens, tool calls, failures

Before ``_generate`` TRL draws environments, resets them and collects their tools. After it come rewards and losses.
They get what TRL's own loop gives them, and in addition ``turns``, a column of the rows. A tool's answer has log-prob
NaN, where TRL has 0: TRL masks the difference of log-probs and sets NaN to 0, which is its own result to the bit, and
any other use shows.

Ranks: with vLLM, in the process or as a server, each rank asks for its own trajectories. If a server fails on any rank,
each rank first stops where its trajectories are, then all raise the error. If the server comes back, the trajectories
go on from there. Without vLLM, and with a team's own ``_generate_single_turn``, ranks ask in step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import gather_object
from trl import GRPOTrainer, chat_template_utils
from trl.trainer import grpo_trainer

from grpo_lab.engines.generators import context_of_config
from grpo_lab.engines.thinking_budget import ThinkingBudget
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.generation.all_ranks import on_main, raise_of_any
from grpo_lab.trainer.generation.prompt_fit import refuse_long
from grpo_lab.trainer.generation.trl_engine import SyncProof
from grpo_lab.trainer.generation.turn_engines import ColocatedTurns, RoundTurns, ServerTurns, turn_client, turns_of_trl
from grpo_lab.trainer.generation.turns import Turns
from grpo_lab.trainer.resume.turn_journals import TurnJournals
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import replaced
from grpo_lab.turns.dialogue import ChatDialogue
from grpo_lab.turns.journal import TurnJournal
from grpo_lab.turns.loop import LoopLimits, Offer, TurnLoop
from grpo_lab.turns.protocols import TurnEngine
from grpo_lab.turns.template_check import check_template
from grpo_lab.turns.tools import ToolCalls
from grpo_lab.turns.trajectory import Trajectory, calls_of, unbroken
from grpo_lab.turns.turn_settings import TURNS_COLUMN

logger = logging.getLogger("grpo_lab")


class Trajectories:
    """Generates the trajectories of each generation batch in place of TRL's turns. Does nothing if ``rollout.turns`` is
    not set. Every rank calls every method.

    Attributes:
        made: this rank's trajectories of the current batch, in the order of its rows.
        journals: callback that keeps turns on disk for a resume.
        dialogue: how turns are written as tokens and parsed, by the run's tokenizer and chat template.
        tools: how tools are called, with time limits.
        limits: limits on turns and tokens.
        thinking: the thinking budget of each turn, or None.

    Raises:
        ValueError: the run has no tools, its model takes images, or a data set has a column ``turns``.
    """

    def __init__(self, trainer: GRPOTrainer, settings: RolloutSettings, proof: SyncProof) -> None:
        self.trainer = trainer
        self.rollout = settings
        self.made: list[Trajectory] = []
        self.journals = TurnJournals(trainer, settings.turns)
        self._journal: TurnJournal | None = None
        self._proof = proof
        self._begins = False
        if settings.turns is None:
            return
        refuse_unfit(trainer)
        self.dialogue = dialogue_of(trainer)
        differences = check_template(self.dialogue, settings.turns.earlier_thinking)
        if differences and trainer.accelerator.is_main_process:
            found = ", ".join(differences)
            logger.info(f"turns go on from what was written; the template of {self.dialogue.name} alone {found}")
        self.tools = ToolCalls(settings.turns, self.dialogue.cut)
        self.tools.check(trainer.tools)
        self.limits = self._limits()
        self.thinking = self._thinking()

    @property
    def on(self) -> bool:
        """Return whether ``rollout.turns`` is set."""
        return self.rollout.turns is not None

    @contextlib.contextmanager
    def tools_in_use(self) -> Iterator[None]:
        """Return a context for a training, at whose end the processes of tools are closed. A later evaluation starts
        new ones."""
        try:
            yield
        finally:
            if self.rollout.turns is not None:
                self.tools.close()
                self.tools = ToolCalls(self.rollout.turns, self.dialogue.cut)

    def _limits(self) -> LoopLimits:
        """Return the limits on turns and tokens: those of ``rollout.turns``, else TRL's, and the engine's context."""
        trainer = self.trainer
        turns = self.rollout.turns
        assert turns is not None
        if trainer.use_vllm:
            context = trainer.vllm_generation.context
        else:
            context = context_of_config(trainer.accelerator.unwrap_model(trainer.model).config) or sys.maxsize
        return LoopLimits(
            settings=turns,
            max_turns=turns.max_turns or trainer.max_tool_calling_iterations + 1,
            completion=trainer.max_completion_length,
            context=context,
            ends=frozenset(trainer.eos_token_ids),
        )

    def _thinking(self) -> ThinkingBudget | None:
        """Return the thinking budget that each turn keeps; None if ``rollout.thinking_budget`` is not set."""
        budget = self.rollout.thinking_budget
        if budget is None:
            return None
        trainer = self.trainer
        ends: dict[str, Any] = {"max_completion_length": self.limits.completion, "eos_ids": trainer.eos_token_ids}
        return ThinkingBudget.for_tokenizer(trainer._tokenizer, budget, text=self.rollout.budget_text, **ends)

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Return a context for one call of TRL's ``_generate``. In it a turn that TRL itself generates is no longer
        than ``turn_tokens``; at its end the batch's journal is closed."""
        if not self.on:
            yield
            return
        self.made = []
        self._begins = True
        try:
            with self._no_longer():
                yield
        finally:
            self._begins = False
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _no_longer(self) -> AbstractContextManager[None]:
        """Return a context in which TRL generates at most ``turn_tokens`` tokens in a turn, if that is set."""
        longest = self.limits.settings.turn_tokens
        if longest is None:
            return contextlib.nullcontext()
        longest = min(longest, self.limits.completion)
        if self.trainer.use_vllm:
            return replaced(self.trainer.vllm_generation, "max_completion_length", longest)
        return replaced(self.trainer.generation_config, "max_new_tokens", longest)

    def whole_ones(self) -> AbstractContextManager[None]:
        """Return a context in which vLLM generates whole trajectories when TRL asks it for the first turns of a batch.
        It changes nothing without vLLM, nor after the batch's first turns."""
        begins = self._begins
        self._begins = False
        if not begins or not self.trainer.use_vllm:
            return contextlib.nullcontext()
        return replaced(self.trainer.vllm_generation, "generate", self._by_engine)

    def _by_engine(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        """Generate this rank's trajectories into ``made``, and return their first turns in the form in which
        ``VLLMGeneration.generate``, which this method replaces, returns completions."""
        generation = self.trainer.vllm_generation
        prompts = [list(ids) for ids in prompts]
        refuse_long(prompts, generation.context, 1, self.trainer._tokenizer.decode)
        self.made = [Trajectory.begin(ids) for ids in prompts]
        self._journal = self.journals.open(prompts)
        with profiler or contextlib.nullcontext():
            if generation.mode == "server":
                asked = functools.partial(self._by_server, prompts, num_generations)
                generation.server_return.generate(asked, generation.send, prompts)
            else:
                self._colocated(prompts, num_generations)
        ids = [one.ids[: one.turns[0].end] for one in self.made]
        logprobs = [
            [[value] for value in (one.logprobs or [None] * len(own))[: len(own)]]
            for one, own in zip(self.made, ids, strict=True)
        ]
        return prompts, ids, logprobs, None

    def _colocated(self, prompts: list[list[int]], group: int) -> None:
        """Run the trajectories by vLLM in this process. TRL's ``generate`` wakes the engine up and builds the sampling
        settings; its call of ``LLM.generate`` is replaced by our loop of turns."""
        generation = self.trainer.vllm_generation

        def run(_: Any, sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
            with ColocatedTurns(generation.llm, sampling_params, self._version) as engine:
                self._run(engine)
            return []

        with replaced(generation.llm, "generate", run):
            type(generation).generate(generation, prompts, None, group)

    def _by_server(self, prompts: list[list[int]], group: int) -> None:
        """Run the trajectories that have not ended by a vLLM server; raise a failure of any rank on every rank."""
        generation = self.trainer.vllm_generation
        accelerator = self.trainer.accelerator
        client = turn_client(generation, self.rollout.server, prompts, group)
        failure = None
        with ServerTurns(client, self._version, generation.hooks.on_fault) as engine:
            try:
                self._run(engine)
            except Exception as caught:
                failure = caught
        faulty = any(gather_object([engine.faulty]))

        def check() -> None:
            main: Any = generation.vllm_client.client  # behind the guard of ``server_across_ranks.generate``
            main.faulty = main.faulty or faulty
            main.check_same_weights()

        raise_of_any(accelerator, failure)
        on_main(accelerator, check)

    def finish(self, stock: Callable[..., Any], *rows: Any) -> Any:
        """Return this rank's trajectories in the form in which TRL's ``_tool_call_loop`` returns them; without vLLM
        generate them first. If ``rollout.turns`` is not set, call ``stock``, TRL's method, with its arguments ``rows``.
        """
        if not self.on:
            return stock(*rows)
        if not self.made:
            _, prompt_ids, completion_ids, _, logprobs, *_ = rows
            self._in_rounds(prompt_ids, completion_ids, logprobs)
        made = self.made
        for one in made:
            unbroken(one.turns, one.prompt, one.ids, self.dialogue.name)
        if self.trainer.environments:
            trl_bridge.not_used_again(self.trainer, [row for row, one in enumerate(made) if gave_up(one)])
        calls = [call for one in made for call in calls_of(one.turns)]
        scored = None
        if all(one.logprobs is not None for one in made):
            scored = [list(one.logprobs) for one in made]
        return (
            [list(one.mask) for one in made],
            [list(one.messages) for one in made],
            [list(one.ids) for one in made],
            scored,
            len(calls),
            sum(call.failure is not None for call in calls),
            [[] for _ in made],
        )

    def _in_rounds(self, prompt_ids: Any, completion_ids: Any, logprobs: Any) -> None:
        """Generate the trajectories by TRL's own ``_generate_single_turn``, from the first turns that TRL has made on.
        Ranks ask in step."""
        self._begins = False
        self.made = [Trajectory.begin(ids) for ids in prompt_ids]
        self._journal = self.journals.open(prompt_ids)
        first = dict(enumerate(turns_of_trl(completion_ids, logprobs, self._version)))
        if self.thinking is not None and self.thinking.budget == 0:
            first = {}  # those of TRL begin with thinking, for which there is no budget
        turns = Turns(self.trainer, self.made[0].prompt)
        with self._proof.paused():  # the first turn was proven; of later ones, some ranks may have none
            self._run(RoundTurns(turns, first, self._version))
            turns.keep_in_step()

    def _run(self, engine: TurnEngine) -> None:
        """Let every trajectory in ``made`` go on until it ends, by turns of ``engine`` and calls of tools."""
        parts = (engine, self.dialogue, self.tools, self.limits, self.thinking, self._journal)
        TurnLoop(self.made, self._offers(), *parts).run()

    @property
    def _version(self) -> int:
        return int(self.trainer.state.global_step)

    def _offers(self) -> list[Offer]:
        """Return, for each of this rank's rows, the tools that its trajectory may call and their descriptions in the
        prompt."""
        trainer = self.trainer
        named = zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True)
        tools = [{**synchronous, **asynchronous} for synchronous, asynchronous in named]
        schemas = [trainer.tools] * len(tools)
        if trainer.environment_factories is not None:
            schemas = [trainer._env_tools[name] for name in trainer._batch_environments]
        return [Offer(*offer) for offer in zip(tools, schemas, strict=True)]

    def with_column(self, generated: Any) -> Any:
        """Return what TRL's ``_generate`` returned, with the trajectories' turns as a further column of the rows."""
        if not self.on:
            return generated
        *before, columns, images, tool_images = generated
        return (*before, {**columns, TURNS_COLUMN: [one.turns for one in self.made]}, images, tool_images)


def gave_up(one: Trajectory) -> bool:
    """Return whether a tool call of the trajectory was given up after its time limit, or was tried more than once, so
    that an earlier try may have been."""
    return any(call.failure == "timed_out" or call.tries > 1 for call in calls_of(one.turns))


def dialogue_of(trainer: GRPOTrainer) -> ChatDialogue:
    """Return the dialogue of the run's tokenizer and chat template, in which TRL parses the messages."""

    def parse(*arguments: Any, **named: Any) -> dict[str, Any]:
        return grpo_trainer.parse_response(*arguments, **named)  # type: ignore[no-any-return]

    template = trainer.chat_template
    return ChatDialogue(trainer._tokenizer, parse, trainer.eos_token_ids, template, trainer.chat_template_kwargs)


def dialogue_for(tokenizer: Any, ends: Any, template_kwargs: Any) -> ChatDialogue:
    """Return the dialogue of a tokenizer outside of a training, set up as TRL does in one: if the tokenizer's chat
    template changes how earlier turns are written once a turn is added, TRL's training template is used in its place.
    Raise ValueError if the template cannot write tool calls. ``ends`` are the tokens that end a turn."""
    if not chat_template_utils.supports_tool_calling(tokenizer):
        raise ValueError(
            "the chat template of this tokenizer cannot write a conversation with tools (an assistant's `tool_calls`, "
            "then a message of the role `tool`): take a model whose template can"
        )
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        tokenizer = chat_template_utils.add_response_schema(tokenizer)
    template = None
    if not chat_template_utils.is_chat_template_prefix_preserving(tokenizer):
        template = chat_template_utils.get_training_chat_template(tokenizer)
    return ChatDialogue(tokenizer, chat_template_utils.parse_response, ends, template, template_kwargs)


def refuse_unfit(trainer: GRPOTrainer) -> None:
    """Raise ValueError if ``rollout.turns`` does not fit the run: it has no tools, its model takes images, or a data
    set has a column ``turns``."""
    if not trainer.tools:
        raise ValueError(
            "`rollout.turns` is set, and the run has neither `tools` nor an `environment_factory`, so that a "
            "completion has one turn: leave `rollout.turns` out, or give the policy something to call"
        )
    if trainer._is_vlm:
        raise ValueError(
            f"`rollout.turns` is for text, and the model ({trainer.model.config.model_type}) takes images: leave it "
            "out, and TRL's own loop makes the turns"
        )
    columns = [(name, getattr(rows, "column_names", None) or ()) for name, rows in _data_sets(trainer)]
    taken = [name for name, found in columns if TURNS_COLUMN in found]
    if taken:
        raise ValueError(
            f"`{taken[0]}` has a column {TURNS_COLUMN!r}, which is what rewards get the turns of a completion as "
            "(`rollout.turns`): rename it"
        )


def _data_sets(trainer: GRPOTrainer) -> list[tuple[str, Any]]:
    """Return the setting's name and the rows of each data set."""
    evaluated = trainer.eval_dataset
    if not isinstance(evaluated, dict):
        evaluated = {"": evaluated}
    return [("train_dataset", trainer.train_dataset), *(("eval_dataset", rows) for rows in evaluated.values())]
