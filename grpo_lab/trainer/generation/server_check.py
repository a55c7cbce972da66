"""Whether a server serves the model that the trainer trains: asked before anything is sent to it.

Weights can be sent; what they mean cannot. A server with another end-of-sequence id makes completions that never end,
and the proof of the sync is perfect; one with other shapes fails in the middle of loading. Prompts are sent as token
ids, so another chat template changes nothing that is sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from grpo_lab.engines.vllm.worker import (
    PROBE_TEXT,
    describe_tokenizer,
    end_ids,
    worker_reports,
)
from grpo_lab.trainer.generation.server_client import LabVLLMClient

logger = logging.getLogger("grpo_lab")


def check_same_model(client: LabVLLMClient, model: Any, processing_class: Any) -> None:
    """Compare the server's model with the trainer's; chat templates are told apart by a warning.

    Our worker describes the server's model. Without it (``vllm serve`` by hand) the server is tried out: it must cut a
    text as the trainer's tokenizer does and end at the trainer's end-of-sequence ids; shapes are then not compared, and
    a warning says so.

    Raises:
        ValueError: other end-of-sequence ids, vocabulary, tokenization or parameter shapes; every difference is named.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    ends = end_ids(getattr(base.generation_config, "eos_token_id", None), tokenizer.eos_token_id)
    if not client.has_worker:
        _refuse(client, _tried_out(client, tokenizer, ends))
        logger.warning(
            f"the vLLM server at {client.base_url} runs without grpo_lab's worker: shapes of its parameters were not "
            "compared with "
            "the trainer's (`grpo-lab serve` starts one with it)"
        )
        return
    theirs = _described(client)
    ours = {**describe_tokenizer(tokenizer), "end_ids": ends}
    found = shape_mismatches(type(base), base.config, theirs["config"])
    _refuse(client, [*mismatches(ours, theirs), *found])
    if theirs["chat_template"] != ours["chat_template"]:
        logger.warning(
            f"the vLLM server at {client.base_url}: its chat template is not the trainer's (the trainer's is in "
            "force: prompts are "
            "sent as token ids)"
        )


def _refuse(client: LabVLLMClient, found: list[str]) -> None:
    if found:
        raise ValueError(
            f"the vLLM server at {client.base_url} serves another model than the trainer trains: {'; '.join(found)}. "
            "Start it from "
            "the folder that training starts from: `grpo-lab serve --model FOLDER`"
        )


def _described(client: LabVLLMClient) -> dict[str, Any]:
    report = worker_reports(client.post, "grpo_lab_describe")[0]
    if "error" in report:
        raise ValueError(f"the vLLM server at {client.base_url} cannot describe its model: {report['error']}")
    return report


def _tried_out(client: LabVLLMClient, tokenizer: Any, ends: list[int]) -> list[str]:
    """What differs as far as completions and the tokenizer's endpoint show it."""
    found = []
    body = {"model": client.model, "prompt": PROBE_TEXT, "add_special_tokens": False}
    ours = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    if list(client.post("/tokenize", body)["tokens"]) != ours:
        found.append("its tokenizer cuts the same text into other tokens")
    missed = [token for token in ends if not _ends_at(client, token)]
    if missed:
        found.append(f"its completions do not end at the trainer's end-of-sequence ids {missed}")
    return found


def _ends_at(client: LabVLLMClient, token: int) -> bool:
    """Whether a completion ends at this token, by letting the server write nothing else."""
    body = {"model": client.model, "prompt": [[token]], "max_tokens": 2, "allowed_token_ids": [token]}
    return bool(client.post("/v1/completions", body)["choices"][0]["finish_reason"] == "stop")


def parameter_shapes(model_class: type[nn.Module], config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter that a model of this class and config has; no memory is used."""
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shape_mismatches(model_class: type[nn.Module], ours: Any, theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about parameters in which a model of our config and one of theirs differ; empty where all agree."""
    if theirs.get("model_type") != ours.model_type:
        return [f"its model is a {theirs.get('model_type')!r}, the trainer's a {ours.model_type!r}"]
    mine = parameter_shapes(model_class, ours)
    other = parameter_shapes(model_class, type(ours).from_dict(dict(theirs)))
    wrong = [
        f"{n}: {list(other[n])}, the trainer's {list(mine[n])}" for n in mine if n in other and mine[n] != other[n]
    ]
    wrong += [f"{n}: not there, the trainer's {list(mine[n])}" for n in mine if n not in other]
    wrong += [f"{n}: {list(other[n])}, the trainer has none" for n in other if n not in mine]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return [f"shapes of its parameters ({'; '.join(wrong[:4])}{more})"] if wrong else []


def mismatches(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about end-of-sequence ids and tokenizer; `ours`, `theirs`: `describe_tokenizer` and `end_ids`."""
    found = []
    if theirs["end_ids"] != ours["end_ids"]:
        found.append(
            f"its end-of-sequence ids are {theirs['end_ids']}, the trainer's {ours['end_ids']} "
            "(generation_config.json and "
            "tokenizer): completions would not end where the trainer takes them to end"
        )
    if theirs["vocabulary_size"] != ours["vocabulary_size"]:
        found.append(f"its vocabulary has {theirs['vocabulary_size']} tokens, the trainer's {ours['vocabulary_size']}")
    elif theirs["vocabulary"] != ours["vocabulary"]:
        found.append("its vocabulary has other tokens behind the same ids")
    elif theirs["encoding"] != ours["encoding"]:
        found.append("its tokenizer cuts the same text into other tokens")
    return found
