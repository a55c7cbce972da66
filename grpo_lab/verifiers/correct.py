"""The one definition of "correct": for training metrics, samplers, pass rates, the length reward and evaluation alike."""

from __future__ import annotations

CORRECT_FROM = 1.0
"""A score at or above this is correct. Accuracy rewards give 1.0 or 0.0; partial credit is not a solved problem."""
