"""The stages of a curation, filters one after the other over the same rows: those that read the text, then those that
ask the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from grpo_lab.curation import (
    PassRate,
    Selection,
    balance,
    deduplicate,
    find_contamination,
    guess_rates,
    keep_band,
    question_kind,
)
from grpo_lab.curation.selection import is_missing
from grpo_lab.pipelines.curation_recipe import CurationRecipe
from grpo_lab.pipelines.in_words import model_of, sampling_of, told
from grpo_lab.pipelines.sampler import ModelSampler
from grpo_lab.recipe.job import Questions, check_model, questions
from grpo_lab.recipe.rows import load_rows, rows_here
from grpo_lab.runs.stage import At, Stage, Words
from grpo_lab.runs.stop import StopRequests
from grpo_lab.stages.sample import judged_samples
from grpo_lab.verifiers.verdict import CORRECT_FROM

SCORES = (
    "kind",
    "prompt_tokens",
    "pass_rate",
    "successes",
    "trials",
    "mean_tokens",
    "mean_tokens_right",
    "guesses_right",
)
PASS_RATES, GUESSES = "pass_rates.jsonl", "guesses.jsonl"
NO_THINKING = {"enable_thinking": False}
CUT_WARNING = 0.05


@dataclass(frozen=True)
class Asked:
    """What a curation begins with. None in the place of rows: in a dry run, on the hub and not here."""

    questions: Questions
    against: list[Any]

    @classmethod
    def by(cls, recipe: CurationRecipe, here_only: bool = False) -> Asked:
        """ValueError for what cannot be loaded, judged, sampled or balanced."""
        found = questions(recipe.data, recipe.reward, here_only=here_only)
        if found.rows is not None:
            _check_balance_column(recipe, found.rows.column_names)
        load = rows_here if here_only else load_rows
        rules = recipe.filters.contamination
        sections = enumerate(rules.against if rules is not None else ())
        against = [load(one, f"filters.contamination.against.{place}") for place, one in sections]
        if recipe.model is not None:
            check_model(found, recipe.model, recipe.sampling, here_only=here_only)
        return cls(found, against)


class Curation:
    """The rows on their way through the filters. Each stage sees all rows, and the model is asked about those that are
    left."""

    def __init__(self, recipe: CurationRecipe, asked: Asked, stop: StopRequests, overwrite: bool = False) -> None:
        self.recipe, self.asked, self.stop, self.overwrite = recipe, asked, stop, overwrite
        self.reward, self.folder = asked.questions.reward, recipe.output_dir
        self.notes: list[str] = []
        self.sampler: ModelSampler | None = None

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        loaded = self.asked.questions.rows
        if earlier := [name for name in loaded.column_names if name in (*SCORES, "kept", "dropped_by")]:
            loaded = loaded.remove_columns(earlier)
            self.notes.append(f"Columns of an earlier curation were measured anew: {', '.join(earlier)}.")
        return [dict(row) for row in loaded]

    @cached_property
    def shown(self) -> str:
        return "question" if "question" in self.asked.questions.rows.column_names else "prompt"

    @cached_property
    def selection(self) -> Selection:
        return Selection(self.rows, shown=self.shown, title=self.recipe.name)

    def stages(self) -> list[Stage]:
        """None leaves a marker: what was sampled is kept in its file, and the filters may be others next time."""
        filters = self.recipe.filters
        reads_text = Stage(
            "text", self.by_text, self._plan("kind", "duplicates", "contamination"), (), False, whole=True
        )
        balances = Stage("balance", self.by_balance, self._plan("balance"), (), False, whole=True)
        if self.recipe.model is None:
            return [reads_text, balances]
        samples = [
            Stage("room", self.by_room, self._plan_of_samples, (), False, whole=True),
            Stage("pass rates", self.by_pass_rates, self._plan("band"), ("room",), False),
        ]
        if filters.guessable is not None:
            samples.append(Stage("guesses", self.by_guesses, self._plan("guessable"), ("room",), False))
        return [reads_text, *samples, balances]

    def _plan(self, *names: str) -> Callable[[], Words]:
        wanted = {name: getattr(self.recipe.filters, name) for name in names}
        return lambda: {f"filter: {name}": told(rules) for name, rules in wanted.items() if rules is not None}

    def _plan_of_samples(self) -> Words:
        assert self.recipe.model is not None
        file, rows = self.folder / PASS_RATES, self.asked.questions.rows
        return {
            "reward": told(self.recipe.reward),
            "model": model_of(str(self.recipe.model.path)),
            **sampling_of(self.recipe.sampling, rows, file, self.overwrite),
        }

    # -- filters that read the text ------------------------------------------------------------------------------------

    def by_text(self, at: At) -> None:
        filters, texts = self.recipe.filters, [text_of(row[self.shown]) for row in self.rows]
        if filters.kind is not None:
            kinds = [question_kind(text) for text in texts]
            keep = filters.kind.keep
            self.selection.score("kind", kinds)
            self.selection.keep(
                "kind", [kind in keep for kind in kinds], setting=f"keep {', '.join(keep)}", reasons=kinds
            )
        if filters.duplicates is not None:
            found = deduplicate(texts, similarity=filters.duplicates.similarity)
            of = {pair.row: f"row {pair.of}, similarity {pair.similarity:.2f}" for pair in found.pairs}
            rule = f"word similarity ≥ {filters.duplicates.similarity:g}"
            self.selection.keep("duplicates", found.keep, setting=rule, reasons=[of.get(i) for i in range(len(texts))])
        if filters.contamination is not None:
            rules = filters.contamination
            against = [text for rows in self.asked.against for text in _questions(rows)]
            hits = find_contamination(texts, against, ngram=rules.ngram, similarity=rules.similarity)
            self.selection.keep(
                "evaluation sets",
                [hit is None for hit in hits],
                setting=f"{len(against):,} items; {rules.ngram}-grams, similarity ≥ {rules.similarity:g}",
                reasons=[None if hit is None else f"item {hit.item}, {hit.reason}: {hit.evidence}" for hit in hits],
            )

    # -- filters that ask the model ------------------------------------------------------------------------------------

    def by_room(self, at: At) -> None:
        """Loads the model; prompts that leave no room for a completion in its context go."""
        assert self.recipe.model is not None
        sampler = self.sampler = ModelSampler(self.recipe.model.path or "", self.recipe.sampling)
        left, limit = self.selection.mask, sampler.context
        tokens = [sampler.prompt_tokens(row["prompt"]) if left[i] else None for i, row in enumerate(self.rows)]
        self.selection.score("prompt_tokens", tokens)
        if limit is None:
            return
        room = limit - self.recipe.sampling.max_completion_length
        if any(count is not None and count > room for count in tokens):
            self.selection.keep(
                "prompt too long",
                [count is None or count <= room for count in tokens],
                setting=f"prompt ≤ {room} tokens: context {limit} − max_completion_length",
                reasons=[f"{count} tokens" for count in tokens],
            )

    def by_pass_rates(self, at: At) -> None:
        sampler, settings, band = self.sampler, self.recipe.sampling, self.recipe.filters.band
        assert sampler is not None
        left = [i for i, kept in enumerate(self.selection.mask) if kept]
        problems, file = [self.rows[i] for i in left], at.folder / PASS_RATES
        measured = judged_samples(problems, sampler, self.reward, file, self.stop, {"reward": told(self.recipe.reward)})
        self._say_what_was_cut(measured)
        found = dict(zip(left, measured, strict=True))
        lengths = {i: self._lengths(sampler, rate) for i, rate in found.items()}
        self._score("pass_rate", {i: rate.rate for i, rate in found.items()})
        self._score("successes", {i: rate.successes for i, rate in found.items()})
        self._score("trials", {i: rate.trials for i, rate in found.items()})
        self._score("mean_tokens", {i: both[0] for i, both in lengths.items()})
        self._score("mean_tokens_right", {i: both[1] for i, both in lengths.items()})
        known = [rate.rate for rate in measured if rate.rate is not None]
        if known:
            self.notes.append(
                f"Mean pass rate of the {len(known):,} problems measured: {fmean(known):.1%} "
                f"({settings.n_samples} samples at temperature {settings.temperature:g}); never right: "
                f"{sum(p == 0 for p in known):,}, always right: {sum(p == 1 for p in known):,}."
            )
        if band is not None:
            inside = keep_band([rate.rate for rate in measured], band.low, band.high)
            self._keep(
                "pass rate",
                dict(zip(left, inside, strict=True)),
                f"{band.low:g} < p < {band.high:g}, {settings.n_samples} samples",
                {i: "unscorable" if rate.rate is None else f"p = {rate.rate:g}" for i, rate in found.items()},
            )

    def _say_what_was_cut(self, measured: Sequence[PassRate]) -> None:
        """A notice where many completions were cut: of all that the pass rates count, whichever session made them."""
        told_of = [rate for rate in measured if rate.cut is not None]
        total, cut = sum(len(rate.scores) for rate in told_of), sum(rate.cut or 0 for rate in told_of)
        if total and cut / total > CUT_WARNING:
            self.notes.append(
                f"{cut / total:.0%} of the {total:,} completions were cut at "
                f"max_completion_length={self.recipe.sampling.max_completion_length} tokens: cut answers count as "
                "wrong, so pass "
                "rates are too low."
            )

    def _lengths(self, sampler: ModelSampler, rate: PassRate) -> tuple[float | None, float | None]:
        """Mean tokens of all completions and of the right ones."""
        tokens = [sampler.tokens(completion) for completion in rate.completions or ()]
        right = [
            count
            for count, score in zip(tokens, rate.scores, strict=True)
            if score is not None and score >= CORRECT_FROM
        ]
        return (fmean(tokens) if tokens else None), (fmean(right) if right else None)

    def by_guesses(self, at: At) -> None:
        rules, sampler = self.recipe.filters.guessable, self.sampler
        assert rules is not None
        assert sampler is not None

        def briefly(prompts: Sequence[Any], n: int) -> list[list[Any]]:
            return sampler(prompts, n, max_new_tokens=rules.max_new_tokens, chat_template_kwargs=NO_THINKING)

        left = [i for i, kept in enumerate(self.selection.mask) if kept]
        rates = guess_rates(
            [self.rows[i] for i in left],
            self.stop.before_each(briefly),
            self.reward,
            rules.tries,
            path=at.folder / GUESSES,
            settings={**sampler.identity(), "max_new_tokens": rules.max_new_tokens, "reward": told(self.recipe.reward)},
            batch_size=self.recipe.sampling.problems_per_save,
            rendered=lambda prompt: sampler.rendered(prompt, NO_THINKING),
        )
        found = dict(zip(left, rates, strict=True))
        self._score("guesses_right", {i: rate.successes for i, rate in found.items()})
        self._keep(
            "guessable",
            {i: rate.successes == 0 for i, rate in found.items()},
            f"never right in {rules.tries} answers of ≤ {rules.max_new_tokens} tokens without reasoning",
            {i: f"right in {rate.successes} of {rules.tries}" for i, rate in found.items()},
        )

    def by_balance(self, at: At) -> None:
        rules = self.recipe.filters.balance
        if rules is None:
            return
        scored = self.selection.scored_rows()
        left = [i for i, kept in enumerate(self.selection.mask) if kept]
        if not left:
            return
        without = sum(is_missing(scored[i][rules.by]) for i in left)
        if without:
            self.notes.append(
                f"{without:,} of the {len(left):,} rows to balance have no `{rules.by}`: they are of no domain and "
                "were left out."
            )
        chosen = balance([scored[i] for i in left], rules.by, rules.per_domain, seed=self.recipe.sampling.seed)
        share = "as many as the smallest" if rules.per_domain is None else f"at most {rules.per_domain}"
        self._keep(
            "balance",
            dict(zip(left, chosen, strict=True)),
            f"{share} of every {rules.by}",
            {
                i: f"no {rules.by}" if is_missing(scored[i][rules.by]) else f"{rules.by} {scored[i][rules.by]}"
                for i in left
            },
        )

    def _score(self, name: str, values: dict[int, Any]) -> None:
        """A score of the rows that are left; the others have None."""
        self.selection.score(name, [values.get(i) for i in range(len(self.rows))])

    def _keep(self, name: str, keep: dict[int, bool], rule: str, reasons: dict[int, str]) -> None:
        """A filter that looked only at the rows that were left."""
        mask = [keep.get(i, True) for i in range(len(self.rows))]
        self.selection.keep(name, mask, setting=rule, reasons=[reasons.get(i) for i in range(len(self.rows))])


def _questions(rows: Any) -> list[str]:
    return [text_of(row) for row in rows["question" if "question" in rows.column_names else "prompt"]]


def _check_balance_column(recipe: CurationRecipe, columns: Sequence[str]) -> None:
    """ValueError where `filters.balance.by` is neither a column of the rows nor a score."""
    by = None if recipe.filters.balance is None else recipe.filters.balance.by
    if by is not None and by not in (*columns, *SCORES):
        raise ValueError(f"`filters.balance.by` is {by!r}; the columns are {list(columns)} and {SCORES}")


def text_of(prompt: Any) -> str:
    """The text of a question: a string as it is, of messages the user's."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content", "")) for message in prompt if message.get("role") != "system")
