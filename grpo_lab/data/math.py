"""MATH (arXiv 2103.03874), MATH-500, AIME and files written like them: final answers in LaTeX."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import Row, first_present, read_rows, required_column, text_of, to_dataset
from grpo_lab.verifiers.canonical import group_end

if TYPE_CHECKING:
    from datasets import Dataset

_QUESTION = ("problem", "question")
_GOLD = ("gold_answer", "answer", "final_answer", "gt_answer", "ground_truth")
_WORKED = ("solution", "worked_solution", "gold_solution")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_LEVEL = re.compile(r"(?:level\s*)?(\d+)", re.IGNORECASE)
_BARE = re.compile(r"(?:[^\s$.,;]|[.,](?=\d))+")


def load_math(
    source: str | Path = "HuggingFaceH4/MATH-500",
    split: str = "test",
    template: str | PromptTemplate = "qwen_math",
    *,
    levels: list[int] | None = None,
    system_prompt: str | None = None,
) -> Dataset:
    """A MATH-like data set, ready for training or evaluation.

    ``template`` and ``system_prompt`` are those of ``load_gsm8k``.

    Args:
        source: hub name, local folder with ``<split>.jsonl`` (``math500.jsonl`` also serves as ``test``), or one
            ``.jsonl`` file (then ``split`` is not looked at).
        split: ``train`` or ``test``; in a local folder any file stem, such as ``aime24``.
        levels: keep the problems of these difficulties alone, such as ``[3, 4, 5]``, by the column ``level`` (``3`` or
            ``"Level 3"``). A row whose level is no number (MATH has two ``Level ?``) is of none of them.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``solution`` (the final answer in LaTeX, as written: AIME's
        leading zeros stay), ``worked_solution`` where the file has one, and the rest (level, subject, …). The final
        answer is the column ``gold_answer`` or ``answer``; without one, the last ``\\boxed{…}`` of ``solution``.

    Raises:
        ValueError: what was seen, what is needed, and the setting that governs it.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split, also=("math500",) if split == "test" else ())
    if levels is not None:
        rows = _of_levels(rows, levels, source)
    question = required_column(rows, _QUESTION, source)
    gold = first_present(rows, _GOLD)
    worked = first_present(rows, _WORKED) if gold else required_column(rows, (*_WORKED, *_GOLD), source)
    examples = []
    for number, row in enumerate(rows, start=1):
        rest = {name: value for name, value in row.items() if name not in {question, gold, worked}}
        answer = _gold_answer(row, gold, worked, number, source)
        said = {"question": text_of(row, question, number, source), "solution": answer}
        examples.append(rest | said | ({"worked_solution": row[worked]} if worked and row.get(worked) else {}))
    return to_dataset(examples, form)


def _of_levels(rows: list[Row], levels: list[int], source: str | Path) -> list[Row]:
    """The rows whose ``level`` is one of ``levels``. ValueError without such a column, or with nothing left."""
    if not isinstance(levels, list | tuple) or not all(type(level) is int for level in levels):
        raise ValueError(
            f"levels is {levels!r}; it must be a list of whole numbers such as [3, 4, 5] (setting: levels)"
        )
    column = required_column(rows, ("level",), source)
    found = [_level(row.get(column)) for row in rows]
    kept = [row for row, level in zip(rows, found, strict=True) if level in set(levels)]
    if not kept:
        seen = sorted({level for level in found if level is not None})
        raise ValueError(
            f"source {str(source)!r}: no row of levels {list(levels)}; it has levels {seen} (setting: levels)"
        )
    return kept


def _level(value: Any) -> int | None:
    found = _LEVEL.fullmatch(str(value).strip())
    return int(found[1]) if found else None


def _gold_answer(row: Row, gold: str | None, worked: str | None, number: int, source: str | Path) -> str:
    if gold:
        return text_of(row, gold, number, source).strip()
    assert worked is not None
    answer = last_boxed(text_of(row, worked, number, source))
    if answer is None:
        raise ValueError(
            f"source {str(source)!r}, row {number}: no complete \\boxed{{…}} in column {worked!r}, "
            f"and no column {' or '.join(_GOLD)}"
        )
    return answer


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{…}`` or ``\\fbox{…}`` (also ``\\boxed 5``), braces balanced; None without one.

    One pass: the text may be hostile.
    """
    starts = [box.end() for box in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return bare.group() if bare else None
    end = group_end(text, start)
    return text[start + 1 : end - 1].strip() or None if end > 0 else None
