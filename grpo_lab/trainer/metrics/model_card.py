"""Complete the README that TRL writes beside a model, so that it says what was trained.

TRL's card names the trainer's family ("trained with GRPO") with the paper of 2024, and the base model only if it is a
name on the hub. Here it also names the algorithm in force, its source and the rewards, and says if the model is a local
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trl import GRPOTrainer

from grpo_lab.objectives import PRESETS
from grpo_lab.rewards.schedules import weight_in_words
from grpo_lab.trainer import trl_bridge


@contextlib.contextmanager
def in_our_words(trainer: GRPOTrainer) -> Iterator[None]:
    """Return a context in which TRL writes the model's README with our name and without its paper. At its end the main
    process adds the base model, if that is a local one, and a table of what was trained."""
    method = f"grpo_lab ({trainer.algorithm.with_hooks(trainer).describe()})"
    with trl_bridge.replaced(trainer, "_name", method), trl_bridge.replaced(trainer, "_paper", {}):
        yield
    card = Path(trainer.args.output_dir) / "README.md"
    if trainer.is_world_process_zero() and card.is_file():
        path = str(getattr(trainer.accelerator.unwrap_model(trainer.model).config, "_name_or_path", "") or "")
        if path:
            base = f"the local model `{path}`"
        else:
            base = "a model that was built from its configuration"
        text = card.read_text(encoding="utf-8")  # TRL's template makes `None` of what it does not have
        text = text.replace("[None](https://huggingface.co/None)", base)
        text = text.replace('model="None"', f'model="{trainer.args.output_dir}"')
        text = text.replace("### Framework versions", f"{_facts(trainer)}\n\n### Framework versions")
        card.write_text(text, encoding="utf-8")


def _facts(trainer: GRPOTrainer) -> str:
    """Return a Markdown section with a table of the algorithm's parts and of every reward with its weight, which is the
    trainer's, a schedule or the reward's own."""
    names = trainer.algorithm.with_hooks(trainer).names
    rows = [*names.items()]
    if preset := PRESETS.get(names.get("objective", "")):
        rows.append(("source of the objective", preset.source))
    if trainer.algorithm.left_to_trl is not None:
        rows.append(("why the loss is TRL's", trainer.algorithm.left_to_trl))
    scheduled = trainer.lab_settings.reward_schedules
    rewards = zip(trainer.reward_func_names, trainer.reward_funcs, trainer.reward_weights.tolist(), strict=True)
    weights = [
        f"{name} × {scheduled[name].in_words() if name in scheduled else weight_in_words(reward, weight)}"
        for name, reward, weight in rewards
    ]
    rows += [("rewards", ", ".join(weights)), ("trainer class", type(trainer).__name__)]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"### What was trained\n\n| | |\n|---|---|\n{table}"
