"""Resolving a recipe: its settings are read, and everything that it names is loaded, built and checked.

A run and its dry run both do it here, so that both refuse the same mistakes in the same words. For a training:
``numbers_read`` converts the flat settings, ``lab_config`` makes a ``LabConfig`` of them, and ``Job.resolve`` loads and
checks everything else. The other commands sample a saved model: ``questions`` loads their rows and rewards, and
``check_model`` checks the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.generators import context_of_config
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.recipe import build, checks
from grpo_lab.recipe.ahead import check_engine, check_whole_model, known_model, made_from, model_here
from grpo_lab.recipe.data import load_rows, rows_here
from grpo_lab.recipe.mixture import in_its_words
from grpo_lab.recipe.models import TokenizerAndConfig
from grpo_lab.recipe.policy import check_policy
from grpo_lab.recipe.sections import (
    ColdStartSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    Recipe,
    RewardSection,
    SamplingSettings,
)
from grpo_lab.settings import hints_of, refuse_unknown, typed
from grpo_lab.trainer.arguments import resolve_arguments
from grpo_lab.trainer.settings.inputs import turns_of

NOT_OF_THIS_MACHINE: dict[str, Any] = dict.fromkeys(("tf32", "fsdp", "fsdp_config", "deepspeed")) | dict.fromkeys(
    ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "torch_compile", "use_liger_kernel", "dataloader_pin_memory"),
    False,
)
"""Settings that only the run's own machine may allow (number formats of a GPU, sharding, kernels), with the values that
a dry run replaces them by."""


@dataclass(frozen=True)
class Job:
    """Everything that a training is made of, loaded and checked.

    Attributes:
        name: the recipe's name.
        folder: its output folder.
        trainer: the trainer's class.
        config: the trainer's configuration.
        model: the model's section; its weights are not loaded.
        reward_sections: the recipe's ``rewards``: names, weights and arguments.
        rewards: the rewards built from them.
        arguments: further arguments of the trainer, by name (``build.trainer_arguments``).
        rows: rows to train on. In a dry run these and the other rows are None if they cannot be had yet (`rows_here`).
        eval_rows: rows of ``eval_dataset``, on which TRL evaluates; None without that section.
        evaluation: the section of the evaluation before and after training, with its limit of tokens filled in.
        held_out: its rows.
        cold_start: the section of the supervised training before RL.
        cold_rows: its rows; None if there is no cold start, or it is done already.
        room: the model's context length in words; None if it is not known here.
        facts: what ``run.json`` says of the recipe.
    """

    name: str
    folder: Path
    trainer: type[LabTrainer]
    config: LabConfig
    model: ModelSection
    reward_sections: tuple[RewardSection, ...]
    rewards: list[Any]
    arguments: dict[str, Any]
    rows: Any
    eval_rows: Any
    evaluation: EvaluationSection | None
    held_out: Any
    cold_start: ColdStartSection | None
    cold_rows: Any
    room: str | None
    facts: dict[str, Any]

    @classmethod
    def resolve(cls, recipe: Recipe, config: LabConfig, here_only: bool = False, cold_start: bool = True) -> Job:
        """Load and check everything that ``recipe`` names. Raises ValueError for what is missing or does not fit.

        Args:
            recipe: the recipe, after ``numbers_read``.
            config: its flat settings (``lab_config``).
            here_only: whether this is a dry run, which may have no network and should be quick.
            cold_start: whether the cold start is still to be made.
        """
        check_engine(config.use_vllm, "use_vllm", here_only, kernels=config.vllm_mode != "server")
        check_engine(_uses_vllm(recipe.evaluation), "evaluation.use_vllm", here_only)
        checks.check_trackers(config.report_to)
        check_whole_model(recipe.model)
        trainer = build.trainer_class(recipe.trainer)
        rewards = [build.build_reward(section) for section in recipe.rewards]
        if not here_only:
            build.reach_reward_models(rewards)
        arguments = build.trainer_arguments(recipe)
        turns = turns_of(arguments["tools"], arguments["environment_factory"])
        load = rows_here if here_only else load_rows
        rows = load(recipe.data, "data")
        if rows is not None:
            build.check_golds(rows, rewards)
            if recipe.environment_factory is None:  # which may own columns
                checks.check_columns(trainer, rows, recipe.rewards, rewards)
            checks.check_enough_rows(trainer, config, rows)
        eval_rows = load(recipe.eval_dataset, "eval_dataset") if recipe.eval_dataset is not None else None
        checks.check_turns(turns, config.lab_settings.rollout, {"data": rows, "eval_dataset": eval_rows})
        model = model_here(recipe.model, here_only)
        if recipe.cold_start is not None and "chat_template_path" in recipe.cold_start.arguments:
            model = None  # the cold start brings another chat template, which is not here yet
        evaluation, held_out = _evaluation(recipe.evaluation, recipe.arguments, config, model, load)
        cold_rows = None
        if cold_start and recipe.cold_start is not None:
            cold_rows = checks.cold_start_rows(recipe.cold_start, model, here_only)
            checks.check_cold_start(recipe.cold_start, cold_rows, model, config.chat_template_kwargs)
        room = checks.check_room(trainer, config, model, rows, turns is not None)
        if (policy := made_from(recipe.model)) is not None:
            check_policy(policy, config)
        _check_as_the_constructor(trainer, recipe, config, rewards, rows, eval_rows)
        return cls(
            name=recipe.name,
            folder=recipe.output_dir,
            trainer=trainer,
            config=config,
            model=recipe.model,
            reward_sections=recipe.rewards,
            rewards=rewards,
            arguments=arguments,
            rows=rows,
            eval_rows=eval_rows,
            evaluation=evaluation,
            held_out=held_out,
            cold_start=recipe.cold_start,
            cold_rows=cold_rows,
            room=room,
            facts=facts_of(recipe),
        )


def _check_as_the_constructor(
    trainer: type[LabTrainer], recipe: Recipe, config: LabConfig, rewards: list[Any], rows: Any, eval_rows: Any
) -> None:
    """Raise ValueError for what the trainer's constructor would refuse before it looks at a model.

    Nothing is checked without rows, with an environment (which may bring the prompts), or with a constructor of a
    team's own, which may change its arguments first.
    """
    if rows is None or trainer.__init__ is not LabTrainer.__init__ or recipe.environment_factory is not None:
        return
    with in_its_words(recipe.data):
        resolve_arguments(trainer, LabTrainer, None, rewards or None, config, rows, eval_rows, None, None)


def _evaluation(
    section: EvaluationSection | None,
    arguments: Mapping[str, Any],
    config: Any,
    model: TokenizerAndConfig | None,
    load: Callable[[DataSection, str], Any],
) -> tuple[EvaluationSection | None, Any]:
    """Return the section of a training's evaluation, completed, and its rows; two None without a section.

    The section's limit of tokens is filled in from ``arguments``, the training's flat settings, and its prompts are
    rendered as in the training (``config``).

    Args:
        model: what is known of the model; None if it is not known yet.
        load: function that loads the rows of a section.

    Raises:
        ValueError: the rows cannot be loaded or judged, or none of them fits in the model's context.
    """
    if section is None:
        return None, None
    section = section.rendered_as(config.chat_template_kwargs)
    rows = load(section.data, "evaluation.data")
    checks.check_by(section, rows)
    build.judges_of(section)
    limit = checks.evaluation_tokens(section, arguments)
    if rows is not None and model is not None:
        checks.check_held_out(section, limit, rows["prompt"], model)
    return replace(section, max_new_tokens=limit), rows


def _uses_vllm(evaluation: EvaluationSection | None) -> bool:
    """Return whether there is an evaluation that asks for vLLM."""
    return evaluation is not None and evaluation.use_vllm is True


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """Return the facts about a recipe that ``run.json`` records: name, model, template, settings, cold start, data."""
    return {
        "name": recipe.name,
        "model": recipe.model.name,
        "expected": recipe.model.expected,
        "template": recipe.data.template,
        "settings": dict(recipe.arguments),
        "cold_start": None if recipe.cold_start is None else asdict(recipe.cold_start),
        "data": recipe.data.loader,
    }


def lab_config(recipe: Recipe, **more: Any) -> Any:
    """Return a ``LabConfig`` of the recipe's flat settings, its output folder and the weights of its rewards. ``more``
    are settings that replace the recipe's, as in a dry run without a GPU.

    Raises ValueError for settings that contradict each other, such as two weights of one reward.
    """
    asked = recipe.arguments
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if asked.get(one) and asked.get(other):
            raise ValueError(f"`{one}` and `{other}` are both true; at most one of them can be")
    settings = {"report_to": "none", **asked, "output_dir": str(recipe.output_dir), **more}
    if recipe.rewards:
        weights = [reward.weight for reward in recipe.rewards]
        beside = settings.setdefault("reward_weights", weights)
        pairs = zip(weights, beside or [], strict=False)  # more where the trainer declares some
        for place, (own, other) in enumerate(pairs):
            if own not in (1.0, other):  # 1.0 is the default: nothing was set there
                raise ValueError(
                    f"`rewards.{place}.weight` is {own} and `reward_weights.{place}` is {other}: they are one "
                    "setting; leave one out"
                )
    _check_eval(recipe.eval_dataset, settings)
    with in_its_words(recipe.data):
        return LabConfig(**settings)


def numbers_read(recipe: Recipe) -> Recipe:
    """Return ``recipe`` with its flat settings converted to the types that ``LabConfig`` declares. Nested mappings are
    left to ``LabConfig``. Raises ValueError for an unknown setting, and for one that is not of its type."""
    from grpo_lab.trainer.settings.limits import EARLIER
    from grpo_lab.trainer.settings.parse import LabSettings

    known = {field.name for kind in (LabConfig, Recipe) for field in fields(kind)} - {"arguments"}
    refuse_unknown(recipe.arguments, known, "the recipe", EARLIER)
    arguments = typed(recipe.arguments, LabConfig)
    for name, kind in hints_of(LabConfig).items():
        ours = name in LabSettings.__dataclass_fields__ and bool not in (kind, *get_args(kind))
        if ours and arguments.get(name) is True:
            raise ValueError(f"`{name}` is True: it has no value (`--{name} VALUE`)")
    return replace(recipe, arguments=arguments)


def _check_eval(rows: DataSection | None, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for ``eval_strategy`` without ``eval_dataset`` (``rows``), and for an ``eval_dataset`` that
    nothing evaluates on."""
    strategy = settings.get("eval_strategy") or "no"
    when = str(getattr(strategy, "value", strategy))
    if when != "no" and rows is None:
        raise ValueError(
            f"`eval_strategy` is {when!r} and the recipe has no `eval_dataset`: rows to evaluate on during training, "
            "such as {loader: gsm8k, split: test, limit: 64}; `evaluation` is before and after it"
        )
    if when == "no" and rows is not None and not settings.get("eval_on_start"):
        raise ValueError("`eval_dataset` has no effect with `eval_strategy: no`; set it to steps or epoch")


