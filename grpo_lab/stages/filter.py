"""Filters of rows: first those that read the text, then those that ask a model about the rows left.

A filter is a settings class with a method `apply(filtering)`. It may add scores to the rows, and it marks in
``filtering.selection`` which rows are kept. `pipelines/curate.py` makes stages of the filters that a recipe sets.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from grpo_lab.curation import (
    PassRate,
    Selection,
    balance,
    deduplicate,
    find_contamination,
    guess_rates,
    keep_band,
    question_domain,
    question_kind,
)
from grpo_lab.curation.duplicates import KNOWN, NGRAM, SIMILAR
from grpo_lab.curation.pass_rate import TRIES
from grpo_lab.curation.question_kinds import KINDS
from grpo_lab.curation.selection import is_missing
from grpo_lab.recipe.sections import DataSection, SamplingSettings
from grpo_lab.runs.stage import Workspace
from grpo_lab.settings import Count, Number, Positive, must_be, settings
from grpo_lab.stages.sample import ModelGenerator
from grpo_lab.verifiers.verdict import CORRECT_FROM

RATES = ("pass_rate", "successes", "trials", "mean_tokens", "mean_tokens_right")
SCORES = ("kind", "prompt_tokens", *RATES, "guesses_right")
DOMAIN = "domain"
"""Name of the score for a row's domain. If the data have a column of this name, no score is computed."""
BANDS = {"learnable": (0.0, 1.0), "hard": (0.0, 0.3)}
PASS_RATES, GUESSES = "pass_rates.jsonl", "guesses.jsonl"
NO_THINKING = {"enable_thinking": False}


@dataclass(kw_only=True)
class Filtering(Workspace):
    """The rows of a data set while filters are applied to them, with everything that a filter may need.

    Attributes:
        rows: all rows; filters refer to a row by its index in this list.
        selection: the scores of every row, and the filters that dropped it.
        shown: name of the column with the text that filters read.
        judge: the reward in words, for the headers of files of samples.
        against: the evaluation sets to compare with, each a data set.
        notes: sentences for the report.
        generator: the model, once `leave_room` has loaded it.
    """

    rows: list[dict[str, Any]]
    selection: Selection
    shown: str
    sampling: SamplingSettings
    reward: Any
    judge: str
    against: Sequence[Any] = ()
    notes: list[str] = field(default_factory=list)
    generator: Any = None

    @property
    def texts(self) -> list[str]:
        """Text of every row, also of dropped ones."""
        return [text_of(row[self.shown]) for row in self.rows]

    @property
    def left(self) -> list[int]:
        """Indices of the rows that no filter has dropped so far."""
        return [i for i, kept in enumerate(self.selection.mask) if kept]

    def score(self, name: str, values: Mapping[int, Any]) -> None:
        """Add the score ``name`` to every row: ``values`` maps a row's index to its score; other rows get None."""
        self.selection.score(name, [values.get(i) for i in range(len(self.rows))])

    def keep(self, name: str, keep: Mapping[int, bool], rule: str, reasons: Mapping[int, str | None]) -> None:
        """Record which rows the filter ``name`` keeps, by ``rule`` in words. ``keep`` maps a row's index to whether it
        is kept, and ``reasons`` to why it is not; a row that is missing in ``keep`` is not dropped."""
        every = range(len(self.rows))
        mask = [keep.get(i, True) for i in every]
        self.selection.keep(name, mask, setting=rule, reasons=[reasons.get(i) for i in every])


def _listed(value: Any) -> Any:
    """Put a single text into a tuple; return anything else as it is."""
    if isinstance(value, str):
        return (value,)
    return value


@settings()
class KindFilter:
    """``kind``: keep only these kinds of question (`question_kind`)."""

    keep: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ("open",)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.keep) - set(KINDS)):
            raise ValueError(f"`filters.kind.keep` holds {unknown}; kinds are {list(KINDS)}")

    def apply(self, filtering: Filtering) -> None:
        kinds = dict(enumerate(map(question_kind, filtering.texts)))
        filtering.score("kind", kinds)
        filtering.keep(
            "kind", {i: kind in self.keep for i, kind in kinds.items()}, f"keep {', '.join(self.keep)}", kinds
        )


