"""Rows that are ready for training, from a file: what is refused, and with which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.data import apply_template, load_file, load_gsm8k, load_math


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
        ({"solution": "4"}, ["line 2", "`prompt`", "None"]),
        ({"prompt": "", "solution": "4"}, ["line 2", "`prompt`", "''"]),
        ({"prompt": [], "solution": "4"}, ["line 2", "`prompt`", "[]"]),
        ({"prompt": 7, "solution": "4"}, ["line 2", "`prompt`", "7"]),
        (
            {"prompt": [{"role": "user", "content": "2+2?"}], "solution": "4"},
            ["line 2", "`prompt`", "messages"],
        ),
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
    with pytest.raises(ValueError, match=r"line 1.*`prompt`"):
        load_file(file)


def test_columns_of_two_types_become_text_as_in_the_other_loaders(tmp_path: Path) -> None:
    file = written(tmp_path, {"prompt": "1+1?", "solution": 2}, {"prompt": "2+3?", "solution": "\\frac{10}{2}"})
    assert load_file(file, template="none")["solution"] == ["2", "\\frac{10}{2}"]


def test_bytes_that_are_no_utf8_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1+1?", "solution": "2"}\n{"prompt": "caf\xe9", "solution": "3"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl.*UTF-8"):
        load_file(file)


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"question": "1+1?", "solution": "2"}\n')
    assert load_file(file, template="none")["prompt"] == ["1+1?"]


@pytest.mark.parametrize("question", [None, "", "  "])
def test_a_row_without_a_question_is_named(question: str | None, tmp_path: Path) -> None:
    file = written(tmp_path, {"question": "1+1?", "solution": "2"}, {"question": question, "solution": "4"})
    with pytest.raises(ValueError, match=r"rows\.jsonl.*line 2.*'question'"):
        load_file(file)


@pytest.mark.parametrize("prompt", ["  ", [{"role": "user", "content": " "}], [{"content": "1+1?"}]])
def test_a_prompt_that_says_nothing_is_named(prompt: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl.*line 1.*`prompt`"):
        load_file(written(tmp_path, {"prompt": prompt, "solution": "4"}), template="none")


@pytest.mark.parametrize("loader", [load_file, load_gsm8k, load_math])
def test_a_lone_surrogate_is_named(loader: Any, tmp_path: Path) -> None:
    good = {"question": "caf\u00e9 \U0001f600?", "solution": "2", "gold_answer": "2"}
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: column 'question' holds .*ud83d"):
        loader(written(tmp_path, good, {**good, "question": "cut \ud83d"}))
    assert loader(written(tmp_path, good))[0]["question"] == "caf\u00e9 \U0001f600?"


@pytest.mark.parametrize("loader", [load_gsm8k, load_math])
def test_a_column_prompt_does_not_replace_the_template_asked_for(loader: Any, tmp_path: Path) -> None:
    row = {"question": "1+1?", "gold_answer": "2", "prompt": "theirs", "template": "theirs, too"}
    made = loader(written(tmp_path, row), template="r1")[0]
    assert made["prompt"] == apply_template("1+1?", "r1")
    assert made["template"] == "r1"
    assert (made["source_prompt"], made["source_template"]) == ("theirs", "theirs, too")


def test_a_column_template_does_not_name_prompts_that_another_made(tmp_path: Path) -> None:
    made = load_file(written(tmp_path, {"question": "1+1?", "solution": "2", "template": "qwen_math"}), template="r1")[
        0
    ]
    assert (made["prompt"], made["template"]) == (apply_template("1+1?", "r1"), "r1")


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("1+1?", {"template": "r1"}),
        ("1+1?", {"template": "chat"}),
        ([{"role": "user", "content": "1+1?"}], {"template": "none"}),
        ([{"role": "user", "content": "1+1?"}], {"template": "chat", "system_prompt": "Be brief."}),
    ],
)
def test_prompts_of_another_form_than_the_template_asked_for_are_refused(
    prompt: Any, asked: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl.*line 1.*template"):
        load_file(written(tmp_path, {"prompt": prompt, "solution": "2"}), **asked)


def test_prompts_that_the_template_made_stay(tmp_path: Path) -> None:
    for name in ("r1", "qwen_math", "none", "chat"):
        prompt = apply_template("1+1?", name)
        assert load_file(written(tmp_path, {"prompt": prompt, "solution": "2"}), template=name)["prompt"] == [prompt]


def test_the_docs_name_the_columns_that_are_required(tmp_path: Path) -> None:
    """docs/evaluation.md: with these a file loads, without any one of them it does not."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\*\*What a file of rows holds\*\*.*?\n\n((?:\|.*\n)+)", page)
    cells = [line.split("|")[1:3] for line in table.splitlines()]
    required = [re.findall("`(\\w+)`", names) for names, said in cells if said.strip().startswith("required")]
    assert required == [["solution"], ["question", "problem"]]
    assert "required where there is no `prompt`" in table
    for question in required[1]:
        whole = {"solution": "2", question: "1+1?"}
        assert load_file(written(tmp_path, whole), template="none")[0]["prompt"]
        for name in whole:
            one_of = ["solution"] if name == "solution" else required[1]
            with pytest.raises(ValueError, match=f"missing column: one of {', '.join(one_of)} is needed"):
                load_file(written(tmp_path, {key: value for key, value in whole.items() if key != name}))
    assert load_file(written(tmp_path, {"solution": "2", "prompt": "1+1?"}), template="none")[0]["prompt"] == "1+1?"
