"""load_gsm8k on hand-written rows, on bad input, and on the real files where they are."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest

from grpo_lab.data import load_gsm8k

ROW = {"question": "Ann has 2 and buys 3. How many?", "answer": "Ann has 2+3=<<2+3=5>>5.\n#### 5"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_columns_of_one_row(tmp_path: Path) -> None:
    rows = load_gsm8k(write(tmp_path / "any.jsonl", ROW | {"id": 7}))
    assert rows[0] == {
        "prompt": [{"role": "user", "content": ROW["question"]}],
        "template": "chat",
        "id": 7,
        "question": ROW["question"],
        "solution": "5",
        "worked_solution": ROW["answer"],
    }


@pytest.mark.parametrize(
    ("written", "gold"),
    [("#### 1,234", "1234"), ("#### -3", "-3"), ("#### 0.5 ", "0.5"), ("a #### 1\nno:\n#### 2", "2"), ("####7", "7")],
)
def test_gold_is_what_follows_the_last_mark(tmp_path: Path, written: str, gold: str) -> None:
    assert load_gsm8k(write(tmp_path / "t.jsonl", ROW | {"answer": written}))[0]["solution"] == gold


@pytest.mark.parametrize(
    "row",
    [
        {"problem": "Q?", "answer": "…\n#### 18"},
        {"problem": "Q?", "solution": "…\n#### 18"},
        {"question": "Q?", "gold_answer": "18", "gold_solution": "…\nA: 18"},
        {"question": "Q?", "gold_answer": 18},
    ],
)
def test_field_names_of_public_variants(tmp_path: Path, row: dict[str, Any]) -> None:
    loaded = load_gsm8k(write(tmp_path / "t.jsonl", row))[0]
    assert (loaded["question"], loaded["solution"]) == ("Q?", "18")


def test_a_folder_has_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROW, ROW)
    write(tmp_path / "test.jsonl", ROW)
    assert len(load_gsm8k(tmp_path, split="train")) == 2
    assert len(load_gsm8k(str(tmp_path), split="test", template="none")) == 1
    with pytest.raises(ValueError, match=r"no split 'dev'.*found test.jsonl, train.jsonl.*setting"):
        load_gsm8k(tmp_path, split="dev")


def test_a_folder_of_parquet_shards_as_the_hub_lays_them_out(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "main").mkdir()
    Dataset.from_list([ROW]).to_parquet(tmp_path / "main" / "train-00000-of-00001.parquet")
    assert load_gsm8k(tmp_path)[0]["solution"] == "5"


def test_a_column_of_mixed_types_becomes_text(tmp_path: Path) -> None:
    rows = load_gsm8k(write(tmp_path / "t.jsonl", ROW | {"level": 5}, ROW | {"level": "Level 5"}, ROW))
    assert rows["level"] == ["5", "Level 5", None]


BAD_FILES = [
    (
        [{"question": "Q?", "reply": "#### 1"}],
        r"missing column: one of answer.* is needed.*columns are question, reply",
    ),
    ([{"text": "Q?", "answer": "#### 1"}], r"missing column: one of question, problem is needed.*text, answer"),
    ([ROW, ROW | {"answer": "so it is 5"}], r"line 2: no answer after '####'.*'so it is 5'"),
    ([ROW | {"answer": "so it is\n#### "}], r"line 1: no answer after '####'"),
    ([ROW, ROW | {"question": None}], r"line 2: column 'question' is None"),
    ([ROW, ROW | {"question": "  "}], r"line 2: column 'question' is '  '"),
    ([ROW | {"answer": ["#### 5"]}], r"line 1: column 'answer' is \['#### 5'\]"),
    ([], r"no rows"),
    ([[1, 2]], r"line 1: it holds \[1, 2\]; a mapping"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_FILES)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_gsm8k(write(tmp_path / "bad.jsonl", *rows))


@pytest.mark.parametrize("source", ["nowhere.jsonl", "/no/such/folder", "./data"])
def test_a_missing_path_is_not_asked_from_the_hub(source: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"source '{source}' does not exist")):
        load_gsm8k(source)


def test_an_unreachable_hub_name_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"'nobody/nothing' is neither a file or folder.*set source to a local folder"):
        load_gsm8k("nobody/nothing")


def test_a_hub_that_is_away_is_asked_once_and_the_cache_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tried for 24 seconds."""
    asked: list[str] = []
    offline: list[bool] = []

    def away(self: Any, name: str, **_: Any) -> Any:
        asked.append(name)
        raise httpx.ConnectError("no name")

    def splits(name: str, config: Any) -> list[str]:
        offline.append(datasets.config.HF_HUB_OFFLINE)
        if name == "nobody/nothing":
            raise ConnectionError("not in the cache")
        return ["train"]

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", away)
    monkeypatch.setattr("datasets.get_dataset_split_names", splits)
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: datasets.Dataset.from_list([ROW]))
    with pytest.raises(ValueError, match=r"'nobody/nothing' is neither .*huggingface.co cannot be reached: no name"):
        load_gsm8k("nobody/nothing")
    assert (asked, offline) == (["nobody/nothing"], [True])
    assert len(load_gsm8k("somebody/something", split="train")) == 1
    assert not datasets.config.HF_HUB_OFFLINE


