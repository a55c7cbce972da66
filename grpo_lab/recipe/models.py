"""The model that a recipe names, by folder or hub name: checks of its folder, loading it, and a digest of its files.

``model_files`` gives the digests by which a run knows whether a model has changed. They are not of weights alone: with
another chat template, tokenizer or `generation_config.json` a model writes other completions (one pass rate went from
12.5% to 60.6% by the template).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lab.hub import reach_hub
from grpo_lab.io import check_place, is_local
from grpo_lab.reading import read_record
from grpo_lab.recipe.digests import file_digest
from grpo_lab.recipe.sections import ModelSection
from grpo_lab.settings import hints_of, refuse_unknown, typed

log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "*.jinja",
    "additional_chat_templates/*.jinja",  # and not those of checkpoints, which are removed
    "adapter_config.json",
    "*.py",
    "*.safetensors.index.json",
)
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
"""Files that match ``_WEIGHTS`` and hold none."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""A folder that a tokenizer was saved to holds at least one of these files."""
_WRITTEN_BY_THE_SAVING = ("transformers_version", "_name_or_path", "peft_version")
"""Fields of a model's JSON files that only say by which release, or from where, it was saved."""


def model_files(model: str) -> dict[str, str]:
    """Return the names of a model's files with the digests of their contents: 16 hexadecimal digits of a SHA-256.

    ``model`` is a folder, or a hub name that is in the cache; `{}` if it is neither. For an adapter the files of its
    base model are added, with names `base: …`. Fields that only say who saved a file do not count.
    """
    if not (folder := Path(model)).is_dir():
        from transformers.utils import cached_file

        try:
            config = cached_file(model, "config.json", local_files_only=True)
        except OSError:
            return {}
        if config is None:
            return {}
        folder = Path(config).parent  # the snapshot of one commit
    found = {file.relative_to(folder).as_posix(): _digest(file) for file in files_of_model(folder)}
    adapter = folder / "adapter_config.json"
    base = None
    if adapter.is_file():
        base = _settings_in(adapter).get("base_model_name_or_path")
    if base and str(base) != model:
        found |= {f"base: {name}": digest for name, digest in model_files(str(base)).items()}
    return found


def files_of_model(folder: Path) -> list[Path]:
    """Return the files in ``folder`` that define a model: weights, settings, tokenizer, templates."""
    files = sorted({file for pattern in (*_WEIGHTS, *_SETTINGS) for file in folder.glob(pattern)})
    return [file for file in files if file.is_file() and file.name not in _NO_WEIGHTS]


