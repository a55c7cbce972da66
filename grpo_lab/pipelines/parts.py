"""From a recipe's sections to real objects: rows, rewards, model and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_lab.pipelines.model_files import is_local, looks_local
from grpo_lab.pipelines.named_objects import load_named, working_folder_on_path
from grpo_lab.pipelines.recipe import (
    ModelSection,
    PartSection,
    Recipe,
    RewardSection,
)
from grpo_lab.pipelines.tokenizer_files import refuse_no_tokenizer
from grpo_lab.settings import hints_of, one_of, refuse_misfit, refuse_unknown, refuse_unknown_arguments, typed

if TYPE_CHECKING:
    from datasets import Dataset

REWARDS = {
    "accuracy": "AccuracyReward",
    "boxed": "BoxedReward",
    "code": "CodeReward",
    "coin": "CoinReward",
    "countdown": "CountdownReward",
    "hashes": "HashesReward",
    "proof": "ProofReward",
    "sorting": "SortingReward",
    "think_format": "ThinkFormatReward",
    "kimi_length": "KimiLengthReward",
    "language_consistency": "LanguageConsistencyReward",
    "equation_steps": "EquationSteps",
    "token_classification_steps": "TokenClassificationSteps",
    "worked_out": "worked_out",
}
SHAPING = ("soft_overlong", "repetition", "cosine_scaled")  # TRL's, built by ``trainer.trl_bridge.rewards``
MAX_UNPARSEABLE_GOLDS = 0.01


def build_reward(section: RewardSection, where: str = "rewards") -> Any:
    """The reward that ``section`` names: one of ours or TRL's, ``"module:attribute"`` of a team, or a reward model.

    A reward model (a folder, or a hub name ``owner/name``) stays the text that TRL loads a sequence classifier from.
    """
    if section.name in REWARDS:
        kind = getattr(import_module("grpo_lab.rewards"), REWARDS[section.name])
    elif section.name in SHAPING:
        from grpo_lab.trainer.trl_bridge import rewards as trl_rewards

        return _built(trl_rewards.shaping(section.name), section, where)
    elif ":" in section.name:
        kind = load_named(section.name, where)
    elif "/" in section.name or is_local(section.name):
        return _reward_model(section, where)
    else:
        raise ValueError(
            f"`{where}`: unknown reward {section.name!r}{one_of(section.name, sorted([*REWARDS, *SHAPING]))}, "
            "'module:attribute', or a reward model: a folder here or a hub name 'owner/name'"
        )
    if not isinstance(kind, type):
        refuse_unknown_arguments(kind, section.arguments, f"`{where}`: {section.name!r}", ("weight",))
        return functools.partial(kind, **section.arguments) if section.arguments else kind
    return _built(kind, section, where)


def _reward_model(section: RewardSection, where: str) -> str:
    """TRL loads it; what can be seen without the weights is looked at here."""
    from transformers import AutoConfig

    name = section.name
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


def _built(kind: Any, section: RewardSection, where: str) -> Any:
    refuse_misfit(kind, section.arguments, f"`{where}`: {section.name!r}", ("weight",))
    try:
        return kind(**typed(section.arguments, kind, where))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{where}`: {section.name!r}: {error}") from error


def check_golds(rows: Dataset, rewards: list[Any], limit: float = MAX_UNPARSEABLE_GOLDS) -> None:
    """Every verifier must accept its own gold answers before training starts.

    Raises:
        ValueError: more than ``limit`` (a fraction) of the golds cannot be read.
    """
    for reward in rewards:
        check = getattr(reward, "check_golds", None)
        if check is None or "solution" not in rows.column_names:
            continue
        report = check(rows["solution"])
        if report.share_unusable > limit:
            many = f"more than {limit:.0%} of its gold answers"
            raise ValueError(f"column 'solution' (`data`): {many} are unusable. {report}")


def load_model(section: ModelSection, seed: int) -> tuple[Any, Any]:
    """Model and tokenizer. A tiny model is built from config; a path is loaded by transformers."""
    if section.tiny is not None:
        from grpo_lab.testing import tiny_model

        refuse_unknown(section.tiny, hints_of(tiny_model).keys() - {"tokenizer", "return"}, "`model.tiny`")
        settings = {"seed": seed, **typed(section.tiny, tiny_model, "model.tiny")}
        return tiny_model(**settings, tokenizer=section.tokenizer)
    assert section.path is not None
    with loading(section.path):
        return model_class(section.path)[0].from_pretrained(section.path), load_tokenizer(section)


def model_class(path: str) -> tuple[Any, Any]:
    """transformers' class for a saved model, and its config: a language model, or one that takes images, too."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path)
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind, config
    raise ValueError(f"{path!r} holds a {config.model_type!r} model ({config.architectures}), which writes no text")


