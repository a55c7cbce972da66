"""A generation batch in a file: the same values, types, shapes and shared objects; anything else is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from grpo_lab.trainer.resume.generation_buffer import flattened, rebuilt

CPU = torch.device("cpu")


def through_a_file(value: Any, folder: Path) -> Any:
    description, tensors = flattened(value)
    save_file(tensors, folder / "t.safetensors", metadata={"description": json.dumps(description)})
    with safe_open(folder / "t.safetensors", framework="pt") as stored:
        loaded = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return rebuilt(json.loads(stored.metadata()["description"]), loaded, CPU)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.nan_to_num(7).equal(right.nan_to_num(7))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def test_values_types_and_views(tmp_path: Path) -> None:
    """Slices of one storage, a transpose, bfloat16, bool, NaN, scalars, nothing at all, None and nested lists."""
    base = torch.arange(12.0).view(6, 2)
    value = [
        {"a": base[:3], "b": None, "images": [torch.ones(2, 3), [torch.zeros(1, dtype=torch.long)]], "counts": [1, 2]},
        {"a": base[3:], "t": base.T, "half": base.bfloat16(), "flag": base > 3, "none": base[:0], "n": torch.tensor(3)},
        {"nan": torch.tensor([float("nan"), -0.0]), "pair": (1, 2.5), "text": "é", "yes": True, "inf": float("inf")},
    ]
    found = through_a_file(value, tmp_path)
    assert same(value, found)
    assert str(found[2]["nan"][1].item()) == "-0.0"


def test_one_object_stays_one_object(tmp_path: Path) -> None:
    shared, other = torch.tensor(5), torch.tensor(5)
    found = through_a_file([{"n": shared}, {"n": shared}, {"n": other}], tmp_path)
    assert found[0]["n"] is found[1]["n"]
    assert found[0]["n"] is not found[2]["n"]


def test_tensors_are_copies(tmp_path: Path) -> None:
    tensor = torch.zeros(3)
    _, tensors = flattened([tensor])
    tensor += 1
    assert tensors["000000"].sum() == 0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([{"a": object()}], r"batch \[0\]\['a'\] is a builtins.object"),
        ([torch.nn.Parameter(torch.ones(1))], r"batch \[0\] is a torch.nn.parameter.Parameter"),
        ([{"s": torch.ones(2).to_sparse()}], r"batch \[0\]\['s'\] is a torch.Tensor"),
        ([{1: 2}], r"batch \[0\] is a builtins.dict"),
        ([{"x": {1, 2}}], r"batch \[0\]\['x'\] is a builtins.set"),
    ],
)
def test_anything_else_is_named(value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        flattened(value, "batch ")


@pytest.mark.parametrize(
    "node", [3, {"pickle": "x"}, {"list": 3}, {"tensor": 1, "on": "cpu"}, {"tensor": "1", "on": "meta"}]
)
def test_a_foreign_description_is_refused(node: Any) -> None:
    with pytest.raises(ValueError, match="no part of a description"):
        rebuilt({"list": [node]}, {}, CPU)


def test_a_missing_tensor_is_an_error() -> None:
    with pytest.raises(KeyError):
        rebuilt({"tensor": "000000", "on": "cpu"}, {}, CPU)
