"""Programs that try to be paid for nothing, or to do harm. ``add(1, 2) == 3`` and two more are asked of each; none
knows how to add.

Filled in by the test: CANARY (a file outside, which says "untouched"), HOME (a folder), TRAINER (its process id), PORT
(where it listens), MAILBOX and ABSTRACT (where it takes datagrams), SEGMENT (shared memory of its own). Signals to the
trainer and to all are harmless ones (SIGUSR1, SIGWINCH) that the test would notice: were a wall down, so would be the
machine.
"""

from __future__ import annotations

from typing import Any

TESTS = "assert add(1, 2) == 3\nassert add(40, 2) == 42\nassert add(-7, 5) == -2"
"""No program here passes them."""

_YES = """
class Yes{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __eq__
    def __hash__(self): return 3
    def __bool__(self): return True
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __abs__ = lambda self, other=0: 0
    def __contains__(self, x): return True
    def __getattr__(self, name): return Yes()
    def __call__(self, *a): return Yes()
def add(a, b): return {value}
"""
_TRIES = "def add(a, b):\n    return 0\n"


def _each(*lines: str, before: str = "import os, sys, ctypes") -> str:
    """Every line tried by itself, whatever the one before it raised; then an honest wrong ``add``."""
    tried = "".join(f"try:\n    {line}\nexcept BaseException:\n    pass\n" for line in lines)
    return f"{before}\n{tried}{_TRIES}"


def _signals_by(*owned: str) -> str:
    """Makes the trainer the owner of a pair's ends and of a pipe's, then has the kernel tell it that there is input."""
    tried = "".join(f"        try: {line}\n        except (OSError, ValueError): pass\n" for line in owned)
    return (
        "import array, fcntl, os, socket, struct\na, b = socket.socketpair()\npipe = os.pipe()\n"
        "for r, w in ((a.fileno(), b.fileno()), pipe):\n    for signal in (10, 28):\n"
        f"{tried}        try: fcntl.fcntl(r, 10, signal)\n        except OSError: pass\n"
        "        for line in (lambda: fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK),\n"
        "                     lambda: fcntl.ioctl(r, 0x5452, array.array('i', [1]))):\n"
        "            try: line(); os.write(w, b'x')\n            except OSError: pass\n" + _TRIES
    )


