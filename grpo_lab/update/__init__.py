"""Planning of the exact update: which rows must be computed, in which micro-batch, on which rank. Pure: no trainer.

The order of use: `live` says which rows contribute to the loss and whether the others may be left out. `plan` (with the
search of `balance`) puts the rows into bins and the bins on ranks; `shared_plan` does so for bins in which each prompt
is computed once. `Routes` then says which rows travel between ranks.
"""

from grpo_lab.update.balance import cheapest_cuts
from grpo_lab.update.live import LiveConditions, live_rows, why_all_rows, why_stock_batches
from grpo_lab.update.plan import DEFAULT_OVERHEAD_TOKENS, Numbers, Plan, Routes, Rows, default_max_tokens, plan_update
from grpo_lab.update.shared_plan import DEARER, DEARER_BIN, cheaper, plan_shared

__all__ = [
    "DEARER",
    "DEARER_BIN",
    "DEFAULT_OVERHEAD_TOKENS",
    "LiveConditions",
    "Numbers",
    "Plan",
    "Routes",
    "Rows",
    "cheaper",
    "cheapest_cuts",
    "default_max_tokens",
    "live_rows",
    "plan_shared",
    "plan_update",
    "why_all_rows",
    "why_stock_batches",
]
