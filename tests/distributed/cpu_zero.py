"""DeepSpeed on CPU ranks by accelerate's own code: run a script as ``accelerate launch`` would on GPUs.

    DS_ACCELERATOR=cpu ACCELERATE_TORCH_DEVICE=cpu accelerate launch --config_file recipes/accelerate/zero2.yaml \\
        --num_processes 2 --mixed_precision no tests/distributed/cpu_zero.py SCRIPT [ARGUMENTS]

accelerate 1.15 looks for a backend of ranks that are not asked to be CPUs among accelerators only, finds none and takes
every rank for a run of its own, although DeepSpeed has already joined them; a run that is asked for CPUs is not given
to DeepSpeed. So one answer is changed here: such ranks get gloo.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate.state import DistributedType, PartialState


def join_cpu_ranks() -> None:
    original = PartialState._prepare_backend

    def answered(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        found, kind = original(self, cpu, sagemaker_dp, backend)
        if found is None and not cpu and int(os.environ.get("LOCAL_RANK", -1)) != -1:
            return "gloo", DistributedType.MULTI_GPU
        return found, kind

    PartialState._prepare_backend = answered


if __name__ == "__main__":
    join_cpu_ranks()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
