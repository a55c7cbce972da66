"""One training with prioritised sampling and one resumed from its third checkpoint, in one process or more.

    accelerate launch --config_file … tests/distributed/sampler_worker.py spec.json

``spec.json``: ``{"model": folder, "out": folder, "args": {…}}``. Leaves ``report.json``: for every rank the prompts of
each generation batch and the sampler's fingerprint, of the whole run and of the resumed one. The completions, and so
the rewards, follow from the global row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from parity.harness import arguments, problems

RESUME_AT = 3


class Judge:
    """Right by the completion's tokens and the problem's number; problem i has about i % 5 fifths right."""

    measures_correctness = True
    __name__ = "judge"

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        self.seen.append(list(number))
        return [float((sum(ids) + n) % 5 < n % 5) for ids, n in zip(completion_ids, number, strict=True)]


def train(spec: dict[str, Any], resume: int = 0) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    rollout = ScriptedRollout(range(20, 90), (3, 5, 9), end_id=tokenizer.eos_token_id)
    rollout.calls = resume  # the script goes on where the checkpoint stands
    judge, out = Judge(), Path(spec["out"])
    trainer = LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        reward_funcs=judge,
        args=LabConfig(
            **arguments(
                out / ("resumed" if resume else "whole"),
                max_steps=9,
                save_strategy="steps",
                save_steps=1,
                **{"learning_rate": 0.01, **spec["args"]},
            ),
            sampler={"name": "prioritized", "decay": 0.6},
        ),
        train_dataset=problems(16),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train(resume_from_checkpoint=str(out / "whole" / f"checkpoint-{resume}") if resume else None)
    sampler = trainer.parts.prompts.sampler
    assert sampler is not None
    return {"ranks": gather_object([judge.seen]), "fingerprints": gather_object([sampler.fingerprint()])}


def main(file: str) -> None:
    spec = json.loads(Path(file).read_text())
    report = {"whole": train(spec), "resumed": train(spec, RESUME_AT)}
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(spec["out"]) / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    as_rank(main)
