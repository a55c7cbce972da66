"""A team's own surrogate: subclass LabTrainer, train two steps on a CPU. Run: python docs/examples/team_surrogate.py"""

import sys
import tempfile

import torch

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.data import word_problems
from grpo_lab.testing import tiny_model


def soft_clip(batch):
    """−Â·tanh(ρ − 1): bounded as PPO's clip is, without its corner; on-policy the same gradient."""
    return -batch.advantages * torch.tanh(batch.ratio - 1)


class SoftClipTrainer(LabTrainer):
    objective = "dr_grpo"  # Dr.GRPO's advantage and aggregation …
    surrogate = staticmethod(soft_clip)  # … with our push


def digits(completions, **columns):
    """Share of digits: something that a random model can learn in two steps."""
    return [sum(c.isdigit() for c in m[0]["content"]) / max(1, len(m[0]["content"])) for m in completions]


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    small = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 16}
    on_cpu = {"use_cpu": True, "bf16": False, "report_to": "none"}
    args = LabConfig(folder, learning_rate=1e-3, **small, **on_cpu)
    model, tokenizer = tiny_model("qwen2", hidden_size=32, initializer_range=0.2)
    trainer = SoftClipTrainer(model, digits, args, word_problems(64, seed=0), processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    print("objective in force:", trainer.algorithm.describe())
