"""Generate seeded sequents of propositional logic, each with the proof that it was made from.

A proof is grown backwards from a goal: each formula still to be shown is derived by a rule from others, taken from an
open assumption, or made a premise. Then it is written down in the format of ``grpo_lab.verifiers.logic``. The hash of
the sequent (premises sorted) decides its split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_lab.data.made import checked_range, checked_split, different, split_of, take
from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import to_dataset
from grpo_lab.verifiers.logic import FALSE, Formula, write

if TYPE_CHECKING:
    from datasets import Dataset

_ATOMS = "pqrs"
RULES = (
    "Rules: premise, assume, copy n, &i m,n, &e m, vi m, ve m,a-b,c-d, ->i a-b, ->e m,n, ~i a-b, ~e m,n, #e m, "
    "~~e m, raa a-b. "
    "One line a step: `n. formula [rule lines]`, with one | before the formula for each open assumption."
)


@dataclass
class _Step:
    """A node of a proof that is being grown.

    Attributes:
        formula: what the step shows.
        rule: the rule of ``verifiers.logic`` that derives it, or ``premise``, or ``assumed`` (an open assumption).
        rests_on: the steps that it is derived from.
        assumptions: for each of these the assumption that is opened for it; None if there is none.
    """

    formula: Formula
    rule: str
    rests_on: list[_Step] = field(default_factory=list)
    assumptions: list[Formula | None] = field(default_factory=list)

    def size(self) -> int:
        """Return the number of lines that the step and all below it take, without premises."""
        under = sum(one is not None for one in self.assumptions)
        return (self.rule not in ("premise", "assumed")) + under + sum(step.size() for step in self.rests_on)


def proofs(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (2, 6),
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """Generate ``n`` different provable sequents: columns ``prompt, template, question, sequent, solution,
    worked_solution, steps``. Both solutions are the known proof, and ``steps`` is the number of its lines without
    premises.

    Args:
        seed: the same arguments give the same rows.
        split: ``train``, ``cold_start`` or ``test``; no sequent is in two of them.
        steps: fewest and most lines of the known proof, from 1 to 30, not counting premises. A shorter proof may exist.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        system_prompt: system turn, for template ``chat`` alone.

    Raises:
        ValueError: an argument is out of its range, or there are fewer than ``n`` such sequents.
    """
    form = find_template(template, system_prompt)
    sizes = checked_range("steps", steps, 1, 30)
    rng = random.Random(f"proofs/{seed}/{split}")
    rows = different(lambda: _drawn(rng, sizes), checked_split(split), split_of)
    return to_dataset(take(rows, n, "sequents", "Raise steps", split=split, steps=sizes), form)


def _drawn(rng: random.Random, sizes: tuple[int, int]) -> tuple[str, dict[str, Any]] | None:
    """Draw a sequent. Return its key (the sequent with its premises sorted) and its row; None if its goal or `#` is
    among its premises, or its proof without them has fewer or more lines than ``sizes`` (fewest, most) allow."""
    step = _Grown(rng).show(_formula(rng, 2), rng.randint(*sizes), ())
    premises, lines = _written(step)
    goal = write(step.formula)
    count = len(lines) - len(premises)
    if not sizes[0] <= count <= sizes[1] or {"#", goal} & set(premises):
        return None
    sequent = f"{', '.join(premises)} |- {goal}".strip()
    proof = "\n".join(lines)
    question = f"Prove {sequent} by natural deduction. {RULES}"
    row = {"question": question, "sequent": sequent, "solution": proof, "worked_solution": proof, "steps": count}
    return f"{sorted(premises)} |- {goal}", row


def _formula(rng: random.Random, depth: int) -> Formula:
    """Draw a formula that is nested at most ``depth`` deep."""
    if depth == 0 or rng.random() < 0.3:
        return (rng.choice(_ATOMS),)
    sign = rng.choice(("&", "v", "->", "->", "~"))
    if sign == "~":
        return ("~", _formula(rng, depth - 1))
    return (sign, _formula(rng, depth - 1), _formula(rng, depth - 1))


class _Grown:
    """Grows a proof backwards, from a goal to premises, by random rules."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def show(self, goal: Formula, budget: int, assumed: tuple[Formula, ...]) -> _Step:
        """Return a proof of ``goal`` of about ``budget`` lines; with none left the goal becomes a premise.

        ``assumed``: the assumptions that are open here.
        """
        if goal in assumed:
            return _Step(goal, "assumed")
        if budget <= 0:
            return _Step(goal, "premise")
        introductions = {"&": "&i", "v": "vi", "->": "->i", "~": "~i", "#": "~e"}
        ways = []
        if len(goal) > 1 or goal == FALSE:
            ways = [introductions[goal[0]]] * 4
        ways += ["->e", "&e", "~~e"]
        if budget >= 4 and goal != FALSE:
            ways += ["ve", "raa"]
        return self._by(self.rng.choice(ways), goal, budget - 1, assumed)

    def _by(self, rule: str, goal: Formula, budget: int, assumed: tuple[Formula, ...]) -> _Step:
        """Return a proof of ``goal`` whose last line is by ``rule``, with ``budget`` lines for what that rests on."""

        def from_one(formula: Formula, budget: int) -> _Step:
            return _Step(goal, rule, [self.show(formula, budget, assumed)], [None])

        def from_two(first: Formula, second: Formula, part: int) -> _Step:
            left = self.show(first, part, assumed)
            return _Step(goal, rule, [left, self.show(second, budget - left.size(), assumed)], [None, None])

        def under(assumption: Formula, formula: Formula, budget: int) -> _Step:
            return self.show(formula, budget - 1, (*assumed, assumption))

        match rule:
            case "&i":
                return from_two(goal[1], goal[2], budget // 2)
            case "vi":
                return from_one(goal[self.rng.choice((1, 2))], budget)
            case "->i":
                return _Step(goal, rule, [under(goal[1], goal[2], budget)], [goal[1]])
            case "~i" | "raa":
                denied = goal[1] if rule == "~i" else ("~", goal)
                return _Step(goal, rule, [under(denied, FALSE, budget)], [denied])
            case "~e":
                refuted = [one[1] for one in assumed if one[0] == "~"]
                middle = self.rng.choice(refuted or list(assumed) or [_formula(self.rng, 1)])
                return from_two(("~", middle), middle, budget // 2)
            case "->e":
                middle = self.rng.choice([*assumed, _formula(self.rng, 1)])
                return from_two(("->", middle, goal), middle, budget // 3)
            case "&e":
                other = _formula(self.rng, 1)
                return from_one(("&", goal, other) if self.rng.random() < 0.5 else ("&", other, goal), budget // 2)
            case "~~e":
                return from_one(("~", ("~", goal)), budget)
        # ve
        first = _formula(self.rng, 1)
        second = _formula(self.rng, 1)
        whole = self.show(("v", first, second), 0, assumed)
        left = under(first, goal, budget // 2)
        right = under(second, goal, budget - left.size() - 1)
        return _Step(goal, rule, [whole, left, right], [None, first, second])


def _written(goal: _Step) -> tuple[list[str], list[str]]:
    """Return the premises of a proof as texts, and all its lines, those of the premises first."""
    premises = list(dict.fromkeys(write(formula) for formula in _premises(goal)))
    scope = {text: number for number, text in enumerate(premises, start=1)}
    lines = [f"{number}. {text} [premise]" for text, number in scope.items()]
    _write_lines(goal, lines, scope, 0)
    return premises, lines


def _premises(step: _Step) -> Iterator[Formula]:
    """Yield the premises that a step rests on, one as often as it is used."""
    if step.rule == "premise":
        yield step.formula
    for one in step.rests_on:
        yield from _premises(one)


def _write_lines(step: _Step, lines: list[str], scope: dict[str, int], depth: int) -> int:
    """Append to ``lines`` those that derive ``step``, and return the number of the line that shows it.

    ``scope``: formulas that lines in reach show already, with their numbers; such a formula is not derived again.
    ``depth``: number of open assumptions.
    """

    def add(text: str, depth: int) -> int:
        lines.append(f"{len(lines) + 1}. {'| ' * depth}{text}")
        return len(lines)

    shown = write(step.formula)
    if shown in scope:
        return scope[shown]
    places = []
    for one, assumption in zip(step.rests_on, step.assumptions, strict=True):
        if assumption is None:
            places.append(str(_write_lines(one, lines, scope, depth)))
            continue
        first = add(f"{write(assumption)} [assume]", depth + 1)
        last = _write_lines(one, lines, scope | {write(assumption): first}, depth + 1)
        if last != len(lines):  # derived earlier: copied, as a subproof ends with what it shows
            last = add(f"{write(one.formula)} [copy {last}]", depth + 1)
        places.append(f"{first}-{last}")
    scope[shown] = add(f"{shown} [{step.rule} {','.join(places)}]", depth)
    return scope[shown]
