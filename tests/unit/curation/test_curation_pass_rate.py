"""Pass rates: the count, the file, and going on after a kill (a real SIGKILL of a real process)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.curation import PassRate, Selection, Written, answer_only, guess_rates, guessable, keep_band, pass_rates
from grpo_lab.io import LEFT, append_json_line
from grpo_lab.recipe.sections import SamplingSettings
from grpo_lab.runs.stop_requests import StopRequests
from grpo_lab.settings import read
from grpo_lab.stages.filter import Filtering, Filters

PROBLEMS = [{"prompt": f"{k} + {k}?", "solution": str(2 * k), "domain": "sums"} for k in range(10)]


class Scripted:
    """A generator that is right for the first k of n samples of problem k, and remembers what it was asked."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: list[str] = []
        self.fail_after = fail_after

    def __call__(self, prompts: list[Any], n: int) -> list[list[str]]:
        if self.fail_after is not None and len(self.asked) >= self.fail_after:
            raise RuntimeError("the engine died")
        self.asked += prompts
        return [[str(2 * int(p.split()[0])) if j < int(p.split()[0]) else "wrong" for j in range(n)] for p in prompts]


def exact(prompts: list[str], completions: list[str], solution: list[str], **columns: Any) -> list[float | None]:
    assert len(prompts) == len(completions) == len(solution) == len(columns["domain"])
    return [None if "?" in c else float(c == s) for c, s in zip(completions, solution)]


def test_the_rate_is_right_over_scored() -> None:
    rates = pass_rates(PROBLEMS, Scripted(), exact, n=10, batch_size=3, progress=False)
    assert [rate.rate for rate in rates] == [k / 10 for k in range(10)]
    assert [rate.trials for rate in rates] == [10] * 10
    assert rates[3].completions == ("6", "6", "6", *["wrong"] * 7)


def test_unscorable_is_not_wrong() -> None:
    some = lambda prompts, n: [["6", "?", "?", "5"] for _ in prompts]  # noqa: E731
    rate = pass_rates(PROBLEMS[3:4], some, exact, n=4, progress=False)[0]
    assert (rate.successes, rate.trials, rate.rate) == (1, 2, 0.5)
    none = pass_rates(PROBLEMS[3:4], lambda p, n: [["?"] * n for _ in p], exact, n=2, progress=False)[0]
    assert none.rate is None
    assert keep_band([none.rate, 0.0, 0.5, 1.0]) == [False, False, True, False]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused_before_it_is_written(value: float, tmp_path: Path) -> None:
    """NaN ≥ 1 is False: it used to be counted as a wrong answer and kept in the file."""
    file = tmp_path / "rates.jsonl"
    with pytest.raises(ValueError, match=f"{value!r}.*finite.*None"):
        pass_rates(PROBLEMS[:2], Scripted(), lambda **_: [1.0, value, 0.0, None], n=2, path=file, progress=False)
    assert file.read_text().count("\n") == 1  # the header


