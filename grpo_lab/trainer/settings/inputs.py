"""Check the constructor's inputs before a model is loaded; errors say what was found, what is allowed and which
setting.

Most functions raise ValueError, and return nothing. ``shared_names``, ``uneven_evaluation`` and
``check_prompt_lengths`` return a warning as text, or None.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import try_to_load_from_cache
from trl import GRPOTrainer

from grpo_lab.batch import Denominators
from grpo_lab.engines.generators import context_of_config
from grpo_lab.io import check_place, is_local
from grpo_lab.objectives import PRESETS
from grpo_lab.rewards.protocol import scope_of
from grpo_lab.settings import one_of
from grpo_lab.trainer.settings.algorithm import LOSS_TYPES
from grpo_lab.trainer.settings.parse import ValueSettings
from grpo_lab.trainer.trl_bridge import teams
from grpo_lab.trainer.trl_bridge.rewards import reward_name


def check_inputs(
    model: Any, reward_funcs: Any, train_dataset: Any, eval_dataset: Any, environment_factory: Any, rollout_func: Any
) -> None:
    """Raise ValueError if an argument of the trainer's constructor is bad: the model, a data set, or a reward whose
    ``columns`` the training rows lack (a ``rollout_func`` may bring columns of its own). TRL's own checks follow."""
    check_model(model)
    needs_prompt = environment_factory is None  # an environment can supply the prompt
    if train_dataset is not None:
        check_dataset(train_dataset, "train_dataset", needs_prompt)
    if isinstance(eval_dataset, Dataset):
        check_dataset(eval_dataset, "eval_dataset", needs_prompt)
    if isinstance(reward_funcs, (list, tuple)):
        rewards = reward_funcs
    else:
        rewards = [reward_funcs]
    if isinstance(train_dataset, Dataset) and rollout_func is None:
        columns = train_dataset.column_names
        for reward in rewards:
            lacking = [column for column in getattr(reward, "columns", ()) if column not in columns]
            if lacking:
                reads = f"reward {reward_name(reward)!r} reads the column {lacking[0]!r}"
                raise ValueError(f"{reads}, which `train_dataset` lacks; it has {columns}")


def check_model(model: Any) -> None:
    """Raise ValueError if ``model`` is text and neither a folder that holds a model nor a hub name; offline the hub
    name must be in the cache."""
    if not isinstance(model, (str, os.PathLike)):
        return
    name = check_place(str(model), "model")
    if is_local(name) or os.environ.get("HF_HUB_OFFLINE") not in ("1", "true", "True"):
        return
    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        raise ValueError(
            f"`model` is {name!r}: not a local folder, not in the local hub cache, and HF_HUB_OFFLINE is set, so it "
            "cannot be reached; give a local folder or unset HF_HUB_OFFLINE"
        )


def check_dataset(dataset: Any, setting: str, needs_prompt: bool) -> None:
    """Raise ValueError if ``dataset`` is no data set, is empty or, with ``needs_prompt``, has no column ``prompt``."""
    if isinstance(dataset, Dataset):
        if len(dataset) == 0:
            raise ValueError(f"`{setting}` is empty; it needs at least one row")
        if needs_prompt and "prompt" not in dataset.column_names:
            raise ValueError(f"`{setting}` has no column 'prompt'; it has {dataset.column_names}")
    elif not isinstance(dataset, IterableDataset):
        raise ValueError(f"`{setting}` is a {type(dataset).__name__}; it must be a datasets.Dataset or IterableDataset")


def check_conversations(turns: str | None, several: dict[str, Any]) -> None:
    """Raise ValueError if completions are made in turns, and the prompts are texts. TRL calls tools and environments
    only in conversations; with a text it fails once the completion is made.

    ``turns``: the setting by which completions are made in turns (``turns_of``); ``several``: data sets, by the setting
    that names them. Streamed data sets are not looked at.
    """
    for setting, rows in several.items():
        known = turns is not None and isinstance(rows, Dataset) and "prompt" in rows.column_names and len(rows) > 0
        if known and isinstance(rows[0]["prompt"], str):
            begins = f"the first begins {rows[0]['prompt'][:60]!r}"
            raise ValueError(
                f"`{turns}` needs prompts that are conversations, [{{'role': 'user', 'content': …}}], and those of "
                f"`{setting}` are texts ({begins}): write them as messages (of our loaders: `template: chat`)"
            )


