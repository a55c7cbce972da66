"""What another release of TRL moves under our feet, without installing or importing it.

    python scripts/check_upstream.py 1.17.0          # downloads the wheel with pip, compares with the installed release
    python scripts/check_upstream.py 1.13.0 --diff   # with the changed code, method by method
    python scripts/check_upstream.py --wheel FILE --base 1.15.0

It reads both releases as text (their syntax trees, without comments and docstrings), and from our code which names of
``trl`` we import, override, call and read. Printed is a line for each name that is not the same: ``body`` (other code
under the same signature), ``signature`` or ``gone``; then the counts, and what a user of that release reads. Exit code:
0 if nothing that we rely on has moved; 1 if code has changed under the same names; 2 if a name or a signature has.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "grpo_lab"
BRIDGE = PACKAGE / "trainer" / "trl_bridge"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ORDER = ("same", "body", "signature", "gone")
GONE = "gone"


class Release:
    """One unpacked release of TRL: its top-level classes, functions and constants by name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.found: dict[str, list[tuple[str, ast.stmt]]] = {}
        for file in sorted(folder.rglob("*.py")):
            module = ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
            for node in _top_level(ast.parse(file.read_text())):
                for defined in _names(node):
                    self.found.setdefault(defined, []).append((module, node))

    def get(self, name: str, module: str = "trl") -> ast.stmt | None:
        """Return the definition of ``name`` in ``module`` or, if it has none, in a module below it; else None."""
        places = self.found.get(name, [])
        inside = [node for where, node in places if where == module]
        aside = ".experimental" if ".experimental" not in module else " "
        below = [node for where, node in places if where.startswith(f"{module}.") and aside not in where]
        return next(iter(inside or below), None)

    def has(self, name: str, module: str) -> bool:
        """Return whether ``from module import name`` can work: ``name`` is defined there or below, or is a module."""
        return self.get(name, module) is not None or any(
            where == f"{module}.{name}" for places in self.found.values() for where, _ in places
        )

    def method(self, kind: str, name: str) -> Definition | None:
        """Return the method ``name`` of a class, its own or that of a base in TRL; None if there is none."""
        node = self.get(kind)
        if not isinstance(node, ast.ClassDef):
            return None
        for item in node.body:
            if isinstance(item, Definition) and item.name == name:
                return item
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in self.found]
        return next((found for base in bases if (found := self.method(base, name))), None)

    def attributes(self, kind: str) -> set[str]:
        """Return the names that a class and its bases in TRL define or assign to ``self``."""
        node = self.get(kind)
        if not isinstance(node, ast.ClassDef):
            return set()
        found = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and _is_self(n)}
        found |= {name for item in node.body for name in _names(item)}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.found:
                found |= self.attributes(base.id)
        return found


def _top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under a condition."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):  # names that stand under a condition
            yield from _top_level(node)
        elif isinstance(node, ast.stmt):
            yield node


def _names(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_self(node: ast.Attribute) -> bool:
    """Return whether an attribute is assigned to ``self``."""
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"


def code(node: ast.stmt | None) -> str:
    """Return the text of a definition without docstrings and comments."""
    if node is None:
        return ""
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        if isinstance(inner, Definition) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(copy)


def parameters(node: ast.stmt | None) -> str:
    """Return the signature of a function as text; "" for anything else."""
    return ast.unparse(node.args) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""


@dataclass(frozen=True)
class Finding:
    """What became of a name that we rely on: ``why`` we do, its ``state`` (one of `ORDER`) and the ``diff`` of its
    code."""

    name: str
    why: str
    state: str
    diff: str = ""


def compared(name: str, why: str, old: ast.stmt | None, new: ast.stmt | None, releases: tuple[str, str]) -> Finding:
    """Compare a definition in two releases, whose names are ``releases``."""
    before = code(old)
    after = code(new)
    if before == after and new is not None:
        return Finding(name, why, "same")
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *releases, lineterm="", n=2)
    if old is None or new is None:
        return Finding(name, why, GONE if new is None else "signature", "\n".join(lines))
    return Finding(name, why, "body" if parameters(old) == parameters(new) else "signature", "\n".join(lines))


def imports_of_trl() -> set[tuple[str, str]]:
    """Return (module, name) of everything that grpo_lab imports from ``trl``."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                found |= {(node.module or "", alias.name) for alias in node.names}
    return found


def our_subclasses(release: Release) -> Iterator[tuple[str, str]]:
    """Yield (class of TRL, method) for each method of TRL that a class of ours overrides. Only classes that name a
    class of TRL as their base are looked at, not what is derived from them."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in (b.id for b in node.bases if isinstance(b, ast.Name) and b.id in release.found):
                methods = {item.name for item in node.body if isinstance(item, Definition)}
                yield from ((base, name) for name in sorted(methods) if release.method(base, name) is not None)


