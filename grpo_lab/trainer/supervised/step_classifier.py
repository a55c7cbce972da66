"""Train a process reward model: a classifier of tokens that says at the end of each step how good the solution is.

    L = −Σ_steps (y·log p + (1 − y)·log(1 − p)) / steps       p = p(good) at a step's last token, y its label in [0, 1]

Source: Math-Shepherd (arXiv 2312.08935), eq. 2; with y in {0, 1} it is the loss of TRL's former ``PRMTrainer``. Rows
are read by `TokenClassificationSteps`, the reward that the model serves in RL, so that both read a solution alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForTokenClassification, Trainer, TrainingArguments, set_seed

from grpo_lab.batch import padded
from grpo_lab.rewards.token_classification import TokenClassificationSteps

NO_LABEL = -100.0


@dataclass
class StepClassifierConfig(TrainingArguments):  # type: ignore[misc]
    """Settings of transformers' Trainer, and ``max_length``.

    Args:
        max_length: most tokens of a row; steps that do not fit are left out. None: the model's number of positions.
    """

    max_length: int | None = None


class StepClassifier(Trainer):  # type: ignore[misc]
    """Trainer of a process reward model on rows in TRL's stepwise form (``prompt``, ``completions``, ``labels``).

    Args:
        model: folder or hub name of a language model, which gets a new head of two labels: 1 is a good step.
        args: the settings; their seed also decides the head's first weights.
        train_dataset: the rows; each step has a label in [0, 1].
        processing_class: the model's tokenizer.
    """

    def __init__(
        self, model: str, args: StepClassifierConfig, train_dataset: Dataset, processing_class: Any, **more: Any
    ) -> None:
        set_seed(args.seed)  # for the new head's weights
        classifier = AutoModelForTokenClassification.from_pretrained(model, num_labels=2, dtype=torch.float32)
        reader = TokenClassificationSteps(classifier, processing_class, max_length=args.max_length)
        rows = [_labelled(reader, row) for row in train_dataset]
        pad = processing_class.pad_token_id or 0
        super().__init__(
            model=classifier,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=processing_class,
            data_collator=lambda batch: collate(batch, pad),
            compute_loss_func=step_loss,
            **more,
        )


def _labelled(reader: TokenClassificationSteps, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as ``input_ids`` and ``labels`` of its tokens: a step's last token has the step's label, other
    tokens `NO_LABEL`. Raises ValueError if the row does not have one label in [0, 1] for each step."""
    steps = row["completions"]
    labels = row["labels"]
    if len(labels) != len(steps) or not all(0 <= label <= 1 for label in labels):
        raise ValueError(f"a row has {len(steps)} steps and the labels {labels}; each step needs one in [0, 1]")
    ids, places = reader.read(row["prompt"], steps)
    found = [NO_LABEL] * len(ids)
    for place, label in zip(places, labels, strict=False):  # steps beyond `max_length` have no place
        found[place] = float(label)
    return {"input_ids": ids, "labels": found}


def collate(batch: Sequence[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """Pad rows on the right into ``input_ids``, ``attention_mask`` and ``labels``, each ``[rows, tokens]``."""
    ids, mask = padded([row["input_ids"] for row in batch], pad, torch.device("cpu"))
    labels = torch.full(ids.shape, NO_LABEL)
    for at, row in enumerate(batch):
        labels[at, : len(row["labels"])] = torch.tensor(row["labels"])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Compute the mean cross-entropy of the labelled tokens, in nats. ``labels``: ``[rows, tokens]``. With gradient
    accumulation the sum is divided by ``num_items_in_batch``, the number of labelled tokens in the optimizer step."""
    labelled = labels != NO_LABEL
    logs = outputs.logits[labelled].float().log_softmax(-1)
    good = labels[labelled]
    total = -(good * logs[:, 1] + (1 - good) * logs[:, 0]).sum()
    if num_items_in_batch is None:
        return total / labelled.sum().clamp(min=1)
    return total / num_items_in_batch