def turns_of(tools: Any, environment_factory: Any) -> str | None:
    """Return the name of the setting by which completions are made in several turns; None if they have one turn."""
    if tools:
        return "tools"
    if environment_factory is not None:
        return "environment_factory"
    return None


def check_weights(weights: Any, rewards: list[Any]) -> None:
    """Raise ValueError if ``weights`` and ``rewards`` are not equally many; TRL's error does not name the rewards."""
    if len(weights) != len(rewards):
        names = [reward_name(one) for one in rewards]
        raise ValueError(f"`reward_weights` has {len(weights)} entries, and there are {len(rewards)} rewards: {names}")


def check_hooks(cls: type, algorithm: Any, base: type) -> None:
    """Raise ValueError if the trainer's class ``cls`` has a method that would never be called: a ``token_loss``
    although the loss is TRL's, or a ``_compute_loss`` in a class that comes after ours (``base``) among its bases."""
    hook = teams(cls, "token_loss")
    if algorithm.objective is None and hook is not None:
        raise ValueError(
            f"`{hook}` would never be called: the loss is left to TRL ({algorithm.left_to_trl}); set `objective`, or "
            "override `_compute_loss`"
        )
    behind = cls.__mro__[cls.__mro__.index(base) + 1 : cls.__mro__.index(GRPOTrainer)]
    home = next((kind for kind in behind if "_compute_loss" in vars(kind)), None)
    if home is not None:
        raise ValueError(
            f"`{home.__name__}._compute_loss` would never be called: {base.__name__} comes before it among the bases "
            f"of `{cls.__name__}`; write `class {cls.__name__}({home.__name__}, {base.__name__})`"
        )


def check_loss_type(cls: type, args: Any, algorithm: Any) -> None:
    """Raise ValueError for an unknown ``loss_type``, which TRL refuses only when it first computes the loss. One that a
    team's own loss may read is let through."""
    own = teams(cls, "_compute_loss") or teams(cls, "compute_loss")
    if algorithm.objective is None and args.loss_type not in LOSS_TYPES and own is None:
        ours = ""
        if args.loss_type in PRESETS:
            ours = f"; {args.loss_type!r} is an `objective` here"
        raise ValueError(f"`loss_type` is {args.loss_type!r}{one_of(args.loss_type, sorted(LOSS_TYPES))}{ours}")


def check_requires(trainer: Any) -> None:
    """Raise ValueError if a group reward ``requires`` the values of a reward that is not in this run. That must be the
    name of a completion reward of the run, or of one of the group reward's own ``sources``."""
    rewards = list(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True))
    known = sorted(name for name, reward in rewards if scope_of(reward) == "completion")
    for name, reward in rewards:
        for needed in getattr(reward, "requires", ()) if scope_of(reward) != "completion" else ():
            if needed not in known and needed not in getattr(reward, "sources", ()):
                raise ValueError(
                    f"group reward {name!r} requires the values of {needed!r}, and this run's completion rewards are "
                    f"{known}: add it to `reward_funcs`, correct `requires`, or hand over the callable in `sources`"
                )


def shared_names(names: list[str]) -> str | None:
    """Return a warning if several rewards have the same name, since TRL logs one entry per name; else None."""
    name = min((name for name in names if names.count(name) > 1), default=None)
    if name is None:
        return None
    return (
        f"{names.count(name)} rewards are called {name!r}: `rewards/{name}/mean` is the mean of all of them, as in "
        "TRL, and a group reward that requires this name sees the last; give them `__name__`s of their own "
        "(`reward_funcs`)"
    )


