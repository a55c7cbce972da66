"""The plots of a report, one row each. A new plot costs one `Panel`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_lab.evaluation.charts import Chart, Line, draw
from grpo_lab.evaluation.result import EvaluationResult
from grpo_lab.evaluation.run_record import RunRecord


@dataclass(frozen=True)
class Panel:
    """title; what to look for; unit of the y axis; (label, metric names of which the first recorded one is drawn) …

    optional: left out, instead of "not recorded", when the run has none of its metrics.
    """

    title: str
    meaning: str
    unit: str
    lines: tuple[tuple[str, tuple[str, ...]], ...]
    share: bool = False
    from_zero: bool = False
    rule: tuple[float, str] | None = None
    optional: bool = False

    @property
    def metrics(self) -> list[str]:
        return [name for _, names in self.lines for name in names]


DEAD_GROUPS = "Dead groups"
PANELS = [
    Panel(
        "Lengths of correct and incorrect answers",
        "Wrong answers growing while correct ones do not may be the length bias that Dr.GRPO removes.",
        "tokens per completion",
        (
            ("correct", ("completions/mean_length_correct",)),
            ("incorrect", ("completions/mean_length_incorrect",)),
            ("all", ("completions/mean_length",)),
        ),
    ),
    Panel(
        DEAD_GROUPS,
        "All completions of the group have the same reward, so the group teaches nothing.",
        "share of groups",
        (("dead", ("groups/dead_share", "frac_reward_zero_std")),),
        share=True,
    ),
    Panel(
        "KL to the reference",
        "How far the policy has moved. Only recorded when the reference is loaded (beta above 0).",
        "nats per token",
        (("KL", ("kl",)),),
    ),
    Panel(
        "KL penalty in the reward",
        "Before its coefficient; summed over each completion.",
        "nats per completion",
        (("penalty", ("kl/reward_penalty",)),),
        optional=True,
    ),
    Panel(
        "Rewards of PPO",
        "A healthy run: the shaped and the task reward rise together, and −β·KL falls slowly. A task reward that rises on a KL that runs away is bought.",
        "reward per completion",
        (
            ("shaped", ("ppo/shaped_reward",)),
            ("task", ("ppo/task_reward",)),
            ("−β·KL", ("ppo/kl_reward",)),
        ),
        optional=True,
    ),
    Panel(
        "What the critic explains",
        "1 − Var(R − V)/Var(R): 0 for a critic that knows no more than the mean, 1 for one that knows all; below 0 it does harm.",
        "share of the returns' variance",
        (("explained", ("value/explained_variance",)),),
        rule=(0.0, "the mean"),
        optional=True,
    ),
    Panel(
        "Entropy",
        "Falls as the policy commits itself; near zero it no longer explores.",
        "nats per token",
        (("entropy", ("entropy",)),),
        from_zero=True,
    ),
    Panel(
        "Clip fraction",
        "Share of tokens whose probability ratio left the trust region; 0 in the first update after each rollout.",
        "share of tokens",
        (
            ("clipped", ("clip_ratio/region_mean", "cispo_clip_ratio")),
            ("below", ("clip_ratio/low_mean",)),
            ("above", ("clip_ratio/high_mean",)),
            ("above δ", ("clip_ratio/delta_mean",)),
        ),
        share=True,
    ),
    Panel(
        "Truncated completions",
        "Cut off by the token budget before they ended. Above 20% the budget decides the reward.",
        "share of completions",
        (("truncated", ("completions/clipped_ratio", "completions/truncated_share")),),
        share=True,
        rule=(0.2, "20%"),
    ),
    Panel(
        "Tokens of the update",
        "Tokens that went through forward and backward, and those that stock TRL would have computed, padding included.",
        "tokens per step",
        (
            ("computed", ("update/tokens_computed",)),
            ("stock TRL", ("update/tokens_stock",)),
            ("saved", ("update/tokens_saved",)),
        ),
        from_zero=True,
        optional=True,
    ),
    Panel(
        "What the update had to compute",
        "Live: completions whose gradient is not exactly zero. Computed: tokens, against stock TRL. Padding: of the computed.",
        "share",
        (
            ("live completions", ("update/live_share",)),
            ("computed tokens", ("update/computed_share",)),
            ("padding", ("update/padding_share",)),
        ),
        share=True,
        optional=True,
    ),
    Panel("Loss", "Near zero by construction in policy gradients; not a measure of progress.", "loss",
          (("loss", ("loss",)),), optional=True),
    Panel("Gradient norm", "Before clipping. A jump that stays is a warning.", "norm",
          (("gradient norm", ("grad_norm",)),), from_zero=True, optional=True),
]  # fmt: skip


@dataclass(frozen=True)
class PanelView:
    """A panel of the page; without a chart it says which metrics were `looked_for`."""

    title: str
    meaning: str
    chart: Chart | None
    looked_for: str


def panel_views(record: RunRecord) -> list[PanelView]:
    """All panels of a run: accuracy, reward, then `PANELS`; optional ones only where something was recorded."""
    views = [*_working(record), _accuracy(record), _reward(record)]
    for panel in PANELS:
        if panel.title == DEAD_GROUPS and record.first_of("ppo/task_reward"):
            continue  # with a critic no group is dead
        lines = [Line(label, record.first_of(*names)) for label, names in panel.lines]
        drawn = any(line.points for line in lines)
        if drawn or not panel.optional:
            chart = (
                draw(lines, unit=panel.unit, share=panel.share, from_zero=panel.from_zero, rule=panel.rule)
                if drawn
                else None
            )
            views.append(PanelView(panel.title, panel.meaning, chart, ", ".join(panel.metrics)))
    return views


def _working(record: RunRecord) -> list[PanelView]:
    """R1-Zero's curve in one figure: right answers, calculations written down, length. Nothing where `worked_out` was not watched."""
    shares = [Line("worked out", record.first_of("rewards/worked_out/mean"))]
    if not shares[0].points:
        return []
    right = next((name for name in record.metrics if re.fullmatch(r"rewards/\w*accuracy\w*/mean", name)), "")
    shares.insert(0, Line("right answers", record.first_of(right)))
    tokens = [Line("tokens (right axis)", record.first_of("completions/mean_length"))]
    chart = draw(shares, unit="share of completions", share=True, right=tokens, right_unit="tokens per completion")
    meaning = (
        "Training problems, sampled: answers that are right, answers that write a calculation down, and their length."
    )
    return [PanelView("Accuracy, working out and length", meaning, chart, "")]


