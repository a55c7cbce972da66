"""Curation: choose which rows to train on. Each filter has its own file; `docs/choosing_the_data.md` says how to
combine them.

The samplers need torch and are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_lab.curation.domains import question_domain
from grpo_lab.curation.duplicates import Contamination, Deduplicated, contaminated, deduplicate, find_contamination
from grpo_lab.curation.pass_rate import PassRate, Written, answer_only, guess_rates, guessable, keep_band, pass_rates
from grpo_lab.curation.question_kinds import question_kind
from grpo_lab.curation.rejection import (
    Sampled,
    contrast_pairs,
    preference_pairs,
    right_answers,
    sampled,
    shortest_correct,
)
from grpo_lab.curation.selection import CurationReport, FilterOutcome, Selection, balance
from grpo_lab.curation.weights import average_weights

if TYPE_CHECKING:
    from grpo_lab.curation.mixture_order import MixtureSampler
    from grpo_lab.curation.samplers import CurriculumSampler, PrioritizedSampler, RoundSampler, UniformThenHardSampler


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "mixture_order" if name == "MixtureSampler" else "samplers"
        return getattr(import_module(f"grpo_lab.curation.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Contamination", "CurationReport", "CurriculumSampler", "Deduplicated", "FilterOutcome", "MixtureSampler",
    "PassRate", "PrioritizedSampler", "RoundSampler", "Sampled", "Selection", "UniformThenHardSampler", "Written",
    "answer_only", "average_weights", "balance", "contaminated", "contrast_pairs", "deduplicate",
    "find_contamination", "guess_rates", "guessable", "keep_band", "pass_rates", "preference_pairs",
    "question_domain", "question_kind", "right_answers", "sampled", "shortest_correct",
]  # fmt: skip
