"""What a run's own metrics say about it. Pure: no trainer, no torch, no files."""

from grpo_lab.diagnostics.health import Diagnosis, changes, diagnose
from grpo_lab.diagnostics.rules import RULES, Facts, Rule

__all__ = ["RULES", "Diagnosis", "Facts", "Rule", "changes", "diagnose"]
