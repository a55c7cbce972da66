"""Read rows of a question-answer data set, from a hub name, a local folder or one file.

All data sets are read in the same way: ``read_rows`` gives dicts, ``benchmarks.py`` says what their columns mean, and
``to_dataset`` adds prompts. `load_file` takes rows as they are, such as those that `grpo-lab curate` writes, with every
score as a column. Numbers keep the digits with which the file writes them, since a gold answer 0.10 is not 0.1.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_lab.data.prompts import ChatTemplate, PromptTemplate, find_template
from grpo_lab.hub import data_set_reached
from grpo_lab.reading import json_lines, read_json_lines, read_text
from grpo_lab.verifiers.written import WrittenFloat, number_text, whole_number, written

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
_QUESTION = ("question", "problem")
GOLDS = ("solution", "gold_answer", "answer", "final_answer", "gt_answer", "ground_truth")
"""Names of columns that hold gold answers. Their values are kept as the file writes them."""
_FILES = frozenset([".jsonl", ".json", ".csv", ".parquet"])
"""Ends of names that are files and no hub names, also where there is no such file."""
_EXACT = 2**53
"""Up to this one a float can hold every whole number."""


def read_rows(source: str | Path, split: str, *, config: str | None = None, also: Sequence[str] = ()) -> list[Row]:
    """Read all rows of one split.

    Args:
        source: a file (``.jsonl``, ``.csv`` or ``.parquet``), which then *is* the split; a folder with
            ``<split>.jsonl``, or with parquet shards as the hub lays them out; or a hub name.
        config: the hub data set's configuration, if it has several.
        also: further file stems that a folder may use for this split.

    Raises:
        ValueError: ``source`` does not exist or has no such split or no rows, the hub cannot be reached, or a line is
            broken.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = _read_file(path)
    elif path.is_dir():
        rows = [row for file in _files_of_split(path, split, also) for row in _read_file(file)]
    elif path.suffix in _FILES or path.is_absolute() or str(source).startswith((".", "~")):
        raise ValueError(f"source {str(source)!r} does not exist: no such file or folder (setting: source)")
    else:
        rows = _read_hub(str(source), split, config)
    if not rows:
        raise ValueError(f"source {str(source)!r}, split {split!r}: no rows (settings: source, split)")
    return rows


def _files_of_split(folder: Path, split: str, also: Sequence[str]) -> list[Path]:
    """Return the files of a split: one ``.jsonl``, else all parquet shards. Raises ValueError if there are none."""
    for stem in (split, *also):
        if (folder / f"{stem}.jsonl").is_file():
            return [folder / f"{stem}.jsonl"]
    shards = sorted(folder.glob(f"{split}-*.parquet")) or sorted(folder.glob(f"*/{split}-*.parquet"))
    if shards:
        return shards
    seen = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in {".jsonl", ".parquet"})
    raise ValueError(
        f"folder {str(folder)!r} has no split {split!r}: looked for {split}.jsonl and {split}-*.parquet, "
        f"found {', '.join(seen[:12]) or 'no data files'} (settings: source, split)"
    )


def _read_file(path: Path) -> list[Row]:
    """Read the rows of a file: parquet or CSV by its name, JSON lines otherwise. Raises ValueError if it is damaged."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return _with_texts(pyarrow.parquet.read_table(path))
        except pyarrow.ArrowException as error:
            said = " ".join(str(error).split())
            raise ValueError(f"{path} is no parquet file, or damaged: {said} (setting: source)") from error
    if path.suffix == ".csv":
        return _read_csv(path)
    lines = read_json_lines(
        path, advice="one object a line (setting: source)", halves=False, numbers=(whole_number, WrittenFloat)
    )
    return [row for _, row in lines]


def _read_csv(path: Path) -> list[Row]:
    """Read the rows of a CSV file. The first line names the columns; values are text, an empty cell is None."""
    lines = csv.reader(StringIO(read_text(path, "(setting: source)"), newline=""), strict=True)
    rows: list[Row] = []
    try:
        names = next(lines, [])
        for cells in lines:
            if cells and len(cells) != len(names):
                raise csv.Error(f"{len(cells)} cells where the first line names {len(names)} columns")
            if cells:
                rows.append({name: cell or None for name, cell in zip(names, cells, strict=True)})
    except csv.Error as error:
        raise ValueError(f"{path}, line {lines.line_num}: {error}; one row a line (setting: source)") from None
    return rows


def _with_texts(table: Any) -> list[Row]:
    """Return the rows of an Arrow table. A number of single or half precision keeps the digits of that precision: 0.1,
    not 0.10000000149011612."""
    rows: list[Row] = table.to_pylist()
    for field in table.schema:
        if str(field.type) in ("float", "halffloat"):
            kind = np.float32 if str(field.type) == "float" else np.float16
            for row in rows:
                value = row[field.name]
                if value is not None and math.isfinite(value):
                    row[field.name] = WrittenFloat(number_text(kind(value)) or "", value)
    return rows


def _read_hub(name: str, split: str, config: str | None) -> list[Row]:
    """Read the rows of a data set on the hub. Raises ValueError if it has no such split, or cannot be had."""
    import datasets

    try:
        with data_set_reached(name):
            splits = datasets.get_dataset_split_names(name, config)
            found = None
            if split in splits:
                found = datasets.load_dataset(name, config, split=split)
        if found is None:
            raise ValueError(f"{name!r} has no split {split!r}; it has {', '.join(splits)} (setting: split)")
        single = [one for one, kind in found.features.items() if getattr(kind, "dtype", "") == "float32"]
        if single:
            exact = _with_texts(found.with_format("arrow")[:].select(single))
        else:
            exact = [{}] * len(found)
        return [dict(row) | digits for row, digits in zip(found, exact, strict=True)]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"source {name!r} is neither a file or folder here nor a data set that the hub gives: "
            f"{type(error).__name__}: {error}. Without network (or with HF_HUB_OFFLINE set), set source to a local "
            "folder or .jsonl file (setting: source)"
        ) from error


def first_present(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is a column of the first row; None if none is."""
    return next((name for name in names if name in rows[0]), None)


