"""Checking a pipeline's stages, in order, before the first of them begins.

Each stage is checked as if the stages before it had left what they will leave, and for the number of processes that it
will run on. The checks themselves ask ``recipe.ahead`` for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.recipe.ahead import Ahead, looking_ahead, made_from
from grpo_lab.recipe.sections import ModelSection, Recipe
from grpo_lab.recipe.yaml import read_yaml


@contextmanager
def in_stage(name: str) -> Iterator[None]:
    """Add the stage's name to the message of a ValueError that the block raises, unless it has it already."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        if f"stages.{name}" in said or said.startswith(f"stage {name!r}"):
            raise
        raise ValueError(f"stage {name!r}: {said}") from error


class Outlook:
    """Checks stages one after another, and remembers what the earlier ones will leave.

    Attributes:
        left: place that an earlier stage will make → the model that the one there is made from; None: it is no model,
            or that is not known.
    """

    def __init__(self, here_only: bool) -> None:
        """``here_only``: a dry run, which need not reach the hub."""
        self.left: dict[str, ModelSection | None] = {}
        self._here_only = here_only

    def words(self, name: str, kind: Any, launch: str | None) -> str:
        """Check stage ``name``, and return what its ``kind`` says that it will do (its ``plan``; empty if it has none).

        ``launch``: the stage's accelerate file. Raises ValueError, which names the stage, for what would stop it.
        """
        processes = processes_of(launch, name)
        with in_stage(name), looking_ahead(Ahead(dict(self.left), processes, self._here_only)):
            if hasattr(kind, "plan"):
                return str(kind.plan())
            return ""

    def leave(self, kind: Any, folder: Path) -> None:
        """Remember what a stage will leave in its ``folder``, for the checks of later stages.

        ``kind``: the stage's settings; their ``leaves`` map each thing that it makes to a place in the folder.
        """
        model = self._model_of(kind)
        for thing, place in getattr(kind, "leaves", {}).items():
            self.left[str(folder / place)] = model if thing == "model" else None

    def _model_of(self, kind: Any) -> ModelSection | None:
        """Return the section of the model that the stage's new model will be made from; None if it makes no model, or
        if that is not known (a team's kind)."""
        if not type(kind).__module__.startswith("grpo_lab."):
            return None
        asked = kind.as_read() if hasattr(kind, "as_read") else kind
        named = getattr(asked, "model", None)
        if named is None:
            return None
        if isinstance(named, ModelSection):
            section = named
        else:
            section = ModelSection(path=str(named))
        with looking_ahead(Ahead(dict(self.left))):
            origin = made_from(section)
        if origin is None or isinstance(asked, Recipe):
            return origin
        return replace(origin, lora=None)


def processes_of(launch: str | None, name: str) -> int:
    """Return the number of processes that the accelerate file ``launch`` of stage ``name`` asks for; 1 without a file.

    Raises ValueError if that is no number of at least 1, or if accelerate would start a single process instead.
    """
    if not launch:
        return 1
    where = f"`stages.{name}.launch`"
    file = read_yaml(launch, where=where)
    said = file.get("num_processes", 1)
    if not isinstance(said, int) or said < 1:
        raise ValueError(f"{where}: `num_processes` of {launch!r} is {said!r}; it must be a whole number of at least 1")
    on_cpu = file.get("use_cpu") or file.get("distributed_type") in ("NO", "MULTI_CPU")
    if said > 1 and on_cpu and not file.get("mpirun_config"):
        raise ValueError(
            f"{where}: {launch!r} says `num_processes` {said}, and accelerate starts a single one (`use_cpu`, or "
            "`distributed_type` NO or MULTI_CPU, without `mpirun_config`). On CPUs write `distributed_type: MULTI_GPU` "
            "and `use_cpu: false`, and set ACCELERATE_USE_CPU=true in the environment"
        )
    return said
