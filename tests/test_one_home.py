"""A number that is one setting's default is written once: another place names it (``NEW_TOKENS``, ``Options.port``)."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "grpo_lab"
#: numbers that say nothing by themselves
PLAIN = {0, 1, 2, -1, 0.5}
#: files whose numbers are quotations: what a paper has
QUOTED = {"objectives/presets.py"}
#: names that are two settings, or none, and have the same number in two places
TWO_MEANINGS = {
    "maxsize": "of caches",
    "count": "rounds of a method; samples that are shown",
    "most_steps": "calculations of a problem; steps that are kept for a look",
    "timeout": "seconds of a request; of a connection",
    "timeout_s": "seconds of a comparison; of a program",
    "n_samples": "of a method's recipe: pipelines write it where a recipe says nothing",
}


def numbers(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield what has a name and a value: defaults of arguments and fields, constants, keywords, entries, options."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            places = [*node.args.posonlyargs, *node.args.args]
            yield from zip((one.arg for one in reversed(places)), reversed(node.args.defaults), strict=False)
            yield from ((one.arg, value) for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults) if value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.Dict):
            keys = [getattr(key, "value", None) for key in node.keys]
            yield from ((key, value) for key, value in zip(keys, node.values, strict=True) if isinstance(key, str))
        elif isinstance(node, ast.Call):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            for keyword in node.keywords:
                if keyword.arg == "default" and isinstance(name, str):
                    yield name, keyword.value
                elif keyword.arg:
                    yield keyword.arg, keyword.value


def doubles(files: Mapping[str, str]) -> list[str]:
    """Sentences on the numbers that stand for one setting in several places of ``files`` (name → text)."""
    found = defaultdict(list)
    for file, text in files.items():
        for name, value in numbers(ast.parse(text)):
            if isinstance(value, ast.Constant) and type(value.value) in (int, float) and value.value not in PLAIN:
                setting = name.strip("-_").replace("-", "_").lower()
                found[setting, value.value].append(f"{file}:{value.lineno}")
    return [
        f"{name} = {number} stands in {', '.join(places)}"
        for (name, number), places in found.items()
        if len(places) > 1 and name not in TWO_MEANINGS
    ]


def test_a_number_has_one_home() -> None:
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert doubles({file: text for file, text in files.items() if file not in QUOTED}) == []


def test_a_planted_double_is_seen() -> None:
    planted = {"a.py": "def f(x, port=8000): ...", "b.py": "add('--port', default=8000)"}
    assert doubles(planted) == ["port = 8000 stands in a.py:1, b.py:1"]
    assert doubles({**planted, "b.py": "add('--port', default=PORT)"}) == []