def test_going_on_repeats_nothing(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "rates.jsonl"
    first = Scripted(fail_after=6)
    with pytest.raises(RuntimeError, match="died"):
        pass_rates(PROBLEMS, first, exact, path=file, batch_size=3, progress=False)
    second = Scripted()
    rates = pass_rates(PROBLEMS[::-1], second, exact, path=file, batch_size=3, progress=False)  # another order
    assert len(first.asked) == 6
    assert sorted(first.asked + second.asked) == sorted(p["prompt"] for p in PROBLEMS)
    assert [rate.rate for rate in rates] == [k / 10 for k in range(9, -1, -1)]
    third = Scripted()
    assert pass_rates(PROBLEMS[::-1], third, exact, path=file, progress=False) == rates
    assert third.asked == []


@pytest.mark.parametrize("content", ["my notes\n", "my notes", "a\nb", '{"a": 1}\n'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, content: str) -> None:
    """`--samples notes.txt`, or a link to it in the place of `pass_rates.jsonl`, emptied the file."""
    notes, link = tmp_path / "notes.txt", tmp_path / "pass_rates.jsonl"
    notes.write_text(content)
    link.symlink_to(notes)
    for path, said in ((notes, "something else than samples"), (link, "is a link")):
        with pytest.raises(ValueError, match=said):
            pass_rates(PROBLEMS, Scripted(), exact, path=path, progress=False)
    assert notes.read_text() == content


@pytest.mark.parametrize(
    "tail", [b'{"key": "ab', b"\x00" * 50, b'{"key": 3}\n', b"\x00\x00\n\xff\n", b'{"key": "k", "scores": [1.0]}']
)
def test_a_torn_end_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    file = tmp_path / "rates.jsonl"
    whole = pass_rates(PROBLEMS, Scripted(), exact, path=file, batch_size=3, progress=False)
    content = file.read_bytes()
    lines = content.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + tail)  # the last problem is lost, which is a batch
    again = Scripted()
    assert pass_rates(PROBLEMS, again, exact, path=file, batch_size=3, progress=False) == whole
    assert len(again.asked) == 1
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"key": "ab', "not JSON: "),
        (b"\x00\xff", "the byte 0xff is no UTF-8"),
        (b'{"key": 3}', "it holds no `key`, `scores` and `completions`"),
        (b'{"key": "k", "key": "l", "scores": [], "completions": []}', "the key 'key' stands twice"),
    ],
)
def test_a_damaged_line_in_the_middle_is_named_with_what_it_holds(tmp_path: Path, line: bytes, why: str) -> None:
    file = tmp_path / "rates.jsonl"
    pass_rates(PROBLEMS, Scripted(), exact, path=file, progress=False)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:2], line + b"\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"rates\.jsonl, line 3: ") as caught:
        pass_rates(PROBLEMS, Scripted(), exact, path=file, progress=False)
    assert why in str(caught.value)


def by_the_batch(prompts: list[str], n: int) -> list[list[str]]:
    """Like a sampler: what is drawn follows from the batch as a whole."""
    return [[f"{prompt} {len(prompts)} {prompts[0]} {j}" for j in range(n)] for prompt in prompts]


def test_a_torn_batch_is_drawn_again_as_a_whole(tmp_path: Path) -> None:
    """Wherever the write was broken off, the same command ends with the bytes of the run that was not; so it does
    where guesses are made."""
    for rates in (pass_rates, guess_rates):
        file = tmp_path / f"{rates.__name__}.jsonl"
        whole = rates(PROBLEMS, by_the_batch, exact, 2, path=file, batch_size=4, progress=False)
        content = file.read_bytes()
        for end in (*range(0, len(content), 97), *(at + 1 for at, byte in enumerate(content) if byte == 10)):
            file.write_bytes(content[:end])
            assert rates(PROBLEMS, by_the_batch, exact, 2, path=file, batch_size=4, progress=False) == whole
            assert file.read_bytes() == content