def required_column(rows: Sequence[Row], names: Sequence[str], source: str | Path) -> str:
    """Return the first of ``names`` that is a column of the first row. Raises ValueError, which lists its columns, if
    none is."""
    found = first_present(rows, names)
    if found is None:
        raise ValueError(
            f"source {str(source)!r}: missing column: one of {', '.join(names)} is needed, "
            f"its columns are {', '.join(map(str, rows[0]))} (setting: source)"
        )
    return found


def text_of(row: Row, column: str, number: int, source: str | Path) -> str:
    """Return a cell as text, a number as the file writes it. Raises ValueError if the cell is empty, or neither."""
    value = row.get(column)
    text = value if isinstance(value, str) else number_text(value)
    if text is None or not text.strip():
        raise ValueError(f"{place_of(source, number)}: column {column!r} is {value!r}; text is needed")
    return text


def place_of(source: str | Path, number: int) -> str:
    """Return words that say where row ``number`` (from 1) is; in a file of JSON lines they name its line."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix not in {".parquet", ".csv"}:
        lines = (line for line, _ in json_lines(path))
        return f"{path}, line {next(islice(lines, number - 1, None), number)}"
    return f"source {str(source)!r}, row {number}"


def to_dataset(examples: Iterable[Mapping[str, Any]], template: PromptTemplate) -> Dataset:
    """Return rows as a ``datasets.Dataset`` with two columns more: ``prompt``, which ``template`` makes of the column
    ``question``, and ``template``, its name.

    Columns of these names that the data has already become ``source_prompt`` and ``source_template``.
    """
    renamed = {"prompt": "source_prompt", "template": "source_template"}
    return dataset_of(
        {"prompt": template.prompt(row["question"]), "template": template.name}
        | {renamed.get(name, name): value for name, value in row.items()}
        for row in examples
    )


def dataset_of(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """Return rows as a ``datasets.Dataset``, whose columns each have one type.

    Values keep their type if one type holds them all unchanged. Otherwise they become text, as the file writes it:
    ``5`` beside ``"Level 5"``, or 12345678901234567 beside 0.5.
    """
    from datasets import Dataset

    columns = _columns_of(rows)
    for name, values in columns.items():
        columns[name] = values if name == "prompt" else _of_one_type(values, name in GOLDS)
    return Dataset.from_dict(columns)


def _columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each column by its name, with None where a row lacks it. ``rows`` is read once, and may be a
    generator."""
    columns: dict[str, list[Any]] = {}
    count = 0
    for count, row in enumerate(rows, start=1):
        for name, value in row.items():
            if name not in columns:
                columns[name] = []
            column = columns[name]
            column.extend([None] * (count - 1 - len(column)))
            column.append(value)
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return columns


def _of_one_type(values: list[Any], gold: bool) -> list[Any]:
    """Return the values of a column in one type, or as texts if no type holds them all unchanged. With ``gold`` they
    become texts, too, if a number would be printed otherwise than the file writes it."""
    present = [value for value in values if value is not None]
    kinds = {float if isinstance(value, WrittenFloat) else type(value) for value in present}
    if kinds == {int, float} or kinds == {float}:
        one: type | None = float
        kept = all(_survives(value, gold) for value in present)
    else:
        one = None
        kept = len(kinds) < 2 and _fits_arrow(present)
    if not kept:
        return [None if value is None else written(value) for value in values]
    if one:
        return [None if value is None else one(value) for value in values]
    return values


