"""Decide whether two answers are equal: text by its letters, numbers by arithmetic, all else by math-verify in a
worker.

canonical spelling -> kind of gold: unusable -> UNPARSEABLE_GOLD
                                    text     -> same letters and digits, or the same choice?
                                    number   -> `exact_numbers`, if that is certain (fractions too)
                                    math     -> math-verify, once it accepts the gold as an answer to itself

`MathVerifier.compare` brings both sides to one spelling (`_read`) and decides what it can in this process
(`_decide_here`). What is left goes to worker processes, which run `compare_in_worker` with math-verify and sympy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from typing import Any

from grpo_lab.sandbox.pool import WorkerPool
from grpo_lab.sandbox.workers import Limits
from grpo_lab.verifiers.canonical import canonical, inside_text_group, prose_words, text_key
from grpo_lab.verifiers.choices import Choice, read_choice
from grpo_lab.verifiers.closeness import equal_where_real, relative_closeness
from grpo_lab.verifiers.exact_numbers import compare_numbers, compare_plain_numbers, decimals_compared, is_plain_number
from grpo_lab.verifiers.quantity import exact_value
from grpo_lab.verifiers.side_by_side import MANY, is_many, read_together
from grpo_lab.verifiers.units import without_unit_at_end
from grpo_lab.verifiers.verdict import MathVerdict, Verdict

_HANDLER = "grpo_lab.verifiers.math_equality:compare_in_worker"
_PLACEHOLDERS = frozenset({"none", "nan", "null", "na", "unknown", "todo", "tbd", "missing", "invalid", "error"})
_NUMBER_WORDS = re.compile(
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
    r"(?:-\w+)?",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_CACHE_LIMIT = 1 << 16
MOST_CHARACTERS = 2000
"""Largest number of characters that is read. A longer answer is refused (`unparseable_answer`), a longer gold is
unusable."""
_FIGURES = re.compile(r"-?\d{1,13}(?:\.\d{1,13})?", re.ASCII)
_COMPARED = {same: MathVerdict(Verdict.EQUAL if same else Verdict.NOT_EQUAL, "exact numbers") for same in (True, False)}


class GoldKind(Enum):
    """Kind of a gold answer, which decides how it is compared; see `kind_of_gold`."""

    NUMBER = "number"
    TEXT = "text"
    MATH = "math"
    UNUSABLE = "unusable"


def kind_of_gold(gold: str) -> GoldKind:
    """Choose how a canonical gold is to be compared. Prose is unusable: no rule could say which answers it accepts."""
    key = text_key(gold)
    if not key or key in _PLACEHOLDERS:
        return GoldKind.UNUSABLE
    if is_plain_number(gold):
        return GoldKind.NUMBER
    if inside_text_group(gold) is not None:
        return GoldKind.TEXT
    choice = read_choice(gold)
    if _CHOICE.fullmatch(gold) or (choice is not None and (choice.wrapped or "\\" not in gold)):
        return GoldKind.TEXT
    words = prose_words(gold)
    if not words:
        return GoldKind.MATH
    one_word = len(gold.split()) == 1 and re.fullmatch(r"[^\W\d_][^\W_'-]*(?:['-][^\W_]+)*", gold) is not None
    if one_word and not _NUMBER_WORDS.fullmatch(gold):
        return GoldKind.TEXT
    return GoldKind.UNUSABLE


def names_choice(gold: str) -> bool:
    """Return whether a gold is one of several choices: its letter, with or without the text behind it."""
    spelled = canonical(gold)
    return kind_of_gold(spelled) is GoldKind.TEXT and _choice_of(spelled) is not None


def _same_choice(gold: str, answer: str) -> bool:
    """Return whether gold and answer name the same choice: the same letter, unless the numbers behind it differ. An
    answer without a letter is compared with the text behind the gold's letter."""
    wanted = _choice_of(gold)
    given = _choice_of(answer)
    if wanted is None:
        return False
    behind = canonical(wanted.behind)
    if given is None:
        return bool(text_key(behind)) and _same_text(behind, answer)
    return wanted.label == given.label and not _other_number(behind, canonical(given.behind))


