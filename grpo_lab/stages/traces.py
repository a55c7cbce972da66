"""Traces: a model's judged samples become rows to learn from. Filters, each counted, take what is wrong, mixes
languages, cannot be read, is too long or repeats itself; what is left is refined into one form.

Source: DeepSeek-R1 (arXiv 2501.12948). Section 2.3.1, cold start: R1-Zero's outputs in a readable form, "a readable
pattern that includes a summary at the end of each response", refined by human annotators; what is not reader-friendly
is left out. Section 2.3.3, rejection sampling: right answers only, without "mixed languages, long paragraphs, and code
blocks". The paper gives no thresholds: those here are ours. Our refinement is a rule (`Refine`) in place of people.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from grpo_lab.curation.duplicates import words_of
from grpo_lab.curation.rejection import in_form_of, text_of
from grpo_lab.io import write_json_lines
from grpo_lab.recipe.parts import build_reward
from grpo_lab.recipe.sections import STRICT_ACCURACY, RewardSection
from grpo_lab.rewards import LanguageConsistencyReward, ThinkFormatReward
from grpo_lab.rewards.completion import END_OF_THINK, THINK, fenced_blocks, reasoning_of
from grpo_lab.rewards.math.extraction import extract_answer
from grpo_lab.runs.console import told
from grpo_lab.runs.stage import At, Facts
from grpo_lab.settings import Number, Positive, Switch, settings
from grpo_lab.stages.sample import read_lines
from grpo_lab.stages.select import ROWS
from grpo_lab.verifiers.verdict import CORRECT_FROM

Trace = Mapping[str, Any]
"""``prompt``, ``text``, ``score``, ``length`` in tokens, and the ``row`` and ``problem`` that it is of."""


@settings(bare="target")
class OneLanguage:
    """At least ``share`` of the reasoning's words are in ``target`` (`LanguageConsistencyReward`; or ``prompt``)."""

    target: str = "en"
    share: Number = 0.95

    def keeps(self, trace: Trace) -> bool:
        found = LanguageConsistencyReward(self.target)(prompts=[trace["prompt"]], completions=[trace["text"]])[0]
        return found is not None and found >= self.share


