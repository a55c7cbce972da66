"""TRL's ``accuracy_reward`` in a thread, where a trainer may have it, text by text, watched from outside. Used by
``hostile_text.py``."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from collections import Counter, defaultdict

from tqdm import tqdm


def main() -> None:
    """In a process of its own: texts from stdin, one by one, judged in a thread; a line for each."""
    from trl.rewards import accuracy_reward

    def work() -> None:
        for line in sys.stdin:
            row = json.loads(line)
            try:
                said = str(accuracy_reward([[{"role": "assistant", "content": row["text"]}]], [row["gold"]])[0])
            except BaseException as error:  # what a trainer would have died of
                said = f"raised {type(error).__name__}"
            print(json.dumps(said), flush=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def through_trl(texts: list[tuple[str, str]], golds: list[str], patience: float = 10.0) -> dict[str, Counter[str]]:
    """Family -> how TRL's reward ended on its texts."""
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    process: subprocess.Popen[str] | None = None
    for i, (family, text) in enumerate(tqdm(texts, unit="text", desc="through TRL's accuracy_reward")):
        if process is None or process.poll() is not None:
            limited = ["bash", "-c", 'ulimit -v 8388608; exec "$0" "$@"', sys.executable, __file__]
            process = subprocess.Popen(
                limited, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            _ask(process, {"text": "\\boxed{1}", "gold": "1"})
            assert process.stdout is not None
            process.stdout.readline()  # its imports
        _ask(process, {"text": text, "gold": golds[i % len(golds)]})
        if select.select([process.stdout], [], [], patience)[0]:
            line = process.stdout.readline() if process.stdout else ""
            ends[family][json.loads(line) if line else "died"] += 1
        else:
            ends[family][f"hung (> {patience:g} s)"] += 1
            process.kill()
            process.wait()
    if process is not None:
        process.kill()
        process.wait()
    return ends


def _ask(process: subprocess.Popen[str], row: dict[str, str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(row) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
