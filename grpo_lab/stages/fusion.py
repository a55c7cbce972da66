"""Fusion: rows that teach a model Qwen3's two modes, out of its own judged samples and of answers without reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from grpo_lab.curation.rejection import text_of
from grpo_lab.data.fusion import EMPTY_BLOCK, FusionShares, Row, fusion_rows, thought_through
from grpo_lab.engines.sampler import render_prompt
from grpo_lab.io import write_json_lines
from grpo_lab.recipe.models import load_tokenizer
from grpo_lab.recipe.rows import load_rows, rows_here
from grpo_lab.recipe.sections import DataSection, ModelSection
from grpo_lab.runs.console import told
from grpo_lab.runs.stage import At, Facts
from grpo_lab.settings import Positive, Whole, settings
from grpo_lab.stages.sample import read_lines
from grpo_lab.verifiers.verdict import CORRECT_FROM
from grpo_lab.visible import encodable

ROWS = "rows.jsonl"


@settings()
class Fusion:
    """``fusion``: rows for `sft`, thinking and non-thinking ones (`grpo_lab.data.fusion`).

    Args:
        model: whose chat template and tokens the rows are checked against: the one that will be trained.
        samples: what `sample` left; of each problem the first ``per_problem`` right answers with one closed block of
            reasoning become thinking rows.
        plain: rows whose ``worked_solution`` becomes a non-thinking answer, an empty block before it.
        shares: how many rows have their flag where, and how many are dialogues.
    """

    leaves: ClassVar[dict[str, str]] = {"rows": ROWS}
    model: str
    samples: str
    plain: Annotated[tuple[DataSection, ...], Field(min_length=1)]
    per_problem: Positive = 1
    shares: FusionShares = field(default_factory=FusionShares)
    seed: Whole = 0

    def plan(self) -> str:
        self._answers(rows_here)
        return f"{self.per_problem} of {self.samples} a problem, and {', '.join(map(told, self.plain))}"

    def run(self, at: At) -> Facts:
        lines, thinking, unclosed = read_lines(Path(self.samples)), [], 0
        for line in lines:
            pairs = zip(line["completions"], line["scores"], strict=True)
            right = [text_of(one) for one, score in pairs if score is not None and score >= CORRECT_FROM]
            whole = [text for text in right if thought_through(text)]
            unclosed += len(right) - len(whole)
            kept = {"prompt": line["problem"]["prompt"], "row": line["row"], "problem": line["problem"]}
            thinking += [{**kept, "answer": text} for text in list(dict.fromkeys(whole))[: self.per_problem]]
        if not thinking:
            raise ValueError(
                f"{self.samples} has no right answer of {len(lines)} problems with one closed <think> block before it; "
                "sample from a model that reasons in one, with more `n_samples` or a longer `max_completion_length`"
            )
        plain = self._answers(load_rows)
        rows, flags = fusion_rows(thinking, plain, self.shares, self.seed)
        tokens = sum(check_rendering(rows, load_tokenizer(ModelSection(path=self.model)), self.model))
        write_json_lines(at.folder / ROWS, [encodable(row) for row in rows])
        kinds = {"thinking": len(thinking), "non_thinking": len(plain), **{f"flag_{one}": flags[one] for one in flags}}
        return {"rows": len(rows), **kinds, "dropped": {"no_closed_reasoning": unclosed}, "trained_tokens": tokens}

    def _answers(self, load: Callable[..., Any]) -> list[Row]:
        """The non-thinking ones. ValueError for rows without worked solutions."""
        found: list[Row] = []
        for place, section in enumerate(self.plain):
            rows = load(section, f"plain.{place}")
            if rows is not None and "worked_solution" not in rows.column_names:
                raise ValueError(f"`plain.{place}` has no column 'worked_solution'; it has {rows.column_names}")
            found += [{"prompt": row["prompt"], "answer": row["worked_solution"]} for row in rows or ()]
        return found


def check_rendering(rows: Sequence[Row], tokenizer: Any, model: str) -> Iterator[int]:
    """Of every row the number of tokens that are trained on. ValueError where the model's chat template does not leave
    the choice of the mode to them: what it renders must begin with the prompt's tokens, then have the row's block."""
    for number, row in enumerate(rows, start=1):
        asked = render_prompt(row["prompt"], tokenizer)
        turns = [*row["prompt"], *row["completion"]]
        whole = render_prompt(turns, tokenizer, {"continue_final_message": False})
        block = "<think>" if row["mode"] == "think" else EMPTY_BLOCK
        if not whole.text.startswith(asked.text + block) or whole.ids[: len(asked.ids)] != asked.ids:
            said = whole.text[max(len(asked.text) - 20, 0) : len(asked.text) + len(block)]
            raise ValueError(
                f"the chat template of {model!r} cannot switch modes: row {number} asks for `{row['mode']}`, and where "
                f"its completion begins stands {said!r}. The prompt has to end before the <think> block, as with the "
                "hybrid Qwen3 models; a template that opens the block itself is of a model that always thinks"
            )
        yield len(whole.ids) - len(asked.ids)
