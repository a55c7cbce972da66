"""Kill a pipeline by −9 once in every stage, resume it each time, and compare its table with an uninterrupted run's.

    python tests/stress/kill_every_stage.py FILE.yaml --against runs/whole --folder runs/killed

``--against`` is the folder of a run of the same file that was left alone (``grpo-lab pipeline run FILE --output_dir``).
The moment in a stage is drawn, in the first 60% of the time that it took there; then the whole process group
gets SIGKILL. Said are the kills, each result and each digest of an input that differs, and what was finished and ran
again. Digests of inputs are of whole models: where all are alike, so is every model that a later stage read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kill_processes import adopt_orphans, kill

POLL = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--draw", type=int, default=0, help="seed of the moments; the pipeline's is its file's")
    args, more = parser.parse_known_args()
    adopt_orphans()
    right = {one["name"]: one for one in table(args.against)}
    draw = random.Random(args.draw)
    waits = {name: draw.uniform(0.1, 0.6) * one["seconds"] for name, one in right.items()}
    killed, finished, again = list[str](), dict[str, bytes](), set[str]()
    while True:
        at = life(args.recipe, args.folder, more, {name: waits[name] for name in waits if name not in killed})
        now = {path.parent.name: path.read_bytes() for path in args.folder.glob("*/stage.json") if is_done(path)}
        again |= {name for name in finished if now.get(name) != finished[name]}
        finished |= now
        if at is None:
            break
        killed.append(at)
        print(f"killed in {at}, {len(finished)} finished", flush=True)
    found = {one["name"]: one for one in table(args.folder)}
    different = [
        f"{name}: {key}" for name in right for key in ("results", "inputs") if differs(right, found, name, key)
    ]
    print(f"stages {len(right)}, killed in {len(killed)}; not met: {sorted({*right} - {*killed}) or 'none'}")
    print(f"finished and ran again: {sorted(again) or 'none'}\ndifferent: {different or 'none'}")
    sys.exit(bool(again or different))


def life(recipe: Path, folder: Path, more: list[str], waits: dict[str, float]) -> str | None:
    """Run or resume until the kill → the stage that was met; None where the command came to its end."""
    words = ["resume", str(folder)] if folder.exists() else ["run", str(recipe), "--output_dir", str(folder), *more]
    with Path(f"{folder}.log").open("ab") as log:
        command = [sys.executable, "-m", "grpo_lab", "pipeline", *words]
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
    since: dict[str, float] = {}
    while process.poll() is None:
        for name in running(folder, waits):
            since.setdefault(name, time.monotonic())
            if time.monotonic() - since[name] >= waits[name]:
                kill(process.pid)
                if not is_done(folder / name / "stage.json"):
                    return name
                return life(recipe, folder, more, {key: waits[key] for key in waits if key != name})
        time.sleep(POLL)
    if process.returncode:
        sys.exit(f"exit code {process.returncode}; see {folder}.log")
    return None


def running(folder: Path, names: dict[str, float]) -> list[str]:
    return [name for name in names if status(folder / name / "stage.json") == "running"]


def is_done(path: Path) -> bool:
    return status(path) == "done"


def status(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["status"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def table(folder: Path) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = json.loads((folder / "pipeline.json").read_text())["stages"]
    if unfinished := [one["name"] for one in stages if one["status"] != "done"]:
        sys.exit(f"{folder}: not finished: {unfinished}")
    return stages


def differs(right: dict[str, Any], found: dict[str, Any], name: str, key: str) -> bool:
    return without_places(right[name].get(key)) != without_places(found[name].get(key))


def without_places(found: Any) -> Any:
    """Digests and numbers; a path is the run folder's, and a time the clock's."""
    if isinstance(found, dict):
        return {key: without_places(one) for key, one in found.items() if key not in ("path", "seconds")}
    return os.path.basename(found) if isinstance(found, str) and os.sep in found else found


if __name__ == "__main__":
    main()
