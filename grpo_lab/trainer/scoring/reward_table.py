"""Prepare rewards for TRL: check each, compute group rewards after the gather, keep step scores, schedule weights.

TRL calls each reward on this rank's rows and gathers the values to a table of all ranks. During that call
(``rewards_of_all``) a wrapper stands in for each reward (``as_trl_calls_it``):

    reward function, reward model    the function's values are checked; a model is left to TRL
    step reward                      its column holds the mean of a completion's step scores, for the log. A rule that
                                     reads steps (``advantages.process``) finds them in ``RewardTable.steps``
    group reward                     its column is NaN until the gather, after which it is called on whole groups

A schedule of a weight (``reward_schedules``) is a function of the optimizer step, logged as ``reward_weights/<name>``.
It keeps no state: at step t a resumed run has the weight that an uninterrupted run has.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable

from grpo_lab.advantages import TOKEN_RULES, StepTable, reads_steps
from grpo_lab.batch import RewardTable
from grpo_lab.objectives.kl import KLTerm
from grpo_lab.rewards.completion import completion_text
from grpo_lab.rewards.protocol import Group, scope_of, score_groups
from grpo_lab.rewards.schedules import Schedule
from grpo_lab.rewards.steps import StepReward, StepScores, mean_score
from grpo_lab.settings import one_of
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.ports import Faults, Numbers, StepPort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.settings.knobs import name_of
from grpo_lab.trainer.trl_bridge.rewards import correctness_columns
from grpo_lab.verifiers.verdict import checked_scores

#: Largest finite score. Scores are kept in float32, in which a larger one is infinite.
LARGEST = torch.finfo(torch.float32).max


def as_trl_calls_it(reward: Any, name: str, keep_infinite: bool = False) -> Any:
    """Return what TRL is to call in place of ``reward``: the wrapper of its kind. With ``keep_infinite`` infinite
    values are passed on, and found later in the table of all ranks (``without_infinite``); else they are an error."""
    if scope_of(reward) == "group":

        def put_off(prompts: list[Any], **_: Any) -> list[None]:
            """Return None for each row; the values are computed after the gather."""
            return [None] * len(prompts)

        return put_off
    if scope_of(reward) == "step":
        return (StepCoroutine if is_async_callable(reward) else StepCalled)(reward, keep_infinite)
    if isinstance(reward, nn.Module):
        return reward
    return (CheckedCoroutine if is_async_callable(reward) else CheckedReward)(reward, name, keep_infinite)


class CheckedReward:
    """Calls one reward function and checks its values, since TRL would make advantages of an infinite one. NaN means
    None (cannot be scored), as in TRL; ``not_numbers`` counts the NaN."""

    def __init__(self, reward: Any, name: str, keep_infinite: bool = False) -> None:
        self.reward = reward
        self.__name__ = name
        self.keep_infinite = keep_infinite
        self.not_numbers = 0

    def __call__(self, **inputs: Any) -> list[float | None]:
        return self.checked(self.reward(**inputs), len(inputs["completions"]))

    def checked(self, values: Any, expected: int) -> list[float | None]:
        """Return ``values``, one number or None for each of ``expected`` completions; raise ``ValueError`` for anything
        else."""
        who = f"reward function {self.__name__!r} (`reward_funcs`)"
        scores = checked_scores(values, expected, who, infinite=self.keep_infinite)
        self.not_numbers += sum(score != score for score in scores)
        return [None if score != score else score for score in scores]


class CheckedCoroutine(CheckedReward):
    """Calls an asynchronous reward function and checks its values in the same way."""

    async def __call__(self, **inputs: Any) -> list[float | None]:  # type: ignore[override]
        return self.checked(await self.reward(**inputs), len(inputs["completions"]))


class StepCalled:
    """Calls a step reward, returns one number per completion as TRL wants it, and keeps the step scores in ``steps``.

    The number is the mean of the step scores. With ``keep_infinite`` a completion with an infinite score gets ±infinity
    instead, and that score is None among the steps.
    """

    def __init__(self, reward: StepReward, keep_infinite: bool = False) -> None:
        self.reward = reward
        self.keep_infinite = keep_infinite
        self.steps: list[StepScores] = []
        self.not_numbers = 0

    def __call__(self, **inputs: Any) -> list[float | None]:
        reward = self.reward
        before = getattr(self.reward, "not_numbers", 0)
        if self.keep_infinite and type(reward).__call__ is StepReward.__call__:
            scored = reward.checked(reward.score_steps(**inputs), inputs["completion_ids"], keep_infinite=True)
        else:
            scored = reward(**inputs)
        return self.kept(scored, before)

    def kept(self, scored: list[StepScores], before: int) -> list[float | None]:
        """Keep the step scores, and return one number per completion. ``before`` is what the reward's count of NaN was
        before its call."""
        self.not_numbers += getattr(self.reward, "not_numbers", 0) - before
        self.steps = []
        of_completions = list[float | None]()
        for steps in scored:
            infinite = [score for _, score in steps if score is not None and _is_infinite(score)]
            if infinite and self.keep_infinite:
                self.steps.append([(end, None if _is_infinite(score) else score) for end, score in steps])
                of_completions.append(math.copysign(math.inf, infinite[0]))
            else:
                self.steps.append(list(steps))
                of_completions.append(mean_score(steps))
        return of_completions


class StepCoroutine(StepCalled):
    """Calls an asynchronous step reward and keeps its step scores in the same way."""

    async def __call__(self, **inputs: Any) -> list[float | None]:  # type: ignore[override]
        reward: Any = self.reward
        before = getattr(reward, "not_numbers", 0)
        ids = inputs["completion_ids"]
        return self.kept(reward.checked(await reward.score_steps(**inputs), ids, self.keep_infinite), before)


def _is_infinite(score: float | None) -> bool:
    """Return whether a score is infinite in float32."""
    return score is not None and abs(score) > LARGEST


def check_steps(reward_funcs: list[Any], rule: Any, own_hook: bool, tokenizer: Any, kl: KLTerm | None = None) -> None:
    """Check that step rewards fit the advantage rule, and give rewards that read tokens the ``tokenizer``.
    ``own_hook``: whether a team's ``compute_advantages`` takes the rule's place.

    Raises:
        ValueError: there are step rewards, and neither rule nor hook reads steps; or the rule reads steps, and there
            are none; or the KL (``kl``) is charged per completion, and there is no outcome reward to charge.
    """
    given = [reward for reward in reward_funcs if scope_of(reward) == "step"]
    named = next((name for name, part in TOKEN_RULES.items() if type(rule) is part), name_of(rule))
    for reward in reward_funcs:
        reads_tokens = scope_of(reward) == "step" or getattr(reward, "reads_tokens", False)
        if reads_tokens and getattr(reward, "tokenizer", None) is None:
            reward.tokenizer = tokenizer
    if given and not (reads_steps(rule) or own_hook):
        raise ValueError(
            f"step reward {given[0].name!r} scores steps, and advantages here are made of one number a completion: set "
            "`advantage: process` (of turns: `turn_returns`) with `objective`, or give the reward as "
            "`grpo_lab.rewards.steps_as_outcome(reward)`"
        )
    if reads_steps(rule) and not given:
        raise ValueError(
            f"`advantage` is {named!r}, but no reward scores steps: add a step reward (`grpo_lab.rewards.step_reward`, "
            "`EquationSteps`; of turns: `rollout: {turns: {}}` and an environment with `turn_rewards`) to "
            "`reward_funcs`, or choose another rule"
        )
    of_outcome = getattr(rule, "penalises_outcome", False) and not own_hook
    if kl is not None and kl.per == "sequence" and of_outcome and len(given) == len(reward_funcs):
        raise ValueError(
            f"`kl.placement` is 'reward' with `kl.per`='sequence', `advantage` is {named!r}, and there are step "
            "rewards only: the KL of a completion is taken from its outcome's reward, and without one "
            "`kl.coefficient` would have no effect (a z-score of the KL alone); set `kl.per: token`, or add an "
            "outcome reward to `reward_funcs`"
        )


def gathered_steps(local: dict[int, list[StepScores]], group_size: int) -> dict[int, StepTable]:
    """Gather each step reward's steps over all ranks, rounded to float32 as every reward is. A collective."""
    tables = {}
    for column in sorted(local):
        table = StepTable.of(gather_object(local[column]), group_size)
        tables[column] = StepTable(table.row, table.end, table.score.float().double(), table.rows, group_size)
    return tables


