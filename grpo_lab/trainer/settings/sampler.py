"""``sampler`` of ``LabConfig``, as typed settings.

A sampler here chooses prompts, not tokens. Each of the three reads some of the settings (``KNOBS``); a setting that the
chosen one does not read is an error.
"""

from __future__ import annotations

from typing import Any, Literal

from grpo_lab.curation.samplers import DECAY, FLOOR
from grpo_lab.settings import Count, Number, settings

#: Sampler → the settings that it reads, with their defaults. A default of None: the setting must be given.
KNOBS: dict[str, dict[str, Any]] = {
    "prioritized": {"pass_rate_column": "", "floor": FLOOR, "decay": DECAY},
    "curriculum": {"pass_rate_column": "pass_rate"},
    "uniform_then_hard": {"pass_rate_column": "pass_rate", "floor": FLOOR, "uniform_rounds": None, "hard_below": 0.5},
}


@settings(bare="name")
class SamplerSettings:
    """``sampler``: which prompt comes next. A setting of ``None`` has the default of the chosen sampler.

    Args:
        name: ``prioritized``, ``curriculum`` or ``uniform_then_hard``.
        pass_rate_column: column of ``train_dataset`` with a pass rate in [0, 1] for each row (``grpo-lab curate``
            writes ``pass_rate``). ``prioritized`` starts from it if it is given, else from 0 for every problem.
        floor: least weight of a problem; the hardest has 1. Above 0 every problem keeps being drawn; only
            ``uniform_then_hard`` may have 0.
        decay: share of the earlier counts kept when a problem is seen again.
        uniform_rounds: number of generation batches drawn from all problems before only hard ones are drawn.
        hard_below: pass rate below which a problem is hard.
    """

    name: Literal["prioritized", "curriculum", "uniform_then_hard"]
    pass_rate_column: str | None = None
    floor: Number | None = None
    decay: Number | None = None
    uniform_rounds: Count | None = None
    hard_below: Number | None = None

    def __post_init__(self) -> None:
        reads = KNOBS[self.name]
        for knob in self.__dataclass_fields__:
            if knob == "name":
                continue
            if getattr(self, knob) is not None and knob not in reads:
                raise ValueError(f"`sampler.{knob}` has no effect with `sampler.name: {self.name}`; leave it out")
            may_be_empty = reads.get(knob, "") == ""
            if not may_be_empty and self[knob] in (None, ""):
                raise ValueError(f"`sampler.{knob}` is needed with `sampler.name: {self.name}`")

    def __getitem__(self, knob: str) -> Any:
        """Return the value of the setting ``knob``: as it was set, or the default of the chosen sampler."""
        value = getattr(self, knob)
        if value is None:
            return KNOBS[self.name][knob]
        return value

    @property
    def column(self) -> str | None:
        """The column with pass rates in force; None if the sampler starts without any."""
        return self["pass_rate_column"] or None