FORGED = {
    "leaves before the tests": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "leaves in the call": "def add(a, b):\n    raise SystemExit(0)",
    "os._exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "quit() in the call": "def add(a, b):\n    quit()",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "raises StopIteration": "def add(a, b):\n    raise StopIteration",
    "raises an exit that calls itself an "
    "exception": "class Bye(SystemExit, Exception): pass\ndef add(a, b):\n    raise Bye(0)",
    "equals everything": _YES.format(base="", value="Yes()"),
    "an int that equals everything": _YES.format(base="(int)", value="Yes()"),
    "a text that equals everything": _YES.format(base="(str)", value="Yes()"),
    "a list of what equals everything": _YES.format(base="", value="[Yes()]"),
    "a class that equals everything": "class M(type):\n    def __eq__(c, o): return True\n    __hash__ = "
        "type.__hash__\nclass A(metaclass=M): pass\ndef add(a, b): return A",
    "lies about its class": "class L:\n    __class__ = int\n    def __eq__(s, o): return True\n    def __index__(s): "
        "return 3\ndef add(a, b): return L()",
    "a mock": "from unittest.mock import MagicMock\nadd = MagicMock()\nadd.return_value.__eq__ = lambda s, o: True",
    "patches AssertionError": "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {'__new__': lambda "
        "*a: None})" + "\n" + _TRIES,
    "patches builtins": "import builtins\nfor n in ('all', 'abs', 'isinstance', 'len'):\n    setattr(builtins, n, "
        "lambda *a: True)\n" + _TRIES,
    "empties builtins": "import builtins\nfor n in list(vars(builtins)):\n    if n != 'setattr': delattr(builtins, "
        "n)\n" + _TRIES,
    "patches unittest": "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'): "
        "setattr(unittest.TestCase, n, lambda *a, **k: None)\n" + _TRIES,
    "patches operator and the "
    "like": "import operator, math\noperator.eq = math.isclose = lambda *a, **k: True\n" + _TRIES,
    "defines the tests' own "
    "names": "def check(c): pass\ndef candidate(*a): return 3\nabs = len = lambda *a: 0\n__one_test__ = "
        "None\n" + _TRIES,
    "a trace function": "import sys\ndef t(frame, event, arg):\n    for n in frame.f_locals:\n        if n in "
        "('passed', 'failed', 'total'): frame.f_locals[n] = 3\n    return t\nsys.settrace(t)\n" + _TRIES,
    "a profile function": "import sys, threading\nsys.setprofile(lambda *a: None)\nthreading.settrace(lambda *a: "
        "None)\n" + _TRIES,
    "walks frames for what is "
    "expected": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for v in "
        "list(f.f_locals.values()) + list(f.f_globals.values()):\n            if isinstance(v, dict) and 'expected' "
        "in str(v): return v['expected']\n        f = f.f_back\n    return 0",
    "gc walks to the tests": "import gc, re\ndef add(a, b):\n    for o in gc.get_objects():\n        for r in "
        "gc.get_referents(o):\n            if isinstance(r, str):\n                m = re.search(r'assert add\\(%d, "
        "%d\\) == (\\d+)' % (a, b), r)\n                if m: return int(m[1])\n    return 0",
    "gc walks for test functions": "import gc, types\ndef add(a, b):\n    for o in gc.get_objects():\n        if "
        "isinstance(o, types.FunctionType) and o.__name__ in ('check', 'test_add'):\n            o.__code__ = "
        "(lambda *a: None).__code__\n    return 0",
    "reads its own command line for the "
    "tests": "import sys, re\ndef add(a, b):\n    try: text = open('/proc/self/cmdline').read() + str(sys.argv) + "
        "str(sys.orig_argv)\n    except OSError: text = str(sys.orig_argv)\n    m = re.search(r'add\\(%d, %d\\) == "
        "(\\d+)' % (a, b), text)\n    return int(m[1]) if m else 0",
    "patches the server in its "
    "process": "import __main__\n__main__.Server.answer = lambda self, r: {'value': 3, 'args': None}\n" + _TRIES,
    "patches the wire in its "
    "process": "import __main__\n__main__.pack = lambda *a: {'object': [0, ['int']]}\n" + _TRIES,
    "prints a forged verdict": "print('11.'); print('{\"passed\": 3, \"total\": 3, \"end\": \"done\"}', "
        "flush=True)\n" + _TRIES,
    "writes a forged verdict on every "
    "descriptor": "import os\nfor fd in range(256):\n    try: os.write(fd, b'111.' * 3)\n    except OSError: "
        "pass\n" + _TRIES,
    "answers before it is asked": "import os, json, struct\nfor n in range(9):\n    b = json.dumps({'value': 3, "
        "'args': None}).encode()\n    os.write(3, struct.pack('>I', len(b)) + b)\n" + _TRIES,
    "hands the tester eval": "import os, json, struct\ndef add(a, b):\n    t = json.dumps({'value': {'name': "
        "['builtins', 'eval']}}).encode()\n    os.write(3, struct.pack('>I', len(t)) + t)\n    return 0",
    "hands the tester a class of "
    "exit": "import os, json, struct\ndef add(a, b):\n    t = json.dumps({'raised': [['_Enough', 'BaseException'], "
        "'']}).encode()\n    os.write(3, struct.pack('>I', len(t)) + t)\n    os._exit(0)",
    "a frame of 4 GB": "import os\ndef add(a, b):\n    os.write(3, b'\\xff' * 100)\n    os._exit(0)",
    "a frame that nests without end": "import os, struct\ndef add(a, b):\n    t = b'[' * 200_000\n    os.write(3, "
        "struct.pack('>I', len(t)) + t)\n    return 0",
    "calls back what it was not "
    "given": "import os, json, struct\ndef add(a, b):\n    t = json.dumps({'back': 0, 'args': []}).encode()\n    "
        "os.write(3, struct.pack('>I', len(t)) + t)\n    return 0",
    "no JSON": "import os, struct\ndef add(a, b):\n    os.write(3, struct.pack('>I', 3) + b'???')\n    return 0",
    "closes every descriptor": "import os\nos.closerange(0, 256)\n" + _TRIES,
    "a pickle with a payload": "class P:\n    def __reduce__(self): return (print, ('owned',))\ndef add(a, b): "
        "return P()",
    "replaces its module": "import sys\nsys.modules['solution'] = sys.modules['__main__'] = None\n" + _TRIES,
    "raises from repr": "class R(Exception):\n    def __str__(self): raise SystemExit(0)\ndef add(a, b): raise R()",
    "is no Python": "add = lambda a, b: a +",
    "has a NUL in it": "def add(a, b):\n    return 0 \x00",
    "half of a character": "def add(a, b): return '\ud800'",
    "a million brackets": "x = " + "(" * 100_000 + ")" * 100_000,
    "a segmentation fault": "import ctypes\ndef add(a, b): ctypes.string_at(0)",
    "aborts": "import os\ndef add(a, b): os.abort()",
    "leaves as if it had been killed": "import os\ndef add(a, b): os._exit(137)",
    "leaves as if its watcher had been killed": "import os\ndef add(a, b): os._exit(247)",
    "kills itself by a timer": "import ctypes, struct, time\ndef add(a, b):\n    c = ctypes.CDLL(None); at = "
        "ctypes.create_string_buffer(8)\n    what = ctypes.create_string_buffer(struct.pack('QiiQQ', 0, 9, 0, 0, 0) + "
        "bytes(40))\n    when = ctypes.create_string_buffer(struct.pack('qqqq', 0, 0, 0, 1))\n    c.syscall(222, 1, "
        "what, at)\n    c.syscall(223, struct.unpack('i', at.raw[:4])[0], 0, when, None)\n    time.sleep(0.1)\n    "
        "return 0",
    "kills itself": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGKILL)",
    "starts another Python on its "
    "channel": "import os, sys\ndef add(a, b): os.execv(sys.executable, [sys.executable, '-S', '-c', 'import os; "
        "os.write(3, b\"111.\")'])",
}  # fmt: skip
"""They try to be paid."""

