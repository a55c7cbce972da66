"""A calculator, and word problems whose solutions call it: each calculation is a call, the answer comes at the end.

Ann buys 48 packs of 16 stamps. Ann loses 95 of the stamps. How many stamps does Ann have now?

calculate(expression="48*16")        768
calculate(expression="768-95")       673
#### 673
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from grpo_lab.data import word_problems
from grpo_lab.turns.turn_settings import repeatable

OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
CALCULATION = re.compile(r"(\d+[-+*/]\d+)=(\d+)")
LONGEST = 100


@repeatable
def calculate(expression: str) -> str:
    """
    Calculate exactly.

    Args:
        expression: Whole numbers with + - * / and brackets, such as "3*(4+5)".
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters; this one has {len(expression)}")
    try:
        return str(value_of(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} cannot be calculated: {type(error).__name__}") from None


def value_of(node: ast.AST) -> Fraction:
    """Return the value of whole numbers, joined by the four operations."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError("only whole numbers with + - * / and brackets can be calculated")


def problems(
    n: int,
    seed: int = 0,
    split: str = "train",
    steps: tuple[int, int] = (2, 3),
    largest: int = 99,
    guessed: float = 0.0,
) -> list[dict[str, Any]]:
    """Return ``n`` word problems. ``guessed``: the share of worked solutions that are the bare answer; the others call
    the calculator for each calculation."""
    rows = word_problems(n, seed, split, steps, largest=largest, blurted=guessed)
    return [{**row, "worked_solution": transcript(row["worked_solution"])} for row in rows]


def transcript(worked_solution: str) -> list[dict[str, Any]]:
    """Return the messages of a solution: a call for each calculation, the calculator's answer, the last line."""
    messages: list[dict[str, Any]] = []
    for expression, value in CALCULATION.findall(worked_solution):
        function = {"name": "calculate", "arguments": {"expression": expression}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "name": "calculate", "content": value})
    messages.append({"role": "assistant", "content": worked_solution.split("\n")[-1]})
    return messages


def called(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return for each completion whether it called a tool. It is only watched."""
    return [float(any(message.get("tool_calls") for message in one)) for one in completions]
