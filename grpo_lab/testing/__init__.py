"""Helpers for a team's tests of its own training code: small real models, a tokenizer, scripted rollouts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.data.word_problem_families import NAMES, all_phrases

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer

ARCHITECTURES = ("qwen2", "qwen3")
PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"

# The part between the generation marks is the assistant's own text: what TRL's assistant_only_loss trains on.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}{%- if message['role'] == "
    "'assistant' %}{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}{%- else "
    "%}{{- message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|im_start|>assistant\\n' }}{%- endif %}"
)

# Qwen3's template without its tools (a test compares them). The last turn's answer comes after a thinking block, which
# may be empty. Turns before the last question lose theirs. `enable_thinking=False` puts an empty block into the prompt.
THINKING_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- set text = message['content'] %}
    {%- if message['role'] == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if (loop.last or thought) and not messages[loop.index :] | selectattr('role', 'equalto', 'user') | list %}
            {%- set text = '<think>\\n' + thought + '\\n</think>\\n\\n' + text.lstrip('\\n') %}
        {%- endif %}
        {%- generation %}{{- text + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- text + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


# A call of a tool is in GLM-4.5's form: <tool_call>name<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>. The
# tools' descriptions are not in the prompt: a small model learns from its cold start which there are.
TOOLS_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '<tool_call>' + call['function']['name'] }}
            {%- for name, value in (call['function']['arguments'] or {}).items() %}
                {{- '<arg_key>' + name + '</arg_key><arg_value>' + value | string + '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# How such a call is read back from tokens: what transformers' `parse_response` takes.
TOOLS_RESPONSE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>\w+)</arg_key><arg_value>(?P<value>.*?)</arg_value>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
_THINKING_TAGS = ("<think>", "</think>")
_TOOLS_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def tiny_tokenizer(thinking: bool = False, tools: bool = False, words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Build a Qwen2 tokenizer of about 1,000 entries from code; pad ``<|endoftext|>``, end of text ``<|im_end|>``.

    * byte-level BPE with Qwen's own rules for cutting text, so every text round-trips (after Qwen's Unicode NFC);
    * a number is its digits, one token each, everywhere (``" 12"`` is a space, ``1``, ``2``);
    * each word of ``grpo_lab.data.word_problems`` is one token, and so are ``####`` and a full stop with its newline;
    * special tokens and chat template as in Qwen2.5: ``<|im_start|>role\\n…<|im_end|>\\n``.

    Its class is the one that ``AutoTokenizer`` gives to every folder with a Qwen2 or Qwen3 model in it.

    Args:
        thinking: chat template of Qwen3, with its thinking blocks and modes; ``<think>``, ``</think>`` and the words of
            its flags are tokens, too.
        tools: chat template with calls of tools and their answers, and the pattern by which TRL reads calls back; their
            tags are tokens.
        words: further texts that are one token each.

    Raises:
        ValueError: both ``thinking`` and ``tools``, or a word that Qwen's rules cut.
    """
    from transformers import AddedToken, Qwen2Tokenizer

    if thinking and tools:
        raise ValueError("`thinking` and `tools` are two chat templates of the tiny tokenizer; leave one of them out")
    more = {*words}
    template = CHAT_TEMPLATE
    tags: tuple[str, ...] = ()
    if thinking:
        more |= {" /", "/think", "think", "/no", "no", "_think", "\n\n"}
        template = THINKING_TEMPLATE
        tags = _THINKING_TAGS
    if tools:
        more.add("tool")
        template = TOOLS_TEMPLATE
        tags = _TOOLS_TAGS
    vocab, merges = _byte_pairs(more)
    model: dict[str, Any] = {"vocab": vocab, "merges": merges, "unk_token": None}
    made = Qwen2Tokenizer(
        **model,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=template,
        padding_side="left",
        model_max_length=32_768,
    )
    # not special, as in Qwen3: they stay in decoded text
    made.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    if tools:
        made.response_template = TOOLS_RESPONSE
    for word in words:
        if len(made(word)["input_ids"]) != 1:
            raise ValueError(f"{word!r} cannot be one token (setting: words): Qwen's rules cut it")
    return made


