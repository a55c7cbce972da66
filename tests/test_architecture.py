"""The direction of imports (DESIGN.md): walked by ``ast``, and tried in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_lab import _HOMES
from import_graph import circles, graph_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_lab"

BASE = {"batch", "registry", "settings"}
MIDDLE = {"objectives", "advantages", "rewards", "update", "engines", "data", "curation", "diagnostics", "turns"}
UPPER = (
    BASE | MIDDLE | {"finite", "hub", "io", "locks", "reading", "sandbox", "signals", "verifiers", "visible", "trainer"}
)
ALLOWED: dict[str, set[str]] = {
    "batch": set(),
    "io": set(),
    "reading": set(),
    "finite": set(),
    "hub": set(),
    "settings": set(),
    "visible": set(),
    "requirements": set(),
    "commands": set(),
    "signals": set(),
    "threads": set(),
    "locks": set(),
    "registry": {"settings"},
    "sandbox": {"io"},
    "verifiers": {"io", "sandbox"},
    "objectives": BASE,
    "advantages": BASE,
    "update": BASE,
    "rewards": BASE | {"io", "reading", "verifiers", "sandbox", "turns"},
    "data": BASE | {"hub", "io", "reading", "verifiers"},
    "curation": BASE | {"finite", "io", "locks", "reading", "verifiers", "visible"},
    "engines": BASE | {"finite", "io", "requirements", "signals", "threads", "verifiers", "sandbox"},
    "diagnostics": BASE | {"verifiers"},
    "turns": BASE | {"engines", "io", "signals", "sandbox", "threads", "visible"},
    "testing": BASE | MIDDLE | {"verifiers"},  # shipped for teams: may use the rooms it imitates
    "trainer": BASE
    | MIDDLE
    | {"finite", "io", "reading", "requirements", "signals", "threads", "verifiers", "sandbox"},
    "evaluation": UPPER,
    "recipe": UPPER | {"testing"},
    "runs": UPPER | {"evaluation", "recipe"},
    "stages": UPPER | {"evaluation", "recipe", "runs"},
    "pipelines": UPPER | {"evaluation", "testing", "recipe", "runs", "stages"},
    "labs": UPPER | {"evaluation", "pipelines", "recipe", "runs", "stages"},
    "cli": UPPER | {"commands", "evaluation", "testing", "pipelines", "recipe", "requirements", "runs"},
    "__init__": {"trainer", "objectives", "advantages", "requirements"},
    "__main__": {"cli"},
}
"""room → rooms that it may import. No arrow up, none sideways but what stands here."""

PURE = {"io", "locks", "requirements", "reading", "signals", "visible", "batch", "registry", "objectives", "advantages"}
PURE_THIRD_PARTY = {"torch", "numpy"}
"""What the pure rooms may import besides the standard library."""

HEAVY = {"trl", "transformers", "vllm", "math_verify", "deepspeed", "peft"}
"""Never at the top of a module outside the trainer, pipelines, evaluation and command line: loaded where they are
needed."""
MAY_LOAD_HEAVY = {"trainer", "recipe", "runs", "pipelines", "evaluation", "cli"}
MADE_OF_HEAVY = {"engines/compiled.py", "engines/generate.py", "labs/old_weights.py"}
"""Files that derive from a class of such a package; whoever needs one loads it where it is needed."""
HANDLERS = {"signals.py", "sandbox/fork_server.py", "sandbox/jail.py"}
"""The files that install a handler of signals: everybody else asks ``grpo_lab.signals``."""
APPEND = {"io.py", "curation/pass_rate.py", "labs/forks.py", "turns/journal.py"}
"""The files that open a file to append: samples, turns and what is written by ``io``, which cuts a torn end off, and a
log, which nobody reads as rows."""
LIGHT = (
    "grpo_lab",
    *(
        f"grpo_lab.{room}"
        for room in (*sorted(BASE), "io", "reading", "sandbox", "verifiers", *sorted(MIDDLE), "testing")
    ),
    "grpo_lab.labs.experiment",  # starts a process for each cell: 9 s a start where it loads TRL
)
"""Importing any of these must load none of ``FORBIDDEN``."""
FORBIDDEN = ("trl", "transformers", "vllm", "math_verify")


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands, what it loads, and whether it runs when the module is loaded."""

    path: Path
    line: int
    module: str
    at_load: bool

    @property
    def room(self) -> str:
        return room_of(self.path)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path, source: str | None = None) -> list[Import]:
    """Every import of a file; those under ``if TYPE_CHECKING`` count, but do not run at load."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source)
    found: list[Import] = []

    def visit(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(path, node.lineno, alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend(Import(path, node.lineno, name, at_load) for name in _targets(path, node))
        inside = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            inside = False
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, True)
    return found


def _targets(path: Path, node: ast.ImportFrom) -> list[str]:
    base = node.module or ""
    if node.level:
        package = ["grpo_lab", *path.relative_to(PACKAGE).parts[:-1]]
        base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
    if base == "grpo_lab":  # `from grpo_lab import data`, or one of the names that it loads lazily from their room
        return [_HOMES.get(alias.name, f"grpo_lab.{alias.name}") for alias in node.names]
    return [base]


def wrong_arrow(found: Import) -> str | None:
    """Why an import is not allowed, or ``None``."""
    top, *rest = found.module.split(".")
    if top == "grpo_lab":
        return _wrong_room(found, rest[0] if rest else "__init__")
    if top == "trl" and found.room not in ("trainer",):
        return "only grpo_lab/trainer/ knows TRL"
    if top == "vllm" and (found.at_load or found.room not in ("engines", "trainer")):
        return "vllm is imported lazily, by engines"
    made_of_heavy = str(found.path.relative_to(PACKAGE)) in MADE_OF_HEAVY
    if top in HEAVY and found.at_load and found.room not in MAY_LOAD_HEAVY and not made_of_heavy:
        return f"{top} must be imported inside the function that needs it"
    known = top in sys.stdlib_module_names or top in PURE_THIRD_PARTY
    if found.room in PURE and not known:
        return "a pure room imports torch, numpy and the standard library"
    return None


def _wrong_room(found: Import, target: str) -> str | None:
    if target == found.room or target == "__version__":
        return None
    if found.room not in ALLOWED:
        return f"room {found.room!r} has no row in ALLOWED"
    if target not in ALLOWED[found.room]:
        return f"{found.room} may import {sorted(ALLOWED[found.room])}"
    return None


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def installs_a_handler(source: str) -> bool:
    """Whether ``signal.signal`` is given a function: the system's own two answers to a signal are no handler."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    given = [call.args[1] for call in calls if ast.unparse(call.func) == "signal.signal"]
    either = [[one.body, one.orelse] if isinstance(one, ast.IfExp) else [one] for one in given]
    return any(ast.unparse(one) not in ("signal.SIG_DFL", "signal.SIG_IGN") for found in either for one in found)


