"""n completions for each prompt from a vLLM engine, as token ids: for curation, where no trainer stands behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.rollouts.grouping import GroupedEngine


@dataclass(frozen=True)
class SampledIds:
    """Token ids of a completion, the end token included; `ended` is False where the length limit cut it."""

    ids: list[int]
    ended: bool


def engine_samples(
    engine: GroupedEngine,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    stop_token_ids: Sequence[int],
) -> list[list[SampledIds]]:
    """Pure sampling (no top-k, top-p or penalty) at `temperature`; 0 is greedy. In the prompts' order."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            n=n,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=max_new_tokens,
            seed=seed + place * n,  # vLLM gives sample k of a request seed + k: no two samples share one
            stop_token_ids=list(stop_token_ids),
        )
        for place in range(len(prompts))
    ]
    outputs = engine.llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], parameters, use_tqdm=False)
    return [
        [
            SampledIds(list(completion.token_ids), completion.finish_reason == "stop")
            for completion in sorted(output.outputs, key=lambda completion: completion.index)
        ]
        for output in outputs
    ]
