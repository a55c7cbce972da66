"""Supervised and preference training by TRL's trainers: on rows (SFT, the cold start), on pairs (DPO, SimPO, reward
models), or by a teacher. The losses are TRL's, unchanged. Labelled steps have a trainer of ours (`step_classifier`).
`train_by` is the way in; `trl_of` says which trainer belongs to which method.

    DPO     −log σ(r̂(y⁺) − r̂(y⁻))       r̂ = β log π(y|x)/π₀(y|x)       arXiv 2305.18290, eq. 7
    SimPO   −log σ(r̂(y⁺) − r̂(y⁻) − γ)   r̂ = β log π(y|x)/|y|           arXiv 2405.14734, eq. 6

r̂ is the implicit reward of an answer y to a prompt x, π₀ the reference model. SimPO needs no reference model. It
divides by the answer's length |y|, so a long answer is not penalised for its length, only for being the rejected one.
TRL's CPO trainer adds a likelihood term by default (`cpo_alpha` 1); here it is off unless it is set, as in SimPO's
paper. TRL's `simpo_gamma` is γ itself (TRL divides it by β before it multiplies by β).

DPO and SimPO log ``rewards/weight``: the mean over pairs of w(θ) = σ(r̂(y⁻) − r̂(y⁺)), for SimPO with γ added inside of σ
(section 2.3). It says how strongly a pair pulls, as the weight in DPO's gradient, ∇L = −β E[w (∇log π(y⁺) − ∇log
π(y⁻))]. w is near 1 for a pair that the model's implicit reward orders wrongly, ½ for one that it does not order, and
near 0 for one that is learned.

Under FSDP and ZeRO each process holds a part of the model, so all processes take part in saving it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DistillationConfig, DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig

from grpo_lab.data.fusion import CONTINUES
from grpo_lab.engines.generators import in_form_of, render_pair, render_pairs
from grpo_lab.settings import refuse_unknown, typed
from grpo_lab.trainer.metrics.trackers import tracked
from grpo_lab.trainer.ranks import TRAINED, refuse_bad_weights
from grpo_lab.trainer.settings.limits import EARLIER, check_choices
from grpo_lab.trainer.supervised.distillation import Distillation
from grpo_lab.trainer.supervised.packed_sft import PackedSFTTrainer
from grpo_lab.trainer.supervised.step_classifier import StepClassifier, StepClassifierConfig
from grpo_lab.trainer.trl_bridge.forwards import scored_alone

logger = logging.getLogger("grpo_lab")

PAIR = ("prompt", "chosen", "rejected")
COLUMNS = {
    "sft": ("prompt", "completion"),
    "distill": ("prompt",),
    "steps": ("prompt", "completions", "labels"),
    **dict.fromkeys(("dpo", "simpo", "reward"), PAIR),
}
FIXED: dict[str, dict[str, Any]] = {
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "remove_unused_columns": False},
    "reward": {"max_length": None},  # else TRL leaves out longer pairs silently
}
"""Method → settings of its configuration that are set here if the recipe does not set them."""
OF_LOADING = ("model_init_kwargs", "trust_remote_code")
"""Settings for loading a model. Only ``reward`` reads them, whose trainer loads its model itself."""
UNREAD = {
    "output_dir": "the model is saved in the folder of its stage, or of its run",
    "resume_from_checkpoint": "the same command goes on by itself",
    **dict.fromkeys(OF_LOADING, "TRL is given a model that is loaded, as it was saved"),
}
"""Setting of a configuration that the training does not read → why."""
WEIGHT = "rewards/weight"
"""Metric of DPO and SimPO: the mean weight of a pair, w(θ) in (0, 1)."""


def train_by(
    method: str,
    model: Any,
    tokenizer: Any,
    rows: Dataset,
    output_dir: Path,
    arguments: Mapping[str, Any],
    callbacks: list[Any] | None = None,
    train: Callable[[Any], None] | None = None,
    where: str = "training",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tracked_in: Path | None = None,
    **parts: Any,
) -> None:
    """Train ``model`` and save it to ``output_dir`` (all processes take part).

    Args:
        method: one of `COLUMNS`; the loss of ``sft`` is on the completion only.
        model: a language model; for ``reward`` and ``steps`` its folder or hub name, which gets a head, seeded by the
            run.
        rows: data set with the method's columns, all text or all messages. Other columns are ignored, except
            ``continues`` for ``sft``: true if the completion continues the assistant's message that ends the prompt.
            Otherwise that message is closed and another begun, as TRL's trainers do.
        arguments: fields of the method's configuration.
        train: function of the trainer that trains it; None: its own ``train()``.
        where: name of the settings in error messages.
        chat_template_kwargs: arguments of the chat template for every row of messages.
        tracked_in: folder that remembers the run of trackers such as W&B; None: ``output_dir``.
        parts: further arguments of the trainer: DPO's ``ref_model`` (default: the model as it begins), a distillation's
            ``teacher_model``.

    Raises:
        ValueError: if a column is missing or a setting is unknown.
        NumbersError: if the trained model is not finite; nothing is written then.
    """
    config, trainer_class = trl_of(method)
    columns = list(COLUMNS[method])
    if missing := [name for name in columns if name not in rows.column_names]:
        raise ValueError(f"rows have no column {missing[0]!r}; they have {rows.column_names}")
    settings = {**FIXED.get(method, {}), **check_training(method, arguments, where)}
    args = config(**{"output_dir": str(output_dir), "report_to": "none", "save_strategy": "no", **settings})
    if method == "sft" and not args.assistant_only_loss:
        _warn_of_tools(rows, where)
    how = {"tokenizer": tokenizer, "kwargs": dict(chat_template_kwargs or {})}
    if method == "sft" and _tokenized_here(args, rows):
        args.completion_only_loss = args.completion_only_loss is not False
        of_labels = {"whole": not args.completion_only_loss}
        rows = rows.map(_tokens, batched=True, fn_kwargs=how | of_labels, remove_columns=rows.column_names)
    elif method == "simpo" and any(_is_assistants(prompt) for prompt in rows["prompt"]):
        rows = rows.map(_pair_as_text, fn_kwargs=how, remove_columns=rows.column_names)
    else:
        rows = rows.select_columns(columns)
        if chat_template_kwargs and not isinstance(rows[0]["prompt"], str):  # TRL reads this column
            rows = rows.add_column("chat_template_kwargs", [dict(chat_template_kwargs)] * len(rows))
    parts |= {"train_dataset": rows, "processing_class": tokenizer, "callbacks": callbacks}
    trainer = trainer_class(model=model, args=args, **parts)
    with scored_alone(), tracked(trainer, tracked_in or output_dir):
        trainer.train() if train is None else train(trainer)
    refuse_bad_weights(trainer, TRAINED)
    trainer.save_model(str(output_dir))


def _is_assistants(prompt: Any) -> bool:
    """Return whether a prompt of messages ends with one of the assistant."""
    return not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"


def _warn_of_tools(rows: Dataset, where: str) -> None:
    """Warn if completions hold messages of tools: without ``assistant_only_loss`` the loss is on them, too."""
    conversations = [one for one in rows["completion"] if not isinstance(one, str)]
    if any(message["role"] == "tool" for messages in conversations for message in messages):
        logger.warning(
            "completions hold answers of tools, and the model is trained to write them: set "
            f"`{where}.assistant_only_loss: true` to train on the assistant's messages alone"
        )


def _tokenized_here(args: Any, rows: Dataset) -> bool:
    """Return whether SFT rows are tokenized here (`_tokens`) and not by TRL: they are messages, rendered by the
    tokenizer's own chat template, and the loss needs no mask that the template makes."""
    of_messages = len(rows) > 0 and not isinstance(rows[0]["prompt"], str)
    return of_messages and args.chat_template_path is None and not args.assistant_only_loss


