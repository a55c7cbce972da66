"""Estimates before a stage runs: the memory of a process, and the most tokens that it generates or trains on.

In bytes (arXiv 1910.02054, scripts/memory_table.py), for N parameters (tied ones once) of w bytes on R processes, and L
layers of width h, whose query heads are q wide, key heads k, and MLPs I, with fused attention and a vocabulary V:

    trained      4wN: weights, gradients, AdamW's moments (any optimizer counts as it); + 2N: bf16 copies of float32
                 weights; + wN: DDP's buckets. ZeRO-1, 2: 4N + 12N/R. ZeRO-3, FSDP: 16N/R + 4 bytes for each parameter
                 of a layer and the embeddings. LoRA: this for the adapter; its base counts as a frozen model
    frozen       wN, under ZeRO-3 and FSDP wN/R: the reference (β > 0, DPO), a teacher, a reward model, a second model
    activations  for each token a(L + 1), with gradient checkpointing 4h(L + 1) + a; a = 28h + 8w(q + k) + 4wI, where w
                 is 2 under bf16. The LM head takes 4Vh, that of `distill` 40V for each token
    generating   wN, and without vLLM 12V for each row, a for each token of a prompt, 2wLk for each token of a row

Not counted: what an allocator wastes, the device's context, a colocated engine, a critic, rewards that are no models.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_lab import LabConfig
from grpo_lab.io import looks_local
from grpo_lab.recipe.checks import longest_prompt
from grpo_lab.recipe.data import rows_here
from grpo_lab.recipe.models import tokenizer_and_config
from grpo_lab.recipe.policy import meta_model
from grpo_lab.recipe.sections import DataSection, EvaluationSection, ModelSection
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import typed
from grpo_lab.stages.held_out import conditions_in
from grpo_lab.trainer.supervised.methods import COLUMNS, FIXED, PAIR, trl_of

Settings = Mapping[str, Any]
"""All settings of a stage by name, as ``flat`` returns them."""
GENERATES = (None, "rl", "distill")
"""Methods (``flat``) whose stage generates completions of its rows' prompts; None: it samples or evaluates."""


class Sizes(NamedTuple):
    """Sizes of a model, with their letters in the formulas of this module."""

    hidden: int  # h
    layers: int  # L
    vocabulary: int  # V
    keys: int  # k, width of all key heads of a layer
    activations: int  # a, bytes that a layer keeps for each token
    gathered: int  # parameters of a layer and of the embeddings


def sizes(model: Any, half: bool = False) -> Sizes:
    """Return the sizes of a model. ``half``: under bf16 or fp16, so that activations have 2 bytes. The width of an MLP
    of experts is that of the experts which a token passes."""
    config = model.config.get_text_config()
    hidden = config.hidden_size
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or hidden // heads
    keys = head * (getattr(config, "num_key_value_heads", None) or heads)
    experts = getattr(config, "moe_intermediate_size", 0) * getattr(config, "num_experts_per_tok", 0)
    mlp = max(experts, getattr(config, "intermediate_size", None) or 4 * hidden)
    width = 2 if half else model.dtype.itemsize
    kept = 28 * hidden + width * (8 * (head * heads + keys) + 4 * mlp)
    embeddings = hidden * config.vocab_size * (1 if getattr(config, "tie_word_embeddings", True) else 2)
    layer = (model.num_parameters() - embeddings) // config.num_hidden_layers
    return Sizes(hidden, config.num_hidden_layers, config.vocab_size, keys, kept, embeddings + layer)


def states(model: Any, launch: Mapping[str, Any], trained: bool = True, half: bool = False) -> int:
    """Return the bytes that a process needs for a model's weights and, if ``trained``, for its gradients and moments.

    ``launch``: the content of an accelerate file; ``half``: under bf16 or fp16. Only parameters that require a gradient
    are trained.
    """
    kind = launch.get("distributed_type")
    ranks = launch.get("num_processes", 1)
    zero = 0
    if kind == "DEEPSPEED":
        zero = (launch.get("deepspeed_config") or {}).get("zero_stage", 2)
    learning = [p for p in model.parameters() if p.requires_grad and trained]
    count = sum(p.numel() for p in learning)
    weights = sum(p.nbytes for p in learning)
    frozen = sum(p.nbytes for p in model.parameters()) - weights
    if zero == 3 or kind == "FSDP":
        gathered = 4 * sizes(model).gathered if count else 0
        return (frozen + 16 * count) // ranks + gathered
    if zero:
        return frozen + 4 * count + 12 * count // ranks
    copies = 0
    if half and count:
        copies = sum(2 * p.numel() for p in model.parameters() if p.itemsize == 4)
    times = 5 if str(kind).startswith("MULTI_") else 4
    return frozen + times * weights + copies


