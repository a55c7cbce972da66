"""Extend the engine of TRL's rollouts by our engine options and a weight sync that is proven.

While the trainer is built, TRL's ``VLLMGeneration`` is replaced by a subclass (``engine_class``), which starts the
engine with the options of ``rollout.engine``. On a GPU TRL's own weight sync runs unchanged. vLLM's CPU build packs its
weights, so that TRL's sync would miss some; there the subclass sends them in its own way. With ``rollout.sync:
adapter`` a sync sends a new version of the LoRA adapter, and the engine keeps the base weights that it read from the
disk. ``SyncProof`` compares the engine's log-probs and weights with the trainer's after a sync.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.generation import vllm_generation as trl_vllm

from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory
from grpo_lab.engines.vllm.presence import refuse_without_engine
from grpo_lab.engines.weights.adapter import (
    AdapterFiles,
    adapter_tensors,
    load_adapter,
    refuse_untied,
    under_base_names,
)
from grpo_lab.engines.weights.proof import SyncGap, cached_prompt, prove_sync, tolerance_for
from grpo_lab.engines.weights.sync import clear_cache, needs_repair, push_weights, worker_runner
from grpo_lab.trainer.generation import server_across_ranks
from grpo_lab.trainer.generation.all_ranks import from_main
from grpo_lab.trainer.generation.kept_sets import KeptSets
from grpo_lab.trainer.generation.prompt_fit import refuse_long
from grpo_lab.trainer.generation.rollout_ports import EngineHooks
from grpo_lab.trainer.ranks import TO_SEND, refuse_bad_weights
from grpo_lab.trainer.settings.limits import kept_by_engine
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import coarsest, replaced, without_critic

#: Number of syncs at the beginning of a run that are proven in any case.
FIRST_PROOFS = 2
#: Largest number of prompts in a probe.
PROBE_PROMPTS = 4
#: A run warns if it makes more steps than this without a proof.
MANY_STEPS = 100
#: TRL's metric: the mean difference, in nats, between the log-probs of engine and trainer.
LOGP_DIFFERENCE = "sampling/sampling_logp_difference/mean"
#: The next sync is proven if a logged difference exceeds this many tolerances.
GAP_FACTOR = 3.0
#: Largest number of proofs in a run that such differences cause.
DOUBTS = 3


def engine_class(settings: RolloutSettings, args: Any) -> Any:
    """Return a subclass of TRL's ``VLLMGeneration`` for a run with the configuration ``args``."""

    class LabVLLMGeneration(trl_vllm.VLLMGeneration):  # type: ignore[misc]
        """TRL's engine with our options, checks and syncs. In server mode ``server_return`` makes every exchange."""

        #: The trainer's hooks, set once the trainer is built (``hook_in``).
        hooks = EngineHooks()
        #: Writes versions of the LoRA adapter to files in shared memory; None unless the adapter is sent by itself.
        adapters: AdapterFiles | None = None
        kept = KeptSets(kept_by_engine(args))

        def _init_vllm(self) -> None:
            refuse_without_engine("`use_vllm`", kernels=self.mode != "server")
            if settings.sync == "adapter":
                self.adapters = AdapterFiles(self.model)
            elif hasattr(self.model, "peft_config"):
                refuse_untied(self.model)
            if self.mode == "server":
                self.server_return = server_across_ranks.ServerReturn(self, settings.server, args.ddp_timeout)
                server_across_ranks.connect(self, settings.server)
                return
            start_engine(self, super()._init_vllm, settings, args)

        def _iter_named_params(self) -> Any:
            """Yield name and value of the tensors that the engine should hold: those of the policy with LoRA merged, or
            of the base model if the adapter is sent by itself."""
            reshard(self.model)
            moved = 0
            with contextlib.nullcontext() if self.adapters is None else unmerged(self.model):
                for name, tensor in under_base_names(without_critic(super()._iter_named_params())):
                    moved += tensor.nbytes
                    yield name, tensor
            self.moved = moved  # bytes of the last complete pass

        def send(self) -> None:
            """Send the weights once; a lost server is an error."""
            send(self, super().sync_weights)

        def sync_weights(self) -> None:
            """Send the weights, to a server that comes back if one is lost, and clear a cache that may hold NaN."""
            if self.mode == "server":
                self.server_return.sync(self.send)
                return
            self.send()
            if self.llm.faulty and not self.enable_sleep_mode:  # one that sleeps gets a new cache
                clear_cache(worker_runner(self.llm))
            self.llm.faulty = False

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            """Generate as TRL does. Raise ``PromptTooLong`` for a prompt that fills the context."""
            prompts = args[0] if args else kwargs["prompts"]
            if self.mode == "server":
                stock = functools.partial(super().generate, *args, **kwargs)
                return self.server_return.generate(stock, self.send, prompts)
            refuse_long(prompts, self.context, 1, self.processing_class.decode)
            self.logprobs = self.kept.logprobs
            return self.kept.taken(super().generate(*args, **kwargs))  # GroupedEngine refuses NaN, or the guard does

    return LabVLLMGeneration


