"""`register_objective`, `register_advantage`, `register_aggregation`: what they take, what they refuse, and knobs as
dataclass fields."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from grpo_lab import LabConfig, register_advantage, register_aggregation, register_objective
from grpo_lab.advantages import GroupZScore
from grpo_lab.batch import Denominators, TokenBatch, masked_sum
from grpo_lab.objectives import AGGREGATIONS, SURROGATES, Clipped, DetachedWeight, LiteralRow, Unclipped, is_ours
from grpo_lab.settings import UnknownSettingError
from grpo_lab.trainer.exactness.loss_proof import prove_loss
from grpo_lab.trainer.settings.algorithm import Algorithm

pytestmark = pytest.mark.usefixtures("tables")


@dataclass(frozen=True)
class Thing:
    """A team's surrogate with a knob of its own, and one that TRL has, too."""

    my_knob: float = 0.25
    epsilon: float = 0.05

    def __call__(self, batch: TokenBatch) -> Tensor:
        return -batch.advantages * batch.logps * self.my_knob


@dataclass(frozen=True)
class Spread:
    """An advantage rule with a knob."""

    power: float = 1.0

    def __call__(self, rewards: Tensor, group_size: int) -> Tensor:
        grouped = rewards.view(-1, group_size)
        return ((grouped - grouped.mean(1, keepdim=True)) * self.power).flatten()


