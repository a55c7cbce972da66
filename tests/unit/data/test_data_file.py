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


GOOD = {"prompt": "1+1?", "solution": "2"}
ASKED = {"question": "1+1?", "solution": "2"}
MESSAGES = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, {"solution": "4"}], ["line 2", "`prompt`", "None"]),
        ([GOOD, {"prompt": "", "solution": "4"}], ["line 2", "`prompt`", "''"]),
        ([GOOD, {"prompt": [], "solution": "4"}], ["line 2", "`prompt`", "[]"]),
        ([GOOD, {"prompt": 7, "solution": "4"}], ["line 2", "`prompt`", "7"]),
        ([GOOD, {"prompt": MESSAGES, "solution": "4"}], ["line 2", "`prompt`", "messages"]),
        ([{"prompt": "  ", "solution": "4"}], ["line 1", "`prompt`"]),
        ([{"prompt": [{"role": "user", "content": " "}], "solution": "4"}], ["line 1", "`prompt`"]),
        ([{"prompt": [{"content": "1+1?"}], "solution": "4"}], ["line 1", "`prompt`"]),
        ([ASKED, {**ASKED, "prompt": "2+2?"}], ["line 1", "`prompt`"]),  # made prompts are not mixed with written ones
        ([ASKED, {**ASKED, "question": None}], ["line 2", "'question'"]),
        ([ASKED, {**ASKED, "question": ""}], ["line 2", "'question'"]),
        ([ASKED, {**ASKED, "question": "  "}], ["line 2", "'question'"]),
    ],
)
def test_a_row_without_a_prompt_like_the_others_is_named(
    rows: list[dict[str, Any]], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        load_file(written(tmp_path, *rows), template="none")
    for word in [*words, "rows.jsonl"]:
        assert word in str(caught.value)


@pytest.mark.parametrize("loader", [load_gsm8k, load_math])
def test_a_column_prompt_does_not_replace_the_template_asked_for(loader: Any, tmp_path: Path) -> None:
    row = {"question": "1+1?", "gold_answer": "2", "prompt": "theirs", "template": "theirs, too"}
    made = loader(written(tmp_path, row), template="r1")[0]
    assert (made["prompt"], made["template"]) == (apply_template("1+1?", "r1"), "r1")
    assert (made["source_prompt"], made["source_template"]) == ("theirs", "theirs, too")
    (named,) = load_file(written(tmp_path, {**ASKED, "template": "qwen_math"}), template="r1")
    assert (named["prompt"], named["template"]) == (apply_template("1+1?", "r1"), "r1")


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