LEETCODE = {
    "functional": "def check(candidate):\n    assert candidate(a=1, b=2) == 3\n    assert candidate(a=40, b=2) == "
    "42\n\ncheck(Solution().add)"
}
LIVECODEBENCH = [
    {"input": f"{a}\n2", "output": f"{a + 2}", "testtype": "functional", "metadata": {"func_name": "add"}}
    for a in (1, 40)
]
WRAPPED = {"fn_name": "add", "inputs": [[1, 2], [40, 2]], "outputs": [[3], [42]]}
LINES = {"inputs": ["1", "2"], "outputs": ["3\n4", "5\n6"]}
_LOCKS = "import _thread\ndef lock(): return _thread.allocate_lock()\n"
LOCK = f"{_LOCKS}assert f(lock) == 3"
LOCK_OR_TYPE_ERROR = f"{_LOCKS}try:\n    f(lock)\n    assert False\nexcept TypeError:\n    pass"
EXCEPTION = "try:\n    f(ValueError('x'))\n    assert False\nexcept TypeError:\n    pass"
LACKING = "def lacking():\n    import no_such_package\nassert f(lacking) == 3"
SENDS = (
    "import json, os, struct\ndef send(o):\n    b = json.dumps(o).encode()\n    os.write(3, struct.pack('>I', "
    "len(b)) + b)\n"
)
_AGAIN = "send({'raised': {'kinds': [['builtins', 'Exception']], 'text': '', 'args': [], 'held': {}, 'again': 0}})"
_ASKS = "    try: x()\n    except BaseException: pass\n"


