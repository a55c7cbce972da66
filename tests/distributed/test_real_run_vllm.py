"""A short real run on 2 CPU ranks, each with a vLLM engine of its own in the process (colocate), its sync proven on
both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from distributed.test_real_run import check, logged, run
from distributed.test_real_run import start as start
from grpo_lab.engines.weights.proof import tolerance_for

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_trains_with_an_engine_on_every_rank(kind: str, start: Path, tmp_path: Path) -> None:
    output = run(
        kind,
        start,
        tmp_path,
        use_vllm=True,
        vllm_mode="colocate",
        rollout={"verify_every": 1, "engine": {"kv_cache_gib": 0.25, "max_model_len": 256}},
    )
    check(tmp_path, start)
    gaps = [row["rollout/sync_gap"] for row in logged(tmp_path) if "rollout/sync_gap" in row]
    assert len(gaps) == 4, output[-2000:]
    assert max(gaps) < tolerance_for(torch.float32), "the library's own bound for two engines' float32 kernels"
