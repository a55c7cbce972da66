"""Hostile completions, and every real one of ../shared/data, through every reward of ours; TRL's ``accuracy_reward`` in
a thread beside.

    python tests/stress/hostile_text.py [--count 20000] [--seed 0] [--trl 4]

Watched: no exception, no verdict later than its limit and a second (rewards that judge in this process: a second of
processor time and a second), memory, the pool alive at the end and right about an honest answer, nothing run (a canary
file). Of TRL the first ``--trl`` texts of every family, one by one in a thread as a trainer may have it, ten seconds
each before it counts as hung. Ends with code 1 if a promise of ours is broken. ``CodeReward`` runs programs by purpose
and has attacks of its own (``tests/unit/sandbox/code_attacks.py``): here its reading of a completion.
``TokenClassificationSteps`` needs a model: here its splitting.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostile_families import CANARY, FAMILIES, hostile
from hostile_trl import through_trl
from tqdm import tqdm

from grpo_lab.rewards import (
    AccuracyReward,
    BoxedReward,
    CoinReward,
    CountdownReward,
    EquationSteps,
    HashesReward,
    KimiLengthReward,
    LanguageConsistencyReward,
    ProofReward,
    SortingReward,
    ThinkFormatReward,
    worked_out,
)
from grpo_lab.rewards.completion import program_text
from grpo_lab.rewards.math.accuracy import gold_answer
from grpo_lab.rewards.protocol import Group
from grpo_lab.rewards.steps import by_line, by_paragraph

LATE_SECONDS = 1.0
TEXT_SECONDS = (
    1.0  # the limit of a reward that judges in this process, of processor time: it has no other than to be linear
)
CPU_SECONDS = 0.2  # a comparison's limit here, and six times that on the clock; by default 5 s and 30 s
GOLDS = ["18", "$\\frac{1}{2}$", "$x^2+1$", "$\\text{Evelyn}$", "$\\{1,2\\}$", "$\\sqrt{2}$", "$(0,1)$", "-3.5"]
_REAL = {
    "gsm8k/gsm8k_model_outputs": "output_text", "math/math_model_outputs": "output_text",
    "math/math_model_outputs_base_runon": "output_text", "math/answer_pairs": "pred", "gsm8k/train": "answer",
    "gsm8k/test": "answer", "math/math500": "solution", "process_reward/steps": "steps",
    "multiple_choice/questions": "text", "language/sentences": "text", "code/humaneval": "canonical_solution",
}  # fmt: skip


def real(data: Path) -> Iterator[tuple[str, str]]:
    """Every completion (and solution, question, sentence, program) of the real data."""
    for name, column in _REAL.items():
        for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            text = json.loads(line).get(column)
            yield f"real: {name}", "\n".join(map(str, text)) if isinstance(text, list) else str(text)


@dataclass
class Seen:
    """What one reward did: texts, the longest one took, and what broke."""

    texts: int = 0
    slowest: float = 0.0
    slowest_family: str = ""
    total: float = 0.0
    broken: list[str] = field(default_factory=list)

    def add(self, family: str, seconds: float, texts: int = 1, limit: float = TEXT_SECONDS) -> None:
        self.texts += texts
        self.total += seconds
        if seconds > self.slowest:
            self.slowest, self.slowest_family = seconds, family
        if seconds > limit + LATE_SECONDS:
            self.broken.append(f"{family}: {seconds:.2f} s for one text")


def one_text_rewards() -> dict[str, Callable[[str], Any]]:
    """The rewards that judge in this process, each as a function of one text."""
    numbers, sequent = [[3, 1, 2, 5]], ["p -> q, p |- q"]
    rewards: dict[str, Callable[[str], Any]] = {
        "HashesReward": lambda t: HashesReward()(completions=[t], solution=["18"]),
        "CoinReward": lambda t: CoinReward()(completions=[t]),
        "CountdownReward": lambda t: CountdownReward()(completions=[t], numbers=numbers, target=[10]),
        "ProofReward": lambda t: ProofReward()(completions=[t], sequent=sequent),
        "ThinkFormatReward": lambda t: ThinkFormatReward()(completions=[t]),
        "LanguageConsistencyReward": lambda t: LanguageConsistencyReward()(completions=[t]),
        "LanguageConsistencyReward, prompt": lambda t: LanguageConsistencyReward("prompt")(
            prompts=[t], completions=[t]
        ),
        "EquationSteps": lambda t: EquationSteps().score_texts("", _steps(t)),
        "by_paragraph": by_paragraph,
        "worked_out": lambda t: worked_out([t]),
        "CodeReward's reading": program_text,
        "gold column": gold_answer,
    }
    for kind in ("distance", "inclusion_ordering", "inclusion_ordering_multiset", "exact"):
        rewards[f"SortingReward {kind}"] = lambda t, kind=kind: SortingReward(kind)(completions=[t], numbers=numbers)
    return rewards


def _steps(text: str) -> list[str]:
    ends = by_line(text)
    return [text[a:b] for a, b in zip([0, *ends], ends)]


class Pools:
    """The rewards with workers, texts in batches; the length reward on what the first of them said."""

    def __init__(self, seen: dict[str, Seen]) -> None:
        self.seen = seen
        self.rewards = {
            "AccuracyReward strict": AccuracyReward(timeout_s=CPU_SECONDS, workers=2),
            "AccuracyReward lenient": AccuracyReward("lenient", timeout_s=CPU_SECONDS, workers=2),
            "BoxedReward": BoxedReward(timeout_s=CPU_SECONDS, workers=2),
        }
        self.ends: Counter[str] = Counter()
        self.known: dict[
            tuple[str, str], Any
        ] = {}  # of this batch: the second and third reward ask what the first asked
        for name, reward in self.rewards.items():
            self._listen(name, reward)

    def _listen(self, name: str, reward: AccuracyReward) -> None:
        pool = reward._verifier.pool
        run = pool.run

        def heard(payloads: Any) -> Any:
            keys = [(payload["gold"], payload["answer"]) for payload in payloads]
            new = [payload for payload, key in zip(payloads, keys, strict=True) if key not in self.known]
            for payload, outcome in zip(new, run(new), strict=True):
                limit = pool.limits.wall_seconds
                self.seen[f"{name}, a worker"].add(repr(payload)[:60], outcome.seconds, limit=limit)
                self.ends[outcome.status] += 1
                self.known[payload["gold"], payload["answer"]] = outcome
            return [self.known[key] for key in keys]

        pool.run = heard  # type: ignore[method-assign]

    def judge(self, batch: list[tuple[str, str]], at: int) -> None:
        texts = [text for _, text in batch]
        golds = [GOLDS[(at + i) % len(GOLDS)] for i in range(len(batch))]
        self.known.clear()
        for name, reward in self.rewards.items():
            for family, text in batch:
                begun = time.process_time()
                reward.read(text)
                self.seen[f"{name}, reading"].add(family, time.process_time() - begun)
            begun = time.perf_counter()
            values = reward(completions=texts, solution=golds)
            seconds = time.perf_counter() - begun
            self.seen[name].texts += len(texts)
            self.seen[name].total += seconds
            if len(values) != len(texts) or not all(value in (0.0, 1.0, None) for value in values):
                self.seen[name].broken.append(f"values {values!r:.80}")
            if name == "AccuracyReward strict":
                self._lengths(texts, values)

    def _lengths(self, texts: list[str], values: list[float | None]) -> None:
        group = Group(
            "p", texts, [[1]] * len(texts), [len(text) for text in texts], rewards={"accuracy_reward": values}
        )
        begun = time.perf_counter()
        KimiLengthReward().score_group(group)
        self.seen["KimiLengthReward"].add("a group", time.perf_counter() - begun, texts=len(texts))

    def alive(self) -> bool:
        honest = {"completions": ["So \\boxed{(x+1)^2}."], "solution": ["$x^2+2x+1$"]}
        return all(reward(**honest) == [1.0] for reward in self.rewards.values())

    def resident(self) -> int:
        """Bytes held by the largest worker now."""
        pids = [pid for reward in self.rewards.values() for pid in reward._verifier.pool.pids]
        return max((_resident(pid) for pid in pids), default=0)

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


def _resident(pid: int | str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def through_ours(texts: Iterable[tuple[str, str]], size: int = 256) -> tuple[dict[str, Seen], list[str]]:
    """Every text through every reward. (What each reward did, what was broken besides.)"""
    seen: dict[str, Seen] = defaultdict(Seen)
    singles, pools = one_text_rewards(), Pools(seen)
    for judge in singles.values():
        judge("An honest answer: 18.")  # tables are read at first use
    Path(CANARY).unlink(missing_ok=True)
    batch: list[tuple[str, str]] = []
    texts = [*texts]
    progress = tqdm(total=len(texts), unit="text", desc="through every reward", mininterval=1.0)
    before, most, worker, done = 0, 0, 0, 0
    for family, text in [*texts, ("", "")]:
        if family:
            batch.append((family, text))
            for name, judge in singles.items():
                begun = time.process_time()
                judge(text)
                seen[name].add(family, time.process_time() - begun)
        if batch and (len(batch) == size or not family):
            pools.judge(batch, done)
            progress.update(len(batch))
            done, batch = done + len(batch), []
            before = before or _resident("self")
            most, worker = max(most, _resident("self")), max(worker, pools.resident())
    progress.close()
    broken = [] if pools.alive() else ["a pool is not fit for use afterwards"]
    broken += ["a text was run as a program"] if Path(CANARY).exists() else []
    broken += [f"memory grew from {before >> 20} to {most >> 20} MiB"] if most > before + (512 << 20) else []
    print(
        f"{done:,} texts; worker ends {dict(pools.ends)}; verdicts "
        f"{dict(pools.rewards['AccuracyReward strict'].counts)}"
    )
    print(f"memory after the first batch {before >> 20} MiB, most {most >> 20} MiB; largest worker {worker >> 20} MiB")
    pools.close()
    return dict(seen), broken


def table(seen: dict[str, Seen]) -> str:
    lines = ["| reward | texts | seconds | slowest text, s | its family | broken |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {one.texts:,} | {one.total:.1f} | {one.slowest:.3f} | {one.slowest_family.replace('|', '/')} | "
        f"{len(one.broken)} |"
        for name, one in seen.items()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl", type=int, default=4)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    reals = real(arguments.data) if arguments.data.exists() else iter(())
    seen, broken = through_ours([*hostile(arguments.count, arguments.seed), *reals])
    print(table(seen))
    broken += [f"{name}: {what}" for name, one in seen.items() for what in one.broken]
    print("\n".join(["broken:", *broken[:40]] if broken else ["nothing broken"]), flush=True)
    if arguments.trl:
        sample = list(hostile(len(FAMILIES) * arguments.trl, arguments.seed))
        print("\nTRL's accuracy_reward, in a thread:")
        for family, ends in through_trl(sample, GOLDS).items():
            print(f"| {family} | {dict(ends)} |", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
