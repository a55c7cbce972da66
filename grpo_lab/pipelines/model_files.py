"""What a saved model is: a digest of every file that shapes its completions.

Weights alone do not name a model: another chat template, tokenizer or `generation_config.json` beside the same weights
writes other completions (one model's pass rate went from 12.5% to 60.6% by its chat template).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

MODEL_FILES = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf")
_SETTINGS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "chat_template.*", "*.jinja", "*/*.jinja"),
    *("adapter_config.json", "*.py", "*.safetensors.index.json"),
)
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_WRITTEN_BY_THE_SAVING = ("transformers_version", "_name_or_path", "peft_version")
_CHUNK = 1 << 22  # bytes


def is_local(path: str | None) -> bool:
    """Whether a model or data set is a folder here rather than a hub name."""
    return bool(path) and Path(str(path)).is_dir()


def looks_local(path: str) -> bool:
    """Whether ``path`` can only be meant as a folder: no hub name starts or is cut like this."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def check_place(path: str, where: str = "model.path") -> str:
    """``path`` of a saved model or a hub name, looked at where it is local.

    ValueError for a folder that is not there, or holds no model.
    """
    if not is_local(path):
        if not path or looks_local(path):
            raise ValueError(f"`{where}` is {path!r}: no such folder (a saved model, or a hub name such as org/model)")
    elif not any((Path(path) / name).is_file() for name in MODEL_FILES):
        raise ValueError(f"`{where}` is {path!r}: the folder holds no model (neither {' nor '.join(MODEL_FILES)})")
    return path


def model_files(model: str) -> dict[str, str]:
    """File name → digest of what it holds, for a folder or a hub name that has been loaded; `{}` where nothing is found.

    An adapter's base model is included (`base: …`). What only tells who saved a file (`transformers_version`) does not count.
    """
    folder = _folder_of(model)
    if folder is None:
        return {}
    found = {file.relative_to(folder).as_posix(): _digest(file) for file in _shaping(folder)}
    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") if adapter.is_file() else None
    if base and str(base) != model:
        found |= {f"base: {name}": digest for name, digest in model_files(str(base)).items()}
    return found


def _folder_of(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from transformers.utils import cached_file

    try:
        config = cached_file(model, "config.json", local_files_only=True)
    except OSError:
        return None
    return None if config is None else Path(config).parent  # the snapshot of one commit


def _shaping(folder: Path) -> Iterator[Path]:
    files = {file for pattern in (*_WEIGHTS, *_SETTINGS) for file in folder.glob(pattern)}
    return (file for file in sorted(files) if file.is_file() and file.name not in _NO_WEIGHTS)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    if file.name in ("config.json", "generation_config.json", "adapter_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        kept = {name: value for name, value in settings.items() if name not in _WRITTEN_BY_THE_SAVING}
        digest.update(json.dumps(kept, sort_keys=True).encode())
    else:
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]
