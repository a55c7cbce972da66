"""A rank of a training that sends LoRA's adapter alone to a server; run by ``accelerate launch``: ``adapter_ranks.py
MODEL URL FOLDER``. Each rank writes ``rank-<r>.json`` into the folder: its model's class and what it logged."""

from __future__ import annotations

import json
from pathlib import Path

from peft import LoraConfig

from forked import as_rank
from rollouts.server_runs import build


def main(model: str, url: str, out: str) -> None:
    folder = Path(out)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    rollout = {"sync": "adapter", "verify_every": 1}
    trainer = build(folder, model, url, peft_config=lora, rollout=rollout, max_steps=3)
    trainer.train()
    wrapped, history = type(trainer.model_wrapped).__name__, trainer.state.log_history
    report = json.dumps({"wrapped": wrapped, "history": history})
    (folder / f"rank-{trainer.accelerator.process_index}.json").write_text(report)
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
