"""From a recipe's sections to real objects: rows, rewards, model and tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.pipelines.recipe import DataSection, EvaluationSection, ModelSection, Recipe, RewardSection

if TYPE_CHECKING:
    from datasets import Dataset

LOADERS = {"file": "load_file", "gsm8k": "load_gsm8k", "math": "load_math", "word_problems": "word_problems"}
REWARDS = {
    "accuracy": "AccuracyReward",
    "think_format": "ThinkFormatReward",
    "kimi_length": "KimiLengthReward",
    "language_consistency": "LanguageConsistencyReward",
}
SHAPING = ("soft_overlong", "repetition", "cosine_scaled")
"""TRL's, built by ``grpo_lab.trainer.trl_rewards``."""
MAX_UNPARSEABLE_GOLDS = 0.01


def load_rows(section: DataSection, where: str = "data") -> Dataset:
    """The rows that ``section`` describes. Raises ``ValueError`` naming the setting."""
    if section.loader not in LOADERS:
        raise ValueError(f"`{where}.loader` is {section.loader!r}; it must be one of {sorted(LOADERS)}")
    load = getattr(import_module("grpo_lab.data"), LOADERS[section.loader])
    try:
        rows = load(**section.arguments, template=section.template)
    except TypeError as error:
        raise ValueError(f"`{where}` does not fit the loader {section.loader!r}: {error}") from error
    if section.limit is not None:
        rows = rows.select(range(min(section.limit, len(rows))))
    return rows


def build_reward(section: RewardSection, where: str = "rewards") -> Any:
    """The reward that ``section`` names: one of ours, or ``"module:attribute"`` of a team."""
    if section.name in REWARDS:
        kind = getattr(import_module("grpo_lab.rewards"), REWARDS[section.name])
    elif section.name in SHAPING:
        from grpo_lab.trainer import trl_rewards

        return _built(trl_rewards.SHAPING[section.name], section, where)
    elif ":" in section.name:
        module, _, attribute = section.name.partition(":")
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"`{where}`: {section.name!r} cannot be loaded: {error}") from error
    else:
        raise ValueError(
            f"`{where}`: unknown reward {section.name!r}; known: {sorted([*REWARDS, *SHAPING])}, or 'module:attribute'"
        )
    if not isinstance(kind, type):
        return functools.partial(kind, **section.arguments) if section.arguments else kind
    return _built(kind, section, where)


def _built(kind: Any, section: RewardSection, where: str) -> Any:
    try:
        return kind(**section.arguments)
    except TypeError as error:
        raise ValueError(f"`{where}`: {section.name!r} does not take these arguments: {error}") from error


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
            raise ValueError(
                f"column 'solution' (`data`): more than {limit:.0%} of its gold answers are unusable. {report}"
            )


def check_evaluation(section: EvaluationSection | None) -> None:
    """What is wrong with the held-out rows or their reward is said now, and not when the training is over."""
    if section is not None:
        load_rows(section.data, "evaluation.data")
        build_reward(section.reward, "evaluation.reward")


def load_model(section: ModelSection, seed: int) -> tuple[Any, Any]:
    """Model and tokenizer. A tiny model is built from config; a path is loaded by transformers."""
    if section.tiny is not None:
        from grpo_lab.testing import tiny_model

        settings = {"seed": seed, **section.tiny}
        return tiny_model(**settings, tokenizer=section.tokenizer)
    from transformers import AutoModelForCausalLM

    assert section.path is not None
    with loading(section.path):
        return AutoModelForCausalLM.from_pretrained(section.path), load_tokenizer(section)


def load_tokenizer(section: ModelSection) -> Any:
    """The section's own tokenizer, or the model's."""
    from transformers import AutoTokenizer

    with loading(str(section.tokenizer or section.path)):
        return AutoTokenizer.from_pretrained(section.tokenizer or section.path)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """What transformers raises for a model that is not there, as the user's mistake that it is (``ValueError``)."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{model!r} is neither a folder with a saved model here nor a model that the hub gives "
            f"({str(error).splitlines()[0]}). Without network, name a local folder"
        ) from error


def lora_config(section: ModelSection) -> Any:
    """``peft.LoraConfig`` of the section; None trains all weights."""
    if section.lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **section.lora)


def trainer_class(recipe: Recipe) -> Any:
    """``trainer:`` of the recipe: a name of ours or ``module:Class``."""
    module, _, name = recipe.trainer.rpartition(":")
    try:
        return getattr(import_module(module or "grpo_lab"), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"`trainer` is {recipe.trainer!r}, which cannot be loaded: {error}") from error


def lab_config(recipe: Recipe) -> Any:
    """The recipe's flat settings as ``LabConfig``, with its output folder and reward weights."""
    from grpo_lab import LabConfig

    settings = {"output_dir": str(recipe.output_dir), "report_to": "none", **recipe.arguments}
    settings.setdefault("reward_weights", [reward.weight for reward in recipe.rewards])
    return LabConfig(**settings)


def is_local(path: str | None) -> bool:
    """Whether a model or data set is a folder here rather than a hub name."""
    return path is not None and Path(path).is_dir()
