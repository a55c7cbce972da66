"""Sampling keys of an engine, and what each would do to a training run: let through, or refused with the reason.

`generation_kwargs` go into vLLM's `SamplingParams` (an engine in this process), into the body of a request (a server:
what it does not know it ignores) or into transformers' `GenerationConfig` (likewise). Some keys change what TRL
believes about the answer: which log-prob is the sampled token's, how many completions a prompt has, where one ended.
Nothing fails then; the numbers are wrong. So a key passes where it is in the table of its engine, and no other. Those
that bend the distribution (top-p, penalties, a grammar) pass here: the sampler correction decides about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.settings import did_you_mean

WHERE = {
    "colocate": "vLLM's SamplingParams",
    "server": "vLLM's completion request",
    "transformers": "transformers' GenerationConfig",
}
#: keys that say what a setting of TRL says; equal is fine, another value is refused
ALIAS = {"temperature": "temperature", "max_tokens": "max_completion_length", "max_new_tokens": "max_completion_length"}

#: why a key is refused, and the values with which it does nothing
Refused = tuple[str, tuple[Any, ...]]

_VLLM = (
    "temperature max_tokens top_p top_k min_p repetition_penalty presence_penalty frequency_penalty min_tokens "
    "logit_bias bad_words allowed_token_ids structured_outputs include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens watermarking repetition_detection stop stop_token_ids"
)
_PASS = {
    "colocate": f"{_VLLM} detokenize skip_reading_prefix_cache extra_args",
    "server": f"{_VLLM} user priority session_id response_format vllm_xargs cache_salt",
    "transformers": "max_new_tokens min_new_tokens min_length max_time temperature top_k top_p min_p top_h typical_p "
    "epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size bad_words_ids "
    "renormalize_logits remove_invalid_values exponential_decay_length_penalty suppress_tokens sequence_bias "
    "begin_suppress_tokens guidance_scale watermarking_config num_beams early_stopping length_penalty num_beam_groups "
    "diversity_penalty use_cache cache_implementation cache_config max_cache_len compile_config prefill_chunk_size "
    "continuous_batching_config",
}
_COUNT: Refused = ("the number of completions of a prompt is `num_generations`", ())
_OTHER_PROMPT: Refused = ("the trainer would compute log-probs behind another prompt", (None,))
_BY_VLLM: dict[str, Refused] = {
    "n": _COUNT,
    "logprobs": (
        "TRL takes the first log-prob of a position for the sampled token's, and with more than one that is the "
        "top-ranked token's; it asks for the sampled token's by itself",
        (0,),
    ),
    "logprob_token_ids": (
        "TRL takes the first log-prob of a position for the sampled token's, and the first would be another token's",
        (None,),
    ),
    "seed": (
        "every request would draw with the same random numbers: equal completions in a group (in this process), and "
        "the same draws at every step (a server); set the run's `seed`, `rollout.engine.seed`, or `grpo-lab serve "
        "--seed`",
        (None, -1),
    ),
    "ignore_eos": (
        "tokens behind the end of a completion would be rewarded and trained on; `min_tokens` keeps completions from "
        "ending early",
        (False,),
    ),
    "thinking_token_budget": (
        "the engine would force tokens that the trainer takes for sampled ones; use `rollout.thinking_budget`",
        (None, -1),
    ),
}
_REFUSED: dict[str, dict[str, Refused]] = {
    "colocate": {**_BY_VLLM, "trace_decode_token_ids": ("tokens would be given instead of sampled", (None,))},
    "server": {
        **_BY_VLLM,
        **dict.fromkeys(("prompt", "prompt_embeds", "truncate_prompt_tokens"), _OTHER_PROMPT),
        "echo": ("the prompt would be taken for a part of the completion", (False, None)),
        "use_beam_search": ("the best beam is no sample of the policy, and has no log-probs", (False,)),
    },
    "transformers": {
        "do_sample": ("greedy completions of a group are all equal, and no group can teach anything", (True, None)),
        "num_return_sequences": _COUNT,
        "max_length": ("TRL sets `max_new_tokens`, which wins over it; set `max_completion_length`", (None,)),
        "eos_token_id": (
            "generation would end at one token, and the trainer take another for the end of a completion (padding is "
            "then trained on); set `eos_token_id` in the model's generation_config",
            (),
        ),
        "pad_token_id": ("the trainer would take padding for completion; set the tokenizer's `pad_token`", ()),
        "forced_eos_token_id": ("the last token would be forced, and trained on as if sampled", (None,)),
    },
}
#: engine -> key -> None (it passes), or why it is refused
KEYS: dict[str, dict[str, Refused | None]] = {
    engine: {**dict.fromkeys(_PASS[engine].split()), **_REFUSED[engine]} for engine in WHERE
}


def refuse_keys(extra: Mapping[str, Any], engine: str) -> None:
    """ValueError for the first key of `generation_kwargs` that this engine ignores or that makes wrong numbers."""
    for key, value in extra.items():
        if key not in KEYS[engine]:
            others = [WHERE[other] for other in WHERE if key in KEYS[other]]
            hint = ""
            if others:
                hint = f"; it is one of {others[0]}"
            raise ValueError(
                f"`generation_kwargs.{key}` is no key of {WHERE[engine]} that a training takes: it would be ignored, or"
                f" change what is read from the answer{hint}{did_you_mean(key, KEYS[engine])}"
            )
        why, harmless = KEYS[engine][key] or ("", (value,))
        if not any(value is good or value == good for good in harmless):
            raise ValueError(f"`generation_kwargs.{key}`={value!r} does not work here: {why}")


def refuse_two_names(extra: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """ValueError where a key says something else than the setting of TRL that it is another name for. `settings`: the
    setting's name -> its value; one that is None or left out decides nothing."""
    for key, setting in ALIAS.items():
        ours = settings.get(setting)
        if key in extra and ours is not None and extra[key] != ours:
            if setting == "temperature":
                meaning = "the engine would sample at the one, and the trainer compute its log-probs at the other"
            else:
                meaning = "the engine would stop at the one, and losses, rewards and metrics count with the other"
            raise ValueError(
                f"`generation_kwargs.{key}` is {extra[key]!r} and `{setting}` is {ours!r}: {meaning}; set `{setting}` "
                "alone"
            )


def refuse_ends(extra: Mapping[str, Any]) -> None:
    """ValueError for stops that TRL takes for truncation, where truncated completions are masked."""
    for key in ("stop", "stop_token_ids"):
        if extra.get(key):
            raise ValueError(
                f"`generation_kwargs.{key}` does not combine with `mask_truncated_completions`: a completion that ends "
                "there has no end-of-sequence token, counts as truncated, and would carry no loss; leave one of them "
                "out"
            )