@settings()
class DuplicateFilter:
    """``duplicates``: drop a row whose word similarity to a kept earlier row is ≥ ``similarity`` (`deduplicate`)."""

    similarity: Number = SIMILAR

    def apply(self, filtering: Filtering) -> None:
        found = deduplicate(filtering.texts, similarity=self.similarity)
        reasons = {pair.row: f"row {pair.of}, similarity {pair.similarity:.2f}" for pair in found.pairs}
        filtering.keep("duplicates", dict(enumerate(found.keep)), f"word similarity ≥ {self.similarity:g}", reasons)


@settings()
class ContaminationFilter:
    """``contamination``: drop rows that repeat an item of the evaluation sets ``against``: by ``ngram`` consecutive
    words, or by a ``similarity`` of their words (`find_contamination`)."""

    against: Annotated[tuple[DataSection, ...], Field(min_length=1)]
    ngram: Positive = NGRAM
    similarity: Number = KNOWN

    def apply(self, filtering: Filtering) -> None:
        against = [text_of(one) for rows in filtering.against for one in rows[shown_column(rows)]]
        hits = dict(
            enumerate(find_contamination(filtering.texts, against, ngram=self.ngram, similarity=self.similarity))
        )
        filtering.keep(
            "evaluation sets",
            {i: hit is None for i, hit in hits.items()},
            f"{len(against):,} items; {self.ngram}-grams, similarity ≥ {self.similarity:g}",
            {i: f"item {hit.item}, {hit.reason}: {hit.evidence}" for i, hit in hits.items() if hit is not None},
        )


@settings(bare="rule")
class BandFilter:
    """``band``: keep rows by their pass rate p, by a named rule or by limits of your own.

    Args:
        rule: ``learnable``, 0 < p < 1; ``hard``, 0 < p < 0.3 (no source says where "low" ends). Both ends are excluded.
        low, high: limits in place of the rule's, both excluded, too (`keep_band`).
        fail_best_of: in place of a rule: keep a problem if its first ``fail_best_of`` samples are all scored and wrong.
    """

    rule: Literal["learnable", "hard"] = "learnable"
    low: Number | None = None
    high: Number | None = None
    fail_best_of: Positive | None = None

    def __post_init__(self) -> None:
        if self.fail_best_of is not None and (self.rule, self.low, self.high) != ("learnable", None, None):
            raise ValueError("`filters.band` has `fail_best_of`, which is a rule of its own; leave the others out")
        low, high = self.ends
        if not low < high:
            raise ValueError(f"`filters.band` is low={low!r}, high={high!r}; two numbers with low < high are needed")

    @property
    def ends(self) -> tuple[float, float]:
        """The limits of p in force, (low, high)."""
        low, high = BANDS[self.rule]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def apply(self, filtering: Filtering, found: Mapping[int, PassRate]) -> None:
        """Keep the rows inside of the band; ``found``: index of a row → its measured pass rate."""
        samples = f"{filtering.sampling.n_samples} samples"
        first = self.fail_best_of
        if first is None:
            low, high = self.ends
            inside = keep_band([rate.rate for rate in found.values()], low, high)
            rule = f"{low:g} < p < {high:g}, {samples}"
        else:
            wrong = [[score is not None and score < CORRECT_FROM for score in rate.scores] for rate in found.values()]
            inside = [all(one[:first]) for one in wrong]
            rule = f"never right in the first {first} of {samples}"
        filtering.keep(
            "pass rate",
            dict(zip(found, inside, strict=True)),
            rule,
            {i: "unscorable" if rate.rate is None else f"p = {rate.rate:g}" for i, rate in found.items()},
        )


