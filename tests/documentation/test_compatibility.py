"""docs/compatibility.md and docs/measured.md against what they speak of: ranges, the refusal, the marks, the
recipes."""

from __future__ import annotations

import re
import runpy
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from documentation.blocks import ROOT

PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RANGES = {found.name: found.specifier for found in map(Requirement, PROJECT["dependencies"])}
SHOWN = ("trl", "transformers", "peft", "accelerate", "datasets", "math-verify")


@pytest.mark.parametrize("package", SHOWN)
def test_the_page_says_the_range(package: str) -> None:
    cell = re.search(rf"^\| {package} \| ([^|]+) \|", PAGE, re.M)
    assert cell is not None
    said = {part.strip().replace("≥", ">=").replace(" ", "") for part in cell[1].split(",")}
    assert said == {str(part) for part in RANGES[package]}


def test_the_range_of_trl_is_what_the_bridge_lets_in() -> None:
    release = runpy.run_path(str(ROOT / "grpo_lab" / "trainer" / "trl_bridge" / "names.py"))
    minors = [f"1.{minor}" for minor in range(30)]
    assert tuple(minor for minor in minors if f"{minor}.0" in RANGES["trl"]) == release["SUPPORTED_TRL"]
    with pytest.raises(ImportError) as refused:
        release["refuse_untested"]("1.13.0")
    assert f"ImportError: {refused.value}\n" in PAGE
    assert f"a user of trl 1.13.0 reads: ImportError: {refused.value}\n" in PAGE


def test_rows_of_the_versions_test_are_within_the_ranges() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "test_versions.py"))
    assert PAGE.count(script["BEGIN"]) == PAGE.count(script["END"]) == 1
    pins = [Requirement(pin) for row in script["ROWS"].values() for pin in row if "==" in pin]
    assert pins
    for pin in pins:
        asked = str(pin.specifier).removeprefix("==")
        assert asked in RANGES[pin.name], f"{pin} is outside of {RANGES[pin.name]}"


def test_what_make_setup_installs_is_within_the_ranges() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for pin in (Requirement(line) for line in lines if "==" in line):
        assert Version(str(pin.specifier).removeprefix("==").replace("*", "0")) in RANGES[pin.name]


def test_python_is_said_once_everywhere() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    for file in ("README.md", "docs/compatibility.md", "scripts/setup_env.sh"):
        assert re.findall(r"Python (?:≥|>=) ([\d.]*\d)", (ROOT / file).read_text(encoding="utf-8")) == ["3.11"], file


def recipes() -> set[str]:
    folder = ROOT / "recipes"
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return {path.as_posix() for path in found if path.parts[0] != "accelerate" and path.name != "lab"}


def test_every_recipe_stands_in_the_table_once() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "measured.md").read_text(encoding="utf-8"), re.M)
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(listed) == sorted(recipes())
