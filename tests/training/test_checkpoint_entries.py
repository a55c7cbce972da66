"""What a checkpoint holds of our parts: each has one entry, under its name, in a form that does not move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_lab.trainer.resume.state import read_state
from training.test_resume import build

RESUME = Path(__file__).resolve().parents[2] / "docs" / "resume.md"
SETTINGS: dict[str, Any] = {
    "objective": "dr_grpo",
    "steps_per_generation": 4,
    "max_steps": 1,
    "reference_every": 3,
    "sampler": {"name": "prioritized"},
    "kl": {"estimator": "k1", "placement": "reward", "per": "token", "coefficient": 0.2, "target": 0.5, "rate": 1.0},
}
#: entry → its keys, as main wrote them on 2026-11-27, before the parts stood in one dict
FORMS = {
    "sampler": {"drawn", "epoch", "sampler", "shape", "successes", "trials", "used_up"},
    "generation": {"completions", "left_out", "random_forward", "settings", "step", "window"},
    "reference": {"moved", "pieces"},
    "kl": {"coefficient"},
}


def test_each_part_has_an_entry_and_the_page_says_what_it_holds(tmp_path: Path) -> None:
    trainer = build(tmp_path / "run", **SETTINGS)
    trainer.train()
    entries = dict(read_state(tmp_path / "run" / "checkpoint-1").entries)
    assert entries.pop("generated") == trainer.generated_tokens > 0
    assert {name: set(entry) for name, entry in entries.items()} == FORMS
    said = RESUME.read_text(encoding="utf-8").partition("<!-- entries -->")[2].partition("<!-- end of entries -->")[0]
    rows = [f"| `{name}` | {part.holds} |" for name, part in trainer.parts.stateful.items()]
    assert said.split("|---|---|")[1].strip().splitlines() == rows
