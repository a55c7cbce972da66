"""Which share of the words is in which language: a text as a mixture of languages.

A single word often belongs to several languages ("no", "animal", "a"); a text hardly ever. So the words are not judged one
by one. With p(w | l) from ``language_evidence`` the shares π are those that make the text most likely,

    π* = argmax_π Σ_w n_w log Σ_l π_l p(w | l),

found by expectation maximisation: r_wl = π_l p(w | l) / Σ_k π_k p(w | k), then π_l = Σ_w n_w r_wl / Σ_w n_w. Ambiguous
words then follow the unambiguous ones, without needing neighbours in the same language: a mix that changes its language
at every word is as good as one that changes it by the paragraph. π_l is the expected share of words in language l.

EM for mixture weights: Dempster, Laird, Rubin 1977, section 4.3. That R1's share is estimated this way is ours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["mixture_shares"]

ITERATIONS = 100
TOLERANCE = 1e-4
TRACE = 0.02
"""A language is dropped if it explains less than this share of the words, or less than ``TRACE_WORDS`` words."""
TRACE_WORDS = 1.0
DOUBT = 2.0
"""Imagined words in the expected language: a text of three ambiguous words is then in that language and not in the one whose
frequencies happen to fit best. They decide between languages that fit; they are not counted, and no French word becomes
English by them."""


def mixture_shares(
    likelihoods: NDArray[np.float64], counts: NDArray[np.float64], expected: int | None = None
) -> NDArray[np.float64]:
    """The share of each language in the counted words, ``[L]``, summing to 1.

    Args:
        likelihoods: ``[W, L]``, p(w | l) > 0.
        counts: ``[W]``, how often each word occurs.
        expected: index of a language that gets the benefit of the doubt, see ``DOUBT``.
    """
    if likelihoods.ndim != 2 or likelihoods.shape[0] != counts.shape[0] or not counts.sum() > 0:
        raise ValueError(f"one row of likelihoods per counted word: got {likelihoods.shape} and {counts.shape}")
    languages = likelihoods.shape[1]
    prior = np.zeros(languages)
    if expected is not None:
        prior[expected] = DOUBT
    shares = _maximise(likelihoods, counts, prior, np.full(languages, 1 / languages))
    kept = shares >= max(TRACE, min(0.3, TRACE_WORDS / counts.sum()))
    if kept.any() and not kept.all():
        # Twenty languages that each claim two odd words of a long text are not there: explain those words by the rest.
        shares = _maximise(likelihoods, counts, np.where(kept, prior, 0.0), np.where(kept, shares, 0.0))
    return shares


def _maximise(
    likelihoods: NDArray[np.float64],
    counts: NDArray[np.float64],
    prior: NDArray[np.float64],
    start: NDArray[np.float64],
) -> NDArray[np.float64]:
    """EM from ``start``; a language that starts at 0 stays there. Returns the words' shares, without the prior's."""
    weights: NDArray[np.float64] = start / start.sum()
    shares = weights
    for _ in range(ITERATIONS):
        joint = likelihoods * weights
        explained = (counts / joint.sum(axis=1)) @ joint
        shares = explained / counts.sum()
        previous, weights = weights, (explained + prior) / (counts.sum() + prior.sum())
        if np.abs(weights - previous).max() < TOLERANCE:
            break
    return shares