def _byte_pairs(more: set[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary (all 256 bytes and all merged tokens → number) and the merges of a byte-pair encoding in
    which every word of the word problems, and each of ``more``, is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pieces: set[str] = {"####", ".\n", "system", "user", "assistant", *NAMES, *more}
    for phrase in all_phrases():
        words = re.findall(r"\{\w+\}|[A-Za-z]+", phrase)
        pieces |= {f" {word}" for word in words if "{" not in word}
        # a word without a space before it stands only where a text begins
        pieces |= {word for word in words[:1] if "{" not in word and word[0].isupper()}
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
    learner.train_from_iterator(["\0".join(sorted(pieces))], trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def tiny_model(
    architecture: str = "qwen2",
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    max_positions: int = 512,
    tie_embeddings: bool = True,
    initializer_range: float = 0.02,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    thinking: bool = False,
    tools: bool = False,
    words: Sequence[str] = (),
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build a random model, ``architecture`` ``qwen2`` or ``qwen3``, in float32, and a tokenizer with a chat template.

    Args:
        num_kv_heads: None for as many as ``num_heads``; fewer gives grouped-query attention.
        intermediate_size: None for ``4 * hidden_size`` (the MLP is gated: three matrices of that width).
        initializer_range: standard deviation of the weights; a narrow model learns faster from 1 / √hidden_size.
        tokenizer: None for ``tiny_tokenizer(thinking, tools, words)``; else a local tokenizer folder, or a loaded one.
        thinking: a tokenizer and a chat template with Qwen3's thinking blocks and modes.
        tools: a tokenizer and a chat template with calls of tools.
        words: texts that are one token each.
        seed: the same arguments and seed give the same weights. The global random state is not changed.

    Raises:
        ValueError: unknown architecture, sizes that do not divide, or a missing tokenizer folder.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if num_kv_heads is None:
        num_kv_heads = num_heads
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; allowed: {', '.join(ARCHITECTURES)}")
    _refuse_heads(hidden_size, num_heads, num_kv_heads)
    vocabulary = _load_tokenizer(tokenizer, thinking, tools, words)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size if intermediate_size is None else intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        **({} if architecture == "qwen2" else {"head_dim": hidden_size // num_heads}),
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie_embeddings,
        "initializer_range": initializer_range,
        "pad_token_id": vocabulary.pad_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **sizes)).float()
    return model, vocabulary


def _refuse_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    if hidden_size % (2 * num_heads):
        heads = f"hidden_size {hidden_size} / num_heads {num_heads}"
        raise ValueError(f"{heads} is no even whole number, as rotary positions need")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}")


def _load_tokenizer(
    tokenizer: str | Path | PreTrainedTokenizerBase | None, thinking: bool, tools: bool, words: Sequence[str]
) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        return tiny_tokenizer(thinking, tools, words)
    for name, asked in (("thinking", thinking), ("tools", tools), ("words", words)):
        if asked:
            raise ValueError(
                f"{name} is for the tiny tokenizer; another `tokenizer` has its own chat template and words"
            )
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    folder = Path(tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer {str(tokenizer)!r} is no local folder with a tokenizer.json (setting: tokenizer)")
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


@dataclass
class ScriptedRollout:
    """A ``rollout_func(prompts, trainer)`` for TRL whose completions are random tokens, drawn without a model.

    They depend only on the seed, on how often it was called, and on the row's number over all processes. So stock TRL
    and ours, on one process or four, get the very same completions: only the update can make a difference.

    Args:
        vocabulary: token ids that completions are drawn from (keep special tokens out).
        lengths: completion lengths in tokens, drawn from this list.
        end_id: ends every completion that is not truncated (``None``: never).
        truncated_share: share of completions without ``end_id``.
        seed: seed of the draws.
        sampler_logps: ``(prompt ids, completion ids) -> log-probs`` of the "sampler", nats (for a sampler correction).
    """

    vocabulary: Sequence[int]
    lengths: Sequence[int]
    end_id: int | None = None
    truncated_share: float = 0.0
    seed: int = 0
    sampler_logps: Callable[[list[list[int]], list[list[int]]], list[list[float]]] | None = None
    calls: int = field(default=0, init=False)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        first = trainer.accelerator.process_index * len(prompts)
        completions = [self.completion(self.calls, first + i) for i in range(len(prompts))]
        self.calls += 1
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        prompt_ids = [list(ids) for ids in prompt_ids]
        logps = None
        if self.sampler_logps is not None:
            logps = self.sampler_logps(prompt_ids, completions)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}

    def completion(self, call: int, row: int) -> list[int]:
        """Return the completion's token ids in row ``row``, counted over all processes, of call ``call``, from 0."""
        rng = random.Random(f"{self.seed}/{call}/{row}")
        ids = [rng.choice(self.vocabulary) for _ in range(rng.choice(self.lengths))]
        if self.end_id is not None and rng.random() >= self.truncated_share:
            ids[-1] = self.end_id
        return ids
