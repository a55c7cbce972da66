"""Sections of a recipe. It is one short YAML that describes a whole run, by settings and without code.

Our sections are the fields of ``Recipe``; every other key is a field of ``LabConfig``, flat, as TRL users write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from grpo_lab.engines.generators import check_template_kwargs
from grpo_lab.recipe.elsewhere import RECIPE, SAVED, SUPERVISED, TELLING, refuse_words_from_elsewhere
from grpo_lab.recipe.mixture import without_mixture
from grpo_lab.recipe.yaml import check_folder_name, read_yaml
from grpo_lab.registry import modules_beside
from grpo_lab.settings import (
    NULL_IS_DEFAULT,
    Count,
    Float,
    Named,
    OnlySwitch,
    Positive,
    Switch,
    Temperature,
    Whole,
    from_json,
    must_be,
    read,
    settings,
)
from grpo_lab.turns.turn_settings import TurnSettings


def _with_steps(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a loader's arguments with ``steps`` (the fewest and the most) as a tuple: YAML has only lists."""
    if not isinstance(steps := arguments.get("steps", ()), list | tuple):
        raise PydanticCustomError("must_be", "its `steps` must be two numbers, [fewest, most]")
    if "steps" in arguments:
        return {**arguments, "steps": tuple(steps)}
    return arguments


@settings()
class ModelSection:
    """``model``: the model that is trained or sampled.

    Args:
        path: local folder or hub name. Exactly one of ``path`` and ``tiny``.
        tiny: arguments of ``grpo_lab.testing.tiny_model``: a small random model of a real architecture.
        tokenizer: folder or hub name of another tokenizer (default: the model's own).
        lora: arguments of ``peft.LoraConfig``; ``None`` trains all weights.
        expected: published scores of this model before and after, in words, for ``--dry-run`` and the report.
    """

    path: str | None = None
    tiny: Mapping[str, Any] | None = None
    tokenizer: str | None = None
    lora: Mapping[str, Any] | None = None
    expected: str | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.tiny is None):
            said = "exactly one of `path` (folder or hub name) and `tiny` (a model built from config)"
            raise ValueError(f"`model` needs {said}")

    def refuse(self, where: str, **unread: str) -> None:
        """Raise ValueError for a setting that nothing reads at ``where``. ``unread``: such settings → the reason."""
        for name, why in unread.items():
            if getattr(self, name) is not None:
                raise ValueError(f"`{where}.{name}` has no effect: {why}; leave it out")

    @property
    def name(self) -> str:
        return self.path or f"tiny {(self.tiny or {}).get('architecture', 'qwen2')}"


@settings(rest="arguments")
class DataSection:
    """``data``: rows, loaded by one of our loaders (``recipe.data.LOADERS``) or a team's ``"module:attribute"``.

    Args:
        template: prompt template (``r1``, ``qwen_math``, ``none``, ``chat``); scores move by tens of points with it.
        limit: keep the first ``limit`` rows.
        arguments: all other keys, passed to the loader (``source``, ``split``, ``n``, ``seed``, ``steps``, …).
    """

    loader: str
    template: str = "chat"
    limit: Positive | None = None
    arguments: Annotated[Mapping[str, Any], AfterValidator(_with_steps)] = field(default_factory=dict)


@settings(bare="name", rest="arguments")
class RewardSection:
    """A reward. In a recipe it is a bare name, or a mapping of ``name``, ``weight`` and the reward's own arguments.

    Args:
        name: one of ours, ``"module:attribute"``, or a reward model's folder or hub name.
    """

    name: Annotated[str, Field(strict=True), must_be("a name, or a mapping {name: …, weight: …, …}")]
    weight: Float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


#: Tokens of a completion if neither ``max_new_tokens`` nor ``max_completion_length`` is set.
NEW_TOKENS = 512
#: Number of prompts that transformers generates for at once.
BATCH_SIZE = 64
STRICT_ACCURACY = RewardSection("accuracy", arguments={"mode": "strict"})


