"""A recipe of `grpo-lab train`, resolved once: settings read, everything that it names loaded, built and looked at.

The run and its dry run go through here: what one refuses before its first step, the other refuses in the same words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from grpo_lab import LabTrainer
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.context_room import check_room, tokenizer_and_config
from grpo_lab.pipelines.early_checks import check_columns, check_trackers, cold_start_rows
from grpo_lab.pipelines.model_files import check_place
from grpo_lab.pipelines.recipe import Recipe
from grpo_lab.pipelines.rows import load_rows, rows_here
from grpo_lab.pipelines.run_folder import refuse_folder
from grpo_lab.trainer.arguments import given
from grpo_lab.trainer.resume.whole import broken_weights


@dataclass(frozen=True)
class Job:
    """What a training is made of. In a dry run rows that are on the hub and not here are None.

    Attributes:
        room: the model's context in words; None where it is not known here.
    """

    recipe: Recipe
    config: Any
    rewards: list[Any]
    of_trainer: dict[str, Any]
    rows: Any
    eval_rows: Any
    held_out: Any
    cold_rows: Any
    room: str | None

    @classmethod
    def resolve(cls, recipe: Recipe, config: Any, overwrite: bool, resume: bool, here_only: bool = False) -> Job:
        """``recipe``, its numbers read, with all that it names; nothing is written.

        Args:
            config: its flat settings.
            here_only: a dry run, which may have no network and is to be quick.

        Raises:
            ValueError: what cannot be loaded, built or trained, or an output folder that is not this run's.
        """
        check_trackers(config.report_to)
        if int(os.environ.get("RANK", "0")) == 0:  # the others may find what it has written
            refuse_folder(recipe, overwrite)
        if recipe.model.path is not None:
            check_place(recipe.model.path)
        rewards = [parts.build_reward(section) for section in recipe.rewards]
        of_trainer = parts.trainer_parts(recipe)
        load = rows_here if here_only else load_rows
        rows = load(recipe.data, "data")
        if rows is not None:
            parts.check_golds(rows, rewards)
            check_columns(recipe, rows, rewards)
        eval_rows = None if recipe.eval_dataset is None else load(recipe.eval_dataset, "eval_dataset")
        held_out = None
        if recipe.evaluation is not None:
            held_out = load(recipe.evaluation.data, "evaluation.data")
            parts.build_reward(recipe.evaluation.reward, "evaluation.reward")
        model = tokenizer_and_config(recipe.model, here_only)
        done = resume and start_is_whole(recipe)
        cold_rows = None if recipe.cold_start is None or done else cold_start_rows(recipe.cold_start, model, here_only)
        room = check_room(recipe, config, model, rows, held_out, cold_rows)
        if rows is not None:
            _ask_the_trainer(recipe, config, rewards, rows, eval_rows)
        return cls(recipe, config, rewards, of_trainer, rows, eval_rows, held_out, cold_rows, room)


def start_is_whole(recipe: Recipe) -> bool:
    """Whether the model that RL starts from was saved to its end: the tokenizer is written after the weights."""
    start = recipe.output_dir / "cold_start"
    return (start / "tokenizer_config.json").is_file() and broken_weights(start) is None


def _ask_the_trainer(recipe: Recipe, config: Any, rewards: list[Any], rows: Any, eval_rows: Any) -> None:
    """What its constructor refuses before it looks at a model. A team's own may first change what it is given."""
    kind = parts.trainer_class(recipe)
    if kind.__init__ is LabTrainer.__init__ and recipe.environment_factory is None:
        given(kind, LabTrainer, None, rewards or None, config, rows, eval_rows, None, None)