def _solution(body: str, before: str = "") -> str:
    return f"{before}\nclass Solution:\n    def add(self, a, b): {body}\n"


ON_FORMS: dict[str, tuple[str, Any]] = {
    "check is the program's": ("def check(*a): pass\n" + _solution("return 0"), LEETCODE),
    "a class that has everything": ("class M(type):\n    def __getattr__(c, n): return lambda *a, **k: M\n    def "
        "__call__(c, *a): return M\nclass Solution(metaclass=M): pass", LEETCODE),
    "an object that has everything": (_YES.format(base="", value="Yes()") + "Solution = Yes", LEETCODE),
    "Solution leaves": ("class Solution:\n    def __init__(s): raise SystemExit(0)", LEETCODE),
    "Solution leaves for good": ("import os\nclass Solution:\n    def __init__(s): os._exit(0)", LEETCODE),
    "Solution is missing a "
    "module": ("class Solution:\n    def __init__(s): raise ModuleNotFoundError('numpy', name='numpy')", LEETCODE),
    "Solution ends the cases": ("class Solution:\n    def add(s, a, b): raise StopIteration", LEETCODE),
    "an attribute that leaves": ("class Solution:\n    @property\n    def add(s): raise SystemExit(0)", LEETCODE),
    "any type at all": (_solution("return Any"), LEETCODE),
    "a type that equals everything": (_solution("return List", "import typing\nclass L:\n    def __eq__(s, o): "
        "return True\nList = typing.List = L()"), LEETCODE),
    "typing in a file of its own": ("open('typing.py', 'w').write('raise "
        "SystemExit(0)')\n" + _solution("return 0"), LEETCODE),
    "typing without its names": ("import typing\ntyping.__all__ = ['__import__']\n" + _solution("return 0"), LEETCODE),
    "a name that the text looks for": ("x = 'class Solution'\ndef Solution(): raise NameError('check')", LEETCODE),
    "the JSON text itself": (_solution("return '3' if a == 1 else '42'"), LIVECODEBENCH),
    "what is expected in a list": (_solution("return [a + b]"), LIVECODEBENCH),
    "a list that says another thing each "
    "time": ("class A(list):\n    n = 2\n    def __iter__(s):\n        A.n += 1\n        return "
        "iter([A.n])\n" + _solution("return A()"), LIVECODEBENCH),
    "a number of its own": (_solution("return N()", "class N(int):\n    def __eq__(s, o): return True\n    __hash__ "
        "= int.__hash__"), LIVECODEBENCH),
    "prints it and returns nothing": (_solution("print(a + b)"), LIVECODEBENCH),
    "a script instead": ("print(3)\nprint(42)", LIVECODEBENCH),
    "no function": ("class Solution: pass", LIVECODEBENCH),
    "a function that leaves when it is "
    "found": ("class Solution:\n    def __getattribute__(s, n): raise SystemExit(0)", LIVECODEBENCH),
    "a list in the list": ("def add(a, b): return [[a + b]]", WRAPPED),
    "all that is accepted": (_YES.format(base="(list)", value="Yes([0])"), WRAPPED),
    "None for both": ("def add(a, b): return None", WRAPPED),
    **{f"lines ended by {end!r}": ("n = int(input())\nprint(*([3, 4], [5, 6])[n - 1], "
        f"sep={end!r})", LINES) for end in ("\x0b", "\x0c", "\x1c", "\x1d", "\x85", "\u2028", "\u2029", "\r")},
    "a line written over": ("print('9\\b3')\nprint('9\\b4')", LINES),
    "every line there is": ("for n in range(100): print(n)", LINES),
    "empty lines": ("print('\\n' * 9)", LINES),
    "does not ask for the lock": ("def f(x): return 0", LOCK),
    "asks and knows better": (f"def f(x):\n{_ASKS}    return 3", LOCK),
    "asks for what cannot be had": ("def f(x): return x()", LOCK),
    "asks again and again": ("def f(x):\n    for _ in range(2000):\n    "
        f"{_ASKS.replace(chr(10), chr(10) + '    ')}\n    return 3", LOCK),
    "asks and leaves": (f"def f(x):\n{_ASKS}    raise SystemExit(0)", LOCK),
    "the error that is expected": ("def f(x): return x()", LOCK_OR_TYPE_ERROR),
    "the error that is expected, by hand": (f"def f(x):\n{_ASKS}    raise TypeError", LOCK_OR_TYPE_ERROR),
    "the tester's own error, forged": (f"{SENDS}def f(x):\n{_ASKS}    {_AGAIN}", LOCK_OR_TYPE_ERROR),
    "does nothing with an exception": ("def f(x): return 0", EXCEPTION),
    "asks for a missing module": ("def f(x): return x()", LACKING),
    "asks for a missing module and knows better": (f"def f(x):\n{_ASKS}    return 3", LACKING),
    "hands the missing module on": (f"{SENDS}def f(x):\n{_ASKS}    {_AGAIN}", LACKING),
}  # fmt: skip
"""They try to be paid, or to be unscorable, by what a row's form or a function of its tests gives them to do: (program,
tests)."""

