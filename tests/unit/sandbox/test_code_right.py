"""Right programs in the styles that models write, and what tests do to their values, are paid; lies on the same ways
are not.

The oracle of ``HELD`` is this interpreter: program and tests in one namespace, our own texts.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from code_attacks import SENDS

from grpo_lab.rewards import CodeReward
from grpo_lab.rewards.completion import program_text
from grpo_lab.sandbox.remote import Program
from grpo_lab.sandbox.wire import frame

pytestmark = pytest.mark.slow

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


@pytest.fixture(scope="module")
def share() -> Iterator[CodeReward]:
    made = CodeReward("share", timeout_s=2.0, wall_s=8.0)
    yield made
    made.close()


def unlike(reward: CodeReward, cases: dict[str, tuple[str, Any, str | None]], wanted: float) -> dict[str, Any]:
    programs, tests, names = zip(*cases.values(), strict=True)
    found = reward(completions=programs, tests=tests, entry_point=names)
    return {name: score for name, score in zip(cases, found, strict=True) if score != wanted}


HELD = {
    "an exception's arguments, text and attributes": (
        "class Short(Exception):\n    def __init__(self, have, need):\n        super().__init__(f'need {need}')\n    "
        "    self.have = have\n"
        "def take(d, k):\n    if not d: raise Short(1, 2)\n    return d[k]",
        "try:\n    take({}, 'a')\n    assert False\nexcept Short as e:\n    assert str(e) == 'need 2' and e.have == 1\n"
        "try:\n    take({1: 1}, 'a')\n    assert False\nexcept KeyError as e:\n    assert str(e) == \"'a'\" and "
        "e.args == ('a',)",
    ),
    "an exception of the standard library": (
        "import json\ndef f(s): return json.loads(s)\ndef g(): open('/no/such')",
        "import json\ntry:\n    f('{')\n    assert False\nexcept json.JSONDecodeError as e:\n    assert e.pos == 1\n"
        "try:\n    g()\n    assert False\nexcept FileNotFoundError as e:\n    assert e.errno == 2",
    ),
    "nothing but an exception": ("def f(x): return int(x)", "try:\n    f('x')\n    assert False\nexcept "
        "ValueError:\n    pass"),
    "raise instead of assert": (
        "def f(x): return int(x)",
        "try:\n    f('x')\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('none came')\nif f('1') != "
        "1:\n    raise ValueError",
    ),
    "an exit that is expected": ("def f(): raise SystemExit(3)", "try:\n    f()\n    assert False\nexcept SystemExit "
        "as e:\n    assert e.code == 3"),
    "named tuples": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef make(x, y): return P(x, "
        "y)\ndef norm(p): return p.x + p.y",
        "p = make(1, 2)\nassert p.x == 1 and p == (1, 2) and p == P(1, 2)\nx, y = p\nassert norm(p) == norm(P(1, 2)) "
        "== 3 and p._asdict() == {'x': 1, 'y': 2}",
    ),
    "kinds of dictionaries": (
        "import collections as c\ndef n(s): return c.Counter(s)\ndef top(n): return n.most_common(1)\ndef d(): "
        "return c.defaultdict(list)\ndef o(): return c.OrderedDict(b=1)",
        "import collections\nassert n('aab').most_common(1) == [('a', 2)] and n('')['z'] == 0 and "
        "top(collections.Counter('xx')) == [('x', 2)]\n"
        "assert d()[5] == []\nassert isinstance(o(), collections.OrderedDict)",
    ),
    "views of dictionaries": (
        "def k(d): return d.keys()\ndef i(d): return d.items()\ndef v(d): return d.values()",
        "assert k({'a': 1}) == {'a'} and 'a' in k({'a': 1})\nassert i({'a': 1}) == {('a', 1)}\nassert list(v({'a': "
        "1})) == [1]",
    ),
    "operators of the program's classes": (
        "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __mul__(s, "
        "k): return V(s.x * k)\n    __rmul__ = __mul__\n"
        "    def __neg__(s): return V(-s.x)\n    def __abs__(s): return abs(s.x)\n    def __matmul__(s, o): return "
        "s.x * o.x\n    def __eq__(s, o): return s.x == o.x\n"
        "    def __lt__(s, o): return s.x < o.x\n    def __hash__(s): return hash(s.x)\n    def __float__(s): return "
        "s.x / 2\n    def __str__(s): return f'V{s.x}'",
        "a, b = V(1), V(2)\nassert a + b == V(3) and -a == V(-1) and abs(-b) == 2 and a @ b == 2\nassert b * 3 == 3 "
        "* b == V(6) and (b * 3).x == 6 and str(b * 3) == 'V6'\n"
        "assert a < b and b > a and [v.x for v in sorted([b, a])] == [1, 2]\nassert len({V(1), V(1), V(2)}) == 2 and "
        "float(a) == 0.5 and f'{a}' == 'V1'",
    ),
    "classes": (
        "class Animal: pass\nclass Dog(Animal):\n    '''Barks.'''\n    _one = None\n    @classmethod\n    def "
        "one(c):\n        c._one = c._one or c()\n        return c._one\n"
        "    def set(s, x):\n        s.x = x\n        return s",
        "d = Dog()\nassert issubclass(Dog, Animal) and isinstance(d, (int, Animal))\nassert d.__class__.__name__ == "
        "type(d).__name__ == 'Dog' and Dog.__doc__ == 'Barks.'\n"
        "assert d.set(1) is d and Dog.one() is Dog.one()",
    ),
    "a kind of list, of text, of dictionary": (
        "class L(list):\n    def top(s): return s[-1]\nclass S(str): pass\nclass D(dict): pass",
        "x = L()\nx.append(1)\nassert x == [1] and x.top() == 1 and x != [2] and S('a') == 'a' and D(a=1) == {'a': 1}",
    ),
    "items": (
        "class G:\n    def __init__(s): s.d = {}\n    def __getitem__(s, k): return [1, 2, 3][k] if isinstance(k, "
        "slice) else s.d[k]\n    def __setitem__(s, k, v): s.d[k] = v\n    def __delitem__(s, k): del s.d[k]\n    "
        "def __len__(s): return len(s.d)",
        "g = G()\ng[1, 2] = 3\nassert g[1, 2] == 3 and g[1:] == [2, 3]\ndel g[1, 2]\nassert len(g) == 0",
    ),
    "contexts": (
        "class C:\n    def __init__(s): s.log = []\n    def __enter__(s): s.log.append('in'); return s\n    def "
        "__exit__(s, kind, error, trace): s.log.append(kind and kind.__name__)",
        "c = C()\nwith c as inner:\n    assert inner.log == ['in']\ntry:\n    with c:\n        raise "
        "KeyError('x')\nexcept KeyError:\n    pass\nassert c.log == ['in', None, 'in', 'KeyError']",
    ),
    "decorators": (
        "import functools\ndef memo(f):\n    known = {}\n    @functools.wraps(f)\n    def g(*a, **k):\n        key = "
        "(a, *k.items())\n        if key not in known: known[key] = f(*a, **k)\n        return known[key]\n    "
        "return g\n"
        "def twice(f):\n    def g():\n        try: return f()\n        except Exception: return f()\n    return g",
        "calls = []\n@memo\ndef slow(x, y=0):\n    calls.append(x)\n    return x + y\nassert slow(1) == slow(1) == 1 "
        "and slow(1, y=2) == 3 and len(calls) == 2 and slow.__name__ == 'slow'\n"
        "class Mine(Exception): pass\n@twice\ndef bad(): raise Mine('no')\ntry:\n    bad()\n    assert False\nexcept "
        "Mine as e:\n    assert str(e) == 'no'",
    ),
    "methods and iterators handed over": (
        "def each(f, xs): return [f(x) for x in xs]\ndef total(xs): return sum(xs)",
        "import operator\nassert each(str.upper, ['a']) == ['A'] and each(operator.itemgetter(0), [(1, 2)]) == [1] "
        "and each({1: 2}.get, [1]) == [2]\n"
        "got = []\neach(got.append, [1, 2])\nassert got == [1, 2]\nassert total(x for x in range(4)) == 6 and "
        "total(iter([1, 2])) == 3 and total(map(int, '12')) == 3",
    ),
    "coroutines": (
        "import asyncio\nasync def add(a, b):\n    await asyncio.sleep(0)\n    return a + b\nasync def count(n):\n   "
        " for i in range(n): yield i",
        "import asyncio\nasync def test():\n    assert await asyncio.gather(add(1, 2), add(3, 4)) == [3, 7]\n    "
        "assert [x async for x in count(3)] == [0, 1, 2]\nassert asyncio.run(add(1, 2)) == 3\nasyncio.run(test())",
    ),
    "asked from threads": (
        "import time\ndef f(x):\n    time.sleep(0.001)\n    return x * x",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    assert "
        "list(pool.map(f, range(40))) == [x * x for x in range(40)]",
    ),
    "named as modules are": ("def select(xs): return sorted(xs)\ndef f(x): return x", "assert f(1) == 1\nassert "
        "select([2, 1]) == [1, 2]"),
    "nested deeply": (
        "def depth(x): return 1 + depth(x[0]) if x else 0\ndef nest(n):\n    x = []\n    for _ in range(n): x = "
        "[x]\n    return x",
        "x = []\nfor _ in range(500): x = [x]\nassert depth(x) == 500 and depth(nest(400)) == 400",
    ),
    "types": ("def t(x): return type(x)", "assert t(5) == int and t(5) is int and t('') == str"),
}  # fmt: skip


@pytest.mark.slow
def test_what_tests_do_to_values_and_objects_holds_across_two_processes(share: CodeReward) -> None:
    for program, tests in HELD.values():
        exec(f"{program}\n{tests}", {"__name__": "held"})
    assert unlike(share, {name: (program, tests, None) for name, (program, tests) in HELD.items()}, 1.0) == {}


SCRIPTS = {
    "its own file": ("import os\nprint(os.path.basename(__file__), __builtins__.len('ab'), "
        "callable(help))", [["", "program.py 2 True"]]),
    "a hundred threads": (
        "import threading, time\nts = [threading.Thread(target=time.sleep, args=(0.05,)) for _ in "
        "range(100)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nprint(len(ts))",
        [["", "100"]],
    ),
    "deep recursion on a large stack": (
        "import sys, threading\nfrom functools import lru_cache\nsys.setrecursionlimit(1 << "
        "25)\nthreading.stack_size(1 << 28)\n"
        "def main():\n    @lru_cache(None)\n    def f(n): return n and 1 + f(n - 1)\n    print(f(int(input())))\nt = "
        "threading.Thread(target=main)\nt.start()\nt.join()",
        [["50000", "50000"]],
    ),
    "big input and output": ("import sys\nfor x in sorted(map(int, sys.stdin.buffer.read().split())): "
        "print(x)", [["\n".join(map(str, range(10**5, 0, -1))), "\n".join(map(str, range(1, 10**5 + 1)))]]),
    "a loop of asyncio": ("import asyncio\nasync def main(): print(await asyncio.sleep(0, "
        "5))\nasyncio.run(main())", [["", "5"]]),
    "files of its own": ("import tempfile\nwith tempfile.TemporaryDirectory() as d, open(d + '/x', 'w+') as f:\n    "
        "f.write('1'); f.seek(0); print(f.read())", [["", "1"]]),
}  # fmt: skip
CALLS: dict[str, tuple[str, Any, str | None]] = {
    "LeetCode's entry point": ("class Solution:\n    def add(self, a, b): return a + b", "def check(candidate):\n    "
        "assert candidate(a=1, b=2) == 3", "Solution().add"),
    "LeetCode's head": ("class Solution:\n    def add(self, a: List[int], b: Optional[int] = None) -> int: return "
        "a[0] + b", {"functional": "def check(candidate):\n    assert candidate(a=[1], b=2) == "
            "3\n\ncheck(Solution().add)"}, None),
    "LiveCodeBench's": (
        "class Solution:\n    def add(self, a: List[int], b: int) -> int: return a[0] + b",
        [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": '{"func_name": "add"}'}], None),
    "the same of pairs": ("class Solution:\n    def add(self, a, b): return a + b", [[[1, 2], 3]], "Solution().add"),
    "APPS wraps what is returned": (ADD, {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], [4]]}, None),
    "JSON's keys": ("def f(): return {1: (2, 3)}", '[{"input": [], "output": {"1": [2, 3]}}]', "f"),
}  # fmt: skip


@pytest.mark.slow
def test_scripts_and_calls_in_the_styles_of_models_and_data_sets(share: CodeReward) -> None:
    cases = {name: (program, pairs, None) for name, (program, pairs) in SCRIPTS.items()} | CALLS
    if "seccomp" not in share.in_force:  # then processes are counted as threads are
        del cases["a hundred threads"]
    assert unlike(share, cases, 1.0) == {}
    wrong = {
        name: ("def add(a, b): return [a + b, 0]\ndef f(): return {1: 2}", tests, entry)
        for name, (_, tests, entry) in CALLS.items()
    }
    assert unlike(share, wrong, 0.0) == {}


OUTPUT = "\nIt prints:\n```\n3\n```"


@pytest.mark.parametrize(
    "text",
    [
        f"```python3.11\n{ADD}\n```{OUTPUT}", f"```py3\n{ADD}\n```{OUTPUT}", f"```{{python}}\n{ADD}\n```{OUTPUT}",
        f"```ipython3\n{ADD}\n```{OUTPUT}",
        f"```python\n{ADD}```", f"```python\n{ADD}```\nThis "
            "works.", f"```python\nbroken(\nOr better:\n```python\n{ADD}\n```",
        f"\ufeff{ADD}", f"<answer>\n{ADD}\n</answer>",
        f"```python\r\n{ADD}\r\n```\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
        f'```python\nT = """\n```\nhello\n```\n"""\n{ADD}\n```',
        f"```python\nT = '''# Title\n```bash\nls\n```\n'''\n{ADD}\n```",
        f'```python\ndef f():\n    """Cut off.\n```\nAgain:\n```python\n"""Doc."""\n{ADD}\n```',
    ],
)  # fmt: skip
def test_the_program_is_found_as_models_fence_it(text: str) -> None:
    names: dict[str, Any] = {}
    exec(program_text(text), names)
    assert names["add"](1, 2) == 3
    assert "T" not in names or "```" in names["T"]


