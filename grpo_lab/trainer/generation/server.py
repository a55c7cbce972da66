"""``vllm_mode: server`` inside the trainer: one process talks to the server, all of them learn how it went.

TRL lets the main process talk to the server while the others wait for what it broadcasts; an error on the main process
leaves them waiting. Here every talk ends in ``raise_together``: the same error on every rank at the same place, so that
a checkpoint, which takes all of them, can be written before the run ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.talk import ServerGone, TokenRefused, read_as_vllms
from grpo_lab.engines.weights.proof import Probe, SyncGap, TensorDifference, describe, forward_logprobs, judge, sync_gap
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.generation.prompt_fit import PromptTooLong
from grpo_lab.trainer.generation.server_check import check_same_model
from grpo_lab.trainer.generation.server_client import LabVLLMClient, RequestRefused
from grpo_lab.trainer.resume.stop import kept
from grpo_lab.trainer.settings.parse import ServerSettings
from grpo_lab.trainer.trl_bridge import replaced

if TYPE_CHECKING:
    from trl import GRPOTrainer

FAULTS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ServerGone, EngineFault, WeightSyncError, PromptTooLong, RequestRefused, TokenRefused, ValueError)
}
#: faults that leave the trainer as it was after its last step, so that a checkpoint of it is worth keeping
KEPT = (ServerGone, PromptTooLong, RequestRefused)


def raise_together(accelerator: Any, failure: Exception | None) -> None:
    """Raise ``failure`` of the main process on every rank; nothing where it is None. Every rank must call this."""
    news = [None if failure is None else (type(failure).__name__, str(failure))]
    if accelerator.num_processes > 1:
        broadcast_object_list(news, from_process=0)
    if failure is not None:
        raise failure
    if news[0] is not None:
        kind, message = news[0]
        raise FAULTS.get(kind, RuntimeError)(message)


def from_main(accelerator: Any, value: Any) -> Any:
    """The main process's ``value`` on every rank."""
    if accelerator.num_processes == 1:
        return value
    box = [value]
    broadcast_object_list(box, from_process=0)
    return box[0]


def on_main(accelerator: Any, call: Callable[[], Any]) -> Any:
    """The result of ``call``, made on the main process, on every rank; its error likewise."""
    value, failure = None, None
    if accelerator.is_main_process:
        try:
            value = call()
        except Exception as caught:
            failure = caught
    raise_together(accelerator, failure)
    return from_main(accelerator, value)


# -- the three things TRL's VLLMGeneration does ------------------------------------------------------------------------


def connect(generation: Any, settings: ServerSettings) -> None:
    """Wait for the server, see that it serves this model, open the way for the weights.

    What ``VLLMGeneration._init_vllm`` does in server mode. Raises ``ValueError`` where the server serves another model.
    """
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"

    def talk() -> int:
        client = LabVLLMClient(
            settings, base_url=url, group_port=generation.group_port, connection_timeout=generation.server_timeout
        )
        client.meet = functools.partial(_meet, generation, client)
        client.meet()
        client.open_way(torch.device(generation.accelerator.device))
        client.decode = generation.processing_class.decode
        generation.vllm_client = client
        return client.context

    def talk_to_vllm() -> int:
        with read_as_vllms(url):
            return talk()

    generation.context = on_main(generation.accelerator, talk_to_vllm)


def _meet(generation: Any, client: LabVLLMClient) -> None:
    """See that the server serves this model."""
    check_length(generation.max_completion_length, client)
    check_same_model(client, generation.model, generation.processing_class)


def check_length(max_completion_length: int | None, client: LabVLLMClient) -> None:
    """``ValueError`` where the server's context has no room for a prompt beside the longest completion."""
    context = client.context
    if max_completion_length is not None and max_completion_length >= context:
        raise ValueError(
            f"`max_completion_length` is {max_completion_length}, and the vLLM server at {client.base_url} has a "
            "context of "
            f"{context} tokens for prompt and completion: start it with a larger --max-model-len, or shorten the "
            "completions"
        )


def sync(generation: Any, stock: Callable[[], None]) -> None:
    """``sync_weights`` in server mode: TRL's, after which every rank knows whether it worked."""
    failure = None
    try:
        stock()
    except Exception as caught:
        failure = caught
    raise_together(generation.accelerator, failure)


def generate(generation: Any, stock: Callable[[], Any]) -> Any:
    """``generate`` in server mode: TRL's, with a failure on the main process raised on every rank."""
    if not generation.accelerator.is_main_process:
        answer = stock()
        raise_together(generation.accelerator, None)
        return answer
    guard = KeptFailure(generation.vllm_client, generation.on_fault)
    with replaced(generation, "vllm_client", guard), generation.waiting():
        answer = stock()
    raise_together(generation.accelerator, guard.failure)
    return answer