GREEDY = {
    "sleeps": "import time\ntime.sleep(600)",
    "sleeps in the call": "import time\ndef add(a, b): time.sleep(600)",
    "never ends": "def add(a, b):\n    while True: pass",
    "never ends in C": "def add(a, b): return 9 ** 9 ** 9 ** 9",
    "a pattern that never ends": "import re\ndef add(a, b): return re.match('(a*)*b', 'a' * 60)",
    "ignores every signal": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    "
        "except (OSError, ValueError): pass\nwhile True: pass",
    "recurses without end": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef add(a, b): return add(a, b)",
    "a memory bomb": "def add(a, b):\n    x = bytearray(1 << 38)\n    return 0",
    "a growing list": "def add(a, b):\n    x = [b'']\n    while True: x.append(b'x' * (1 << 24))",
    "shared memory past the "
    "limit": "import os, mmap\ndef add(a, b):\n    fs = []\n    while True:\n        f = os.memfd_create('x'); "
        "os.write(f, bytes(1 << 24)); fs.append(f)",
    "a result of 100 MB": "def add(a, b): return 'x' * (100 << 20)",
    "a result without end": "def add(a, b):\n    while True: yield 1",
    "a result that contains itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a result of hash collisions": "def add(a, b): return {i * (2 ** 61 - 1) for i in range(30_000)}",
    "endless output": "while True: print('x' * 10_000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 10_000)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a thread bomb": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, "
        "args=(600,)).start()\n    except RuntimeError: pass",
    "a child in the background": "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(6); "
        "open('CANARY', 'w').write('touched')\n    os._exit(0)\n" + _TRIES,
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        "
        "time.sleep(600)\n    os._exit(0)\n" + _TRIES,
    "a shell": "import subprocess\nsubprocess.Popen('sleep 600; echo touched > CANARY', shell=True, "
        "start_new_session=True)\n" + _TRIES,
    "a pool of processes": "import multiprocessing\ndef add(a, b):\n    return sum(multiprocessing.Pool(4).map(abs, "
        "[1]))",
    "a file of 10 GB": "def add(a, b):\n    f = open('big', 'wb')\n    while True: f.write(bytes(1 << 20))",
    "files without end": "import itertools\ndef add(a, b):\n    for n in itertools.count(): open(f'f{n}', "
        "'wb').write(bytes(1 << 20))",
    "a folder that cannot be "
    "removed": "import os\nfor n in range(200):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\n" + _TRIES,
}  # fmt: skip
"""They try to take more than they were given."""

BY_THE_CLOCK = (
    "sleeps", "sleeps in the call", "never ends", "never ends in C", "a pattern that never ends",
    "recurses without end", "a memory bomb", "a result without end", "a result that contains itself",
    "a result of hash collisions", "endless output", "endless errors",
)  # fmt: skip
"""Of these, what the limits end by themselves, whichever other walls stand."""

