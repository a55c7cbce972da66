"""``vllm_mode: server`` inside the trainer: one process talks to the server, and all ranks learn the outcome.

In TRL the main process talks to the server while the others wait for its broadcast; an error on the main process leaves
them waiting. Here every exchange ends in ``raise_together``, which raises the same error on every rank at the same
place. So a checkpoint, which takes all ranks, can be written before the run ends.

A server that is lost during a run may come back: whoever runs it (systemd, Slurm, Kubernetes) starts it again. The run
waits for it up to ``rollout.server.return_timeout`` seconds (``ServerReturn``). Then it connects, checks the model as
at the start and sends all weights. These are proven with the prompts of the generation that failed, and the generation
is made again. Its completions are other samples than the lost ones would have been, since the new server's random
numbers begin with its ``--seed``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import RequestRefused, ServerGone, TokenRefused, read_as_vllms
from grpo_lab.engines.weights.proof import SyncGap, TensorDifference, judge, sync_gap
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.all_ranks import from_main, of_all_ranks, on_main, raise_together
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong
from grpo_lab.trainer.generation.rollout_ports import EnginePort, RolloutPort
from grpo_lab.trainer.generation.same_model import check_same_model
from grpo_lab.trainer.generation.server_client import LabVLLMClient, read_to_end
from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.resume.stop import StopOnRequest, kept
from grpo_lab.trainer.settings.parse import ServerSettings
from grpo_lab.trainer.trl_bridge import replaced

Proven = TypeVar("Proven")
logger = logging.getLogger("grpo_lab")

#: Errors that leave the trainer as it was after its last step, so that a checkpoint of it is worth saving.
KEPT = (ServerGone, PromptTooLong, RequestRefused)
#: Number of lost servers in one generation that end the run, so that a batch which crashes servers is given up.
LOSSES = 3
#: Seconds before the next attempt to connect to a server that answered and was lost again.
LOOK_AGAIN = 1.0
#: Answer of a server without completions.
NOTHING: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}


def connect(generation: EnginePort, settings: ServerSettings, wait: float | None = None) -> None:
    """Wait for the server, check its model and set up the transfer of weights; in place of TRL's
    ``VLLMGeneration._init_vllm`` in server mode. Set ``vllm_client`` on the main process, and ``context`` and ``page``
    on every rank, which all call this.

    Args:
        wait: seconds; None: TRL's ``vllm_server_timeout``.

    Raises:
        ServerGone: the server did not answer in time.
        ValueError: it has another model, or a context no larger than the longest completion.
    """
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"

    def meet(client: LabVLLMClient) -> None:
        """Raise ValueError if the server's context or model does not fit."""
        longest = generation.max_completion_length
        if longest is not None and longest >= client.context:
            raise ValueError(
                f"`max_completion_length` is {longest}, and the vLLM server at {url} has a context of {client.context} "
                "tokens for prompt and completion: start it with a larger --max-model-len, or shorten the completions"
            )
        check_same_model(client, generation.model, generation.processing_class)

    def talk() -> tuple[int, int]:
        """Connect, on the main process; return the server's context and page in tokens."""
        limit = generation.server_timeout if wait is None else wait
        with read_as_vllms(url):
            client = LabVLLMClient(settings, base_url=url, group_port=generation.group_port, connection_timeout=limit)
            client.meet = functools.partial(meet, client)
            client.meet()
            files = generation.adapters
            client.open_way(torch.device(generation.accelerator.device), None if files is None else files.max_rank)
            client.decode = generation.processing_class.decode
            generation.vllm_client = client
            return client.context, client.page

    generation.context, generation.page = on_main(generation.accelerator, talk)


def sync(generation: EnginePort, stock: Callable[[], None]) -> None:
    """Send the weights by TRL's ``sync_weights`` (``stock``); raise the main process's error on every rank."""
    failure = None
    try:
        stock()
    except Exception as caught:
        failure = caught
    raise_together(generation.accelerator, failure)