@dataclass(frozen=True)
class Scaled:
    """An aggregation with a knob."""

    scale: float = 1.0

    def __call__(self, loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        return self.scale * masked_sum(loss, mask) / denominators.rows


def config(**changes: Any) -> LabConfig:
    return LabConfig("unused", **{"use_cpu": True, "bf16": False, "report_to": "none", **changes})


def algorithm(**changes: Any) -> Algorithm:
    made = config(**changes)
    return made.algorithm


def push(**changes: Any) -> Any:
    objective = algorithm(**changes).objective
    assert objective is not None
    return objective.surrogate


# -- registering -------------------------------------------------------------------------------------------------------


def test_an_objective_with_a_knob_that_only_its_dataclass_knows() -> None:
    assert register_objective("team_thing", Thing, aggregation="sequence_sum", advantage="group_mean") is Thing
    found = algorithm(objective={"name": "team_thing", "my_knob": 0.3})
    assert found.objective is not None
    assert found.objective.surrogate == Thing(my_knob=0.3)
    assert found.names["objective"] == "team_thing"
    assert found.names["knobs"] == "my_knob=0.3, epsilon=0.05"
    assert (found.names["aggregation"], found.names["advantage"]) == ("sequence_sum", "group_mean")
    assert config(objective="team_thing").loss_type == "grpo_lab:team_thing"


def test_as_decorators_and_all_three_together() -> None:
    @register_aggregation("summed")
    def summed(loss: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        return masked_sum(loss, mask) / denominators.rows

    register_aggregation("scaled")(Scaled)
    register_advantage("spread_out")(Spread)

    @register_objective("plain", advantage="spread_out", aggregation="summed", ratio="product")
    def plain(batch: TokenBatch) -> Tensor:
        return -batch.ratio * batch.advantages

    found = algorithm(objective="plain")
    assert found.objective is not None
    assert (found.objective.surrogate, found.objective.aggregate, found.advantage) == (plain, summed, Spread())
    assert found.objective.ratio == "product"
    found = algorithm(
        objective={
            "name": "plain",
            "aggregation": {"name": "scaled", "scale": 2.0},
            "advantage": {"name": "spread_out", "power": 3},
        }
    )
    assert found.objective is not None
    assert (found.objective.aggregate, found.advantage) == (Scaled(2.0), Spread(3))
    assert (found.names["aggregation"], found.names["advantage"]) == ("Scaled(scale=2.0)", "spread_out(power=3)")
    assert algorithm(objective="plain", advantage={"power": 2.0}).advantage == Spread(2.0)


def test_another_point_of_parts_that_are_there() -> None:
    register_objective("grpo_by_product", "clipped", ratio="product", aggregation="sequence_sum")
    assert push(objective={"name": "grpo_by_product", "epsilon": 0.3}) == Clipped(0.3)


def test_the_same_definition_run_again_takes_the_place_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell, or a module that is reloaded after an edit."""
    text = (
        "from dataclasses import dataclass\n"
        "from grpo_lab import register_advantage, register_objective\n"
        "@register_objective('cell', ratio='{ratio}')\n"
        "@dataclass(frozen=True)\n"
        "class Cell:\n"
        "    knob: float = {knob}\n"
        "    def __call__(self, batch):\n"
        "        return -batch.advantages * batch.logps * self.knob\n"
        "@register_advantage('cells')\n"
        "def cells(rewards, group_size):\n"
        "    return {knob} * rewards\n"
    )
    monkeypatch.setitem(sys.modules, "notebook", ModuleType("notebook"))
    for knob, ratio in ((1.0, "token"), (2.0, "sequence")):
        exec(text.format(knob=knob, ratio=ratio), {"__name__": "notebook"})
        found = algorithm(objective="cell", advantage="cells")
        assert found.objective is not None
        assert found.advantage is not None
        assert (found.objective.surrogate.knob, found.objective.ratio) == (knob, ratio)  # type: ignore[attr-defined]
        assert found.advantage(torch.ones(2), 2).tolist() == [knob, knob]


@pytest.mark.parametrize("wrong", ["heavy", [1.0], True])
def test_a_knob_of_the_wrong_type_is_named(wrong: Any) -> None:
    register_objective("thing", Thing)
    register_advantage("spread_out", Spread)
    register_aggregation("scaled", Scaled)
    for place, settings in (
        ("objective.my_knob", {"my_knob": wrong}),
        ("advantage.power", {"advantage": {"name": "spread_out", "power": wrong}}),
        ("aggregation.scale", {"aggregation": {"name": "scaled", "scale": wrong}}),
    ):
        with pytest.raises(ValueError, match=f"`{place}` is .*; it must be a number"):
            algorithm(objective={"name": "thing", **settings})
    assert algorithm(
        objective={"name": "thing", "advantage": {"name": "spread_out", "power": "2e0"}}
    ).advantage == Spread(2.0)


def test_a_misspelt_knob_is_answered_with_what_this_part_takes() -> None:
    register_objective("thing", Thing)
    with pytest.raises(UnknownSettingError, match="did you mean 'my_knob'") as told:
        algorithm(objective={"name": "thing", "my_knop": 1.0})
    assert "tau" not in str(told.value)
    assert "epsilon_high" not in str(told.value)
    with pytest.raises(UnknownSettingError):
        config(objective={"name": "mirror_descent", "taw": 0.1})


def test_two_rules_are_one_too_many() -> None:
    with pytest.raises(
        ValueError, match=r"`advantage` is 'raw' and `objective.advantage` is 'group_mean'.*leave one out"
    ):
        algorithm(objective={"name": "grpo", "advantage": "group_mean"}, advantage="raw")
    algorithm(objective={"name": "grpo", "advantage": "raw"}, advantage={"name": "raw"})


def test_the_same_twice_is_once_and_another_under_the_name_is_refused() -> None:
    for _ in range(2):
        register_objective("thing", Thing)
        register_advantage("rule", Spread)
        register_aggregation("mean", Scaled)
    for again, taken in (
        (lambda: register_objective("thing", Unclipped), "'thing' is registered already"),
        (lambda: register_objective("thing", Thing, ratio="product"), "'thing' is registered already with other parts"),
        (lambda: register_objective("grpo", Thing), "'grpo' is registered already"),
        (lambda: register_objective("clipped", Thing), "'clipped' is registered already"),
        (lambda: register_advantage("group_mean", Spread), "'group_mean' is registered already"),
        (lambda: register_advantage("process", Spread), "'process' is registered already"),
        (lambda: register_aggregation("token_mean", Scaled), "'token_mean' is registered already"),
    ):
        with pytest.raises(ValueError, match=taken):
            again()
    assert SURROGATES["clipped"] is Clipped


def test_what_cannot_be_a_part_is_refused() -> None:
    @dataclass
    class Silent:
        knob: float = 1.0

    @dataclass
    class Named:
        ratio: float = 1.0

        def __call__(self, batch: Any) -> Any: ...

    for wrong, said in (
        (lambda: register_objective("x", 3), "is 3; it must be a class with `__call__`, a function"),
        (lambda: register_objective("x", Silent), "must be a class with `__call__`"),
        (lambda: register_objective("x", Named), "has a field 'ratio', which cannot be a knob"),
        (lambda: register_objective("a:b", Thing), "must be a name without ':'"),
        (lambda: register_objective("x", "cliped"), "'clipped'"),
        (lambda: register_advantage("", Spread), "must be a name"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()
    assert "x" not in SURROGATES


def test_a_rule_is_callable_whatever_its_level() -> None:
    @dataclass(frozen=True)
    class Mine:
        level: ClassVar[str] = "token"

        def __call__(self, table: Any) -> Any:
            return table

    class Silent:
        level = "token"

    with pytest.raises(ValueError, match="must be a class with `__call__`"):
        register_advantage("mine", Silent)
    Mine.level = "word"
    with pytest.raises(ValueError, match=r"`level` is 'word'; it must be one of \('row', 'table', 'token'\)"):
        register_advantage("mine", Mine)


# -- knobs -------------------------------------------------------------------------------------------------------------


def test_whose_default_is_in_force() -> None:
    """What is written in TRL's clip settings reaches fields of these names; else a team's surrogate has its own
    defaults, ours TRL's."""
    register_objective("thing", Thing)
    assert push(objective="thing").epsilon == 0.05
    assert config(objective="thing").epsilon == 0.05, "TRL's field says what is in force"
    assert push(objective="thing", epsilon=0.3).epsilon == 0.3
    assert push(objective="thing", epsilon=0.2).epsilon == 0.2, "TRL's default, written down"
    assert push(objective={"name": "thing", "epsilon": 0.4}).epsilon == 0.4
    assert push(objective="cispo") == DetachedWeight(0.2)
    assert push(objective="cispo", epsilon_high=5.0).bound == 5.0
    assert push(objective={"surrogate": Clipped}, epsilon=0.3) == Clipped(0.3)
    assert push(objective={"surrogate": "grpo_lab.objectives:Clipped", "delta": 3.0}) == Clipped(0.2, None, 3.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": {"name": "grpo", "my_knob": 1}}, r"`objective.my_knob`=1 has no effect on the surrogate "
            r"'Clipped', which reads \['epsilon', 'epsilon_high', 'delta'\]"),
        ({"objective": {"name": "thing", "delta": 1.5}}, "`objective.delta`=1.5 has no effect on the surrogate "
            "'Thing'"),
        ({"objective": {"surrogate": Thing(), "my_knob": 1}}, "has no effect on the surrogate 'Thing' given as an "
            "object; set it there"),
        ({"objective": "thing", "delta": 1.5}, r"`delta`=1.5 has no effect on the surrogate 'Thing', which reads \['"),
        ({"objective": "reinforce", "epsilon": 0.3}, "`epsilon`=0.3 has no effect on the surrogate 'Reinforce', "
            "which reads no settings"),
        ({"objective": "mirror_descent", "epsilon_high": 0.3}, "`epsilon_high`=0.3 has no effect on the surrogate "
            "'MirrorDescent'"),
        ({"objective": {"surrogate": Clipped(0.1)}, "epsilon": 0.3}, "given as an object with epsilon=0.1; set it "
            "there"),
        ({"objective": {"name": "thing", "knobs": {"my_knob": 1}}}, "`objective` has no setting 'knobs'"),
        ({"objective": {"name": "grpo", "aggregation": {"name": "token_mean", "scale": 2}}},
            "`aggregation` has no setting 'scale'"),
        ({"objective": {"name": "grpo", "aggregation": {"scale": 2}}}, "as a mapping it needs a `name`"),
        ({"advantage": {"name": "group_mean", "std": "population"}}, "`advantage.std`=population has no effect on "
            "the advantage rule 'GroupMean'"),
        ({"advantage": {"name": "group_zscore", "std": "biased"}}, r"`advantage\.std` is 'biased'"),
        ({"objective": {"name": "thing", "ratio": "product", "epsilon": "wide"}, }, "`objective.epsilon` is 'wide'; "
            "it must be a number"),
        ({"objective": {"name": "thing", "my_knob": math.inf}}, "`objective.my_knob` is inf; it must be a finite "
            "number"),
        ({"objective": {"name": "thing", "my_knob": math.nan}}, "`objective.my_knob` is nan; it must be a"),
        ({"advantage": {"name": "group_zscore", "epsilon": math.inf}}, "`advantage.epsilon` is inf; it must be a "
            "finite number"),
    ],
    ids=str,
)  # fmt: skip
def test_a_knob_that_would_do_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    register_objective("thing", Thing)
    with pytest.raises(ValueError, match=said):
        config(**changes)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_the_standard_deviation_by_setting(std: str) -> None:
    found = algorithm(objective={"name": "grpo", "advantage": {"name": "group_zscore", "std": std}})
    assert found.advantage == GroupZScore(std=std)
    assert found.names["advantage"] == "group_zscore" + ("" if std == "sample" else "(std=population)")


