"""A recipe of `grpo-lab rounds`: a model that samples, chooses among its own answers, trains on them, and begins again.

The fields of `RoundsRecipe` are sections; every other key is one of `SamplingSettings`. The methods differ in settings
alone (`METHODS`): what a recipe leaves out is the method's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_lab.recipe.sections import (
    STRICT_ACCURACY,
    ColdStartSection,
    DataSection,
    EvaluationSection,
    ModelSection,
    RewardSection,
    SamplingSettings,
    check_command,
    with_name,
)
from grpo_lab.recipe.yaml import read_yaml
from grpo_lab.settings import NULL_IS_DEFAULT, Hours, Positive, Switch, one_of, read, settings
from grpo_lab.stages.select import Contrast, Keep

METHODS: dict[str, dict[str, Any]] = {
    "rft": {"rounds": {"count": 1, "train_from": "base"}, "keep": {"gold": True, "right_calculations": True}},
    "online_rft": {"rounds": {"count": 10, "train_from": "last"}, "keep": {}},
    "expert_iteration": {"rounds": {"count": 3, "train_from": "last"}, "keep": {}},
    "dpo": {"rounds": {"count": 2, "train_from": "last"}, "pairs": {}},
    "simpo": {"rounds": {"count": 2, "train_from": "last"}, "pairs": {}},
}
"""method → what its sections are where the recipe says nothing else. Sources: docs/algorithms."""
IMITATE = ("rft", "online_rft", "expert_iteration")
PREFER = ("dpo", "simpo")


@settings()
class RoundSettings:
    """``rounds``: how often, on how many questions, and where each training begins.

    Args:
        count: rounds.
        questions: questions a round, new ones until all were asked; None: all of ``data``.
        train_from: ``last``: the model that the round before left. ``base``: the same model each time (STaR, arXiv
            2203.14465).
    """

    count: Positive
    train_from: Literal["base", "last"]
    questions: Positive | None = None


@settings()
class ContrastSettings(Contrast):
    """``pairs``: which answers are held against each other, and against whom the gain is measured.

    Args:
        reference: DPO's π₀: the model that the ``round`` began with (iterated DPO), or the start model (``base``) in
            all of them.
    """

    reference: Literal["round", "base"] = "round"


@settings(rest="sampling")
class RoundsRecipe:
    """A whole run of rounds.

    Args:
        method: one of `METHODS`.
        model, cold_start: as in a recipe of `grpo-lab train`; what comes out is the start model, which samples first.
        base: what ``train_from: base`` begins with (default: the start model). The RFT paper takes the pretrained model
            that the start model was made from.
        training: fields of TRL's ``SFTConfig``, ``DPOConfig`` or ``CPOConfig``, of each round.
        evaluation: held-out rows, asked before the first and after each round.
        keep_models: false removes a round's model when the next one is trained.
        max_hours, stop_file: as in a recipe of `grpo-lab train`: what asks the run to stop (docs/resume.md).
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

    def __post_init__(self) -> None:
        name, rounds = self.method, self.rounds
        other = "pairs" if name in IMITATE else "keep"
        if getattr(self, other) is not None:
            raise ValueError(f"`{other}` has no effect with `method: {name}`; leave it out")
        if name == "rft" and (rounds.count, rounds.train_from) != (1, "base"):
            raise ValueError(
                f"`rounds` is count={rounds.count}, train_from={rounds.train_from!r}; `method: rft` samples once, "
                "from the start "
                "model, and trains the base. `online_rft` and `expert_iteration` sample anew in each round"
            )
        if name == "online_rft" and rounds.train_from != "last":
            raise ValueError(
                "`rounds.train_from` is 'base'; `method: online_rft` goes on with the last model (`expert_iteration` "
                "may begin "
                "from the base in each round)"
            )
        if name in PREFER and self.sampling.n_samples < 2:
            raise ValueError(
                f"`n_samples` is {self.sampling.n_samples}; `method: {name}` holds a right answer against a wrong "
                "one of the same "
                "question and needs at least 2"
            )
        self._check_models()

    def _check_models(self) -> None:
        if self.base is not None and (self.rounds.train_from != "base" or self.base.path is None):
            raise ValueError(
                "`base` has an effect only with `rounds.train_from: base`, and is a saved model: give `path`"
            )
        for where, section in (("model", self.model), ("base", self.base)):
            if section is not None and section.lora is not None:
                raise ValueError(f"`{where}.lora`: rounds train all weights; leave it out")
        if self.pairs is not None and self.pairs.reference == "base" and self.method == "simpo":
            raise ValueError(
                "`pairs.reference` has no effect with `method: simpo`, which has no reference; leave it out"
            )


def read_rounds_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RoundsRecipe:
    """The recipe in ``path`` with ``--key value`` overrides. ValueError as `rounds_recipe_from`."""
    return rounds_recipe_from(read_yaml(path, overrides), Path(path).stem)


def rounds_recipe_from(written: Mapping[str, Any], default_name: str = "rounds") -> RoundsRecipe:
    """A recipe from a plain mapping, with the method's own settings where it says none.

    Raises:
        ValueError: an unknown method or key (with the nearest match), a missing section, settings that do not go
            together.
    """
    check_command(written, "rounds")
    method = written.get("method")
    if method not in METHODS:
        raise ValueError(f"`method` is {method!r}{one_of(method, sorted(METHODS))}")
    sections = {name: _over(given, written.get(name), name) for name, given in METHODS[str(method)].items()}
    return read(RoundsRecipe, {"n_samples": 8, **with_name(written, default_name), **sections})


def _over(given: Mapping[str, Any], said: Any, name: str) -> Any:
    if said is None:
        return dict(given)
    if not isinstance(said, Mapping):
        raise ValueError(f"`{name}` is {said!r}; it must be a mapping of settings")
    return {**given, **said}


def seed_of(seed: int, number: int, what: str) -> int:
    """The seed of one thing in one round, below 2³¹: of the run's seed, the round and the thing's name alone."""
    digest = hashlib.sha256(f"{seed}/{number}/{what}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
