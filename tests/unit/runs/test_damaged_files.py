"""Damaged files: the file, the line, what was read and what is allowed, by the one reader of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.curation.weights import check_mergeable
from grpo_lab.data.rows import load_file
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.sweep import read_sweep
from grpo_lab.labs.experiment import parser, records
from grpo_lab.pipelines.stage_record import StageRecord
from grpo_lab.reading import DEEPEST, json_lines, read_json, read_json_lines, read_record, read_text
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.runs.folder import read_marker
from grpo_lab.stages.sample import samples_in
from grpo_lab.stages.supervised import Dpo
from grpo_lab.trainer.critic import load_critic
from grpo_lab.trainer.resume.state import read_state
from grpo_lab.trainer.step.bad_step import read_bad_step

DAMAGED: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "", "it is empty"),
    "blank": (b" \n\n", "", "it is empty"),
    "zeros": (bytes(4096), "", "zero bytes"),
    "Latin-1": (b'{\n"a": "caf\xe9"}', ", line 2", "the byte 0xe9 is no UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), ", line 1", "the byte 0xff is no UTF-8"),
    "cut": (b'{"a": 1,\n "b":', ", line 2", "not JSON: Expecting value, column 6, where the text ends"),
    "cut in a text": (b'{"a": "hal', ", line 1", "not JSON: Unterminated string"),
    "a list": (b"[1]", "", "it holds [1]; a mapping"),
    "a number": (b"17", "", "it holds 17; a mapping"),
    "null": (b"null", "", "it holds null; a mapping"),
    "900 deep": (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "", "it is nested more than 100 deep"),
    "5,000 deep": (b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}", "", "it is nested more than 100 deep"),
    "100,000 deep": (b"[" * 100_000, "", "it is nested more than 100 deep"),
    "a key twice": (b'{"a": 1,\n "b": {"c": 1},\n "a": 2}', ", line 3", "the key 'a' stands twice in one object"),
    "a key twice, inside": (b'{"a": [{"c": 1, "c": 1}]}', ", line 1", "the key 'c' stands twice in one object"),
    "too many digits": (b'{"a": ' + b"1" * 5000 + b"}", "", "not JSON that can be read: Exceeds the limit"),
}
"""Name → its bytes, the line that a record of them is named with, what is said."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_a_sentence_with_its_file(name: str, tmp_path: Path) -> None:
    content, line, said = DAMAGED[name]
    file = tmp_path / "record.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"put a copy back$") as raised:
        read_record(file, advice="put a copy back")
    assert str(raised.value).startswith(f"{file}{line}: {said}")
    assert len(str(raised.value)) < len(str(file)) + 250


@pytest.mark.parametrize("name", [name for name in DAMAGED if name not in ("empty", "blank")])
def test_a_damaged_line_is_a_sentence_with_its_number(name: str, tmp_path: Path) -> None:
    content, _, said = DAMAGED[name]
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'\n{"a": 0}\n' + content.replace(b"\n", b"") + b"\n" + b'{"a": 2}\n')
    found = list(json_lines(file))
    assert [number for number, _ in found] == [2, 3, 4]
    assert isinstance(found[1][1], str)
    with pytest.raises(ValueError) as raised:
        list(read_json_lines(file))
    assert str(raised.value).startswith(f"{file}, line 3: {said.partition(', column')[0]}")


def test_half_a_character_is_refused_where_rows_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(rb'{"a": "\ud83d\ude00"}' + b"\n" + rb'{"a": ["\ud83d"]}')
    assert [row for _, row in read_json_lines(file)] == [{"a": "😀"}, {"a": ["\ud83d"]}]
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: column 'a' holds '\\ud83d', half of a character"):
        load_file(file)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(b"a: 1\nb: " + rb'"\ud83d"')
    with pytest.raises(ValueError, match=r"recipe\.yaml', line 2: '\\ud83d' is half of a character"):
        read_yaml(recipe)