@settings()
class GuessFilter:
    """``guessable``: drop a row if one of ``tries`` answers without reasoning, of at most ``max_new_tokens`` tokens, is
    right (`guess_rates`). Several rows with a ``completion`` to imitate may share a problem: it is asked once."""

    tries: Positive = TRIES
    max_new_tokens: Positive = 32

    def apply(self, filtering: Filtering) -> None:
        generator = filtering.generator
        limit = self.max_new_tokens

        def briefly(prompts: Sequence[Any], n: int) -> Any:
            filtering.stop.check()
            return generator(prompts, n, max_new_tokens=limit, chat_template_kwargs=NO_THINKING)

        how: Any = {"path": filtering.folder / GUESSES, "batch_size": filtering.sampling.problems_per_save}
        how["settings"] = {**generator.identity(), "max_new_tokens": limit, "reward": filtering.judge}
        how["rendered"] = lambda prompt: generator.rendered(prompt, NO_THINKING)
        problems = [_problem_of(filtering.rows[i]) for i in filtering.left]
        rates = guess_rates(problems, briefly, filtering.reward, self.tries, **how)
        right = {i: rate.successes for i, rate in zip(filtering.left, rates, strict=True)}
        filtering.score("guesses_right", right)
        filtering.keep(
            "guessable",
            {i: count == 0 for i, count in right.items()},
            f"never right in {self.tries} answers of ≤ {limit} tokens without reasoning",
            {i: f"right in {count} of {self.tries}" for i, count in right.items()},
        )


def _problem_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without the columns that belong to its completion, so that all rows of one problem are equal."""
    of_answer: tuple[str, ...] = ()
    if "completion" in row:
        of_answer = ("completion", "source", "length")
    return {name: value for name, value in row.items() if name not in of_answer}


@settings()
class BalanceFilter:
    """``balance``: keep a limited number of rows of each domain, chosen at random (`balance`).

    Args:
        by: the column or score whose values are the domains. ``domain`` means `question_domain` if the data have no
            column of that name.
        per_domain: most rows of a domain: one number for all, or a number for each. None: as many as the smallest has.
    """

    by: str
    per_domain: Annotated[
        Count | dict[str, Count] | None, must_be("a whole number of at least 0, or one for each domain")
    ] = None

    def apply(self, filtering: Filtering) -> None:
        if self.by == DOMAIN and filtering.rows and DOMAIN not in filtering.rows[0]:
            filtering.score(DOMAIN, {i: question_domain(filtering.texts[i]) for i in filtering.left})
        scored = filtering.selection.scored_rows()
        rows = {i: scored[i] for i in filtering.left}
        if not rows:
            return
        missing = {i for i, row in rows.items() if is_missing(row[self.by])}
        if missing:
            filtering.notes.append(
                f"{len(missing):,} of the {len(rows):,} rows to balance have no `{self.by}`: they are of no domain and "
                "were left out."
            )
        chosen = balance(list(rows.values()), self.by, self.per_domain, seed=filtering.sampling.seed)
        if self.per_domain is None:
            share = "as many as the smallest"
        else:
            share = f"at most {self.per_domain}"
        reasons = {i: f"no {self.by}" if i in missing else f"{self.by} {row[self.by]}" for i, row in rows.items()}
        filtering.keep("balance", dict(zip(rows, chosen, strict=True)), f"{share} of every {self.by}", reasons)


@settings()
class HardestFilter:
    """``hardest``: keep the ``n`` rows with the lowest pass rates; among equal ones ``sampling.seed`` decides. Qwen3's
    reasoning RL is on 3,995 problems, learnable and as hard as possible (arXiv 2505.09388, section 4.2)."""

    n: Positive

    def apply(self, filtering: Filtering) -> None:
        rates = [row["pass_rate"] for row in filtering.selection.scored_rows()]
        measured = [i for i in filtering.left if rates[i] is not None]
        random.Random(filtering.sampling.seed).shuffle(measured)
        chosen = set(sorted(measured, key=rates.__getitem__)[: self.n])
        if len(chosen) < self.n:
            filtering.notes.append(
                f"Only {len(chosen):,} problems with a pass rate are left of the {self.n:,} asked for."
            )
        rule = f"the {self.n:,} of the lowest pass rate"
        reasons = {i: f"p = {rates[i]}" for i in filtering.left}
        filtering.keep("hardest", {i: i in chosen for i in filtering.left}, rule, reasons)


@settings()
class Filters:
    """The filters to apply, in this order; None leaves one out."""

    kind: KindFilter | None = None
    duplicates: DuplicateFilter | None = None
    contamination: ContaminationFilter | None = None
    band: BandFilter | None = None
    guessable: GuessFilter | None = None
    balance: BalanceFilter | None = None
    hardest: HardestFilter | None = None

    def asked(self, *names: str) -> list[tuple[str, Any]]:
        """Return (name, settings) of those of ``names`` that are set."""
        return [(name, rules) for name in names if (rules := getattr(self, name)) is not None]

    @field_validator("*", mode="before")
    @classmethod
    def _switched(cls, written: Any) -> Any:
        """Turn `true` into a filter's default settings, and `false` into None."""
        if isinstance(written, bool):
            return {True: {}, False: None}[written]
        return written


