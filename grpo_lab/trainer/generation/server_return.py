"""A server that is lost in the middle of a run, and comes back: nothing is taken from it before its weights are proven.

Whoever runs the server (systemd, Slurm, Kubernetes) starts it again; ``rollout.server.return_timeout`` waits for it.
Then, on every rank at the same place: connect as at the start (is it this model), send all weights, prove them with the
prompts of the generation that failed, and ask for that generation again. What cannot be had in time ends the run as a
lost server does without the setting: a checkpoint, then ``ServerGone``.

What is asked again are the same prompts, of the same policy. The completions are other samples than they would have
been: the random numbers of the new server begin with its ``--seed``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation import server
from grpo_lab.trainer.settings.parse import ServerSettings

if TYPE_CHECKING:
    from trl import GRPOTrainer

Proven = TypeVar("Proven")
logger = logging.getLogger("grpo_lab")

#: times that one generation may lose its server; a batch that the server dies of is not tried for ever
LOSSES = 3


class ServerReturn:
    """Syncs and generations of one run in server mode, each with a server that may be lost meanwhile.

    Args:
        generation: TRL's ``VLLMGeneration``.
        patience: seconds that ranks wait for each other (``ddp_timeout``).

    Raises:
        ValueError: the other ranks would give up before the server is back.
    """

    def __init__(self, generation: Any, settings: ServerSettings, patience: float = math.inf) -> None:
        self.waits = settings.return_timeout or 0.0
        if generation.accelerator.num_processes > 1 and self.waits >= patience:
            raise ValueError(
                f"a lost server is waited for {self.waits:.0f} s (`rollout.server.return_timeout`), and ranks wait "
                "for each other "
                f"{patience:.0f} s (`ddp_timeout`): they would end before it is back. Shorten the one or lengthen "
                "the other"
            )
        self.generation, self.settings = generation, settings
        self._since = 0  # returns since the last generation
        self._unproven = False
        self._trainer: GRPOTrainer | None = None

    def attach(self, trainer: GRPOTrainer) -> None:
        """The trainer, once it is built: it proves and records."""
        self._trainer = trainer

    def sync(self, stock: Callable[[], None]) -> None:
        """``sync_weights``: the weights are with the server, or with the one that came in its place."""
        try:
            server.sync(self.generation, stock)
        except ServerGone as lost:
            self._reconnect(lost, stock)

    def generate(self, stock: Callable[[], Any], sync: Callable[[], None], prompts: list[list[int]]) -> Any:
        """``generate``: asked again of a server that came back, after its proof."""
        for left in reversed(range(LOSSES)):
            try:
                self._prove(prompts)
                answer = server.generate(self.generation, stock)
                break
            except ServerGone as lost:
                if left == 0 and self.waits:
                    raise ServerGone(f"{lost}. That was loss {LOSSES} of the server in one generation") from lost
                self._reconnect(lost, sync)
        if self.waits and self._trainer is not None:
            returns = torch.tensor([float(self._since)])
            self._trainer.recorder.book().add_alike("rollout/server_returns", returns, 1)
        self._since = 0
        return answer

    def proof(self, prove: Callable[[], Proven], sync: Callable[[], None]) -> Proven:
        """``prove()`` between two generations: a server that is lost in it is reconnected, sent the weights, and proven
        again."""
        try:
            return prove()
        except ServerGone as lost:
            self._reconnect(lost, sync)
        proven = prove()
        self._unproven = False
        return proven

    def _reconnect(self, lost: ServerGone, sync: Callable[[], None]) -> None:
        """Wait for the server, connect, send the weights. Every rank calls this with the same fault.

        Raises:
            ServerGone: as ``lost``, with what prevented a return.
        """
        if not self.waits:
            raise lost
        start = time.monotonic()
        waiting = f"waiting {self.waits:.0f} s for it (`rollout.server.return_timeout`)"
        self._say(f"the vLLM server is lost ({lost}); {waiting}", logging.WARNING)
        try:
            with self.generation.waiting():
                server.on_main(self.generation.accelerator, self._wait)
                server.connect(self.generation, self.settings)
                server.sync(self.generation, sync)
        except (OSError, RuntimeError, ValueError) as failure:  # ours, a token's file, NCCL's
            raise ServerGone(f"{lost}. It did not come back: {failure}") from failure
        self._since, self._unproven = self._since + 1, True
        waited = time.monotonic() - start
        self._say(f"the vLLM server is back after {waited:.0f} s and has this step's weights; their proof is next")

    def _wait(self) -> None:
        """On the main process: until the server answers."""
        client = self.generation.vllm_client
        client.close_communicator()
        client.wait(self.waits)

    def _prove(self, prompts: list[list[int]]) -> None:
        """The proof of a server that came back, however seldom the run proves otherwise."""
        if not self._unproven or self._trainer is None:
            return
        try:
            self._trainer.parts.sync_proof.prove(prompts, strict=True)
        except (EngineFault, WeightSyncError) as failure:
            raise ServerGone(f"the vLLM server came back, and the proof of its weights failed: {failure}") from failure
        self._unproven = False

    def _say(self, message: str, level: int = logging.INFO) -> None:
        if self.generation.accelerator.is_main_process:
            logger.log(level, message)