def _survives(value: Any, gold: bool) -> bool:
    """Return whether a number is unchanged as a float; with ``gold``, whether it also prints as the file writes it."""
    if isinstance(value, int):
        return not gold and -_EXACT <= value <= _EXACT
    return not gold or not isinstance(value, WrittenFloat) or repr(float(value)) == value.text


def _fits_arrow(values: list[Any]) -> bool:
    """Return whether Arrow, in which ``datasets`` keeps rows, has a type that holds all values. It has none for whole
    numbers of more than 64 bits, nor for mappings with keys of different types."""
    import pyarrow

    if not any(isinstance(value, int | list | dict | tuple | Decimal) for value in values):
        return True
    try:
        pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        return False
    return True


def load_file(
    source: str | Path,
    split: str = "train",
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """Load a file (or a folder with ``<split>.jsonl``) whose rows are taken as they are.

    Rows that have a ``question`` and no ``prompt`` get the prompts of ``template``. Existing prompts stay.

    Args:
        source: a ``.jsonl``, ``.csv`` or ``.parquet`` file, a folder, or a hub name.
        template: a prompt template or its name. Existing prompts must fit it: any text fits ``none``, any messages fit
            ``chat``. If the rows have a column ``template``, it must hold this name.
        system_prompt: system turn, for message templates alone; existing prompts must have it.

    Raises:
        ValueError: no ``solution``; neither ``prompt`` nor ``question``; an empty one; prompts in some rows only, in
            two forms, or made with another template. The message names the file and the row.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    required_column(rows, ("solution",), source)
    question = first_present(rows, _QUESTION)
    if not any("prompt" in row for row in rows):
        name = required_column(rows, _QUESTION, source)
        asked = ({**row, "question": text_of(row, name, number, source)} for number, row in enumerate(rows, start=1))
        return to_dataset(asked, form)
    forms = [_form_of(row.get("prompt"), number, source) for number, row in enumerate(rows, start=1)]
    if other := [number for number, found in enumerate(forms, start=1) if found != forms[0]]:
        raise ValueError(
            f"{place_of(source, other[0])}: `prompt` is of another form than in the rows before; it must be "
            "text in all rows or messages in all rows"
        )
    made_with = sorted({str(row["template"]) for row in rows if row.get("template") is not None})
    if made_with not in ([], [form.name]):
        raise ValueError(
            f"source {str(source)!r}: its prompts were made with template {', '.join(made_with)} and template is "
            f"{form.name!r}; set template to theirs (pass rates belong to the prompt), or leave the column prompt out"
        )
    for number, row in enumerate(rows, start=1):
        _check_made_by(form, row["prompt"], number, source)
    own = {}
    if not made_with:
        own = {"template": form.name}
    return dataset_of(row | own | ({"question": row.get(question)} if question else {}) for row in rows)


def _form_of(prompt: Any, number: int, source: str | Path) -> str:
    """Return the form of a prompt, ``text`` or ``messages``. Raises ValueError if it has neither, or is empty."""
    if isinstance(prompt, str) and prompt.strip():
        return "text"
    if isinstance(prompt, list) and prompt and all(isinstance(m, dict) and m.get("role") for m in prompt):
        asked = [message.get("content") for message in prompt if message["role"] == "user"]
        if all(text.strip() if isinstance(text, str) else text for text in asked):
            return "messages"
    raise ValueError(
        f"{place_of(source, number)}: column `prompt` is {prompt!r}; a text or a list of messages is "
        "needed in every row, or the column in none (then prompts are made from `question`)"
    )


def _check_made_by(form: PromptTemplate, prompt: Any, number: int, source: str | Path) -> None:
    """Raise ValueError if an existing prompt does not fit the template ``form``, which would then have no effect."""
    if isinstance(form, ChatTemplate):
        first = {}
        if isinstance(prompt, list):
            first = prompt[0]
        system = None
        if first.get("role") == "system":
            system = first.get("content")
        fits = isinstance(prompt, list) and form.system in (None, system)
    else:
        fits = isinstance(prompt, str) and prompt.startswith(form.before) and prompt.endswith(form.after)
    if not fits:
        kind = "text" if isinstance(prompt, str) else "messages"
        asked = f"template {form.name!r}" + (" with its system_prompt" if getattr(form, "system", None) else "")
        raise ValueError(
            f"{place_of(source, number)}: column `prompt` is {kind} that {asked} does not make, and prompts "
            "that are there stay as they are. Set template to 'none' for text, to 'chat' (without system_prompt) for "
            "messages, or leave the column `prompt` out to have prompts made from `question`"
        )
