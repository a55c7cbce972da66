"""Rows that are ready for training: a jsonl or parquet file with `prompt` (or `question`) and `solution`.

What `grpo-lab curate` writes is read back by this loader, with every score as a column.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import first_present, read_rows, required_column, to_dataset

if TYPE_CHECKING:
    from datasets import Dataset

_QUESTION = ("question", "problem")


def load_file(
    source: str | Path,
    split: str = "train",
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """A file (or a folder with ``<split>.jsonl``) whose rows are taken as they are.

    Args:
        source: a ``.jsonl`` or ``.parquet`` file, a folder, or a hub name.
        template: makes the prompts of rows that have a ``question`` and no ``prompt``. Prompts that are there stay; if
            the rows name the template that made them, it has to be this one.
        system_prompt: system turn, for template ``chat`` alone and where prompts are made here.

    Raises:
        ValueError: no ``solution``, neither ``prompt`` nor ``question``, or prompts made with another template.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    required_column(rows, ("solution",), source)
    question = first_present(rows, _QUESTION)
    if "prompt" not in rows[0]:
        name = required_column(rows, _QUESTION, source)
        return to_dataset([{**row, "question": row[name]} for row in rows], form)
    made_with = sorted({str(row["template"]) for row in rows if row.get("template") is not None})
    if made_with not in ([], [form.name]):
        raise ValueError(
            f"source {str(source)!r}: its prompts were made with template {', '.join(made_with)} and the setting template "
            f"is {form.name!r}; set it to theirs (pass rates belong to the prompt), or leave the column prompt out"
        )
    from datasets import Dataset

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns.setdefault("template", [form.name] * len(rows))
    if question and question != "question":
        columns["question"] = columns[question]
    return Dataset.from_dict(columns)