# -- naming a module ---------------------------------------------------------------------------------------------------

MODULE = """
from dataclasses import dataclass
from grpo_lab import register_objective

@register_objective("team_push")
@dataclass(frozen=True)
class Push:
    strength: float = 1.0
    def __call__(self, batch):
        return -self.strength * batch.advantages * batch.logps

register_objective("team_point", "clipped", aggregation="token_mean")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "register_team.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("register_team", None)


@pytest.mark.usefixtures("module")
def test_an_objective_by_the_module_that_registers_it() -> None:
    for name in ("register_team:team_push", "register_team:Push"):
        made = config(objective={"name": name, "strength": 2.0})
        found = made.algorithm
        assert found.names["objective"] == "team_push"
        assert found.names["knobs"] == "strength=2.0"
        assert made.objective["name"] == name, "what was written stays: a resumed run loads the module again"
    assert push(objective="register_team:team_point") == Clipped()
    assert push(objective="team_push").strength == 1.0
    for name, said in (
        (
            "register_team:team_pull",
            r"registers no objective 'team_pull' .*registered are \['team_point', 'team_push'\]",
        ),
        ("register_team:grpo", "registers no objective 'grpo'"),
        ("no_such_team:x", "'no_such_team' cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=said):
            config(objective=name)


# -- proof and questions -----------------------------------------------------------------------------------------------


def test_a_teams_part_is_a_teams_after_it_is_registered() -> None:
    """It is asked before every step whether rows may be cut, as any part of a team: being in the table does not make it
    ours."""
    register_objective("thing", Thing)
    register_aggregation("scaled", Scaled)
    assert not is_ours(Thing())
    assert not is_ours(AGGREGATIONS["scaled"])
    assert is_ours(Clipped(0.3))
    assert is_ours(AGGREGATIONS["token_mean"])


def test_a_team_may_write_its_formula_out_and_a_subclass_does_not_inherit_it() -> None:
    @dataclass(frozen=True)
    class Written(Thing):
        wrong: float = 0.0

        def literal(self, row: LiteralRow, t: int) -> float:
            return -row.advantage * row.logps[t] * self.my_knob + self.wrong

    @dataclass(frozen=True)
    class Below(Written):
        def __call__(self, batch: TokenBatch) -> Tensor:
            return 2 * super().__call__(batch)

    def said(part: Any) -> str:
        objective = algorithm(objective={"surrogate": part}).objective
        assert objective is not None
        return prove_loss(objective.token_loss, objective)

    assert "proved on a toy batch" in said(Written())
    assert "not compared to a formula" in said(Below())
    assert "not compared to a formula" in said(Thing())
    with pytest.raises(RuntimeError, match="not the configured objective"):
        said(Written(wrong=1.0))


def test_whole_responses_by_what_the_surrogate_says() -> None:
    @dataclass(frozen=True)
    class Whole(Thing):
        whole_response: ClassVar[bool] = True

    with pytest.raises(
        ValueError,
        match="`vllm_importance_sampling_mode` is 'token_mask', and objective 'custom' is about whole",
    ):
        config(objective={"surrogate": Whole}, use_vllm=True, vllm_importance_sampling_mode="token_mask")
    config(objective={"surrogate": Thing}, use_vllm=True, vllm_importance_sampling_mode="token_mask")
