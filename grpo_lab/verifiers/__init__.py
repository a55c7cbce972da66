"""Verifiers of answers and proofs, and the worker processes that can be killed while they compare.

A *bug in a verifier* is an exception (`VerifierError`); *bad model text* gets a verdict. Importing this package loads
only the standard library: math-verify and sympy are imported inside the worker processes, never in the trainer's.
"""

from grpo_lab.sandbox.pool import JobOutcome, WorkerPool
from grpo_lab.sandbox.workers import Limits, VerifierError
from grpo_lab.verifiers.math_equality import MathVerifier
from grpo_lab.verifiers.verdict import MathVerdict, Verdict

__all__ = ["JobOutcome", "Limits", "MathVerdict", "MathVerifier", "Verdict", "VerifierError", "WorkerPool"]
