"""A small Qwen2 tokenizer that needs no download: built from code, the same every time.

* byte-level BPE with Qwen's own rules for cutting text, so every text round-trips (after Qwen's Unicode NFC);
* a number is its digits, one token each, wherever it stands (``" 12"`` is a space, ``1``, ``2``);
* each word of ``grpo_lab.data.word_problems`` is one token, and so are ``####`` and a full stop with its newline;
* special tokens and chat template as in Qwen2.5: ``<|im_start|>role\\n…<|im_end|>\\n``.

It is a ``Qwen2Tokenizer`` because ``AutoTokenizer`` gives that class to every folder with a Qwen2 or Qwen3 model in it,
whatever class was saved there: another kind of tokenizer would come back as a different one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from grpo_lab.data.word_problem_families import NAMES, all_phrases

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# The part between the generation marks is the assistant's own text: what TRL's assistant_only_loss trains on.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message['content'] + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer described above, about 1,000 entries; pad ``<|endoftext|>``, end of text ``<|im_end|>``."""
    from transformers import Qwen2Tokenizer

    vocab, merges = _byte_pairs()
    model: dict[str, Any] = {"vocab": vocab, "merges": merges, "unk_token": None}
    return Qwen2Tokenizer(
        **model,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=32_768,
    )


def _byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All 256 bytes, and the merges that make each known piece one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\0", behavior="removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,  # more than there are merges: goes on until every piece is one token
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(["\0".join(_whole_pieces())], trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _whole_pieces() -> list[str]:
    """The texts that get an entry of their own. A word without a space before it stands only where a text begins."""
    spaced: set[str] = set()
    first: set[str] = {"system", "user", "assistant", *NAMES}
    for phrase in all_phrases():
        words = re.findall(r"\{\w+\}|[A-Za-z]+", phrase)
        spaced |= {f" {word}" for word in words if "{" not in word}
        first |= {word for word in words[:1] if "{" not in word and word[0].isupper()}
    return sorted(spaced | first | {"####", ".\n"})
