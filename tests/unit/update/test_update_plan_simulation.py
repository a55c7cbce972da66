"""scripts/simulate_balance.py on real GSM8K model-output lengths: the table's claim, small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import simulate_balance as script

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("GRPO_LAB_DATA") or ROOT.parent / "shared" / "data")


@pytest.mark.not_fast
@pytest.mark.skipif(
    not (DATA / "gsm8k" / "gsm8k_model_outputs.jsonl").is_file(), reason=f"no GSM8K model outputs under {DATA}"
)
def test_ranks_are_even_on_real_lengths() -> None:
    groups = script.real_groups(DATA, max_completion=512)
    assert groups.completion.shape == (658, 8)
    for num_ranks in (8, 64):
        for dead in (0.0, 0.3, 0.62):
            cells = script.table_row(groups, num_ranks, 64, dead, seeds=2, micro_batch=8, overhead=64)
            row = dict(zip(script.COLUMNS, cells, strict=True))
            assert float(row["(worst seed)"]) <= 1.05, row
            assert float(row["ours computed max/mean"]) <= 1.05, row
            assert float(row["stock live max/mean"]) > 1.1, row


def test_stock_by_hand() -> None:
    # Two ranks of 2 rows: (10 + 5, 10 + 9) all live: 34 live tokens, 2 × (10 + 9) = 38 computed;
    # (4 + 6 live, 20 + 1 dead): 10 live, 2 × (20 + 6) = 52 computed. Mean live 22: max/mean 34 / 22.
    rows = script.Rows([10, 10, 4, 20], [5, 9, 6, 1], [True, True, True, False])
    even, step = script.stock(rows, 2)
    assert even == pytest.approx(34 / 22)
    assert step == 52


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=str(tmp_path)):
        script.data_folder(str(tmp_path))