def _tokens(
    batch: Mapping[str, list[Any]], tokenizer: Any, kwargs: Mapping[str, Any], whole: bool
) -> dict[str, list[list[int]]]:
    """Tokenize a batch of rows of messages as TRL would, and return ``input_ids`` and ``labels``. A completion
    continues its prompt's last message if its row says so (`CONTINUES`). ``whole``: the loss is on prompts, too.
    Otherwise labels begin where the ids of prompt and completion first differ from those of the prompt alone; -100
    stands before."""
    continues = batch.get(CONTINUES) or [False] * len(batch["prompt"])
    pairs = render_pairs(zip(batch["prompt"], batch["completion"], continues, strict=True), tokenizer, kwargs)
    found: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for asked, row in pairs:
        begins = 0
        if not whole:
            begins = _alike(asked.ids, row.ids)
        if not whole and begins < len(asked.ids):
            _warn_of_split(tokenizer.decode(asked.ids[begins:]))
        found["input_ids"].append(row.ids)
        found["labels"].append([-100] * begins + row.ids[begins:])
    return found


def _alike(ids: list[int], others: list[int]) -> int:
    """Return the length of the longest common beginning of two lists of ids."""
    if others[: len(ids)] == ids:
        return len(ids)
    differ = (place for place, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)
    return next(differ, min(len(ids), len(others)))