def test_reading_a_program_is_linear() -> None:
    """A fence in an open text looks ahead for its end: no further than 400 lines."""
    for bait in (
        '```python\n"""\n```\n' * 15_000,
        '"""\n```\n' * 25_000,
        '```python\n"""\n' + "```\n" * 50_000,
        "```" + " " * 200_000 + "`",
    ):
        program_text(bait)


NOTHING = (
    "class Z:\n    def __sub__(s, o): return Z()\n    __rsub__ = __add__ = __radd__ = __mod__ = __xor__ = __sub__\n  "
    "  def __bool__(s): return False\n    def __len__(s): return 0\n"
    "    def __int__(s): return 0\n    def __float__(s): return 0.0\n    def __lt__(s, o): return True\n    __le__ = "
    "__gt__ = __ge__ = __eq__ = __contains__ = __lt__\n    def __hash__(s): return 0\n"
    "    def __abs__(s): return s\n    __neg__ = __round__ = __enter__ = __abs__\n    def __exit__(s, *a): return "
    "True\n    def __iter__(s): return iter(())\ndef f(x): return Z()"
)  # fmt: skip
LIES = {
    "an object that is nothing, and "
    "everything": (NOTHING, "assert f(1) <= 3\nassert max(f(1), 3) == 3\nassert 3 in f(1)\nassert f(1) in {0: "
        "1}\nwith f(1) as y:\n    assert y == 3\nwith f(1) as y:\n    assert y.no.such == 3"),
    "a kind of number that "
    "lies": ("class f(float):\n    def __new__(c, x): return super().__new__(c, 0)\n    def __eq__(s, o): return "
        "True\n    def __sub__(s, o): return s\n    __hash__ = "
        "float.__hash__", "assert f(1) == 3\nassert f(1) - 3 == 0\nassert f(1) in {3}"),
    "fields that say yes": ("class N(tuple):\n    _fields = ('startswith', 'endswith')\ndef f(x): return N((lambda "
        "*a: True, lambda *a: True))", "assert f(1).startswith('a')\nassert f(1).endswith('a')"),
    "fields that are code": ("class N(tuple):\n    _fields = ('x=__import__(\"os\")._exit(0)',)\ndef f(x): return "
        "N((3,))", "assert f(1).x == 3\nassert f(1) == (3,)"),
    "a forged error of the tests' own": (SENDS + "def f(x): send({'raised': {'kinds': [['builtins', 'Exception']], "
        "'text': '', 'args': [], 'held': {}, 'again': 0}})", "assert f(1) == 3\nassert f(2) == 3"),
    "a forged class of ours": (SENDS + "def f(x): send({'raised': {'kinds': [['grpo_lab.sandbox.tester', '_Enough'], "
        "['builtins', 'Exception']], 'text': '', 'args': [], 'held': {}, 'again': "
        "None}})", "assert f(1) == 3\nassert f(2) == 3"),
    "a missing module that is the "
    "program's": ("class E(ModuleNotFoundError): pass\ndef f(x):\n    e = E('x')\n    e.name = 'x'\n    "
        "e.__dict__['name'] = 'x'\n    raise e", "assert f(1) == 3"),
    "an exit": ("def f(x): raise SystemExit(0)", "y = f(1)\nassert f(1) == 3"),
    "a skipped test": ("import unittest\ndef f(x): raise unittest.SkipTest", "import unittest\nassert f(1) == 3"),
    "a coroutine that is cancelled": ("import asyncio\nasync def f(x): raise "
        "asyncio.CancelledError", "import asyncio\nassert asyncio.run(f(1)) == 3"),
    "an end of what is awaited": ("class G:\n    def __aiter__(s): return s\n    def __anext__(s): raise "
        "StopIteration\ndef f(x): return G()", "import asyncio\nasync def all_of():\n    return [x async for x in "
            "f(1)]\nassert asyncio.run(all_of()) == [1]"),
    "a name that hangs": ("import time\nclass M(type):\n    __name__ = property(lambda c: time.sleep(600))\nclass "
        "Q(metaclass=M): pass\nf = lambda x: Q()", "assert f(1) == 3"),
    "a name with a NUL": ("class Q: pass\nimport __main__\nold = __main__.Server._keep\ndef new(s, v):\n    d = "
        "old(s, v)\n    d['object'][2] = 'a\\0b'\n    return d\n__main__.Server._keep = new\nf = lambda x: Q()",
        "assert f(1) == 3\nassert f(2) == 3"),
    "another answer at each "
    "question": ("class f(list):\n    n = 0\n    def __init__(s, x): pass\n    def __iter__(s):\n        s.n += 1\n  "
        "      return iter([s.n])", {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[2], [3], [4]]}),
    "a key written twice": ("def f(x): return {1: 'no', '1': "
        "'b'}", {"fn_name": "f", "inputs": [[1]], "outputs": [{"1": "b"}]}),
    "a missing module by another "
    "name": ("import importlib.metadata\ndef f(x): raise "
        "importlib.metadata.PackageNotFoundError('x')", "import importlib.metadata\nassert f(1) == 3"),
    "data that cannot be handed "
    "back": (SENDS + "def f(x):\n    send({'value': {'slice': [1.5, 2, 3]}})\n    os.read(3, 9999)\n    "
        "os._exit(0)", "assert f(f(1)) == 3"),
    "a view that cannot be handed "
    "back": (SENDS + "def f(x):\n    send({'value': {'keys': {'ordered': []}}})\n    os.read(3, 9999)\n    "
        "os._exit(0)", "assert f(f(1)) == 3"),
    "a pattern that reads the "
    "tester": ("class Q: pass\ndef f(form):\n    return form('{0._program.gone}', Q())", "assert f(str.format) == ''"),
    "deeper than is read": (
        "def f(x):\n    y = 3\n    for _ in range(5000): y = [y]\n    return y", "assert f(1) == 3"),
}  # fmt: skip