def leave_room(filtering: Filtering, model: str) -> None:
    """Load the model, and drop rows whose prompt leaves no room for a completion in its context."""
    generator = filtering.generator = ModelGenerator(model, filtering.sampling)
    tokens = {i: len(generator.rendered(filtering.rows[i]["prompt"])) for i in filtering.left}
    filtering.score("prompt_tokens", tokens)
    if generator.context is None:
        return
    room = generator.context - filtering.sampling.max_completion_length
    if any(count > room for count in tokens.values()):
        filtering.keep(
            "prompt too long",
            {i: count <= room for i, count in tokens.items()},
            f"prompt ≤ {room} tokens: context {generator.context} − max_completion_length",
            {i: f"{count} tokens" for i, count in tokens.items()},
        )


def measure_pass_rates(filtering: Filtering, filters: Filters) -> None:
    """Sample completions of every row that is left, add its pass rate and its completions' mean lengths as scores, and
    drop rows outside of ``filters.band``. Does nothing if no pass rate is needed (`to_be_measured`)."""
    if not to_be_measured(filtering.rows[0] if filtering.rows else (), filters):
        return
    generator = filtering.generator
    left = filtering.left
    problems = [filtering.rows[i] for i in left]
    said = {"reward": filtering.judge}
    measured = generator.judged(problems, filtering.reward, filtering.folder / PASS_RATES, filtering.stop, said)
    found = dict(zip(left, measured, strict=True))
    tokens = {i: [generator.tokens(completion) for completion in rate.completions] for i, rate in found.items()}
    right = {
        i: [n for n, score in zip(tokens[i], rate.scores, strict=True) if score is not None and score >= CORRECT_FROM]
        for i, rate in found.items()
    }
    filtering.score("pass_rate", {i: rate.rate for i, rate in found.items()})
    filtering.score("successes", {i: rate.successes for i, rate in found.items()})
    filtering.score("trials", {i: rate.trials for i, rate in found.items()})
    for name, lengths in (("mean_tokens", tokens), ("mean_tokens_right", right)):
        filtering.score(name, {i: fmean(counts) if counts else None for i, counts in lengths.items()})
    # all completions count, also those that an earlier session made
    total = sum(len(rate.scores) for rate in measured if rate.cut is not None)
    cut = sum(rate.cut or 0 for rate in measured)
    if total and cut / total > 0.05:
        filtering.notes.append(
            f"{cut / total:.0%} of the {total:,} completions were cut at max_completion_length="
            f"{filtering.sampling.max_completion_length} tokens: cut answers count as wrong, so pass rates are too low."
        )
    known = [rate.rate for rate in measured if rate.rate is not None]
    if known:
        filtering.notes.append(
            f"Mean pass rate of the {len(known):,} problems measured: {fmean(known):.1%} "
            f"({filtering.sampling.n_samples} samples at temperature {filtering.sampling.temperature:g}); never right: "
            f"{sum(p == 0 for p in known):,}, always right: {sum(p == 1 for p in known):,}."
        )
    if filters.band is not None:
        filters.band.apply(filtering, found)


def to_be_measured(columns: Collection[str], filters: Filters) -> bool:
    """Return whether pass rates must be measured. They always are, unless the rows have a ``completion`` to imitate and
    no filter reads a pass rate."""
    needed = filters.band or filters.hardest or (filters.balance and filters.balance.by in RATES)
    return bool(needed) or "completion" not in columns


def shown_column(rows: Any) -> str:
    """Return the name of a data set's column with the text to read: ``question`` if there is one, else ``prompt``."""
    if "question" in rows.column_names:
        return "question"
    return "prompt"


def text_of(prompt: Any) -> str:
    """Return a text as it is; of messages, the contents of all but the system's, one below the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content", "")) for message in prompt if message.get("role") != "system")
