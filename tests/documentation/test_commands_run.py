"""Every command of every page is run by a test that is named, or says what it needs that a test has not
(``held.HELD``).

That a command parses is ``test_blocks.test_bash``'s; here it is that somebody has run it. A command that no line fits
fails.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from documentation.blocks import ROOT, Block, blocks, loose_commands, pages
from documentation.commands import SHELL
from documentation.held import HELD

NEEDS = ("gpu", "network", "hours", "minutes")
#: what another founder's page is about to need: patterns that no page uses yet
AHEAD = {"make gpu-check*", "python scripts/gpu_check.py*", "grpo-lab quickstart*"}


def typed() -> Iterator[tuple[str, str]]:
    """``(where, command)`` of everything that a page tells the reader to type and that no marker sets apart."""
    for page in pages():
        fenced = [block for block in blocks(page) if block.language == "bash" and block.needs is None]
        for block in [*fenced, *loose_commands(page)]:
            yield from ((block.where, command) for command in commands(block))


def commands(block: Block) -> Iterator[str]:
    for line in block.code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "||", ";", "|", "&"):
                words.append(word)
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words and words[0] not in SHELL:
                yield " ".join(words)
            words = []


def held(command: str) -> str | None:
    """The first pattern that fits."""
    return next((pattern for pattern in HELD if fnmatchcase(command, pattern)), None)


def test_every_command_is_run_by_a_test_or_says_why_not() -> None:
    loose = [f"{where}: {command}" for where, command in typed() if held(command) is None]
    assert not loose, "add a line to tests/documentation/held.py, or a marker `<!-- needs: … -->`:\n" + "\n".join(loose)


@pytest.mark.parametrize("pattern", HELD)
def test_who_holds_it_is_there(pattern: str) -> None:
    answer = HELD[pattern]
    if isinstance(answer, tuple):
        assert answer[0] in NEEDS
        assert answer[1]
        return
    file, _, name = answer.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), answer


def test_no_line_is_left_over() -> None:
    used = {held(command) for _, command in typed()}
    assert not set(HELD) - used - AHEAD, "no page has such a command any more"


def test_a_new_command_would_be_seen() -> None:
    assert held("grpo-lab polish runs/mine") is None
    assert held("python scripts/never_run.py") is None
    block = Block("a.md", 1, "bash", "cd x && CUDA=1 make train | tee log\n", None)
    assert list(commands(block)) == ["make train", "tee log"]