class KeptFailure:
    """Stands before the client during one generation: the first failure is kept and an empty answer given instead.

    So the main process still reaches the broadcast in which the others wait; the failure is raised after it,
    everywhere. ``on_fault`` is given the ``EngineFault`` of log-probs that are not finite; unless it raises,
    completions come without them.
    """

    def __init__(self, client: LabVLLMClient, on_fault: Callable[[Exception], None] | None = None) -> None:
        self.client, self.on_fault = client, on_fault
        self.failure: Exception | None = None

    def image_features(self, images: list[Any]) -> list[Any]:
        return self._tried(lambda: self.client.image_features(images), [None] * len(images))

    def generate(self, prompts: Any, **arguments: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "logprob_token_ids": []}
        return self._tried(lambda: self._generate(prompts, arguments), empty)

    def _generate(self, prompts: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.client.generate(prompts, **arguments)
        except EngineFault as fault:
            if self.on_fault is None:
                raise
            self.on_fault(fault)
        return self.client.generate_unscored(prompts, **arguments)

    def _tried(self, call: Callable[[], Any], otherwise: Any) -> Any:
        if self.failure is None:
            try:
                return call()
            except Exception as failure:
                self.failure = failure
        return otherwise


# -- proof -------------------------------------------------------------------------------------------------------------


def prove(
    generation: Any, model: nn.Module, prompt_ids: list[list[int]], tolerance: Callable[[torch.dtype], float]
) -> SyncGap:
    """The sync proof over HTTP: the main process's probe, every rank's forward pass, tensors where they can be read.

    ``tolerance(dtype of the server's weights)`` in nats per token. Raises ``WeightSyncError`` or ``EngineFault`` on
    every rank.
    """
    accelerator = generation.accelerator
    client = generation.vllm_client if accelerator.is_main_process else None

    def talk() -> tuple[Probe, torch.dtype, bool]:
        assert client is not None
        return client.probe(prompt_ids), client.dtype, client.reads_tensors

    probe, dtype, readable = on_main(accelerator, talk)
    gap = sync_gap(probe.logprobs, forward_logprobs(model, probe.prompt_ids, probe.completion_ids))
    limit = tolerance(dtype)
    if readable:
        judge(gap, differing(generation, client), tolerance=limit)
    elif gap.mean > limit:
        raise WeightSyncError(
            f"{describe(gap, limit, [])} (The server's tensors could not be read: it runs without our worker "
            "extension, or on another machine.)"
        )
    return gap


def differing(generation: Any, client: LabVLLMClient | None) -> list[TensorDifference]:
    """Tensors in which the server differs, on every rank; gathering the trainer's takes all of them."""
    params = generation._iter_named_params()
    if client is None:
        for _ in params:
            pass
    result: list[TensorDifference] = on_main(
        generation.accelerator, lambda: client.differing(params) if client is not None else []
    )
    return result


# -- the end of a run --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkpoint_if_server_gone(trainer: GRPOTrainer) -> Iterator[None]:
    """A fault of ``KEPT`` inside the block ends the run with a checkpoint of its last optimizer step and says how to go
    on.

    So does Ctrl-C while the trainer waits for the server. A prompt that is too long for engines in the processes is one
    rank's own: with several ranks it ends the run without a checkpoint, which would take all of them.
    """
    try:
        yield
    except KEPT as fault:
        alone = trainer.accelerator.num_processes == 1
        if isinstance(fault, PromptTooLong) and not alone and trainer.vllm_mode != "server":
            raise
        lost = isinstance(fault, ServerGone)
        raise type(fault)(f"{fault}. {save_for_resume(trainer, NEW_SERVER if lost else MENDED)}") from fault
    except KeyboardInterrupt:
        if not trainer.parts.stop.broke_off_a_wait:
            raise
        save_for_resume(trainer, "")
        step = trainer.state.global_step
        raise KeyboardInterrupt(
            kept(checkpoint_folder(trainer), step) if step else "interrupted; nothing to save"
        ) from None


NEW_SERVER = "Start a server again (`grpo-lab serve --model …`) and resume"
MENDED = "Resume when that is mended"


def checkpoint_folder(trainer: GRPOTrainer) -> str:
    """Where the checkpoint of the current step is or would be."""
    return f"{trainer._get_output_dir(trial=None)}/{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


def save_for_resume(trainer: GRPOTrainer, then: str = NEW_SERVER) -> str:
    """Write a checkpoint as TRL would after this step → a sentence that says where, and what to do ``then``."""
    if not trainer.is_in_train:
        return "No training was in progress, so there was nothing to save"
    step = trainer.state.global_step
    if step == 0:
        return "No optimizer step was made, so there was nothing to save: start the run again when that is mended"
    trainer._save_checkpoint(trainer.model_wrapped, trial=None)
    trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    trainer.accelerator.wait_for_everyone()
    folder = checkpoint_folder(trainer)
    partly = (
        " (weights only, as `save_only_model` asks: the optimizer starts anew)" if trainer.args.save_only_model else ""
    )
    return (
        f"A checkpoint of step {step} was written to {folder}{partly}. {then}: `grpo-lab train … --resume`, or "
        f"trainer.train(resume_from_checkpoint={folder!r})"
    )
