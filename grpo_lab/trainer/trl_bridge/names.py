"""Names of TRL, and of transformers' Trainer below it, that this package overrides, calls and reads.

The tables are compared with TRL by ``tests/contract``. Also here: the releases of TRL that were tested, the context
``replaced`` by which this room replaces a function of TRL inside a block, and functions that tell whether a method was
written by a team (a user of the package).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

#: Minor releases, oldest first. docs/compatibility.md says what was run on each.
SUPPORTED_TRL: tuple[str, ...] = ("1.15", "1.16")


def refuse_untested(found: str) -> None:
    """Raise ImportError for a TRL release whose private methods were not compared with what this package relies on."""
    if ".".join(found.split(".")[:2]) not in SUPPORTED_TRL:
        listing = ", ".join(f"{minor}.*" for minor in SUPPORTED_TRL)
        newest = SUPPORTED_TRL[-1]
        raise ImportError(
            f"grpo_lab was tested with trl {listing} and found trl {found}: its trainer overrides private methods that "
            f"may have moved. Install one of those: pip install 'trl=={newest}.*'. What moved between {newest} and "
            f"another release: `python scripts/check_upstream.py {found}` in a checkout of grpo_lab"
        )


#: Inputs of a multimodal forward that are passed through to TRL as they are.
MULTIMODAL_FIELDS: tuple[str, ...] = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
#: Method of ``trl.GRPOTrainer`` that we override or call → its parameters as of 1.16.
METHODS: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_generate": ("self", "prompts"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("self", "model", "inputs"),
    "compute_loss": ("self", "model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        *("compute_aux_loss", *MULTIMODAL_FIELDS),
    ),
    "_tokenize_prompts": ("self", "prompts"),
    "_generate_single_turn": (
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images",
    ),
    "_tool_call_loop": (
        "self",
        "prompts",
        "prompt_ids",
        "completion_ids",
        "completions",
        "logprobs",
        "images",
        "multimodal_fields",
    ),
    "_get_train_sampler": ("self", "dataset"),
    "get_batch_samples": ("self", "epoch_iterator", "num_batches", "device"),
    "train": ("self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"),
    "_save_checkpoint": ("self", "model", "trial"),
    "_push_from_checkpoint": ("self", "checkpoint_folder"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_best_model": ("self",),
    "_init_training_state": (
        "self",
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_load_rng_state": ("self", "checkpoint"),
    "_finalize_training": ("self", "trial", "num_train_samples", "start_time"),
    "_evaluate": ("self", "trial", "ignore_keys_for_eval", "skip_scheduler"),
    "_determine_best_metric": ("self", "metrics", "trial"),
    "_save": ("self", "output_dir", "state_dict"),
    "create_optimizer": ("self", "model"),
    "_get_grad_norm": ("self", "model", "grad_norm"),
    "_get_output_dir": ("self", "trial"),
    "log": ("self", "logs", "start_time"),
    "create_model_card": ("self", "model_name", "dataset_name", "tags"),
}
#: Attributes that a constructed ``trl.GRPOTrainer`` has.
ATTRIBUTES: tuple[str, ...] = (
    "_metrics",
    "_name",
    "_paper",
    "_logs",
    "_step",
    "_buffered_inputs",
    "_current_train_step_time",
    "_pending_extra_logs",
    "_pending_metrics",
    "environments",
    "multi_objective_aggregation",
    "scale_rewards",
    "reward_func_names",
    "reward_funcs",
    "reward_weights",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "max_completion_length",
    "mask_truncated_completions",
    "aux_loss_enabled",
    "router_aux_loss_coef",
    "eos_token_ids",
    "_tokenizer",
    "_is_vlm",
    "tools",
    "max_tool_calling_iterations",
    "environment_factories",
    "ref_model",
    "beta",
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    "entropy_coef",
    "_last_world_entropy",
)
#: Attributes that are set while a training runs: by transformers' loop (the first three), by TRL with vLLM, by TRL's
#: SFT, and by TRL with tools.
WHILE_TRAINING: tuple[str, ...] = (
    "_tr_loss",
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "_last_loaded_step",
    "_total_train_tokens",
    "_sync_tool_dicts",
    "_async_tool_dicts",
    "_batch_environments",
    "_env_tools",
    "_environment_pool",
)
#: Tensors ``[B, T]`` of TRL's micro-batch that are aligned with the completion.
COMPLETION_FIELDS: tuple[str, ...] = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
)
#: Packages whose classes and functions are not a team's. Some hold the wrappers that decorators make.
LIBRARIES = ("grpo_lab", "trl", "transformers", "builtins", "contextlib", "functools", "torch")


class PlainNames:
    """Base class with public names for what TRL's trainer keeps under private ones. It stands before TRL's trainer
    among the bases of ours."""

    @property
    def last_logged_step(self: Any) -> int:
        """Optimizer step of the last log."""
        return int(self._globalstep_last_logged)

    @property
    def last_entropy(self: Any) -> float:
        """Mean entropy of the last optimizer step, nats per token; infinite before the first. TRL's checkpoint of
        ``use_adaptive_entropy`` holds it."""
        return float(self._last_world_entropy)

    @last_entropy.setter
    def last_entropy(self: Any, measured: float) -> None:
        self._last_world_entropy = measured

    @property
    def current_group_size(self: Any) -> int:
        """Number of completions per prompt, in the run's current mode."""
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    @property
    def text_tokenizer(self: Any) -> Any:
        """The tokenizer; of a processor of texts and images, the tokenizer in it."""
        return self._tokenizer

    @property
    def end_token_ids(self: Any) -> frozenset[int]:
        """Tokens that end a completion, the padding token among them."""
        return frozenset((*self.eos_token_ids, self._tokenizer.pad_token_id))

    @property
    def buffered_micro_batches(self: Any) -> list[dict[str, Any]]:
        """Micro-batches of the current generation batch, TRL's own dicts: a change of one is seen by the training."""
        return list(self._buffered_inputs or [])


