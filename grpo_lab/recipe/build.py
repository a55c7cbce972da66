"""Objects made from a recipe's sections: rewards, the trainer's class and its arguments.

``build_reward`` makes one reward of a section; ``trainer_class`` and ``trainer_arguments`` give what a training's
trainer is called with. ``job.Job.resolve`` calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_lab.io import is_local, looks_local
from grpo_lab.recipe.ahead import to_come
from grpo_lab.recipe.mixture import BY_TASK
from grpo_lab.recipe.models import loading, lora_config
from grpo_lab.recipe.sections import EvaluationSection, PluginSection, Recipe, RewardSection
from grpo_lab.registry import load_named
from grpo_lab.rewards.for_task import COLUMN, ByTask, ForTask, for_task
from grpo_lab.settings import one_of, read, refuse_misfit, refuse_unknown_arguments, typed

if TYPE_CHECKING:
    from datasets import Dataset

REWARDS = {
    "accuracy": "AccuracyReward",
    "boxed": "BoxedReward",
    "code": "CodeReward",
    "coin": "CoinReward",
    "countdown": "CountdownReward",
    "hashes": "HashesReward",
    "preference": "PreferenceReward",
    "proof": "ProofReward",
    "sorting": "SortingReward",
    "think_format": "ThinkFormatReward",
    "mode_following": "ModeFollowingReward",
    "kimi_length": "KimiLengthReward",
    "language_consistency": "LanguageConsistencyReward",
    "environment": "JudgedByEnvironment",
    "equation_steps": "EquationSteps",
    "flipped": "FlippedReward",
    "wrong_label": "WrongLabelReward",
    "token_classification_steps": "TokenClassificationSteps",
    "turn_limits": "TurnLimits",
    "turn_rewards": "TurnRewards",
    "worked_out": "worked_out",
}
"""Name of a reward in recipes → its class or function in ``grpo_lab.rewards``."""
AROUND = ("flipped", "wrong_label")
"""Rewards that change another one: it is their argument `reward`, written as rewards are in a recipe."""
SHAPING = ("soft_overlong", "repetition", "cosine_scaled")  # TRL's, built by ``trainer.trl_bridge.rewards``
MAX_UNPARSEABLE_GOLDS = 0.01
"""Largest share of gold answers that a verifier may be unable to use."""


def judges_of(section: EvaluationSection) -> dict[str, Any]:
    """Build the rewards of a recipe's ``evaluation``. Returns ``{"reward": the reward that says which answers are
    right, "measures": {name: reward}}``."""
    measures = {name: build_reward(one, f"evaluation.measures.{name}") for name, one in section.measures.items()}
    return {"reward": build_reward(section.reward, "evaluation.reward"), "measures": measures}


def build_reward(section: RewardSection, where: str = "rewards") -> Any:
    """Build the reward that ``section`` names: one of ours or TRL's, ``"module:attribute"`` of a team, or a reward
    model.

    A reward model (a folder, or a hub name ``owner/name``) is checked, and its name returned: TRL loads a sequence
    classifier from it. Raises ValueError, which names the setting ``where``, for an unknown name or wrong arguments.
    """
    if section.weight != 1.0 and where != "rewards":
        raise ValueError(f"`{where}.weight` is {section.weight:g} and has no effect: one reward judges; leave it out")
    if "for_task" in section.arguments:
        others = {name: value for name, value in section.arguments.items() if name != "for_task"}
        return for_task(build_reward(replace(section, arguments=others), where), section.arguments["for_task"])
    if section.name == BY_TASK:
        return ByTask({task: _inside(section, f"{where}.{task}", task) for task in section.arguments})
    if section.name in REWARDS:
        kind = getattr(import_module("grpo_lab.rewards"), REWARDS[section.name])
        if section.name in AROUND and "reward" in section.arguments:
            section = replace(section, arguments={**section.arguments, "reward": _inside(section, f"{where}.reward")})
    elif section.name in SHAPING:
        from grpo_lab.trainer.trl_bridge import rewards as trl_rewards

        return _built(trl_rewards.shaping(section.name), section, where)
    elif ":" in section.name:
        kind = load_named(section.name, where)
    elif "/" in section.name or is_local(section.name) or to_come(section.name):
        return _reward_model(section, where)
    else:
        raise ValueError(
            f"`{where}`: unknown reward {section.name!r}{one_of(section.name, sorted([*REWARDS, *SHAPING]))}, "
            "'module:attribute', or a reward model: a folder here or a hub name 'owner/name'"
        )
    if not isinstance(kind, type):
        refuse_unknown_arguments(kind, section.arguments, f"`{where}`: {section.name!r}", ("weight",))
        if section.arguments:
            return functools.partial(kind, **section.arguments)
        return kind
    return _built(kind, section, where)


def reach_reward_models(rewards: Iterable[Any]) -> None:
    """Raise ValueError if one of ``rewards`` is a reward model on the hub whose configuration cannot be loaded from
    here. Otherwise it would fail later, when TRL builds its trainer. Its weights are not looked for."""
    from transformers import AutoConfig

    for name in rewards:
        if isinstance(name, str) and not is_local(name) and not to_come(name):
            with loading(name):
                AutoConfig.from_pretrained(name)


def scoring_nothing(name: str) -> Any:
    """Return a reward that scores every completion 0 and has the name ``name``. A plan uses it in place of a reward
    that cannot be built yet, or whose model it does not load."""

    def score(completions: list[Any], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    score.__name__ = name.split("/")[-1]
    return score


def _inside(section: RewardSection, where: str, argument: str = "reward") -> Any:
    """Build the reward that is the ``argument`` of another one, whose section is ``section``."""
    return build_reward(read(RewardSection, section.arguments[argument], where), where)


def _reward_model(section: RewardSection, where: str) -> str:
    """Return the name of a reward model, which TRL will load. Raises ValueError for mistakes that show without its
    weights: it has arguments, it is to judge answers, there is no such folder, or no model in it."""
    from transformers import AutoConfig

    name = section.name
    if to_come(name):
        return name
    if where != "rewards":
        raise ValueError(f"`{where}` is {name!r}: a reward model trains, it does not judge whether an answer is right")
    if section.arguments:
        raise ValueError(f"`{where}`: the reward model {name!r} takes no arguments; got {sorted(section.arguments)}")
    if is_local(name):
        with loading(name):
            AutoConfig.from_pretrained(name)
    elif looks_local(name):
        raise ValueError(f"`{where}`: no such folder {name!r}; a reward model is a folder here or a hub name")
    return name


def _built(kind: Any, section: RewardSection | PluginSection, where: str, beside: tuple[str, ...] = ("weight",)) -> Any:
    """Call the class ``kind`` with the section's arguments, as numbers and switches of the types that it declares.

    ``beside``: keys of the section that are no arguments, for the list of those allowed. Raises ValueError, which names
    the setting ``where``.
    """
    refuse_misfit(kind, section.arguments, f"`{where}`: {section.name!r}", beside)
    if to_come(section.arguments):
        return scoring_nothing(vars(kind).get("__name__", kind.__name__))
    try:
        return kind(**typed(section.arguments, kind, where))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{where}`: {section.name!r}: {error}") from error


def check_golds(rows: Dataset, rewards: list[Any], limit: float = MAX_UNPARSEABLE_GOLDS) -> None:
    """Raise ValueError if a reward that compares with gold answers (column ``solution``) cannot use more than the share
    ``limit`` of them. A reward of one task is asked about that task's rows."""
    for reward in rewards:
        check = getattr(reward, "check_golds", None)
        if check is None or "solution" not in rows.column_names:
            continue
        own = rows
        if isinstance(reward, ForTask):
            own = rows.select([row for row, task in enumerate(rows[COLUMN]) if task == reward.task])
        report = check(own["solution"][:])
        if report.share_unusable > limit:
            many = f"more than {limit:.0%} of its gold answers"
            raise ValueError(f"column 'solution' (`data`): {many} are unusable. {report}")