def activations(model: Any, tokens: int, checkpointing: bool, half: bool = False) -> int:
    """Return the bytes that the layers keep for the backward of one forward over ``tokens`` tokens. ``checkpointing``:
    with gradient checkpointing; ``half``: under bf16 or fp16."""
    size = sizes(model, half)
    if checkpointing:
        return tokens * (4 * size.hidden * (size.layers + 1) + size.activations)
    return tokens * size.activations * (size.layers + 1)


def flat(stage: Any) -> dict[str, Any]:
    """Return all settings of a stage, or of a command's recipe, in one mapping: its own, those of its sampling or
    evaluation section, and those of its training, which are filled up with the defaults of TRL's configuration.

    ``method`` among them says what is trained: `rl`, or a supervised method such as `sft`; None: nothing is.
    """
    found = dict(vars(stage))
    for name in ("sampling", "section"):
        found |= vars(found[name]) if name in found else {}
    given = found.get("arguments", found.get("training"))
    if "rewards" in found:
        method = "rl"
    elif "teacher" in found:
        method = "distill"
    else:
        method = getattr(stage, "method", "sft")
    if given is None or method == "merge" or found.get("data", 0) is None:
        return {**found, "method": None}
    if method not in ("rl", *COLUMNS):
        method = "sft"
    config = LabConfig if method == "rl" else trl_of(method)[0]
    kl = given.get("kl")
    defaults = {one.name: one.default for one in fields(config)} | FIXED.get(method, {})
    beta = {}
    if isinstance(kl, Mapping) and kl.get("coefficient") is not None:
        beta = {"beta": kl["coefficient"]}
    return {**found, **defaults, **typed(given, config), **beta, "method": method}