def without_infinite(values: Tensor, names: tuple[str, ...], faults: Faults | None, home: str) -> Tensor:
    """Return the rewards ``values`` ``[N, F]``, the same on every rank, with NaN (cannot be scored) for infinite ones.
    If there are any, mark the batch as bad in ``faults``; without a guard (None) raise ValueError, since one infinite
    reward spoils the advantages of its group. ``home`` is the beginning of a message, with a place for the reward's
    name: ``"reward function {}"``."""
    infinite = values.isinf()
    for column in infinite.any(dim=0).nonzero().flatten().tolist():
        rows = infinite[:, column].nonzero().flatten().tolist()
        more = ""
        if rows[1:]:
            more = f" and {len(rows) - 1} more"
        seen = f"{values[rows[0], column].item()} for completion {rows[0]}{more} of {values.size(0)}"
        said = f"{home.format(repr(names[column]))} returned {seen}"
        if faults is None:
            raise ValueError(
                f"{said}; allowed are finite numbers, or None (NaN) for a completion that cannot be scored "
                "(`reward_funcs`)"
            )
        faults.infinite.update({(row, column): values[row, column].item() for row in rows})
        faults.found("reward", said)
    if bool(infinite.any()):
        return values.masked_fill(infinite, float("nan"))
    return values


