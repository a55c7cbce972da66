"""Check that a vLLM server serves the model that the trainer trains, before anything is sent.

If the server's end-of-sequence ids are others, completions never end, although the proof of the sync passes. If shapes
of parameters are others, loading the weights fails.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from grpo_lab.engines.vllm.worker import PROBE_TEXT, describe_tokenizer, end_ids, worker_reports
from grpo_lab.trainer.generation.server_client import LabVLLMClient

logger = logging.getLogger("grpo_lab")


def check_same_model(client: LabVLLMClient, model: Any, processing_class: Any) -> None:
    """Compare end-of-sequence ids, vocabulary, tokenization and parameter shapes of server and trainer.

    Our worker extension describes the server's model. Without it (``vllm serve`` by hand) the server is tested with
    requests; shapes are then not compared, and a warning says so. A different chat template gets only a warning, since
    prompts are sent as token ids.

    Args:
        client: client of the server.
        model: the trainer's model.
        processing_class: the trainer's tokenizer or processor.

    Raises:
        ValueError: something differs; the message names every difference.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    ours = describe_tokenizer(tokenizer)
    ends = end_ids(getattr(base.generation_config, "eos_token_id", None), tokenizer.eos_token_id)
    if client.has_worker:
        theirs = worker_reports(client.post, "grpo_lab_describe")[0]
        differences = {  # of the tokenizer, the first that differs
            "vocabulary_size": f"its vocabulary has {theirs['vocabulary_size']} tokens, not {ours['vocabulary_size']}",
            "vocabulary": "its vocabulary has other tokens behind the same ids",
            "encoding": "its tokenizer cuts the same text into other tokens",
        }
        found = [sentence for key, sentence in differences.items() if theirs[key] != ours[key]][:1]
        if theirs["end_ids"] != ends:
            found.append(
                f"its end-of-sequence ids are {theirs['end_ids']}, the trainer's {ends} (generation_config.json and "
                "tokenizer): completions would not end where the trainer takes them to end"
            )
        found += shape_mismatches(type(base), base.config, theirs["config"])
        alike = theirs["chat_template"] == ours["chat_template"]
        warning = "its chat template is not the trainer's (the trainer's is in force: prompts are sent as token ids)"
    else:
        found = _tried_out(client, tokenizer, ends)
        alike = False
        warning = (
            "it runs without grpo_lab's worker: shapes of its parameters were not compared with the trainer's "
            "(`grpo-lab serve` starts one with it)"
        )
    if found:
        raise ValueError(
            f"the vLLM server at {client.base_url} serves another model than the trainer trains: {'; '.join(found)}. "
            "Start it from the folder that training starts from: `grpo-lab serve --model FOLDER`"
        )
    if not alike:
        logger.warning(f"the vLLM server at {client.base_url}: {warning}")


def shape_mismatches(model_class: type[nn.Module], ours: Any, theirs: Mapping[str, Any]) -> list[str]:
    """Return sentences that name the parameters whose shapes differ between models of the two configurations, ``ours``
    and the server's. The models are built on the meta device, without memory."""
    if theirs.get("model_type") != ours.model_type:
        return [f"its model is a {theirs.get('model_type')!r}, the trainer's a {ours.model_type!r}"]
    with torch.device("meta"):
        models = model_class(ours), model_class(type(ours).from_dict(dict(theirs)))
    mine, other = ({name: list(one.shape) for name, one in model.named_parameters()} for model in models)
    names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    wrong = [f"{name}: {other.get(name, 'not there')}, the trainer's {mine.get(name, 'not there')}" for name in names]
    if not wrong:
        return []
    more = ""
    if len(wrong) > 4:
        more = f" and {len(wrong) - 4} more"
    return [f"shapes of its parameters ({'; '.join(wrong[:4])}{more})"]


def _tried_out(client: LabVLLMClient, tokenizer: Any, ends: list[int]) -> list[str]:
    """Return, as sentences, differences that requests to a server without our worker extension show: in how it
    tokenizes a text, and whether completions end at the trainer's end-of-sequence ids ``ends``."""
    found = []
    missed = []
    body = {"model": client.model, "prompt": PROBE_TEXT, "add_special_tokens": False}
    ours = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    if list(client.post("/tokenize", body)["tokens"]) != ours:
        found.append("its tokenizer cuts the same text into other tokens")
    for token in ends:  # the request allows the server no other token
        body = {"model": client.model, "prompt": [[token]], "max_tokens": 2, "allowed_token_ids": [token]}
        if client.post("/v1/completions", body)["choices"][0]["finish_reason"] != "stop":
            missed.append(token)
    if missed:
        found.append(f"its completions do not end at the trainer's end-of-sequence ids {missed}")
    return found
