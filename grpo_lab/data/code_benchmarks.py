"""HumanEval (arXiv 2107.03374) and MBPP (arXiv 2108.07732): functions to write, with the tests that ``CodeReward``
runs."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import PromptTemplate, find_template
from grpo_lab.data.rows import Row, read_rows, required_column, text_of, to_dataset

if TYPE_CHECKING:
    from datasets import Dataset

_TASK = ("text", "prompt")
_IMPORTS = ("test_imports", "test_setup_code")


def load_humaneval(
    source: str | Path = "openai/openai_humaneval",
    split: str = "test",
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """HumanEval, or a file written like it.

    The question shows the function's head and docstring in a fenced block and asks for the whole function. What the
    prompt defines beside that function (imports, ``encode_cyclic`` of HumanEval/38) goes into the tests, so that the
    tests' own copy is what they call.

    ``source``, ``template`` and ``system_prompt`` are those of ``load_gsm8k``.

    Args:
        split: HumanEval has ``test`` alone.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``tests``, ``entry_point``, ``solution`` (a program that
        passes),
        ``worked_solution`` (the same in a fenced block), and what else the rows hold.

    Raises:
        ValueError: a column is missing, or a row's prompt is no Python that defines its ``entry_point``.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    for name in ("prompt", "canonical_solution", "test", "entry_point"):
        required_column(rows, (name,), source)
    examples = []
    for number, row in enumerate(rows, start=1):
        head, test = text_of(row, "prompt", number, source), text_of(row, "test", number, source)
        name = text_of(row, "entry_point", number, source)
        program = head + text_of(row, "canonical_solution", number, source)
        asked = (
            "Complete this Python function. Answer with everything above and its body in one Python "
            f"block.\n\n{fenced(head)}"
        )
        tests = f"{_beside(head, name, number, source)}\n{test}"
        rest = _without(row, "prompt", "canonical_solution", "test")
        examples.append(rest | {"question": asked, "tests": tests, "entry_point": name} | _solved(program))
    return to_dataset(examples, form)


def load_mbpp(
    source: str | Path = "google-research-datasets/mbpp",
    split: str = "train",
    template: str | PromptTemplate = "chat",
    *,
    config: str = "full",
    shown_tests: int = 1,
    system_prompt: str | None = None,
) -> Dataset:
    """MBPP in its ``full`` or ``sanitized`` form, or a file written like either.

    The question is the task and the first ``shown_tests`` of its assertions, without which nobody knows the function's
    name.

    ``source``, ``template`` and ``system_prompt`` are those of ``load_gsm8k``.

    Args:
        split: ``train``, ``test``, ``validation`` or ``prompt``.
        config: which form, where ``source`` is a hub name.
        shown_tests: assertions in the question. The paper shows all three; a policy that is paid by assertions it has
            seen may learn their answers instead of the function.

    Returns:
        columns as ``load_humaneval``'s; ``entry_point`` is the function of the solution that the tests name (some are
        called as one of
        Python's own, ``sum``), or None.

    Raises:
        ValueError: a column is missing, ``test_list`` is no list of assertions, or ``shown_tests`` is less than 1.
    """
    form = find_template(template, system_prompt)
    if shown_tests < 1:
        raise ValueError(
            f"shown_tests is {shown_tests}; at least 1 is needed: the task alone does not name the function"
        )
    rows = read_rows(source, split, config=config if str(source) in {"google-research-datasets/mbpp", "mbpp"} else None)
    task = required_column(rows, _TASK, source)
    for name in ("code", "test_list"):
        required_column(rows, (name,), source)
    return to_dataset((_mbpp(row, task, shown_tests, n, source) for n, row in enumerate(rows, start=1)), form)


def _mbpp(row: Row, task: str, shown_tests: int, number: int, source: str | Path) -> Row:
    tests = _lines(row, "test_list", number, source)
    shown = fenced("\n".join(tests[:shown_tests]))
    asked = f"{text_of(row, task, number, source).strip()}\n\nYour code should pass {_many(shown_tests)}:\n\n{shown}"
    first = [line for name in _IMPORTS if row.get(name) for line in _lines(row, name, number, source)]
    rest = _without(row, task, "code", "test_list", *_IMPORTS)
    program = text_of(row, "code", number, source).replace("\r\n", "\n")
    judged = {"tests": "\n".join([*first, *tests]), "entry_point": _tested(program, "\n".join(tests))}
    return rest | {"question": asked} | judged | _solved(program)


def fenced(program: str) -> str:
    """A Python block."""
    return f"```python\n{program.strip(chr(10))}\n```"


def _solved(program: str) -> dict[str, str]:
    return {"solution": program, "worked_solution": fenced(program)}


def _many(shown: int) -> str:
    return "this test" if shown == 1 else "these tests"


def _beside(head: str, name: str, number: int, source: str | Path) -> str:
    """Everything on the prompt's top level but the function that is asked for."""
    try:
        parts = ast.parse(head).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"source {str(source)!r}, row {number}: column 'prompt' is no Python: {error}") from None
    named = [part for part in parts if getattr(part, "name", None) == name]
    if not named:
        raise ValueError(
            f"source {str(source)!r}, row {number}: column 'prompt' does not define its entry_point {name!r}"
        )
    return "\n\n".join(ast.unparse(part) for part in parts if part not in named)


def _tested(program: str, tests: str) -> str | None:
    """The last function of ``program`` whose name the tests use; None where they are no Python or name none."""
    try:
        made = [part.name for part in ast.parse(program).body if isinstance(part, ast.FunctionDef)]
        used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next((name for name in reversed(made) if name in used), None)


def _lines(row: Row, column: str, number: int, source: str | Path) -> list[str]:
    """A cell with a text or a list of texts."""
    value: Any = row.get(column)
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, Sequence) or not lines or not all(isinstance(line, str) for line in lines):
        raise ValueError(
            f"source {str(source)!r}, row {number}: column {column!r} is {value!r}; a list of lines is needed"
        )
    return list(lines)


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}
