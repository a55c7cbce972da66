"""Turn a model's judged samples (traces) into rows to learn from: filter them, count each filter, and rewrite them.

Source: DeepSeek-R1 (arXiv 2501.12948). Section 2.3.1, cold start: R1-Zero's outputs in "a readable pattern that
includes a summary at the end of each response", refined by people, without what is not reader-friendly. Section 2.3.3,
rejection sampling: right answers only, without "mixed languages, long paragraphs, and code blocks". The paper gives no
thresholds: those here are ours. Our refinement is a rule (`Refine`) in place of people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

from grpo_lab.curation.duplicates import words_of
from grpo_lab.curation.pass_rate import scores_of
from grpo_lab.curation.rejection import in_form_of, text_of
from grpo_lab.io import write_json_lines
from grpo_lab.recipe.build import build_reward
from grpo_lab.recipe.sections import STRICT_ACCURACY, RewardSection
from grpo_lab.rewards import LanguageConsistencyReward, ThinkFormatReward
from grpo_lab.rewards.completion import END_OF_THINK, THINK, fenced_blocks, reasoning_of
from grpo_lab.rewards.math.extraction import extract_answer
from grpo_lab.runs.console import describe
from grpo_lab.runs.stage import Facts, Workspace
from grpo_lab.settings import Number, Positive, Switch, settings
from grpo_lab.stages.sample import OF_A_LINE, check_lines, read_lines
from grpo_lab.stages.select import ROWS
from grpo_lab.verifiers.verdict import CORRECT_FROM

Trace = dict[str, Any]
"""A judged sample: ``text``, ``score``, ``length`` in tokens, and its ``row`` and ``problem``."""


@settings(bare="target")
class OneLanguage:
    """Keeps traces in which at least ``share`` of the reasoning's words are in the language ``target``; for ``prompt``
    that is the prompt's language (`LanguageConsistencyReward`)."""

    target: str = "en"
    share: Number = 0.95

    def __post_init__(self) -> None:
        try:
            LanguageConsistencyReward(self.target)
        except ValueError as error:
            raise ValueError(f"`one_language`: {error}") from error

    def keeps(self, trace: Trace) -> bool:
        judge = LanguageConsistencyReward(self.target)
        found = judge(prompts=[trace["problem"]["prompt"]], completions=[trace["text"]])[0]
        return found is not None and found >= self.share


@settings()
class Readable:
    """Keeps traces that a reader can follow.

    Args:
        layout: the tags that a trace must have (`ThinkFormatReward`); None requires none.
        longest_paragraph: most characters between two empty lines.
        code: whether fenced code blocks are allowed.
    """

    layout: Literal["think", "think_answer"] | None = None
    longest_paragraph: Positive = 1500
    code: Switch = False

    def keeps(self, trace: Trace) -> bool:
        text = trace["text"]
        in_tags = self.layout is None or ThinkFormatReward(self.layout).score(text) == 1.0
        short = max(map(len, re.split(r"\n[ \t]*\n", text))) <= self.longest_paragraph
        return in_tags and short and (self.code or not fenced_blocks(text))


@settings()
class NotRepeating:
    """Keeps traces in which at most ``share`` of the n-grams of ``ngram`` words repeat (TRL's repetition penalty)."""

    ngram: Positive = 20
    share: Number = 0.1

    def keeps(self, trace: Trace) -> bool:
        from grpo_lab.trainer.trl_bridge.rewards import shaping

        penalty = shaping("repetition")(ngram_size=self.ngram, max_penalty=-1.0)
        return bool(-penalty(completion_ids=[words_of(trace["text"])])[0] <= self.share)


@settings()
class Refine:
    """Rewrites every trace into one form. The traces are judged again, and those that are no longer right are dropped.

    Args:
        form: the new text. ``{reasoning}`` stands for the inside of the think tags (without tags: for all text before
            the answer), without empty lines at its ends and lines that repeat the one before. ``{answer}`` stands for
            the trace's final answer alone.
    """

    form: str = "<think>\n{reasoning}\n</think>\nThe answer is {answer}."

    def __post_init__(self) -> None:
        if "{reasoning}" not in self.form or "{answer}" not in self.form:
            raise ValueError(f"`refine.form` is {self.form!r}; both {{reasoning}} and {{answer}} must stand in it")

    def refined(self, trace: Trace) -> list[Trace]:
        """Return a list with the trace in its form; empty if the trace has no answer or no reasoning."""
        text = trace["text"]
        answer = extract_answer(text)
        if answer is None:
            return []
        if THINK in text or END_OF_THINK in text:
            reasoning = reasoning_of(text)
        else:
            reasoning = text[: answer.start]
        lines = map(str.rstrip, reasoning.split("\n"))
        reasoning = "\n".join(line for line, _ in groupby(lines)).strip()  # without repeated lines
        if not reasoning:
            return []
        refined = self.form.replace("{reasoning}", reasoning).replace("{answer}", answer.text)
        return [{**trace, "text": refined}]


