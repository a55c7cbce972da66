"""What `curate`, `long2short` and `rounds` ask a saved model, loaded and looked at before anything is written.

A run and its dry run go through here: what one refuses before its first sample, the other refuses in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_lab.engines.sampler import context_of_config
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.pipelines import parts
from grpo_lab.pipelines.context_room import check_held_out, shortest_prompt, tokenizer_and_config
from grpo_lab.pipelines.model_files import check_place
from grpo_lab.pipelines.recipe import DataSection, EvaluationSection, ModelSection, RewardSection
from grpo_lab.pipelines.rows import load_rows, rows_here
from grpo_lab.pipelines.sampler import SamplingSettings, no_room


@dataclass(frozen=True)
class Questions:
    """Rows, what judges the answers, and held-out rows. None: there are none, or a dry run has them not here."""

    rows: Any
    reward: Any
    held_out: Any = None


def questions(
    data: DataSection | None,
    reward: RewardSection,
    evaluation: EvaluationSection | None = None,
    here_only: bool = False,
) -> Questions:
    """The sections of a recipe as what they name.

    Args:
        here_only: a dry run, which may have no network.

    Raises:
        ValueError: what cannot be loaded or judged.
    """
    load = rows_here if here_only else load_rows
    judge = parts.build_reward(reward, "reward")
    rows = None if data is None else load(data, "data")
    if rows is not None:
        if not len(rows):
            raise ValueError("`data` has no rows; at least one question is needed")
        parts.check_golds(rows, [judge])
    held_out = None
    if evaluation is not None:
        parts.build_reward(evaluation.reward, "evaluation.reward")
        held_out = load(evaluation.data, "evaluation.data")
    return Questions(rows, judge, held_out)


def check_model(
    asked: Questions,
    model: ModelSection,
    sampling: SamplingSettings,
    evaluation: EvaluationSection | None = None,
    here_only: bool = False,
) -> tuple[Any, Any] | None:
    """The model's tokenizer and configuration, None where a dry run (``here_only``) does not know them.

    Raises:
        ValueError: no such model or engine, or not one prompt that leaves room for a completion in its context.
    """
    if model.path is not None:
        check_place(model.path)
    EngineOptions.from_mapping(sampling.engine)
    known = tokenizer_and_config(model, here_only)
    if known is None:
        return None
    words, context, limit = known[0], context_of_config(known[1]), sampling.max_completion_length
    lengths = [length for length in (context, sampling.engine.get("max_model_len")) if length is not None]
    if asked.rows is not None and lengths:
        shortest = shortest_prompt(asked.rows["prompt"], words, min(lengths) - limit)
        if shortest is not None and shortest + limit > min(lengths):
            raise no_room(limit, min(lengths))
    if asked.held_out is not None and evaluation is not None and context is not None:
        check_held_out(evaluation.max_new_tokens, limit, asked.held_out["prompt"], words, context)
    return known


__all__ = ["Questions", "check_model", "questions"]
