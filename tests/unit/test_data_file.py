"""Rows that are ready for training, from a file: what is refused, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.data import load_file


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_prompts_that_are_there_stay(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1?"}]
    rows = load_file(written(tmp_path, {"prompt": messages, "solution": "2", "pass_rate": 0.5}))
    assert rows[0]["prompt"] == messages
    assert (rows[0]["solution"], rows[0]["pass_rate"], rows[0]["template"]) == ("2", 0.5, "chat")


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"solution": "4"}, ["row 2", "`prompt`", "None"]),
        ({"prompt": "", "solution": "4"}, ["row 2", "`prompt`", "''"]),
        ({"prompt": [], "solution": "4"}, ["row 2", "`prompt`", "[]"]),
        ({"prompt": 7, "solution": "4"}, ["row 2", "`prompt`", "7"]),
        ({"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4"}, ["row 2", "`prompt`", "messages", "text"]),
    ],
)
def test_a_row_without_a_prompt_like_the_others_is_named(
    second: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    file = written(tmp_path, {"prompt": "1+1?", "solution": "2"}, second)
    with pytest.raises(ValueError) as caught:
        load_file(file, template="none")
    for word in [*words, "rows.jsonl"]:
        assert word in str(caught.value)


def test_prompts_in_some_rows_only_are_not_mixed_with_made_ones(tmp_path: Path) -> None:
    file = written(
        tmp_path, {"question": "1+1?", "solution": "2"}, {"question": "x", "prompt": "2+2?", "solution": "4"}
    )
    with pytest.raises(ValueError, match=r"row 1.*`prompt`"):
        load_file(file)


def test_columns_of_two_types_become_text_as_in_the_other_loaders(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "1+1?", "solution": 2}, {"prompt": "2+3?", "solution": "\\frac{10}{2}"})
    assert load_file(file, template="none")["solution"] == ["2", "\\frac{10}{2}"]


def test_bytes_that_are_no_utf8_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1+1?", "solution": "2"}\n{"prompt": "caf\xe9", "solution": "3"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl.*UTF-8"):
        load_file(file)
