"""``scripts/grpo_flat.py`` and ``LabTrainer`` on the same completions: the same losses and the same weights.

Two implementations that share no line: the flat script pads on the right, scores all logits and computes every row; the
library leaves dead rows out, cuts bins and takes TRL's LM head.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.testing import ScriptedRollout
from parity.harness import LENGTHS, Run, arguments, mixed_reward, movement_difference, train

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "grpo_flat.py"
LR, GROUP, ROWS, BUDGET = 0.2, 4, 12, 32


def load() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_flat", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_flat"] = module
    spec.loader.exec_module(module)
    return module


flat = load()


class Kept(ScriptedRollout):
    """Remembers what it handed out, as the flat script wants it."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = super().__call__(prompts, trainer)
        self.__dict__.setdefault("batches", []).append((found["prompt_ids"], found["completion_ids"]))
        return found


class KeptReward:
    def __init__(self) -> None:
        self.inner, self.values = mixed_reward(), list[list[float]]()
        self.__name__ = "parity_reward"

    def __call__(self, **inputs: Any) -> list[float]:
        self.values.append(self.inner(**inputs))
        return self.values[-1]


METHODS = ("grpo", "dr_grpo")


@pytest.mark.thorough(but=["*-none-*", "*-k3-*-2"])
@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(
    ("kl", "kl_in"),
    [("none", "loss"), ("k1", "loss"), ("k2", "loss"), ("k3", "loss"), ("k1", "reward"), ("k3", "reward")],
)
@pytest.mark.parametrize("method", METHODS)
def test_same_losses_and_weights(
    method: str, kl: str, kl_in: str, updates: int, tiny_folder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    rollout = Kept(range(20, 90), LENGTHS, end_id=tokenizer.eos_token_id, truncated_share=0.2)
    reward = KeptReward()
    term = None if kl == "none" else {"estimator": kl, "placement": kl_in, "coefficient": 0.1}
    steps = 2 * updates
    lab = train(
        LabTrainer,
        LabConfig(
            **arguments(tmp_path, learning_rate=LR, max_steps=steps, num_iterations=updates), objective=method, kl=term
        ),
        tiny_folder,
        rollout=rollout,
        reward=reward,
    )
    settings = flat.Settings(
        method=method,
        kl=kl,
        kl_in=kl_in,
        beta=0.1,
        group=GROUP,
        tokens=BUDGET,
        rows_at_once=5,
        clip_norm=0.0,
        updates=updates,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    reference = None if kl == "none" else AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for (prompts, answers), rewards in zip(rollout.batches, reward.values, strict=True):
        assert len(answers) == ROWS
        batch = flat.prepare(model, reference, prompts, answers, rewards, settings)
        losses += [flat.update(model, optimizer, batch, settings) for _ in range(updates)]
    ours = Run(losses, [], {k: v.detach() for k, v in model.state_dict().items()}, lab.start, [], None)
    # float32: terms of size ≤ 2 (advantages, ratios), log-probs of size ≤ 8 rounded at 6e-8 relative: 1e-6 in a mean of
    # either
    assert losses == pytest.approx(lab.losses, rel=1e-5, abs=4e-6)
    assert movement_difference(ours, lab) < 2e-4, "relative to the movement; where signs cancel, its terms are larger"
    moved = sum((lab.weights[name] - value).square().sum().item() for name, value in lab.start.items()) ** 0.5
    assert moved > 1e-2, "hardly trained: nothing was compared"


def test_a_wrong_sign_is_seen(tiny_folder: Path) -> None:
    new, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.8]])
    mask, advantage, settings = torch.ones(1, 2, dtype=torch.bool), torch.tensor([0.7]), flat.Settings(method="grpo")
    # ratios e^0.5 = 1.6487 (clipped to 1.2) and e^-0.2 = 0.81873: −0.7·(1.2 + 0.81873)/2 = −0.706556
    assert flat.loss_of(new, old, None, advantage, mask, 1, settings).item() == pytest.approx(-0.706556, abs=1e-6)


def test_the_script_trains_on_real_rows(tiny_folder: Path, tmp_path: Path, grpo_lab_data: Path) -> None:
    rows = (grpo_lab_data / "gsm8k" / "train.jsonl").read_text().splitlines()[:8]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert {"question", "answer"} <= set(json.loads(rows[0]))
    told: list[str] = []
    words = [
        "--model", str(tiny_folder), "--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out"),
        "--steps", "2", "--questions", "2", "--group", "2", "--tokens", "8", "--kl", "k3", "--updates", "2",
    ]  # fmt: skip
    flat.train(flat.read(words), told.append)
    assert len(told) == 2
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_flat_means_flat() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 250
    assert "import grpo_lab" not in text
    assert "from grpo_lab" not in text
    assert "trl" not in text