@dataclass(frozen=True)
class Questions:
    """What a saved model is asked, and how its answers are judged.

    Attributes:
        rows: the questions; None if there are none, or a dry run cannot have them yet.
        reward: the reward that judges the answers.
        held_out: rows of the evaluation; None as for ``rows``.
    """

    rows: Any
    reward: Any
    held_out: Any = None


def questions(
    data: DataSection | None,
    reward: RewardSection,
    evaluation: EvaluationSection | None = None,
    here_only: bool = False,
) -> Questions:
    """Load the rows, and build the rewards, of a command that samples a saved model.

    Args:
        data: section of the rows; None if they come from elsewhere.
        reward: section of the reward that judges answers.
        evaluation: section of the evaluation on held-out rows.
        here_only: whether this is a dry run, which may have no network.

    Raises:
        ValueError: rows or rewards cannot be loaded, there are no rows, or gold answers are unusable.
    """
    check_engine(_uses_vllm(evaluation), "evaluation.use_vllm", here_only)
    load = rows_here if here_only else load_rows
    judge = build.build_reward(reward, "reward")
    rows = None
    if data is not None:
        rows = load(data, "data")
    if rows is not None:
        if not len(rows):
            raise ValueError("`data` has no rows; at least one question is needed")
        build.check_golds(rows, [judge])
    held_out = None
    if evaluation is not None:
        build.judges_of(evaluation)
        held_out = load(evaluation.data, "evaluation.data")
        checks.check_by(evaluation, held_out)
    return Questions(rows, judge, held_out)


