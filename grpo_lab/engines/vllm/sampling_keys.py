"""Check of `generation_kwargs`: which keys an engine may be given in training, and why the others are refused.

`generation_kwargs` go into vLLM's `SamplingParams` (an engine in this process), into the body of a request (a server)
or into transformers' `GenerationConfig`; the latter two ignore keys that they do not know. Some keys break what TRL
assumes about the answer: which log-prob is the sampled token's, how many completions a prompt has, where one ended. No
error follows, but numbers are wrong. So only the keys in an engine's list pass. Keys that change the distribution
(top-p, penalties, a grammar) are among them: the sampler correction decides about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.settings import did_you_mean

#: Engine → what its `generation_kwargs` go into, in words.
WHERE = {
    "colocate": "vLLM's SamplingParams",
    "server": "vLLM's completion request",
    "transformers": "transformers' GenerationConfig",
}
#: Keys that repeat a setting of TRL. A value that equals the setting passes; another one is refused.
ALIAS = {"temperature": "temperature", "max_tokens": "max_completion_length", "max_new_tokens": "max_completion_length"}

_VLLM = (
    "temperature max_tokens top_p top_k min_p repetition_penalty presence_penalty frequency_penalty min_tokens "
    "logit_bias bad_words allowed_token_ids structured_outputs include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens watermarking repetition_detection stop stop_token_ids "
)
_PASS = {
    "colocate": _VLLM + "detokenize skip_reading_prefix_cache extra_args",
    "server": _VLLM + "user priority session_id response_format vllm_xargs cache_salt",
    "transformers": (
        "max_new_tokens min_new_tokens min_length max_time temperature top_k top_p min_p top_h typical_p "
        "epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size bad_words_ids "
        "renormalize_logits remove_invalid_values exponential_decay_length_penalty suppress_tokens sequence_bias "
        "begin_suppress_tokens guidance_scale watermarking_config num_beams early_stopping length_penalty "
        "num_beam_groups diversity_penalty use_cache cache_implementation cache_config max_cache_len compile_config "
        "prefill_chunk_size continuous_batching_config"
    ),
}
#: Engine -> keys that are passed on to it.
PASS = {engine: names.split() for engine, names in _PASS.items()}
_COUNT = "the number of completions of a prompt is `num_generations`"
_LOG_PROB = "TRL takes the first log-prob of a position for the sampled token's, and asks for that one by itself"
_FORCED = "a forced token would be trained on as if it were sampled"
#: Key of some engine -> why it is refused. With these keys nothing would fail, but numbers would be wrong.
WRONG_NUMBERS = {
    **dict.fromkeys(("n", "num_return_sequences"), _COUNT),
    **dict.fromkeys(("logprobs", "logprob_token_ids"), _LOG_PROB),
    **dict.fromkeys(("trace_decode_token_ids", "forced_eos_token_id"), _FORCED),
    **dict.fromkeys(
        ("prompt", "prompt_embeds", "truncate_prompt_tokens", "echo"),
        "the trainer would compute log-probs behind another prompt",
    ),
    "thinking_token_budget": f"{_FORCED}; use `rollout.thinking_budget`",
    "seed": (
        "every request would draw with the same random numbers; set the run's `seed`, `rollout.engine.seed`, or "
        "`grpo-lab serve --seed`"
    ),
    "ignore_eos": (
        "tokens behind the end of a completion would be rewarded and trained on; `min_tokens` keeps completions from "
        "ending early"
    ),
    "use_beam_search": "the best beam is no sample of the policy, and has no log-probs",
    "do_sample": "greedy completions of a group are all equal, and no group can teach anything",
    "max_length": "TRL sets `max_new_tokens`, which wins over it; set `max_completion_length`",
    "eos_token_id": (
        "generation would end at one token, and the trainer take another for the end of a completion; set "
        "`eos_token_id` in the model's generation_config"
    ),
    "pad_token_id": "the trainer would take padding for completion; set the tokenizer's `pad_token`",
}


def refuse_keys(extra: Mapping[str, Any], engine: str) -> None:
    """Raise ValueError for the first key of `generation_kwargs` (``extra``) that the engine ignores or that makes
    numbers wrong. ``engine``: a key of `WHERE`."""
    for key, value in extra.items():
        if key in PASS[engine] or (engine, key, value) == ("transformers", "do_sample", True):  # as TRL sets it
            continue
        if key in WRONG_NUMBERS:
            raise ValueError(f"`generation_kwargs.{key}`={value!r} does not work here: {WRONG_NUMBERS[key]}")
        of_another = [WHERE[other] for other in WHERE if key in PASS[other]]
        hint = ""
        if of_another:
            hint = f"; it is one of {of_another[0]}"
        raise ValueError(
            f"`generation_kwargs.{key}` is no key of {WHERE[engine]} that a training takes: it would be ignored, or "
            f"change what is read from the answer{hint}{did_you_mean(key, PASS[engine])}"
        )


def refuse_two_names(extra: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a key of `generation_kwargs` (``extra``) contradicts the setting of TRL that it repeats
    (`ALIAS`). `settings`: the setting's name → its value; one that is None or missing is not compared."""
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
    """Raise ValueError for stop texts and stop tokens in `generation_kwargs`. To be called if truncated completions are
    masked: TRL takes completions that end so for truncated ones."""
    for key in ("stop", "stop_token_ids"):
        if extra.get(key):
            raise ValueError(
                f"`generation_kwargs.{key}` does not combine with `mask_truncated_completions`: a completion that ends "
                "there has no end-of-sequence token, counts as truncated, and would carry no loss; leave one of them "
                "out"
            )
