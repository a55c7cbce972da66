"""A kind of stage of a team's own: the worked solutions of at most so many words, as rows to train on.

In a pipeline's YAML it is `stage: short_solutions:ShortSolutions` (docs/recipes.md, "Adding a stage").
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from grpo_lab.data.word_problems import word_problems
from grpo_lab.io import write_whole_text
from grpo_lab.settings import Positive, settings


@settings()
class ShortSolutions:
    """Args: n: word problems that are made. words: most that a solution may have."""

    leaves: ClassVar[dict[str, str]] = {"rows": "rows.jsonl"}
    n: Positive
    words: Positive = 20

    def plan(self) -> str:
        """For `--dry-run`."""
        return f"solutions of at most {self.words} words out of {self.n:,} problems"

    def run(self, workspace: Any) -> dict[str, int]:
        """Writes into ``workspace.folder``; what it returns becomes the stage's marker."""
        made = word_problems(n=self.n, template="chat")
        kept = [
            {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["worked_solution"]}]}
            for row in made
            if len(row["worked_solution"].split()) <= self.words
        ]
        workspace.stop.check()  # between two things that are done it may be asked to stop
        write_whole_text(workspace.folder / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in kept))
        return {"made": len(made), "rows": len(kept)}