@pytest.mark.not_fast(but="test-1319")
@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_the_real_rows(grpo_lab_data: Path, split: str, rows: int) -> None:
    loaded = load_gsm8k(grpo_lab_data / "gsm8k", split=split, template="r1")
    assert len(loaded) == rows
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", gold) for gold in loaded["solution"])
    assert all(
        worked.endswith(gold) or "," in worked for worked, gold in zip(loaded["worked_solution"], loaded["solution"])
    )
    first = {"train": "72", "test": "18"}  # Natalia's clips; Janet's ducks
    assert loaded[0]["solution"] == first[split]


def test_the_real_model_outputs_file(grpo_lab_data: Path) -> None:
    loaded = load_gsm8k(grpo_lab_data / "gsm8k" / "gsm8k_model_outputs.jsonl")
    assert len(loaded) == 2632
    assert {"output_text", "label_correct", "worked_solution"} <= set(loaded.column_names)


def solved(number: int) -> dict[str, str]:
    return {"question": f"{number} and 1?", "answer": f"{number}+1={number + 1}\n#### {number + 1}"}


def test_shots_stand_before_every_question_and_are_asked_by_none(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *map(solved, range(4)))
    write(tmp_path / "test.jsonl", solved(7), solved(1))
    written = "Question: 0 and 1?\nAnswer: 0+1=1\n#### 1\n\nQuestion: 1 and 1?\nAnswer: 1+1=2\n#### 2\n\n"
    train = load_gsm8k(tmp_path, "train", "harness_gsm8k", shots=2)
    assert train["prompt"] == [f"{written}Question: {n} and 1?\nAnswer:" for n in (2, 3)]
    assert set(train["template"]) == {"harness_gsm8k, 2 shots"}
    assert load_gsm8k(tmp_path, "test", "harness_gsm8k", shots=2)["question"] == ["7 and 1?"]
    assert load_gsm8k(tmp_path / "train.jsonl", template="none", shots=3)["question"] == ["3 and 1?"]


@pytest.mark.parametrize(
    ("template", "shots", "words"),
    [
        ("chat", 1, r"`shots` are text .*template 'chat' is a list of messages.*'harness_gsm8k'"),
        ("harness_gsm8k", 5, r"`shots` is 5, .* begins with 2 worked solutions"),
        ("harness_gsm8k", -1, r"`shots` is -1, .* begins with 0 worked solutions"),
    ],
)
def test_shots_that_cannot_be_had(tmp_path: Path, template: str, shots: int, words: str) -> None:
    write(tmp_path / "train.jsonl", solved(1), solved(2))
    with pytest.raises(ValueError, match=words):
        load_gsm8k(tmp_path, "train", template, shots=shots)


def test_shots_that_are_not_worked_out(tmp_path: Path) -> None:
    rows = write(tmp_path / "t.jsonl", *({"question": q, "gold_answer": "2"} for q in "ab"))
    with pytest.raises(ValueError, match=r"begins with 0 worked solutions"):
        load_gsm8k(rows, template="harness_gsm8k", shots=1)