@settings()
class HeldOutSection:
    """``evaluation`` of a task: its held-out rows, and the reward that judges answers (default: the task's first)."""

    data: DataSection
    reward: RewardSection | None = None


@settings()
class TaskSection:
    """A task of ``mixture``: its rows, rewards and held-out rows. The other keys become those of ``TaskSettings``."""

    data: DataSection
    rewards: tuple[RewardSection, ...]
    weight: Any = None
    objective: Any = None
    advantage: Any = None
    loss_weight: Any = None
    denominators: Literal["all", "own"] | None = None
    evaluation: HeldOutSection | None = None


@settings(bare="name", rest="arguments")
class PluginSection:
    """An object of a team's own, ``"module:attribute"``, with its arguments: a callback, a tool or an environment."""

    name: Named
    arguments: Mapping[str, Any] = field(default_factory=dict)


Plugins = Annotated[tuple[PluginSection, ...], NULL_IS_DEFAULT]


@settings(rest="arguments")
class ColdStartSection:
    """``cold_start``: supervised training before RL, on worked solutions (a column ``worked_solution``), with TRL's
    SFTTrainer.

    ``arguments``: fields of ``trl.SFTConfig`` (``max_steps``, ``learning_rate``, …).
    """

    data: DataSection
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_words_from_elsewhere(self.arguments, "`cold_start`", SUPERVISED)


def _listed(value: Any) -> Any:
    """Return a single value as a list of it alone, and None as an empty list."""
    if value is None:
        return ()
    return value if isinstance(value, list | tuple) else (value,)


LISTED = BeforeValidator(_listed)
NONE = BeforeValidator(lambda value: None if value == "none" else value)
_FACTS = re.compile(
    r"(sampled_)?accuracy(_low|_high)?|pass_at_\d+|length|reflection|ece_\w+|rows|tokens|steps|difference|p_value"
    r"|(no_)?thinking|thinking_(length|tokens.*)"
)


