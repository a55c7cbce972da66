"""Natural deduction: each rule by hand, soundness against truth tables, proofs that are none, hostile texts."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from grpo_lab.data import proofs
from grpo_lab.rewards import ProofReward
from grpo_lab.rewards.puzzles import read_sequent, why_not
from grpo_lab.verifiers.logic import Formula, NoFormula, atoms, read, write

PROOFS = {
    "p & q |- q & p": "1. p & q [premise]\n2. q [&e 1]\n3. p [&e 1]\n4. q & p [&i 2,3]",
    "p -> q, q -> r |- p -> r": (
        "1. p -> q [premise]\n2. q -> r [premise]\n3. | p [assume]\n4. | q [->e 1,3]\n5. | r [->e 4,2]\n6. p -> r "
        "[->i 3-5]"
    ),
    "p v q |- q v p": (
        "1. p v q [premise]\n2. | p [assume]\n3. | q v p [vi 2]\n4. | q [assume]\n5. | q v p [vi 4]\n6. q v p [ve "
        "1,2-3,4-5]"
    ),
    "p -> q |- ~q -> ~p": (
        "1. p -> q [premise]\n2. | ~q [assume]\n3. | | p [assume]\n4. | | q [->e 1,3]\n5. | | # [~e 2,4]\n6. | ~p "
        "[~i 3-5]\n7. ~q -> ~p [->i 2-6]"
    ),
    "~~p |- p": "1. ~~p [premise]\n2. p [~~e 1]",
    "p, ~p |- q": "1. p [premise]\n2. ~p [premise]\n3. # [~e 1,2]\n4. q [#e 3]",
    "|- p v ~p": (
        "1. | ~(p v ~p) [assume]\n2. | | p [assume]\n3. | | p v ~p [vi 2]\n4. | | # [~e 1,3]\n5. | ~p [~i 2-4]\n6. | "
        "p v ~p [vi 5]\n"
        "7. | # [~e 1,6]\n8. p v ~p [raa 1-7]"
    ),
    "|- p -> q -> p": "1. | p [assume]\n2. | | q [assume]\n3. | | p [copy 1]\n4. | q -> p [->i 2-3]\n5. p -> (q -> "
        "p) [->i 1-4]",
    "p ∧ q ⊢ p ∨ ¬r": "1) p ∧ q [premise]\n2) p [∧e 1]\n3) p ∨ ¬r [∨i 2]",
}  # fmt: skip


@pytest.mark.parametrize("sequent", PROOFS)
def test_every_rule_in_a_proof_by_hand(sequent: str) -> None:
    assert why_not(PROOFS[sequent], sequent) == ""
    for wrapped in (
        f"<think>1. q [premise]</think>So:\n```\n{PROOFS[sequent]}\n```",
        f"It is\n{PROOFS[sequent]}\nDone.",
        f"<answer>{PROOFS[sequent]}</answer>",
    ):
        assert ProofReward()(completions=[wrapped], sequent=[sequent]) == [1.0]


@pytest.mark.parametrize(
    ("sequent", "text", "why"),
    [
        ("p |- q", "1. p [premise]\n2. q [copy 1]", "line 2: does not follow"),
        ("p |- q", "1. q [premise]", "line 1: no premise"),
        ("|- p", "1. p [assume]", "without an assumption"),
        ("|- p", "1. | p [assume]", "under no assumption"),
        ("|- p", "1. | p [assume]\n2. p [copy 1]", "line 1 cannot be seen"),
        ("|- p -> q", "1. | p [assume]\n2. | | q [assume]\n3. p -> q [->i 1-2]", "no part 1-2"),
        (
            "|- p -> q",
            "1. | p [assume]\n2. | | q [assume]\n3. | q [copy 2]\n4. p -> q [->i 1-3]",
            "line 2 cannot be seen",
        ),
        ("p |- p", "1. p [copy 1]", "line 1 cannot be seen"),
        ("p -> q, q |- p", "1. p -> q [premise]\n2. q [premise]\n3. p [->e 1,2]", "does not follow"),
        ("p v q |- p", "1. p v q [premise]\n2. p [&e 1]", "does not follow"),
        ("p v q |- p", "1. p v q [premise]\n2. | p [assume]\n3. p [ve 1,2-2,2-2]", "does not follow"),
        ("p |- p & q", "1. p [premise]\n2. p & q [&i 1,1]", "does not follow"),
        ("p & q |- p", "1. p & q [premise]\n3. p [&e 1]", "line 2: not of the form"),
        ("p |- p", "", "0 lines"),
        ("p |- p", "\n".join(f"{n}. p [premise]" for n in range(1, 202)), "201 lines"),
        ("p |- p", "1. p [magic]", "not of the form"),
        ("p |- p", "1. p [premise 1,2-3,x]", "not of the form"),
        ("|- ~p", "1. | p [assume]\n2. | p [copy 1]\n3. ~p [~i 1-2]", "does not follow"),
        ("p |- #", "1. p [premise]\n2. # [~e 1,1]", "does not follow"),
    ],
)
def test_what_is_no_proof_says_where(sequent: str, text: str, why: str) -> None:
    assert why in why_not(text, sequent)
    assert ProofReward()(completions=[text], sequent=[sequent]) == [0.0]


def holds(formula: Formula, true: set[str]) -> bool:
    """The truth table, by the meaning of the signs."""
    if len(formula) == 1:
        return formula[0] in true
    if formula[0] == "~":
        return not holds(formula[1], true)
    left, right = holds(formula[1], true), holds(formula[2], true)
    return {"&": left and right, "v": left or right, "->": not left or right}[formula[0]]


def entails(sequent: str) -> bool:
    premises, goal = read_sequent(sequent)
    names = sorted(set().union(atoms(goal), *map(atoms, premises)))
    worlds = [set(itertools.compress(names, bits)) for bits in itertools.product((0, 1), repeat=len(names))]
    return all(holds(goal, world) for world in worlds if all(holds(one, world) for one in premises))


@pytest.mark.not_fast
def test_made_proofs_are_right_and_no_change_of_them_proves_what_is_not_so() -> None:
    """Soundness: whatever text the checker accepts, the truth table agrees. Most changes of one word must be
    refused."""
    rows = proofs(150, seed=2, steps=(2, 9), template="none")
    assert ProofReward()(completions=rows["worked_solution"], sequent=rows["sequent"]) == [1.0] * 150
    assert all(entails(sequent) for sequent in rows["sequent"])
    rng = random.Random(0)
    accepted = 0
    for row in rows:
        for _ in range(12):
            lines = row["solution"].splitlines()
            place = rng.randrange(len(lines))
            before, after = rng.choice([
                ("p", "q"), ("q", "p"), ("&", "v"), ("->", "&"), ("~", ""), ("| ", ""), ("[", "~["), ("1", "2"),
                ("2", "1"), ("assume", "premise"), ("p", "~p"), (" ->e", " &i"),
            ])  # fmt: skip
            lines[place] = lines[place].replace(before, after, 1)
            changed = "\n".join(lines)
            goal = rng.choice(
                (row["sequent"], row["sequent"].replace("|- ", "|- ~", 1), row["sequent"].replace(before, after, 1))
            )
            try:
                right = why_not(changed, goal) == ""
            except NoFormula:
                continue
            accepted += right and changed != row["solution"]
            assert not right or entails(goal), (goal, changed)
    assert accepted < 150 * 12 / 5


@pytest.mark.parametrize(
    ("text", "written"),
    [("p", "p"), ("~~p", "~~p"), ("p & q & r", "(p & q) & r"), ("p -> q -> r", "p -> (q -> r)"),
     ("p v q & ~r -> #", "(p v (q & ~r)) -> #"),
     ("(p→q)∧¬⊥", "(p -> q) & ~#"), ("((p))", "p")],
)  # fmt: skip
def test_formulas_are_read_and_written(text: str, written: str) -> None:
    assert write(read(text)) == written
    assert read(write(read(text))) == read(text)


HOSTILE = [
    "1. " + "(" * 10_000 + "p" + ")" * 10_000 + " [premise]", "1. " + "~" * 100_000 + "p [premise]",
    "1. p [" + "1" * 79 + "x]", "1. p [&i " + "1," * 35 + "x]", "1. " + "| " * 50_000 + "p [assume]",
    "1. p [premise]\n" * 50_000, "1." * 50_000, "1. p" + " " * 100_000 + "[premise", "1. p & " * 20_000, "[" * 100_000,
    "1. p\0 [premise]", "1. \u202ep [premise]", "１. p [premise]", "1. p [premise] # |- q", "1. p [__import__('os')]",
    "<answer>" * 10_000, "```\n" * 20_000, "1. p -> p -> " * 5_000 + "p [premise]", "\n" * 100_000,
    "99999999999999. p [premise]", "1. p [copy 0]", "1. p [copy -1]", "1. p [->i 1-1]", "1. vvv [premise]",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_earn_nothing_at_once(text: str) -> None:
    start = time.process_time()
    assert ProofReward()(completions=[text], sequent=["p |- q"]) == [0.0]
    assert time.process_time() - start < 1.0


def test_a_sequent_that_is_none_is_unscorable() -> None:
    rows = ["", "p", "p |- q |- r", "p ||- q", None, "p |- vv"]
    assert ProofReward()(completions=["1. p [premise]"] * len(rows), sequent=rows) == [None] * len(rows)


def test_splits_share_no_sequent_and_sizes_are_as_asked() -> None:
    found = {split: proofs(200, seed=1, split=split, steps=(2, 4)) for split in ("train", "cold_start", "test")}
    marks = {
        split: {(*tuple(sorted(row.split(" |- ")[0].split(", "))), row) for row in rows["sequent"]}
        for split, rows in found.items()
    }
    assert not marks["train"] & marks["test"]
    assert not marks["train"] & marks["cold_start"]
    assert all(set(rows["steps"]) <= {2, 3, 4} for rows in found.values())
    with pytest.raises(ValueError, match="steps"):
        proofs(1, steps=(0, 3))
    with pytest.raises(ValueError, match="dev"):
        proofs(1, split="dev")
