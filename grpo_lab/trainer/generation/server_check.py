"""Whether a server serves the model that the trainer trains: asked before anything is sent to it."""

from __future__ import annotations

import logging
from typing import Any

from grpo_lab.engines.vllm.worker import (
    PROBE_TEXT,
    describe_tokenizer,
    end_ids,
    mismatches,
    remarks,
    says,
    shape_mismatches,
)
from grpo_lab.engines.weights.weight_files import worker_reports
from grpo_lab.trainer.generation.server_client import LabVLLMClient

logger = logging.getLogger("grpo_lab")


def check_same_model(client: LabVLLMClient, model: Any, processing_class: Any) -> None:
    """Compare the server's model with the trainer's; chat templates are told apart by a warning.

    Our worker describes the server's model. Without it (``vllm serve`` by hand) the server is tried out: it must cut a text as the
    trainer's tokenizer does and end at the trainer's end-of-sequence ids; shapes are then not compared, and a warning says so.

    Raises:
        ValueError: other end-of-sequence ids, vocabulary, tokenization or parameter shapes; every difference is named.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    ends = end_ids(getattr(base.generation_config, "eos_token_id", None), tokenizer.eos_token_id)
    if not client.has_worker:
        _refuse(client, _tried_out(client, tokenizer, ends))
        logger.warning(
            f"the vLLM server at {client.base_url} runs without grpo_lab's worker: shapes of its parameters were not compared with "
            "the trainer's (`grpo-lab serve` starts one with it)"
        )
        return
    theirs = _described(client)
    ours = {**describe_tokenizer(tokenizer), "end_ids": ends}
    found = shape_mismatches(type(base), base.config, theirs["config"])
    _refuse(client, [*mismatches(ours, theirs), *found])
    for remark in remarks(ours, theirs):
        logger.warning(f"the vLLM server at {client.base_url}: {remark}")


def _refuse(client: LabVLLMClient, found: list[str]) -> None:
    if found:
        raise ValueError(says(client.base_url, found))


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
