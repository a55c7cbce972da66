"""Two ranks; the second never comes back from the reward of step 2.

    accelerate launch --config_file … tests/distributed/late_worker.py MODEL OUT LIMIT

The first leaves ``error.json``: what it was told, and how long it had waited by then; both leave when they came to that
reward.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.trainer.ranks import RankLost
from parity.harness import arguments, problems


class Sleeper:
    """The number of tokens; on the second rank, the second time, for ever."""

    __name__ = "sleeper"

    def __init__(self, out: Path) -> None:
        self.out, self.calls = out, 0

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.calls += 1
        if self.calls == 2:
            (self.out / f"{os.environ['RANK']}.came").write_text(str(time.time()))
            if os.environ["RANK"] == "1":
                time.sleep(600)
        return [float(len(ids)) for ids in completion_ids]


def main(model: str, out: str, limit: str) -> None:
    folder = Path(out)
    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "ddp_timeout": int(limit),
    }
    trainer = LabTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=Sleeper(folder),
        args=LabConfig(**arguments(folder / "run", max_completion_length=8, **settings), objective="dr_grpo"),
        train_dataset=problems(16),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    try:
        trainer.train()
    except RankLost as error:
        waited = time.time() - float((folder / "0.came").read_text())
        (folder / "error.json").write_text(json.dumps({"said": str(error), "waited": waited}))
        raise


if __name__ == "__main__":
    as_rank(main)
