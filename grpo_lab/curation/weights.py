"""The average of two checkpoints, tensor by tensor: the first of Kimi k1.5's long2short ways (section 2.4, "Model
Merging": a long-CoT and a short-CoT model averaged with equal weights, no training).

    out = alpha · a + (1 − alpha) · b,   in float32, stored in the dtype of a
"""

from __future__ import annotations

import json
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_A_MODEL = (
    *("config.json", "configuration.json", "generation_config.json", _INDEX),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "spiece.model", "sentencepiece*.model", "chat_template.*", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json"),
    *("*.py", "LICENSE*", "NOTICE*", "USE_POLICY*"),
)


def average_weights(a_dir: str | Path, b_dir: str | Path, out_dir: str | Path, alpha: float = 0.5) -> Path:
    """Write the average of two Hugging Face checkpoint folders (safetensors, one file or sharded) to a new folder.

    What else a model is (`is_of_a_model`) is copied from `a_dir`, and nothing that tells how it was trained. The shards
    are cut as in `a_dir`. The folder appears under its name only when it is complete. Buffers that are not floating
    point have to be equal.

    Args: alpha: share of a, in [0, 1]; 1 gives the weights of a, 0 those of b.
    Raises: ValueError if alpha is out of range, a folder has no safetensors, the tensors differ in name or shape, a
        buffer differs, or `out_dir` exists and is not empty. NumbersError where the average is not finite.
    """
    from grpo_lab.finite import NumbersError, not_finite

    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} is not in [0, 1]")
    a, b, out = Path(a_dir), Path(b_dir), Path(out_dir)
    files_a, files_b = check_mergeable(a, b)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} exists and is not empty; choose a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        unfinished = Path(folder) / "checkpoint"
        unfinished.mkdir()
        for shard in sorted(set(files_a.values())):
            names = [name for name, file in files_a.items() if file == shard]
            _write_shard(a / shard, {name: b / files_b[name] for name in names}, unfinished / shard, alpha)
        for file in a.iterdir():
            if file.is_file() and is_of_a_model(file.name):
                shutil.copy2(file, unfinished / file.name)
        if bad := not_finite(unfinished):
            raise NumbersError(
                f"the average of {a} and {b} is not written: {bad}: look at how these two models were made"
            )
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    return out


def check_mergeable(a_dir: str | Path, b_dir: str | Path) -> tuple[dict[str, str], dict[str, str]]:
    """Tensor → file of both folders. ValueError where a folder has no safetensors, or their tensors are not the
    same."""
    a, b = Path(a_dir), Path(b_dir)
    files_a, files_b = _tensor_files(a), _tensor_files(b)
    if files_a.keys() != files_b.keys():
        only_a, only_b = sorted(files_a.keys() - files_b.keys()), sorted(files_b.keys() - files_a.keys())
        raise ValueError(
            f"the checkpoints hold different tensors: only in {a}: {only_a[:5]}; only in {b}: {only_b[:5]}"
        )
    return files_a, files_b


def is_of_a_model(name: str) -> bool:
    """Whether a file of that name belongs to a checkpoint besides its weights: `save_pretrained` of transformers'
    models, tokenizers and processors writes it, or it is code or a licence that goes with the weights."""
    return any(fnmatch(name, pattern) for pattern in _OF_A_MODEL)


def _tensor_files(folder: Path) -> dict[str, str]:
    """tensor name -> file name."""
    from safetensors import safe_open

    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder here; merging reads saved checkpoints, so load a model of the hub down first"
        )
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text())
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
        if outside := [file for file in files.values() if Path(file).name != file]:
            raise ValueError(f"{folder / _INDEX} points outside of its folder: {outside[0]!r}")
        return files
    if not (folder / _ONE_FILE).is_file():
        raise ValueError(f"{folder} holds neither {_ONE_FILE} nor {_INDEX}; only safetensors checkpoints are read")
    with safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)


def _write_shard(a_file: Path, b_files: dict[str, Path], out_file: Path, alpha: float) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    averaged: dict[str, torch.Tensor] = {}
    with safe_open(a_file, framework="pt") as a_tensors:
        metadata = a_tensors.metadata()
        for b_file in sorted(set(b_files.values())):
            with safe_open(b_file, framework="pt") as b_tensors:
                for name in (name for name, file in b_files.items() if file == b_file):
                    averaged[name] = _average(name, a_tensors.get_tensor(name), b_tensors.get_tensor(name), alpha)
    save_file(averaged, out_file, metadata=metadata)


def _average(name: str, a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    import torch

    if a.shape != b.shape:
        raise ValueError(
            f"{name} has shape {tuple(a.shape)} in the first checkpoint and {tuple(b.shape)} in the second"
        )
    if not a.is_floating_point():
        if not torch.equal(a, b):
            raise ValueError(f"{name} is {a.dtype} and differs between the checkpoints; it cannot be averaged")
        return a
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return (alpha * a.to(wide) + (1 - alpha) * b.to(wide)).to(a.dtype).contiguous()
