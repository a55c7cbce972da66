"""The thinking budget on two ranks of which one has all the cut rows: same calls on both, gradient of the float64
oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.launch import run_worker
from rollouts.thinking_oracle import Step, check_budget_is_obeyed, difference, oracle
from tolerance import log_prob_gap

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_rows_go_on_on_one_rank_only(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("thinking_worker", kind, 2, tiny_folder, tmp_path, kind)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    cuts = []
    for first, second in zip(*(rank["steps"] for rank in ranks), strict=True):
        for one in (first, second):
            cuts.append(check_budget_is_obeyed(Step("", None, one["batches"]), tokenizer, 8))
        if kind == "ddp":
            model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64).eval()
            model.load_state_dict(first["weights"])
            step = Step(first["aggregation"], model, first["batches"] + second["batches"])
            assert difference(first["gradient"], second["gradient"]) == 0.0, "all-reduce: one sum, handed to both"
            #: a float32 gradient is off by what the log-probs of its tokens are off, relative to itself
            bound = log_prob_gap(torch.float32, nats=6.0, width=32)
            assert difference(first["gradient"], oracle(step, tokenizer, 8)) <= bound, step.aggregation
    assert 0 in cuts, "both ranks had rows to cut: nothing was proven"
    shares = [row["rollout/cut_share"] for row in ranks[0]["history"] if "rollout/cut_share" in row]
    assert shares == pytest.approx([(a + b) / 12 for a, b in zip(cuts[::2], cuts[1::2], strict=True)])
