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
from typing import Any

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


def sizes(model: Any, half: bool = False) -> tuple[int, ...]:
    """Return h, L, V, k and a of the module's formulas, and the number of parameters of a layer and the embeddings.

    ``half``: under bf16 or fp16, so that activations have 2 bytes. The MLP's width is that of the experts that a token
    passes, where that is larger.
    """
    c = model.config.get_text_config()
    h = c.hidden_size
    layers = c.num_hidden_layers
    heads = c.num_attention_heads
    head = getattr(c, "head_dim", None) or h // heads
    k = head * (getattr(c, "num_key_value_heads", None) or heads)
    experts = getattr(c, "moe_intermediate_size", 0) * getattr(c, "num_experts_per_tok", 0)
    mlp = max(experts, getattr(c, "intermediate_size", None) or 4 * h)
    a = 28 * h + (2 if half else model.dtype.itemsize) * (8 * (head * heads + k) + 4 * mlp)
    tables = h * c.vocab_size * (1 if getattr(c, "tie_word_embeddings", True) else 2)
    return h, layers, c.vocab_size, k, a, tables + (model.num_parameters() - tables) // layers


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
    own = [p for p in model.parameters() if p.requires_grad and trained]
    n = sum(p.numel() for p in own)
    weights = sum(p.nbytes for p in own)
    base = sum(p.nbytes for p in model.parameters()) - weights
    if zero == 3 or kind == "FSDP":
        return (base + 16 * n) // ranks + (4 * sizes(model)[-1] if n else 0)
    if zero:
        return base + 4 * n + 12 * n // ranks
    copies = 0
    if half and n:
        copies = sum(2 * p.numel() for p in model.parameters() if p.itemsize == 4)
    return base + (5 if str(kind).startswith("MULTI_") else 4) * weights + copies