def generate(generation: EnginePort, stock: Callable[[], Any]) -> Any:
    """Generate by TRL's ``generate`` (``stock``) and return what it returns; raise the main process's error on every
    rank."""
    if not generation.accelerator.is_main_process:
        answer = stock()
        raise_together(generation.accelerator, None)
        return answer
    guard = KeptFailure(generation.vllm_client, generation.hooks.on_fault)
    with replaced(generation, "vllm_client", guard), generation.hooks.waiting():
        answer = stock()
    raise_together(generation.accelerator, guard.failure)
    return answer


class KeptFailure:
    """Stands in for the client during one generation: keeps the first error in ``failure`` and returns an empty answer
    instead, so that the main process reaches the broadcast for which the other ranks wait.

    ``on_fault`` is called with the ``EngineFault`` for log-probs that are not finite. If it returns, the completions
    are generated again without log-probs. None: such an error is kept like any other.
    """

    def __init__(self, client: LabVLLMClient, on_fault: Callable[[Exception], None] | None = None) -> None:
        self.client = client
        self.on_fault = on_fault
        self.failure: Exception | None = None

    def image_features(self, images: list[Any]) -> list[Any]:
        return self._tried(lambda: self.client.image_features(images), [None] * len(images))

    def generate(self, prompts: Any, **arguments: Any) -> dict[str, Any]:
        return self._tried(lambda: self._generate(prompts, arguments), dict(NOTHING))

    def _generate(self, prompts: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """Generate by the client; if log-probs are not finite and ``on_fault`` returns, again without log-probs."""
        try:
            return self.client.generate(prompts, **arguments)
        except EngineFault as fault:
            if self.on_fault is None:
                raise
            self.on_fault(fault)
        return self.client.generate_unscored(prompts, **arguments)

    def _tried(self, call: Callable[[], Any], otherwise: Any) -> Any:
        """Return what ``call`` returns; return ``otherwise`` if it fails, or if a call failed before."""
        if self.failure is None:
            try:
                return call()
            except Exception as failure:
                self.failure = failure
        return otherwise


def prove(
    generation: EnginePort,
    named_params: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    model: nn.Module,
    prompt_ids: list[list[int]],
    tolerance: Callable[[torch.dtype], float],
) -> SyncGap:
    """Prove the sync with a server and return the gap. Every rank calls this.

    The main process has the server complete ``prompt_ids``. Each rank compares the log-probs of these tokens with those
    of its own forward. If the server's tensors can be read, they are compared, too.

    Args:
        named_params: returns a stream of names and tensors that the server should hold.
        model: the trainer's model.
        prompt_ids: token ids; those of the main process count.
        tolerance: returns the largest allowed gap, in nats per token, for the dtype of the server's weights.

    Raises:
        WeightSyncError: the server holds other weights (``judge``).
        EngineFault: a log-prob is not finite (``sync_gap``).
    """
    accelerator = generation.accelerator
    client = getattr(generation, "vllm_client", None)
    asked = on_main(accelerator, lambda: (client.probe(prompt_ids), client.dtype, client.reads_tensors))
    probe, dtype, readable = asked
    gap = sync_gap(probe.logprobs, forward_logprobs(model, probe.prompt_ids, probe.completion_ids))
    found: list[TensorDifference] = []
    if readable:
        params = named_params()
        if not accelerator.is_main_process:
            read_to_end(params)
        found = on_main(accelerator, lambda: client.differing(params))
    unread = " (The server's tensors could not be read: it runs without our worker extension, or on another machine.)"
    judge(gap, found, tolerance=tolerance(dtype), note="" if readable else unread)
    return gap


class ServerReturn:
    """Makes the syncs, proofs and generations of a run in server mode, and repeats one whose server was lost and came
    back. If the server does not come back in time, ``ServerGone`` ends the run, after a checkpoint.

    Args:
        settings: ``return_timeout``, the seconds for which a lost server is waited for; None or 0: it is not.
        patience: seconds that ranks wait for each other (``ddp_timeout``).

    Raises:
        ValueError: there are several ranks, and ``patience`` does not exceed the wait for the server.
    """

    def __init__(self, generation: EnginePort, settings: ServerSettings, patience: float = math.inf) -> None:
        self.waits = settings.return_timeout or 0.0
        if generation.accelerator.num_processes > 1 and self.waits >= patience:
            raise ValueError(
                f"a lost server is waited for {self.waits:.0f} s (`rollout.server.return_timeout`), and ranks wait for "
                f"each other {patience:.0f} s (`ddp_timeout`): they would end before it is back. Shorten the one or "
                "lengthen the other"
            )
        self.generation = generation
        self.settings = settings
        self._since = 0  # returns since the last batch
        self._unproven = False

    def sync(self, stock: Callable[[], None]) -> None:
        """Send the weights by TRL's method (``stock``); if the server is lost, to the one that comes back.

        A signal ends the wait for a server that hangs. Not so over NCCL, where the server would wait for the tensors
        that are not sent yet.
        """
        client = getattr(self.generation, "vllm_client", None)
        over_nccl = getattr(client, "way", "") == "nccl"
        try:
            with contextlib.nullcontext() if over_nccl else self.generation.hooks.waiting():
                sync(self.generation, stock)
        except ServerGone as lost:
            self._reconnect(lost, stock)

    def generate(self, stock: Callable[[], Any], stock_sync: Callable[[], None], prompts: list[list[int]]) -> Any:
        """Generate by TRL's method (``stock``). If the server is lost and comes back, send the weights by
        ``stock_sync``, prove them with ``prompts`` and ask again."""

        def proven_and_asked() -> Any:
            self._prove(prompts)
            return generate(self.generation, stock)

        return self._asked(proven_and_asked, stock_sync, "generation")

    def record(self, book: MetricBook) -> None:
        """Log how often the server came back during the batch's generations, of which there may be several (turns of
        tools, a thinking budget, groups drawn anew)."""
        if self.waits:
            book.add_alike("rollout/server_returns", torch.tensor([float(self._since)]), 1)
        self._since = 0

    def proof(self, prove: Callable[[], Proven], stock_sync: Callable[[], None]) -> Proven:
        """Call ``prove`` and return its result. If the server is lost meanwhile, prove the one that comes back."""
        with self.generation.hooks.waiting():
            proven = self._asked(prove, stock_sync, "proof")
        self._unproven = False
        return proven

    def _asked(self, ask: Callable[[], Proven], stock_sync: Callable[[], None], what: str) -> Proven:
        """Call ``ask``, and again after each return of a lost server. At loss number ``LOSSES`` raise ``ServerGone``;
        ``what`` names the call in its message."""
        for _ in range(LOSSES - 1):
            try:
                return ask()
            except ServerGone as lost:
                self._reconnect(lost, stock_sync)
        try:
            return ask()
        except ServerGone as lost:
            raise ServerGone(f"{lost}. That was loss {LOSSES} of the server in one {what}") from lost

    def _reconnect(self, lost: ServerGone, stock_sync: Callable[[], None]) -> None:
        """Wait for the server, connect and send the weights; raise ``ServerGone`` if that fails, or if no time is set
        for it. Every rank calls this with the same error ``lost``."""
        if not self.waits:
            raise lost
        start = time.monotonic()
        says = self.generation.accelerator.is_main_process
        if says:
            waiting = f"waiting {self.waits:.0f} s for it (`rollout.server.return_timeout`)"
            logger.warning(f"the vLLM server is lost ({lost}); {waiting}")
        try:
            with self.generation.hooks.waiting():
                self._have_back(stock_sync, start + self.waits)
        except (OSError, RuntimeError, ValueError) as failure:  # our errors, a token file's, NCCL's
            raise ServerGone(f"{lost}. It did not come back: {failure}") from failure
        self._since += 1
        self._unproven = True
        if says:
            waited = time.monotonic() - start
            logger.info(f"the vLLM server is back after {waited:.0f} s, with this step's weights; their proof is next")

    def _have_back(self, stock_sync: Callable[[], None], end: float) -> None:
        """Wait for the server, connect and send the weights; try again until ``end`` on the main process's clock. A
        server that is about to end may answer once more, or refuse a token whose file is gone: the wait then goes on.
        """
        accelerator = self.generation.accelerator
        while True:
            try:
                on_main(accelerator, lambda: self.generation.vllm_client.wait(max(end - time.monotonic(), 0.0)))
                connect(self.generation, self.settings, wait=0.0)
                sync(self.generation, stock_sync)
                return
            except (ServerGone, TokenRefused):
                if from_main(accelerator, time.monotonic() >= end):
                    raise
            time.sleep(LOOK_AGAIN)

    def _prove(self, prompts: list[list[int]]) -> None:
        """Prove the weights of a server that came back, whatever ``verify_every`` is. Raise ``ServerGone`` on every
        rank if they are not the trainer's."""
        prove = self.generation.hooks.prove
        if not self._unproven or prove is None:
            return
        failure = None
        try:
            prove(prompts)
        except (EngineFault, WeightSyncError) as caught:  # on every rank: all judge the same probe
            failure = ServerGone(f"the vLLM server came back, and the proof of its weights failed: {caught}")
            failure.__cause__ = caught
        raise_together(self.generation.accelerator, failure)
        self._unproven = False


@contextlib.contextmanager
def checkpoint_if_server_gone(trainer: GRPOTrainer, stop: StopOnRequest) -> Iterator[None]:
    """Return a context in which an error of ``KEPT``, or Ctrl-C during a wait for the server, is passed on only after a
    checkpoint of the last step was written.

    If one rank of several fails alone (a prompt too long for its own engine, or in its rows of streamed data), no
    checkpoint is written, since that takes all ranks.
    """
    try:
        yield
    except KEPT as fault:
        if trainer.accelerator.num_processes > 1 and not of_all_ranks(fault):
            raise
        then = "Start a server again (`grpo-lab serve --model …`) and resume"
        if not isinstance(fault, ServerGone):
            then = "Resume when that is mended"
        raise type(fault)(f"{fault}. {save_for_resume(trainer, then)}") from fault
    except KeyboardInterrupt:
        if not stop.broke_off_a_wait:
            raise
        save_for_resume(trainer, "")
        step = trainer.state.global_step
        if step:
            said = kept(checkpoint_folder(trainer), step)
        else:
            said = "interrupted; nothing to save"
        raise KeyboardInterrupt(said) from None


def record_returns(trainer: RolloutPort) -> None:
    """Log ``rollout/server_returns`` for the batch that was just generated, if there is a server."""
    returns = getattr(getattr(trainer, "vllm_generation", None), "server_return", None)
    if returns is not None:
        returns.record(trainer.recorder.book())


def checkpoint_folder(trainer: GRPOTrainer) -> str:
    return f"{trainer._get_output_dir(trial=None)}/{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


def save_for_resume(trainer: GRPOTrainer, then: str) -> str:
    """Write a checkpoint as TRL would after the last step. Return sentences that say where it is and what to do next,
    which begin with ``then``; or why there was nothing to save."""
    if not trainer.is_in_train:
        return "No training was in progress, so there was nothing to save"
    step = trainer.state.global_step
    if step == 0:
        return "No optimizer step was made, so there was nothing to save: start the run again when that is mended"
    trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    trainer.accelerator.wait_for_everyone()
    folder = checkpoint_folder(trainer)
    weights_only = trainer.args.save_only_model
    partly = ""
    if weights_only:
        partly = " (weights only, as `save_only_model` asks: the optimizer starts anew)"
    return (
        f"A checkpoint of step {step} was written to {folder}{partly}. {then}: `grpo-lab train … --resume`, or "
        f"trainer.train(resume_from_checkpoint={folder!r})"
    )
