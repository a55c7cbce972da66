"""Named points in advantage × ratio × surrogate × aggregation. A new paper is one row here.

Numbers that a user tunes (ε, δ, β) are not part of a row: they come from TRL's own settings (``epsilon``,
``epsilon_high``, ``delta``, ``beta``) or from the ``objective`` mapping. ``paper`` holds the authors' values for the docs
and ``--dry-run``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.objectives.cispo import DetachedWeight
from grpo_lab.objectives.clipped import Clipped
from grpo_lab.objectives.mirror_descent import MirrorDescent
from grpo_lab.objectives.objective import Surrogate
from grpo_lab.objectives.reinforce import Reinforce
from grpo_lab.objectives.unclipped import Unclipped


@dataclass(frozen=True)
class Preset:
    """One row: names of the parts, where it comes from, and what the authors set."""

    advantage: str
    surrogate: str
    aggregation: str
    source: str
    ratio: str = "token"
    paper: Mapping[str, float | str] = field(default_factory=dict)


PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        "group_zscore", "clipped", "sequence_mean", "DeepSeekMath, arXiv 2402.03300", paper={"beta": 0.04, "lr": 1e-6}
    ),
    "dr_grpo": Preset(
        "group_mean", "clipped", "fixed_budget", "Dr.GRPO, arXiv 2503.20783", paper={"beta": 0.0, "epsilon": 0.2}
    ),
    "dapo": Preset(
        "group_zscore", "clipped", "token_mean", "DAPO, arXiv 2503.14476", paper={"epsilon": 0.2, "epsilon_high": 0.28}
    ),
    "bnpo": Preset("group_zscore", "clipped", "local_token_mean", "TRL's `bnpo`: token mean of the local micro-batch"),
    "gspo": Preset(
        "group_zscore",
        "clipped",
        "sequence_mean",
        "GSPO, arXiv 2507.18071",
        ratio="sequence",
        paper={"epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": Preset(
        "group_zscore", "cispo", "token_mean", "MiniMax-M1, arXiv 2506.13585", paper={"epsilon_high": "undisclosed"}
    ),
    "reinforce": Preset("group_mean", "reinforce", "fixed_budget", "Williams 1992; CS336 lecture 17"),
    "mirror_descent": Preset(
        "group_mean",
        "mirror_descent",
        "sequence_sum",
        "Kimi k1.5, arXiv 2501.12599, section 2.3.2",
        paper={"tau": "undisclosed"},
    ),
}

SURROGATES: dict[str, type] = {
    "reinforce": Reinforce,
    "unclipped": Unclipped,
    "clipped": Clipped,
    "cispo": DetachedWeight,
    "mirror_descent": MirrorDescent,
}
#: settings of ``objective`` that each surrogate reads; anything else beside it would have no effect
KNOBS: dict[str, tuple[str, ...]] = {
    "reinforce": (),
    "unclipped": (),
    "clipped": ("epsilon", "epsilon_high", "delta"),
    "cispo": ("epsilon", "epsilon_high"),
    "mirror_descent": ("tau",),
}


def preset(name: str) -> Preset:
    """The row called ``name``."""
    if name not in PRESETS:
        raise ValueError(f"`objective` is {name!r}; it must be one of {sorted(PRESETS)}")
    return PRESETS[name]


def surrogate(
    name: str, epsilon: float, epsilon_high: float | None, delta: float | None, tau: float | None = None
) -> Surrogate:
    """The surrogate called ``name`` with TRL's clip settings (or τ); a bound that it cannot honour is refused."""
    if name not in SURROGATES:
        raise ValueError(f"`surrogate` is {name!r}; it must be one of {sorted(SURROGATES)}, or a callable")
    if delta is not None and name != "clipped":
        raise ValueError(f"`delta`={delta} bounds the clipped surrogate and has no effect on {name!r}; leave it out")
    if name == "clipped":
        return Clipped(epsilon, epsilon_high, delta)
    if name == "cispo":
        return DetachedWeight(epsilon if epsilon_high is None else epsilon_high)
    if name == "mirror_descent" and tau is not None:
        return MirrorDescent(tau)
    built: Surrogate = SURROGATES[name]()
    return built
