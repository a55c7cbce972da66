"""Average two checkpoints tensor by tensor: the first of Kimi k1.5's long2short methods (section 2.4, "Model Merging":
a model with long chains of thought and one with short ones, averaged with equal weights, without training).

    out = alpha · a + (1 − alpha) · b,   in float32, stored in the dtype of a
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path

from grpo_lab.io import saving
from grpo_lab.reading import read_record

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OF_A_MODEL = (
    *("config.json", "configuration.json", "generation_config.json", _INDEX),
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.*",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "audio_tokenizer_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def average_weights(a_dir: str | Path, b_dir: str | Path, out_dir: str | Path, alpha: float = 0.5) -> Path:
    """Write the average of two Hugging Face checkpoint folders (safetensors, one file or sharded) to a new folder.

    The tokenizer, processors, code and licences are copied from `a_dir`, but no record of its training. The shards are
    split as in `a_dir`. The folder gets its name only when it is complete. Buffers that are not floating point must be
    equal in both.

    Args:
        alpha: share of a, in [0, 1]; 1 gives the weights of a, 0 those of b.

    Raises ValueError if alpha is out of range, a folder has no safetensors, the tensors differ in name or shape, a
    buffer differs, or `out_dir` exists and is not empty. NumbersError if the average is not finite.
    """
    from grpo_lab.finite import NumbersError, not_finite

    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} is not in [0, 1]")
    a = Path(a_dir)
    b = Path(b_dir)
    out = Path(out_dir)
    files_a, files_b = check_mergeable(a, b)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} exists and is not empty; choose a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with saving(out), tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        unfinished = Path(folder) / "checkpoint"
        unfinished.mkdir()
        for shard in sorted(set(files_a.values())):
            names = [name for name, file in files_a.items() if file == shard]
            _write_shard(a / shard, {name: b / files_b[name] for name in names}, unfinished / shard, alpha)
        for file in a.iterdir():
            if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _OF_A_MODEL):
                shutil.copy2(file, unfinished / file.name)
        if bad := not_finite(unfinished):
            raise NumbersError(f"the average of {a} and {b} is not written: {bad}: look at how they were made")
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    return out


def check_mergeable(a_dir: str | Path, b_dir: str | Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return tensor name → file name of each of two checkpoint folders. Raises ValueError if a folder has no
    safetensors, or the names differ; shapes are compared only when the tensors are read."""
    files_a = _tensor_files(Path(a_dir))
    files_b = _tensor_files(Path(b_dir))
    if files_a.keys() != files_b.keys():
        only_a = sorted(files_a.keys() - files_b.keys())
        only_b = sorted(files_b.keys() - files_a.keys())
        raise ValueError(f"they have different tensors: only {a_dir} has {only_a[:5]}, only {b_dir} {only_b[:5]}")
    return files_a, files_b


def _tensor_files(folder: Path) -> dict[str, str]:
    """Return tensor name → file name of a checkpoint folder."""
    from safetensors import safe_open

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder here; merging reads saved checkpoints: load a hub's model down first")
    if (folder / _INDEX).is_file():
        index = read_record(folder / _INDEX, {"weight_map": dict})
        files = {str(name): str(file) for name, file in index["weight_map"].items()}
        if outside := [file for file in files.values() if Path(file).name != file]:
            raise ValueError(f"{folder / _INDEX} points outside of its folder: {outside[0]!r}")
        return files
    if not (folder / _ONE_FILE).is_file():
        raise ValueError(f"{folder} holds neither {_ONE_FILE} nor {_INDEX}; only safetensors checkpoints are read")
    with safe_open(folder / _ONE_FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _ONE_FILE)


def _write_shard(a_file: Path, b_files: dict[str, Path], out_file: Path, alpha: float) -> None:
    """Average the tensors of one file with those of the same name in the other checkpoint, and write them to a file.
    ``b_files``: tensor name → the other checkpoint's file."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    averaged: dict[str, torch.Tensor] = {}
    with ExitStack() as files:
        a_tensors = files.enter_context(safe_open(a_file, framework="pt"))
        b_tensors = {
            file: files.enter_context(safe_open(file, framework="pt")) for file in sorted(set(b_files.values()))
        }
        for name, b_file in b_files.items():
            a = a_tensors.get_tensor(name)
            b = b_tensors[b_file].get_tensor(name)
            if a.shape != b.shape:
                shapes = f"{tuple(a.shape)} in the first checkpoint and {tuple(b.shape)} in the second"
                raise ValueError(f"{name} has shape {shapes}")
            if a.is_floating_point():
                wide = torch.float64 if a.dtype == torch.float64 else torch.float32
                a = (alpha * a.to(wide) + (1 - alpha) * b.to(wide)).to(a.dtype).contiguous()
            elif not torch.equal(a, b):
                raise ValueError(f"{name} is {a.dtype} and differs between the checkpoints; it cannot be averaged")
            averaged[name] = a
        save_file(averaged, out_file, metadata=a_tensors.metadata())
