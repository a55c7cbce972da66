"""The judge of ``CodeReward`` as on a kernel whose Landlock is older: a worker's handler a version."""

from __future__ import annotations

from functools import partial
from typing import Any

from grpo_lab.sandbox import judge, kernel


def _judge(version: int, job: dict[str, Any]) -> Any:
    kernel.landlock_version = lambda: version
    return judge.judge(job)


version_1, version_3, version_5 = (partial(_judge, version) for version in (1, 3, 5))