def trainer_class(name: str) -> Any:
    """Return the class that the recipe's ``trainer`` names: one of ours, or a team's ``module:Class``. Raises
    ValueError if there is none, or if it is no subclass of ``LabTrainer``."""
    from grpo_lab import LabTrainer

    if ":" in name:
        found = load_named(name, "trainer")
    else:
        try:
            found = getattr(import_module("grpo_lab"), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"`trainer` is {name!r}, which cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LabTrainer)):
        raise ValueError(f"`trainer` is {name!r}, which is {found!r}; it must be a subclass of LabTrainer")
    return found


def trainer_arguments(recipe: Recipe) -> dict[str, Any]:
    """Return those arguments of the trainer that are built from the recipe's sections: callbacks, tools, the
    environment and LoRA. Model, rewards, rows and configuration come from elsewhere."""
    return {
        "callbacks": [_callback(section) for section in recipe.callbacks],
        "tools": tools_of(recipe.tools) or None,
        "environment_factory": environment_of(recipe.environment_factory),
        "peft_config": lora_config(recipe.model),
    }


def tools_of(sections: Sequence[PluginSection]) -> list[Any]:
    """Load the functions that the model may call. Raises ValueError for a section with arguments."""
    for tool in sections:
        if tool.arguments:
            raise ValueError(f"`tools`: {tool.name!r} is called by the model; it takes no arguments here")
    return [load_named(tool.name, "tools") for tool in sections]


def environment_of(section: PluginSection | None) -> Any:
    """Load the function or class that makes an environment, bound to the section's arguments; None without a
    section."""
    if section is None:
        return None
    factory = load_named(section.name, "environment_factory")
    refuse_unknown_arguments(factory, section.arguments, f"`environment_factory`: {section.name!r}")
    given = typed(section.arguments, factory, "environment_factory")
    if given:
        return functools.partial(factory, **given)
    return factory


def _callback(section: PluginSection) -> Any:
    """Return a callback. A class is built with the section's arguments, an object is taken as it is. Raises ValueError
    if it is no ``TrainerCallback``."""
    from transformers import TrainerCallback

    found = load_named(section.name, "callbacks")
    if isinstance(found, type):
        found = _built(found, section, "callbacks", beside=())
    elif section.arguments:
        raise ValueError(f"`callbacks`: {section.name!r} is no class; it takes no arguments")
    if not isinstance(found, TrainerCallback):
        raise ValueError(f"`callbacks`: {section.name!r} is a {type(found).__name__}; it must be a TrainerCallback")
    return found
