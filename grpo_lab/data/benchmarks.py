"""Load public benchmarks, or files written like them: GSM8K (arXiv 2110.14168), MATH (2103.03874; MATH-500, AIME),
and coding tasks with the tests that ``CodeReward`` runs, HumanEval (2107.03374) and MBPP (2108.07732)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.prompts import PromptTemplate, find_template, with_shots
from grpo_lab.data.rows import Row, first_present, place_of, read_rows, required_column, text_of, to_dataset
from grpo_lab.verifiers.canonical import group_end
from grpo_lab.verifiers.exact_numbers import without_thousands

if TYPE_CHECKING:
    from datasets import Dataset

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"(?:[^\s$.,;]|[.,](?=\d))+")
_LEVEL = re.compile(r"(?:level\s*)?(\d+)", re.IGNORECASE)
_IMPORTS = ("test_imports", "test_setup_code")
"""Columns of MBPP, in its two forms, with the lines that must run before the tests."""


def load_gsm8k(
    source: str | Path = "openai/gsm8k",
    split: str = "train",
    template: str | PromptTemplate = "chat",
    *,
    shots: int = 0,
    system_prompt: str | None = None,
) -> Dataset:
    """Load GSM8K, or a file written like it, ready for training.

    Args:
        source: hub name, local folder with ``<split>.jsonl``, or one ``.jsonl`` file (then ``split`` is ignored).
        split: ``train`` or ``test``; in a local folder any file stem.
        template: name of a prompt template (``grpo_lab.data.prompts``).
        shots: number of solved problems before every question, the first of the split ``train`` (of a file: its first).
            No row asks one of them. Text templates only.
        system_prompt: system turn, for templates that are message lists.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``solution`` (the column ``gold_answer``, else the number after
        ``####``, without thousands commas), ``worked_solution`` if the file has one, and the other columns of the rows.
    """
    form = find_template(template, system_prompt)
    examples = _gsm8k(source, split)
    if shots:
        solved = [(row["question"], row.get("worked_solution", "")) for row in _gsm8k(source, "train")[: max(shots, 0)]]
        if len(solved) != shots or not all(solution for _, solution in solved):
            found = sum(bool(solution) for _, solution in solved)
            raise ValueError(f"`shots` is {shots}, and {str(source)!r} begins with {found} worked solutions")
        form = with_shots(form, solved)
        asked = {question for question, _ in solved}
        examples = [row for row in examples if row["question"] not in asked]
    return to_dataset(examples, form)


def _gsm8k(source: str | Path, split: str) -> list[Row]:
    """Read the rows of a split, with ``question``, ``solution`` and ``worked_solution`` as in ``load_gsm8k``."""
    rows = read_rows(source, split, config="main" if str(source) in {"openai/gsm8k", "gsm8k"} else None)
    golds = ("gold_answer", "final_answer")
    worked = ("answer", "gold_solution", "solution", "worked_solution")

    def after_mark(text: str) -> str:
        if "####" in text:
            return text.rpartition("####")[2]
        return ""

    examples = _answered(rows, source, ("question", "problem"), golds, worked, after_mark, "answer after '####'")
    return [row | {"solution": without_thousands(row["solution"])} for row in examples]


def load_math(
    source: str | Path = "HuggingFaceH4/MATH-500",
    split: str = "test",
    template: str | PromptTemplate = "qwen_math",
    *,
    levels: list[int] | None = None,
    system_prompt: str | None = None,
) -> Dataset:
    """Load a MATH-like data set, ready for training or evaluation.

    ``template`` and ``system_prompt`` are those of ``load_gsm8k``.

    Args:
        source: as ``load_gsm8k``'s; in a folder ``math500.jsonl`` also serves as ``test``.
        split: ``train`` or ``test``; in a local folder any file stem, such as ``aime24``.
        levels: keep only problems of these difficulties, such as ``[3, 4, 5]``, by the column ``level`` (``3`` or
            ``"Level 3"``). A row whose level is no number (MATH has two ``Level ?``) is dropped.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``solution`` (the final answer in LaTeX, as written: AIME's
        leading zeros stay), ``worked_solution`` if the file has one, and the rest (level, subject, …). The final answer
        is the column ``gold_answer`` or ``answer``; without one, the last ``\\boxed{…}`` of ``solution``.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split, also=("math500",) if split == "test" else ())
    if levels is not None:
        rows = _of_levels(rows, levels, source)
    golds = ("gold_answer", "answer", "final_answer", "gt_answer", "ground_truth")
    worked = ("solution", "worked_solution", "gold_solution")
    examples = _answered(rows, source, ("problem", "question"), golds, worked, last_boxed, "complete \\boxed{…}")
    return to_dataset(examples, form)


