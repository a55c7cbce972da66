"""Where a rank is, in words and in lines of code, and which of torch's errors mean that another one is missing."""

from __future__ import annotations

import json
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from grpo_lab import LabConfig
from grpo_lab.trainer.ranks import RankLost, RankWatch, how_it_broke, key_of, line_of, named_place, place

LATE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv "
    "operation to complete"
)
GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40000"


def test_places_are_told_outermost_first_and_are_left_by_any_way() -> None:
    with named_place("step"), named_place("rewards"):
        assert place() == "step › rewards"
    with pytest.raises(ValueError, match="a team's"), named_place("step"):
        raise ValueError("a team's")
    assert place() == ""


@pytest.mark.parametrize(("said", "kind"), [(LATE, "late"), (GONE, "gone")])
def test_torchs_error_of_a_missing_rank_names_the_place(said: str, kind: str) -> None:
    assert how_it_broke(RuntimeError(said)) == kind
    with (
        pytest.raises(RankLost, match="at «step › exchange of rows»") as caught,
        named_place("step"),
        named_place("exchange of rows"),
    ):
        raise RuntimeError(said)
    assert said in str(caught.value)
    assert str(caught.value.__cause__) == said


@pytest.mark.parametrize(
    "said", ["shape mismatch", "CUDA out of memory", "the tests Timed out waiting for a file", "restored: Broken pipe"]
)
def test_other_errors_pass_as_they_are(said: str) -> None:
    with pytest.raises(RuntimeError) as caught, named_place("step"):
        raise RuntimeError(said)
    assert type(caught.value) is RuntimeError


def sleeping(begun: threading.Event, until: threading.Event) -> None:
    begun.set()
    until.wait()


def test_the_line_is_the_innermost_of_somebodys_own() -> None:
    begun, until = threading.Event(), threading.Event()
    thread = threading.Thread(target=sleeping, args=(begun, until))
    thread.start()
    begun.wait()
    line, waits = line_of(thread.ident or 0)
    until.set()
    thread.join()
    assert "runs/test_ranks.py:" in line
    assert line.endswith("in sleeping")
    assert not waits


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a launcher offers: a store, and where it is."""
    made = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    return made


def watch_of(rank: int, ranks: int, limit: float = 100.0) -> RankWatch:
    accelerator = SimpleNamespace(process_index=rank, num_processes=ranks)
    state, args = SimpleNamespace(global_step=11), SimpleNamespace(ddp_timeout=limit)
    return RankWatch(SimpleNamespace(accelerator=accelerator, state=state, args=args))


def test_the_missing_are_named_before_those_that_wait(store: Any) -> None:
    line, now = "step 12, for 61 s: team.py:41 in judge", time.time()
    entries = {
        1: {"where": "at «step › rewards», step 12, for 30 s: x.py:1 in gather", "waits": True, "written": now},
        2: {"where": f"at «step › rewards», {line}", "waits": False, "written": now},
        4: {"where": f"at «step», {line}", "waits": False, "written": now - 500},
    }
    for rank, entry in entries.items():
        store.set(key_of(rank), json.dumps(entry))
    with (
        watch_of(0, 5),
        pytest.raises(RankLost) as caught,
        named_place("step"),
        named_place("gather"),
    ):
        raise RuntimeError(LATE)
    said = str(caught.value)
    begin = "rank 0 of 5 waited 100 s at «step › gather», step 12, and not all ranks came (`ddp_timeout`). "
    assert said.startswith(
        f"{begin}Rank 2 is at «step › rewards», {line}. Rank 3 has said nothing: it has not begun to train, or not as "
        f"grpo_lab.LabTrainer. Rank 4 was last heard of 500 s ago (ended, or stopped), then at «step», {line}. Rank "
        "1 waits at"
    )


def test_a_rank_that_ends_within_its_first_beat_has_begun(store: Any) -> None:
    """Killed in the first ten seconds it "has not begun to train"."""
    with watch_of(0, 2) as here, watch_of(1, 2):
        assert here.others().startswith("Rank 1 is at «the beginning», step 12, for 0 s: ")


def test_without_a_store_the_error_still_has_rank_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with (
        pytest.raises(
            RankLost,
            match=r"rank 1 of 2 lost the connection .* at «step», step 12\. Where the other ranks are is not known",
        ),
        watch_of(1, 2),
        named_place("step"),
    ):
        raise RuntimeError(GONE)


@pytest.mark.not_fast
def test_at_half_of_the_limit_a_warning_says_where_this_rank_is(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="grpo_lab"), watch_of(0, 2, limit=2.0), named_place("step"):
        while not caplog.records:
            time.sleep(0.1)
        time.sleep(1.1)  # two beats: once at half of the limit, once at nine tenths
    assert len(caplog.records) <= 2
    assert re.search(
        r"rank 0 of 2 is at «step», step 12, for \d+ s: runs/test_ranks\.py:", caplog.records[0].getMessage()
    )


def test_a_limit_must_be_a_positive_number(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"`ddp_timeout` is 0; it must be a positive number of seconds"):
        LabConfig(output_dir=str(tmp_path), ddp_timeout=0, use_cpu=True, bf16=False)