def test_a_full_disk_leaves_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = tmp_path / "rates.jsonl", os.write
    room = [1200]

    def full(opened: int, content: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(opened, content[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        pass_rates(PROBLEMS, by_the_batch, exact, 2, path=file, batch_size=4, progress=False)
    assert [LEFT in json.loads(line) for line in file.read_bytes().splitlines()] == [False, True, True, True, False]
    monkeypatch.setattr(os, "write", write)
    whole = pass_rates(PROBLEMS, by_the_batch, exact, 2, batch_size=4, progress=False)
    assert pass_rates(PROBLEMS, by_the_batch, exact, 2, path=file, batch_size=4, progress=False) == whole


def test_half_a_line_is_cut_off_before_the_next_is_appended(tmp_path: Path) -> None:
    """Every file that grows by lines: a log, token weights, the blocks of an evaluation."""
    file = tmp_path / "metrics.jsonl"
    append_json_line(file, {"step": 1})
    for torn in (b'{"step": 2, "lo', bytes(100), b"[2]\n", b'{"step": 2, "left": 1}\n', b"x" * 200_000):
        before = file.read_bytes()
        file.write_bytes(before + torn)
        append_json_line(file, {"step": file, "loss": 0.5})
        assert file.read_bytes() == before + json.dumps({"step": str(file), "loss": 0.5}).encode() + b"\n"


def test_equal_problems_are_sampled_once_and_hostile_text_survives_the_file(tmp_path: Path) -> None:
    odd = 'line\nbreak \u2028 \ud800 \x00 "quote" 答え'
    problems = [{"prompt": odd, "solution": odd, "domain": "x"}] * 3
    asked: list[str] = []

    def echo(prompts: list[str], n: int) -> list[list[str]]:
        asked.extend(prompts)
        return [[p] * n for p in prompts]

    same = lambda prompts, completions, **c: [float(p == q) for p, q in zip(prompts, completions)]  # noqa: E731
    first = pass_rates(problems, echo, same, n=2, path=tmp_path / "r.jsonl", progress=False)
    assert pass_rates(problems, echo, same, n=2, path=tmp_path / "r.jsonl", progress=False) == first
    assert asked == [odd]
    assert first[2].completions == (odd, odd)
    messages = [{"prompt": [{"role": "user", "content": "hi"}], "solution": "1"}]
    made = pass_rates(
        messages,
        lambda p, n: [[[{"role": "assistant", "content": "1"}]] * n for _ in p],
        lambda prompts, completions, solution: [1.0] * len(completions),
        n=2,
        progress=False,
    )
    assert made[0].rate == 1.0


def test_a_wrong_number_of_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asked for 10 completions"):
        pass_rates(PROBLEMS, lambda p, n: [["1"] * (n - 1) for _ in p], exact, progress=False)
    with pytest.raises(ValueError, match="returned 1 rewards"):
        pass_rates(PROBLEMS, Scripted(), lambda **c: [1.0], progress=False)
    with pytest.raises(ValueError, match="`score` returned 1j for completion 3; allowed are finite numbers"):
        pass_rates(PROBLEMS, Scripted(), lambda prompts, **c: [1.0] * 3 + [1j] * (len(prompts) - 3), progress=False)
    with pytest.raises(ValueError, match="no column 'prompt'"):
        pass_rates([{"question": "?"}], Scripted(), exact, progress=False)
    with pytest.raises(ValueError, match="n=0"):
        pass_rates(PROBLEMS, Scripted(), exact, n=0, progress=False)


CHILD = """
import sys, time
from pathlib import Path
from grpo_lab.curation import pass_rates

log = Path(sys.argv[2])
def generate(prompts, n):
    with log.open("a") as file:
        file.write("".join(p + "\\n" for p in prompts))
    if sys.argv[3] == "hold" and len(log.read_text().splitlines()) >= 12:
        time.sleep(3600)
    return [["x"] * n for _ in prompts]

problems = [{"prompt": f"problem {k}"} for k in range(40)]
rates = pass_rates(problems, generate, lambda prompts, completions: [1.0] * len(completions), n=2, path=sys.argv[1],
                   batch_size=2, progress=False)
print(sum(rate.rate == 1.0 for rate in rates))
"""


@pytest.mark.not_fast
def test_a_killed_process_goes_on_and_a_second_writer_is_refused(tmp_path: Path) -> None:
    file, log = tmp_path / "rates.jsonl", tmp_path / "asked.txt"
    command = [sys.executable, "-c", CHILD, str(file), str(log)]
    first = subprocess.Popen([*command, "hold"], stdout=subprocess.PIPE)
    while not (log.exists() and len(log.read_text().splitlines()) >= 12):
        assert first.poll() is None
        time.sleep(0.01)
    with pytest.raises(ValueError, match="another process"):
        pass_rates([{"prompt": "x"}], Scripted(), exact, path=file, progress=False)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    saved = len(file.read_bytes().splitlines()) - 1
    assert saved >= 10
    second = subprocess.run([*command, "go on"], capture_output=True, check=True)
    assert second.stdout.strip() == b"40"
    asked = log.read_text().splitlines()
    assert len(set(asked)) == 40
    assert len(asked) <= 40 + 2  # the batch that was being generated, and nothing else, is done again


def test_guessing_asks_for_the_answer_only(tmp_path: Path) -> None:
    seen: list[str] = []

    def guess(prompts: list[str], n: int) -> list[list[str]]:
        seen.extend(prompts)
        assert n == 8
        return [["wrong"] * 7 + ["18" if p.startswith("9 ") else "wrong"] for p in prompts]

    rates = guess_rates(PROBLEMS, guess, exact, path=tmp_path / "guess.jsonl", progress=False)
    assert guessable(rates) == [False] * 9 + [True]
    assert all("Give only the final answer" in prompt for prompt in seen)
    assert '"request"' in json.dumps(json.loads((tmp_path / "guess.jsonl").read_text().splitlines()[0]))
    chat = answer_only([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "only 1")
    assert chat == [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\nonly 1"}]
    with pytest.raises(ValueError, match="user message"):
        answer_only([{"role": "system", "content": "s"}])


def test_a_band_excludes_its_ends() -> None:
    assert keep_band([0.0, 0.1, 0.2, 0.5, 0.7, 1.0, None], 0.1, 0.7) == [False, False, True, True, False, False, False]
    for wrong in (([1.5],), ([0.5], 0.5, 0.5), ([0.5], 1, 0)):
        with pytest.raises(ValueError, match=r"1\.5|band"):
            keep_band(*wrong)


def test_the_rendered_prompt_is_part_of_the_key(tmp_path: Path) -> None:
    """The same rows under another chat template are other problems: their samples are not these."""
    file, asked = tmp_path / "rates.jsonl", []
    for template in ("A: {}", "A: {}", "B: {}"):
        generate = Scripted()
        pass_rates(PROBLEMS, generate, exact, path=file, progress=False, rendered=template.format)
        asked.append(len(generate.asked))
    assert asked == [10, 0, 10]


def test_what_was_cut_is_kept_with_the_samples(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    written = lambda prompts, n: [[Written(str(j), j < 3) for j in range(n)] for _ in prompts]  # noqa: E731
    first = pass_rates(PROBLEMS, written, exact, n=4, path=file, progress=False)
    assert [rate.cut for rate in first] == [3] * 10
    assert first[0].completions == ("0", "1", "2", "3")
    assert pass_rates(PROBLEMS, Scripted(), exact, n=4, path=file, progress=False) == first
    assert pass_rates(PROBLEMS, Scripted(), exact, n=4, progress=False)[0].cut is None


def test_a_refusal_names_only_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    settings = {"files": {"config.json": "aa", "chat_template.jinja": "bb"}, "seed": 0}
    pass_rates(PROBLEMS[:1], Scripted(), exact, path=file, settings=settings, progress=False)
    other = {**settings, "files": {"config.json": "aa", "chat_template.jinja": "cc"}}
    with pytest.raises(ValueError, match=r"chat_template.*--overwrite") as caught:
        pass_rates(PROBLEMS[:1], Scripted(), exact, path=file, settings=other, progress=False)
    assert "config.json" not in str(caught.value)
    assert "seed" not in str(caught.value)
    with pytest.raises(ValueError, match="'n': 10"):
        pass_rates(PROBLEMS[:1], Scripted(), exact, n=8, path=file, settings=settings, progress=False)


@pytest.mark.parametrize(
    ("band", "kept"),
    [
        ("learnable", [1, 2, 3, 6]),
        ("hard", [1, 6]),
        ({"rule": "hard", "low": -0.1}, [0, 1, 6, 7]),
        ({"rule": "hard", "high": 0.6}, [1, 2, 6]),
        ({"fail_best_of": 8}, [0, 6]),
        ({"fail_best_of": 10}, [0]),
        ({"low": 0.4, "high": 0.6}, [2]),
    ],
    ids=str,
)
def test_which_pass_rates_a_rule_keeps(band: Any, kept: list[int], tmp_path: Path) -> None:
    """10 samples each: never right, 1, 5 and 9 times, always, unscorable, right only after eight, eight unscorable."""
    drawn = [[0] * 10, [1] + [0] * 9, [0, 1] * 5, [1] * 9 + [0], [1] * 10, [None] * 10, [0] * 8 + [1, 1]]
    drawn.append([None] * 8 + [0, 0])
    found = {i: PassRate(tuple(scores), ("",) * 10) for i, scores in enumerate(drawn)}
    rows = [{"prompt": str(i)} for i in found]
    shown: Any = {"selection": Selection(rows), "shown": "prompt", "sampling": SamplingSettings()}
    at = Filtering(tmp_path, StopRequests(tmp_path), rows=rows, reward=None, judge="", **shown)
    chosen = read(Filters, {"band": band}).band
    assert chosen is not None
    chosen.apply(at, found)
    assert at.left == kept
    assert at.selection.report().filters[0].dropped == 8 - len(kept)