def findings(old: Release, new: Release) -> list[Finding]:
    """Compare everything that we rely on in two releases."""
    names = runpy.run_path(str(BRIDGE / "names.py"))
    pair = (f"trl {old.name}", f"trl {new.name}")
    result = [
        Finding(f"{module}.{name}", "imported", "same" if new.has(name, module) else GONE)
        for module, name in sorted(imports_of_trl())
    ]
    methods = {("GRPOTrainer", name) for name in names["METHODS"]} | set(our_subclasses(old))
    for kind, name in sorted(methods):
        before = old.method(kind, name)
        after = new.method(kind, name)
        if before is not None or after is not None:  # else it is transformers' own
            result.append(compared(f"{kind}.{name}", "overridden or called", before, after, pair))
    lost = set(names["ATTRIBUTES"]) & old.attributes("GRPOTrainer") - new.attributes("GRPOTrainer")
    result += [Finding(f"GRPOTrainer.{name}", "read", GONE) for name in sorted(lost)]
    for module, name in sorted(imports_of_trl()):
        before = old.get(name, module)
        after = new.get(name, module)
        if isinstance(before, ast.FunctionDef):
            result.append(compared(name, "called", before, after, pair))
    return result + list(_fields(old, new))


def _fields(old: Release, new: Release) -> Iterator[Finding]:
    """Yield the settings of ``GRPOConfig`` that are gone, are new, or have another type or default."""
    before, after = (_settings(release) for release in (old, new))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            state = GONE if name not in after else "body"
            yield Finding(f"GRPOConfig.{name}", "setting", state, f"-{before.get(name)}\n+{after.get(name)}")


def _settings(release: Release) -> dict[str, str]:
    """Return setting of ``GRPOConfig`` → its type and default as text."""
    node = release.get("GRPOConfig")
    assert isinstance(node, ast.ClassDef), f"trl {release.name} has no GRPOConfig"
    found = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            keywords = item.value.keywords if isinstance(item.value, ast.Call) else []
            default = [ast.unparse(k.value) for k in keywords if (k.arg or "").startswith("default")]
            found[item.target.id] = f"{ast.unparse(item.annotation)} = {', '.join(default)}"
    return found


def unpacked(version: str, wheel: str | None, into: Path) -> Path:
    """Unpack a release, from a wheel on disk or downloaded by pip, and return its folder ``trl``. Exits with a message
    if that fails."""
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), f"trl=={version}"]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(into.glob(f"trl-{version}-*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel"]
            sys.exit(f"trl {version} could not be downloaded: {said[-1]}")
        wheel = str(wheels[0])
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into / version)
    except (OSError, zipfile.BadZipFile) as error:
        sys.exit(f"{wheel} cannot be read as a wheel: {error}")
    if not (into / version / "trl" / "trainer").is_dir():
        sys.exit(f"{wheel} holds no folder trl/trainer: it is no release of TRL")
    return into / version / "trl"


def installed() -> tuple[Path, str]:
    """Return the folder and the version of the installed TRL."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        sys.exit("no trl is installed to compare with; name one with --base")
    folder = Path(spec.origin).parent
    info = next(folder.parent.glob("trl-*.dist-info"))
    return folder, info.name.split("-")[1].removesuffix(".dist")


def verdict_for_users(version: str) -> str:
    """Return what somebody reads who installs grpo_lab beside this release of TRL and imports it."""
    try:
        runpy.run_path(str(BRIDGE / "names.py"))["refuse_untested"](version)
    except ImportError as error:
        return f"ImportError: {error}"
    return "nothing: the release is supported"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("version", nargs="?", help="release of TRL to look at, such as 1.17.0")
    parser.add_argument("--wheel", help="a wheel on disk in place of a download")
    parser.add_argument("--base", help="release to compare with (default: the installed one)")
    parser.add_argument("--diff", action="store_true", help="print the changed code as well")
    args = parser.parse_args()
    if args.version is None and args.wheel is None:
        parser.error("name a release, or give --wheel")
    version = args.version or [*Path(args.wheel).name.split("-"), ""][1]
    if not version[:1].isdigit():
        parser.error(
            f"{args.version or args.wheel!r} names no release: a version such as 1.17.0, or a wheel named "
            "trl-VERSION-….whl"
        )
    with tempfile.TemporaryDirectory() as scratch:
        new = Release(unpacked(version, args.wheel, Path(scratch)), version)
        folder, name = (unpacked(args.base, None, Path(scratch)), args.base) if args.base else installed()
        found = findings(Release(folder, name), new)
    for finding in found:
        if finding.state != "same":
            print(f"{finding.state:10}{finding.name}  ({finding.why})")
            if args.diff and finding.diff:
                print("\n".join(f"    {line}" for line in finding.diff.splitlines()))
    counts = Counter(finding.state for finding in found)
    print(f"trl {version} against {name}: " + ", ".join(f"{counts[state]} {state}" for state in ORDER))
    print(f"a user of trl {version} reads: {verdict_for_users(version)}")
    return 2 if counts["signature"] or counts[GONE] else int(bool(counts["body"]))


if __name__ == "__main__":
    sys.exit(main())