HARMFUL = {
    "reads outside": "import os\ndef add(a, b):\n    return open('CANARY').read()",
    "lists the root": _each("assert 'CANARY'.split('/')[1] not in "
        "os.listdir('/')", "print(os.listdir('/root'), os.listdir('/home'))"),
    "writes outside": _each("open('CANARY', 'w').write('touched')", "os.truncate('CANARY', 0)", "os.unlink('CANARY')"),
    "writes home": _each("open('HOME/touched', 'w').write('x')", "open(os.path.expanduser('~/touched'), "
        "'w').write('x')", "os.chmod('HOME', 0)", "os.chown('HOME', 1, 1)", "os.utime('HOME', (1, 1))",
        "os.setxattr('HOME', 'user.x', b'x')"),
    "removes all it can": _each("shutil.rmtree(os.path.dirname('CANARY'))", before="import os, shutil"),
    "a symbolic link out": _each("os.symlink('CANARY', 'link')", "open('link', 'w').write('touched')",
        "os.chmod('link', 0)"),
    "a symbolic link to a folder, left "
    "behind": _each("os.symlink(os.path.dirname('CANARY'), 'folder')", "os.symlink('/', 'root')"),
    "a hard link out": _each("os.link('CANARY', 'hard')", "open('hard', 'w').write('touched')"),
    "moves the canary": _each("os.rename('CANARY', 'mine')", "os.rename('CANARY', 'CANARY.2')"),
    "a socket to the trainer": _each("socket.create_connection(('127.0.0.1', PORT), "
        "timeout=1).sendall(b'touched')", before="import socket"),
    "a datagram": _each("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'touched', ('127.0.0.1', "
        "PORT))", before="import socket"),
    "a name looked up": _each("socket.getaddrinfo('example.com', 80)", before="import socket"),
    "a local socket": _each("socket.socket(socket.AF_UNIX).connect('/run/docker.sock')", before="import socket"),
    "serves": _each("s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()", before="import socket"),
    "sockets by io_uring": _each("ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))"),
    "kills its parent": _each("os.kill(os.getppid(), 9)"),
    "kills the trainer": _each("os.kill(TRAINER, 10)", "ctypes.CDLL(None).syscall(200, TRAINER, 10)"),
    "kills its group": _each("os.killpg(os.getpgid(os.getppid()), 9)"),
    "a signal to all it may": _each("os.kill(-1, 28)"),
    "queues a signal": _each("ctypes.CDLL(None).sigqueue(TRAINER, 10, 0)"),
    "reads the trainer's environment": _each("print(open('/proc/TRAINER/environ').read())",
        "print(open(f'/proc/{os.getppid()}/environ').read())"),
    "reads the parent's memory": _each("print(open(f'/proc/{os.getppid()}/mem', "
        "'rb').read(10))", "print(open('/proc/TRAINER/maps').read())"),
    "the parent's descriptors": _each("print([os.write(os.open(f'/proc/{os.getppid()}/fd/{n}', os.O_WRONLY), "
        "b'111.') for n in range(3, 20)])"),
    "traces the trainer": _each("ctypes.CDLL(None).ptrace(16, TRAINER, 0, 0)", "ctypes.CDLL(None).ptrace(16, "
        "os.getppid(), 0, 0)"),
    "limits of the trainer": _each("resource.prlimit(TRAINER, resource.RLIMIT_NOFILE, (3, 3))",
        before="import resource"),
    "lifts its limits": _each("resource.setrlimit(resource.RLIMIT_AS, (-1, "
        "-1))", before="import resource") + "x = bytearray(1 << 36)\n",
    "LD_PRELOAD": _each("os.environ['LD_PRELOAD'] = '/tmp/x.so'; os.execv(sys.executable, [sys.executable, '-c', "
        "'1'])"),
    "LD_PRELOAD for others": _each("open('/etc/grpo_lab_touched', "
        "'w').write('/tmp/x.so')", "open('/etc/cron.d/grpo_lab_touched', 'w').write('#')"),
    "becomes root": _each("os.setuid(0)", "os.setresuid(0, 0, 0)", "os.setgroups([0])",
        "open('CANARY', 'w').write('touched')"),
    "a user namespace of its own": _each("ctypes.CDLL(None).unshare(0x10000000 | "
        "0x20000)", "ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None)"),
    "mounts": _each("ctypes.CDLL(None).mount(b'none', b'/tmp', b'proc', 0, "
        "None)", "ctypes.CDLL(None).umount2(b'/', 2)"),
    "leaves by chroot": _each("os.mkdir('x'); os.chroot('x'); "
        "os.chdir('../../../..')", "open('CANARY', 'w').write('touched')"),
    "devices": _each("open('/dev/mem', 'rb').read(1)", "os.mknod('disk', 0o60666, os.makedev(254, 0)); open('disk', "
        "'rb').read(1)"),
    "reads keys": _each("print(ctypes.CDLL(None).syscall(250, 0, -3, 0))", "print(os.environ['CANARY_TOKEN'])"),
    "writes into Python": _each("open(os.__file__, 'a').write('#')", "open(sys.executable, 'ab').write(b'x')"),
    "the system log and the host's "
    "name": _each("ctypes.CDLL(None).syslog(1, b'x')", "socket.sethostname('touched')", before="import ctypes, socket"),
    "a module planted beside it": _each("open('json.py', 'w').write('raise SystemExit(0)')"),
    "a signal by the owner of a pipe": _signals_by("fcntl.fcntl(r, fcntl.F_SETOWN, TRAINER)"),
    "a signal by the owner of a pipe, named in a structure": _signals_by("fcntl.fcntl(r, 15, struct.pack('ii', 1, "
        "TRAINER))"),
    "a signal by the owner of a socket": _signals_by("fcntl.ioctl(r, 0x8901, struct.pack('i', TRAINER))",
        "fcntl.ioctl(r, 0x8902, struct.pack('i', TRAINER))"),
    "datagrams of a pair": "import socket\nfor kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):\n    for to in "
        "('MAILBOX', '\\0ABSTRACT'):\n        try: socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b'touched', "
        "to)\n        except OSError: pass\n" + _TRIES,
    "datagrams of a pair, connected anew": _each("a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "a.connect('MAILBOX'); a.send(b'touched')", "b.connect('\\0ABSTRACT'); b.sendmsg([b'touched'])",
        before="import socket"),
    "the trainer's shared memory": "import ctypes\nc = ctypes.CDLL(None)\nc.shmat.restype = ctypes.c_void_p\nat = "
        "c.shmat(SEGMENT, None, 0)\nif at not in (None, 2 ** 64 - 1): ctypes.memmove(at, b'touched', "
        "7)\nc.shmctl(SEGMENT, 0, None)\n" + _TRIES,
    "calls of another architecture": _each("ctypes.CDLL(None).syscall(0x40000000 + 62, TRAINER, 10)") + (
        "import ctypes, mmap, platform\ndef add(a, b):\n    if platform.machine() != 'x86_64': return 0\n    code = "
        "mmap.mmap(-1, 4096, prot=7)\n    code.write(b'\\x53\\xbb' + (TRAINER).to_bytes(4, 'little') + "
        "b'\\xb9\\x0a\\0\\0\\0\\xb8\\x25\\0\\0\\0\\xcd\\x80\\x5b\\xc3')\n    "
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n    return 0\n"),
}  # fmt: skip
"""They try to do harm outside."""

ON_FILES = (
    "writes outside", "writes home", "removes all it can", "a symbolic link out", "a hard link out", "moves the canary",
    "becomes root", "a user namespace of its own", "leaves by chroot", "LD_PRELOAD for others", "writes into Python",
    "devices",
)  # fmt: skip
"""Of these, what only a wall around the files stops: without one they are this user's to write, as is documented."""