def load_tokenizer(section: ModelSection) -> Any:
    """The section's own tokenizer, or the model's."""
    from transformers import AutoTokenizer

    refuse_no_tokenizer(str(section.tokenizer or section.path))
    with loading(str(section.tokenizer or section.path)):
        return AutoTokenizer.from_pretrained(section.tokenizer or section.path)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """What is raised for a model that is not there, or whose files are broken, as a ``ValueError`` of one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # transformers' and those of its readers in Rust, which have no common class
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if is_local(model):
            raise ValueError(f"{model!r} cannot be loaded: {said}") from error
        raise ValueError(
            f"{model!r} is neither a folder with a saved model here nor a model that the hub gives ({said}). Without "
            "network, name a local folder"
        ) from error


def lora_config(section: ModelSection) -> Any:
    """``peft.LoraConfig`` of the section; None trains all weights. ValueError for a key that it does not have."""
    if section.lora is None:
        return None
    from peft import LoraConfig

    refuse_unknown(section.lora, [f.name for f in dataclasses.fields(LoraConfig)], "`model.lora`")
    return LoraConfig(**{"task_type": "CAUSAL_LM", **typed(section.lora, LoraConfig, "model.lora")})


def trainer_class(recipe: Recipe) -> Any:
    """``trainer:`` of the recipe: a name of ours or ``module:Class``, a ``LabTrainer`` in any case."""
    from grpo_lab import LabTrainer

    if ":" in recipe.trainer:
        found = load_named(recipe.trainer, "trainer")
    else:
        try:
            found = getattr(import_module("grpo_lab"), recipe.trainer)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"`trainer` is {recipe.trainer!r}, which cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LabTrainer)):
        raise ValueError(f"`trainer` is {recipe.trainer!r}, which is {found!r}; it must be a subclass of LabTrainer")
    return found


def build_part(section: PartSection, where: str) -> Any:
    """A callback or an environment: a class is built with the section's arguments, anything else is taken as it is."""
    found = load_named(section.name, where)
    if not isinstance(found, type):
        if section.arguments:
            raise ValueError(f"`{where}`: {section.name!r} is no class; it takes no arguments")
        return found
    refuse_misfit(found, section.arguments, f"`{where}`: {section.name!r}")
    try:
        return found(**typed(section.arguments, found, where))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`{where}`: {section.name!r}: {error}") from error


def trainer_parts(recipe: Recipe) -> dict[str, Any]:
    """What the trainer is given beside model, rewards, rows and configuration, by the names of its arguments."""
    environment = recipe.environment_factory
    for tool in recipe.tools:
        if tool.arguments:
            raise ValueError(f"`tools`: {tool.name!r} is called by the model; it takes no arguments here")
    found: dict[str, Any] = {
        "callbacks": [_callback(section) for section in recipe.callbacks],
        "tools": [load_named(tool.name, "tools") for tool in recipe.tools] or None,
        "environment_factory": None,
        "peft_config": lora_config(recipe.model),
    }
    if environment is not None:
        factory = load_named(environment.name, "environment_factory")
        refuse_unknown_arguments(factory, environment.arguments, f"`environment_factory`: {environment.name!r}")
        given = typed(environment.arguments, factory, "environment_factory")
        found["environment_factory"] = functools.partial(factory, **given) if given else factory
    return found


def _callback(section: PartSection) -> Any:
    from transformers import TrainerCallback

    found = build_part(section, "callbacks")
    if not isinstance(found, TrainerCallback):
        raise ValueError(f"`callbacks`: {section.name!r} is a {type(found).__name__}; it must be a TrainerCallback")
    return found


def lab_config(recipe: Recipe, **more: Any) -> Any:
    """The recipe's flat settings as ``LabConfig``, with its output folder and reward weights.

    Args:
        more: settings in place of the recipe's (a dry run's, which has no GPU).
    """
    from grpo_lab import LabConfig

    asked = numbers_read(recipe).arguments
    for one, other in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if asked.get(one) and asked.get(other):
            raise ValueError(f"`{one}` and `{other}` are both true; at most one of them can be")
    settings = {"report_to": "none", **asked, "output_dir": str(recipe.output_dir), **more}
    if recipe.rewards:
        weights = [reward.weight for reward in recipe.rewards]
        beside = settings.setdefault("reward_weights", weights)
        pairs = zip(weights, beside or [], strict=False)  # more where the trainer declares some
        for place, (own, other) in enumerate(pairs):
            if own not in (1.0, other):  # 1: nothing was said there
                raise ValueError(
                    f"`rewards.{place}.weight` is {own} and `reward_weights.{place}` is {other}: they are one setting; leave one out"
                )
    _check_eval(recipe, settings)
    return LabConfig(**settings)


def numbers_read(recipe: Recipe) -> Recipe:
    """``recipe`` with every flat setting in the type that ``LabConfig`` declares, and the small mappings' alike."""
    from grpo_lab import LabConfig
    from grpo_lab.trainer.settings.gone import GONE
    from grpo_lab.trainer.settings.knobs import kinds_of
    from grpo_lab.trainer.settings.parse import LabSettings

    known = {field.name for kind in (LabConfig, Recipe) for field in dataclasses.fields(kind)} - {"arguments"}
    refuse_unknown(recipe.arguments, known, "the recipe", GONE)
    arguments = typed(recipe.arguments, LabConfig)
    for name in set(arguments) & set(hints_of(LabConfig)):
        if arguments[name] is True and name in LabSettings.__dataclass_fields__:
            raise ValueError(f"`{name}` is True: it has no value (`--{name} VALUE`)")
    working_folder_on_path()  # a team's module may stand in these two; the other mappings are read with `LabConfig`
    for name, kind in kinds_of(arguments.get("objective"), arguments.get("advantage")).items():
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = typed(arguments[name], kind, name)
    return dataclasses.replace(recipe, arguments=arguments)


def _check_eval(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Evaluation on the way: its rows and ``eval_strategy`` belong together."""
    when = str(getattr(settings.get("eval_strategy"), "value", settings.get("eval_strategy") or "no"))
    if when != "no" and recipe.eval_dataset is None:
        raise ValueError(
            f"`eval_strategy` is {when!r} and the recipe has no `eval_dataset`: rows to evaluate on during training, such "
            "as {loader: gsm8k, split: test, limit: 64}; `evaluation` is before and after it"
        )
    if when == "no" and recipe.eval_dataset is not None and not settings.get("eval_on_start"):
        raise ValueError("`eval_dataset` has no effect with `eval_strategy: no`; set it to steps or epoch")
