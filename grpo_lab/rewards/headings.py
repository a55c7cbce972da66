"""Is `#### ...` a markdown heading, or GSM8K's mark before the answer?"""

from __future__ import annotations

import re

_NUMBERED = re.compile(r"(\d{1,3})[.)]\s+[^\W\d_]")
_HEADING = re.compile(r"(?:step|part|case|solution|question|problem)\b", re.IGNORECASE)


def is_heading(line: str, before: str) -> bool:
    """`line` follows the hashes, `before` is the text in front of them.

    `#### Step 1`, `#### 1. Add`, and `#### 2. Multiply` after an item 1 are headings. `#### 30. Jeff walks ...` with no item 29
    before it is the answer 30.
    """
    if line.startswith("#") or _HEADING.match(line):
        return True
    numbered = _NUMBERED.match(line)
    if numbered is None:
        return False
    number = int(numbered[1])
    item = re.compile(rf"^[#*\s]{{0,8}}(?:(?:step|part)\s+)?{number - 1}[.):]", re.MULTILINE | re.IGNORECASE)
    return number <= 1 or item.search(before) is not None