def test_arithmetic_with_data_gives_no_data(share: CodeReward) -> None:
    """What is expected may be in it: ``f(1) - 3`` of the program's objects is no 0, no truth, no number and no order of
    its own."""
    questions = (
        "not f(1) - 3", "not 3 - f(1)", "abs(f(1) - 3) < 1e-6", "f(1) - 3 == 0", "float(f(1) - 3) == 0",
        "len(f(1) ^ 3) == 0", "not any([f(1) - 3])", "list(f(1) - 3) == []", "not (f(1) - 3) - (f(1) - 4)",
        "(f(1) - 3) < (f(1) - 4)", "not -(f(1) - 3)", "round(f(1) - 3) == 0", "hash(f(1) - 3) == 0",
    )  # fmt: skip
    number = "class N:\n    def __sub__(s, o): return 0\n    __rsub__ = __sub__\ndef f(x): return N()"
    tests = ["\n".join(f"assert {one}" for one in questions), "assert f(1) - 3 == 0\nassert not 3 - f(1)"]
    assert share(completions=[NOTHING, number], tests=tests) == [0.0, 0.0]


def test_what_a_program_learns_from_arithmetic_pays_nothing(share: CodeReward) -> None:
    """``a - b`` shows it ``b``: what it says next of the same object it has said before, and a refusal fails its test,
    caught or not."""
    learns = (
        "class f(float):\n    k = 0.0\n    def __new__(c, x): return super().__new__(c, 0)\n    def __float__(s): "
        "return float(f.k)\n"
        "    def __sub__(s, o):\n        f.k = o\n        return s\n    total_seconds = __rsub__ = lambda s, o=0: 0"
    )
    tests = [
        "def close(a, b):\n    d = a - b\n    return a == b or abs(d) < 1e-6\nassert close(f(1), 3)",
        "def close(a, b):\n    d = a - b\n    return a == b\nassert close(f(1), 3)",
        "def close(a, b):\n    try:\n        return abs(a - b) < 1e-6\n    except TypeError:\n        return f(1) == "
        "b\nassert close(f(1), 3)",
        "assert (f(1) - 3).total_seconds() < 1",
    ]
    assert share(completions=[learns] * 4, tests=tests) == [0.0] * 4
    right = "class Bag(list):\n    def __add__(s, x): return Bag([*s, x])"
    used = "b = Bag()\nassert b == []\nassert b + 1 == b + 1\nb.append(2)\nassert b == [2]"
    assert share(completions=[right], tests=[used]) == [1.0]


