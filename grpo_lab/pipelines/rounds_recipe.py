"""Recipe of `grpo-lab rounds`, its words for ``--dry-run``, and the questions and seeds that follow from it.

The methods differ in their settings alone: what a recipe leaves out is taken from `METHODS`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lab.recipe.elsewhere import SUPERVISED, refuse_words_from_elsewhere
from grpo_lab.recipe.sections import (
    OF_A_SAMPLED_MODEL,
    STRICT_ACCURACY,
    ColdStartSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    refuse_every,
    with_name,
)
from grpo_lab.runs.console import describe, model_of, settings_in_words
from grpo_lab.runs.stage import Words
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, Positive, Switch, one_of, read, settings
from grpo_lab.stages.select import Contrast, Keep

METHODS: dict[str, dict[str, Any]] = {
    "rft": {"rounds": {"count": 1, "train_from": "base"}, "keep": {"gold": True, "right_calculations": True}},
    "online_rft": {"rounds": {"count": 10, "train_from": "last"}, "keep": {}},
    "expert_iteration": {"rounds": {"count": 3, "train_from": "last"}, "keep": {}},
    "dpo": {"rounds": {"count": 2, "train_from": "last"}, "pairs": {}},
    "simpo": {"rounds": {"count": 2, "train_from": "last"}, "pairs": {}},
}
"""Method → the settings of its sections where the recipe says nothing else. Sources: docs/algorithms."""
IMITATE = ("rft", "online_rft", "expert_iteration")
"""Methods that fine-tune on right answers; the others compare pairs of answers."""


@settings()
class RoundSettings:
    """Section ``rounds`` of a recipe.

    Attributes:
        count: number of rounds.
        train_from: model that each training begins with: that of the ``last`` round, or the same ``base`` each time
            (STaR, arXiv 2203.14465).
        questions: how many questions a round asks, new ones until all were asked; None: all of them in each round.
    """

    count: Positive
    train_from: Literal["base", "last"]
    questions: Positive | None = None


@settings()
class ContrastSettings(Contrast):
    """Section ``pairs`` of a recipe: which answers are compared (`Contrast`), and DPO's reference policy.

    ``reference``: the model that the ``round`` began with (iterated DPO), or the start model (``base``) in all rounds.
    """

    reference: Literal["round", "base"] = "round"


@settings(rest="sampling")
class RoundsRecipe:
    """A recipe of `grpo-lab rounds`; keys that are no fields are `SamplingSettings`'.

    Attributes:
        method: how a round trains; its own settings are in `METHODS`.
        model, cold_start: as in a recipe of `grpo-lab train`; they make the start model, which samples first.
        data: the questions.
        rounds: how many rounds there are, and what each begins with.
        reward: the reward that judges answers.
        keep: which right answers are trained on; only of the methods that imitate.
        pairs: which answers are compared; only of the other methods.
        base: the model that ``train_from: base`` begins with (default: the start model). The RFT paper takes the
            pretrained model that the start model was made from.
        sampling: how answers are sampled; 8 to a question by default.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``, of each round.
        evaluation: held-out rows, asked of the model of each round; None: none are.
        keep_models: false removes a round's model when the next one is trained.
        max_hours, stop_file: when to stop, as in a recipe of `grpo-lab train` (docs/resume.md).
    """

    name: str
    output_dir: Path
    method: Literal["rft", "online_rft", "expert_iteration", "dpo", "simpo"]
    model: ModelSection
    data: DataSection
    rounds: RoundSettings
    reward: Annotated[RewardSection, NULL_IS_DEFAULT] = STRICT_ACCURACY
    keep: Keep | None = None
    pairs: ContrastSettings | None = None
    base: ModelSection | None = None
    cold_start: ColdStartSection | None = None
    sampling: SamplingSettings = field(default_factory=lambda: SamplingSettings(n_samples=8))
    training: Annotated[Mapping[str, Any], NULL_IS_DEFAULT] = field(default_factory=dict)
    evaluation: EvaluationSection | None = None
    keep_models: Switch = True
    max_hours: Hours | None = None
    stop_file: str | None = None

    @property
    def way(self) -> Keep | ContrastSettings:
        """The rule that chooses training rows from the samples."""
        if self.method in IMITATE:
            return self.keep or Keep()
        return self.pairs or ContrastSettings()

    def __post_init__(self) -> None:
        name = self.method
        rounds = self.rounds
        base = self.base
        pairs = self.pairs
        other = "pairs" if name in IMITATE else "keep"
        lora = self.model.lora or (base and base.lora)
        for wrong, said in (
            (getattr(self, other) is not None, f"`{other}` has no effect with `method: {name}`; leave it out"),
            (
                name == "rft" and (rounds.count, rounds.train_from) != (1, "base"),
                f"`rounds` is count={rounds.count}, train_from={rounds.train_from!r}; `method: rft` samples once, from "
                "the start model, and trains the base. `online_rft` and `expert_iteration` sample anew in each round",
            ),
            (
                name == "online_rft" and rounds.train_from != "last",
                "`rounds.train_from` is 'base'; `method: online_rft` goes on with the last model (`expert_iteration` "
                "may begin from the base in each round)",
            ),
            (
                name not in IMITATE and self.sampling.n_samples < 2,
                f"`n_samples` is {self.sampling.n_samples}; `method: {name}` holds a right answer against a wrong one "
                "of the same question and needs at least 2",
            ),
            (
                base is not None and (rounds.train_from != "base" or base.path is None),
                "`base` has an effect only with `rounds.train_from: base`, and is a saved model: give `path`",
            ),
            (lora, f"`{'model' if self.model.lora else 'base'}.lora`: rounds train all weights; leave it out"),
            (
                name == "simpo" and pairs is not None and pairs.reference == "base",
                "`pairs.reference` has no effect with `method: simpo`, which has no reference; leave it out",
            ),
        ):
            if wrong:
                raise ValueError(said)
        if self.cold_start is None and self.model.path is not None:
            self.model.refuse("model", tokenizer=OF_A_SAMPLED_MODEL["tokenizer"])
        if base is not None:
            base.refuse("base", tokenizer=OF_A_SAMPLED_MODEL["tokenizer"])
        refuse_every(self.evaluation)
        refuse_words_from_elsewhere(self.training, "`training`", SUPERVISED)


def rounds_recipe_from(written: Mapping[str, Any], default_name: str = "rounds") -> RoundsRecipe:
    """Make a recipe from a plain mapping, with the method's settings where it leaves them out.

    ``default_name``: its name if it has none. Raises ValueError for an unknown method or key (with the nearest match),
    a missing section, or settings that exclude each other.
    """
    check_command(written, "rounds")
    method = written.get("method")
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}{one_of(method, sorted(METHODS))}")
    sections = {}
    for name, given in METHODS[str(method)].items():
        said = {}
        if written.get(name) is not None:
            said = written[name]
        if not isinstance(said, Mapping):
            raise ValueError(f"`{name}` is {said!r}; it must be a mapping of settings")
        sections[name] = {**given, **said}
    return read(RoundsRecipe, {"n_samples": 8, **with_name(written, default_name), **sections})


def stages_in_words(recipe: RoundsRecipe, rows: int | None) -> Words:
    """Describe the sampling, selection and training of a round, title → text. ``rows``: number of questions in the
    data; None: not known here."""
    start = "the start model"
    last = "the model of the round before"
    asked = recipe.rounds.questions
    if asked is None:
        questions = "all questions"
        number = rows
    else:
        questions = f"{asked:,} questions, other ones until all were asked"
        number = asked
    if number is not None:
        each = number * recipe.sampling.n_samples
        questions += f", {each:,} completions a round and {each * recipe.rounds.count:,} in all"
    sampled = start if recipe.rounds.count == 1 else last
    chosen = "right answers"
    if not isinstance(recipe.way, Keep):
        chosen = "pairs of a right and a wrong answer of one question"
    if recipe.rounds.train_from != "base":
        begin = last
    elif recipe.base is None:
        begin = start
    else:
        begin = model_of(str(recipe.base.path))
    return {
        "1. sample": f"{questions}, by {sampled}; {describe(recipe.sampling)}",
        "2. select": f"{chosen}: {describe(recipe.way)}",
        "3. train": f"{recipe.method}, from {begin}; {settings_in_words(recipe.training)}",
    }


def questions_of(number: int, total: int, asked: int | None, seed: int) -> list[int]:
    """Return the indices of the questions that a round asks: all, or the next ``asked`` of a random order.

    A new order is drawn where fewer than ``asked`` questions are left of the last one.

    Args:
        number: number of the round, from 1.
        total: number of questions in the data.
        asked: questions of a round; None: all.
        seed: seed of the run, by which the order is drawn.
    """
    if asked is None:
        return list(range(total))
    lap, place = divmod(number - 1, total // asked)
    order = random.Random(f"{seed}/questions/{lap}").sample(range(total), total)
    return order[place * asked : (place + 1) * asked]


def seed_of(seed: int, number: int, what: str) -> int:
    """Return a seed below 2³¹ that depends only on the run's seed, the round's number and the name ``what``."""
    digest = hashlib.sha256(f"{seed}/{number}/{what}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
