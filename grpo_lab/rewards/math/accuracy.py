r"""AccuracyReward: 1.0 for the right final answer, 0.0 for any other text, None where the gold cannot be scored.

Source: DeepSeek-R1 (arXiv 2501.12948, section 2.2.2, accuracy rewards); equality by math-verify. Unlike in TRL's
`accuracy_reward` the answer is read from its marker (of the model's *own* answer where a base model runs on), and
compared in processes that can be killed; a number hardly ever needs them. See docs/algorithms/accuracy_reward.md.

The gold in the `solution` column is a bare answer, GSM8K's `... #### 18`, or a full solution with `\boxed{}`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

from grpo_lab.rewards.arithmetic.equations import judged, plain
from grpo_lab.rewards.completion import completion_text, prompt_text
from grpo_lab.rewards.math.expression import asked_unit, is_expression, number_in_words, stated_expression
from grpo_lab.rewards.math.extraction import Answer, extract_answer
from grpo_lab.verifiers import Limits, MathVerdict, MathVerifier, Verdict
from grpo_lab.verifiers.canonical import canonical
from grpo_lab.verifiers.side_by_side import in_figures

_SHORT = 60


def gold_answer(solution: Any) -> str | None:
    """The answer a solution ends with, or None where there is none.

    Whether the answer itself can be compared with anything is the verifier's to say (`kind_of_gold`).
    """
    if isinstance(solution, bool) or solution is None:
        return None
    if isinstance(solution, (int, float)):
        return _number(solution) if isinstance(solution, float) else digits(solution)
    if not isinstance(solution, str) or not solution.strip():
        return None
    text = solution.strip()
    marked = extract_answer(text)
    if marked is not None and not marked.weak:
        return marked.text
    if (len(text) <= _SHORT and "\n" not in text and " " not in text) or is_expression(text.replace("$", "")):
        return stated_expression(text) or text
    return stated_expression(text) or number_in_words(text) or (text if _is_label(text) else None)


def digits(value: int) -> str | None:
    """An integer as text; None where it has more digits than Python writes (no answer of a model's has them either)."""
    try:
        return str(value)
    except ValueError:
        return None


def _number(value: float) -> str | None:
    if not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else repr(value)


def _is_label(text: str) -> bool:
    return (text[:1].isupper() and text[1:2] in ".):") or (text[:1] == "(" and text[2:3] == ")")


T = TypeVar("T")
_NO_GOLD = MathVerdict(Verdict.UNPARSEABLE_GOLD, "no answer found in the solution column")
_NO_ANSWER = MathVerdict(Verdict.UNPARSEABLE_ANSWER, "no answer found in the completion")
_UNTRUE = MathVerdict(Verdict.NOT_EQUAL, "an equation whose sides differ")


@dataclass(frozen=True)
class Judgement:
    """How one completion was judged: what was read on both sides, the verdict with its reason, the reward."""

    gold: str | None
    answer: str | None
    marker: str | None
    verdict: Verdict
    reason: str

    @property
    def reward(self) -> float | None:
        if self.verdict is Verdict.UNPARSEABLE_GOLD:
            return None
        return 1.0 if self.verdict is Verdict.EQUAL else 0.0


@dataclass(frozen=True)
class GoldReport:
    """What `check_golds` found: `unusable` holds (row, solution, reason) of every gold that rejects its own answer."""

    total: int
    unusable: list[tuple[int, Any, str]]

    @property
    def share_unusable(self) -> float:
        return len(self.unusable) / self.total if self.total else 0.0

    def __str__(self) -> str:
        head = f"{len(self.unusable)} of {self.total} golds ({self.share_unusable:.1%}) cannot be scored"
        rows = [f"  row {row}: {solution!r:.80} ({reason})" for row, solution, reason in self.unusable[:5]]
        return "\n".join([head, *rows])


class AccuracyReward:
    """Is the completion's final answer the gold answer?

    Args:
        mode: `"strict"` reads marked answers only; `"lenient"` falls back to the last number (or formula).
        fast_path: compare numbers and fractions without a worker process. Never changes a verdict.
        timeout_s: processor seconds for one comparison (and six times that on the clock), after which its worker is
            killed and the answer is wrong. Processor time, so that a busy machine makes no right answer wrong.
        memory_bytes: memory limit of a worker.
        workers: number of worker processes; None: half of the cores, at most 4. They start on first need.

    `counts` tallies verdicts since construction (keys: values of `Verdict`, and `no_answer`).
    """

    columns = ("solution",)  # what `LabTrainer` looks for in the data set before anything is loaded
    unreadable = 0.0  # what a completion without an answer earns

    def __init__(
        self,
        mode: Literal["strict", "lenient"] = "strict",
        *,
        fast_path: bool = True,
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        workers: int | None = None,
    ) -> None:
        if mode not in ("strict", "lenient"):
            raise ValueError(f"mode must be 'strict' or 'lenient'; got {mode!r}")
        self.mode = mode
        self.__name__ = "accuracy_reward"  # TRL names its metrics after this
        self.counts: Counter[str] = Counter()
        limits = Limits(cpu_seconds=timeout_s, wall_seconds=6 * timeout_s, memory_bytes=memory_bytes)
        self._verifier = MathVerifier(fast_path=fast_path, limits=limits, workers=workers)

    def __repr__(self) -> str:
        return f"AccuracyReward(mode={self.mode!r})"

    def __call__(
        self,
        prompts: Sequence[Any] | None = None,
        completions: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Rewards in order. Of `prompts` only what they count in is read (`asked_unit`). With TRL's `log_metric`,
        shares are logged."""
        if completions is None:
            raise ValueError("AccuracyReward needs completions=[...]; got none")
        if solution is None:
            raise ValueError(
                "AccuracyReward needs the gold answers in the column 'solution'; the columns given are "
                f"{sorted(columns)}"
            )
        judgements = self.judge(completions, solution, prompts)
        if log_metric is not None and judgements:
            for name, value in _shares(judgements).items():
                log_metric(f"accuracy_reward/{name}", value)
        return [self._paid(judgement) for judgement in judgements]

    def judge(
        self, completions: Sequence[Any], solutions: Sequence[Any], prompts: Sequence[Any] | None = None
    ) -> list[Judgement]:
        """The same, with what was read and why it was judged so; for reports and for a look at wrong answers."""
        questions = [""] * len(completions) if prompts is None else [prompt_text(prompt) for prompt in prompts]
        if not len(completions) == len(solutions) == len(questions):
            raise ValueError(
                f"got {len(completions)} completions and {len(solutions)} solutions (prompts: {len(questions)}); "
                "they must be one to one"
            )
        golds = _once(gold_answer, solutions)
        answers = _once(self.read, [completion_text(completion) for completion in completions])
        # Without an answer the gold is still checked, against itself: None must not depend on what the model wrote.
        read = [
            _readings(gold, gold if answer is None else answer.text, unit) if gold else []
            for gold, answer, unit in zip(golds, answers, _once(asked_unit, questions), strict=True)
        ]
        pairs = [pair for readings in read for pair in readings]
        verdicts = dict(zip(pairs, self._verifier.compare(pairs), strict=True))
        found = [
            _judgement(gold, answer, _verdict([verdicts[pair] for pair in readings]))
            for gold, answer, readings in zip(golds, answers, read, strict=True)
        ]
        self.counts.update(judgement.verdict.value for judgement in found)
        self.counts["no_answer"] += sum(answer is None for answer in answers)
        return found

    def read(self, completion: str) -> Answer | None:
        """The answer that is compared; None where the completion gives none. What a grader with other eyes
        overrides."""
        return extract_answer(completion, self.mode)

    def _paid(self, judgement: Judgement) -> float | None:
        unread = judgement.answer is None and judgement.reward is not None
        return self.unreadable if unread else judgement.reward

    def check_golds(self, solutions: Sequence[Any]) -> GoldReport:
        """Every gold against itself, before training: a gold that its own verifier rejects can never be earned."""
        golds = [gold_answer(solution) for solution in solutions]
        verdicts = iter(self._verifier.check_golds([gold for gold in golds if gold]))
        found = [next(verdicts) if gold else _NO_GOLD for gold in golds]
        rejected = [(row, solutions[row], verdict.reason) for row, verdict in enumerate(found) if not verdict.equal]
        return GoldReport(total=len(golds), unusable=rejected)

    def warm_up(self, solution: Sequence[Any]) -> None:
        """Starts the worker's imports, where one of these golds may need one, and returns at once. `LabTrainer` calls
        it with the first rows before it loads a model, so that the first batch does not wait."""
        golds = _once(gold_answer, solution)
        self._verifier.warm_up([gold for gold in golds if gold])

    def close(self) -> None:
        """End the worker processes now (they also end with this object and at exit)."""
        self._verifier.close()


def _once(read: Callable[[Any], T], texts: Sequence[Any]) -> list[T]:
    """`read` of each, called once for equal texts: a group shares its gold, and may repeat its completions."""
    known: dict[str, T] = {text: read(text) for text in dict.fromkeys(t for t in texts if isinstance(t, str))}
    return [known[text] if isinstance(text, str) else read(text) for text in texts]


def _readings(gold: str, answer: str, unit: Fraction | None) -> list[tuple[str, str]]:
    """(gold, answer) as written; where the question asks for dozens, also as so many dozens: `7 dozen` as 7."""
    if unit is None or len(answer) > 200:
        return [(gold, answer)]
    counted = tuple(in_figures(canonical(text), letters=True, unit=unit) for text in (gold, answer))
    return [(gold, answer), (counted[0], counted[1])]


def _verdict(found: list[MathVerdict]) -> MathVerdict:
    return next((verdict for verdict in found if verdict.equal), found[0]) if found else _NO_GOLD


def _is_untrue(equation: str) -> bool:
    r"""`4 = 3`, `x = 2 + 2 = 3`: the last two sides are arithmetic, and differ. What is read in part (`2\pi`) is not
    judged."""
    written = plain(canonical(equation).replace("==", "="))
    return "\\" not in written and any(not link.holds for link in judged(written)[-1:])


def _judgement(gold: str | None, answer: Answer | None, verdict: MathVerdict) -> Judgement:
    if answer is None and verdict.verdict is not Verdict.UNPARSEABLE_GOLD:
        verdict = _NO_ANSWER
    if verdict.equal and answer is not None and "=" in answer.text and "=" not in str(gold) and _is_untrue(answer.text):
        verdict = _UNTRUE
    text, marker = (None, None) if answer is None else (answer.text, answer.marker)
    return Judgement(gold, text, marker, verdict.verdict, verdict.reason)


def _shares(judgements: Sequence[Judgement]) -> dict[str, float]:
    n = len(judgements)
    verdicts = Counter(judgement.verdict for judgement in judgements)
    return {
        "unscorable_gold": verdicts[Verdict.UNPARSEABLE_GOLD] / n,
        "timeout": (verdicts[Verdict.TIMEOUT] + verdicts[Verdict.CRASH]) / n,
        "no_answer": sum(judgement.answer is None for judgement in judgements) / n,
    }
