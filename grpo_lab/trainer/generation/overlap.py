"""``rollout: {overlap: 1}``: a vLLM server generates batch k+1 while the trainer trains on batch k.

At the start of generation batch k, every rank at the same place:

    wait for batch k's completions → send the weights → prove them (as often as ``verify_every`` says)
    → ask for batch k+1, in a thread of the main process (``background.py``) → score and train k

So the policy that trains is one generation batch ahead of the one that sampled, always: nothing is dropped, paused or
cut off, and no weights reach a running batch. A batch that nobody could ask for before (the first of a training, of a
resumed one and of each epoch) is generated then and there, with the weights of its step. ``policy_version`` says, row
by row, whose completion it is; ``rollout/staleness`` is logged.

The prompts of k+1 come from the data loader, read one generation batch ahead (``read_ahead.py``); a resumed run meets
them again and asks again.

Sources: slime's ``train_async.py``, verl's one-step-off recipe (both wait for the running batch before the sync).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.trainer.generation.all_ranks import from_main
from grpo_lab.trainer.generation.read_ahead import ReadAhead, refuse_turns
from grpo_lab.trainer.settings.parse import RolloutSettings


class Overlap(TrainerCallback):  # type: ignore[misc]
    """Asks for one generation batch ahead; does nothing where that is not asked for. Every rank calls every method.

    Raises:
        ValueError: completions that are made in turns or bring images: tools, an environment, a rollout function, a
            vision model's data.
    """

    def __init__(self, trainer: GRPOTrainer, settings: RolloutSettings, ahead: ReadAhead) -> None:
        self.trainer = trainer
        self.on = settings.overlap > 0
        self._ahead = ahead
        self._version: int | None = None
        if not self.on:
            return
        turns = "which asks the engine in turns of its own, and the next batch's request would be in its way"
        images = "whose image features are made by the engine itself, beside the request for the batch before"
        refuse_turns(trainer, "rollout.overlap", turns, images)
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ahead.forget()
        self._version = None
        if self.trainer.accelerator.is_main_process:
            self.trainer.vllm_generation.vllm_client.background.drop()

    @property
    def version(self) -> int:
        """Optimizer steps that the policy had taken which wrote the generation batch at hand."""
        step = int(self.trainer.state.global_step)
        if self._version is None or not self.trainer.model.training:
            return step
        return self._version

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Context around a generation: one of the training gets the completions that were begun before, if any were."""
        trainer = self.trainer
        if not self.on or not trainer.model.training:
            yield
            return
        generation = trainer.vllm_generation
        main = trainer.accelerator.is_main_process
        waited = 0.0
        if main:
            background = generation.vllm_client.background
            with generation.waiting():
                background.settle()
            background.takes, background.taken = True, None
            waited = background.waited
            background.waited = 0.0
        taken = None
        try:
            yield
        finally:
            if main:
                background = generation.vllm_client.background  # another one where the server was lost and is back
                taken = background.taken
                background.takes = False
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
        if not self.on or not trainer.model.training:
            return
        rows = self._ahead.rows_to_train(trainer, trainer.phase.start + trainer.phase.every)
        if rows is None:
            return
        prompt_ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
        trainer.vllm_generation.begin([list(ids) for ids in prompt_ids], trainer.num_generations)
        if trainer.accelerator.is_main_process:
            trainer.vllm_generation.vllm_client.background.version = int(trainer.state.global_step)