def _choice_of(text: str) -> Choice | None:
    """Return the choice that a canonical text names, by its letter alone or with the text behind it; else None."""
    inside = inside_text_group(text)
    text = (text if inside is None else inside).strip()
    label = _CHOICE.fullmatch(text)
    if label:
        return Choice(label[1], "", wrapped=False)
    return read_choice(text)


def _same_text(one: str, other: str) -> bool:
    """Return whether two texts have the same value or, if the first has no value, the same letters and digits."""
    value = exact_value(one)
    if value is None:
        return text_key(one) == text_key(other)
    return value == exact_value(other)


def _other_number(one: str, other: str) -> bool:
    """Return whether two texts are numbers of different values."""
    values = (exact_value(one), exact_value(other))
    return None not in values and values[0] != values[1]


class MathVerifier:
    """Comparison of pairs of answers, (gold, answer). Bad text leads to a verdict, never to an exception or a hang.

    Like its ``WorkerPool``, it is picklable and usable from any thread.

    Args:
        fast_path: compare numbers and fractions without a worker if that is certain. Never changes a verdict.
        limits: time and memory of a comparison in a worker.
        workers: number of worker processes.
    """

    def __init__(self, *, fast_path: bool = True, limits: Limits | None = None, workers: int | None = None) -> None:
        self.fast_path = fast_path
        self.pool = WorkerPool(_HANDLER, limits=limits, size=workers)
        self._known: dict[tuple[str, str], MathVerdict] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_known": {}}

    def close(self) -> None:
        """End the worker processes (they also end with this object)."""
        self.pool.close()

    def warm_up(self, golds: Sequence[str]) -> None:
        """Start math-verify's imports in a worker process if one of these golds may need it."""
        spelled = (self._spelled(gold) for gold in golds)
        if any(kind_of_gold(gold) is GoldKind.MATH and compare_numbers(gold, gold) is None for gold in spelled):
            self.pool.warm_up()

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[MathVerdict]:
        """Return one verdict per (gold, answer), in order. Equal pairs are compared once."""
        read = {pair: self._read(*pair) for pair in dict.fromkeys(pairs)}
        keys = [read[pair] for pair in pairs]
        decided = {key: self._decide_here(*key) for key in dict.fromkeys(keys)}
        jobs = [key for key, verdict in decided.items() if verdict is None]
        outcomes = self.pool.run([{"gold": gold, "answer": answer} for gold, answer in jobs])
        for key, outcome in zip(jobs, outcomes, strict=True):
            if outcome.status == "ok":
                decided[key] = verdict = MathVerdict(Verdict(outcome.value["verdict"]), outcome.value["reason"])
                if len(self._known) >= _CACHE_LIMIT:
                    self._known.clear()
                self._known[key] = verdict
            else:
                decided[key] = MathVerdict(Verdict(outcome.status), outcome.reason)
        return [judged for key in keys if (judged := decided[key]) is not None]

    def _read(self, gold: str, answer: str) -> tuple[str, str]:
        """Return gold and answer as they are to be compared: in canonical spelling and, unless the gold is text, read
        together (`read_together`)."""
        gold = self._spelled(gold)
        answer = self._spelled(answer)
        if _FIGURES.fullmatch(gold) and _FIGURES.fullmatch(answer):
            return gold, answer  # what follows would return the same after twenty times the time
        if max(len(gold), len(answer)) > MOST_CHARACTERS or inside_text_group(gold) is not None:
            return gold, answer
        return read_together(gold, answer)

    def _spelled(self, text: str) -> str:
        """Return the canonical spelling of a text. One of more than 4 · `MOST_CHARACTERS` stays as it is, and is
        refused for its length, even if it is short without its wrappers and spaces."""
        if _FIGURES.fullmatch(text):
            return text
        if len(text) <= 4 * MOST_CHARACTERS:
            return canonical(text)
        return text

    def _decide_here(self, gold: str, answer: str) -> MathVerdict | None:
        """Return the verdict on gold and answer, as `_read` returns them, if it needs no worker or is known from one;
        else None."""
        same = None
        if self.fast_path:
            same = compare_plain_numbers(gold, answer)
        if same is not None:
            return _COMPARED[same]
        if len(gold) > MOST_CHARACTERS:
            return MathVerdict(Verdict.UNPARSEABLE_GOLD, f"longer than {MOST_CHARACTERS} characters")
        kind = kind_of_gold(gold)
        if kind is GoldKind.UNUSABLE:
            return MathVerdict(Verdict.UNPARSEABLE_GOLD, "empty, a placeholder or prose")
        if not answer:
            return MathVerdict(Verdict.UNPARSEABLE_ANSWER, "empty")
        if len(answer) > MOST_CHARACTERS:
            return MathVerdict(Verdict.UNPARSEABLE_ANSWER, f"longer than {MOST_CHARACTERS} characters")
        if kind is GoldKind.TEXT:
            same = text_key(gold) == text_key(answer) or _same_choice(gold, answer)
            return MathVerdict(Verdict.EQUAL if same else Verdict.NOT_EQUAL, "compared as text")
        if is_many(gold, answer):
            return MathVerdict(Verdict.NOT_EQUAL, MANY)
        same = None
        if self.fast_path:
            same = compare_numbers(gold, answer)
        if same is not None:
            return _COMPARED[same]
        return self._known.get((gold, answer))