def _of_template(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        check_template_kwargs(kwargs)
    except ValueError as error:
        raise PydanticCustomError("must_be", "{said}", {"said": str(error)}) from error
    return kwargs


TemplateKwargs = Annotated[Mapping[str, Any], AfterValidator(_of_template)]


def template_kwargs_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``chat_template_kwargs`` of a training's flat settings as a dict; there it may be JSON text, as in TRL."""
    return dict(from_json(arguments.get("chat_template_kwargs") or {}, "chat_template_kwargs"))


@settings()
class EvaluationSection:
    """``evaluation``: held-out rows, and greedy (and sampled) accuracy before and after training.

    Args:
        reward: how answers are judged, as in ``rewards`` (default: strict accuracy).
        measures: name → a further reward, reported as a mean (``format``, ``language``, …).
        max_new_tokens: most tokens of a completion (default: the training's ``max_completion_length``).
        n_samples: completions per problem that are sampled, beside the greedy one.
        batch_size: completions made at once; also how many are saved together, and given to a rank together.
        before: whether the model that RL starts from is evaluated, too.
        every: optimizer steps between greedy evaluations during training (default: there are none).
        templates, thinking, thinking_budget: one or several values each; all combinations are evaluated. ``thinking``
            is the chat template's ``enable_thinking``; a budget of ``none`` is no limit.
        budget_text: text that closes the thinking at the budget (default: as ``rollout.budget_text``).
        by: a column of the rows that says how hard they are (`steps`, `level`): accuracy is also given for each of its
            values.
        log_probs: also record the model's log-probs of its answers, for calibration.
        use_vllm, engine: use vLLM instead of transformers, with these options; not for ``every``.
        chat_template_kwargs: further arguments of the chat template (default: those of the run that is evaluated).
        tools, environment_factory, turns: what the model may call, and limits of turns (default: the training's).
    """

    data: DataSection
    reward: RewardSection = STRICT_ACCURACY
    max_new_tokens: Positive | None = None
    batch_size: Positive = 128
    n_samples: Count = 0
    temperature: Temperature = 1.0
    before: OnlySwitch = True
    every: Positive | None = None
    measures: Mapping[str, RewardSection] = field(default_factory=dict)
    templates: Annotated[tuple[str, ...], LISTED] = ()
    thinking: Annotated[tuple[Switch, ...], LISTED] = ()
    thinking_budget: Annotated[tuple[Annotated[Count | None, NONE], ...], LISTED] = ()
    budget_text: str | None = None
    by: str | None = None
    log_probs: Switch | None = None  # as in the records of earlier runs
    use_vllm: Switch | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Plugins = ()
    environment_factory: PluginSection | None = None
    turns: TurnSettings | None = None

    @property
    def in_turns(self) -> bool:
        """Whether the model may call tools or an environment."""
        return bool(self.tools or self.environment_factory)

    def rendered_as(self, kwargs: Mapping[str, Any] | None) -> EvaluationSection:
        """Return this section with the run's ``chat_template_kwargs``, unless it has its own."""
        if self.chat_template_kwargs is not None or not kwargs:
            return self
        return replace(self, chat_template_kwargs=dict(kwargs))

    def __post_init__(self) -> None:
        refuse_engine_alone(self)
        if taken := [name for name in self.measures if _FACTS.fullmatch(name)]:
            raise ValueError(f"`evaluation.measures` has {taken[0]!r}, a number of every evaluation; rename it")
        if self.budget_text is not None and all(budget is None for budget in self.thinking_budget):
            raise ValueError("`evaluation.budget_text` has an effect only with `evaluation.thinking_budget`")
        if self.turns is not None and not self.in_turns:
            raise ValueError("`evaluation.turns` has an effect only with `tools` or an `environment_factory`")
        for name in ("thinking_budget", "every"):
            if self.in_turns and getattr(self, name):
                raise ValueError(
                    f"`evaluation.{name}` does not combine with `tools` or an `environment_factory`: leave it out"
                )


@settings(rest="arguments")
class Recipe:
    """A recipe of `grpo-lab train`.

    Args:
        arguments: all other keys of the recipe, which are fields of ``LabConfig``.
        eval_dataset: rows on which TRL evaluates during training, with the training rewards (``eval_strategy``).
        callbacks, tools, environment_factory: as the arguments of these names of ``trl.GRPOTrainer``.
    """

    name: str
    model: ModelSection
    data: DataSection
    rewards: tuple[RewardSection, ...]
    trainer: str = "LabTrainer"
    cold_start: ColdStartSection | None = None
    evaluation: EvaluationSection | None = None
    eval_dataset: DataSection | None = None
    callbacks: Plugins = ()
    tools: Plugins = ()
    environment_factory: PluginSection | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = self.evaluation
        if own is None or own.in_turns or not (self.tools or self.environment_factory):
            return
        turns = turns_in(self.arguments)
        asked = replace(own, tools=self.tools, environment_factory=self.environment_factory, turns=turns)
        object.__setattr__(self, "evaluation", asked)

    @property
    def output_dir(self) -> Path:
        return Path(str(self.arguments.get("output_dir") or f"runs/{self.name}"))


def turns_in(arguments: Mapping[str, Any]) -> TurnSettings:
    """Return the limits of turns in a training's flat settings (``rollout.turns``, ``max_tool_calling_iterations``)."""
    turns = read(TurnSettings, (arguments.get("rollout") or {}).get("turns") or {}, "rollout.turns")
    calls = arguments.get("max_tool_calling_iterations")
    if turns.max_turns is None and calls is not None:
        return replace(turns, max_turns=int(calls) + 1)
    return turns


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read the recipe in the YAML file ``path``, with ``overrides`` (dotted key → value).

    It may name modules that lie beside it (``module:attribute``). Raises ValueError if there is no such file, it holds
    no mapping, a key is unknown (with the nearest match), or a section is missing.
    """
    written = read_yaml(path, overrides)
    modules_beside(Path(path))
    return recipe_from(written, default_name=Path(path).stem)


def check_command(written: Mapping[str, Any], command: str) -> None:
    """Raise ValueError if a recipe is one for another command or framework, or names no usable output folder."""
    refuse_words_from_elsewhere(written, words=RECIPE if command == "train" else SAVED)
    for key in (*written, written.get("method")):
        other = TELLING.get(str(key), command)
        if other != command:
            seen = f"method: {key}" if key == written.get("method") else key
            said = f"since it has `{seen}`"
            raise ValueError(f"this is a recipe of `grpo-lab {other}`, {said}; `grpo-lab {command}` takes another")
    check_folder_name(written.get("output_dir", f"runs/{written.get('name')}"))


def with_name(written: Mapping[str, Any], default_name: str) -> dict[str, Any]:
    """Return a recipe's mapping with a name and, if it has no ``output_dir``, the folder of that name in ``runs``."""
    name = written.get("name", default_name)
    return {"output_dir": f"runs/{name}", **written, "name": name}


def recipe_from(written: Mapping[str, Any], default_name: str = "run") -> Recipe:
    """Make a recipe from a plain mapping; it is refused as in ``read_recipe``."""
    check_command(written, "train")
    tasks = written.get("mixture")
    for name, task in tasks.items() if isinstance(tasks, Mapping) else ():
        if not read(TaskSection, task, f"mixture.{name}").rewards:
            raise ValueError(f"`mixture.{name}.rewards` is {task['rewards']!r}; a task needs at least one reward")
    return read(Recipe, {"name": default_name, **without_mixture(written)})


@settings()
class SamplingSettings:
    """Settings by which completions are sampled; in a recipe their keys stand at the top level.

    Args:
        n_samples: completions per problem.
        temperature: 1.0 samples from the model's own distribution.
        max_completion_length: most tokens of a completion.
        batch_size: completions that transformers makes at once (vLLM batches by itself).
        problems_per_save: problems between two writes to disk; a killed run repeats at most so many.
        seed: it, the prompts and the two sizes above determine all samples.
        use_vllm, engine: use vLLM instead of transformers, with these options (`dtype`, `max_model_len`, …).
        use_cpu: stay on the CPU even if there is a GPU.
        chat_template_kwargs: further arguments of the chat template, such as ``enable_thinking: false``.
    """

    n_samples: Positive = 10
    temperature: Temperature = 1.0
    max_completion_length: Positive = NEW_TOKENS
    batch_size: Positive = BATCH_SIZE
    problems_per_save: Positive = 32
    seed: Whole = 0
    use_vllm: Switch = False
    engine: Mapping[str, Any] = field(default_factory=dict)
    use_cpu: Switch = False
    chat_template_kwargs: TemplateKwargs = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_engine_alone(self)


OF_A_SAMPLED_MODEL = {
    "lora": "all weights are asked, and trained",
    "tokenizer": "a model is asked with its own (save the other one into its folder)",
}
"""Settings of ``model`` that have no effect where a saved model is sampled, each with the reason."""


def refuse_every(evaluation: EvaluationSection | None) -> None:
    """Raise ValueError if ``evaluation.every`` is set, for a command that does not evaluate during training."""
    if evaluation is not None and evaluation.every is not None:
        raise ValueError("`evaluation.every` has no effect: only `grpo-lab train` measures on the way; leave it out")


def refuse_engine_alone(asked: Any) -> None:
    """Raise ValueError if ``engine`` has options and ``use_vllm`` is not true."""
    if asked.engine and not asked.use_vllm:
        raise ValueError("`engine` has an effect only with `use_vllm: true`; leave it out")
