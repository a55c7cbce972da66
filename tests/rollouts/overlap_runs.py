"""Trainings with ``rollout: {overlap: 1}`` against the stand-in engine, and what is read from their rows.

Run as a script (alone, or by ``accelerate launch``): ``overlap_runs.py spec.json`` with ``{"model", "out", "steps",
"kill_at", "resume", "settings", "fault", "ends"}``; each rank appends to ``rank-<r>.jsonl`` what every optimizer step
trained on, and writes the error that ended the run to ``rank-<r>.end``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from forked import as_rank
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.weights.sync import WeightSyncError
from grpo_lab.trainer.row_table import Carried
from rollouts.server_runs import odd_share
from rollouts.stand_in import Engine, ends_at_random, stand_in

PROMPTS = 24


def build(
    folder: Path, model: Any, tokenizer: Any, rollout_func: Any = None, chat: bool = False, **changes: Any
) -> LabTrainer:
    """A generation batch is 2 prompts × 4 completions, and one optimizer step; SGD, so that a float64 loop is short."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "objective": "dr_grpo", "use_vllm": True, "vllm_mode": "server",
        "rollout": {"overlap": 1, "verify_every": 1}, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 6, "max_steps": 6, "learning_rate": 5.0, "optim": "sgd", "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    texts: list[Any] = [f"Tom has {n} apples. How many?" for n in range(PROMPTS)]
    prompts = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    rows = Dataset.from_dict({"prompt": prompts, "task": ["odd" if n % 3 else "third" for n in range(PROMPTS)]})
    return LabTrainer(
        model=model,
        reward_funcs=odd_share,
        args=LabConfig(**{**settings, **changes}),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)) if changes.get("eval_strategy") else None,
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )


class Rows(TrainerCallback):
    """What each optimizer step had: step, text of the prompts, versions, and the fields of its micro-batch."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer, self.steps = trainer, list[dict[str, Any]]()
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        of_step = trainer._buffered_inputs[(trainer._step - 1) % trainer.args.steps_per_generation]
        prompts = [
            trainer.processing_class.decode(ids[mask.bool()])
            for ids, mask in zip(of_step["prompt_ids"], of_step["prompt_mask"], strict=True)
        ]
        kept = {name: value.clone() for name, value in of_step.items() if isinstance(value, torch.Tensor)}
        versions = Carried(of_step).policy_version.tolist()
        self.steps.append({"step": state.global_step, "prompts": prompts, "versions": versions, "fields": kept})

    @property
    def versions(self) -> list[int]:
        """One a step: all rows of a step are of one version."""
        assert all(len(set(step["versions"])) == 1 for step in self.steps)
        return [step["versions"][0] for step in self.steps]


class Weights(Rows):
    """The policy before each step, too."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.policies = [*getattr(self, "policies", []), copied(self.trainer.model)]


def copied(model: Any) -> Any:
    """In float64; accelerate has tied the trainer's own ``forward`` to itself."""
    other = type(model)(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    return other


def column(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def rows_drawn(engine: Engine, fields: dict[str, torch.Tensor]) -> list[tuple[int, list[float]]]:
    """Of each row: how many syncs the engine had seen when it drew it, and the log-probs that it told."""
    found = []
    for prompt, seen, ids, mask in zip(
        *(fields[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True
    ):
        found.append(engine.drawn[(*prompt[seen.bool()].tolist(), -1, *ids[mask.bool()].tolist())])
    return found


def log_probs(model: Any, fields: dict[str, torch.Tensor]) -> torch.Tensor:
    """``[B, T]`` in float64, 0 where there is no token; row by row, without padding."""
    found = torch.zeros(fields["completion_ids"].shape, dtype=torch.float64)
    for row, (prompt, seen, ids, mask) in enumerate(
        zip(*(fields[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True)
    ):
        prompt, ids = prompt[seen.bool()], ids[mask.bool()]
        logits = model(torch.cat([prompt, ids]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        found[row, : len(ids)] = logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
    return found


def spec(folder: Path, model: Path, **more: Any) -> list[str]:
    """The words of this script for a run in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({"model": str(model), "out": str(folder), **more}))
    return [__file__, str(folder / "spec.json")]


def written(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank wrote of each step (`Written`)."""
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


class Written(TrainerCallback):
    """Each step's prompts into a file, and the end by SIGKILL while the next batch is in the engine."""

    def __init__(self, rows: Rows, file: Path, kill_at: int) -> None:
        self.rows, self.file, self.kill_at = rows, file, kill_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = self.rows.steps[-1]
        with self.file.open("a") as out:
            row = {name: last[name] for name in ("step", "prompts", "versions")}
            tokens = {name: last["fields"][name].tolist() for name in ("completion_ids", "sampling_per_token_logps")}
            out.write(json.dumps({**row, **tokens}) + "\n")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(file: str) -> None:
    told = json.loads(Path(file).read_text())
    out, model = Path(told["out"]), AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(told["model"])
    with stand_in(model) as engine:
        if told.get("ends"):
            engine.stop, engine.end = ends_at_random(told["ends"]), tokenizer.eos_token_id
        if told.get("fault"):
            engine.faults[told["fault"]] = WeightSyncError("planted")
        trainer = build(out, model, tokenizer, **told["settings"])
        rank = trainer.accelerator.process_index
        rows = Rows(trainer)
        trainer.add_callback(Written(rows, out / f"rank-{rank}.jsonl", told.get("kill_at", 0)))
        end = ""
        try:
            trainer.train(resume_from_checkpoint=told.get("resume", False))
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        weights = [float(p.detach().double().sum()) for p in trainer.model.parameters()]
        report = {"end": end, "world": trainer.accelerator.num_processes, "said": engine.said, "weights": weights}
        (out / f"rank-{rank}.end").write_text(json.dumps(report))
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
