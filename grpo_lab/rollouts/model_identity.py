"""What a server must have in common with the trainer, besides the weights: told before anything is loaded.

Weights can be sent; what they mean cannot. A server with another end-of-sequence id makes completions that never end, and the
proof of the sync is perfect. One with other shapes fails in the middle of loading. Both sides describe themselves in plain values
(`describe_tokenizer`, `end_ids`, the model's config), and `mismatches` compares. Prompts are sent as token ids, so another chat
template changes nothing that is sampled: `remarks` tells of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

#: what two tokenizers with the same vocabulary can still cut differently
PROBE_TEXT = "  Tom has 1234 apples;\n\tthey cost $5.07 – “naïve” 苹果 \\frac{1}{2} isn't\n\n"


def end_ids(declared: Any, tokenizer_id: int | None) -> list[int]:
    """Token ids that end a completion: the generation config's (`declared`: None, one, or several) and the tokenizer's."""
    ids = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return sorted({*ids, *([] if tokenizer_id is None else [tokenizer_id])})


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Vocabulary, how text is cut, and chat template, as sizes and hashes."""
    vocabulary = tokenizer.get_vocab()
    template = getattr(tokenizer, "chat_template", None)
    return {
        "vocabulary_size": len(vocabulary),
        "vocabulary": _hash(sorted(vocabulary.items())),
        "encoding": _hash(list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])),
        "chat_template": None if template is None else _hash(template),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def plain_config(config: Any) -> dict[str, Any]:
    """A transformers config as JSON values; `model_type` is one of them."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


def parameter_shapes(model_class: type[nn.Module], config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter that a model of this class and config has; no memory is used."""
    with torch.device("meta"):
        model = model_class(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shape_mismatches(model_class: type[nn.Module], ours: Any, theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about parameters in which a model of our config and one of theirs differ; empty where all agree."""
    if theirs.get("model_type") != ours.model_type:
        return [f"its model is a {theirs.get('model_type')!r}, the trainer's a {ours.model_type!r}"]
    mine = parameter_shapes(model_class, ours)
    other = parameter_shapes(model_class, type(ours).from_dict(dict(theirs)))
    wrong = [
        f"{n}: {list(other[n])}, the trainer's {list(mine[n])}" for n in mine if n in other and mine[n] != other[n]
    ]
    wrong += [f"{n}: not there, the trainer's {list(mine[n])}" for n in mine if n not in other]
    wrong += [f"{n}: {list(other[n])}, the trainer has none" for n in other if n not in mine]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return [f"shapes of its parameters ({'; '.join(wrong[:4])}{more})"] if wrong else []


def mismatches(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Sentences about end-of-sequence ids and tokenizer; `ours`, `theirs`: `describe_tokenizer` and `end_ids`."""
    found = []
    if theirs["end_ids"] != ours["end_ids"]:
        found.append(
            f"its end-of-sequence ids are {theirs['end_ids']}, the trainer's {ours['end_ids']} (generation_config.json and "
            "tokenizer): completions would not end where the trainer takes them to end"
        )
    if theirs["vocabulary_size"] != ours["vocabulary_size"]:
        found.append(f"its vocabulary has {theirs['vocabulary_size']} tokens, the trainer's {ours['vocabulary_size']}")
    elif theirs["vocabulary"] != ours["vocabulary"]:
        found.append("its vocabulary has other tokens behind the same ids")
    elif theirs["encoding"] != ours["encoding"]:
        found.append("its tokenizer cuts the same text into other tokens")
    return found


def remarks(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Differences that change no completion, since prompts are sent as token ids."""
    if theirs["chat_template"] == ours["chat_template"]:
        return []
    return ["its chat template is not the trainer's (the trainer's is in force: prompts are sent as token ids)"]


def says(url: str, found: Collection[str]) -> str:
    """The sentence that a run with the wrong server does not start with."""
    return (
        f"the vLLM server at {url} serves another model than the trainer trains: {'; '.join(found)}. Start it from the folder "
        "that training starts from: `grpo-lab serve --model FOLDER`"
    )
