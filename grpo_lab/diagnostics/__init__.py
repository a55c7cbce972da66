"""What a run's own metrics say about it. Pure: no trainer, no torch, no files."""

from grpo_lab.diagnostics.health import Verdict, changes, diagnose
from grpo_lab.diagnostics.rules import RULES, Facts, Rule

__all__ = ["RULES", "Facts", "Rule", "Verdict", "changes", "diagnose"]
