"""What this machine does with stock TRL and with ours: parity, the update, the engine, the whole step, DeepSpeed. At
most ten minutes.

    make gpu-check                                   # one GPU: runs/gpu_check.json and runs/gpu_check.md
    python scripts/gpu_check.py --tiny               # small models, also on a CPU: a check that it runs
    python scripts/gpu_check.py --only "parity, fp32" "update, 0.5B"

Models have random weights in the shapes of Qwen2.5; nothing is downloaded. A section that fails, is not installed or
would not fit into the budget says so, and the others go on. Exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more, transformers would spread each batch over them
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_checks.device import versions
from gpu_checks.markdown import page
from gpu_checks.parity import bf16, fp32
from gpu_checks.runner import Section, Setting, run_all
from gpu_checks.update import update_of
from gpu_checks.whole_step import our_engine, stock_engine, with_transformers
from gpu_checks.zero import zero_of

STOCK_ON_A_CPU = (
    "stock TRL's sync does not reach vLLM's CPU build, which packs its weights (`Parameter` has no "
    "attribute `weight_loader`)"
)
#: the most telling first: what the budget does not hold is left out from the end
SECTIONS = (
    Section("versions", versions, 5, 1),
    Section("parity, fp32", fp32, 40, 20),
    Section("parity, bf16", bf16, 40, 20),
    Section("update, 0.5B", update_of("0.5B"), 90, 30),
    Section("whole step, vLLM, stock", stock_engine, 100, 60, apart=True, needs=("vllm",), gpu_only=STOCK_ON_A_CPU),
    Section("whole step, vLLM, ours", our_engine("vLLM"), 100, 60, apart=True, needs=("vllm",)),
    Section("update, 1.5B", update_of("1.5B"), 120, 30),
    Section(
        "engine, sleep mode",
        our_engine("vLLM, sleep mode", sleep=True),
        100,
        60,
        apart=True,
        needs=("vllm",),
        gpu_only="sleep mode unmaps GPU memory; vLLM's CPU build has none of it",
    ),
    Section("engine, LoRA", our_engine("vLLM, LoRA", lora=True), 100, 60, apart=True, needs=("vllm", "peft")),
    Section("whole step, transformers", with_transformers, 60, 15),
    Section("DeepSpeed, ZeRO-2", zero_of(2), 60, 90, apart=True, needs=("deepspeed",)),
    Section("DeepSpeed, ZeRO-3", zero_of(3), 60, 90, apart=True, needs=("deepspeed",)),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--tiny", action="store_true", help="small models; the only form without a GPU")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="SECTION")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all sections")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu_check.json"), help="the table gets its name with .md"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def check(args: argparse.Namespace) -> dict[str, Any]:
    """All sections asked for -> what goes into the JSON."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit(
            "no GPU is visible (torch.cuda.is_available() is False): the full form needs one; `--tiny` runs on a CPU"
        )
    began = time.monotonic()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    chosen = [section for section in SECTIONS if section.name in args.only and section.name not in args.skip]
    log = args.output.with_suffix(".log").open("w")
    with tempfile.TemporaryDirectory() as folder, log, contextlib.redirect_stdout(log):
        setting = Setting(args.tiny, device, began + args.budget, Path(folder))
        outcomes = run_all(chosen, setting, args.here, lambda line: print(line, file=sys.stderr, flush=True))
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "form": "tiny" if args.tiny else "full",
        "device": device,
        "budget_s": args.budget,
        "seconds": round(time.monotonic() - began, 1),
        "sections": outcomes,
    }


def main() -> int:
    args = arguments()
    found = check(args)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    text = page(found)
    args.output.with_suffix(".md").write_text(text)
    print(text)
    return int(any(outcome["status"] == "failed" for outcome in found["sections"].values()))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main()
    sys.stderr.flush()
    os._exit(code)  # an engine's threads race with the interpreter's teardown
