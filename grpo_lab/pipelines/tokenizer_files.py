"""Whether a folder holds a tokenizer: transformers builds an empty one where a model stands without, and says nothing."""

from __future__ import annotations

from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder that a tokenizer was saved to holds at least one of these."""


def holds_tokenizer(folder: str) -> bool:
    """Whether a tokenizer was saved to ``folder``."""
    return any((Path(folder) / name).is_file() for name in FILES)


def refuse_no_tokenizer(model: str) -> None:
    """``ValueError`` for a folder with a model and no tokenizer; what is no folder or no model is said when it is loaded."""
    if (Path(model) / "config.json").is_file() and not holds_tokenizer(model):
        raise ValueError(
            f"{model!r} holds a model and no tokenizer ({', '.join(FILES[:2])}, …); save one there "
            "(`tokenizer.save_pretrained(folder)`), or name another (`model.tokenizer`, --tokenizer) where there is such a "
            "setting"
        )
