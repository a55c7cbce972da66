"""YAML in which a line means one thing: a key stands once, and a value is what YAML 1.1 and 1.2 both take it for.

Read otherwise than by ``yaml.safe_load``: ``1e-3`` is a number and ``2024-05-01`` text, as in YAML 1.2. Refused, with
its line: a key that stands twice, ``010`` (8 or 10), ``1:30`` (90 or text), ``on`` as a key, an anchor inside itself,
nesting without end. A bare ``off`` is false, as in YAML 1.1; a setting that takes text says so (``reading.typed``).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

DEEPEST = 100
_AMBIGUOUS = "!ambiguous"
_OURS = (
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z")),
    (
        _AMBIGUOUS,
        re.compile(r"[-+]?(?:0[0-9_]+|[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)\Z"),
    ),
)


def _resolvers() -> dict[Any, list[tuple[str, Any]]]:
    """First character → the forms of plain text that are more than text. The dumper quotes texts of these forms."""
    stock = yaml.SafeLoader.yaml_implicit_resolvers
    kept = {first: [one for one in forms if not one[0].endswith(":timestamp")] for first, forms in stock.items()}
    return kept | {first: [*_OURS, *kept.get(first, ())] for first in "-+0123456789."}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []
        """Anchors of the nodes that are being read, from the outermost one on; None for one without."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        alias = isinstance(event, yaml.AliasEvent)
        if alias and event.anchor in self._open:
            raise _refused(f"the anchor &{event.anchor} holds itself", event)
        if len(self._open) == DEEPEST:
            raise _refused(f"nested more than {DEEPEST} deep", event)
        self._open.append(None if alias else getattr(event, "anchor", None))
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        if node.tag == _AMBIGUOUS:
            two = "a number of base 60, or text" if ":" in node.value else "an octal number, or a decimal one"
            raise _refused(
                f"`{node.value}` is {two}: write the decimal number, or {node.value!r} in quotes for text", node
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                raise _refused(f"the key `{key.value}` is read as a switch; put it in quotes", key)
            known = first.get((key.tag, str(key.value)))
            if known is not None:
                raise _refused(f"`{key.value}` stands there twice (first in line {known}); leave one out", key)
            first[key.tag, str(key.value)] = key.start_mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()


def _refused(what: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=at.start_mark)


def parsed(text: str, what: str) -> Any:
    """What ``text`` says. ValueError of one line for what is no YAML, or means two things; ``what`` names the place."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None and "\n" in text.strip() else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{what}{line}: {'' if error.context is None else 'no YAML: '}{said}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is no YAML: {' '.join(str(error).split())}") from error


def written(settings: Any) -> str:
    """``settings`` as YAML that ``parsed`` reads back."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False)


__all__ = ["parsed", "written"]