def test_fields_are_asked_for_with_their_types(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text('{"name": "x", "seconds": null, "on": true, "n": 3}')
    needs: Any = {"name": str, "seconds": float | None, "on": bool, "n": float}
    assert read_record(file, needs)["n"] == 3  # a whole number is a number
    wrong: tuple[tuple[str, Any, str], ...] = (
        ("digests", dict, "it has no `digests`, which must be a mapping"),
        ("seconds", dict, "its `seconds` is null; it must be a mapping"),
        ("on", int, "its `on` is true; it must be a whole number"),
        ("n", str | list, "its `n` is 3; it must be text or a list"),
        ("name", float | None, 'its `name` is "x"; it must be a number or null'),
    )
    for name, kind, said in wrong:
        with pytest.raises(ValueError) as raised:
            read_record(file, {name: kind})
        assert str(raised.value) == f"{file}: {said}"


def test_what_is_no_damage_is_read(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_bytes(b"\xef\xbb\xbf" + rb'{"pair": "\ud83d\ude00", "braces": "%s"}' % (b"{[" * 200))
    assert read_record(file) == {"pair": "😀", "braces": "{[" * 200}
    deep = "[" * (DEEPEST - 1) + "{}" + "]" * (DEEPEST - 1)
    file.write_text(deep)
    assert json.dumps(read_json(file)) == deep
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(file) == {"a": 1}
    assert read_text(file) == "a: 1\n"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}')
    assert list(json_lines(file)) == [(1, {"a": 1}), (3, {"a": 2})]


def arm(folder: Path) -> Any:
    options = parser("", str(folder)).parse_args(["--folder", str(folder), "--seeds", "0"])
    return records(["a"], options)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.json": ("run.json", lambda folder: read_marker(folder / "run.json")),
    "stage.json": ("stage.json", lambda folder: StageRecord.read(folder, "a", "train")),
    "arm.json": ("a-0/arm.json", arm),
    "sweep.json": ("sweep.json", read_sweep),
    "summary.json": ("summary.json", EvaluationResult.read),
    "rows": ("rows.jsonl", lambda folder: load_file(folder / "rows.jsonl")),
    "a recipe": ("recipe.yaml", lambda folder: read_yaml(folder / "recipe.yaml")),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", DAMAGED)
def test_every_file_is_read_by_the_one_reader(reader: str, name: str, tmp_path: Path) -> None:
    place, read = READERS[reader]
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(DAMAGED[name][0])
    with pytest.raises(ValueError, match=file.name) as raised:
        read(tmp_path)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < len(str(file)) + 400


LESS_OFTEN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "samples": ("samples.jsonl", lambda folder: samples_in(folder / "samples.jsonl")),
    "rows to train on": ("rows.jsonl", lambda folder: Dpo(model="m", rows=f"{folder}/rows.jsonl").read()),
    "shards": ("model.safetensors.index.json", lambda folder: check_mergeable(folder, folder)),
    "bad step": ("facts.json", read_bad_step),
    "critic": ("critic.json", load_critic),
    "checkpoint": ("grpo_lab_state.json", read_state),
}


@pytest.mark.parametrize("reader", LESS_OFTEN)
@pytest.mark.parametrize("content", [b'{"a": 1,', b"[1]", b"{}", b'{"a": "\xe9"}', b"[" * 5000])
def test_what_is_read_less_often_is_named_as_well(reader: str, content: bytes, tmp_path: Path) -> None:
    place, read = LESS_OFTEN[reader]
    (tmp_path / place).write_bytes(content)
    with pytest.raises(ValueError, match=place.replace(".", r"\.")):
        read(tmp_path)


def test_a_bad_row_has_its_line_and_not_its_number(tmp_path: Path) -> None:
    """Blank lines between rows moved the one against the other."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "solution": "1"}\n\n\n{"prompt": 5, "solution": "1"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 4: column `prompt` is 5; a text or a list of messages"):
        load_file(file)
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"rows\.parquet is no parquet file, or damaged"):
        load_file(table)


@pytest.mark.parametrize("field", ["digests", "settings", "inputs", "results"])
def test_a_stage_record_with_null_in_it_is_named(field: str, tmp_path: Path) -> None:
    StageRecord("a", "train").write(tmp_path)
    file = tmp_path / "stage.json"
    assert StageRecord.read(tmp_path, "a", "train").kind == "train"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: None}))
    with pytest.raises(ValueError, match=rf"stage\.json: its `{field}` is null; it must be a mapping: move the folder"):
        StageRecord.read(tmp_path, "a", "train")