def hook_in(generation: Any, hooks: EngineHooks) -> None:
    """Give the engine (a ``LabVLLMGeneration``) the hooks of the trainer that was built around it."""
    generation.hooks = hooks
    if generation.mode != "server":
        generation.llm.on_fault = hooks.on_fault


def start_engine(generation: Any, stock: Callable[[], None], settings: RolloutSettings, args: Any) -> None:
    """Start vLLM in this process by TRL's ``_init_vllm`` (``stock``), with the options of ``rollout.engine``. Set
    ``context`` and ``page`` of ``generation``, in tokens."""
    # used if the options name no seed: the run's, or TRL's 0 in a drop-in run
    seed = 0
    if getattr(args, "objective", None) is not None:
        seed = int(args.seed)
    dtype = coarsest(generation.model)
    options = EngineOptions.from_mapping(settings.engine or {})
    lora = None
    if generation.adapters is not None:
        lora = generation.adapters.max_rank
    most = generation.kept.logprobs
    factory = engine_factory(options, trainer_dtype=dtype, run_seed=seed, max_lora_rank=lora, max_logprobs=most)
    with replaced(trl_vllm, "LLM", factory):
        stock()
    inside = generation.llm.llm_engine
    generation.context = int(inside.model_config.max_model_len)
    generation.page = int(inside.vllm_config.cache_config.block_size)


def send(generation: Any, stock: Callable[[], None]) -> None:
    """Send the weights or the adapter to the engine, and report the bytes to ``hooks.synced``. Every rank calls this.

    Args:
        generation: the engine, a ``LabVLLMGeneration``.
        stock: TRL's ``sync_weights``.

    Raises:
        NumbersError: the weights are not finite; nothing was sent.
        ServerGone: the server was lost. It is not waited for here (``ServerReturn``).
    """
    refuse_bad_weights(generation, TO_SEND)
    if generation.adapters is not None:
        generation.moved = send_adapter(generation, generation.adapters)
    elif generation.mode != "server" and needs_repair(generation.llm):
        push_weights(generation.llm, generation._iter_named_params())
    else:
        stock()
    generation.hooks.synced(generation.moved)


def send_adapter(generation: Any, files: AdapterFiles) -> int:
    """Send the next version of the LoRA adapter to the engine; return the number of bytes of its tensors. Every rank
    calls this, since shards are gathered. Each loads it into its own vLLM; to a server the main process sends it."""
    model = generation.model
    served = generation.mode == "server"
    reshard(model)
    tensors = adapter_tensors(without_critic(model.named_parameters()), files.adapter)
    if not served:
        load_adapter(generation.llm, files.write(model, tensors))
    elif generation.accelerator.is_main_process:
        generation.vllm_client.load_adapter(files.write(model, tensors))
    return sum(tensor.nbytes for tensor in tensors.values())


