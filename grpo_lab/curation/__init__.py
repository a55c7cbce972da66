"""Which rows to train on: what each filter looks at stands in its own file, `docs/choosing_the_data.md` says how they
go together. Names are resolved on first use, so importing this package loads nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lab.curation.contamination import Contamination as Contamination
    from grpo_lab.curation.contamination import EvaluationIndex as EvaluationIndex
    from grpo_lab.curation.contamination import contaminated as contaminated
    from grpo_lab.curation.contamination import find_contamination as find_contamination
    from grpo_lab.curation.curriculum import CurriculumSampler as CurriculumSampler
    from grpo_lab.curation.curriculum import UniformThenHardSampler as UniformThenHardSampler
    from grpo_lab.curation.duplicates import Deduplicated as Deduplicated
    from grpo_lab.curation.duplicates import deduplicate as deduplicate
    from grpo_lab.curation.kinds import question_kind as question_kind
    from grpo_lab.curation.pass_rate import PassRate as PassRate
    from grpo_lab.curation.pass_rate import Written as Written
    from grpo_lab.curation.pass_rate import answer_only as answer_only
    from grpo_lab.curation.pass_rate import guess_rates as guess_rates
    from grpo_lab.curation.pass_rate import guessable as guessable
    from grpo_lab.curation.pass_rate import keep_band as keep_band
    from grpo_lab.curation.pass_rate import pass_rates as pass_rates
    from grpo_lab.curation.prioritized import PrioritizedSampler as PrioritizedSampler
    from grpo_lab.curation.rejection import Sampled as Sampled
    from grpo_lab.curation.rejection import contrast_pairs as contrast_pairs
    from grpo_lab.curation.rejection import preference_pairs as preference_pairs
    from grpo_lab.curation.rejection import right_answers as right_answers
    from grpo_lab.curation.rejection import sampled as sampled
    from grpo_lab.curation.rejection import shortest_correct as shortest_correct
    from grpo_lab.curation.rounds import RoundSampler as RoundSampler
    from grpo_lab.curation.selection import CurationReport as CurationReport
    from grpo_lab.curation.selection import FilterOutcome as FilterOutcome
    from grpo_lab.curation.selection import Selection as Selection
    from grpo_lab.curation.selection import balance as balance
    from grpo_lab.curation.weights import average_weights as average_weights

_HOME = {
    "balance": "selection",
    "Contamination": "contamination",
    "EvaluationIndex": "contamination",
    "contaminated": "contamination",
    "find_contamination": "contamination",
    "CurriculumSampler": "curriculum",
    "UniformThenHardSampler": "curriculum",
    "Deduplicated": "duplicates",
    "deduplicate": "duplicates",
    "answer_only": "pass_rate",
    "guess_rates": "pass_rate",
    "guessable": "pass_rate",
    "question_kind": "kinds",
    "Sampled": "rejection",
    "preference_pairs": "rejection",
    "sampled": "rejection",
    "shortest_correct": "rejection",
    "PassRate": "pass_rate",
    "Written": "pass_rate",
    "keep_band": "pass_rate",
    "pass_rates": "pass_rate",
    "PrioritizedSampler": "prioritized",
    "contrast_pairs": "rejection",
    "right_answers": "rejection",
    "CurationReport": "selection",
    "FilterOutcome": "selection",
    "RoundSampler": "rounds",
    "Selection": "selection",
    "average_weights": "weights",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