def _parse(expression: str, letter_units: bool = False) -> list[Any]:
    """Parse a canonical spelling as one piece of LaTeX, and return math-verify's readings of it; an empty list if there
    are none.

    math-verify's search for an answer in prose is not used, nor its list of units, which has the single letters t, d,
    c, …. ``letter_units``: a letter of a unit at the end is dropped (``without_unit_at_end``).
    """
    from math_verify import LatexExtractionConfig, parse

    config = LatexExtractionConfig()
    config = replace(config, normalization_config=replace(config.normalization_config, units=False))
    one_line = without_unit_at_end(expression.replace("\n", " "), letter_units)
    return list(parse(f"${one_line}$", [config], fallback_mode="no_fallback", parsing_timeout=None))


def _verify(gold: list[Any], answer: list[Any], decimals: int) -> bool:
    """Return whether math-verify calls two parsed sides equal, floats rounded to ``decimals``, and their values are
    relatively close (`relative_closeness`)."""
    from math_verify import verify

    with relative_closeness():
        return bool(verify(gold, answer, float_rounding=decimals, timeout_seconds=None))


def _named_alike(answer: Any, gold: list[Any]) -> Any:
    """Replace the symbols of an answer by those of the gold that have the same name. Without this, sympy may tell
    symbols of one name apart: it assumes different things of i in `2 i` and in `2i`."""
    symbols = {symbol.name: symbol for one in gold for symbol in getattr(one, "free_symbols", ())}
    own = getattr(answer, "free_symbols", ())
    other = {symbol: symbols[symbol.name] for symbol in own if symbols.get(symbol.name, symbol) != symbol}
    if other:
        return answer.xreplace(other)
    return answer


@lru_cache(maxsize=256)
def _usable_gold(gold: str) -> list[Any]:
    """Parse a gold; return an empty list if it cannot be parsed, or does not equal itself, such as 1/0."""
    parsed = _parse(gold)
    if parsed and _verify(parsed, parsed, decimals_compared(gold)):
        return parsed
    return []


def compare_in_worker(job: dict[str, str]) -> dict[str, str]:
    """Compare the texts `{"gold", "answer"}` with math-verify, and return `{"verdict", "reason"}`. Runs in a worker."""
    gold = _usable_gold(job["gold"])
    if not gold:
        return {"verdict": "unparseable_gold", "reason": "math-verify cannot read the gold answer"}
    if job["answer"] == job["gold"]:
        return {"verdict": "equal", "reason": "same spelling"}
    variables = any(getattr(one, "free_symbols", ()) for one in gold)
    answer = [_named_alike(one, gold) for one in _parse(job["answer"], letter_units=not variables)]
    if not answer:
        return {"verdict": "unparseable_answer", "reason": "math-verify cannot read the answer"}
    same = _verify(gold, answer, decimals_compared(job["gold"])) or equal_where_real(gold[0], answer[0])
    return {"verdict": "equal" if same else "not_equal", "reason": "math-verify"}


def prepare_worker() -> None:
    """Import sympy and build the parser's tables, before the time limit of any job runs."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own (signal) time limit is off
    compare_in_worker({"gold": r"\frac{1}{2}", "answer": "(x+0.5)^2"})
