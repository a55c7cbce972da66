"""Checks, before the first stage, of what would stop a training only when its trainer is built or first generates.

Tokens are counted as each stage counts them, by the recipe's own tokenizer. Rows that are too short to matter are not
tokenized. In all of these functions ``model`` is the model's tokenizer and configuration, or None if they are not known
yet; rows are None, too, if they are not there yet. Then there is nothing to check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from datasets import Dataset

from grpo_lab.engines.generators import RenderedPrompt, context_of_config, render_pair, render_prompt, too_long
from grpo_lab.recipe.data import MADE, load_rows, rows_here
from grpo_lab.recipe.models import TokenizerAndConfig
from grpo_lab.recipe.sections import NEW_TOKENS, ColdStartSection, EvaluationSection, RewardSection
from grpo_lab.rewards.for_task import ForTask
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.settings import one_of
from grpo_lab.trainer.settings.inputs import check_conversations
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.supervised.methods import check_rows, check_training, worked_pairs

SFT_MAX_LENGTH = 1024
"""TRL's default of ``SFTConfig.max_length``, used where the cold start sets none."""
FEW = 1000
"""Most rows of a cold start that a dry run generates."""
GIVEN_TO_REWARDS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL passes to every reward, besides the columns of the rows."""
TAKES_REWARDS = ("_calculate_rewards", "_generate_and_score_completions")
"""Methods by which a team's trainer may pass further arguments to rewards."""


def evaluation_tokens(section: EvaluationSection, arguments: Mapping[str, Any]) -> int:
    """Return the limit of tokens of an evaluation's completion: ``evaluation.max_new_tokens``, else the
    ``max_completion_length`` in ``arguments``, the training's flat settings. Raises ValueError if that is null."""
    if section.max_new_tokens is not None:
        return section.max_new_tokens
    written = arguments.get("max_completion_length", NEW_TOKENS)
    if written is None:
        raise ValueError("`max_completion_length` is null: the evaluation needs a limit, `evaluation.max_new_tokens`")
    return int(written)


def check_room(trainer: Any, config: Any, model: TokenizerAndConfig | None, rows: Any, in_turns: bool) -> str | None:
    """Check that prompts and completions of a training fit in the model's context.

    Args:
        trainer: the trainer's class.
        config: its configuration.
        in_turns: whether the model may call tools or an environment, so that prompts are not all that it reads.

    Returns:
        the context in words, with a warning if a completion may run beyond it; None if the context is not known here.

    Raises:
        ValueError: the run would fail at its first generation. The message names the setting, the tokens and the
            context.
    """
    from grpo_lab.trainer.settings.inputs import check_prompt_lengths, completion_limit

    if model is None:
        return None
    tokenizer, model_config = model
    context = context_of_config(model_config)
    prompts_are_read = rows is not None and not in_turns and not _reads_other_than_prompts(trainer, rows)
    if prompts_are_read:
        render_prompt(rows[0]["prompt"], tokenizer, config.chat_template_kwargs)  # raises if it cannot be rendered
    if context is None:
        return "no limit"
    limit = completion_limit(config)
    if limit is not None and limit >= context:  # a slip of the pen, or meant for another model
        raise ValueError(
            f"`max_completion_length` is {limit}, and the model's context (max_position_embeddings) is {context} "
            "tokens, for prompt and completion together; lower it"
        )
    risk = None
    if prompts_are_read:
        longest = longest_prompt(rows["prompt"], tokenizer, context - (limit or 1), config.chat_template_kwargs)
        risk = check_prompt_lengths([longest], model_config, limit)
    return f"{context:,} tokens" + ("" if risk is None else f"; {risk}")


def check_by(evaluation: EvaluationSection, held_out: Any) -> None:
    """Raise ValueError if ``evaluation.by`` is no column of the held-out rows."""
    if evaluation.by is not None and held_out is not None and evaluation.by not in held_out.column_names:
        there = ", ".join(held_out.column_names)
        raise ValueError(f"`evaluation.by` is {evaluation.by!r}; the columns of `evaluation.data` are {there}")


def check_held_out(
    section: EvaluationSection, otherwise: int, prompts: Sequence[Any], model: TokenizerAndConfig
) -> None:
    """Raise ValueError if not one of the held-out ``prompts`` fits in the context with a completion after it. If some
    do, the evaluation leaves the others out.

    ``otherwise``: the limit of tokens of a completion, if ``section`` has none.
    """
    tokenizer, model_config = model
    context = context_of_config(model_config)
    if context is None:
        return
    limit = section.max_new_tokens
    setting = "`evaluation.max_new_tokens`"
    if limit is None:
        limit = otherwise
        setting = "`max_completion_length` (no `evaluation.max_new_tokens`)"
    shortest = shortest_prompt(prompts, tokenizer, context - limit, section.chat_template_kwargs)
    if shortest is not None and shortest + limit > context:
        raise ValueError(f"`evaluation`: {too_long('shortest', shortest, limit, context)} The setting is {setting}")


