"""The same number of rows from every domain.

Kimi k1.5 (section 2.1) and Qwen3 (section 4.2) balance subjects and difficulties without saying how; a cap on every
domain with a random choice inside it is the plainest way and ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any


def balance(
    rows: Sequence[Mapping[str, Any]],
    by: str | Callable[[Mapping[str, Any]], Hashable],
    per_domain: int | Mapping[Any, int] | None = None,
    seed: int = 0,
) -> list[bool]:
    """Which rows to keep so that no domain has more than its share.

    Args:
        rows: the data.
        by: the column that names the domain, or a function of the row. A row without a value (`is_missing`) is of no
            domain: it is not kept, and never the smallest one.
        per_domain: rows a domain may keep, one number for all or one for each domain; None takes the size of the
            smallest domain. A domain with fewer rows keeps all it has.
        seed: which rows of a domain stay depends on this and on nothing of the other domains.
    Raises: ValueError for a missing column, rows of which none has a value, a negative number or a domain that a
        `per_domain` mapping does not name.
    """
    members: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        if isinstance(by, str) and by not in row:
            raise ValueError(f"row {index} has no column {by!r} to balance by; its columns: {sorted(row)}")
        domain = row[by] if isinstance(by, str) else by(row)
        if not is_missing(domain):
            members.setdefault(domain, []).append(index)
    if rows and not members:
        raise ValueError(f"none of the {len(rows)} rows has a value of {by!r} to balance by")
    keep = [False] * len(rows)
    for domain, indices in members.items():
        share = _share(domain, members, per_domain)
        chosen = random.Random(f"{seed}/{domain}").sample(indices, min(share, len(indices)))
        for index in chosen:
            keep[index] = True
    return keep


def is_missing(value: Any) -> bool:
    """True for what names no domain: None, NaN, an empty text."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _share(
    domain: Hashable, members: Mapping[Hashable, Sequence[int]], per_domain: int | Mapping[Any, int] | None
) -> int:
    if per_domain is None:
        return min(len(indices) for indices in members.values())
    if isinstance(per_domain, Mapping):
        if domain not in per_domain:
            raise ValueError(f"per_domain names {sorted(map(str, per_domain))} and the data has domain {domain!r}")
        share = per_domain[domain]
    else:
        share = per_domain
    if share < 0:
        raise ValueError(f"per_domain={share} for domain {domain!r} is negative")
    return share
