"""Run the golden trainings and write down what they gave.

    python tests/golden/record.py [OUT.json]          all settings; those on several ranks are launched by accelerate
    python tests/golden/record.py OUT.json NAME …     some of them, on the ranks that this process was launched with

Each is run wholly in float64 (``in_double``), for numbers that hold on every CPU. Completions are scripted: nothing is
sampled.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from golden.in_double import everything_in_double
from golden.settings import SETTINGS, STEPS, Setting
from grpo_lab import LabConfig
from grpo_lab.testing import ScriptedRollout, tiny_model
from parity.harness import LENGTHS, arguments, problems
from parity.sampler import NoisySampler, as_with_vllm

HERE = Path(__file__).resolve().parent
RECORD = HERE / "trajectories.json"
PROJECTIONS = 4
#: logged, but of the clock and not of the training
CLOCK = ("runtime", "per_second", "step_time", "epoch", "flos")


def machine() -> dict[str, str]:
    """What bitwise equality needs to be the same."""
    packages = ("torch", "transformers", "trl", "accelerate", "peft")
    model = next((line for line in _cpu_info() if line.startswith("model name")), platform.processor())
    return {
        "cpu": f"{model.split(':')[-1].strip()} ({torch.backends.cpu.get_cpu_capability()})",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _cpu_info() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.is_file() else []


def model_in(folder: Path) -> Path:
    return folder / f"model-{os.environ.get('RANK', '0')}"


def save_model(folder: Path) -> None:
    """A real Qwen2 (18 thousand weights) with its tokenizer. Drawn in float64: normal draws in float32 differ between
    CPUs."""
    model, tokenizer = tiny_model("qwen2", hidden_size=16, num_layers=2, num_heads=2)
    model, draw = model.double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = 0.25 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def record(setting: Setting, folder: Path) -> dict[str, Any]:
    """Train one setting → its record (the same on every rank)."""
    tokenizer = AutoTokenizer.from_pretrained(model_in(folder))
    model = AutoModelForCausalLM.from_pretrained(model_in(folder), dtype=torch.float64)
    rollout = ScriptedRollout(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2)
    if setting.sampler:
        rollout.sampler_logps = NoisySampler(model)
    rows = {"per_device_train_batch_size": 4 // setting.processes, "ddp_find_unused_parameters": False}
    written = {"max_steps": STEPS, "gradient_checkpointing": False, "learning_rate": 0.2, **rows, **setting.settings}
    trainer = setting.trainer(
        model=model,
        reward_funcs=setting.rewards(),
        args=LabConfig(**arguments(folder / setting.name, **written)),
        train_dataset=problems(24),
        processing_class=tokenizer,
        rollout_func=rollout,
        peft_config=setting.peft,
    )
    if setting.sampler:
        as_with_vllm(trainer)
    start = whole(trainer)
    trainer.train()
    return {
        "steps": [_numbers(row) for row in trainer.state.log_history if "loss" in row],
        **_movement(start, whole(trainer)),
    }


def whole(trainer: Any) -> dict[str, Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row.items() if isinstance(v, (int, float)) and not any(word in k for word in CLOCK)}


def _movement(start: dict[str, Tensor], end: dict[str, Tensor]) -> dict[str, Any]:
    """How far the weights went, where to (projections on fixed random directions), and a checksum of the bits they
    ended at."""
    moved = torch.cat([(end[name].double() - start[name].double()).flatten() for name in sorted(end)])
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(PROJECTIONS, moved.numel(), generator=draw, dtype=torch.float64)
    digest = hashlib.sha256(b"".join(end[name].numpy().tobytes() for name in sorted(end)))
    return {"moved": moved.norm().item(), "towards": (directions @ moved).tolist(), "sha256": digest.hexdigest()}


def run_all(names: list[str], folder: Path) -> dict[str, Any]:
    """The named settings on the ranks at hand."""
    torch.set_num_threads(1)
    gc.freeze()
    warnings.simplefilter("ignore")
    save_model(model_in(folder))  # before ranks know of each other: then only the first one writes
    with everything_in_double():
        return {setting.name: record(setting, folder) for setting in SETTINGS if setting.name in names}


def run_in_world(processes: int, names: list[str], folder: Path) -> dict[str, Any]:
    """The named settings on several ranks, launched by accelerate."""
    from distributed.launch import RECIPES, accelerate_launch

    out = folder / f"{processes}.json"
    accelerate_launch(RECIPES / "ddp.yaml", processes, [str(HERE / "record.py"), str(out), *names])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main(words: list[str]) -> None:
    out, names = Path(words[0]) if words else RECORD, words[1:]
    with tempfile.TemporaryDirectory() as folder:
        if names:
            found = run_all(names, Path(folder))
            if os.environ.get("RANK", "0") == "0":
                out.write_text(json.dumps(found))
            return
        found = run_all([s.name for s in SETTINGS if s.processes == 1], Path(folder))
        for processes in sorted({s.processes for s in SETTINGS} - {1}):
            names = [s.name for s in SETTINGS if s.processes == processes]
            found |= run_in_world(processes, names, Path(folder))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(found[name])}" for name in found)
    out.write_text(f'{{"machine": {json.dumps(machine())},\n"settings": {{\n{lines}\n}}}}\n')
    print(f"{len(found)} trainings written to {out} ({out.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown
