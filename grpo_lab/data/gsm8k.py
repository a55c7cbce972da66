"""GSM8K (arXiv 2110.14168): grade-school word problems with a worked solution that ends in ``#### 18``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import first_present, read_rows, required_column, text_of, to_dataset

if TYPE_CHECKING:
    from datasets import Dataset

GOLD_MARK = "####"
_QUESTION = ("question", "problem")
_GOLD = ("gold_answer", "final_answer")
_WORKED = ("answer", "gold_solution", "solution", "worked_solution")


def load_gsm8k(
    source: str | Path = "openai/gsm8k",
    split: str = "train",
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """GSM8K, or a file written like it, ready for training.

    Args:
        source: hub name, local folder with ``<split>.jsonl``, or one ``.jsonl`` file (then ``split`` is not looked at).
        split: ``train`` or ``test``; in a local folder any file stem.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        system_prompt: system turn, for templates that are message lists.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``solution`` (the column ``gold_answer``, else the number after
        ``####``, without
        thousands commas), ``worked_solution`` (as written, where the file has one), and whatever else the rows hold.

    Raises:
        ValueError: what was seen, what is needed, and the setting that governs it.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split, config="main" if str(source) in {"openai/gsm8k", "gsm8k"} else None)
    question = required_column(rows, _QUESTION, source)
    gold = first_present(rows, _GOLD)
    worked = first_present(rows, _WORKED) if gold else required_column(rows, _WORKED, source)
    examples = []
    for number, row in enumerate(rows, start=1):
        answer = text_of(row, gold, number, source) if gold else None
        written = text_of(row, worked, number, source) if worked else None
        if answer is None:
            assert written is not None
            answer = _after_mark(written, number, source)
        rest = {name: value for name, value in row.items() if name not in {question, gold, worked}}
        said = {"question": text_of(row, question, number, source), "solution": answer.strip().replace(",", "")}
        examples.append(rest | said | ({} if written is None else {"worked_solution": written}))
    return to_dataset(examples, form)


def _after_mark(written: str, number: int, source: str | Path) -> str:
    _, mark, answer = written.rpartition(GOLD_MARK)
    if not mark or not answer.strip():
        raise ValueError(
            f"source {str(source)!r}, row {number}: no answer after {GOLD_MARK!r}; the solution ends "
            f"{written[-60:]!r}. "
            "GSM8K solutions end in a line '#### 18'; files with the bare answer need it in a column gold_answer"
        )
    return answer
