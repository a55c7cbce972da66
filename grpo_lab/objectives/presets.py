"""Presets of objectives: each names an advantage rule, a ratio level, a surrogate and an aggregation. A new paper is
one row here.

Numbers that a user tunes (ε, δ, β) are not part of a row. They are the fields of the surrogate's dataclass, and come
from TRL's own settings (``epsilon``, ``epsilon_high``, ``delta``, ``beta``) or from the ``objective`` mapping. Where
TRL's defaults would be another algorithm than the paper's, a row says that the paper's hold (``holds``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_lab import registry
from grpo_lab.objectives.aggregation import AGGREGATIONS
from grpo_lab.objectives.clip_cov import ClipCov
from grpo_lab.objectives.clipped import Clipped
from grpo_lab.objectives.gates import OffPolicyMask, TopEntropy
from grpo_lab.objectives.geometric_mean import GeometricMean
from grpo_lab.objectives.kl_cov import KLCov
from grpo_lab.objectives.mirror_descent import MirrorDescent
from grpo_lab.objectives.objective import Surrogate
from grpo_lab.objectives.sapo import SoftGate
from grpo_lab.objectives.trust_region.dppo import KLRegion, TotalVariationRegion
from grpo_lab.objectives.trust_region.prime_rl import PrimeRL
from grpo_lab.objectives.unclipped import DetachedWeight, Reinforce, Unclipped
from grpo_lab.objectives.vespo import GammaWeight
from grpo_lab.settings import did_you_mean


@dataclass(frozen=True)
class Preset:
    """A row of the table of objectives: the names of an objective's parts and what its authors set.

    Attributes:
        advantage: name of the advantage rule.
        surrogate: name of the surrogate, a key of ``SURROGATES``.
        aggregation: name of the aggregation.
        source: the paper or code that it is from.
        ratio: level of the importance ratio.
        paper: the authors' settings, shown by ``--dry-run``.
        knobs: settings of the advantage rule that differ from the rule's defaults.
        plain_k3: if a run sets ``beta`` alone, k3 is not weighted by the ratio (TRL's ``use_bias_correction_kl``).
        holds: knobs of the surrogate that ``paper`` lists hold where the run sets none, in place of TRL's defaults.
    """

    advantage: str
    surrogate: str
    aggregation: str
    source: str
    ratio: str = "token"
    paper: Mapping[str, float | str] = field(default_factory=dict)
    knobs: Mapping[str, float | str] = field(default_factory=dict)
    plain_k3: bool = False
    holds: bool = False

    @property
    def rule(self) -> str | dict[str, float | str]:
        """The advantage rule as the setting ``advantage`` writes it: its name, or a mapping with its knobs."""
        if self.knobs:
            return {"name": self.advantage, **self.knobs}
        return self.advantage


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
    "luspo": Preset(
        "group_zscore",
        "clipped",
        "sequence_sum",
        "LUSPO, arXiv 2602.05261",
        ratio="sequence",
        paper={"epsilon": 2e-3, "epsilon_high": 2.5e-3},
        holds=True,
    ),
    "sapo": Preset(
        "group_zscore",
        "sapo",
        "sequence_mean",
        "SAPO, arXiv 2511.20347",
        paper={"temperature_neg": 1.05, "temperature_pos": 1.0},
    ),
    "vespo": Preset(
        "group_zscore",
        "vespo",
        "token_mean",
        "VESPO, arXiv 2602.10693",
        paper={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    ),
    "reinforce": Preset("group_mean", "reinforce", "fixed_budget", "Williams 1992; CS336 lecture 17"),
    "reinforce_token_mean": Preset(
        "group_zscore",
        "reinforce",
        "token_mean",
        "a small public R1-Zero script (nano-aha-moment); Williams 1992",
        paper={"beta": 0.001, "lr": 1e-6, "epsilon": 1e-4},
        knobs={"std": "population"},
        plain_k3=True,
    ),
    "mirror_descent": Preset(
        "group_mean",
        "mirror_descent",
        "sequence_sum",
        "Kimi k1.5, arXiv 2501.12599, section 2.3.2",
        paper={"tau": "undisclosed"},
    ),
    "maxrl": Preset(
        "maxrl", "clipped", "token_mean", "MaxRL, arXiv 2602.02710", paper={"epsilon": 0.2, "beta": 0.0, "lr": 1e-6}
    ),
    "pass_at_k": Preset("pass_at_k", "clipped", "token_mean", "Pass@k Training, arXiv 2508.10751"),
    "gdpo": Preset("gdpo", "clipped", "sequence_mean", "GDPO, arXiv 2601.05242"),
    "opo": Preset("opo", "reinforce", "token_mean", "OPO, arXiv 2505.23585; strictly on-policy", paper={"beta": 0.0}),
    "reinforce_pp_baseline": Preset(
        "reinforce_pp_baseline", "clipped", "token_mean", "REINFORCE++ with baseline, arXiv 2501.03262"
    ),
    "ppo": Preset(
        "gae",
        "clipped",
        "token_mean",
        "PPO, arXiv 1707.06347, with a value model (`value`); for language models as AlpacaFarm, arXiv 2305.14387",
        paper={"epsilon": 0.2, "lam": 0.95, "cliprange_value": 0.2},
    ),
    "gspo_token": Preset(
        "group_zscore",
        "clipped",
        "sequence_mean",
        "GSPO-token, arXiv 2507.18071, §4.3",
        ratio="sequence_token",
        paper={"epsilon": 3e-4, "epsilon_high": 4e-4},
        holds=True,
    ),
    "gmpo": Preset(
        "group_zscore",
        "gmpo",
        "sequence_mean",
        "GMPO, arXiv 2507.20673",
        paper={"clip_low": 0.4, "clip_high": 0.4, "lr": 1e-6},
    ),
    "dppo_tv": Preset("group_mean", "dppo_tv", "fixed_budget", "DPPO, arXiv 2602.04879", paper={"threshold_low": 0.15}),
    "dppo_kl": Preset("group_mean", "dppo_kl", "fixed_budget", "DPPO, arXiv 2602.04879", paper={"threshold_low": 0.05}),
    "prime_rl": Preset(
        "group_mean",
        "prime_rl",
        "token_mean",
        "prime-rl's default loss, after DPPO, arXiv 2602.04879",
        paper={"threshold_low": 0.2, "kl_tau": 1e-3},
    ),
    "scale_rl": Preset(
        "reinforce_pp_baseline",
        "cispo",
        "prompt_mean",
        "ScaleRL, arXiv 2510.13786",
        paper={"epsilon_high": 5.0},
        knobs={"over": "completions"},
        holds=True,
    ),
    "clip_cov": Preset(
        "group_zscore",
        "clip_cov",
        "token_mean",
        "Clip-Cov, arXiv 2505.22617",
        paper={"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0, "epsilon": 0.2},
    ),
    "kl_cov": Preset(
        "group_zscore", "kl_cov", "token_mean", "KL-Cov, arXiv 2505.22617", paper={"share": 2e-3, "coefficient": 1.0}
    ),
}

SURROGATES: dict[str, Any] = {
    "reinforce": Reinforce,
    "unclipped": Unclipped,
    "clipped": Clipped,
    "cispo": DetachedWeight,
    "mirror_descent": MirrorDescent,
    "gmpo": GeometricMean,
    "dppo_tv": TotalVariationRegion,
    "dppo_kl": KLRegion,
    "prime_rl": PrimeRL,
    "clip_cov": ClipCov,
    "kl_cov": KLCov,
    "sapo": SoftGate,
    "vespo": GammaWeight,
}
OUR_PRESETS = frozenset(PRESETS)
#: Parts of this package. ``literal`` proves them at start-up, so they are not tested before every step.
_OURS = (*SURROGATES.values(), *AGGREGATIONS.values(), OffPolicyMask, TopEntropy)
RESERVED = ("name", "advantage", "ratio", "surrogate", "aggregation")
"""Keys of ``objective: {…}`` that cannot be knobs."""


def preset(name: str) -> Preset:
    """Return the preset called ``name``. Raises ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(
            f"`objective` is {name!r}; it must be one of {sorted(PRESETS)}, or 'module:name' of one that a module of "
            f"yours registers{did_you_mean(name, PRESETS)}"
        )
    return PRESETS[name]


def surrogate(name: str, **knobs: Any) -> Surrogate:
    """Return the surrogate called ``name``, built with its knobs, the fields of its dataclass. Raises ValueError for an
    unknown name or knob."""
    made: Surrogate = registry.built(registry.found(SURROGATES, name, "surrogate"), knobs, "surrogate")
    return made


def is_ours(part: Any) -> bool:
    """Return whether a surrogate, aggregation or gate belongs to this package, and not to a team."""
    return any(part is one or type(part) is one for one in _OURS)


def register_objective(
    name: str,
    part: Any = None,
    *,
    advantage: str = "group_zscore",
    aggregation: str = "sequence_mean",
    ratio: str = "token",
    source: str = "",
    paper: Mapping[str, float | str] | None = None,
) -> Any:
    """Register a new objective, which ``objective: name`` selects, and return ``part``. Also usable as a decorator.

    Args:
        name: name of the objective.
        part: its surrogate: a dataclass whose fields are its knobs (``objective: {name: …, <knob>: …}``), a function,
            or the name of a registered surrogate. Unless it is a name, it also becomes a surrogate called ``name``.
        advantage: name of the advantage rule (default: GRPO's).
        aggregation: name of the aggregation (default: GRPO's).
        ratio: level of the importance ratio (default: GRPO's).
        source: where it is from, for ``--dry-run`` and the model card.
        paper: the authors' constants, shown there too.

    Raises:
        ValueError: another objective has the name already, the part cannot be called, or a field has a name in
            ``RESERVED``.
    """
    if part is None:
        return lambda later: register_objective(
            name, later, advantage=advantage, aggregation=aggregation, ratio=ratio, source=source, paper=paper
        )
    parts = (advantage, part if isinstance(part, str) else name, aggregation)
    row = Preset(*parts, source or "a team's own", ratio, dict(paper or {}))
    registered = PRESETS.get(name)
    if registered is not None and registered != row:
        has_surrogate = registered.surrogate == name and SURROGATES[name] is not part
        if not (has_surrogate and registry.redefined(SURROGATES[name], part)):
            seen = f"objective {name!r} is registered already with other parts ({registered})"
            raise ValueError(f"{seen}: choose another name")
    if isinstance(part, str):
        registry.found(SURROGATES, part, "surrogate")
        registry.check_name({}, name, part, "objective")
    else:
        registry.add(SURROGATES, name, part, RESERVED, "objective")
    PRESETS[name] = row
    return part
