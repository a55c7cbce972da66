"""The import graph of a folder of the package, by module, imports for type checkers and inside functions included."""

from __future__ import annotations

import ast
from pathlib import Path


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of_source(source: str, module: str, package: bool, known: set[str]) -> set[str]:
    """Modules of ``known`` that a source text imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                home = module.split(".") if package else module.split(".")[:-1]
                base = ".".join([*home[: len(home) - node.level + 1], *([node.module] if node.module else [])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & known
            found |= submodules
            if len(submodules) < len(node.names):
                found.add(base)
    return (found & known) - {module}


def graph_of(folder: Path, root: Path) -> dict[str, set[str]]:
    """module → modules below ``folder`` that it imports."""
    files = {module_of(path, root): path for path in sorted(folder.rglob("*.py"))}
    return {
        module: imports_of_source(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", set(files))
        for module, path in files.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (strongly connected components of more than one module)."""
    reach: dict[str, set[str]] = {}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for other in graph[ahead.pop()]:
                if other not in seen:
                    seen.add(other)
                    ahead.append(other)
        return seen

    for module in graph:
        reach[module] = reached(module)
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [list(group) for group in sorted(groups)]
