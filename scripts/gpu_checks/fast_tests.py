"""Section that runs the tests of ``make test-fast`` where a GPU is visible, and names those that fail.

Each line of pytest's is read as it is printed, so that a run that is ended at its limit has named the failures so far.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from gpu_checks.section import Row, Setting, verdict

ROOT = Path(__file__).resolve().parents[2]
FAST = "not slow and not not_fast and not thorough and not vllm"
#: the tests of the tiny form
FEW = ("tests/unit/losses/test_gae.py", "tests/unit/rewards/test_schedules.py")
#: so many seconds before its limit the section ends the run itself, and says how far it came
MARGIN = 3.0
_SAID = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_TEST = re.compile(r"tests/\S+\.py::\S+")


def section(setting: Setting) -> Iterator[Row]:
    yield from told(command(setting), setting.left() - MARGIN, where=str(setting.device))


def command(setting: Setting) -> list[str]:
    """Return the command of pytest, on several processes if xdist is installed."""
    words = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "--tb=line", "-m", FAST]
    spread = ["-n", str(min(16, os.cpu_count() or 1)), "--dist", "loadfile"] if find_spec("xdist") else []
    return [*words, *(FEW if setting.tiny else spread)]


def told(words: Sequence[str], seconds: float, where: str) -> Iterator[Row]:
    """Run pytest by the command ``words``; yield a row for each test that failed, and one with their number. Raises
    TimeoutError if the tests are not done after ``seconds``, and RuntimeError if pytest ends otherwise. ``where``: the
    device, for the rows."""
    counts: Counter[str] = Counter()
    running = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    late = threading.Timer(max(seconds, 0.1), running.terminate)
    late.start()
    assert running.stdout is not None
    for line in running.stdout:
        print(line, end="")
        word = _SAID.search(line)
        test = _TEST.search(line)
        if word is None or test is None or line.startswith(("FAILED", "ERROR")):  # pytest's summary repeats them
            continue
        counts[word[1]] += 1
        if word[1] in ("FAILED", "ERROR"):
            yield verdict("a fast test that failed", test[0], "none", False, device=where)
    code = running.wait()
    in_time = late.is_alive()
    late.cancel()
    bad = counts["FAILED"] + counts["ERROR"]
    asked = f"fast tests that failed, of {counts.total()}"
    if in_time and code in (0, 1) and counts.total():
        yield verdict(asked, bad, "0", bad == 0, device=where)
        return
    yield verdict(f"{asked} until they were ended", bad, device=where)
    if in_time:
        raise RuntimeError(f"pytest did not come to its end: code {code}, {counts.total()} tests told")
    raise TimeoutError(f"not all fast tests had run after {seconds:.0f} s")