def shortest_prompt(
    prompts: Iterable[Any], tokenizer: Any, room: int, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Return the number of tokens of the shortest prompt; None without prompts. The prompts are tried by their bytes,
    the shortest first, only until one has at most ``room`` tokens."""
    shortest: int | None = None
    for prompt in sorted(prompts, key=_bytes):
        tokens = len(render_prompt(prompt, tokenizer, chat_template_kwargs).ids)
        shortest = tokens if shortest is None else min(shortest, tokens)
        if tokens <= room:
            break
    return shortest


def check_cold_start(
    section: ColdStartSection, rows: Any, model: TokenizerAndConfig | None, chat_template_kwargs: Any
) -> None:
    """Raise ValueError if a prompt with its worked solution, cut at ``cold_start.max_length``, does not fit in the
    context."""
    if rows is None or model is None:
        return
    tokenizer, model_config = model
    context = context_of_config(model_config)
    if context is None or cut_to_fit(section, context):
        return
    longest = longest_row(worked_pairs(rows), tokenizer, context, chat_template_kwargs)
    if longest > context:
        limit = section.arguments.get("max_length", SFT_MAX_LENGTH)
        raise ValueError(
            f"`cold_start`: the longest prompt with its worked solution has {longest} tokens, `cold_start.max_length` "
            f"is {limit}, and the model's context (max_position_embeddings) is {context}: set `cold_start.max_length` "
            f"to at most {context} (longer rows are cut), or leave such rows out"
        )


def cut_to_fit(section: ColdStartSection, context: int | None) -> bool:
    """Return whether the cold start's ``max_length`` cuts all rows to at most ``context`` tokens (None: no limit)."""
    limit = section.arguments.get("max_length", SFT_MAX_LENGTH)
    return context is None or (limit is not None and int(limit) <= context)


def _reads_other_than_prompts(trainer: Any, rows: Any) -> bool:
    """Return whether the column ``prompt`` does not show what the model will read: there are images, no such column, or
    a team's trainer that tokenizes in its own way."""
    from grpo_lab import LabTrainer

    own_tokenization = trainer._tokenize_prompts is not LabTrainer._tokenize_prompts
    has_images = bool({"image", "images"} & {*rows.column_names})
    return own_tokenization or has_images or "prompt" not in rows.column_names


def longest_prompt(
    prompts: Iterable[Any], tokenizer: Any, limit: int = 0, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int:
    """Return the number of tokens of the longest prompt. A prompt that cannot exceed ``limit``, since a token has at
    least one byte, is not tokenized."""
    return _longest(prompts, limit, _bytes, lambda prompt: render_prompt(prompt, tokenizer, chat_template_kwargs))


def longest_row(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, limit: int, chat_template_kwargs: Mapping[str, Any] | None = None
) -> int:
    """Return the number of tokens of the longest prompt with its completion, as `longest_prompt` counts them."""

    def rendered(row: Mapping[str, Any]) -> Any:
        if isinstance(row["prompt"], str):
            return render_prompt(row["prompt"] + row["completion"], tokenizer)
        return render_pair(row["prompt"], row["completion"], tokenizer, chat_template_kwargs)[1]

    return _longest(rows, limit, lambda row: _bytes(row["prompt"]) + _bytes(row["completion"]), rendered)


def _longest(
    several: Iterable[Any], limit: int, size: Callable[[Any], int], rendered: Callable[[Any], RenderedPrompt]
) -> int:
    """Return the largest number of tokens of ``several`` rows, tokenizing only those that may exceed ``limit``.

    ``size``: function that counts a row's bytes; ``rendered``: function that renders and tokenizes it.
    """
    longest = 0
    added: int | None = None  # tokens of the first row, at least as many as the template adds to any row
    for row in several:
        if added is None or size(row) + added > limit:
            tokens = len(rendered(row).ids)
            if added is None:
                added = tokens
            longest = max(longest, tokens)
    return longest


def _bytes(prompt: Any) -> int:
    """Return the number of bytes of a text, or of the contents and tool calls of messages."""
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [f"{message['content']}{message.get('tool_calls') or ''}" for message in prompt]
    return sum(len(text.encode()) for text in texts)


def check_columns(trainer: Any, rows: Dataset, sections: Sequence[RewardSection], rewards: list[Any]) -> None:
    """Raise ValueError if a reward function needs an argument that is no column of the rows, and that TRL does not pass
    to every reward.

    ``sections`` are those that ``rewards`` were built of. A team's trainer that may pass more arguments is not checked.
    """
    from grpo_lab import LabTrainer

    if any(getattr(trainer, name) is not getattr(LabTrainer, name) for name in TAKES_REWARDS):
        return
    for section, reward in zip(sections, rewards, strict=True):
        if isinstance(reward, ForTask):
            reward = reward.reward
        if isinstance(reward, str) or not inspect.isroutine(reward):
            continue
        parameters = inspect.signature(reward).parameters.values()
        named = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [name for name in named if name not in (*GIVEN_TO_REWARDS, *rows.column_names)]
        if missing and scope_of(reward) == "completion":
            raise ValueError(f"`rewards`: {section.name!r} needs {missing}, and the rows have {rows.column_names}")


def check_enough_rows(trainer: Any, config: Any, rows: Dataset) -> None:
    """Raise ValueError if there are fewer rows than the prompts of a generation batch: TRL drops an incomplete batch,
    so that no step would be trained.

    A team's own order of prompts is not checked, nor are our samplers, which check it themselves.
    """
    from grpo_lab import LabTrainer

    if trainer._get_train_sampler is not LabTrainer._get_train_sampler or config.lab_settings.sampler is not None:
        return
    needed = config.generation_batch_size // config.num_generations
    if len(rows) < needed:
        raise ValueError(
            f"`data` has {len(rows)} rows, and a generation batch takes {needed} different ones "
            f"(`generation_batch_size` {config.generation_batch_size} / `num_generations` {config.num_generations}): "
            "no step would be trained. Bring more rows, or lower `per_device_train_batch_size`, "
            "`gradient_accumulation_steps` or `steps_per_generation`"
        )


def check_turns(turns: str | None, rollout: RolloutSettings, several: dict[str, Any]) -> None:
    """Raise ValueError if completions are made in turns, and a setting needs completions of one turn, or the prompts
    are no conversations.

    The trainer checks this, too, but only when it is built: after the cold start, and after its engine has started.

    Args:
        turns: the setting by which completions are made in turns; None if they are not.
        rollout: the settings that may need one turn.
        several: rows, by the name of their section.
    """
    budget = None
    if rollout.thinking_budget is not None and rollout.turns is None:
        budget = "thinking_budget"
    setting = budget or rollout.earlier_policy
    if setting is not None and turns is not None:
        raise ValueError(
            f"`rollout.{setting}` does not combine with `{turns}`, by which a completion is made in turns: leave one "
            "of them out"
        )
    check_conversations(turns, several)


def check_trackers(names: Any, where: str = "report_to") -> None:
    """Raise ValueError if a tracker (one name, or a list of names) is unknown, not installed or not logged in.
    ``where``: the setting that names it."""
    from transformers.integrations import integration_utils

    here = {*integration_utils.get_available_reporting_integrations(), "none", "all", "flyte"}
    for name in [names] if isinstance(names, str) else names or ():
        if name not in integration_utils.INTEGRATION_TO_CALLBACK and name not in here:
            known = sorted(integration_utils.INTEGRATION_TO_CALLBACK)
            raise ValueError(f"`{where}` names {name!r}{one_of(name, known)}")
        if name not in here:
            raise ValueError(f"`{where}` names {name!r}, which is not installed here; install it, or leave it out")
        if name == "wandb":
            _check_wandb(where)


def _check_wandb(where: str) -> None:
    """Raise ValueError if wandb has no key for its server: it would ask for one in the middle of a run, or end it."""
    import wandb

    try:
        known = wandb.setup().settings.mode != "online" or wandb.login(prompt=False, verify=False)
    except TypeError:  # a release that cannot be asked without asking the user
        known = True
    except wandb.errors.UsageError:
        known = False
    if not known:
        raise ValueError(
            f"`{where}` names 'wandb', which has no key for its server; `wandb login`, or WANDB_MODE=offline in the "
            "environment keeps its runs here"
        )


def cold_start_rows(
    section: ColdStartSection, model: TokenizerAndConfig | None, here_only: bool, where: str = "cold_start.data"
) -> Any:
    """Check the settings of a cold start, and return its rows. Raises ValueError for a mistake in either.

    ``where`` is the setting that names the rows. In a dry run (``here_only``) rows may be None (``rows_here``), and of
    generated rows at most ``FEW`` are made, unless a longer one further on might not fit in the context.
    """
    settings = check_training("sft", section.arguments, "cold_start")
    check_trackers(settings.get("report_to"), "cold_start.report_to")
    if here_only:
        count = section.data.arguments.get("n")
        data = section.data
        alike = model is None or cut_to_fit(section, context_of_config(model.config))
        if alike and data.loader in MADE and isinstance(count, int) and count > FEW:
            data = replace(data, arguments={**data.arguments, "n": FEW})
        rows = rows_here(data, where)
    else:
        rows = load_rows(section.data, where)
    if rows is not None:
        check_rows(rows, where)
    return rows


def no_room(completion: int, context: int) -> ValueError:
    """Return the error for rows of which no prompt leaves room for ``completion`` tokens in a ``context`` of tokens."""
    return ValueError(
        f"no prompt of `data` leaves room for max_completion_length={completion} tokens in the model's context of "
        f"{context}; lower `--max_completion_length`"
    )