@functools.cache
def _warn_of_split(end: str) -> None:
    """Warn, once for each text, that the tokens of a prompt's ``end`` change when its completion follows."""
    logger.warning(
        "the tokens of a prompt alone are not the beginning of those with its completion: %r is left out of what the "
        "model is asked in training, and it will see it when it generates. Use a chat template that renders both alike",
        end,
    )


def _pair_as_text(row: Mapping[str, Any], tokenizer: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Render the messages of a pair by the chat template, into the texts ``prompt``, ``chosen`` and ``rejected``.
    Needed for SimPO if a prompt ends with an assistant's message: TRL's CPO would leave that message open, and count
    the tokens that close it as part of the answers."""
    found: dict[str, str] = {}
    for name in ("chosen", "rejected"):
        asked, whole = render_pair(row["prompt"], row[name], tokenizer, kwargs)
        found |= {"prompt": asked.text, name: whole.text.removeprefix(asked.text)}
    return found


def cold_start(model: Any, tokenizer: Any, rows: Dataset, output_dir: Path, *how: Any, **more: Any) -> None:
    """Train SFT by `train_by` on ``prompt`` → ``worked_solution``."""
    pairs = Dataset.from_list(worked_pairs(rows))
    train_by("sft", model, tokenizer, pairs, output_dir, *how, where="cold_start", **more)


def worked_pairs(rows: Dataset) -> list[dict[str, Any]]:
    """Return rows for SFT from problems. Raise ``ValueError`` if they have no ``worked_solution``."""
    check_rows(rows)
    return [{"prompt": row["prompt"], "completion": in_form_of(row["prompt"], row["worked_solution"])} for row in rows]


def check_rows(rows: Dataset, where: str = "cold_start.data") -> None:
    """Raise ``ValueError`` if rows have no ``worked_solution``."""
    if "worked_solution" not in rows.column_names:
        raise ValueError(f"`{where}` has no column 'worked_solution'; it has {rows.column_names}")


def check_training(method: str, arguments: Mapping[str, Any], where: str = "training") -> dict[str, Any]:
    """Return ``arguments`` converted to the types that the configuration of ``method`` declares.

    Raises ValueError, with ``where`` as the name of the settings, for a setting that is unknown or has no effect, and
    for a value that is impossible.
    """
    config = trl_of(method)[0]
    refuse_unknown(arguments, config.__dataclass_fields__, f"`{where}`", EARLIER)
    found: dict[str, Any] = typed(arguments, config, where)
    check_choices(found, where)
    for name, why in UNREAD.items():
        loaded_by_trl = method == "reward" and name in OF_LOADING
        if name in found and not loaded_by_trl:
            raise ValueError(f"`{where}.{name}` has no effect: {why}; leave it out")
    if found.get("eval_strategy", "no") != "no":
        raise ValueError(
            f"`{where}.eval_strategy` is {found['eval_strategy']!r}, and this training has no rows to evaluate on; "
            "leave it out"
        )
    if method == "simpo" and found.get("loss_type", "simpo") != "simpo":
        raise ValueError(f"`{where}.loss_type` is {found['loss_type']!r}; `method: simpo` means 'simpo'")
    if method == "distill" and not 0 <= found.get("beta", 1) <= 1:
        raise ValueError(f"`{where}.beta` is {found['beta']}; it is a number from 0, KL(teacher ‖ student), to 1")
    return found


@functools.cache
def trl_of(method: str) -> tuple[Any, Any]:
    """Return the configuration class and the trainer class of a method; SFT's for a name that is not in `COLUMNS`."""
    if method == "simpo":
        return weighted_cpo()
    return {
        "dpo": (DPOConfig, WeightedDPOTrainer),
        "reward": (RewardConfig, RewardTrainer),
        "steps": (StepClassifierConfig, StepClassifier),
        "distill": (DistillationConfig, Distillation),
    }.get(method, (SFTConfig, PackedSFTTrainer))


def implicit_weight(chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0) -> torch.Tensor:
    """Return the weight of each pair ``[pairs]``, w = σ(r̂(y⁻) − r̂(y⁺) + margin) in (0, 1), from the implicit rewards
    r̂ ``[pairs]`` of the chosen and the rejected answers. ``margin`` is SimPO's γ."""
    return torch.sigmoid(rejected - chosen + margin)


class WeightedDPOTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer, which also logs the mean weight of a pair (`WEIGHT`).

    TRL keeps only means of the rewards, and σ of a mean is not the mean of σ. So the log-probs are captured from the
    models' outputs by hooks. Nothing is logged where the implicit reward is not β log π/π₀: with another f-divergence
    than the reverse KL, or with ``ld_alpha``.
    """

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        seen: list[torch.Tensor] = []

        def note(_module: Any, _inputs: Any, out: Any) -> None:
            if (found := getattr(out, "log_probs", None)) is not None:
                seen.append(found.detach())

        models = [one for one in (self.model, self.ref_model) if one is not None]
        hooks = [self.accelerator.unwrap_model(one).register_forward_hook(note) for one in models]
        mode = "train" if self.model.training else "eval"
        try:
            loss = super()._compute_loss(model, inputs, return_outputs)
        finally:
            for hook in hooks:
                hook.remove()
        if self.f_divergence_type == "reverse_kl" and self.ld_alpha is None:
            length = inputs["completion_mask"].shape[1] - 1
            # TRL's batch has the chosen answers in its first half, the rejected ones in its second
            policy, *others = (one[:, -length:].sum(dim=1).chunk(2) for one in seen[:2])
            if self.precompute_ref_logps:
                reference: Any = inputs["ref_chosen_logps"], inputs["ref_rejected_logps"]
            else:
                reference = others[0]
            rewards = [self.beta * (own - other) for own, other in zip(policy, reference, strict=True)]
            weights = self.accelerator.gather(implicit_weight(*rewards))
            self._metrics[mode][WEIGHT].append(weights.mean().item())
        return loss


def weighted_cpo() -> tuple[Any, Any]:
    """Return the configuration class and the trainer class of SimPO. TRL's CPO, which is experimental, is imported only
    here."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    class WeightedCPOTrainer(CPOTrainer):  # type: ignore[misc]
        """TRL's CPOTrainer, which also logs the mean weight of a pair (`WEIGHT`), if the implicit reward is β times the
        log-prob (``alpha`` 0, so not in AlphaPO). γ counts for the loss ``simpo`` alone, as in TRL."""

        def cpo_loss(self, policy_chosen_logps: torch.Tensor, policy_rejected_logps: torch.Tensor) -> Any:
            found = super().cpo_loss(policy_chosen_logps, policy_rejected_logps)
            if self.alpha == 0.0:
                margin = 0.0
                if self.loss_type == "simpo":
                    margin = float(self.simpo_gamma)
                weights = self.accelerator.gather_for_metrics(implicit_weight(found[1], found[2], margin))
                self.store_metrics({WEIGHT: weights.mean().item()}, "train" if self.model.training else "eval")
            return found

    return CPOConfig, WeightedCPOTrainer