def _reward(record: RunRecord) -> PanelView:
    components = sorted(name for name in record.metrics if re.fullmatch(r"rewards/.+/mean", name, re.DOTALL))
    lines = [Line("total", record.first_of("reward"))]
    if len(components) > 1:
        lines += [Line(name[len("rewards/") : -len("/mean")], record.metrics[name]) for name in components]
    chart = draw(lines, unit="reward", from_zero=True) if any(line.points for line in lines) else None
    meaning = "Mean over the completions of a step: training problems, sampled. Components before weighting."
    return PanelView("Reward", meaning, chart, "reward, rewards/<name>/mean")


def accuracy_line(record: RunRecord, label: str) -> Line:
    """Held-out accuracy with its limits: before at step 0, after at the last step, evaluations on the way in between."""
    evaluated = [(0, record.before), *record.during, (record.last_step or 1, record.after)]
    found = {step: e.accuracy for step, e in evaluated if isinstance(e, EvaluationResult) and e.accuracy is not None}
    points = [(float(step), interval.value) for step, interval in sorted(found.items())]
    errors = [(interval.low, interval.high) for _, interval in sorted(found.items())]
    return Line(label, points, errors, markers=True)


def _accuracy(record: RunRecord) -> PanelView:
    lines = [
        accuracy_line(record, "greedy"),
        Line("during training", record.first_of("evaluation/accuracy", "eval_accuracy", *_eval_rewards(record))),
    ]
    chart = draw(lines, unit="share of problems correct", share=True) if any(line.points for line in lines) else None
    meaning = "Held-out problems. Bars: 95% Wilson interval over problems."
    return PanelView("Held-out accuracy", meaning, chart, "evaluation/before, evaluation/after, evaluation/step_<n>")


def _eval_rewards(record: RunRecord) -> list[str]:
    return [name for name in record.metrics if re.fullmatch(r"eval_rewards/\w*accuracy\w*/mean", name, re.IGNORECASE)]
