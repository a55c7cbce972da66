"""Check this machine with stock TRL and with ours: parity, shared prompts, engines, resume, sharding, whole steps.

    make gpu-check                                   # one GPU, 240 s: runs/gpu_check.json and runs/gpu_check.md
    python scripts/gpu_check.py --resume runs/gpu_check.json         # only what has no verdict yet; the rest is kept
    python scripts/gpu_check.py --tiny               # small models, also on a CPU: a check that it runs
    python scripts/gpu_check.py --only "parity, fp32" engine --budget 120

The check is made of sections. Each runs in a process of its own and has a time limit, at which it is ended; the others
go on. Sections that measure no time run side by side. Then the timed ones run one by one, the most telling first, as
far as the budget goes. Results are written after each section, and the page is printed at the end. Models have random
weights in the shapes of Qwen2.5; nothing is downloaded. The exit code is 1 if a section failed, broke or was ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTHONUNBUFFERED", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more, transformers would spread each batch over them
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu_checks.markdown import lines, page
from gpu_checks.record import Record, now, taken_up
from gpu_checks.runner import Runner
from gpu_checks.section import Outcome, Section, Setting
from gpu_checks.sections import SECTIONS


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(name for section in SECTIONS for name in section.names()))
    parser.add_argument("--tiny", action="store_true", help="small models; the only form without a GPU")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="SECTION")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for all sections, 240 by default")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="limits so many times as long: on a machine that is busy otherwise"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results to go on with; they stay where they are")
    parser.add_argument(
        "--output", type=Path, help="runs/gpu_check.json, or --resume's; the page gets its name with .md"
    )
    args = parser.parse_args(words)
    args.output = args.output or args.resume or Path("runs/gpu_check.json")
    return args


def chosen(args: argparse.Namespace, record: Record) -> list[Section]:
    """Return the sections that are asked for by name or by tag, without those that an earlier check has answered."""
    return [
        section
        for section in SECTIONS
        if (args.only is None or {*section.names()} & {*args.only})
        and not {*section.names()} & {*args.skip}
        and not record.answered(section.name)
    ]


def started(args: argparse.Namespace, device: str) -> Record:
    """Return the record that this check writes into, with the results of the earlier check that ``--resume`` names."""
    from gpu_checks.device import device_name

    told = {"made": now(), "form": "tiny" if args.tiny else "full", "device": device, "device_name": device_name()}
    sections = {} if args.resume is None else taken_up(args.resume, told)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    return Record(args.output, {**told, "budget_s": args.budget}, sections)


def check(args: argparse.Namespace) -> Record:
    """Run all sections that are asked for, and return the record; its file is written after each section."""
    began = time.monotonic()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit(
            "no GPU is visible (torch.cuda.is_available() is False): the full form needs one; `--tiny` runs on a CPU"
        )
    record = started(args, device)
    asked = chosen(args, record)
    if device == "cpu":
        import_what_forks_share(asked)

    def keep(name: str, outcome: Outcome) -> None:
        record.told["seconds"] = round(time.monotonic() - began, 1)
        record.keep(name, outcome)
        for line in lines(name, outcome):
            print(line, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu_check-", ignore_cleanup_errors=True) as folder:
        setting = Setting(args.tiny, device, began + args.budget, Path(folder), patience=args.patience)
        Runner(setting, keep).run(asked)
    record.write()
    return record


def import_what_forks_share(sections: Sequence[Section]) -> None:
    """Import the modules of sections, so that forked processes share them. An error is left to the section itself."""
    for section in sections:
        with contextlib.suppress(Exception):
            import_module(section.run.partition(":")[0])


def end(number: int, _: Any) -> None:
    """Exit at a signal, in an orderly way."""
    sys.exit(128 + number)


def main() -> int:
    places = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # of servers and ranks that sections start
    signal.signal(signal.SIGTERM, end)  # the processes of the sections end with this one
    record = check(arguments())
    print(page(record.found()))
    return int(record.failed)


if __name__ == "__main__":
    sys.exit(main())