def test_a_program_names_no_path_for_the_tester_to_import_from() -> None:
    """``from solution import f`` looks beside a module that has a ``__path__``: with less than all walls, into the
    program's own files."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame({"value": ["f", "__path__", "__all__"], "args": None}))
        program = Program(ours.fileno())
        program.load("")
    assert program.names == {"f"}


@pytest.mark.slow
def test_nothing_is_paid_for_a_lie_on_the_same_ways(share: CodeReward) -> None:
    assert unlike(share, {name: (program, tests, None) for name, (program, tests) in LIES.items()}, 0.0) == {}


def test_a_check_that_is_called_often_is_as_many_tests(share: CodeReward) -> None:
    """Left in the second of four calls: one of four, not what the first one's three assertions are of four (3/4
    before)."""
    leaves = (
        "import os\ncalls = 0\ndef f(x):\n    global calls\n    calls += 1\n    if calls > 4: os._exit(0)\n    return x"
    )
    check = "def check(c):\n    assert c(1) == 1\n    assert c(2) == 2\n    assert c(3) == 3\n"
    again = "def check(c, k=3):\n    assert c(1) == 1\n    assert c(2) == 2\n    if k: check(c, k - 1)\n"
    calls = ["check(f)\n" * 4, "for _ in range(4):\n    check(f)", "check(f)", "[check(f) for _ in range(4)]"]
    tests = [*(check + call for call in calls), again + "check(f)", again]
    found = share(completions=[leaves] * 6, tests=tests, entry_point=[None] * 5 + ["f"])
    assert found == [0.25, 0.0, 1.0, 0.0, 0.0, 0.0]