def uneven_evaluation(args: Any, eval_dataset: Any, group_size: int) -> str | None:
    """Return a warning if the last batch of an evaluation is not full, since TRL's logged means are then no means over
    the rows; else None. ``group_size``: completions per prompt in the evaluation."""
    if isinstance(eval_dataset, dict):
        several = [*eval_dataset.values()]
    else:
        several = [eval_dataset]
    full = args.eval_batch_size * args.world_size
    ranks = args.world_size
    uneven = [len(rows) for rows in several if hasattr(rows, "__len__") and len(rows) * group_size % full]
    if not uneven:
        return None
    if ranks == 1:
        how = "its rows count more"
    else:
        how = "it is filled up with rows that count twice"
    return (
        f"`eval_dataset`: {uneven[0]} rows × {group_size} completions do not fill the last batch of {full} "
        f"(`per_device_eval_batch_size` {args.per_device_eval_batch_size} × {ranks} processes); `eval_reward` and "
        f"other means over batches are stock TRL's, so {how}: take a number of rows that fills it"
    )


def completion_limit(args: Any) -> int | None:
    """Return the largest length of a completion in tokens: ``max_completion_length``, else the limit in
    ``generation_kwargs``, else None."""
    written = args.generation_kwargs or {}
    limits = (args.max_completion_length, written.get("max_new_tokens"), written.get("max_tokens"))
    return next((limit for limit in limits if limit is not None), None)


def check_budget(objective: Any, max_completion_length: int | None) -> None:
    """Raise ValueError if ``max_completion_length`` is None although the aggregation divides by it, as Dr.GRPO's does.
    Whether it does is tried out, with NaN for that number."""
    if max_completion_length is not None or objective is None:
        return
    one = torch.ones(1, 1, dtype=torch.float64)
    without = Denominators(rows=1.0, tokens=1.0, budget=float("nan"), prompts=1.0, group_tokens=1.0)
    if any(torch.as_tensor(each.aggregate(one, one.bool(), without)).isnan().any() for each in objective.each):
        raise ValueError(
            f"`max_completion_length` is None, and the average of objective {objective.name!r} divides by it; set it "
            "(a limit in `generation_kwargs` is only the engine's)"
        )


def check_prompt_lengths(
    lengths: list[int], config: Any, max_completion_length: int | None, limit: int | None = None
) -> str | None:
    """Check that prompts leave room for a completion in the context.

    Args:
        lengths: numbers of tokens of the prompts.
        config: the model's configuration, which says its context.
        max_completion_length: largest length of a completion, in tokens; None: one token must have room.
        limit: the engine's context (``vllm_max_model_length``), which counts if it is smaller; None: as the model's.

    Returns:
        a warning if the longest prompt fits, but not with ``max_completion_length`` tokens after it; else None.

    Raises:
        ValueError: a prompt fills the context.
    """
    limits = [
        (context_of_config(config), "`max_position_embeddings` of the model"),
        (limit, "`vllm_max_model_length`"),
    ]
    context, setting = min(((tokens, name) for tokens, name in limits if tokens), default=(None, ""))
    longest = max(lengths, default=0)
    room = max_completion_length
    if context is None or longest + (room or 1) <= context:
        return None
    if longest < context:
        return (
            f"the longest prompt has {longest} tokens: with `max_completion_length`={room} a completion may run beyond "
            f"the context of {context} tokens ({setting})"
        )
    better = ""
    if room is not None:
        better = f", and with `max_completion_length`={room} at most {max(context - room, 1)}"
    raise ValueError(
        f"a prompt of {longest} tokens leaves no room in a context of {context} tokens ({setting}); allowed are "
        f"prompts of at most {context - 1} tokens{better}: filter or shorten them in `train_dataset`"
    )


def check_critic(value: ValueSettings | None, own_loss: str | None, optimizers: Any) -> None:
    """Raise ValueError if there is a critic (settings ``value``) that would not learn: a team computes the whole loss
    (``own_loss``: its method; None: it does not), or brings an optimizer that does not know the critic's parameters."""
    if value is None:
        return
    if own_loss is not None:
        raise ValueError(
            "`_compute_loss` is overridden, so that the critic (`value`) would never learn; override `token_loss`, the "
            "policy's loss"
        )
    if optimizers is not None and optimizers[0] is not None:
        raise ValueError(
            "`optimizers` holds an optimizer, which does not know the critic's parameters (`value`); leave it out, and "
            "set `optim`, `learning_rate` and `value.learning_rate`"
        )