def rewards_of_all(trainer: StepPort, trls: Callable[..., Tensor], *of_rows: Any) -> Tensor:
    """Return the rewards ``[N, F]`` of all ranks' completions, checked and with group rewards. Every rank calls this.

    ``trls`` is TRL's ``_calculate_rewards``, and ``of_rows`` are its arguments: inputs, prompts, completions and
    completion ids of this rank's rows. A reward that returns NaN counts as None (cannot be scored), as in TRL. NaN is
    rarely meant, so it is logged (``rewards/nan_share``) and reported once for each reward. Infinite rewards raise
    ValueError; with a guard they become NaN, and the batch is marked as bad.
    """
    recorder = trainer.recorder
    names = tuple(trainer.reward_func_names)
    rewards = trainer.reward_funcs
    faults = recorder.faults_in_training
    if faults is not None:
        faults.generation()
    seams = [as_trl_calls_it(reward, name, faults is not None) for reward, name in zip(rewards, names, strict=True)]
    with trl_bridge.replaced(trainer, "reward_funcs", seams):
        values = trls(*of_rows)
    models = torch.tensor([isinstance(seam, nn.Module) for seam in seams], device=values.device)
    local = torch.tensor([[getattr(seam, "not_numbers", 0) for seam in seams]], device=values.device)
    not_numbers = torch.where(models, values.isnan().sum(0), trainer.accelerator.gather(local).sum(0))
    values = without_infinite(values, names, faults, "reward function {}")
    trainer.step_scores = {i: seam.steps for i, seam in enumerate(seams) if isinstance(seam, StepCalled)}
    if any(scope_of(reward) == "group" for reward in rewards):
        values, more = _with_group_rewards(trainer, values, _gathered_rows(trainer, *of_rows))
        values = without_infinite(values, names, faults, "group reward {}")
        not_numbers = not_numbers + more
    recorder.book().add_alike("rewards/nan_share", not_numbers.sum(), values.numel())
    for name, count in zip(names, not_numbers.tolist(), strict=True):
        if count:
            recorder.say(
                f"reward {name!r} returned NaN for {count} of {values.size(0)} completions: taken as None (cannot be "
                "scored), as in TRL; `rewards/nan_share` counts them",
                key=f"nan: {name}",
                level=logging.WARNING,
            )
    return values


