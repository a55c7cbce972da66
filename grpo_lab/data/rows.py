"""Rows of a question-answer data set, from a hub name, a local folder or one file.

The reading is the same for every data set; what its columns mean stands in ``gsm8k.py`` and ``math.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import PromptTemplate
from grpo_lab.io import json_lines

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read_rows(source: str | Path, split: str, *, config: str | None = None, also: Sequence[str] = ()) -> list[Row]:
    """All rows of one split.

    ``source`` is, in this order: an existing ``.jsonl`` file (which then *is* the split), an existing folder
    (``<split>.jsonl``, or parquet shards as the hub lays them out), or a hub name.

    Args:
        config: the hub data set's configuration, where it has several.
        also: further file stems that a folder may use for this split.

    Raises:
        ValueError: nothing there, no such split, an unreachable hub, a broken line, no rows.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = _read_file(path)
    elif path.is_dir():
        rows = [row for file in _files_of_split(path, split, also) for row in _read_file(file)]
    elif path.suffix in {".jsonl", ".json", ".parquet"} or path.is_absolute() or str(source).startswith((".", "~")):
        raise ValueError(f"source {str(source)!r} does not exist: no such file or folder (setting: source)")
    else:
        rows = _read_hub(str(source), split, config)
    if not rows:
        raise ValueError(f"source {str(source)!r}, split {split!r}: no rows (settings: source, split)")
    return rows


def _files_of_split(folder: Path, split: str, also: Sequence[str]) -> list[Path]:
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
    if path.suffix == ".parquet":
        import pyarrow.parquet

        parquet_rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
        return parquet_rows
    rows: list[Row] = []
    for number, row in json_lines(path):
        if isinstance(row, str):
            raise ValueError(f"{path}, line {number}: {row}; one object a line (setting: source)")
        _refuse_lone_surrogates(row, path, number)
        rows.append(row)
    return rows


def _refuse_lone_surrogates(row: Row, path: Path, number: int) -> None:
    """Half of a character, as text cut between two code units leaves it, cannot be tokenized or written to a file."""
    for name, value in row.items():
        found = _LONE_SURROGATE.search(json.dumps([name, value], ensure_ascii=False))
        if found:
            raise ValueError(
                f"{path}, line {number}: column {name!r} holds {found[0]!a}, half of a character (a lone surrogate); "
                "mend or leave out that text (setting: source)"
            )


def _read_hub(name: str, split: str, config: str | None) -> list[Row]:
    import datasets

    try:
        splits = datasets.get_dataset_split_names(name, config)
        if split not in splits:
            raise ValueError(f"{name!r} has no split {split!r}; it has {', '.join(splits)} (setting: split)")
        return [dict(row) for row in datasets.load_dataset(name, config, split=split)]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"source {name!r} is neither a file or folder here nor a data set that the hub gives: "
            f"{type(error).__name__}: {error}. Without network (or with HF_HUB_OFFLINE set), set source to a local "
            "folder or .jsonl file (setting: source)"
        ) from error


def first_present(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """The first of ``names`` that is a column of the rows."""
    return next((name for name in names if name in rows[0]), None)


def required_column(rows: Sequence[Row], names: Sequence[str], source: str | Path) -> str:
    """As ``first_present``; none of them is an error that lists the columns seen."""
    found = first_present(rows, names)
    if found is None:
        raise ValueError(
            f"source {str(source)!r}: missing column: one of {', '.join(names)} is needed, "
            f"its columns are {', '.join(map(str, rows[0]))} (setting: source)"
        )
    return found


def text_of(row: Row, column: str, number: int, source: str | Path) -> str:
    """A non-empty cell as text (numbers are written out)."""
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError(f"source {str(source)!r}, row {number}: column {column!r} is {value!r}; text is needed")
    return str(value)


def to_dataset(examples: Iterable[Mapping[str, Any]], template: PromptTemplate) -> Dataset:
    """``question, solution, …`` rows plus the columns ``prompt`` and ``template``, as a ``datasets.Dataset``.

    The prompt is the template's, always: columns of these names that the data bring along become ``source_prompt`` and
    ``source_template``.
    """
    from datasets import Dataset

    rows = [
        {"prompt": template.prompt(row["question"]), "template": template.name, **_without_prompts(row)}
        for row in examples
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_dict({name: one_type([row.get(name) for row in rows]) for name in names})


def _without_prompts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"source_{name}" if name in ("prompt", "template") else name: value for name, value in row.items()}


def one_type(values: list[Any]) -> list[Any]:
    """Arrow columns have one type: a file that mixes ``5`` and ``"Level 5"`` becomes text, ``1`` and ``0.5`` floats."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]
