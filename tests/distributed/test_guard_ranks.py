"""NaN on the second of two ranks: both leave the step out, count it alike, and stop together (DDP and FSDP2).

In the same launch: a resume where weights have no moments, which torch refuses under FSDP2.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.guard_worker import EACH, STEPS
from distributed.launch import run_worker
from grpo_lab.trainer.step.bad_step import read_bad_step

pytestmark = pytest.mark.slow


@pytest.mark.thorough(but="fsdp2")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_one_ranks_nan_is_everybodys(sharding: str, tiny_folder: Path, tmp_path: Path) -> None:
    run_worker("guard_worker", sharding, 2, tiny_folder, tmp_path)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for report in reports:
        assert report["moved"] == [step not in EACH for step in range(1, STEPS + 1)]
        assert report["schedule"] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
        assert report["finite"]
        assert report["stopped after"] == [True, True, False, False]  # the third bad step in a row does not end
        assert "checkpoint-2;" in report["stopped"]
        assert report["resumed"] == [True, True, True]  # no weight has moments; the critic's alone have; all have
    main = reports[0]["guard"]
    assert main["left_out"] == [None, 1, 0, 1, 0, 1, 0, 1, 0]
    for step, kind in EACH.items():
        assert [at for at, share in enumerate(main[kind], start=1) if share] == [step], kind
        facts, ranks = read_bad_step(tmp_path / "each" / "bad_steps" / f"step-{step:06d}")
        assert facts["not_finite"] == [kind]
        assert len(ranks) == facts["ranks"] == 2
        said = [of_rank["said"] for of_rank in facts["of_rank"]]
        assert bool(said[1]) is (kind in ("reward", "log_prob"))