def reshard(model: torch.nn.Module) -> None:
    """Shard the parameters of FSDP2 modules again. TRL's ``full_tensor()`` works on sharded parameters only, and FSDP2
    leaves those of the root gathered after a forward without a backward, such as the proof's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def unmerged(model: Any) -> Iterator[None]:
    """Return a context in which TRL streams the weights of the base model, since no adapter is merged."""
    with replaced(model, "merge_adapter", lambda: None), replaced(model, "unmerge_adapter", lambda: None):
        yield


@contextlib.contextmanager
def awake(generation: Any) -> Iterator[None]:
    """Return a context in which an engine that TRL has put to sleep (`vllm_enable_sleep_mode`) is awake, with the
    trainer's weights: sleep drops them, so they are sent again. On exit the engine sleeps again. Every rank calls this.
    """
    if not (generation.enable_sleep_mode and generation._llm_weights_sleeping):
        yield
        return
    generation.sync_weights()  # wakes the weights up
    generation.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True


class SyncProof(TrainerCallback):  # type: ignore[misc]
    """Compares the engine's weights with the trainer's after the first syncs, then every ``verify_every`` steps, and if
    a log shows a difference in log-probs that rounding does not explain.

    Attributes:
        doubted: whether the next sync is to be proven in any case: the last probe had NaN in it, or a log shows such a
            difference.
    """

    def __init__(self, trainer: GRPOTrainer, settings: RolloutSettings) -> None:
        self.trainer = trainer
        self.settings = settings
        self._last = -1
        self._done = 0
        self._doubts = 0
        self._cached_prompt: list[int] = []  # in every probe, with an adapter: it would show pages kept over a sync
        self.doubted = False
        if trainer.use_vllm:
            trainer.add_callback(self)

    def is_due(self) -> bool:
        """Return whether the sync of the current step is to be proven."""
        step = self.trainer.state.global_step
        if self.settings.verify_every == 0 or step == self._last:
            return False
        return self.doubted or self._done < FIRST_PROOFS or step - self._last >= self.settings.verify_every

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which no proof is due."""
        return replaced(self, "is_due", lambda: False)

    def tolerance(self, *engine: torch.dtype) -> float:
        """Return the largest allowed gap, in nats per token: the setting ``rollout.tolerance``, or what rounding can
        explain in the dtypes of the ``engine`` and of the training."""
        trainer = self.trainer
        own = coarsest(trainer.accelerator.unwrap_model(trainer.model))
        if trainer.args.bf16:
            training = torch.bfloat16
        elif trainer.args.fp16:
            training = torch.float16
        else:
            training = own
        on_gpu = trainer.accelerator.device.type == "cuda"
        return self.settings.tolerance or tolerance_for(*engine, training, on_gpu=on_gpu)

    def prove(self, prompt_ids: list[list[int]], *, strict: bool = False) -> None:
        """Draw a probe from the engine, compare its log-probs with the trainer's, and log ``rollout/sync_gap``. Every
        rank calls this.

        Args:
            prompt_ids: prompts of this rank's current batch; up to ``PROBE_PROMPTS`` different ones are used.
            strict: whether a probe with NaN in it raises ``EngineFault`` even if a guard is in force. Otherwise the
                guard counts the batch as bad, and the next sync is proven instead.

        Raises:
            WeightSyncError: the engine holds other weights than the trainer.
            EngineFault: the probe has a log-prob that is not finite, and no guard is in force.
        """
        trainer = self.trainer
        accelerator = self.trainer.accelerator
        probe = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in prompt_ids)][:PROBE_PROMPTS]
        if trainer.vllm_generation.adapters is not None:
            engine = trainer.vllm_generation
            self._cached_prompt = self._cached_prompt or cached_prompt(probe[0], engine.page, engine.context)
            probe.append(self._cached_prompt)
        gap: SyncGap | None = None
        try:
            gap = self._gap(probe)
        except EngineFault as fault:
            on_fault = trainer.vllm_generation.hooks.on_fault
            if strict or on_fault is None:
                raise
            on_fault(fault)
        self.doubted = gap is None
        if accelerator.num_processes > 1:  # on any rank
            self.doubted = bool(accelerator.gather(torch.tensor([self.doubted], device=accelerator.device)).any())
        if gap is None or self.doubted:
            return
        self._last = trainer.state.global_step
        self._done += 1
        trainer.recorder.book("train").add_alike("rollout/sync_gap", torch.tensor([gap.mean]), 1)

    def _gap(self, probe: list[list[int]]) -> SyncGap:
        """Prove the sync with the prompts in ``probe`` and return the gap, with the model in evaluation mode; raise as
        ``prove`` does."""
        trainer = self.trainer
        generation = self.trainer.vllm_generation
        model = trainer.accelerator.unwrap_model(trainer.model)
        was_training = model.training
        model.eval()
        try:
            if generation.mode == "server":
                proof = functools.partial(
                    server_across_ranks.prove, generation, generation._iter_named_params, model, probe, self.tolerance
                )
                return generation.server_return.proof(proof, generation.send)  # type: ignore[no-any-return]
            limit = self.tolerance(generation.llm.llm_engine.model_config.dtype)
            bare = generation.llm.llm  # every rank comes to the end of the proof, also one with NaN in its answer
            named = generation._iter_named_params
            adapter = generation.llm.adapter
            with awake(generation):
                return prove_sync(bare, model, named, probe, tolerance=limit, lora_request=adapter)
        except EngineFault:
            if generation.mode != "server":
                generation.llm.faulty = True
            raise
        finally:
            model.train(was_training)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warn if syncs are proven never or rarely."""
        every = self.settings.verify_every
        if every == 0 or every > MANY_STEPS:
            if every == 0:
                when = "never"
            else:
                when = f"after the first {FIRST_PROOFS} syncs only every {every} steps"
            self._warn(
                f"the weights of the engine are compared with the trainer's {when} (`rollout.verify_every: {every}`): "
                f"in between, completions of stale weights would be trained on; up to {MANY_STEPS} is usual",
                "proof off",
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Warn, and have the next sync proven, if the logged difference in log-probs is more than rounding explains."""
        trainer = self.trainer
        if self.settings.earlier_policy:  # completions are an earlier policy's: the difference shows how far it is
            return
        gap = from_main(trainer.accelerator, (logs or {}).get(LOGP_DIFFERENCE))  # a proof takes every rank
        limit = GAP_FACTOR * self.tolerance()
        if gap is None or gap <= limit / min(trainer.temperature, 1.0):
            return
        proves = self.settings.verify_every > 0
        self.doubted = proves and self._doubts < DOUBTS
        self._doubts += 1
        last = "never" if self._done == 0 else f"at step {self._last}"
        self._warn(
            f"`{LOGP_DIFFERENCE}` is {gap:.3g} nats at step {state.global_step}, and rounding explains {limit:.3g}: "
            f"the engine may not hold the trainer's weights (proven last: {last}). "
            + ("The next sync is proven" if proves else "`rollout.verify_every` is 0, so nothing proves it: set it"),
            "logp difference",
        )

    def _warn(self, message: str, key: str) -> None:
        self.trainer.recorder.say(message, key=key, level=logging.WARNING)
