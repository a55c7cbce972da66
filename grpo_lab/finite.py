"""Finding NaN and infinities: in tensors, in a model's scores of the next token, in the files of a model or
checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS = "grpo_lab_generation_"
"""Prefix of the files in a checkpoint that hold the generation batch in use. ``not_finite`` does not read them: NaN and
infinities have meanings there (a token that is not scored)."""


class NumbersError(FloatingPointError):
    """Error for numbers that are not finite: too many optimizer steps were left out (``guard.max_bad_steps``), or
    weights cannot be used. The exit code is 4."""


def is_bad(weight: Tensor, infinite: bool = True) -> Tensor:
    """Return whether ``weight`` holds NaN or, with ``infinite``, infinities, as a bool tensor without dimensions.

    Of a sharded tensor only this rank's shard is looked at. Tensors on the meta device, empty ones, whole numbers and
    8-bit floats (quantized weights) give False. Nothing is copied: the smallest and the largest value suffice.
    """
    if hasattr(weight, "to_local"):
        weight = weight.to_local()
    packed = not weight.is_floating_point() or weight.element_size() < 2  # of a quantized model
    if weight.is_meta or packed or not weight.numel():
        return torch.zeros((), dtype=torch.bool, device="cpu" if weight.is_meta else weight.device)
    ends = torch.stack(torch.aminmax(weight.detach()))
    if infinite:
        return ~ends.isfinite().all()
    return ends.isnan().any()


def in_words(bad: list[str], of: int) -> str:
    """Return words such as ``in 2 of 30 tensors (a, b)``: the names of at most three bad tensors, out of ``of``."""
    more = ""
    if bad[3:]:
        more = f" and {len(bad) - 3} more"
    return f"in {len(bad)} of {of} tensors ({', '.join(bad[:3])}{more})"


class FiniteScores:
    """A logits processor for ``model.generate`` that raises NumbersError if a row has NaN, +∞ or no finite score.

    Without it sampling from NaN ends in torch's error on a "probability tensor", and greedy decoding takes some token
    without an error.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool(scores.amax(-1).isfinite().all()):
            raise NumbersError(not_finite_scores())
        return scores


def not_finite_scores(model: torch.nn.Module | None = None) -> str:
    """Return a message for scores of the next token that are not finite. With ``model`` it names the weights that are
    bad or, if none is, the largest."""
    said = "the model's scores of the next token are not finite"
    if model is None:
        return f"{said}: a weight of it is NaN, infinite or far too large; look at how it was made, saved or converted"
    tensors = [(name, one) for name, one in model.named_parameters() if one.numel() and one.is_floating_point()]
    bad = [name for name, one in tensors if is_bad(one)]
    if bad:
        return f"{said}: its weights hold NaN or infinities, {in_words(bad, len(tensors))}"
    largest, name = max(((float(one.detach().abs().max()), name) for name, one in tensors), default=(0.0, "none"))
    largest_one = f"the largest is {largest:.3g}, in {name}"
    return f"{said}, though its weights are: {largest_one}; look at it, and at the model's buffers"


def not_finite(folder: Path) -> str | None:
    """Search a saved model or checkpoint for NaN and infinities. Return a sentence that names the first such file and
    its bad tensors; None if there are none.

    It reads weights, adapters, critic, reference and the optimizer's moments, as whole files or FSDP's shards. It does
    not read DeepSpeed's own files, moments pickled in classes of other packages, nor damaged files.
    """
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        try:
            found = {tensor: bool(is_bad(value)) for tensor, value in _tensors(file)}
        except Exception:  # whatever the readers of four formats raise: whoever loads the file reports it
            continue
        if bad := [tensor for tensor, is_one in found.items() if is_one]:
            return f"{name} holds NaN or infinities, {in_words(bad, len(found))}"
    return None


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the tensors in a file; nothing for a file of another kind. A ``.metadata`` stands for the
    sharded checkpoint that it describes."""
    if file.suffix == ".safetensors" and not file.name.startswith(ROWS):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as stored:
            yield from ((name, stored.get_tensor(name)) for name in stored.keys())  # noqa: SIM118 (no mapping)
    elif file.name.startswith(("optimizer", "pytorch_model", "adapter_model")) and file.suffix in (".pt", ".bin"):
        yield from _walk(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    elif file.name == ".metadata":
        yield from _shards(file.parent)


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and floats of nested mappings and lists, with the dotted path to each."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, float):
        yield name, torch.tensor(value)
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(item, f"{name}.{key}".lstrip("."))


def _shards(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the pieces of torch's distributed checkpoint with their names, one after the other."""
    from io import BytesIO

    from torch.distributed.checkpoint import FileSystemReader

    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        if index.offset is not None:  # else no tensor
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                yield index.fqn, torch.load(BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