@settings()
class Readable:
    """What a reader can follow.

    Args:
        layout: the tags that a trace must have (`ThinkFormatReward`); None asks for none.
        longest_paragraph: most characters between two empty lines.
        code: whether fenced blocks may stand in it.
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
    """At most ``share`` of its n-grams of ``ngram`` words were there before (TRL's repetition penalty)."""

    ngram: Positive = 20
    share: Number = 0.1

    def keeps(self, trace: Trace) -> bool:
        from grpo_lab.trainer.trl_bridge.rewards import shaping

        penalty = shaping("repetition")(ngram_size=self.ngram, max_penalty=-1.0)
        return bool(-penalty(completion_ids=[words_of(trace["text"])])[0] <= self.share)


@settings()
class Refine:
    """Every trace in one form, and judged again: one that is not right any more goes.

    Args:
        form: its ``{reasoning}`` is the inside of the think tags, or all before the answer, without empty lines at its
            ends, runs of them and lines that are said twice in a row; its ``{answer}`` is the trace's own, alone.
    """

    form: str = "<think>\n{reasoning}\n</think>\nThe answer is {answer}."

    def __post_init__(self) -> None:
        if "{reasoning}" not in self.form or "{answer}" not in self.form:
            raise ValueError(f"`refine.form` is {self.form!r}; both {{reasoning}} and {{answer}} must stand in it")

    def refined(self, text: str) -> str | None:
        """The trace in its form; None where there is no answer to sum up, or no reasoning."""
        answer = extract_answer(text)
        if answer is None:
            return None
        tagged = THINK in text or END_OF_THINK in text
        lines = [line.rstrip() for line in (reasoning_of(text) if tagged else text[: answer.start]).split("\n")]
        kept = "\n".join(line for place, line in enumerate(lines) if place == 0 or line != lines[place - 1]).strip()
        return self.form.replace("{reasoning}", kept).replace("{answer}", answer.text) if kept else None


@settings()
class FilterTraces:
    """``filter``: rows out of samples, by the filters that are set, in this order; a trace is counted where it falls.

    Args:
        samples: what a stage ``sample`` leaves.
        right: only right answers; what could not be scored falls, too.
        not_too_long: most tokens.
        per_problem: most rows of one problem, the first ones.
        reward: judges the refined traces.
    """

    leaves: ClassVar[Mapping[str, str]] = {"rows": ROWS}
    samples: str
    right: Switch = True
    one_language: OneLanguage | None = None
    readable: Readable | None = None
    not_too_long: Positive | None = None
    not_repeating: NotRepeating | None = None
    refine: Refine | None = None
    per_problem: Positive | None = None
    reward: RewardSection = STRICT_ACCURACY

    def plan(self) -> str:
        return told(self)

    def run(self, at: At) -> Facts:
        traces = list(traces_in(Path(self.samples)))
        rows, dropped = self.rows(traces)
        if not rows:
            raise ValueError(f"none of {len(traces):,} traces is left to learn from; what fell where: {dropped}")
        write_json_lines(at.folder / ROWS, rows)
        solved = len({row["row"] for row in rows})
        return {"traces": len(traces), "solved": solved, "kept": len(rows), "rows": len(rows), "dropped": dropped}

    def rows(self, traces: Sequence[Trace]) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Rows ``prompt, completion, row, problem``, and how many traces each filter has dropped."""
        dropped, left = {}, list(traces)
        for name, keeps in self._filters().items():
            before, left = left, [trace for trace in left if keeps(trace)]
            dropped[name] = len(before) - len(left)
        if self.refine is not None:
            before, left = left, self._refined(left, self.refine)
            dropped["refine"] = len(before) - len(left)
        if self.per_problem is not None:
            before, left, seen = left, [], Counter[Any]()
            for trace in before:
                seen[trace["row"]] += 1
                left += [trace] if seen[trace["row"]] <= self.per_problem else []
            dropped["per_problem"] = len(before) - len(left)
        form: Callable[[Trace], Any] = lambda trace: in_form_of(trace["prompt"], trace["text"])  # noqa: E731
        kept = ("prompt", "row", "problem")
        return [{**{name: trace[name] for name in kept}, "completion": form(trace)} for trace in left], dropped

    def _filters(self) -> dict[str, Callable[[Trace], bool]]:
        limit, found = self.not_too_long, dict[str, Callable[[Trace], bool]]()
        if self.right:
            found["right"] = lambda trace: trace["score"] is not None and trace["score"] >= CORRECT_FROM
        for name in ("one_language", "readable"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name).keeps
        if limit is not None:
            found["not_too_long"] = lambda trace: trace["length"] <= limit
        if self.not_repeating is not None:
            found["not_repeating"] = self.not_repeating.keeps
        return found

    def _refined(self, traces: Sequence[Trace], refine: Refine) -> list[Trace]:
        texts = [refine.refined(trace["text"]) for trace in traces]
        done = [{**trace, "text": text} for trace, text in zip(traces, texts, strict=True) if text is not None]
        if not done:
            return []
        names = dict.fromkeys(name for trace in done for name in trace["problem"] if name != "prompt")
        columns = {name: [trace["problem"].get(name) for trace in done] for name in names}
        asked: dict[str, Any] = {name: [trace[key] for trace in done] for name, key in _JUDGED.items()}
        scores = build_reward(self.reward, "reward")(**asked, **columns)
        return [one for one, score in zip(done, scores, strict=True) if score is not None and score >= CORRECT_FROM]


_JUDGED = {"prompts": "prompt", "completions": "text"}


def traces_in(file: Path) -> list[Trace]:
    """The completions that a stage ``sample`` wrote, one by one, in its order."""
    return [
        {"prompt": line["problem"]["prompt"], "text": text_of(completion), "score": score, "length": length}
        | {"row": line["row"], "problem": line["problem"]}
        for line in read_lines(file)
        for completion, score, length in zip(line["completions"], line["scores"], line["lengths"], strict=True)
    ]
