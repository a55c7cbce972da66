"""Rows that are ready for training: a jsonl or parquet file with `prompt` (or `question`) and `solution`.

What `grpo-lab curate` writes is read back by this loader, with every score as a column.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import ChatTemplate, PromptTemplate, find_template
from grpo_lab.data.rows import Row, first_present, one_type, read_rows, required_column, text_of, to_dataset

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
        template: makes the prompts of rows that have a ``question`` and no ``prompt``. Prompts that are there stay and
            have to be this template's: ``none`` for any text, ``chat`` for any messages. If the rows name the template that
            made them, it has to be this one.
        system_prompt: system turn, for template ``chat`` alone; prompts that are there have to have it.

    Raises:
        ValueError: no ``solution``, neither ``prompt`` nor ``question``, an empty one, prompts in some rows only or in two
            forms, or prompts made with another template; each with the file and the row.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    required_column(rows, ("solution",), source)
    question = first_present(rows, _QUESTION)
    if not any("prompt" in row for row in rows):
        name = required_column(rows, _QUESTION, source)
        asked = [{**row, "question": text_of(row, name, number, source)} for number, row in enumerate(rows, start=1)]
        return to_dataset(asked, form)
    _check_prompts(rows, source)
    made_with = sorted({str(row["template"]) for row in rows if row.get("template") is not None})
    if made_with not in ([], [form.name]):
        raise ValueError(
            f"source {str(source)!r}: its prompts were made with template {', '.join(made_with)} and the setting template "
            f"is {form.name!r}; set it to theirs (pass rates belong to the prompt), or leave the column prompt out"
        )
    _check_form(rows, form, source)
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
        if not _says_something(prompt):
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


def _says_something(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    messages = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and m.get("role") for m in prompt)
    return messages and not any(m["role"] == "user" and not _content(m) for m in prompt)


def _content(message: Any) -> Any:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else content


def _check_form(rows: list[Row], form: PromptTemplate, source: str | Path) -> None:
    """Prompts that are there look as the template asked for makes them: they stay, so it must not be said in vain."""
    for number, row in enumerate(rows, start=1):
        prompt = row["prompt"]
        if isinstance(form, ChatTemplate):
            system = prompt[0].get("content") if isinstance(prompt, list) and prompt[0]["role"] == "system" else None
            fits = isinstance(prompt, list) and form.system in (None, system)
        else:
            fits = isinstance(prompt, str) and prompt.startswith(form.before) and prompt.endswith(form.after)
        if not fits:
            kind = "text" if isinstance(prompt, str) else "messages"
            asked = f"template {form.name!r}" + (" with its system_prompt" if getattr(form, "system", None) else "")
            raise ValueError(
                f"source {str(source)!r}, row {number}: column `prompt` is {kind} that {asked} does not make, and prompts that "
                "are there stay as they are. Set template to 'none' for text, to 'chat' (without system_prompt) for messages, or "
                "leave the column `prompt` out to have prompts made from `question`"
            )
