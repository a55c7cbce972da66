"""What each sampling key of an engine would do to a training run: let through, or refused with the reason.

`generation_kwargs` go into vLLM's `SamplingParams` (an engine in this process), into the body of a request (a server: what it
does not know it ignores) or into transformers' `GenerationConfig` (likewise). Some keys there change what TRL believes about
the answer: which log-prob is the sampled token's, how many completions a prompt has, where a completion ended. Nothing
fails then; the numbers are wrong. The tables hold every key of the three (`tests/unit/test_sampling_keys.py` compares them with
the installed libraries); a key that is in none of them is misspelt, or newer than they are.

Settings that bend the distribution (top-p, penalties, a grammar, ...) are let through here: whether they are right depends on the
sampler correction, see `trainer.sampling_correction`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lab.settings import did_you_mean

ENGINES = ("colocate", "server", "transformers")


@dataclass(frozen=True)
class Refused:
    """A key that is refused unless its value is one of `harmless`; `why` ends the sentence "... does not work here: "."""

    why: str
    harmless: tuple[Any, ...] = ()


#: keys that say what a setting of TRL says; equal is fine, another value is refused
SAME_AS = {
    "temperature": "temperature",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
}

_NO_EFFECT = "nothing in training reads what it asks for; leave it out"
_INTERNAL = "it belongs to the engine's own bookkeeping; leave it out"
_BENDS = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
    *("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"),
)
_ENDS = ("stop", "stop_token_ids")  # beside mask_truncated_completions refused, see `refuse_keys`
_TEXT = (
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)  # TRL decodes the ids itself
_ALLOWED = (*_BENDS, *_ENDS, *_TEXT, "watermarking")

_COMMON: dict[str, Refused | None] = {
    **dict.fromkeys((*_ALLOWED, "temperature", "max_tokens")),
    "n": Refused("the number of completions of a prompt is `num_generations`"),
    "logprobs": Refused(
        "TRL takes the first log-prob of a position for the sampled token's, and with more than one that is the top-ranked "
        "token's; it asks for the sampled token's by itself",
        (0,),
    ),
    "logprob_token_ids": Refused(
        "TRL takes the first log-prob of a position for the sampled token's, and the first would be another token's",
        (None,),
    ),
    "seed": Refused(
        "every request would draw with the same random numbers: equal completions in a group (in this process), and the same "
        "draws at every step (a server); set the run's `seed`, `rollout.engine.seed`, or `grpo-lab serve --seed`",
        (None, -1),
    ),
    "ignore_eos": Refused(
        "tokens behind the end of a completion would be rewarded and trained on; `min_tokens` keeps completions from ending early",
        (False,),
    ),
    "thinking_token_budget": Refused(
        "the engine would force tokens that the trainer takes for sampled ones; use `rollout.thinking_budget`",
        (None, -1),
    ),
    "trace_decode_token_ids": Refused("tokens would be given instead of sampled", (None,)),
    "prompt_logprobs": Refused(_NO_EFFECT, (None,)),
    "routed_experts_prompt_start": Refused(_NO_EFFECT, (0,)),
    "repetition_detection": None,  # a loop that is cut counts as truncated, which it is
}

_COLOCATE: dict[str, Refused | None] = {
    **_COMMON,
    "n": Refused("the number of completions of a prompt is `num_generations`", (1,)),
    **dict.fromkeys(("detokenize", "skip_reading_prefix_cache", "extra_args")),
    "prompt_logprob_token_ids": Refused(_NO_EFFECT, (None,)),
    "prompt_logprob_start": Refused(_NO_EFFECT, (None,)),
    "flat_logprobs": Refused(_NO_EFFECT, (False,)),
    "output_kind": Refused(_INTERNAL),
    "stream_interval": Refused(_NO_EFFECT, (None,)),
    "skip_clone": Refused("requests of different groups would share one number of completions", (False,)),
    "output_text_buffer_length": Refused(_INTERNAL),
}

_SERVER: dict[str, Refused | None] = {
    **_COMMON,
    **dict.fromkeys(("user", "priority", "session_id", "response_format", "vllm_xargs", "cache_salt")),
    "model": Refused("the model is the one that the server serves"),
    "prompt": Refused("every prompt of the data would be replaced by it"),
    "prompt_embeds": Refused("every prompt of the data would be replaced by it", (None,)),
    "suffix": Refused("it is no part of a completion", (None,)),
    "echo": Refused("the prompt would be taken for a part of the completion", (False, None)),
    "stream": Refused("the answer is read as a whole", (False, None)),
    "stream_options": Refused(_NO_EFFECT, (None,)),
    "stream_interval": Refused(_NO_EFFECT, (None,)),
    "use_beam_search": Refused("the best beam is no sample of the policy, and has no log-probs", (False,)),
    "length_penalty": Refused("it acts on beams only", (1.0,)),
    "truncate_prompt_tokens": Refused("the trainer would compute log-probs behind another prompt", (None,)),
    "truncation_side": Refused(_NO_EFFECT, (None,)),
    "add_special_tokens": Refused("prompts are sent as token ids"),
    "request_id": Refused("requests of the same id collide"),
    "return_token_ids": Refused("TRL reads the token ids of the answer", (True,)),
    "return_tokens_as_token_ids": Refused("TRL reads the token ids of the answer", (True,)),
    "return_token_offsets": Refused(_NO_EFFECT, (None, False)),
    "kv_transfer_params": Refused(_INTERNAL, (None,)),
    "ec_transfer_params": Refused(_INTERNAL, (None,)),
    "response_role": Refused(_NO_EFFECT, (None,)),
}

_ONE_ROW = "transformers can do it for a batch of one prompt only"
_TRANSFORMERS: dict[str, Refused | None] = {
    # length, and what the distribution is cut or bent by: the trainer computes its own log-probs on this path
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "min_length", "max_time", "temperature", "top_k", "top_p")),
    **dict.fromkeys(("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty")),
    **dict.fromkeys(("encoder_repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "renormalize_logits")),
    **dict.fromkeys(("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("begin_suppress_tokens", "guidance_scale", "watermarking_config")),
    # TRL's documentation names beams; what they do is the user's choice
    **dict.fromkeys(("num_beams", "early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty")),
    # speed and memory
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config")),
    **dict.fromkeys(("prefill_chunk_size", "use_mtp", "speculation_type", "continuous_batching_config")),
    # read by nothing here, refused by transformers itself, or a model's metadata
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits", "bos_token_id")),
    **dict.fromkeys(("forced_bos_token_id", "encoder_no_repeat_ngram_size", "decoder_start_token_id", "low_memory")),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "transformers_version")),
    **dict.fromkeys(("_commit_hash", "_from_model_config", "is_assistant", "num_assistant_tokens")),
    **dict.fromkeys(("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit")),
    **dict.fromkeys(("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight")),
    **dict.fromkeys(("max_matching_ngram_size",)),
    "do_sample": Refused("greedy completions of a group are all equal, and no group can teach anything", (True, None)),
    "num_return_sequences": Refused("the number of completions of a prompt is `num_generations`", (1, None)),
    "max_length": Refused(
        "TRL sets `max_new_tokens`, beside which it is ignored; set `max_completion_length`", (None,)
    ),
    "stop_strings": Refused("it needs a tokenizer, which TRL does not hand over", (None,)),
    "eos_token_id": Refused(
        "generation would end at one token, and the trainer take another for the end of a completion (padding is then "
        "trained on); set `eos_token_id` in the model's generation_config"
    ),
    "pad_token_id": Refused("the trainer would take padding for completion; set the tokenizer's `pad_token`"),
    "forced_eos_token_id": Refused("the last token would be forced, and trained on as if sampled", (None,)),
    "return_dict_in_generate": Refused("TRL reads a tensor of token ids", (False, None)),
    "token_healing": Refused("it rewrites the prompt that the trainer computes log-probs behind", (False, None)),
    "prompt_lookup_num_tokens": Refused(_ONE_ROW, (None,)),
    "disable_compile": Refused("TRL sets it"),
}

KEYS: dict[str, dict[str, Refused | None]] = {
    "colocate": _COLOCATE,
    "server": _SERVER,
    "transformers": _TRANSFORMERS,
}


def refuse_keys(extra: Mapping[str, Any], engine: str) -> None:
    """ValueError for the first key of `generation_kwargs` that this engine ignores or that makes wrong numbers."""
    table = KEYS[engine]
    for key, value in extra.items():
        if key not in table:
            raise ValueError(_unknown(key, engine))
        rule = table[key]
        if rule is not None and not any(value is good or value == good for good in rule.harmless):
            raise ValueError(f"`generation_kwargs.{key}`={value!r} does not work here: {rule.why}")


def refuse_two_names(extra: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """ValueError where a key says something else than the setting of TRL that it is another name for.

    `settings`: the setting's name -> its value; one that is None or left out decides nothing.
    """
    for key, setting in SAME_AS.items():
        ours = settings.get(setting)
        if key in extra and ours is not None and extra[key] != ours:
            meaning = (
                "the engine would sample at the one, and the trainer compute its log-probs at the other"
                if setting == "temperature"
                else "the engine would stop at the one, and losses, rewards and metrics count with the other"
            )
            raise ValueError(
                f"`generation_kwargs.{key}` is {extra[key]!r} and `{setting}` is {ours!r}: {meaning}; set `{setting}` alone"
            )


def refuse_ends(extra: Mapping[str, Any]) -> None:
    """ValueError for stops that TRL takes for truncation, where truncated completions are masked."""
    for key in _ENDS:
        if extra.get(key):
            raise ValueError(
                f"`generation_kwargs.{key}` does not combine with `mask_truncated_completions`: a completion that ends there "
                "has no end-of-sequence token, counts as truncated, and would carry no loss; leave one of them out"
            )


def _unknown(key: str, engine: str) -> str:
    where = {
        "colocate": "vLLM's SamplingParams",
        "server": "vLLM's completion request",
        "transformers": "transformers' GenerationConfig",
    }
    others = [where[other] for other in ENGINES if other != engine and key in KEYS[other]]
    hint = f"; it is one of {others[0]}" if others else ""
    hint += did_you_mean(key, KEYS[engine])
    return f"`generation_kwargs.{key}` is no key of {where[engine]}, and would be ignored{hint}"
