"""Programs of ``code_attacks.GREEDY``, all but those that are named, scored in a process of their own; prints one JSON
line: scores, seconds, peak memory of a child.

A process of its own, because ``ru_maxrss`` remembers: that of a test process holds the largest child of every test
before, and a program started by a large process begins at that process's peak.

    python tests/unit/sandbox/code_greedy.py '{"timeout_s": 1.0, "memory_bytes": 536870912, ...}' sleeps "a daemon"
"""

from __future__ import annotations

import json
import resource
import sys
import time

from code_attacks import GREEDY, TESTS

from grpo_lab.rewards import CodeReward


def main() -> None:
    reward = CodeReward(**json.loads(sys.argv[1]))
    programs = {name: program for name, program in GREEDY.items() if name not in sys.argv[2:]}
    texts = [f"```python\n{program}\n```" for program in programs.values()]
    start = time.monotonic()
    scores = reward(completions=texts, tests=[TESTS] * len(texts))
    seconds = time.monotonic() - start
    reward.close()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps({"scores": dict(zip(programs, scores, strict=True)), "seconds": seconds, "peak": peak}))


if __name__ == "__main__":
    main()