def _answered(
    rows: list[Row],
    source: str | Path,
    questions: Sequence[str],
    golds: Sequence[str],
    workeds: Sequence[str],
    final: Callable[[str], str | None],
    wanted: str,
) -> list[Row]:
    """Return the rows with their question, answer and worked solution in columns ``question``, ``solution`` and
    ``worked_solution``; the other columns stay.

    Args:
        source: where the rows come from, for messages.
        questions: names that the column of questions may have; the first that is there counts.
        golds: names that a column of bare answers may have.
        workeds: names that the column of worked solutions may have.
        final: function that finds the answer in a worked solution, used if there is no column of bare answers.
        wanted: what ``final`` looks for, in words.

    Raises:
        ValueError: there is no column of questions, or neither of the others; a row has no question, or no answer.
    """
    question = required_column(rows, questions, source)
    gold = first_present(rows, golds)
    if gold:
        worked = first_present(rows, workeds)
    else:
        worked = required_column(rows, (*workeds, *golds), source)
    examples = []
    for number, row in enumerate(rows, start=1):
        example = {name: value for name, value in row.items() if name not in {question, gold, worked}}
        example["question"] = text_of(row, question, number, source)
        answer: str | None = None
        if gold:
            answer = text_of(row, gold, number, source)
        written = None
        if worked and (not gold or row.get(worked)):
            written = text_of(row, worked, number, source)
        if written is not None:
            example["worked_solution"] = written
            if answer is None:
                answer = final(written)
        if not (answer or "").strip():
            raise ValueError(
                f"{place_of(source, number)}: no {wanted} in column {worked!r}, which ends "
                f"{(written or '')[-60:]!r}; a bare answer is read from a column {' or '.join(golds)}"
            )
        examples.append(example | {"solution": str(answer).strip()})
    return examples


