"""Planning of the exact update: which rows must be computed, in which micro-batch, on which rank. Pure: no trainer."""

from grpo_lab.update.live import LiveConditions, live_rows, why_all_rows, why_stock_batches
from grpo_lab.update.plan import DEFAULT_OVERHEAD_TOKENS, Plan, Routes, Rows, default_max_tokens, plan_update

__all__ = [
    "DEFAULT_OVERHEAD_TOKENS",
    "LiveConditions",
    "Plan",
    "Routes",
    "Rows",
    "default_max_tokens",
    "live_rows",
    "plan_update",
    "why_all_rows",
    "why_stock_batches",
]