def _digest(file: Path) -> str:
    """Return the digest of a file of a model, for its main JSON files without ``_WRITTEN_BY_THE_SAVING``."""
    settings: dict[str, Any] = {}
    if file.name in ("config.json", "generation_config.json", "adapter_config.json"):
        settings = _settings_in(file)
    if not settings:
        return file_digest(file)
    kept = {name: value for name, value in settings.items() if name not in _WRITTEN_BY_THE_SAVING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _settings_in(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; `{}` if it is broken: loading the model will raise an error that names it."""
    try:
        return read_record(file)
    except ValueError:
        return {}


def holds_tokenizer(folder: str) -> bool:
    """Return whether a tokenizer was saved to ``folder``."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def refuse_no_tokenizer(model: str) -> None:
    """Raise ValueError for a folder that holds a model and no tokenizer. For a folder without a model nothing is
    raised: to load it is an error of its own."""
    if (Path(model) / "config.json").is_file() and not holds_tokenizer(model):
        raise ValueError(
            f"{model!r} holds a model and no tokenizer (tokenizer.json, tokenizer_config.json, …); save one there "
            "(`tokenizer.save_pretrained(folder)`), or name another (`model.tokenizer`, --tokenizer) where there is "
            "such a setting"
        )


def load_model(section: ModelSection, seed: int) -> tuple[Any, Any]:
    """Return the section's model and tokenizer. ``tiny`` builds a random model with ``seed``, a path is loaded by
    transformers. Raises ValueError for unknown settings of ``tiny``, and for a model that cannot be loaded."""
    if section.tiny is not None:
        from grpo_lab.testing import tiny_model

        refuse_unknown(section.tiny, hints_of(tiny_model).keys() - {"tokenizer", "return"}, "`model.tiny`")
        settings = {"seed": seed, **typed(section.tiny, tiny_model, "model.tiny")}
        if section.tokenizer is not None and not is_local(section.tokenizer):
            load_tokenizer(section)  # raises, and says what is wrong with it
        return tiny_model(**settings, tokenizer=section.tokenizer)
    assert section.path is not None
    with loading(section.path):
        return model_class(section.path)[0].from_pretrained(section.path), load_tokenizer(section)


def model_class(path: str, **how: Any) -> tuple[Any, Any]:
    """Return the class of transformers that loads the saved model at ``path``, and the model's configuration.

    The class is ``AutoModelForCausalLM`` or, for a model that also takes images, ``AutoModelForImageTextToText``.
    ``how`` are arguments of ``AutoConfig.from_pretrained``. Raises ValueError for a model that writes no text.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path, **how)
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind, config
    raise ValueError(f"{path!r} holds a {config.model_type!r} model ({config.architectures}), which writes no text")


def load_tokenizer(section: ModelSection) -> Any:
    """Load the tokenizer that the section names, else the model's. Raises ValueError if there is none."""
    from transformers import AutoTokenizer

    place = str(section.tokenizer or section.path)
    refuse_no_tokenizer(place)
    with loading(place):
        return AutoTokenizer.from_pretrained(place)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Context for loading ``model``, a folder or hub name. Whatever error a missing model or a broken file raises
    becomes a ValueError of one line that names the model."""
    try:
        _reach(model)
        yield
    except MemoryError:
        raise
    except Exception as error:  # transformers' and those of its readers in Rust, which have no common class
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if is_local(model):
            raise ValueError(f"{model!r} cannot be loaded: {said}") from error
        raise ValueError(
            f"{model!r} is neither a folder with a saved model here nor a model that the hub gives ({said}). Without "
            "network, name a local folder"
        ) from error


def _reach(model: str) -> None:
    """Raise ConnectionError if ``model`` is a hub name that is not in the cache, and the hub cannot be reached."""
    from huggingface_hub import constants, try_to_load_from_cache

    if is_local(model) or constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    reach_hub(model)


def lora_config(section: ModelSection) -> Any:
    """Return the ``peft.LoraConfig`` that the section's ``lora`` describes; None if all weights are trained. Raises
    ValueError for an unknown key."""
    if section.lora is None:
        return None
    from peft import LoraConfig

    refuse_unknown(section.lora, [f.name for f in dataclasses.fields(LoraConfig)], "`model.lora`")
    return LoraConfig(**{"task_type": "CAUSAL_LM", **typed(section.lora, LoraConfig, "model.lora")})


def load_saved_model(model: str, use_cpu: bool, tokenizer: str | None = None) -> tuple[Any, Any]:
    """Load a saved model, which may be a LoRA adapter, and its tokenizer.

    Args:
        model: its folder or hub name.
        use_cpu: whether to stay on the CPU; else the model goes onto the GPU if there is one.
        tokenizer: folder or hub name of another tokenizer. None: the model's own or, for an adapter without one, that
            of its base.

    Returns:
        model (in evaluation mode) and tokenizer.

    Raises:
        ValueError: there is no such model, no base of an adapter, or no tokenizer.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoConfig

    check_place(model, "model")
    base = _base_of_adapter(model)
    if tokenizer is None and base is not None and Path(model).is_dir() and not holds_tokenizer(model):
        log.info("%s holds no tokenizer; taking that of its base, %s", model, base)
        tokenizer = base
    if base is not None:
        try:
            with loading(base):
                AutoConfig.from_pretrained(base)
        except ValueError as error:
            said = f"{model!r} is an adapter of {base!r} (adapter_config.json), which cannot be loaded: {error}"
            raise ValueError(said) from error
    loaded_tokenizer = load_tokenizer(ModelSection(path=model, tokenizer=tokenizer))
    with loading(model), whole_on_each_rank():
        if base is None:
            kind: Any = model_class(model)[0]
        else:
            kind = AutoPeftModelForCausalLM
        loaded = kind.from_pretrained(model)
    if use_cpu or not torch.cuda.is_available():
        device = "cpu"
    else:
        device = "cuda"
    return loaded.to(device).eval(), loaded_tokenizer


@contextmanager
def whole_on_each_rank() -> Iterator[None]:
    """Context in which every process of a distributed launch loads all weights.

    Otherwise, launched for FSDP2, only the first process of a machine would load them (the others get zeros, without an
    error), and launched for ZeRO-3 each would load a shard.
    """
    from accelerate.utils import patch_environment
    from transformers.integrations import deepspeed

    sharded = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        with patch_environment(fsdp_cpu_ram_efficient_loading="False"):
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = sharded


def _base_of_adapter(model: str) -> str | None:
    """Return the folder or hub name of the base of the adapter in the folder ``model``; None if it holds no adapter.
    Raises ValueError if the adapter does not name its base."""
    file = Path(model) / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        return str(read_record(file, {"base_model_name_or_path": str})["base_model_name_or_path"])
    except ValueError as error:
        raise ValueError(f"the adapter in {model!r} does not name its base: {error}") from error


def refuse_adapter(model: str, where: str) -> None:
    """Raise ValueError if ``model`` is the folder of an adapter. ``where``: the setting that needs a whole model."""
    base = _base_of_adapter(model)
    if base is not None:
        raise ValueError(
            f"`{where}` is {model!r}, which is an adapter of {base!r}: what trains, merges or teaches takes a whole "
            "model. Merge it into its base first (PEFT's `merge_and_unload`, then `save_pretrained`)"
        )


class TokenizerAndConfig(NamedTuple):
    """What is known of a model without its weights."""

    tokenizer: Any
    config: Any


def tokenizer_and_config(section: ModelSection, here_only: bool) -> TokenizerAndConfig | None:
    """Return a model's tokenizer and its configuration, without its weights. For an adapter the configuration is that
    of its base. With ``here_only`` nothing is asked of the hub: None if the model or the tokenizer is no local
    folder."""
    from transformers import AutoConfig

    if section.tiny is not None:
        model, tokenizer = load_model(section, seed=0)
        return TokenizerAndConfig(tokenizer, model.config)
    base = _base_of_adapter(str(section.path))
    path = str(section.path) if base is None else base
    named = [name for name in (path, section.tokenizer) if name is not None]
    if here_only and not all(is_local(name) for name in named):
        return None
    with loading(path):
        config = AutoConfig.from_pretrained(path)
    if base is not None and section.tokenizer is None and not holds_tokenizer(str(section.path)):
        section = ModelSection(path=str(section.path), tokenizer=base)
    return TokenizerAndConfig(load_tokenizer(section), config)
