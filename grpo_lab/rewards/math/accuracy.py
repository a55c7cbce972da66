r"""AccuracyReward: 1.0 for the right final answer, 0.0 for any other text, None where the gold cannot be scored.

Source: DeepSeek-R1 (arXiv 2501.12948, section 2.2.2, accuracy rewards); equality by math-verify. Unlike TRL's
`accuracy_reward`, it reads the answer behind its marker, such as `\boxed{}`. What a base model writes after its *own*
answer (a new task, another turn) is not read. Comparisons run in processes that can be killed; numbers hardly ever need
them. See docs/algorithms/accuracy_reward.md.

The gold in the `solution` column is a bare answer, GSM8K's `... #### 18`, or a full solution with `\boxed{}`.

How a batch is scored (`AccuracyReward.judge`): the gold is read from each solution (`gold_answer`) and the answer from
each completion (`extraction.py`), both are paired in one or two readings (`_readings`), the verifier compares all pairs
at once (`grpo_lab.verifiers`), and its verdicts become one `Judgement` a completion.

``HashesReward`` and ``BoxedReward`` score as other projects do, for comparison.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeVar

from grpo_lab.rewards.arithmetic import judged
from grpo_lab.rewards.completion import RowReward, completion_text, prompt_text
from grpo_lab.rewards.math.expression import asked_unit, is_expression, number_in_words, stated_expression
from grpo_lab.rewards.math.extraction import Answer, boxed_answers, extract_answer
from grpo_lab.rewards.plain_arithmetic import plain
from grpo_lab.verifiers import Limits, MathVerdict, MathVerifier, Verdict
from grpo_lab.verifiers.canonical import canonical
from grpo_lab.verifiers.choices import read_choice
from grpo_lab.verifiers.exact_numbers import without_thousands
from grpo_lab.verifiers.math_equality import names_choice
from grpo_lab.verifiers.side_by_side import in_figures
from grpo_lab.verifiers.written import number_text

_SHORT, _LONGEST_CHOICE = 60, 200
T = TypeVar("T")
#: Seconds for one comparison, and for all comparisons of a batch.
TIMEOUT_S = 5.0
BATCH_S = 60.0
_NO_GOLD = MathVerdict(Verdict.UNPARSEABLE_GOLD, "no answer found in the solution column")
_NO_ANSWER = MathVerdict(Verdict.UNPARSEABLE_ANSWER, "no answer found in the completion")
_UNSCORED = (Verdict.UNPARSEABLE_GOLD, Verdict.UNJUDGED)
_UNTRUE = MathVerdict(Verdict.NOT_EQUAL, "an equation whose sides differ")


def gold_answer(solution: Any) -> str | None:
    """Return the gold answer of a solution, or None if it has none. The verifier decides later whether that answer can
    be compared with anything (`kind_of_gold`)."""
    if not isinstance(solution, str):
        return number_text(solution)
    if not solution.strip():
        return None
    text = solution.strip()
    marked = extract_answer(text)
    if marked is not None and not marked.weak:
        return marked.labelled or marked.text
    one_line = "\n" not in text
    if len(text) <= _LONGEST_CHOICE and one_line and (choice := read_choice(text)) and choice.behind:
        return text
    short_word = len(text) <= _SHORT and one_line and " " not in text
    if short_word or is_expression(text.replace("$", "")):
        return stated_expression(text) or text
    labelled = (text[:1].isupper() and text[1:2] in ".):") or (text[:1] == "(" and text[2:3] == ")")
    return stated_expression(text) or number_in_words(text) or (text if labelled else None)


@dataclass(frozen=True)
class Judgement:
    """The judgement of one completion.

    Attributes:
        gold: the gold answer that was read from the solution; None without one.
        answer: the answer that was read from the completion; None without one.
        marker: the marker that led to the answer (`extraction.Marker`).
        verdict: whether they are equal, or why that is not known.
        reason: in words, which rule decided or what went wrong.
    """

    gold: str | None
    answer: str | None
    marker: str | None
    verdict: Verdict
    reason: str

    @property
    def reward(self) -> float | None:
        if self.verdict in _UNSCORED:
            return None
        if self.verdict is Verdict.EQUAL:
            return 1.0
        return 0.0


@dataclass(frozen=True)
class GoldReport:
    """Report of `check_golds`.

    Attributes:
        total: number of golds.
        unusable: (row, solution, reason) of each gold that does not equal itself.
    """

    total: int
    unusable: list[tuple[int, Any, str]]

    @property
    def share_unusable(self) -> float:
        if self.total:
            return len(self.unusable) / self.total
        return 0.0

    def __str__(self) -> str:
        head = f"{len(self.unusable)} of {self.total} golds ({self.share_unusable:.1%}) cannot be scored"
        rows = [f"  row {row}: {solution!r:.80} ({reason})" for row, solution, reason in self.unusable[:5]]
        return "\n".join([head, *rows])


class AccuracyReward:
    """Reward 1.0 if the completion's final answer equals the gold answer, else 0.0; None if the gold cannot be scored.

    Args:
        mode: `"strict"` reads marked answers only; `"lenient"` falls back to the last number (or formula).
        fast_path: compare numbers and fractions without a worker process. Never changes a verdict.
        timeout_s: CPU seconds for one comparison (and six times that in wall-clock time). An answer over it is wrong.
        memory_bytes: memory limit of a worker.
        batch_s: seconds that each worker may spend, per thousand comparisons begun, on answers that reach their limit.
            After half of these seconds an answer has a tenth of its time; after all of them no comparison is begun. An
            answer that is not judged for this reason gets None and is counted as `unjudged`.
        workers: number of worker processes; None: half of the cores, at most 4. They start on first need.

    If a worker is killed from outside (as when the machine's memory runs out), its answer is judged once more, alone.
    If that fails, too, it gets None.

    `counts` tallies verdicts since construction (keys: values of `Verdict`, and `no_answer`).
    """

    columns = ("solution",)  # what `LabTrainer` looks for in the data set before anything is loaded
    unreadable = 0.0  # what a completion without an answer earns

    def __init__(
        self,
        mode: Literal["strict", "lenient"] = "strict",
        *,
        fast_path: bool = True,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = 1 << 30,
        batch_s: float = BATCH_S,
        workers: int | None = None,
    ) -> None:
        if mode not in ("strict", "lenient"):
            raise ValueError(f"mode must be 'strict' or 'lenient'; got {mode!r}")
        self.mode = mode
        self.__name__ = "accuracy_reward"  # TRL names its metrics after this
        self.counts: Counter[str] = Counter()
        limits = Limits(
            cpu_seconds=timeout_s, wall_seconds=6 * timeout_s, memory_bytes=memory_bytes, batch_seconds=batch_s
        )
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
        """Return the rewards in order. A prompt is read only for the unit that it asks for (`asked_unit`). TRL's
        `log_metric` gets the shares of unscorable golds, timeouts, unjudged answers, and completions without answer."""
        if completions is None:
            raise ValueError("AccuracyReward needs completions=[...]; got none")
        if solution is None:
            raise ValueError(f"AccuracyReward needs the column 'solution'; the columns given are {sorted(columns)}")
        judgements = self.judge(completions, solution, prompts)
        if log_metric is not None and judgements:
            found = Counter(judgement.verdict for judgement in judgements)
            shares = {
                "unscorable_gold": found[Verdict.UNPARSEABLE_GOLD],
                "timeout": found[Verdict.TIMEOUT] + found[Verdict.CRASH],
                "unjudged": found[Verdict.UNJUDGED],
                "no_answer": sum(judgement.answer is None for judgement in judgements),
            }
            for name, count in shares.items():
                log_metric(f"accuracy_reward/{name}", count / len(judgements))
        unread = [one.answer is None and one.reward is not None for one in judgements]
        return [self.unreadable if no else one.reward for no, one in zip(unread, judgements, strict=True)]

    def judge(
        self, completions: Sequence[Any], solutions: Sequence[Any], prompts: Sequence[Any] | None = None
    ) -> list[Judgement]:
        """Judge completions, and return for each what was read and the reason of its verdict, as reports need it.

        Args:
            completions: texts, or message lists.
            solutions: the golds, one per completion.
            prompts: the questions, one per completion; None if they ask for no unit.
        """
        if prompts is None:
            questions = [""] * len(completions)
        else:
            questions = [prompt_text(prompt) for prompt in prompts]
        if not len(completions) == len(solutions) == len(questions):
            counts = f"{len(completions)} completions, {len(solutions)} solutions and {len(questions)} prompts"
            raise ValueError(f"got {counts}; they must be one to one")
        golds = _once(gold_answer, solutions)
        answers = _once(self.read, [completion_text(completion) for completion in completions])
        to_compare: list[list[tuple[str, str]]] = []
        for gold, answer, unit in zip(golds, answers, _once(asked_unit, questions), strict=True):
            if not gold:
                to_compare.append([])
            elif answer is None:  # whether the gold is unscorable must not depend on what the model wrote
                to_compare.append(_readings(gold, gold, unit))
            else:
                to_compare.append(_readings(gold, _beside(gold, answer), unit))
        pairs = [pair for readings in to_compare for pair in readings]
        verdicts = dict(zip(pairs, self._verifier.compare(pairs), strict=True))
        found = [
            _judgement(gold, answer, [verdicts[pair] for pair in readings] or [_NO_GOLD])
            for gold, answer, readings in zip(golds, answers, to_compare, strict=True)
        ]
        self.counts.update(judgement.verdict.value for judgement in found)
        self.counts["no_answer"] += sum(answer is None for answer in answers)
        return found

    def read(self, completion: str) -> Answer | None:
        """Return the answer that is compared with the gold; None if the completion gives none."""
        return extract_answer(completion, self.mode)

    def check_golds(self, solutions: Sequence[Any]) -> GoldReport:
        """Compare every gold with itself, before training. No completion can earn a gold that does not equal itself."""
        golds = [gold_answer(solution) for solution in solutions]
        verdicts = iter(self._verifier.compare([(gold, gold) for gold in golds if gold]))
        found = [next(verdicts) if gold else _NO_GOLD for gold in golds]
        rejected = [(row, solutions[row], verdict.reason) for row, verdict in enumerate(found) if not verdict.equal]
        return GoldReport(total=len(golds), unusable=rejected)

    def warm_up(self, solution: Sequence[Any]) -> None:
        """Start the worker's imports if one of these golds may need a worker, and return at once. `LabTrainer` calls
        this before it loads a model, so that the first batch does not wait."""
        golds = _once(gold_answer, solution)
        self._verifier.warm_up([gold for gold in golds if gold])

    def close(self) -> None:
        """End the worker processes now (they also end with this object and at exit)."""
        self._verifier.close()


def _once(read: Callable[[Any], T], texts: Sequence[Any]) -> list[T]:
    """Apply `read` to each text, once for equal texts: a group shares its gold, and may repeat its completions."""
    known: dict[str, T] = {text: read(text) for text in dict.fromkeys(t for t in texts if isinstance(t, str))}
    return [known[text] if isinstance(text, str) else read(text) for text in texts]


def _beside(gold: str, answer: Answer) -> str:
    """Return the part of an answer that is compared: with its letter, `(A) 5 apples`, if the gold is a choice, and
    without it, `5 apples`, beside any other gold."""
    if answer.labelled and names_choice(gold):
        return answer.labelled
    return answer.text


def _readings(gold: str, answer: str, unit: Fraction | None) -> list[tuple[str, str]]:
    """Return the pairs (gold, answer) to compare; one equal pair is enough. The first is as written. If the question
    asks for a `unit` such as dozens (12), the second counts both in it (`7 dozen` as 7)."""
    if unit is None or len(answer) > 200:
        return [(gold, answer)]
    counted, given = (in_figures(canonical(text), letters=True, unit=unit) for text in (gold, answer))
    return [(gold, answer), (counted, given)]


def _judgement(gold: str | None, answer: Answer | None, found: list[MathVerdict]) -> Judgement:
    """Combine the verdicts of all readings of one answer.

    It is equal if one reading is, else unjudged if one is, else what the first says. An equal answer that states a
    false equation, `4 = 3` for a gold of 3, is wrong all the same. Without an answer the gold was compared with itself,
    which only tells whether it can be scored.
    """
    unjudged = [one for one in found if one.verdict is Verdict.UNJUDGED]  # it may have been equal
    verdict = next((one for one in found if one.equal), (unjudged or found)[0])
    if answer is None and verdict.verdict not in _UNSCORED:
        verdict = _NO_ANSWER
    if verdict.equal and answer is not None and "=" in answer.text and "=" not in str(gold):
        # `4 = 3`, `x = 2 + 2 = 3`: the last two sides are arithmetic, and differ; LaTeX (`2\pi`) would be read in part
        written = plain(canonical(answer.text).replace("==", "="))
        if "\\" not in written and not all(link.holds for link in judged(written)[-1:]):
            verdict = _UNTRUE
    text, marker = (None, None) if answer is None else (answer.text, answer.marker)
    return Judgement(gold, text, marker, verdict.verdict, verdict.reason)


class HashesReward(RowReward):
    """Reward 1.0 if the number after `#### ` is the gold answer, character by character, else 0.0. This is the strict
    GSM8K score of verl (`compute_score`, verl/utils/reward_score/gsm8k.py).

    So `#### 18.0`, `#### $18` and `####18` earn 0 with a gold of 18 (`AccuracyReward`: 1), as does a right answer in a
    box. The score measures the format as much as the mathematics (docs/reproduce.md).

    Args:
        take: which `#### number` of a completion counts, `"last"` (verl since 2025) or `"first"` (before).
    """

    columns = ("solution",)
    __name__ = "hashes_reward"  # TRL names its metrics after this

    def __init__(self, take: Literal["last", "first"] = "last") -> None:
        if take not in ("last", "first"):
            raise ValueError(f"take must be 'last' or 'first'; got {take!r}")
        self.take = take

    def score(self, text: str, *row: Any) -> float | None:
        """Return 1.0 or 0.0; None if the gold is empty. `solution` must be the number alone, as from `load_gsm8k`."""
        gold = row[0] if isinstance(row[0], str) else number_text(row[0])
        expected = without_thousands((gold or "").strip())
        if not expected:
            return None
        found = re.findall(r"#### (-?[0-9.,]+)", text)
        return float(bool(found) and found[-1 if self.take == "last" else 0].replace(",", "") == expected)


class BoxedReward(AccuracyReward):
    r"""Reward 1.0 for the gold answer in the last `\boxed{}`, 0.0 for another answer, `unreadable` without a box.
    Equality is judged as by `AccuracyReward`. No other marker counts, thinking tags are ignored, and run-on text is not
    cut off.

    Sources: `boxed_reward_fn` of sail-sg/understand-r1-zero; ServiceNow/TapeAgents, examples/rl_gsm8k (-1 where no
    answer can be read). How we differ: equality is math-verify's (TapeAgents compares the box's first whole number),
    and a completion that was cut at its length limit earns what its box earns (there it gets 0 and -1).

    Args:
        unreadable: reward of a completion without a (closed, filled) box: 0.0, or less to teach the format.
        fast_path: as in `AccuracyReward`, and so are the arguments after it.

    Raises:
        ValueError: `unreadable` is not a number above -1e6 and at most 0.
    """

    def __init__(
        self,
        *,
        unreadable: float = 0.0,
        fast_path: bool = True,
        timeout_s: float = TIMEOUT_S,
        memory_bytes: int = 1 << 30,
        batch_s: float = BATCH_S,
        workers: int | None = None,
    ) -> None:
        super().__init__(
            "strict",
            fast_path=fast_path,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
            batch_s=batch_s,
            workers=workers,
        )
        if isinstance(unreadable, bool) or not -1e6 < unreadable <= 0:
            raise ValueError(f"unreadable must be a number at most 0; got {unreadable!r}")
        self.unreadable = float(unreadable)
        self.__name__ = "boxed_reward"  # TRL names its metrics after this

    def __repr__(self) -> str:
        return f"BoxedReward(unreadable={self.unreadable:g})"

    def read(self, completion: str) -> Answer | None:
        return next(reversed(boxed_answers(completion)), None)
