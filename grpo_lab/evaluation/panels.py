"""The plots of a report, each described by one `Panel`. A new plot needs one more.

`panels_of` chooses the panels of some runs. `panel_figures` draws them for a report of one run, `comparison_figures`
for several runs side by side. Plots that need more than a logged metric have functions of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grpo_lab.evaluation.charts import Figure, Line, figure
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import EVALUATION, PIPELINE, RunRecord

SHARE = {"share": True}
FROM_ZERO = {"from_zero": True}


class Panel(NamedTuple):
    """Description of a plot of logged metrics.

    Attributes:
        title: its heading.
        meaning: what to look for in it.
        unit: unit of the y axis.
        lines: label → metrics, of which the first that was recorded is drawn.
        optional: if the run has none of its metrics, the plot is left out and not named as missing.
        shape: arguments of `draw`.
    """

    title: str
    meaning: str
    unit: str
    lines: Mapping[str, Sequence[str]]
    optional: bool = False
    shape: Mapping[str, Any] = {}

    @property
    def metrics(self) -> list[str]:
        """Return the metrics of all lines."""
        return [name for names in self.lines.values() for name in names]


EVALUATIONS = "Held-out accuracy (evaluation/before, evaluation/after, evaluation/step_<n>)"
DEAD_GROUPS = "Dead groups"
CURVES = (
    "Faint: as logged. Bold: centred moving average; its window, in logged steps, stands under each plot. The numbers "
    "in a legend are its first and last value."
)
PANELS = [
    Panel(
        "Lengths of correct and incorrect answers",
        "Wrong answers growing while correct ones do not may be the length bias that Dr.GRPO removes.",
        "tokens per completion",
        {
            "correct": ("completions/mean_length_correct",),
            "incorrect": ("completions/mean_length_incorrect",),
            "all": ("completions/mean_length",),
        },
    ),
    Panel(
        DEAD_GROUPS,
        "All completions of the group have the same reward, so the group teaches nothing.",
        "share of groups",
        {"dead": ("groups/dead_share", "frac_reward_zero_std")},
        shape=SHARE,
    ),
    Panel(
        "KL to the reference",
        "How far the policy has moved. Only recorded when the reference is loaded (beta above 0).",
        "nats per token",
        {"KL": ("kl",)},
    ),
    Panel(
        "KL penalty in the reward",
        "Before its coefficient; summed over each completion.",
        "nats per completion",
        {"penalty": ("kl/reward_penalty",)},
        optional=True,
    ),
    Panel(
        "Rewards of PPO",
        "A healthy run: the shaped and the task reward rise together, and −β·KL falls slowly. A task reward that rises "
        "on a KL that runs away is bought.",
        "reward per completion",
        {"shaped": ("ppo/shaped_reward",), "task": ("ppo/task_reward",), "−β·KL": ("ppo/kl_reward",)},
        optional=True,
    ),
    Panel(
        "What the critic explains",
        "1 − Var(R − V)/Var(R): 0 for a critic that knows no more than the mean, 1 for one that knows all; below 0 it "
        "does harm.",
        "share of the returns' variance",
        {"explained": ("value/explained_variance",)},
        optional=True,
        shape={"rule": (0.0, "the mean")},
    ),
    Panel(
        "Entropy",
        "Falls as the policy commits itself; near zero it no longer explores.",
        "nats per token",
        {"entropy": ("entropy",)},
        shape=FROM_ZERO,
    ),
    Panel(
        "Clip fraction",
        "Share of tokens whose probability ratio left the trust region; 0 in the first update after each rollout.",
        "share of tokens",
        {
            "clipped": ("clip_ratio/region_mean", "cispo_clip_ratio"),
            "below": ("clip_ratio/low_mean",),
            "above": ("clip_ratio/high_mean",),
            "above δ": ("clip_ratio/delta_mean",),
        },
        shape=SHARE,
    ),
    Panel(
        "Truncated completions",
        "Cut off by the token budget before they ended. Above 20% the budget decides the reward.",
        "share of completions",
        {"truncated": ("completions/clipped_ratio", "completions/truncated_share")},
        shape={"share": True, "rule": (0.2, "20%")},
    ),
    Panel(
        "Tokens of the update",
        "Tokens that went through forward and backward, and those that stock TRL would have computed, padding "
        "included.",
        "tokens per step",
        {
            "computed": ("update/tokens_computed",),
            "stock TRL": ("update/tokens_stock",),
            "saved": ("update/tokens_saved",),
        },
        optional=True,
        shape=FROM_ZERO,
    ),
    Panel(
        "What the update had to compute",
        "Live: completions whose gradient is not exactly zero. Computed: tokens, against stock TRL. Padding: of the "
        "computed.",
        "share",
        {
            "live completions": ("update/live_share",),
            "computed tokens": ("update/computed_share",),
            "padding": ("update/padding_share",),
        },
        optional=True,
        shape=SHARE,
    ),
    Panel(
        "Turns per trajectory",
        "Turns that the policy wrote and tools that it called, until it answered or reached a limit.",
        "per trajectory",
        {"turns": ("turns/per_trajectory",), "calls": ("turns/calls",)},
        optional=True,
        shape=FROM_ZERO,
    ),
    Panel(
        "Tool calls that went wrong",
        "Failed: no proper answer, for whatever reason. Timed out is one of them; a cut answer is none.",
        "share of calls",
        {
            "failed": ("turns/failed_share",),
            "timed out": ("turns/timed_out_share",),
            "answer cut": ("turns/cut_share",),
        },
        optional=True,
        shape=SHARE,
    ),
    Panel(
        "Seconds of a tool call",
        "All tries together, of calls that were made.",
        "seconds",
        {"a call": ("turns/tool_seconds",)},
        optional=True,
        shape=FROM_ZERO,
    ),
    Panel(
        "Loss",
        "Near zero by construction in policy gradients; not a measure of progress.",
        "loss",
        {"loss": ("loss",)},
        optional=True,
    ),
    Panel(
        "Gradient norm",
        "Before clipping. A jump that stays is a warning.",
        "norm",
        {"gradient norm": ("grad_norm",)},
        optional=True,
        shape=FROM_ZERO,
    ),
]
#: Panels with a line for each task, or for each turn of a trajectory.
_BY_NAME = [
    Panel(
        "Reward by task",
        "Mean over a task's completions of a step. Tasks have rewards of their own, so compare a line with itself.",
        "reward per completion",
        {"": ("tasks/<task>/reward",)},
        shape=FROM_ZERO,
    ),
    Panel(
        "Live completions by task",
        "Share of a task's completions whose gradient is not zero. A line falls where a task is solved, or given up.",
        "share of completions",
        {"": ("tasks/<task>/live_share",)},
        shape=SHARE,
    ),
    Panel(
        "Reward by turn",
        "Mean of what step rewards gave the first, second, … turn of a trajectory that has it.",
        "reward per turn",
        {"": ("turns/<k>/reward",)},
        shape=FROM_ZERO,
    ),
    Panel(
        "Tokens by turn",
        "The policy's own, in the first, second, … turn of a trajectory that has it.",
        "tokens per turn",
        {"": ("turns/<k>/tokens",)},
        shape=FROM_ZERO,
    ),
]
_EACH_REWARD = re.compile(r"rewards/.+/mean", re.DOTALL)
_UNITS = [("share|ratio|frac_", "share"), ("length|tokens", "tokens"), ("^(eval_)?reward", "reward"), ("_time$", "s")]


def panels_of(*records: RunRecord) -> list[Panel]:
    """Return the panels for these runs: the reward, with a line for each of several rewards; those with a line for each
    task or turn; then `PANELS`.

    A run with a critic has no groups, so the panel of dead groups is then left out.
    """
    names = sorted({name for record in records for name in record.metrics if _EACH_REWARD.fullmatch(name)})
    single = {}
    if len(names) > 1:
        single = {name.removeprefix("rewards/").removesuffix("/mean"): (name,) for name in names}
    meaning = "Mean over the completions of a step: training problems, sampled. Components before weighting."
    reward = Panel("Reward", meaning, "reward per completion", {"total": ("reward",), **single}, shape=FROM_ZERO)
    critic = any(record.first_of("ppo/task_reward") for record in records)
    by_name = [panel for panel in map(functools.partial(_by_name, records), _BY_NAME) if panel.lines]
    return [reward, *by_name, *(panel for panel in PANELS if not (critic and panel.title == DEAD_GROUPS))]


def _by_name(records: Sequence[RunRecord], panel: Panel) -> Panel:
    """Return the panel with a line for each name that stands at ``<…>`` in a recorded metric; it has no lines if there
    is none."""
    (metric,) = panel.metrics
    begins, ends = re.split("<.+>", metric)
    named = re.compile(f"{re.escape(begins)}(.+){re.escape(ends)}", re.DOTALL)
    found = {match[1]: match[0] for one in records for match in map(named.fullmatch, one.metrics) if match}
    return panel._replace(lines={name: (found[name],) for name in sorted(found)})


def panel_figures(record: RunRecord) -> tuple[list[Figure], list[str]]:
    """Draw the plots of a run. Return them, and the names of those that could not be drawn as their metrics were not
    recorded; optional plots are not named."""
    found = [("", _working(record)), (EVALUATIONS, _accuracy(record))]
    for panel in panels_of(record):
        lines = [Line(label, record.first_of(*names)) for label, names in panel.lines.items()]
        drawn = figure(panel.title, panel.meaning, lines, panel.unit, **panel.shape)
        found.append(("" if panel.optional else f"{panel.title} ({', '.join(panel.metrics)})", drawn))
    return [one for _, one in found if one], [name for name, one in found if name and not one]


def unit_of(metric: str) -> str:
    """Return the unit of a metric, from a panel that draws it or else from its name; empty if neither says it."""
    drawn = {name: panel.unit for panel in PANELS for name in panel.metrics}
    return drawn.get(metric) or next((unit for named, unit in _UNITS if re.search(named, metric)), "")


def _working(record: RunRecord) -> Figure | None:
    """Draw the shares of right and of worked-out answers and their length in one figure, as R1-Zero's report does; None
    if `worked_out` was not recorded."""
    worked_out = Line("worked out", record.first_of("rewards/worked_out/mean"))
    if not worked_out.points:
        return None
    right = next((name for name in record.metrics if re.fullmatch(r"rewards/\w*accuracy\w*/mean", name)), "")
    shares = [Line("right answers", record.first_of(right)), worked_out]
    tokens = [Line("tokens (right axis)", record.first_of("completions/mean_length"))]
    meaning = (
        "Training problems, sampled: answers that are right, answers that write a calculation down, and their length."
    )
    second: Any = {"right": tokens, "right_unit": "tokens per completion"}
    return figure("Accuracy, working out and length", meaning, shares, "share of completions", share=True, **second)


def accuracy_line(record: RunRecord, label: str) -> Line:
    """Make a line of held-out accuracy with its intervals: before training (step 0), during it, and after it (last
    step)."""
    evaluated = [(0, record.before), *record.during, (record.last_step or 1, record.after)]
    found = {step: e.accuracy for step, e in evaluated if isinstance(e, EvaluationResult) and e.accuracy is not None}
    points = [(float(step), interval.value) for step, interval in sorted(found.items())]
    return Line(label, points, [(interval.low, interval.high) for _, interval in sorted(found.items())], markers=True)


def _accuracy(record: RunRecord) -> Figure | None:
    """Draw held-out accuracy: of whole evaluations, with intervals, and as logged during training."""
    rewards = [n for n in record.metrics if re.fullmatch(r"eval_rewards/\w*accuracy\w*/mean", n, re.IGNORECASE)]
    during = Line("during training", record.first_of("evaluation/accuracy", "eval_accuracy", *rewards))
    meaning = "Held-out problems. Bars: 95% Wilson interval over problems."
    lines = [accuracy_line(record, "greedy"), during]
    return figure("Held-out accuracy", meaning, lines, "share of problems correct", share=True)


WEIGHTS = (
    "−∂loss/∂log π of each token, in units of the run's mean (docs/labs/token_weights.md). Lines: what the same "
    "answers would have under 1/|o| (GRPO) and under a constant (Dr.GRPO, DAPO), on-policy."
)
_BY_LENGTH = {
    "Weight of a token by the length of its answer": (
        "token",
        "Falling: a token of a long answer counts less, of a long wrong one, too.",
    ),
    "Weight of an answer by its length": (
        "answer",
        "Level: every answer has the same say. Rising: a long one has as much more as it is longer.",
    ),
}
_BY_PASS_RATE = "Dividing by σ, the root, lifts questions that are almost always or almost never solved."


def weight_figures(record: RunRecord) -> list[Figure]:
    """Draw what answers weighed in the gradient, by length and by their group's pass rate, beside what the formulas
    give. Nothing if no weights were recorded."""
    if not record.token_weights:
        return []
    from grpo_lab.diagnostics.token_weights import WeightFamily, over_steps  # loads torch

    how: Any = {"unit": "mean |w|, relative", "from_zero": True}
    quarters = over_steps(record.token_weights, "by_length")
    steps = f"A point is a quarter of the lengths; {len(record.token_weights)} optimizer steps."
    found = []
    for title, (what, meaning) in _BY_LENGTH.items():
        names = {"measured": what, "∝ 1/|o|": f"{what}_at_0", "constant": f"{what}_at_1"}
        lines = [Line(label, [(one.at, getattr(one, name)) for one in quarters]) for label, name in names.items()]
        found.append(figure(title, f"{meaning} {steps}", lines, x_unit="tokens of an answer", **how))
    buckets = over_steps(record.token_weights, "by_pass_rate")
    lines = [Line("measured", [(one.at, one.answer) for one in buckets], markers=True)]
    for label, scaled in (("∝ √(p(1−p))", True), ("∝ p(1−p)", False)):
        weight_at = WeightFamily(1, scaled).of_pass_rate
        total = sum(weight_at(one.at) for one in buckets)
        height = 0.0
        if total:  # the formula says only how weights compare, so it is drawn as high as what was measured
            height = sum(one.answer for one in buckets) / total
        points = [(tenth / 10, height * weight_at(tenth / 10)) for tenth in range(11)]
        lines.append(Line(label, points if height else []))
    title = "Weight of an answer by its group's pass rate"
    found.append(figure(title, f"{_BY_PASS_RATE} For rewards of 0 and 1.", lines, x_unit="pass rate", **how))
    return [one for one in found if one]


def comparison_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """Draw each quantity with a line for each run. A quantity that no run recorded is left out."""
    trained = [run for run in runs if run.kind not in (EVALUATION, PIPELINE)]  # others have no steps
    accuracy = [accuracy_line(run, run.name) for run in trained]
    bars = "Bars: 95% Wilson interval over problems."
    found = [figure("Held-out accuracy", bars, accuracy, "share of problems correct", share=True)]
    for panel in panels_of(*runs):
        for label, metrics in panel.lines.items():
            if len(panel.lines) == 1:
                title = panel.title
            else:
                title = f"{panel.title}: {label}"
            lines = [Line(run.name, run.first_of(*metrics)) for run in runs]
            missing = [line.label for line in lines if not line.points]
            if missing:
                meaning = f"{panel.meaning} Not recorded: {', '.join(missing)}."
            else:
                meaning = panel.meaning
            found.append(figure(title, meaning, lines, panel.unit, **panel.shape))
    return [one for one in found if one]