@settings()
class FilterTraces:
    """``filter``: turn samples into rows by the filters that are set, in the order ``right``, ``not_too_long``,
    ``one_language``, ``readable``, ``not_repeating``, ``refine``, ``per_problem``. A dropped trace is counted at the
    filter that drops it.

    Args:
        samples: file of a stage ``sample``.
        right: keep only right answers; answers that could not be scored are dropped, too.
        not_too_long: most tokens of a trace.
        reward: judges the refined traces.
        per_problem: most rows of one problem; the first ones are kept.
    """

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    samples: str
    right: Switch = True
    not_too_long: Positive | None = None
    one_language: OneLanguage | None = None
    readable: Readable | None = None
    not_repeating: NotRepeating | None = None
    refine: Refine | None = None
    reward: RewardSection = STRICT_ACCURACY
    per_problem: Positive | None = None

    def __post_init__(self) -> None:
        if self.refine is None and self.reward != STRICT_ACCURACY:
            raise ValueError("`reward` has an effect only with `refine`, whose traces it judges again; leave it out")

    def plan(self) -> str:
        check_lines(self.samples, "samples", OF_A_LINE)
        if self.refine is not None:
            build_reward(self.reward, "reward")
        return describe(self)

    def run(self, workspace: Workspace) -> Facts:
        traces: list[Trace] = []
        for line in read_lines(Path(self.samples), OF_A_LINE):
            of_problem = {"row": line["row"], "problem": line["problem"]}
            for completion, score, length in zip(line["completions"], line["scores"], line["lengths"], strict=True):
                traces.append({"text": text_of(completion), "score": score, "length": length, **of_problem})
        left = traces
        dropped = dict[str, int]()
        for name, kept in self._filtered(traces):
            dropped[name] = len(left) - len(kept)
            left = kept
        if not left:
            raise ValueError(f"none of {len(traces):,} traces is left to learn from; what fell where: {dropped}")
        rows = []
        for trace in left:
            problem = trace["problem"]
            completion = in_form_of(problem["prompt"], trace["text"])
            rows.append({
                "prompt": problem["prompt"], "row": trace["row"], "problem": problem, "completion": completion,
            })  # fmt: skip
        write_json_lines(workspace.folder / ROWS, rows)
        solved = len({trace["row"] for trace in left})
        counts = {"traces": len(traces), "solved": solved, "kept": len(left), "rows": len(left), "out_of": len(traces)}
        return {**counts, "dropped": dropped}

    def _filtered(self, left: list[Trace]) -> Iterator[tuple[str, list[Trace]]]:
        """Yield the name of each filter that is set, and the traces left after it."""
        if self.right:
            left = [trace for trace in left if (trace["score"] or 0) >= CORRECT_FROM]
            yield "right", left
        if self.not_too_long is not None:
            left = [trace for trace in left if trace["length"] <= self.not_too_long]
            yield "not_too_long", left
        for name in ("one_language", "readable", "not_repeating"):
            rule = getattr(self, name)
            if rule is not None:
                left = [trace for trace in left if rule.keeps(trace)]
                yield name, left
        if self.refine is not None:
            left = self._right_again([one for trace in left for one in self.refine.refined(trace)])
            yield "refine", left
        if self.per_problem is not None:
            groups = groupby(left, key=itemgetter("row"))
            yield "per_problem", [trace for _, group in groups for trace in islice(group, self.per_problem)]

    def _right_again(self, refined: list[Trace]) -> list[Trace]:
        """Return the refined traces that the reward judges right."""
        if not refined:
            return []
        answers = [(one["problem"], one["text"]) for one in refined]
        scores = scores_of(answers, build_reward(self.reward, "reward"))
        return [one for one, score in zip(refined, scores, strict=True) if (score or 0) >= CORRECT_FROM]