def check_model(
    asked: Questions,
    model: ModelSection,
    sampling: SamplingSettings,
    evaluation: EvaluationSection | None = None,
    here_only: bool = False,
    where: str = "model.path",
) -> TokenizerAndConfig | None:
    """Check a model that is to be sampled, and return its tokenizer and configuration.

    Args:
        asked: rows whose prompts must fit.
        model: the model's section.
        sampling: engine, limit of tokens and chat template.
        evaluation: section to which the held-out rows belong.
        here_only: whether this is a dry run.
        where: the setting that names the model, for messages.

    Returns:
        tokenizer and configuration; None if a dry run does not know them.

    Raises:
        ValueError: there is no such model or engine, or no prompt leaves room for a completion in the context.
    """
    EngineOptions.from_mapping(sampling.engine)
    check_engine(sampling.use_vllm, "use_vllm", here_only)
    known = known_model(model, where, here_only)
    if known is None:
        return None
    context = context_of_config(known.config)
    limit = sampling.max_completion_length
    template_kwargs = sampling.chat_template_kwargs
    lengths = [length for length in (context, sampling.engine.get("max_model_len")) if length is not None]
    if asked.rows is not None and lengths:
        shortest = checks.shortest_prompt(asked.rows["prompt"], known.tokenizer, min(lengths) - limit, template_kwargs)
        if shortest is not None and shortest + limit > min(lengths):
            raise checks.no_room(limit, min(lengths))
    if asked.held_out is not None and evaluation is not None:
        checks.check_held_out(evaluation.rendered_as(template_kwargs), limit, asked.held_out["prompt"], known)
    return known