@pytest.mark.not_fast
def test_three_files_install_handlers_of_signals() -> None:
    assert installs_a_handler("signal.signal(signal.SIGTERM, heard)")
    assert not installs_a_handler("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    found = {path.relative_to(PACKAGE).as_posix() for path in package_files() if installs_a_handler(path.read_text())}
    assert found == HANDLERS


def appends(source: str) -> bool:
    """Whether a file is opened to be appended to: ``open(file, "ab")``, ``file.open("a")``."""
    if '"a' not in source and "os.O_APPEND" not in source:
        return False
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    opened = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("open", "fdopen")]
    given = [value for call in opened for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    modes = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return any("a" in mode and set(mode) <= set("abt+") for mode in modes) or "os.O_APPEND" in source


def test_files_grow_by_one_rule() -> None:
    """A batch of rows that a kill or a full disk has torn is cut off by who opens the file next."""
    assert appends('open(path, "a+b", opener=no_link)')
    assert appends('cell.log.open("a", encoding="utf-8")')
    assert not appends('open(path, "rb", encoding="ascii")')
    found = {path.relative_to(PACKAGE).as_posix() for path in package_files() if appends(path.read_text())}
    assert found == APPEND


MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60
"""What a reader can hold: checked for the package, ``scripts/`` and ``tests/stress/``."""


def too_long(path: str, source: str) -> list[str]:
    """``path`` where the file is too long, ``path function`` where one of its functions is (decorators do not
    count)."""
    found = [path] if len(source.splitlines()) > MOST_LINES else []
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return found + [
        f"{path} {node.name}"
        for node in functions
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    ]


@pytest.mark.not_fast
def test_no_file_and_no_function_is_too_long() -> None:
    files = [*package_files(), *(ROOT / "scripts").glob("*.py"), *(ROOT / "tests" / "stress").glob("*.py")]
    found = [
        one for path in files for one in too_long(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_a_planted_long_one_is_seen() -> None:
    body = "    x = 1\n"
    longest = f"def right() -> None:\n{body * (MOST_LINES_OF_A_FUNCTION - 1)}"
    assert too_long("a.py", longest) == []
    assert too_long("a.py", f"class A:\n    async def wrong(self):\n{('    ' + body) * MOST_LINES_OF_A_FUNCTION}") == [
        "a.py wrong"
    ]
    assert too_long("a.py", "x = 1\n" * MOST_LINES) == []
    assert too_long("a.py", "x = 1\n" * (MOST_LINES + 1)) == ["a.py"]


MOST_FILES_OF_A_FOLDER = 24


def class_names(sources: dict[str, str]) -> set[str]:
    """Those that more than one class has, classes inside functions and classes left out."""
    names = [node.name for text in sources.values() for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {name for name in names if names.count(name) > 1}


@pytest.mark.not_fast
def test_no_class_name_twice() -> None:
    sources = {str(path): path.read_text(encoding="utf-8") for path in package_files()}
    assert class_names(sources) == set()
    assert class_names({"a.py": "class A: ...", "b.py": "class A: ..."}) == {"A"}


def test_no_folder_has_more_files_than_a_reader_holds() -> None:
    counts = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in package_files())
    assert [folder for folder, files in counts.items() if files > MOST_FILES_OF_A_FOLDER] == []


FEWEST_LINES_OF_A_FRAGMENT = 60
SMALL_FOR_A_REASON = {
    "trainer/metrics/model_card.py": "what a model's card says is looked for by that name",
    "trainer/settings/advantage_conflicts.py": "conflicts.py would have more than 400 lines",
}


def fragments() -> set[str]:
    """Small modules that only one other module imports: they belong into it, or need a reason."""
    graph = graph_of(PACKAGE, ROOT)
    read_by = Counter(target for targets in graph.values() for target in targets)
    small = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.relative_to(PACKAGE).as_posix()
        for path in package_files()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < FEWEST_LINES_OF_A_FRAGMENT
    }
    return {place for module, place in small.items() if read_by[module] == 1}


@pytest.mark.not_fast
def test_no_fragments() -> None:
    assert fragments() - SMALL_FOR_A_REASON.keys() == set()


@pytest.mark.not_fast
def test_every_arrow_points_down() -> None:
    wrong = [f"{found}: {why}" for path in package_files() for found in imports_of(path) if (why := wrong_arrow(found))]
    assert not wrong, "\n".join(wrong)


def handed_a_recipe(source: str) -> bool:
    """Whether a function of it has a parameter that is a whole ``Recipe`` of a training."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    given = [one.annotation for f in functions for one in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
    return any(isinstance(kind, ast.Name) and kind.id == "Recipe" for kind in given)


@pytest.mark.not_fast
def test_a_recipe_is_resolved_once_and_handed_to_few() -> None:
    """Beyond ``recipe/`` a training has a ``Job``; the run's folder compares recipes, and the dry run puts one into
    words."""
    handed = {p.relative_to(PACKAGE).as_posix() for p in package_files() if handed_a_recipe(p.read_text())}
    beyond = {"pipelines/train.py", "pipelines/dry_run.py", "pipelines/run_folder.py", "pipelines/resume.py"}
    assert {name for name in handed if not name.startswith("recipe/")} <= beyond
    assert len(handed) <= 12
    assert not handed_a_recipe("def f(job: Job) -> Recipe: ...")


def test_every_room_has_a_row() -> None:
    assert {room_of(path) for path in package_files()} <= ALLOWED.keys()


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("objectives/x.py", "from grpo_lab.rewards import AccuracyReward"),
        ("objectives/x.py", "from grpo_lab import trainer"),
        ("objectives/x.py", "from ..trainer import LabTrainer"),
        ("advantages/x.py", "from grpo_lab.objectives.kl import k3"),
        ("io.py", "import transformers"),
        ("registry.py", "import datasets"),
        ("data/x.py", "from grpo_lab.curation import pass_rate"),
        ("rewards/x.py", "def f():\n    import trl"),
        ("rewards/x.py", "import math_verify"),
        ("rewards/x.py", "try:\n    import math_verify\nexcept ImportError:\n    pass"),
        ("engines/x.py", "import vllm"),
        ("evaluation/x.py", "from trl import GRPOTrainer"),
        ("trainer/x.py", "from grpo_lab.pipelines import r1"),
        ("trainer/x.py", "from grpo_lab.testing import tiny_model"),
        ("recipe/x.py", "from grpo_lab.pipelines import train"),
        ("runs/x.py", "from grpo_lab.stages import sample"),
        ("stages/x.py", "from grpo_lab.pipelines import train"),
        ("batch.py", "from grpo_lab import registry"),
        ("attic/x.py", "from grpo_lab import batch"),
    ],
)
def test_a_wrong_arrow_is_seen(place: str, source: str) -> None:
    found = imports_of(PACKAGE / place, source)
    assert any(wrong_arrow(one) for one in found)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("trainer/x.py", "import trl"),
        ("engines/x.py", "def f():\n    from vllm import LLM"),
        ("rewards/x.py", "from grpo_lab.verifiers import Verdict"),
        ("testing/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers"),
        (
            "objectives/x.py",
            "import torch, math\nfrom grpo_lab.batch import safe\nfrom grpo_lab.objectives.kl import k3",
        ),
        ("cli.py", "from grpo_lab import __version__, trainer"),
    ],
)
def test_a_right_arrow_is_let_through(place: str, source: str) -> None:
    assert not [why for one in imports_of(PACKAGE / place, source) if (why := wrong_arrow(one))]


@pytest.mark.not_fast
def test_importing_the_light_rooms_loads_nothing_heavy() -> None:
    """One fresh process, room after room; the first room that loads something heavy is named."""
    rooms = [
        name
        for name in LIGHT
        if name == "grpo_lab"
        or (PACKAGE / name.split(".")[1]).exists()
        or (PACKAGE / f"{name.split('.')[1]}.py").exists()
    ]
    script = (
        "import importlib, sys\n"
        f"for room in {rooms!r}:\n"
        "    importlib.import_module(room)\n"
        f"    heavy = [name for name in {FORBIDDEN!r} if name in sys.modules]\n"
        "    assert not heavy, f'import {room} loaded {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_grpo_lab_does_not_even_load_torch() -> None:
    script = "import sys, grpo_lab; assert 'torch' not in sys.modules; print(sorted(grpo_lab.__all__))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


def test_there_is_no_circle() -> None:
    """Imports inside functions count: two files that need one thing share a file below both."""
    assert circles(graph_of(PACKAGE, ROOT)) == []
