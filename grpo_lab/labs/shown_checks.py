"""Checks of a lab's columns and curves, for mistakes that can be known before anything is made."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_lab.evaluation.outcomes import Outcome
from grpo_lab.evaluation.result import EvaluationResult, number_at
from grpo_lab.reading import read_json_lines
from grpo_lab.recipe.job import Job
from grpo_lab.recipe.sections import EvaluationSection
from grpo_lab.registry import load_named
from grpo_lab.settings import did_you_mean, one_of
from grpo_lab.trainer.metrics.metric_names import logged_names, team_may_log
from grpo_lab.trainer.trl_bridge.rewards import reward_name

OF_LOG = ("mean", "last")
"""Prefixes of a column that reads a logged metric: its mean over all steps, or over the last quarter of them."""
OF_GROUPS = ("greedy.accuracy_by.", "sampled.pass_at_by.")
"""How places of an evaluation's summary begin that name a group of problems."""


def check_shown(
    columns: Mapping[str, str], curves: Mapping[str, str], jobs: Mapping[str, Job], known_later: bool = False
) -> None:
    """Raise ValueError for a column or a curve that no run can have.

    Metrics that a team's code may log are not known here; `not_logged` finds those that are missing, after the first
    run.

    Args:
        columns: title → number, as in a ``lab.yaml``.
        curves: title → curve, likewise.
        jobs: arm → its training.
        known_later: there are further arms, whose trainings are not known yet.
    """
    logged = None
    if not known_later:
        logged = _logged_by(jobs.values())
    for title, name in columns.items():
        of_log, _, metric = name.partition(".")
        if ":" in name:
            load_named(name, f"columns.{title}")
        elif of_log in OF_LOG:
            _check_metric(metric, f"columns.{title}", jobs, logged)
        else:
            _check_place(name, f"columns.{title}", jobs)
    for title, name in curves.items():
        of, _, place = name.partition(".")
        if ":" in name:
            load_named(name, f"curves.{title}")
        elif of == "evaluation":
            _check_place(place, f"curves.{title}", jobs)
        else:
            _check_metric(name, f"curves.{title}", jobs, logged)


def not_logged(columns: Mapping[str, str], curves: Mapping[str, str], folders: Iterable[Path]) -> list[str]:
    """Return a sentence for each column and curve that stays empty, because no run in ``folders`` has logged its
    metric."""
    logs = [folder / "metrics.jsonl" for folder in folders]
    known = {name for log in logs if log.is_file() for _, row in read_json_lines(log) for name in row}
    wanted = {f"columns.{title}": name for title, name in columns.items() if name.partition(".")[0] in OF_LOG}
    wanted |= {f"curves.{title}": name for title, name in curves.items() if name.partition(".")[0] != "evaluation"}
    said = list[str]()
    for where, name in wanted.items():
        if where.startswith("columns."):
            metric = name.partition(".")[2]
        else:
            metric = name
        if known and ":" not in name and metric not in known:
            near = did_you_mean(metric, known) or "."
            said.append(f"`{where}` is {name!r}, and no run here has logged {metric!r}: it is empty{near}")
    return said


def _check_place(name: str, where: str, jobs: Mapping[str, Job]) -> None:
    """Raise ValueError if an arm's `summary.json` will have no number at the place ``name``. Places that name a group
    of problems are not known yet, and pass."""
    for arm, job in jobs.items():
        if job.evaluation is None:
            raise ValueError(f"`{where}` is {name!r}, and the recipe of arm {arm!r} has no `evaluation`")
        if not (job.evaluation.by and name.startswith(OF_GROUPS)):
            number_at(_made_up(job.evaluation).summary(), name, where)


def _logged_by(jobs: Iterable[Job]) -> list[str] | None:
    """Return every name that these trainings may log; None if a team's code decides that."""
    names = dict[str, None]()
    for job in jobs:
        rewards = job.trainer.declared_rewards([*job.rewards])
        parts = [one for one in (*rewards, *job.arguments.get("callbacks", ())) if not isinstance(one, str)]
        if (objective := job.config.algorithm.objective) is not None:
            parts += [one.surrogate for one in objective.each]
        if job.arguments.get("environment_factory") is not None or team_may_log(job.trainer, parts):
            return None
        names |= dict.fromkeys(logged_names(map(reward_name, rewards), job.config.lab_settings.tasks))
    return [*names] or None


def _check_metric(metric: str, where: str, jobs: Mapping[str, Job], logged: Collection[str] | None) -> None:
    """Raise ValueError for a metric that no run logs.

    The name of a reward's mean or standard deviation is checked against the arms' rewards, unless an environment brings
    rewards of its own. Any other metric must be in ``logged``; None: it is unknown what is logged.
    """
    found = re.fullmatch(r"rewards/.+/(mean|std)", metric)
    if found and jobs and not any(job.arguments.get("environment_factory") for job in jobs.values()):
        rewards = [one for job in jobs.values() for one in job.trainer.declared_rewards([*job.rewards])]
        known = list(dict.fromkeys(f"rewards/{reward_name(one)}/{found[1]}" for one in rewards))
        if metric not in known:
            raise ValueError(f"`{where}` is {metric!r}{one_of(metric, known)}")
    elif logged is not None and metric not in logged:
        near = did_you_mean(metric, logged)
        raise ValueError(f"`{where}` is {metric!r}, which no run logs (docs/metrics.md lists what is logged){near}")


def _made_up(section: EvaluationSection) -> EvaluationResult:
    """Make up an evaluation of two problems, one of them answered right, with all that the section asks for. Its
    summary has the places that a real one will have."""
    count = section.n_samples
    tries: list[Any] = [("greedy", 0), *(("sampled", sample) for sample in range(count))]
    outcomes = [
        Outcome(
            problem=problem, kind=kind, sample=sample, question="", prompt="", solution="1", completion="1", tokens=1,
            truncated=False, score=float(problem), answer="1", log_prob=-1.0 if section.log_probs else None,
            measures=dict.fromkeys(section.measures, 1.0),
        )
        for problem in (0, 1) for kind, sample in tries
    ]  # fmt: skip
    return EvaluationResult(tuple(outcomes))
