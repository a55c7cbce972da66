"""``CodeReward``: real programs and their mutants, spellings of tests, both scores, threads, limits, a trainer that
dies."""

from __future__ import annotations

import ast
import json
import math
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.data import coding_tasks
from grpo_lab.rewards import CodeReward
from grpo_lab.rewards.code import read_tests
from grpo_lab.rewards.completion import program_text
from grpo_lab.trainer.arguments import warm_up

ADD = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    made = CodeReward(timeout_s=2.0, wall_s=20.0, workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def share() -> Iterator[CodeReward]:
    made = CodeReward("share", timeout_s=2.0, wall_s=20.0, workers=2)
    yield made
    made.close()


def one(reward: CodeReward, program: str, tests: Any, entry_point: str | None = None) -> float | None:
    return reward(completions=[program], tests=[tests], entry_point=[entry_point])[0]


@pytest.fixture(scope="module")
def human_eval(grpo_lab_data: Path) -> list[dict[str, str]]:
    lines = (grpo_lab_data / "code" / "humaneval.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_every_canonical_solution_of_humaneval_passes(reward: CodeReward, human_eval: list[dict[str, str]]) -> None:
    texts = [f"Here:\n```python\n{row['prompt']}{row['canonical_solution']}\n```\nDone." for row in human_eval]
    columns = {"tests": [row["test"] for row in human_eval], "entry_point": [row["entry_point"] for row in human_eval]}
    assert reward(completions=texts, **columns) == [1.0] * 164


OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.LtE: ast.Gt, ast.GtE: ast.Lt,
}  # fmt: skip


class Mutant(ast.NodeTransformer):
    """The ``n``-th place of one kind changed: a comparison turned round, a number off by one, a statement dropped."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.left = kind, n
        self.done = False

    def _here(self) -> bool:
        self.left -= 1
        self.done = self.done or self.left == -1
        return self.left == -1

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self.kind == "comparison" and type(node.ops[0]) in OPPOSITE and self._here():
            node.ops[0] = OPPOSITE[type(node.ops[0])]()
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.kind == "off by one" and type(node.value) is int and self._here():
            return ast.Constant(node.value + 1)
        return node

    def visit(self, node: ast.AST) -> Any:
        if self.kind == "dropped" and isinstance(node, ast.Return | ast.Assign | ast.AugAssign) and self._here():
            return ast.Pass()
        return super().visit(node)


def mutated(source: str, number: int) -> str | None:
    kind = ("comparison", "off by one", "dropped")[number % 3]
    mutant = Mutant(kind, 0)
    tree = ast.fix_missing_locations(mutant.visit(ast.parse(source)))
    return ast.unparse(tree) if mutant.done else None


ORACLE = """
import json, os, signal, sys
for line in sys.stdin:
    row, pid = json.loads(line), os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_PROF, 2.0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            names = {"__name__": "mutant"}
            exec(row["program"], names)
            exec(row["test"], names)
            names["check"](names[row["entry_point"]])
        except BaseException:
            os._exit(1)
        os._exit(0)
    print(int(os.waitpid(pid, 0)[1] == 0), flush=True)
"""


@pytest.mark.slow
def test_mutants_score_as_a_plain_interpreter_finds_them(reward: CodeReward, human_eval: list[dict[str, str]]) -> None:
    """The oracle runs program and tests in one interpreter, as published harnesses do: honest programs, so both must
    agree. Every second problem."""
    mutants = [
        {**row, "program": program}
        for number, row in [*enumerate(human_eval)][::2]
        if (program := mutated(row["prompt"] + row["canonical_solution"], number)) is not None
    ]
    given = "\n".join(json.dumps(row) for row in mutants)
    done = subprocess.run(
        [sys.executable, "-S", "-c", ORACLE], input=given, capture_output=True, text=True, timeout=300
    )
    expected = [float(line) for line in done.stdout.split()]
    columns = {"tests": [row["test"] for row in mutants], "entry_point": [row["entry_point"] for row in mutants]}
    found = reward(completions=[row["program"] for row in mutants], **columns)
    differing = [(row["task_id"], a, b) for row, a, b in zip(mutants, found, expected, strict=True) if a != b]
    assert differing == []
    assert len(mutants) > 60
    assert sum(expected) < len(mutants) / 3  # most are seen by their tests: the zeros are no accident


SPELLINGS: dict[str, tuple[Any, str | None]] = {
    "MBPP's list": (["assert add(1, 2) == 3", "assert add(2, 2) == 4"], None),
    "a text": ("assert add(1, 2) == 3\nassert add(2, 2) == 4", None),
    "HumanEval's check": (
        "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4",
        "add",
    ),
    "check, called": ("def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 4\ncheck(add)", None),
    "test functions": ("def test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert add(2, 2) == 4", None),
    "behind the guard of a script": (
        "def test_one():\n    assert add(1, 2) == 3\ndef test_two():\n    assert add(2, 2) == 4\nif __name__ == "
        "'__main__':\n    test_one()\n    test_two()",
        None,
    ),
    "check, called behind the guard": (
        "def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 4\nif __name__ == '__main__':\n    check(add)",
        "add",
    ),
    "an import": ("from solution import add\nassert add(1, 2) == 3\nassert add(2, 2) == 4", None),
    "JSON calls": ('[{"input": [1, 2], "output": 3}, {"input": [2, 2], "output": 4}]', "add"),
    "pairs of calls": ([[[1, 2], 3], ((2, 2), 4)], "add"),
    "APPS": ('{"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3, 4]}', None),
    "columns": ({"input": [[1, 2], [2, 2]], "output": [3, 4]}, "add"),
    "LeetCode in rllm and code-r1": (
        {"functional": "def check(f):\n    assert f(1, 2) == 3\n    assert f(2, 2) == 4\n\ncheck(add)", "inputs": None},
        None,
    ),
    "LiveCodeBench in rllm": (
        [
            {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
            {"input": "2\n2\n", "output": "4", "testtype": "functional", "metadata": {"func_name": "add"}},
        ],
        None,
    ),
    "LiveCodeBench's own columns": (
        json.dumps([{"input": f"{n}\n2", "output": str(n + 2), "testtype": "functional"} for n in (1, 2)]),
        "add",
    ),
    "verl's prime_code": ('{"inputs": ["1\\n2", "2\\n2"], "outputs": ["3", "4"], "fn_name": "add"}', None),
    "SYNTHETIC-1, as Python prints it": (
        str([{"type": "function_call", "fn_name": "add", "input": [n, 2], "output": n + 2, "x": None} for n in (1, 2)]),
        None,
    ),
    "calls as datasets gives structs": (
        {"input": ["1\n2", "2\n2"], "output": ["3", "4"], "fn_name": ["add"] * 2, "testtype": [None] * 2},
        None,
    ),
}


@pytest.mark.not_fast
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_tests(reward: CodeReward, share: CodeReward, name: str) -> None:
    tests, entry_point = SPELLINGS[name]
    assert one(reward, ADD, tests, entry_point) == 1.0
    assert one(reward, "def add(a, b):\n    return 3", tests, entry_point) == 0.0
    assert one(share, "def add(a, b):\n    return 3", tests, entry_point) == 0.5  # the first of two
    assert one(share, "x = 1", tests, entry_point) == 0.0


SCRIPT = "n = int(input())\nprint(*[sum(map(int, input().split())) for _ in range(n)], sep='\\n')"
SCRIPTS: dict[str, Any] = {
    "a list of structs": [{"input": "1\n1 2\n", "output": "3\n"}, {"input": "2\n1 2\n3 4", "output": "3  \n7\n\n"}],
    "pairs": [["1\n1 2\n", "3"], ("1\n5 6", "11")],
    "lists of lines": [[["1", "1 2"], ["3"]]],
    "numbers": {"input": "1\n1 2", "output": 3},
    "JSON": json.dumps({"inputs": ["1\n1 2\n"], "outputs": ["3\n"]}),
    "no function": {"inputs": ["1\n1 2\n"], "outputs": ["3\n"], "fn_name": None, "functional": None},
    "LiveCodeBench": '[{"input": "1\\n1 2\\n", "output": "3", "testtype": "stdin", "metadata": {"func_name": null}}]',
    "SYNTHETIC-1": "[{'type': 'stdin_stdout', 'fn_name': None, 'input': '1\\n1 2', 'output': '3\\n'}]",
}


def test_half_a_character_in_a_script_s_output_is_a_wrong_answer(reward: CodeReward) -> None:
    assert one(reward, SCRIPT, [["1\n1 2", "\ud800"]]) == 0.0


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_a_line_ends_at_a_line_feed_alone(reward: CodeReward, end: str) -> None:
    assert one(reward, "print('a')\nprint('b')", [["", f"a{end}b"]]) == 0.0
    assert one(reward, f"print({end!r}.join('ab'))", [["", "a\nb"]]) == 0.0
    assert one(reward, f"print({end!r}.join('ab') + {end!r}, end='\\r\\n')", [["", f"a{end}b\n"]]) == 1.0


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(reward: CodeReward, name: str) -> None:
    assert one(reward, SCRIPT, SCRIPTS[name]) == 1.0
    assert one(reward, "print(3)\nexit(1)", SCRIPTS[name]) == 0.0  # right at times, and it says that it failed
    assert one(reward, "print('3 7')", SCRIPTS[name]) == 0.0


TRANSPARENT: dict[str, tuple[str, str]] = {
    "values of every kind": (
        "def same(x): return x",
        "import datetime, decimal, fractions, collections\n"
        "for x in (None, True, -0.0, float('inf'), 10**5000, 1j, 'é\\ud800', b'\\x00', (1, [2]), {1: {2}}, "
        "frozenset({3}), range(3),\n"
        "          decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2020, 1, 2), "
        "datetime.timedelta(1),\n"
        "          collections.deque([1]), bytearray(b'x'), {(1, 2): None}, [[[]]]):\n"
        "    y = same(x)\n    assert y == x and type(y) is type(x)\n",
    ),
    "not a number": ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
    "arguments changed in place": (
        "def sort(x, d, s):\n    x.sort(); d['new'] = [1]; s.add(9)",
        "x, d, s = [3, 1, 2], {}, {1}\nsort(x, d, s)\nassert (x, d, s) == ([1, 2, 3], {'new': [1]}, {1, 9})",
    ),
    "a list emptied in place": ("def take(x):\n    x.clear()", "x = [3, 1]\ntake(x)\nassert x == []"),
    "an object": (
        "class Stack:\n    def __init__(self, *x): self.x = list(x)\n    def push(self, v): self.x.append(v); return "
        "self\n"
        "    def pop(self): return self.x.pop()\n    def __len__(self): return len(self.x)\n    def __iter__(self): "
        "return iter(self.x)\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __getitem__(self, i): return self.x[i]\n    def "
        "__str__(self): return f'S{self.x}'",
        "s = Stack(1, 2)\ns.push(3).push(4)\nassert s.pop() == 4\nassert len(s) == 3 and list(s) == [1, 2, 3] and 2 "
        "in s and 5 not in s\n"
        "assert s[0] == 1 and str(s) == 'S[1, 2, 3]'\nassert s == Stack(1, 2, 3) and s != Stack(1)\nassert "
        "isinstance(s, Stack)\n"
        "s.x = [7]\nassert s.x == [7]",
    ),
    "exceptions": (
        "class Bad(ValueError): pass\ndef f(x):\n    if x < 0: raise Bad('negative')\n    return {}[x]",
        "try:\n    f(-1)\n    assert False\nexcept Bad as error:\n    assert str(error) == 'negative'\n"
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\n"
        "try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass",
    ),
    "functions handed over": (
        "def twice(f, x): return f(f(x))\ndef adder(n): return lambda x: x + n",
        "k = 3\nassert twice(lambda x: x * k, 2) == 18\nassert twice(abs, -2) == 2\nassert adder(2)(3) == 5\nassert "
        "twice(adder(1), 0) == 2",
    ),
    "functions handed over that call back": (
        "def inc(x): return x + 1\ndef each(f, xs): return [f(x) for x in xs]",
        "assert each(lambda x: inc(x) * 2, [1, 2]) == [4, 6]\nassert each(lambda x: each(inc, [x, inc(x)]), [1]) == "
        "[[2, 3]]",
    ),
    "functions handed over that raise": (
        "def safe(f):\n    try: return f()\n    except (ZeroDivisionError, LookupError) as error: return str(error)",
        "class Mine(LookupError): pass\ndef mine(): raise Mine('no')\nassert 'zero' in safe(lambda: 1 / 0)\nassert "
        "safe(mine) == 'no'",
    ),
    "generators": (
        "def count(n):\n    yield from range(n)",
        "assert list(count(3)) == [0, 1, 2]\nassert next(count(1)) == 0",
    ),
    "named tuples and enums": (
        "from collections import namedtuple, Counter\nfrom enum import Enum\nPoint = namedtuple('Point', 'x y')\n"
        "class C(Enum):\n    RED = 1\ndef p(): return Point(1, 2)\ndef c(): return C.RED\ndef n(t): return Counter(t)",
        "assert p() == (1, 2) and Point(3, 4).x == 3\nassert c() == C.RED and C.RED.value == 1\nassert n('aab') == "
        "{'a': 2, 'b': 1}",
    ),
    "a contest's class": ("class Solution:\n    def add(self, a, b): return a + b", "assert Solution().add(1, 2) == 3"),
    "modules that nobody imported": (
        "def f(x): return x ** 0.5",
        "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)",
    ),
    "constants": ("LIMIT = 7\ndef f(): return LIMIT", "assert f() == LIMIT == 7"),
    "threads": (
        "import threading\nthreading.stack_size(1 << 26)\ndef f():\n    out = []\n"
        "    t = threading.Thread(target=lambda: out.append(1)); t.start(); t.join()\n    return out",
        "assert f() == [1]",
    ),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_a_program_in_another_process_is_tested_as_one_in_the_same(reward: CodeReward, name: str) -> None:
    program, tests = TRANSPARENT[name]
    names: dict[str, Any] = {}
    exec(f"import math\n{program}\n{tests}", names)  # the oracle: our own text, in this interpreter
    assert one(reward, program, tests) == 1.0


@pytest.mark.parametrize(
    "tests",
    [None, "", "   ", [], "x = 1", "print(add(1, 2))", "assert True", "assert add(1", {"input": 1}, [["a"]],
     [[1, 2], 3], 5,
     "import _thread\nassert add(_thread.allocate_lock(), 1) == 3", "assert len('ab') == 2", "assert sum(10, 15) == 25",
     "import no_such_package\nassert add(1, 2) == 3", "def test_add():\n    import no_such_package\n    assert "
         "add(1, 2) == 3",
     "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        assert add(1, 2) == "
     "3\nunittest.main()",
     "assert add('\ud800', '') == '\ud800'",
     [["1 2", None]], [["1 2", [None]]], [["1 2", "3"], ["", [None, "x"]]],
     {"inputs": ["1", "2"], "outputs": ["1", None]}, [["1 2", ""], ["1", " \n"]],
     {"fn_name": "add", "inputs": [[1, 2]], "outputs": [None]},
     {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[None]]},
     {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["null"]}, {"inputs": ["1", "2"], "outputs": ["1"]},
     {"functional": ""}, {"functional": "x = 1"},
     [{"input": "1", "output": "1", "testtype": "functional"}], [{"input": "1 and 2", "output": "3", "fn_name": "add"}],
     [{"input": [1, 2], "output": 3, "fn_name": "add"}, {"input": [1, 2], "output": 3, "fn_name": "sub"}],
     [{"input": [1, 2], "output": 3, "fn_name": "add"}, {"input": "1 2", "output": "3", "testtype": "stdin"}],
     "[1, 2", "{'a': [}", "[" * 5000],
)  # fmt: skip
def test_tests_that_are_none_are_unscorable_whatever_the_program(reward: CodeReward, tests: Any) -> None:
    assert reward(completions=[ADD, "import sys; sys.exit()"], tests=[tests] * 2)[0] is None


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("assert sum(1, 2) == 3", "^every name in the tests is Python's or their own.*`entry_point`"),
        ("x = add(1, 2)", "^nothing in the tests can fail"),
        ("assert add(1", "^the tests are no Python: "),
        ({"function": "assert add(1, 2) == 3"}, "^a case without an output: .*docs/algorithms/code_reward.md"),
        ([["1 2", None]], "^a case without an output: a program that prints nothing"),
        ([["1 2", ""]], "^no case expects any output"),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [[None]]}, "^every case expects None"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "^2 inputs and 1 outputs"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "has no name: give it in the column `entry_point`"),
        ({"fn_name": "add", "inputs": ["1 and 2"], "outputs": ["3"]}, "as JSON, one a line; got '1 and 2'"),
        (None, "^no tests: None"),
    ],
)
def test_why_tests_cannot_be_used(reward: CodeReward, tests: Any, why: str) -> None:
    trial = reward.judge([ADD], [tests])[0]
    assert trial.end == "unusable"
    assert re.search(why, trial.why), trial.why


@pytest.mark.not_fast
@pytest.mark.parametrize(
    "program",
    [
        "class E(Exception): pass\ndef enc(x): return E",
        "def enc(x): return 'x' * (31 << 20)\ndef dec(x): return 1",
        "def enc(x):\n    for _ in range(290): x = [x]\n    return x\ndef dec(x): return 1",
        "class L(list): pass\ndef enc(x): return L\ndef dec(x): return 1",
    ],
)
def test_a_program_cannot_make_a_test_unusable(reward: CodeReward, program: str) -> None:
    """What it gives back and the test hands on, wrapped ever deeper, fails the test: None would be better than 0."""
    tests = "y = enc(1)\nfor _ in range(40):\n    y = [y, y] if len(str(y)) > 10**7 else [y]\nassert dec(y) == 2"
    assert one(reward, program, tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "import _thread\nassert f(lambda: _thread.allocate_lock()) == 3",
        "import _thread\nassert f(lambda: g(_thread.allocate_lock())) == 3",
        "class Own: pass\nassert f(lambda: [Own()]) == 3",
        "import _thread\nlocks = iter([_thread.allocate_lock()])\nassert f(lambda: next(locks)) == 3",
        "def lacking():\n    import no_such_package\nassert f(lacking) == 3",
        "class Own: pass\ntry:\n    f(lambda: Own())\n    assert False\nexcept TypeError:\n    pass",
        "try:\n    f(lambda: ValueError())\n    assert False\nexcept TypeError:\n    pass",
        "try:\n    f(ValueError())\n    assert False\nexcept TypeError:\n    pass",
    ],
)
@pytest.mark.parametrize(
    "asks",
    ["return x() if callable(x) else 1", "\n    try: x()\n    except BaseException: return 3", "raise SystemExit"],
)
def test_a_program_does_not_choose_between_unscorable_and_wrong(reward: CodeReward, tests: str, asks: str) -> None:
    """A function of the tests' that returns what cannot be sent fails the test that the program calls it in: its word
    decides if it is called."""
    assert one(reward, f"def g(x): return 3\ndef f(x): {asks}", tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (3, 4)]))",
        "for found, wanted in zip(map(f, [1, 3]), [2, 4]):\n    assert found == wanted",
        "assert not list(filter(lambda case: f(case[0]) != case[1], [(1, 2)]))",
        "assert not f(1).difference({2})",
    ],
)
def test_a_program_cannot_end_what_goes_through_the_cases(reward: CodeReward, tests: str) -> None:
    """An exception that means "no more" to ``map``, ``zip`` and ``filter``, from a call or from a question, is not that
    in the tester."""
    stops = ("class End(StopIteration): pass\n", "")
    for end, kind in zip(stops, ("End", "StopIteration"), strict=True):
        assert one(reward, f"{end}def f(x): raise {kind}", tests) == 0.0
    assert (
        one(reward, "class N:\n    def __getattr__(s, n): return lambda *a: set()\ndef f(x): return N()", tests) == 0.0
    )


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "raise SystemExit(0)", "raise GeneratorExit"])
def test_what_the_tests_raise_between_tests_fails_them_and_nothing_else(reward: CodeReward, end: str) -> None:
    assert one(reward, ADD, f"assert add(1, 2) == 3\n{end}\nassert add(1, 2) == 4") == 0.0


def test_unscorable_does_not_depend_on_the_program(reward: CodeReward) -> None:
    assert (
        reward(completions=[ADD, "", "while True: pass", "import os; os._exit(0)"], tests=["assert True"] * 4)
        == [None] * 4
    )


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```\nor\n```python\nx = 2\n```\nrun it:\n```bash\nls\n```\n```\n3\n```", "x = 2"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''"),
        ("  ```python\n  x = 1\n  ```", "x = 1"),
        (
            "1. So:\n   ```python\n   def f():\n\n       return 1\n  x = 2\n\ty = 3\n   ```",
            "def f():\n\n    return 1\nx = 2\ny = 3",
        ),
        ("<think>```python\nx = 1\n```</think>\ny = 2", "\ny = 2"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
    ],
)
def test_the_program_is_the_last_fenced_block(text: str, program: str) -> None:
    assert program_text(text) == program


@pytest.mark.not_fast
def test_shares_count_what_can_fail(share: CodeReward) -> None:
    tests = (
        "assert True\nassert f(1) == 1\nassert f(2) == 4\nfor x in (3, 4):\n    assert f(x) == x * x\nassert f(-1) == 0"
    )
    assert one(share, "def f(x): return x * x", tests) == 0.75  # of four; `assert True` is none
    assert (
        one(share, "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    return x", tests) == 0.25
    )  # what came before
    assert one(share, "def f(x): return x", "assert f(1) == 1\nf(2)[0]\nassert f(3) == 3") == 0.5  # between two tests
    assert one(share, "print(input())", [["1", "1"], ["2", "2"], ["3", "4"], ["4", "5"]]) == 0.5


@pytest.mark.not_fast
def test_order_repeats_and_what_is_logged(reward: CodeReward) -> None:
    texts = [ADD, "def add(a, b): return a - b", ADD, ADD]
    tests = ["assert add(2, 1) == 3"] * 3 + ["assert add(2, 1) == 4"]
    assert reward(completions=texts, tests=tests) == [1.0, 0.0, 1.0, 0.0]
    logged: dict[str, float] = {}
    reward(completions=texts, tests=[*tests[:3], None], log_metric=logged.__setitem__)
    assert logged == {
        "code_reward/limit": 0.0,
        "code_reward/unusable": 0.25,
        "code_reward/unjudged": 0.0,
        "code_reward/walls": float(len(reward.in_force)),
    }


@pytest.mark.not_fast
def test_threads_and_copies(reward: CodeReward) -> None:
    found: dict[int, Any] = {}

    def ask(n: int) -> None:
        found[n] = one(reward, ADD, f"assert add({n}, 1) == {n + n % 2}")  # right for odd n

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {n: float(n % 2) for n in range(6)}
    again = pickle.loads(pickle.dumps(reward))
    assert one(again, ADD, "assert add(1, 1) == 2") == 1.0
    again.close()


@pytest.mark.slow
def test_a_verdict_is_not_late() -> None:
    hurried = CodeReward(wall_s=0.5, workers=1)
    assert one(hurried, "x = 1", "assert x == 2") == 0.0  # starts the worker
    took = [math.inf]
    while min(took) > 0.5 + 1.0 and len(took) < 30:  # a busy machine may take a second now and then
        start = time.monotonic()
        assert hurried.judge(["import time\ntime.sleep(600)"], ["assert x == 1"])[0].end == "limit"
        took.append(time.monotonic() - start)
    assert min(took) < 0.5 + 1.0
    hurried.close()


@pytest.mark.not_fast
def test_a_trainer_is_told_of_the_walls_before_it_loads_a_model(caplog: pytest.LogCaptureFixture) -> None:
    made, lacking = CodeReward(workers=1), CodeReward(walls=["moat"])
    with caplog.at_level("INFO", logger="grpo_lab"):
        warm_up([made, len], None)
    assert "runs model-written programs behind" in caplog.text
    assert made._judge.pool.fork_server_pid is not None
    with pytest.raises(ValueError, match="moat"):
        warm_up(lacking, None)
    made.close()


def test_bad_calls_and_settings() -> None:
    for settings, word in (
        ({"score": "most"}, "score"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"memory_bytes": 5}, "memory_bytes"),
    ):
        with pytest.raises(ValueError, match=word):
            CodeReward(**settings)
    made = CodeReward(walls=["moat"], workers=1)
    with pytest.raises(ValueError, match="moat"):
        one(made, ADD, "assert add(1, 1) == 2")
    made.close()
    with pytest.raises(ValueError, match="tests"):
        CodeReward()(completions=["x"])
    with pytest.raises(ValueError, match="one to one"):
        CodeReward()(completions=["x"], tests=[])


@pytest.mark.not_fast
def test_made_tasks_are_solved_by_their_program_and_by_none_with_a_step_less(reward: CodeReward) -> None:
    rows = coding_tasks(12, seed=5, steps=(1, 3), template="none")
    assert reward(completions=rows["worked_solution"], tests=rows["tests"]) == [1.0] * 12
    shorter = [program.replace(program.splitlines()[1] + "\n", "", 1) for program in rows["solution"]]
    assert reward(completions=shorter, tests=rows["tests"]) == [0.0] * 12
    programs = {split: set(coding_tasks(150, split=split)["solution"]) for split in ("train", "cold_start", "test")}
    assert not programs["train"] & programs["test"]
    assert not programs["train"] & programs["cold_start"]
    with pytest.raises(ValueError, match="steps"):
        coding_tasks(1, steps=(3, 9))


def test_spellings_that_are_one() -> None:
    assert read_tests('[["1", "2"]]') == read_tests([("1", "2")]) == read_tests({"input": ["1"], "output": ["2"]})


TRAINER = """
import sys
from grpo_lab.rewards import CodeReward
reward = CodeReward(workers=1, wall_s=600.0, timeout_s=600.0)
reward(completions=["x = 1"], tests=["assert x == 1"])
print(reward._judge.pool.pids[0], flush=True)
reward(completions=["import time\\ntime.sleep(600)"], tests=["assert x == 1"])
"""


@pytest.mark.slow
def test_a_killed_trainer_takes_everything_with_it() -> None:
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    worker = int(trainer.stdout.readline())
    deadline = time.monotonic() + 300.0
    while len(family := below(worker)) < 4 and time.monotonic() < deadline:  # two watchers, two jailed
        time.sleep(0.05)
    assert len(family) >= 4
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 60.0
    while (left := [pid for pid in (worker, *family) if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def running(pid: int) -> bool:
    """Not dead: a zombie is init's to reap, which may take its time."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> list[int]:
    try:
        mine = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return mine + [inner for one in mine for inner in below(one)]
