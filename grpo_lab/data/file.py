"""Rows that are ready for training: a jsonl or parquet file with `prompt` (or `question`) and `solution`.

What `grpo-lab curate` writes is read back by this loader, with every score as a column.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import Row, first_present, one_type, read_rows, required_column, to_dataset

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
        ValueError: no ``solution``, neither ``prompt`` nor ``question``, prompts in some rows only or in two forms, or
            prompts made with another template.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    required_column(rows, ("solution",), source)
    question = first_present(rows, _QUESTION)
    if not any("prompt" in row for row in rows):
        name = required_column(rows, _QUESTION, source)
        return to_dataset([{**row, "question": row[name]} for row in rows], form)
    _check_prompts(rows, source)
    made_with = sorted({str(row["template"]) for row in rows if row.get("template") is not None})
    if made_with not in ([], [form.name]):
        raise ValueError(
            f"source {str(source)!r}: its prompts were made with template {', '.join(made_with)} and the setting template "
            f"is {form.name!r}; set it to theirs (pass rates belong to the prompt), or leave the column prompt out"
        )
    from datasets import Dataset

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    columns = {name: values if name == "prompt" else one_type(values) for name, values in columns.items()}
    columns.setdefault("template", [form.name] * len(rows))
    if question and question != "question":
        columns["question"] = columns[question]
    return Dataset.from_dict(columns)


def _check_prompts(rows: list[Row], source: str | Path) -> None:
    """Every row has a prompt, all of them text or all of them messages."""
    forms: set[str] = set()
    for number, row in enumerate(rows, start=1):
        prompt = row.get("prompt")
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(
                f"source {str(source)!r}, row {number}: column `prompt` is {prompt!r}; a text or a list of messages is "
                "needed in every row, or the column in none (then prompts are made from `question`)"
            )
        forms.add("text" if isinstance(prompt, str) else "messages")
        if len(forms) > 1:
            raise ValueError(
                f"source {str(source)!r}, row {number}: `prompt` is of another form than in the rows before; it must be text "
                "in all rows or messages in all rows"
            )
