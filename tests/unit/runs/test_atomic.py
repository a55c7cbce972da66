"""A file is whole or as it was, and on the disk before the old one is gone."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from grpo_lab import io as atomic
from grpo_lab.io import append_json_line, whole_folder, write_whole, write_whole_text


def test_content_reaches_the_disk_before_the_move_and_the_move_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a power cut asks for: bytes, then the name, then the folder that holds the name."""
    events: list[str] = []
    sync, move = os.fsync, os.replace

    def synced(opened: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        sync(opened)

    def moved(old: Any, new: Any) -> None:
        events.append("move")
        move(old, new)

    monkeypatch.setattr(atomic.os, "fsync", synced)
    monkeypatch.setattr(atomic.os, "replace", moved)
    write_whole_text(tmp_path / "state.json", "{}")
    assert events == ["state.json.part", "move", tmp_path.name]
    assert (tmp_path / "state.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_writer_that_dies_leaves_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "state.json"
    write_whole_text(place, "old")

    def dies(partial: Path) -> None:
        partial.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(place, dies)
    assert place.read_text() == "old"


def test_a_folder_in_the_place_of_a_file_is_said_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "report.html"
    place.mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        write_whole_text(place, "a page")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_only_a_folder_may_know_no_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def refuses(kind: str) -> Any:
        def refusing(opened: int) -> None:
            if Path(os.readlink(f"/proc/self/fd/{opened}")).is_dir() == (kind == "folder"):
                raise OSError(errno.EINVAL, "Invalid argument")
            sync(opened)

        return refusing

    monkeypatch.setattr(atomic.os, "fsync", refuses("folder"))
    write_whole_text(tmp_path / "a", "text")
    assert (tmp_path / "a").read_text() == "text"
    monkeypatch.setattr(atomic.os, "fsync", refuses("file"))
    with pytest.raises(OSError, match="Invalid argument"):
        write_whole_text(tmp_path / "b", "text")
    assert not (tmp_path / "b").exists()


def test_a_folder_is_whole_or_as_it_was(tmp_path: Path) -> None:
    place, partial = tmp_path / "model", tmp_path / "model.part"
    partial.mkdir()
    (partial / "left").write_text("by a killed run")
    with whole_folder(place) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
        assert not place.exists()
    assert sorted(path.name for path in place.rglob("*")) == ["a", "inner"]

    def broken() -> None:
        with whole_folder(place) as folder:
            (folder / "b").write_text("2")
            raise RuntimeError("full disk")

    with pytest.raises(RuntimeError):
        broken()
    assert [path.name for path in place.rglob("*") if path.is_file()] == ["a"]
    with whole_folder(place) as folder:
        (folder / "b").write_text("2")
    assert [path.name for path in place.rglob("*")] == ["b"]
    assert not partial.exists()


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file grows beyond 4 KiB inside: what a full disk does, wherever tests run."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def weights(place: Path) -> None:
    save_file({"weight": torch.zeros(4096)}, place)


def moments(place: Path) -> None:
    torch.save({"weight": torch.zeros(4096)}, place)


def words(place: Path) -> None:
    Tokenizer(WordLevel({f"word {number}": number for number in range(1000)}, unk_token="word 0")).save(str(place))


def text(place: Path) -> None:
    place.write_text("x" * 4096 * 4)


def copy(place: Path) -> None:
    shutil.copytree(Path(__file__).parents[1], place.with_name("folder"), dirs_exist_ok=True)


@pytest.mark.parametrize("write", [weights, moments, words, text, copy])
def test_a_disk_that_is_full_has_one_error_whoever_writes(
    small_disk: None, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    """safetensors, torch, tokenizers and a copy of a folder have errors of their own, which no caller would know."""
    place = tmp_path / "a file"
    with pytest.raises(OSError, match=re.escape(str(place))) as caught:
        write_whole(place, write)
    assert caught.value.errno in (errno.EFBIG, errno.EIO)
    assert caught.value.errno in atomic.NO_ROOM
    with pytest.raises(OSError, match="a model") as caught, whole_folder(tmp_path / "a model") as folder:
        write(folder / "a file")
    assert caught.value.errno in atomic.NO_ROOM
    assert not (tmp_path / "a model").exists()


def test_a_file_that_cannot_grow_is_named(small_disk: None, tmp_path: Path) -> None:
    place = tmp_path / "metrics.jsonl"
    place.write_text('{"step": 1}\n')
    with pytest.raises(OSError, match=re.escape(str(place))):
        append_json_line(place, {"text": "x" * 5000})
    assert place.read_text() == '{"step": 1}\n'


def test_what_is_not_the_disk_s_comes_through(tmp_path: Path) -> None:
    for error in (ValueError("x"), RuntimeError("[Errno 28]"), ConnectionError("(os error 28)"), KeyError("a")):
        with pytest.raises(type(error)) as caught, atomic.saving(tmp_path):
            raise error
        assert caught.value is error
    named = OSError(errno.ENOSPC, "No space left on device", "the file")
    with pytest.raises(OSError, match="the file") as caught, atomic.saving(tmp_path):
        raise named
    assert caught.value is named
