"""Process supervision: each step of a completion has a score; a token gets the sum of the scores of its own and all
later steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.advantages.baselines import GroupZScore
from grpo_lab.advantages.group import StdNormalized, deviation, group_average
from grpo_lab.advantages.step_table import StepTable, spread
from grpo_lab.batch import RewardTable


@dataclass(frozen=True)
class Process(StdNormalized):
    """Give each token the sum of the standardised scores of its own step and all later ones:

        Â_{i,t} = Σ_{j: index(j) ≥ t} r̃_i^{(j)},    r̃ = (r − mean R)/(std R + ε),    R = all step scores of the group

    index(j) is the last token of step j. Source: DeepSeekMath (arXiv 2402.03300, §4.1.3, process supervision). With one
    step per completion, ending at its last token, this is outcome GRPO (``group_zscore``) to the last bit.

    A table may have several columns c of step scores with weights w_c, and columns that score whole completions. Then Â
    is Σ_c w_c · (the sum above of column c) plus the z-score of the outcome within the group. The outcome is the
    weighted sum of all columns that hold no steps.

    The rule works in two stages: ``normalised`` on the small table of all ranks, then ``spread`` onto the tokens of
    this rank's rows. Tokens after a row's last scored step, rows without one and steps that could not be scored get 0.
    So does a group whose steps all have the same score.

    Args:
        epsilon: ε, added to the standard deviation, ≥ 0.
        std: ``sample`` (n − 1 in the denominator) or ``population`` (n).
    """

    level: ClassVar[str] = "token"
    reads_steps: ClassVar[bool] = True
    #: The KL of a completion (``kl.per: sequence``) is subtracted from its outcome; without an outcome it is refused.
    penalises_outcome: ClassVar[bool] = True

    def __call__(self, table: RewardTable) -> Tensor:
        """Return advantages ``[B, T]`` (float64) of this rank's rows. Raises ValueError for a table without ``local``
        rows."""
        if table.local is None:
            raise ValueError("`process` makes advantages per token and was called on a table without `local` rows")
        rows = table.local.rows
        width = table.local.mask.size(1)
        total = torch.zeros(rows.stop - rows.start, width, dtype=torch.float64)
        for column, steps in table.steps.items():
            weight = float(table.weights[column])
            part = spread(self.normalised(steps).local(rows), width).cpu()
            total = total + (part if weight == 1.0 else weight * part)
        outcome = outcome_of(table)
        if outcome is not None:
            row = GroupZScore(self.epsilon, self.std)(outcome.total, outcome.group_size)[rows]
            total = total + row.cpu().unsqueeze(1)
        return total

    def normalised(self, table: StepTable) -> StepTable:
        """Return the step table with r̃ in place of the scores; 0 for a step that could not be scored."""
        group = table.row // table.group_size
        groups = table.rows // table.group_size
        first = torch.searchsorted(group, torch.arange(groups, device=group.device))
        place = torch.arange(group.numel(), device=group.device) - first[group]
        if group.numel():
            width = int(torch.bincount(group, minlength=1).max())
        else:
            width = 1
        ragged = table.score.new_full((groups, max(width, 1)), float("nan"))
        ragged[group, place] = table.score
        standard = (ragged - group_average(ragged)) / (deviation(ragged, 1, True, self.std) + self.epsilon)
        return StepTable(table.row, table.end, standard[group, place].nan_to_num(nan=0.0), table.rows, table.group_size)


def outcome_of(table: RewardTable) -> RewardTable | None:
    """Return the table without the columns of step rewards, or ``None`` if there is no other reward.

    A row that no other reward could score stays NaN. A penalty (KL) beside the reward would otherwise make its sum a
    number.
    """
    columns = len(table.names)
    kept = [column for column in range(columns) if column not in table.steps]
    rewards = [column for column in kept if column < columns - table.penalties]
    if not rewards:
        return None
    unscored = table.values[:, rewards].isnan().all(dim=1, keepdim=True)
    values = table.values[:, kept].masked_fill(unscored, float("nan"))
    names = tuple(table.names[column] for column in kept)
    return replace(table, values=values, names=names, weights=table.weights[kept], steps={})
