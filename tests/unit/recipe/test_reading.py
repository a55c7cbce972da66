"""The reader of settings: one sentence a mistake, wherever the settings are made; and the one did-you-mean."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from grpo_lab.settings import (
    NULL_IS_DEFAULT,
    Count,
    Float,
    Named,
    Number,
    OnlySwitch,
    Positive,
    Switch,
    Temperature,
    UnknownSettingError,
    Whole,
    did_you_mean,
    from_json,
    read,
    refuse_unknown,
    settings,
)

ROOT = Path(__file__).resolve().parents[3]


@settings(bare="name", rest="arguments")
class Part:
    name: str
    weight: Float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


@settings()
class Whole_:
    rows: Positive
    parts: tuple[Part, ...] = ()
    kind: Literal["a", "b"] = "a"
    seed: Whole = 0
    count: Count = 0
    share: Number = 0.5
    heat: Temperature = 1.0
    quick: Switch = False
    strict: OnlySwitch = True
    team: Named | None = None
    nulled: Annotated[Count, NULL_IS_DEFAULT] = 7

    def __post_init__(self) -> None:
        if self.count > self.rows:
            raise ValueError("`count` is more than `rows`")


@settings(rest="numbers")
class Flat:
    """The keys of ``numbers`` stand beside ``title``."""

    title: str
    numbers: Whole_


@pytest.mark.parametrize(
    ("written", "attribute", "value"),
    [
        ({"rows": "1e3"}, "rows", 1000),
        ({"rows": 1e3}, "rows", 1000),
        ({"rows": "12345678901234567891"}, "rows", 12345678901234567891),  # not through a float
        ({"rows": 1, "share": 1}, "share", 1),
        ({"rows": 1, "share": "1e-3"}, "share", 0.001),
        ({"rows": 1, "quick": "yes"}, "quick", True),
        ({"rows": 1, "nulled": None}, "nulled", 7),
        ({"rows": 1, "parts": ["x"]}, "parts", (Part("x"),)),
        ({"rows": 1, "parts": [{"name": "x", "weight": 2, "n": 3}]}, "parts", (Part("x", 2.0, {"n": 3}),)),
        ({"rows": 1, "parts": [{"name": "x", "arguments": 3}]}, "parts", (Part("x", 1.0, {"arguments": 3}),)),
    ],
)
def test_what_is_read(written: dict[str, Any], attribute: str, value: Any) -> None:
    found = getattr(read(Whole_, written), attribute)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, "the recipe needs `rows`, and has none"),
        ({"rows": 0}, "`rows` is 0; it must be a whole number of at least 1"),
        ({"rows": True}, "`rows` is True; it must be a whole number of at least 1"),
        ({"rows": 1.5}, "`rows` is 1.5; it must be a whole number of at least 1"),
        ({"rows": 1, "share": True}, "`share` is True; it must be a number"),
        ({"rows": 1, "share": "half"}, "`share` is 'half'; it must be a number"),
        *(
            ({"rows": 1, "heat": heat}, f"`heat` is {heat!r}; it must be a finite number above 0")
            for heat in (float("nan"), float("inf"), 0, -1.0, "hot", True)
        ),
        ({"rows": 1, "strict": "no"}, "`strict` is 'no'; it must be true or false"),
        ({"rows": 1, "kind": "c"}, "`kind` is 'c'; it must be 'a' or 'b'"),
        ({"rows": 1, "team": "x"}, "`team` is 'x'; it must be 'module:attribute', or a mapping with that as `name`"),
        ({"rows": 1, "parts": {"name": "x"}}, "`parts` is {'name': 'x'}; it must be a list"),
        ({"rows": 1, "parts": ["x", {"weight": 1}]}, "`parts.1` needs `name`, and has none"),
        ({"rows": 1, "parts": [{"name": "x", "weight": []}]}, "`parts.0.weight` is []; it must be a number"),
        ({"rows": 1, "knid": "a"}, "the recipe has no setting 'knid'; did you mean 'kind'?"),
        ({"rows": 1, "count": 2}, "`count` is more than `rows`"),
        (3, "the recipe is 3; it must be a mapping of settings"),
    ],
)
def test_what_is_refused(written: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(Whole_, written)
    assert str(caught.value).startswith(said), str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_place_comes_first() -> None:
    with pytest.raises(ValueError, match=r"^`data\.inner\.rows` is 0;"):
        read(Whole_, {"rows": 0}, "data.inner")
    with pytest.raises(UnknownSettingError, match=r"^`data` has no setting 'knid'"):
        read(Whole_, {"rows": 1, "knid": 1}, "data")


def test_a_field_that_collects_keys_is_not_named() -> None:
    assert read(Flat, {"title": "t", "rows": 3, "count": 1}) == Flat("t", Whole_(3, count=1))
    with pytest.raises(ValueError, match=r"^`rows` is 0; it must be"):
        read(Flat, {"title": "t", "rows": 0})
    with pytest.raises(UnknownSettingError, match=r"^the recipe has no setting 'knid'; did you mean 'kind'"):
        read(Flat, {"title": "t", "rows": 3, "knid": 1})


def test_made_in_python_it_is_checked_alike_and_cannot_be_changed() -> None:
    first = Whole_(rows=3, count=2)
    with pytest.raises(ValueError, match=r"^`rows` is 0; it must be"):
        Whole_(rows=0)
    with pytest.raises(ValueError, match=r"^`count` is more than `rows`"):
        dataclasses.replace(first, rows=1)
    with pytest.raises(TypeError, match=r"^`Whole_` has no setting 'rowz'"):
        Whole_(rows=1, rowz=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.rows = 4  # type: ignore[misc]
    assert dataclasses.replace(first, rows=4) == Whole_(4, count=2)


def test_half_a_mapping_of_json_is_named() -> None:
    assert from_json('{"a": 1}', "kl") == {"a": 1}
    assert from_json("k2", "kl") == "k2"
    with pytest.raises(ValueError, match=r"`kl` is .* which is no JSON"):
        from_json('{"a": ', "kl")
    for inside in ('{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}'):  # the last one counted
        with pytest.raises(ValueError, match="`kl` has the key 'a' twice; leave one out"):
            from_json(inside, "kl")
    with pytest.raises(ValueError, match=r"`kl` is .* which is no JSON"):
        from_json('{"a": ' + "[" * 100_000, "kl")


def test_one_did_you_mean() -> None:
    assert did_you_mean("learning_rat", ["seed", "learning_rate"]) == "; did you mean 'learning_rate'?"
    assert did_you_mean("zzz", ["seed"]) == ""
    with pytest.raises(
        UnknownSettingError, match=r"`kl` has no setting 'sed'; did you mean 'seed'\? Allowed: \['seed'\]"
    ):
        refuse_unknown({"sed": 1}, ["seed"], "`kl`")
    found = subprocess.run(
        ["grep", "-rlE", "difflib|did you mean", "--include=*.py", "grpo_lab"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.split() == ["grpo_lab/settings.py"]
