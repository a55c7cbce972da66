"""FSDP2 on CPU ranks by accelerate's own code: run a script as ``accelerate launch`` would on GPUs.

    ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/fsdp2.yaml --num_processes 2 \\
        --mixed_precision no tests/distributed/cpu_fsdp2.py SCRIPT [ARGUMENTS]

accelerate 1.15 shards for every kind of device but the CPU: in ``AcceleratorState`` the switch to FSDP stands under the
list of accelerators. ``fully_shard`` itself runs on gloo. So one line is changed here: CPU ranks are announced as
``MULTI_GPU`` when that list is asked, and from then on accelerate wraps the model, swaps the optimizer's parameters,
clips and saves as it does on GPUs.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

from accelerate.state import DistributedType, PartialState


def shard_cpu_ranks() -> None:
    original = PartialState.__init__

    def announced(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = announced  # type: ignore[method-assign]


if __name__ == "__main__":
    shard_cpu_ranks()
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    sys.stdout.flush()
    os._exit(0)  # gloo's threads race with the interpreter's teardown ("terminate called without an active exception")
