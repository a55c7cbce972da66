"""``rollout: {overlap: 1}``: a vLLM server generates batch k+1 while the trainer trains on batch k.

At the start of generation batch k, every rank at the same place:

    wait for batch k's completions → send the weights → prove them (as often as ``verify_every`` says)
    → ask for batch k+1, in a thread of the main process (``background.py``) → score and train k

So the policy that trains is one generation batch ahead of the one that sampled, always: nothing is dropped, paused or
cut off, and no weights reach a running batch. A batch that nobody could ask for before (the first of a training, of a
resumed one and of each epoch) is generated then and there, with the weights of its step. ``policy_version`` says, row
by row, whose completion it is; ``rollout/staleness`` is logged.

The prompts of k+1 come from the data loader, read one generation batch ahead (``ReadAhead``). A checkpoint counts what
was trained on, so a resumed run meets them again and asks again.

Sources: slime's ``train_async.py``, verl's one-step-off recipe (both wait for the running batch before the sync).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.generation.server import from_main
from grpo_lab.trainer.settings.parse import RolloutSettings


class ReadAhead:
    """Micro-batches of an epoch as transformers' loop takes them, and those that come after, up to ``ahead``."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self.forget()

    def forget(self) -> None:
        self._source: Iterator[Any] | None = None
        self._given: list[Any] = []
        self._coming: deque[Any] = deque()
        self.first = 0  # micro-batches trained on before those of the optimizer step at hand

    def read(self, source: Iterator[Any], number: int, first: int) -> Iterator[Any]:
        """The next ``number`` micro-batches of ``source`` (fewer at its end); ``first``: how many were trained on
        before them."""
        if source is not self._source:  # an epoch begins
            self._source, self._coming = source, deque()
        while len(self._coming) < number + self._ahead:
            found = next(source, None)
            if found is None:
                break
            self._coming.append(found)
        self._given = [self._coming.popleft() for _ in range(min(number, len(self._coming)))]
        self.first = first
        return iter(self._given)

    def rows(self, number: int) -> Any | None:
        """Micro-batch ``number`` of the training, counted from 0; None where the epoch has no more."""
        place, known = number - self.first, [*self._given, *self._coming]
        return known[place] if 0 <= place < len(known) else None


class Overlap(TrainerCallback):  # type: ignore[misc]
    """One generation batch ahead; does nothing where it is not asked for. Every rank calls every method.

    Raises:
        ValueError: completions that are made in turns or bring images: tools, an environment, a rollout function, a
            vision model's data.
    """

    def __init__(self, trainer: GRPOTrainer, settings: RolloutSettings) -> None:
        self.trainer, self.on = trainer, settings.overlap > 0
        self._ahead = ReadAhead(trainer.phase.every)
        self._version: int | None = None
        if not self.on:
            return
        turns = "which asks the engine in turns of its own, and the next batch's request would be in its way"
        images = "whose image features are made by the engine itself, beside the request for the batch before"
        taken = {"rollout_func": turns, "tools": turns, "environment_factories": turns}
        found = [(f"`{name.replace('ies', 'y')}`", why) for name, why in taken.items() if getattr(trainer, name, None)]
        found += [("data with images", images)] if trl_bridge.may_bring_images(trainer) else []
        if found:
            raise ValueError(f"`rollout.overlap` does not combine with {found[0][0]}, {found[0][1]}: leave one out")
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ahead.forget()
        self._version = None
        if self.trainer.accelerator.is_main_process:
            self.trainer.vllm_generation.vllm_client.background.drop()

    def read(self, source: Iterator[Any], number: int) -> Iterator[Any]:
        """For ``get_batch_samples``: what an optimizer step is to have."""
        return self._ahead.read(source, number, self.trainer._step) if self.on else source

    @property
    def version(self) -> int:
        """Optimizer steps that the policy had taken which wrote the generation batch at hand."""
        step = int(self.trainer.state.global_step)
        return step if self._version is None or not self.trainer.model.training else self._version

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Around a generation: one of the training gets the completions that were begun before, if any were."""
        trainer = self.trainer
        if not self.on or not trainer.model.training:
            yield
            return
        generation, main, waited = trainer.vllm_generation, trainer.accelerator.is_main_process, 0.0
        if main:
            background = generation.vllm_client.background
            with generation.waiting():
                background.settle()
            background.takes, background.taken = True, None
            waited, background.waited = background.waited, 0.0
        taken = None
        try:
            yield
        finally:
            if main:
                background = generation.vllm_client.background  # another one where the server was lost and is back
                taken, background.takes = background.taken, False
        step = int(trainer.state.global_step)
        taken, waited = from_main(trainer.accelerator, (taken, waited))
        self._version = step if taken is None else taken
        book = trainer.recorder.book("train")
        book.add_alike("rollout/staleness", torch.tensor([float(step - self._version)]), 1)
        book.add_alike("rollout/waited_s", torch.tensor([float(waited)]), 1)

    def begin(self) -> None:
        """Ask for the next generation batch with the weights that the engine holds now; nothing at the end of an epoch
        and of the training, and in an evaluation."""
        trainer = self.trainer
        rows = self._next_rows() if self.on and trainer.model.training else None
        if rows is None:
            return
        prompt_ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
        trainer.vllm_generation.begin([list(ids) for ids in prompt_ids], trainer.num_generations)
        if trainer.accelerator.is_main_process:
            trainer.vllm_generation.vllm_client.background.version = int(trainer.state.global_step)

    def _next_rows(self) -> Any | None:
        phase, state = self.trainer.phase, self.trainer.state
        following = phase.start + phase.every
        left = (state.max_steps - state.global_step) * phase.accumulation  # micro-batches, the step at hand included
        return None if following >= self._ahead.first + left else self._ahead.rows(following)