def activations(model: Any, tokens: int, checkpointing: bool, half: bool = False) -> int:
    """Return the bytes that the layers keep for the backward of one forward over ``tokens`` tokens. ``checkpointing``:
    with gradient checkpointing; ``half``: under bf16 or fp16."""
    h, layers, _, _, a, _ = sizes(model, half)
    return tokens * (4 * h * (layers + 1) + a if checkpointing else a * (layers + 1))


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

        Args:
            kind: the stage with its settings, or a command's recipe.
            launch: the stage's accelerate file.
            folder: the folder that the stage works in.
        """
        if not type(kind).__module__.startswith("grpo_lab."):
            return ""
        stage = kind.as_read() if hasattr(kind, "as_read") else kind
        s = flat(stage)
        said = read_yaml(launch) if launch else {}
        if s.get("model") is None or not (s["method"] or {"batch_size", "short_model"} & s.keys()):
            return ""
        section, model = self._model(s["model"])
        if s["method"] in ("rl", "reward") and not isinstance(model, str):  # loaded by TRL
            asked = str((s["model_init_kwargs"] or {}).get("dtype") or "float32")
            if asked != "auto":
                model = deepcopy(model).to(getattr(torch, asked))
        self.left[str(folder / getattr(kind, "leaves", {}).get("model", "."))] = section, model
        return "\n" + "; ".join([self._memory(s, section, model, said), *self._tokens(s, section, said)])

    def in_all(self) -> str:
        """Return a line on all stages so far: the most memory of a process, and the number of tokens."""
        known = []
        if self.most:
            known = [f"{self.most / 2**30:.1f} GiB a process"]
        known += [f"{count:,} tokens {what}" for what, count in self.tokens.items() if count]
        more = []
        if self.open:
            more = ["more where a line says that something is not known"]
        return "; ".join(([f"at most {', '.join(known)}"] if known else []) + more)

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

    def _memory(self, s: Mapping[str, Any], section: ModelSection, model: Any, launch: Mapping[str, Any]) -> str:
        """Return a clause on the memory of a process: the total, and its parts in GiB. ``s``: the stage's settings, as
        ``flat`` returns them; ``launch``: the content of its accelerate file."""
        beside = {name: (s[name], False) for name in ("teacher", "short_model", "against") if s.get(name)}
        for one in s.get("rewards", ()):
            path = one.arguments.get("model") or ("/" in one.name and ":" not in one.name and one.name)
            trained = "every" in one.arguments
            beside |= {f"{one.name}{' in training' if trained else ''}": (path, trained)} if path else {}
        models = {name: self._model(path)[1] for name, (path, _) in beside.items()}
        if missing := [one for one in (model, *models.values()) if isinstance(one, str)]:
            self.open = True
            return f"memory is not known: {missing[0]}"
        parts = {name: states(one, launch, beside[name][1]) for name, one in models.items()}
        h, layers, vocabulary, k, a, _ = sizes(model)
        method = s["method"]
        rows = s.get("batch_size", 0)
        width = model.dtype.itemsize
        length = s.get("max_new_tokens") or s.get("max_completion_length") or 0
        prompt = 0
        if method in (None, "rl", "distill"):
            prompt = self._prompts(s.get("data"), section)[1]
        if method is None:
            parts["weights"] = states(model, launch, trained=False)
            writing = rows * (12 * vocabulary + prompt * a + (prompt + length) * 2 * width * layers * k)
            parts |= {} if s.get("use_vllm") else {"writing": writing}
        else:
            rows = s["per_device_train_batch_size"] * (2 if COLUMNS.get(method) == PAIR else 1)
            if method not in ("rl", "distill"):
                length = s["max_length"] or 0
            if section.lora is None and (method == "dpo" or (method == "rl" and s["beta"])):
                parts["reference"] = states(model, launch, trained=False)
            tokens = rows * (prompt + length)
            half = s["bf16"] is not False or bool(s["fp16"])
            parts["trained"] = states(model, launch, half=half)
            named = s.get("activation_checkpointing")  # transformers' name from 5.23 on; it takes precedence
            again = s["gradient_checkpointing"] if named is None else named
            parts["activations"] = activations(model, tokens, again, half)
            parts["LM head"] = 40 * vocabulary * tokens if method == "distill" else 4 * vocabulary * h
        self.most = max(self.most, sum(parts.values()))
        each = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in parts.items())
        engine = ""
        if s.get("use_vllm"):
            engine = ", besides what vLLM takes"
        count = model.num_parameters()
        total = sum(parts.values()) / 2**30
        unknown = ""
        if method in (None, "rl", "distill") and not prompt and length:
            unknown = " and the prompt"
        at_once = "rows of any length"
        if length:
            at_once = f"{rows} × {prompt + length:,} tokens{unknown}"
        if method == "rl" and isinstance(s["update"], Mapping) and s["update"].get("max_tokens") == "auto":
            at_once += " or, on a GPU, as many as what is left holds (`update.max_tokens: auto`)"
        return f"at most {total:.1f} GiB a process{engine}: {count:,} parameters, {at_once} at once ({each})"

    def _tokens(self, s: Mapping[str, Any], section: ModelSection, launch: Mapping[str, Any]) -> list[str]:
        """Return clauses on the most tokens that are generated, also for held-out rows, and trained on: each is rows ×
        times × tokens."""
        held_out = s.get("evaluation")
        rounds = getattr(s.get("rounds"), "count", 1)
        jobs = list[Any]()
        length = s.get("max_new_tokens") or s.get("max_completion_length")
        if "section" in s:
            jobs.append(("generated", s["data"], _answers(s["section"]) * (2 if s["against"] else 1), length))
        elif "n_samples" in s:
            jobs.append(("generated", s.get("data"), s["n_samples"] * rounds, length))
        if guess := getattr(s.get("filters"), "guessable", None):
            jobs.append(("generated", s["data"], guess.tries, guess.max_new_tokens))
        if held_out is not None:
            steps = s.get("max_steps", 0)
            every = held_out.every
            each = held_out.max_new_tokens or length
            if every and steps < 1:  # without the number of steps, how often is not known
                each = None
            times = held_out.before + rounds + (steps // every if every else 0)
            jobs.append(("generated", held_out.data, _answers(held_out) * times, each))
        if s["method"] is not None:
            jobs.append(_of_training(s, length, launch.get("num_processes", 1)))
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
    if not known:
        return len(rows), 0
    return len(rows), longest_prompt(rows["prompt"], known[0])


def _answers(section: EvaluationSection) -> int:
    """Return how many completions an evaluation makes for each row, in all of its conditions."""
    return len(conditions_in(section)) * (1 + section.n_samples)


def _of_training(s: Mapping[str, Any], length: int | None, ranks: int) -> tuple[str, Any, int, int | None]:
    """Return what a training does with tokens ("generated" or "trained on"), its rows, how often it takes each, and the
    most tokens each time (None: not known).

    The rows are a section, None if their number is not known, or 1 if the number of times already counts all of them.
    ``length``: most tokens of a completion; ``ranks``: number of processes.
    """
    method = s["method"]
    steps = s["max_steps"]
    times = ceil(s["num_train_epochs"])
    together = s["per_device_train_batch_size"] * ranks
    accumulated = s["gradient_accumulation_steps"]
    if steps > 0:
        rows: Any = 1
        times = steps * together * accumulated
    else:
        rows = None if {"rows", "n_samples"} & s.keys() else s["data"]
    if method == "rl":
        update = s["update"]
        batch = s["generation_batch_size"] or together * (s["steps_per_generation"] or accumulated)
        if steps > 0:
            times = ceil(times / batch / s["num_iterations"]) * batch
        else:
            times *= s["num_generations"]
        again = isinstance(update, Mapping) and update.get("dead_groups") == "resample" and update.get("max_rounds", 4)
        return "generated", rows, times * (again or 1), length
    if method == "distill" and s["tokens"] is not None:  # it ends with the first log after so many tokens
        return "generated", 1, 1, s["tokens"] + together * accumulated * ceil(s["logging_steps"]) * (length or 0)
    if method == "distill":
        return "generated", rows, times, length
    return "trained on", rows, times * (2 if COLUMNS[method] == PAIR else 1), s["max_length"]