class Estimates:
    """Estimates of stages, one after another: the model that a stage leaves is known to later ones.

    Attributes:
        left: place of a model that an estimated stage leaves → its section, and the model without weights (or, in
            words, why it is not known).
        rows: rows and model → number of rows, and tokens of their longest prompt.
        most: largest memory of a process in any stage so far, in bytes.
        tokens: most tokens of all stages so far, generated and trained on.
        open: whether something could not be estimated.
    """

    def __init__(self) -> None:
        self.left: dict[str, tuple[ModelSection, Any]] = {}
        self.rows: dict[str, tuple[int | None, int]] = {}
        self.most = 0
        self.tokens = {"generated": 0, "trained on": 0}
        self.open = False

    def of(self, kind: Any, launch: str | None = None, folder: Path = Path()) -> str:
        """Return a line, after a newline, on the memory and the tokens that a stage takes; empty if it uses no model,
        or is of a team's kind.

        ``kind``: the stage with its settings, or a command's recipe; ``launch``: its accelerate file; ``folder``: the
        folder that it works in.
        """
        if not type(kind).__module__.startswith("grpo_lab."):
            return ""
        settings = flat(kind.as_read() if hasattr(kind, "as_read") else kind)
        launched = read_yaml(launch) if launch else {}
        computes = settings["method"] is not None or {"batch_size", "short_model"} & settings.keys()
        if settings.get("model") is None or not computes:
            return ""
        section, model = self._model(settings["model"])
        if settings["method"] in ("rl", "reward") and not isinstance(model, str):  # loaded by TRL
            dtype = str((settings["model_init_kwargs"] or {}).get("dtype") or "float32")
            if dtype != "auto":
                model = deepcopy(model).to(getattr(torch, dtype))
        self.left[str(folder / getattr(kind, "leaves", {}).get("model", "."))] = section, model
        memory = self._memory(settings, section, model, launched)
        return "\n" + "; ".join([memory, *self._tokens(settings, section, launched)])

    def in_all(self) -> str:
        """Return a line on all stages so far: the most memory of a process, and the number of tokens."""
        known = []
        if self.most:
            known.append(f"{self.most / 2**30:.1f} GiB a process")
        known += [f"{count:,} tokens {what}" for what, count in self.tokens.items() if count]
        clauses = []
        if known:
            clauses.append(f"at most {', '.join(known)}")
        if self.open:
            clauses.append("more where a line says that something is not known")
        return "; ".join(clauses)

    def _model(self, named: Any) -> tuple[ModelSection, Any]:
        """Return the section of a model, named by a section or a path, and the model without weights, or a text that
        says why it is not known. An earlier stage may leave it."""
        if isinstance(named, ModelSection):
            section = named
        else:
            section = ModelSection(path=str(named))
        return self.left.get(str(section.path)) or (section, meta_model(section))

    def _prompts(self, data: Any, section: ModelSection) -> tuple[int | None, int]:
        """Return the number of rows and the tokens of their longest prompt; None and 0 where they are not known, since
        the rows, or the model's tokenizer, are not on this machine."""
        if not isinstance(data, DataSection):
            return None, 0
        key = f"{data} {section.path}"
        if key not in self.rows:
            self.rows[key] = _rows_and_longest(data, section)
        return self.rows[key]

    def _memory(self, settings: Settings, section: ModelSection, model: Any, launch: Mapping[str, Any]) -> str:
        """Return a clause on the memory of a process: the total, and its parts in GiB. ``launch``: the content of the
        accelerate file."""
        others = models_beside(settings)
        loaded = {name: self._model(path)[1] for name, (path, _) in others.items()}
        unknown = [one for one in (model, *loaded.values()) if isinstance(one, str)]
        if unknown:
            self.open = True
            return f"memory is not known: {unknown[0]}"
        method = settings["method"]
        prompt = 0
        if method in GENERATES:
            prompt = self._prompts(settings.get("data"), section)[1]
        rows, length = _at_once(settings)
        parts = {name: states(one, launch, others[name][1]) for name, one in loaded.items()}
        if method is None:
            parts |= _when_generating(settings, model, launch, prompt)
        else:
            parts |= _when_training(settings, model, launch, rows * (prompt + length), section.lora is not None)
        total = sum(parts.values())
        self.most = max(self.most, total)
        engine = ""
        if settings.get("use_vllm"):
            engine = ", besides what vLLM takes"
        at_once = "rows of any length"
        if length:
            more = " and the prompt" if method in GENERATES and not prompt else ""
            at_once = f"{rows} × {prompt + length:,} tokens{more}"
        update = settings.get("update")
        if method == "rl" and isinstance(update, Mapping) and update.get("max_tokens") == "auto":
            at_once += " or, on a GPU, as many as what is left holds (`update.max_tokens: auto`)"
        head = f"at most {total / 2**30:.1f} GiB a process{engine}: {model.num_parameters():,} parameters"
        each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
        return f"{head}, {at_once} at once ({each})"

    def _tokens(self, settings: Settings, section: ModelSection, launch: Mapping[str, Any]) -> list[str]:
        """Return clauses on the most tokens that are generated, also for held-out rows, and trained on: each is rows ×
        times × tokens."""
        held_out = settings.get("evaluation")
        rounds = getattr(settings.get("rounds"), "count", 1)
        length = settings.get("max_new_tokens") or settings.get("max_completion_length")
        jobs = list[Any]()
        if "section" in settings:
            models = 2 if settings["against"] else 1
            jobs.append(("generated", settings["data"], _answers(settings["section"]) * models, length))
        elif "n_samples" in settings:
            jobs.append(("generated", settings.get("data"), settings["n_samples"] * rounds, length))
        guess = getattr(settings.get("filters"), "guessable", None)
        if guess is not None:
            jobs.append(("generated", settings["data"], guess.tries, guess.max_new_tokens))
        if held_out is not None:
            steps = settings.get("max_steps", 0)
            every = held_out.every
            each = held_out.max_new_tokens or length
            if every and steps < 1:  # without the number of steps, how often is not known
                each = None
            times = held_out.before + rounds + (steps // every if every else 0)
            jobs.append(("generated", held_out.data, _answers(held_out) * times, each))
        if settings["method"] is not None:
            jobs.append(_of_training(settings, length, launch.get("num_processes", 1)))
        words = []
        for what, data, times, each in jobs:
            count = data if isinstance(data, int) else self._prompts(data, section)[0]
            if count is None or each is None:
                self.open = True
                some = "any number of" if each is None else f"{times * each:,}"
                words.append(f"at most {some} tokens {what} for each row (how many: not known yet)")
            else:
                self.tokens[what] += count * times * each
                words.append(f"at most {count * times * each:,} tokens {what}")
        return words


def _rows_and_longest(data: DataSection, section: ModelSection) -> tuple[int | None, int]:
    """Return what ``Estimates._prompts`` does, by loading the rows."""
    source = str(data.arguments.get("source", ""))
    if looks_local(source) and not Path(source).exists():
        return None, 0
    rows = rows_here(data, "data")
    if rows is None:
        return None, 0
    known = tokenizer_and_config(section, here_only=True)
    longest = longest_prompt(rows["prompt"], known[0]) if known else 0
    return len(rows), longest


def _answers(section: EvaluationSection) -> int:
    """Return how many completions an evaluation makes for each row, in all of its conditions."""
    return len(conditions_in(section)) * (1 + section.n_samples)


def models_beside(settings: Settings) -> dict[str, tuple[str, bool]]:
    """Return the models that a stage holds beside its own: name → path, and whether it is trained, as a reward model
    may be. A reward's model is its argument ``model``, or its name if that is a path."""
    found = {name: (settings[name], False) for name in ("teacher", "short_model", "against") if settings.get(name)}
    for reward in settings.get("rewards", ()):
        is_path = "/" in reward.name and ":" not in reward.name
        path = reward.arguments.get("model") or (reward.name if is_path else None)
        trained = "every" in reward.arguments
        if path:
            found[f"{reward.name}{' in training' if trained else ''}"] = (path, trained)
    return found


def _at_once(settings: Settings) -> tuple[int, int]:
    """Return how many rows are computed at once, and the most tokens of each (0: not known). Where completions are
    generated, their prompts are not among these tokens."""
    method = settings["method"]
    rows = settings.get("batch_size", 0)
    if method is not None:
        rows = settings["per_device_train_batch_size"] * _rows_of_a_row(method)
    length = settings.get("max_new_tokens") or settings.get("max_completion_length")
    if method not in GENERATES:
        length = settings["max_length"]
    return rows, length or 0


def _rows_of_a_row(method: str) -> int:
    """Return how many rows the model reads for each row of the data: two for a pair of answers."""
    return 2 if COLUMNS.get(method) == PAIR else 1


def _when_generating(settings: Settings, model: Any, launch: Mapping[str, Any], prompt: int) -> dict[str, int]:
    """Return the bytes of a stage that trains nothing: its weights and, without vLLM, what its rows take in writing
    (logits, cache, and the activations of their prompts). ``prompt``: tokens of the longest prompt."""
    parts = {"weights": states(model, launch, trained=False)}
    if not settings.get("use_vllm"):
        size = sizes(model)
        rows, length = _at_once(settings)
        cache = (prompt + length) * 2 * model.dtype.itemsize * size.layers * size.keys
        parts["writing"] = rows * (12 * size.vocabulary + prompt * size.activations + cache)
    return parts


def _when_training(
    settings: Settings, model: Any, launch: Mapping[str, Any], tokens: int, has_adapter: bool
) -> dict[str, int]:
    """Return the bytes of a training: the reference, the states of the trained model, activations and LM head of one
    micro-batch of ``tokens`` tokens. A model with an adapter is its own reference."""
    method = settings["method"]
    parts = {}
    if not has_adapter and (method == "dpo" or (method == "rl" and settings["beta"])):
        parts["reference"] = states(model, launch, trained=False)
    half = settings["bf16"] is not False or bool(settings["fp16"])
    parts["trained"] = states(model, launch, half=half)
    checkpointing = settings.get("activation_checkpointing")  # transformers' name from 5.23 on; it takes precedence
    if checkpointing is None:
        checkpointing = settings["gradient_checkpointing"]
    parts["activations"] = activations(model, tokens, checkpointing, half)
    size = sizes(model)
    parts["LM head"] = 40 * size.vocabulary * tokens if method == "distill" else 4 * size.vocabulary * size.hidden
    return parts


def _of_training(settings: Settings, length: int | None, ranks: int) -> tuple[str, Any, int, int | None]:
    """Return what a training does with tokens ("generated" or "trained on"), its rows, how often it takes each, and the
    most tokens each time (None: not known).

    The rows are a section, None if their number is not known, or 1 if the times are already those of all rows.
    ``length``: most tokens of a completion; ``ranks``: number of processes.
    """
    method = settings["method"]
    steps = settings["max_steps"]
    together = settings["per_device_train_batch_size"] * ranks
    accumulated = settings["gradient_accumulation_steps"]
    if steps > 0:
        rows: Any = 1
        times = steps * together * accumulated
    else:
        rows = None if {"rows", "n_samples"} & settings.keys() else settings["data"]
        times = ceil(settings["num_train_epochs"])
    if method == "rl":
        batch = settings["generation_batch_size"] or together * (settings["steps_per_generation"] or accumulated)
        if steps > 0:
            times = ceil(times / batch / settings["num_iterations"]) * batch
        else:
            times *= settings["num_generations"]
        update = settings["update"]
        if isinstance(update, Mapping) and update.get("dead_groups") == "resample":
            times *= update.get("max_rounds", 4) or 1
        return "generated", rows, times, length
    if method == "distill" and settings["tokens"] is not None:  # it ends with the first log after so many tokens
        until_the_log = together * accumulated * ceil(settings["logging_steps"])
        return "generated", 1, 1, settings["tokens"] + until_the_log * (length or 0)
    if method == "distill":
        return "generated", rows, times, length
    return "trained on", rows, times * _rows_of_a_row(method), settings["max_length"]
