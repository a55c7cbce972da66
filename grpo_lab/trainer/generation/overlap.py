"""``rollout: {overlap: 1}``: a vLLM server generates batch k+1 while the trainer trains on batch k.

    server     ▒▒ makes k ▒▒▒▒│                      │▒▒ makes k+1 ▒▒▒▒▒▒▒▒▒▒│                      │▒▒ makes k+2 ▒▒
    trainer    trains on k-1 ─│─ takes k ─ sync ─────│─ scores, trains on k ─│─ takes k+1 ─ sync ───│─ trains on k+1
                                          └ proof    begin_next                         └ proof      begin_next

The policy that trains is thus always one generation batch ahead of the one that sampled. Nothing is dropped, paused or
cut off, and no weights reach a running request. The first batch of a training, of a resumed one and of each epoch
cannot be asked for in advance: it is generated when it is needed, with that step's weights. ``policy_version`` records
which policy wrote each row. ``rollout/staleness`` is logged, the optimizer steps between that policy and the one that
trains.

The prompts of batch k+1 come from the data loader, read one generation batch ahead (``read_ahead.py``). A resumed run
reads them again and asks again. The request runs in a thread of the main process (``background.py``).

Sources: slime's ``train_async.py``, verl's one-step-off recipe (both wait for the running batch before the sync).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from grpo_lab.trainer.generation.all_ranks import from_main
from grpo_lab.trainer.generation.background import BackgroundRequest
from grpo_lab.trainer.generation.read_ahead import ReadAhead, refuse_turns
from grpo_lab.trainer.generation.rollout_ports import RolloutPort
from grpo_lab.trainer.generation.server_across_ranks import NOTHING
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import prompt_tokens, replaced


class Overlap(TrainerCallback):  # type: ignore[misc]
    """Keeps the server one generation batch ahead of the training. Every rank calls every method, in the order in which
    they stand here. They do nothing in an evaluation, or if ``rollout.overlap`` is not set.

    Raises:
        ValueError: completions are made in turns (tools, an environment, a rollout function), or the data of a vision
            model have images.
    """

    def __init__(self, trainer: RolloutPort, settings: RolloutSettings, ahead: ReadAhead) -> None:
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
        """Wait for the request that an earlier training of this process has left, if there is one, and discard it."""
        self._ahead.forget()
        self._version = None
        if self.trainer.accelerator.is_main_process:
            self._take_request()

    @contextlib.contextmanager
    def handing_over(self) -> Iterator[None]:
        """Return a context in which TRL's generation gets the completions that were requested one batch ago.

        On entry, wait for them. In the block TRL sends this step's weights, then asks for completions and gets those.
        If the server is lost in between, so are the completions, and the server that comes back generates new ones. On
        exit, log the batch's staleness and the seconds waited.
        """
        trainer = self.trainer
        if not self.on or not trainer.model.training:
            yield
            return
        begun = None
        with contextlib.ExitStack() as in_its_place:
            if trainer.accelerator.is_main_process:
                with trainer.vllm_generation.hooks.waiting():
                    begun = self._take_request()
                if begun is not None:
                    client = trainer.vllm_generation.vllm_client
                    in_its_place.enter_context(replaced(client, "generate", begun.completions))
            yield
        step = int(trainer.state.global_step)
        version = step
        waited = 0.0
        if begun is not None:
            waited = begun.waited
            if begun.taken:
                version = begun.version
        self._version, waited = from_main(trainer.accelerator, (version, waited))
        book = trainer.recorder.book("train")
        book.add_alike("rollout/staleness", torch.tensor([float(step - self._version)]), 1)
        book.add_alike("rollout/waited_s", torch.tensor([waited]), 1)

    def _take_request(self) -> BackgroundRequest | None:
        """Wait until the server is idle, then take the request from the client and return it, or None."""
        client = self.trainer.vllm_generation.vllm_client
        client.wait_until_idle()
        begun = client.in_background
        client.in_background = None
        return begun

    def begin_next(self) -> None:
        """Request the completions of the next generation batch, with the weights that the server holds now, which have
        been proven. Do nothing at the end of an epoch or of the training."""
        trainer = self.trainer
        if not self.on or not trainer.model.training:
            return
        rows = self._ahead.rows_to_train(trainer, trainer.phase.start + trainer.phase.every)
        if rows is None:
            return
        prompts = prompt_tokens(trainer, rows)
        generation = trainer.vllm_generation
        with contextlib.ExitStack() as in_its_place:
            if trainer.accelerator.is_main_process:
                begins = BeginsAlone(generation.vllm_client, int(trainer.state.global_step))
                in_its_place.enter_context(replaced(generation, "vllm_client", begins))
            # TRL gathers the prompts of all ranks, puts the request together, and hands round what it gets
            VLLMGeneration.generate(generation, prompts, None, trainer.num_generations)

    @property
    def version(self) -> int:
        """Number of optimizer steps that the policy had taken when it wrote the current generation batch."""
        if self._version is None or not self.trainer.model.training:
            return int(self.trainer.state.global_step)
        return self._version


class BeginsAlone:
    """Stands in for the client while TRL puts a request together: sends it in the background and returns an empty
    answer. An error of the request is raised later, where its completions are asked for."""

    def __init__(self, client: LabVLLMClient, version: int) -> None:
        self.client = client
        self.version = version

    def generate(self, prompts: list[list[int]], **arguments: Any) -> dict[str, Any]:
        self.client.begin(prompts, self.version, **arguments)
        return dict(NOTHING)