def _with_group_rewards(trainer: StepPort, values: Tensor, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Compute the columns of group rewards, which are NaN in ``values`` ``[N, F]``, from the ``rows`` of all ranks.
    Return the table with them, and how many NaN each reward returned, long ``[F]``; the same on every rank."""
    table = values.tolist()
    size = trainer.current_group_size
    guarded = trainer.recorder.faults_in_training is not None
    of_group = {i: reward for i, reward in enumerate(trainer.reward_funcs) if scope_of(reward) == "group"}
    known = {name: i for i, name in enumerate(trainer.reward_func_names) if i not in of_group}
    values = values.clone()
    not_numbers = torch.zeros_like(values[0], dtype=torch.long)
    for start in range(0, len(rows), size):
        here = rows[start : start + size]
        scored = table[start : start + size]
        first = rows[start]
        group = Group(
            prompt=first["prompt"],
            completions=[row["text"] for row in here],
            completion_ids=[row["ids"] for row in here],
            lengths=[len(row["ids"]) for row in here],
            truncated=[row["truncated"] for row in here],
            rewards={name: [None if row[i] != row[i] else row[i] for row in scored] for name, i in known.items()},
            columns={name: [row["columns"].get(name) for row in here] for name in first["columns"]},
            step=trainer.state.global_step,
            max_steps=trainer.state.max_steps,
            messages=[row["completion"] for row in here],
            environments=None if first["environment"] is None else [row["environment"] for row in here],
        )
        for column, reward in of_group.items():
            scores = score_groups(reward, [group], guarded)
            not_numbers[column] += sum(score != score for score in scores)
            filled = [float("nan") if score is None else score for score in scores]
            values[start : start + size, column] = values.new_tensor(filled)
    return values, not_numbers


def _gathered_rows(
    trainer: StepPort, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], ids: list[list[int]]
) -> list[dict[str, Any]]:
    """Return what group rewards read of each row, for the rows of all ranks, in rank order, in which groups are
    contiguous. A collective. ``text`` is the completion as text, ``completion`` in TRL's form (text or messages)."""
    skip = ("prompt", "completion", "completion_ids", "image", "images")
    truncated = truncated_rows(trainer, ids)
    environments = environments_for_groups(trainer, len(prompts))
    rows = [
        {
            "prompt": prompt,
            "text": completion_text(completion),
            "completion": completion,
            "ids": list(row_ids),
            "truncated": cut,
            "columns": {name: value for name, value in row.items() if name not in skip},
            "environment": environment,
        }
        for row, prompt, completion, row_ids, cut, environment in zip(
            inputs, prompts, completions, ids, truncated, environments, strict=True
        )
    ]
    with named_place("rows for group rewards"):
        return list(gather_object(rows))


def environments_for_groups(trainer: StepPort, rows: int) -> list[Any]:
    """Return the environment of each of this rank's ``rows`` if a group reward reads environments, else None for each.
    Raise ValueError if there are several ranks, which may share a group, and environments cannot be pickled."""
    readers = [reward for reward in trainer.reward_funcs if getattr(reward, "reads_environments", False)]
    if trainer.environments is None or not readers:
        return [None] * rows
    if trainer.accelerator.num_processes > 1:
        try:
            pickle.dumps(trainer.environments)
        except Exception as error:  # whatever an object's own pickling raises
            raise ValueError(
                f"group reward {readers[0].name!r} reads environments, and with several processes they are sent to the "
                f"ranks that share a group, but {type(trainer.environments[0]).__name__} cannot be pickled ({error}): "
                "give it a `__getstate__` with what the reward reads, or `get_reward`"
            ) from error
    return list(trainer.environments)


def truncated_rows(trainer: Numbers, completion_ids: list[list[int]]) -> list[bool]:
    """Return for each completion whether the length limit cut it: it has tokens, and the last one is neither an end
    token nor padding."""
    ends = trainer.end_token_ids
    return [len(ids) > 0 and int(ids[-1]) not in ends for ids in completion_ids]


def correctness(table: RewardTable, reward_funcs: list[Any]) -> Tensor | None:
    """Return the values ``[N]`` of the reward that measures correctness, NaN if unscorable; None if no reward does. In
    a mixture of tasks each row has the value of its own task's reward."""
    columns = correctness_columns(reward_funcs)
    if not columns:
        return None
    found = table.values[:, columns[0]]
    for column in columns[1:]:
        found = torch.where(found.isnan(), table.values[:, column], found)
    return found


class WeightSchedules:
    """Sets the trainer's ``reward_weights`` from ``schedules`` before every generation batch, and logs these weights
    and those that rewards carry themselves (``weight_at``).

    Raises:
        ValueError: a schedule's name belongs to no reward or to several, or its reward has a second weight.
    """

    def __init__(self, trainer: StepPort, schedules: Mapping[str, Schedule]) -> None:
        names = list(trainer.reward_func_names)
        written = trainer.args.reward_weights
        own = {i: reward.weight_at for i, reward in enumerate(trainer.reward_funcs) if hasattr(reward, "weight_at")}
        for name in schedules:
            if names.count(name) > 1:
                raise ValueError(f"`reward_schedules` names {name!r}, which {names.count(name)} rewards share: {names}")
            if name not in names:
                raise ValueError(f"`reward_schedules` names {name!r}, which no reward has{one_of(name, names)}")
            column = names.index(name)
            if column in own:
                raise ValueError(
                    f"`reward_schedules.{name}` is set, but that reward carries a weight and a warm-up of its own: set "
                    f"them there ({type(trainer.reward_funcs[column]).__name__}(weight=…, warmup_steps=…))"
                )
            if written is not None and written[column] != 1.0:
                raise ValueError(
                    f"`reward_weights` gives {name!r} the weight {written[column]}, and `reward_schedules` gives it a "
                    "schedule: two names for one number; set one"
                )
        self.trainer = trainer
        self._own = own
        self._columns = {names.index(name): schedule for name, schedule in schedules.items()}

    def apply(self) -> None:
        """Set and log the weights of the next generation batch, from the optimizer steps done so far."""
        trainer = self.trainer
        step = self.trainer.state.global_step
        logged = {column: schedule(step) for column, schedule in self._columns.items()}
        for column, weight in logged.items():
            trainer.reward_weights[column] = weight
        fixed = trainer.reward_weights.tolist()
        logged |= {column: fixed[column] * weight_at(step) for column, weight_at in self._own.items()}
        for column, weight in logged.items():
            name = f"reward_weights/{trainer.reward_func_names[column]}"
            trainer.recorder.book().add_alike(name, torch.tensor([weight]), 1)
