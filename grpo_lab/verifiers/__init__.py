"""Verifiers: killable worker processes behind the accuracy and the code reward.

A *bug in a verifier* is an exception (`VerifierError`); *bad model text* is a verdict. Importing this room costs only
the standard library: math-verify and sympy are imported inside the worker processes, never in the trainer's.
"""

from grpo_lab.sandbox.pool import JobOutcome, WorkerPool
from grpo_lab.sandbox.workers import Limits, VerifierError
from grpo_lab.verifiers.math_equality import MathVerifier
from grpo_lab.verifiers.verdict import MathVerdict, Verdict

__all__ = ["JobOutcome", "Limits", "MathVerdict", "MathVerifier", "Verdict", "VerifierError", "WorkerPool"]
