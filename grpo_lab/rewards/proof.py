"""ProofReward: is the completion a proof of the row's sequent, by natural deduction for propositional logic?

    reward = 1[every line follows by its rule, and the last is the goal under no assumption]

The checker is small, kept here and knows one format (``verifiers.logic``). A proof can be checked where an answer
cannot: there is nothing to guess, and as many right texts as there are proofs. Read is the inside of the last
``<answer>``, else the last fenced block, else the text from its last line ``1.`` on, to the first line that is no line
of a proof.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_lab.rewards.completion import RowReward, answer_block
from grpo_lab.verifiers.logic import Formula, NoFormula, NotAProof, check, read

_FIRST, _NUMBERED = re.compile(r"^\s*1[.):]"), re.compile(r"^\s*[0-9]{1,4}[.):]")
_TURNSTILE = re.compile(r"\|-|⊢")


def read_sequent(text: str) -> tuple[list[Formula], Formula]:
    """``p -> q, p |- q``: premises and goal. ``NoFormula`` for another text."""
    sides = _TURNSTILE.split(text)
    if len(sides) != 2:
        raise NoFormula("a sequent is `premises |- goal`")
    return [read(part) for part in sides[0].split(",") if part.strip()], read(sides[1])


def why_not(completion: str, sequent: str) -> str:
    """What is wrong with the proof in ``completion``; empty where it is one. ``NoFormula``: the sequent is none."""
    premises, goal = read_sequent(sequent)
    try:
        check(_proof_lines(answer_block(completion)), premises, goal)
    except NotAProof as error:
        return str(error)
    return ""


def _proof_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [place for place, line in enumerate(lines) if _FIRST.match(line)]
    taken: list[str] = []
    for line in lines[starts[-1] :] if starts else []:
        if not _NUMBERED.match(line):
            break
        taken.append(line)
    return "\n".join(taken)


class ProofReward(RowReward):
    """1.0 for a proof of the row's ``sequent`` (``p -> q, p |- q``), else 0.0; None where a row's sequent is none."""

    columns = ("sequent",)

    def __init__(self) -> None:
        self.__name__ = "proof_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return "ProofReward()"

    def score(self, text: str, *row: Any) -> float | None:
        (sequent,) = row
        try:
            return float(why_not(text, sequent if isinstance(sequent, str) else "") == "")
        except NoFormula:
            return None