def _of_levels(rows: list[Row], levels: list[int], source: str | Path) -> list[Row]:
    """Return the rows whose column ``level`` is one of ``levels``. Raises ValueError if there is no such column, no row
    is left, or ``levels`` is no list of whole numbers."""
    if not isinstance(levels, list | tuple) or not all(type(level) is int for level in levels):
        raise ValueError(f"levels is {levels!r}; it must be a list of whole numbers such as [3, 4, 5]")
    column = required_column(rows, ("level",), source)
    found = [_LEVEL.fullmatch(str(row.get(column)).strip()) for row in rows]
    numbers = [int(level[1]) if level else None for level in found]
    kept = [row for row, level in zip(rows, numbers, strict=True) if level in levels]
    if not kept:
        seen = sorted({level for level in numbers if level is not None})
        raise ValueError(f"{str(source)!r}: no row of levels {list(levels)}; it has levels {seen} (setting: levels)")
    return kept


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{…}`` or ``\\fbox{…}`` (also of ``\\boxed 5``), to the brace that closes
    it. None if there is none, or if it is empty or never closed.

    The text is read once, since a hostile one may have thousands of open braces.
    """
    starts = [box.end() for box in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return bare.group() if bare else None
    end = group_end(text, start)
    if end > 0:
        return text[start + 1 : end - 1].strip() or None
    return None


def load_humaneval(
    source: str | Path = "openai/openai_humaneval",
    split: str = "test",
    template: str | PromptTemplate = "chat",
    *,
    system_prompt: str | None = None,
) -> Dataset:
    """Load HumanEval, or a file written like it; the arguments are those of ``load_gsm8k`` (``split``: ``test`` alone).

    The question shows the function's head and docstring in a fenced block and asks for the whole function. Whatever
    else the prompt defines (imports, ``encode_cyclic`` of HumanEval/38) is copied into the tests, which then call their
    own copy.

    Returns:
        columns ``prompt``, ``template``, ``question``, ``tests``, ``entry_point``, ``solution`` (a program that
        passes), ``worked_solution`` (the same in a fenced block), and the other columns of the rows.

    Raises:
        ValueError: a column is missing, or a row's prompt is no Python that defines its ``entry_point``.
    """
    form = find_template(template, system_prompt)
    rows = read_rows(source, split)
    columns = ("prompt", "test", "entry_point", "canonical_solution")
    for column in columns:
        required_column(rows, (column,), source)
    examples = []
    for number, row in enumerate(rows, start=1):
        head, test, name, body = (text_of(row, column, number, source) for column in columns)
        asked = "Complete this Python function. Answer with everything above and its body in one Python block."
        own = {
            "question": f"{asked}\n\n{fenced(head)}",
            "tests": f"{_beside(head, name, number, source)}\n{test}",
            "entry_point": name,
            "solution": head + body,
            "worked_solution": fenced(head + body),
        }
        examples.append({key: value for key, value in row.items() if key not in columns} | own)
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
    """Load MBPP in its ``full`` or ``sanitized`` form, or a file written like either.

    The question is the task and the first ``shown_tests`` of its assertions; without these nobody knows the function's
    name. ``source``, ``template`` and ``system_prompt`` are those of ``load_gsm8k``.

    Args:
        split: ``train``, ``test``, ``validation`` or ``prompt``.
        config: which form, if ``source`` is a hub name.
        shown_tests: assertions in the question. The paper shows all three. A policy that is rewarded for assertions it
            has seen may learn their answers instead of the function.

    Returns:
        columns as ``load_humaneval``'s. ``entry_point`` is the function of the solution that the tests name (some have
        the name of a builtin, ``sum``), or None.

    Raises:
        ValueError: a column is missing, ``test_list`` is no list of assertions, or ``shown_tests`` is less than 1.
    """
    form = find_template(template, system_prompt)
    if shown_tests < 1:
        raise ValueError(f"shown_tests is {shown_tests}; at least 1 is needed: it names the function")
    rows = read_rows(source, split, config=config if str(source) in {"google-research-datasets/mbpp", "mbpp"} else None)
    task = required_column(rows, ("text", "prompt"), source)
    for name in ("code", "test_list"):
        required_column(rows, (name,), source)
    examples = []
    for number, row in enumerate(rows, start=1):
        tests = _lines(row, "test_list", number, source)
        program = text_of(row, "code", number, source).replace("\r\n", "\n")
        asked = f"Your code should pass {'this test' if shown_tests == 1 else 'these tests'}:"
        question = text_of(row, task, number, source).strip()
        shown = fenced("\n".join(tests[:shown_tests]))
        first = [line for name in _IMPORTS if row.get(name) for line in _lines(row, name, number, source)]
        own = {
            "question": f"{question}\n\n{asked}\n\n{shown}",
            "tests": "\n".join([*first, *tests]),
            "entry_point": _tested(program, "\n".join(tests)),
            "solution": program,
            "worked_solution": fenced(program),
        }
        read = (task, "code", "test_list", *_IMPORTS)
        examples.append({key: value for key, value in row.items() if key not in read} | own)
    return to_dataset(examples, form)


def fenced(program: str) -> str:
    """Return the program as a fenced Python block."""
    return f"```python\n{program.strip(chr(10))}\n```"


def _beside(head: str, name: str, number: int, source: str | Path) -> str:
    """Return, as Python, everything on the top level of a HumanEval prompt (``head``) but the function ``name`` that is
    asked for. Raises ValueError if the prompt is no Python, or does not define ``name``."""
    try:
        parts = ast.parse(head).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{place_of(source, number)}: column 'prompt' is no Python: {error}") from None
    beside = [part for part in parts if getattr(part, "name", None) != name]
    if len(beside) == len(parts):
        raise ValueError(f"{place_of(source, number)}: column 'prompt' does not define its entry_point {name!r}")
    return "\n\n".join(map(ast.unparse, beside))


def _tested(program: str, tests: str) -> str | None:
    """Return the name of the last function of ``program`` that ``tests`` mention; None if there is none, or if either
    is no Python."""
    try:
        made = [part.name for part in ast.parse(program).body if isinstance(part, ast.FunctionDef)]
        used = {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next((name for name in reversed(made) if name in used), None)


def _lines(row: Row, column: str, number: int, source: str | Path) -> list[str]:
    """Return a cell that holds a text, or a list of texts, as a list. Raises ValueError for anything else, and for an
    empty list."""
    value: Any = row.get(column)
    lines = [value] if isinstance(value, str) else value
    if not isinstance(lines, Sequence) or not lines or not all(isinstance(line, str) for line in lines):
        raise ValueError(f"{place_of(source, number)}: column {column!r} is {value!r}; a list of lines is needed")
    return list(lines)
