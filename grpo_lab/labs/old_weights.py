"""A sampler that is behind the policy: it holds weights of some generation batches before, and may round them.

    batch n of staleness k      is sampled by the policy as it was when batch n − k began (the first k by the start)
    rounded                     weights and logits of the sampler are bfloat16 numbers; all else stays as it is
    what the batch carries      the log-probs of its tokens under those weights, as an engine reports them

A recipe asks for it by its ``trainer``, `OldWeightsTrainer` or `RatioToSampler`, and by the callback `OldWeights`. The
callback keeps the weights; the trainer gives them to the model while it generates.

A checkpoint holds the kept weights, so that a resumed run samples from the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.io import write_whole
from grpo_lab.settings import Count, Positive
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.trainer.resume.state import SavedState
from grpo_lab.trainer.row_table import Carried

FILE = "old_weights_{}.safetensors"
"""File of a checkpoint with the weights that were kept as the n-th, the oldest first."""


class OldWeights(TrainerCallback):  # type: ignore[misc]
    """The weights that sample, as a callback of a recipe.

    Args:
        batches: staleness k, in generation batches.
        rounded: whether the sampler computes with weights and logits that are rounded to bfloat16.
        tokens: the training stops after the step in which this many tokens have been generated; None: no such limit.
    """

    holds = "the weights that the sampler of the court keeps"

    def __init__(self, batches: Count = 0, rounded: bool = False, tokens: Positive | None = None) -> None:
        self.batches = batches
        self.rounded = rounded
        self.tokens = tokens
        self._forget()

    def _forget(self) -> None:
        """Drop the kept weights and the count of tokens, as at the beginning of a training."""
        self.generated = 0
        self._kept = deque[dict[str, Tensor]](maxlen=self.batches + 1)
        self._step: int | None = None

    @property
    def differ(self) -> bool:
        """Return whether the sampler's weights differ from the policy's."""
        return self.batches > 0 or self.rounded

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the kept weights into a checkpoint's ``folder``, and return the entry of its state."""
        for place, weights in enumerate(self._kept):
            whole = {name: weight.contiguous() for name, weight in weights.items()}
            write_whole(folder / FILE.format(place), lambda partial, whole=whole: save_file(whole, partial))  # type: ignore[misc]
        return {"kept": len(self._kept), "step": self._step, "generated": self.generated}

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` wrote; None: a training begins, with nothing kept."""
        self._forget()
        if saved is None:
            return
        entry = saved.entry("old_weights", dict, "the sampler then begins with the policy's weights")
        if entry is not None:
            self._kept.extend(load_file(saved.checkpoint / FILE.format(place)) for place in range(entry["kept"]))
            self._step = entry["step"]
            self.generated = entry["generated"]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for the end of the training once enough tokens have been generated."""
        if self.tokens is not None and self.generated >= self.tokens:
            control.should_training_stop = True

    @contextmanager
    def in_place(self, model: Any, step: int) -> Iterator[None]:
        """Give ``model`` the sampler's weights inside the block, and the policy's own after it.

        The first call at a ``step`` of the policy also keeps a copy of the policy's weights, for later batches.
        """
        policy = {name: weight.data for name, weight in model.named_parameters()}
        if step != self._step:
            self._kept.append({name: weight.clone() for name, weight in policy.items()})
            self._step = step
        head = model.get_output_embeddings().register_forward_hook(self._rounded_logits)
        for name, weight in model.named_parameters():
            weight.data = self._as_sampled(self._kept[0][name])
        try:
            yield
        finally:
            head.remove()
            for name, weight in model.named_parameters():
                weight.data = policy[name]

    def _as_sampled(self, weight: Tensor) -> Tensor:
        if self.rounded:
            return weight.bfloat16().to(weight.dtype)
        return weight

    def _rounded_logits(self, _module: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        return self._as_sampled(logits)


class OldWeightsTrainer(LabTrainer):
    """Trainer whose completions are sampled with the weights of its callback `OldWeights`. If these are the policy's
    own and there is no ``correction``, it computes what `LabTrainer` does, to the bit."""

    samples_itself = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parts.stateful["old_weights"] = self._sampler

    @property
    def _sampler(self) -> OldWeights:
        return next(one for one in self.callback_handler.callbacks if isinstance(one, OldWeights))

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        """Generate with the sampler's weights, return their log-probs of the tokens, and count the tokens.

        This is `LabTrainer`'s generation in evaluations, and also in training if the sampler's weights are the policy's
        own and no correction reads the log-probs.
        """
        sampler = self._sampler
        training = self._mode() == "train"
        reports = sampler.differ or self.algorithm.correction is not None
        if not (training and reports):
            generated = super()._generate_single_turn(prompt_ids, *rest, **options)
        else:
            model = self.accelerator.unwrap_model(self.model)
            with sampler.in_place(model, self.state.global_step), torch.no_grad():
                completion_ids, _ = super()._generate_single_turn(prompt_ids, *rest, **options)
                generated = completion_ids, forward_logprobs(model, prompt_ids, completion_ids)
        if training:
            sampler.generated += sum(map(len, generated[0]))
        return generated


class RatioToSampler(OldWeightsTrainer):
    """`OldWeightsTrainer` whose importance ratio is π_θ/π_sampler, as papers define π_old, so that clips and trust
    regions are around the policy that sampled.

    In `OldWeightsTrainer` itself the ratio is to the policy before the batch's first update, and the ``correction``
    weighs the difference between that policy and the sampler.
    """

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Put the sampler's log-probs in place of the proximal ones."""
        batch = super()._generate_and_score_completions(inputs)
        carried = Carried(batch)
        if carried.behaviour_logps is not None:
            carried.proximal_logps = carried.behaviour_logps
            carried.as_generated = None
        return batch