def is_multimodal(inputs: dict[str, Any]) -> bool:
    """Return whether a micro-batch carries anything besides text."""
    return any(inputs.get(name) is not None for name in MULTIMODAL_FIELDS)


def may_bring_images(trainer: Any) -> bool:
    """Return whether any batch of the run may carry images. The answer is the same on every rank, also for a mixed data
    set, where a batch has images on some ranks only. Without a multimodal model, or for prompts of text only, without
    image columns, tools and environments, it is False."""
    if not trainer._is_vlm:
        return False
    columns = getattr(trainer.train_dataset, "features", None) or {}
    prompt = columns.get("prompt")
    message = getattr(prompt, "feature", prompt)  # a conversation is a list of messages
    if isinstance(message, dict):
        content = message.get("content")
    else:
        content = message
    is_text = getattr(content, "dtype", None) == "string"
    return bool(not is_text or {"image", "images"} & set(columns) or trainer.tools or trainer.environment_factories)


def prompt_tokens(trainer: Any, rows: list[dict[str, Any]]) -> list[list[int]]:
    """Return the token ids of the prompts in rows of the data set, as TRL's generation makes them. The prompts must
    have no images."""
    ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
    return [list(of_row) for of_row in ids]


def send_weights_again(trainer: Any) -> None:
    """Make the next generation send the weights to the engine, also if TRL has sent those of this step already."""
    trainer._last_loaded_step = -1


def has_micro_batches(trainer: Any) -> bool:
    """Return whether TRL's buffer holds the micro-batches of a generation batch."""
    return trainer._buffered_inputs is not None


@contextlib.contextmanager
def replaced(obj: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``obj.name`` to ``value`` inside the block, and restore it afterwards (also after an error)."""
    had = name in vars(obj)
    before = getattr(obj, name)
    setattr(obj, name, value)
    try:
        yield
    finally:
        if had:
            setattr(obj, name, before)
        else:
            delattr(obj, name)


@contextlib.contextmanager
def scored_through(trainer: Any, generate: Callable[..., Any], reward: Callable[..., Any]) -> Iterator[None]:
    """Wrap the trainer's ``_generate`` and ``_calculate_rewards`` by ``generate`` and ``reward`` inside the block. Each
    wrapper is called with the method that it wraps (a user's, if there is one) and with that method's arguments."""
    with (
        replaced(trainer, "_generate", functools.partial(generate, trainer._generate)),
        replaced(trainer, "_calculate_rewards", functools.partial(reward, trainer._calculate_rewards)),
    ):
        yield


def teams(trainer: Any, method: str) -> str | None:
    """Return ``Class.method`` if code of a team (a user) replaces or wraps ``method``; None if none does.

    ``trainer`` is a trainer or its class. A team's function counts wherever it is found: on the trainer itself, in a
    class of the team's anywhere among the bases, or set on a library's class.
    """
    if not isinstance(trainer, type):
        if not is_librarys(vars(trainer).get(method)):
            return f"trainer.{method}"
        trainer = type(trainer)
    homes = [kind for kind in trainer.__mro__ if method in vars(kind)]
    of_team = (kind for kind in homes if not (is_librarys(kind) and is_librarys(vars(kind)[method])))
    return next((f"{kind.__name__}.{method}" for kind in of_team), None)


def home_of(trainer: Any, method: str) -> str:
    """Return the name of the class that defines the ``method`` that ``trainer`` has."""
    return next(kind.__name__ for kind in type(trainer).__mro__ if method in vars(kind))


def hf_runs_the_step() -> bool:
    """Return whether HF's ``training_step``, which calls the backward, is among the running calls. It is not if a user
    overrides it without ``super()``."""
    from transformers import Trainer  # here, since scripts/check_upstream.py runs this file by itself

    code = inspect.unwrap(Trainer.training_step).__code__
    frame = inspect.currentframe()
    while isinstance(frame, FrameType) and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def is_librarys(code: Any) -> bool:
    """Return whether a function or class, and every function that it wraps, belong to `LIBRARIES`. A function's globals
    are asked for their module, since ``functools.wraps`` copies ``__module__`` from the wrapped function."""
    while code is not None:
        module = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", LIBRARIES[0])
        if str(module).split(".")[0] not in LIBRARIES:
            return False
        code = getattr(code, "__wrapped__", None) or getattr(code, "func", None)
    return True
