"""``tests/stress/kill_in_turns.py`` with one kill of each kind; with five of each: `-m thorough`."""

from __future__ import annotations

from pathlib import Path

import pytest

import forked

SCRIPT = Path(__file__).with_name("kill_in_turns.py")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.thorough)])
def test_no_call_is_made_twice_and_weights_are_as_promised(kills: int, tmp_path: Path) -> None:
    words = [str(SCRIPT), "--kills", str(kills), "--steps", str(2 * kills), "--folder", str(tmp_path)]
    done = forked.run(words, TRL_EXPERIMENTAL_SILENCE="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count(f"kills={kills}") == 2
