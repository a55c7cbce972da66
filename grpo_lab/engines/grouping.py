"""Folding of a batch's equal rows: G rows with the same prompt become one vLLM request with `n = G`.

TRL's colocated engine gets a prompt with G completions G times, each with `n = 1`. `GroupedEngine` folds neighbouring
equal prompts into one request, and returns the answers row by row.

With prefix caching the pages of a prompt are computed once either way; folding saves G - 1 requests per prompt. Only
whole pages are shared. So with pages of b tokens, the prompt tokens computed for a group with a prompt of L tokens are

    b * ⌊(L-1)/b⌋ + G * (L - b * ⌊(L-1)/b⌋)        instead of  G * L
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any


class EngineFault(RuntimeError):
    """Raised if an engine's answer must not be trained on: a log-prob that is not finite, or missing completions."""


class GroupedEngine:
    """A `vllm.LLM` whose `generate` folds equal prompts and refuses answers that cannot be trained on. It has all other
    attributes of the `LLM`, too.

    Attributes:
        on_fault: function that is called with the ``EngineFault`` of a log-prob that is NaN or infinite; None: the
            fault is raised.
        faulty: whether there was such a fault. Pages of the KV cache may hold NaN then, until `sync.clear_cache`.
        adapters: vLLM's `LoRARequest`s that the engine holds. It samples with the last one.
    """

    on_fault: Callable[[EngineFault], None] | None = None
    faulty = False

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.adapters: list[Any] = []

    @property
    def adapter(self) -> Any:
        """Return the adapter (`LoRARequest`) that the engine samples with, None if it samples with the base weights
        alone."""
        if self.adapters:
            return self.adapters[-1]
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["llm"], name)

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        """Complete prompts. Return one vLLM `RequestOutput` per row of `prompts`, each with `sampling_params.n`
        completions.

        Neighbouring rows with the same token ids become one request. They are passed on row by row if one of them has
        more than token ids (images), if `n` is not 1, or if there is a `seed`: folding would change what is drawn.
        Raises EngineFault if the engine makes another number of completions.
        """
        foldable = sampling_params.n == 1 and sampling_params.seed is None
        if not foldable or any(set(row) != {"prompt_token_ids"} for row in prompts):
            return self._outputs(prompts, sampling_params, use_tqdm)
        runs = [list(run) for _, run in itertools.groupby(prompts, key=lambda row: list(row["prompt_token_ids"]))]
        parameters = [sampling_params.clone() for _ in runs]
        for own, run in zip(parameters, runs, strict=True):
            own.n = len(run)
        rows = []
        for output, run in zip(self._outputs([run[0] for run in runs], parameters, use_tqdm), runs, strict=True):
            if len(output.outputs) != len(run):
                raise EngineFault(f"asked the engine for {len(run)} completions of a prompt, got {len(output.outputs)}")
            for completion in sorted(output.outputs, key=lambda completion: completion.index):
                row = copy.copy(output)
                row.outputs = [completion]
                rows.append(row)
        return rows

    def _outputs(self, requests: Sequence[Any], parameters: Any, use_tqdm: bool) -> list[Any]:
        more = {}
        if self.adapters:
            more = {"lora_request": self.adapter}
        return self.checked(self.llm.generate(requests, sampling_params=parameters, use_tqdm=use_tqdm, **more))

    def checked(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the outputs as a list. A log-prob that is NaN or infinite sets ``faulty`` and is reported to
        ``on_fault``, or raised as EngineFault if that is None."""
        try:
            check_logprobs(outputs)
        except EngineFault as fault:
            self.faulty = True
            if self.on_fault is None:
                raise
            self.on_fault(fault)
        return list(outputs)


def check_logprobs(outputs: Sequence[Any]) -> None:
    """Raise EngineFault if a log-prob of a sampled token in vLLM's `RequestOutput`s is NaN or infinite. TRL turns such
    a value into `None` and then into an importance ratio of one, so that a broken engine would go unnoticed."""
    for row, output in enumerate(outputs):
        for completion in output.outputs:
            scored = zip(completion.token_ids, completion.logprobs or [], strict=completion.logprobs is not None)
            for position, (token, entries) in enumerate(scored):
                if not math.isfinite(value := entries[token].logprob):
                    raise EngineFault(
                        f"the engine returned log-prob {value} for token {token} at position {position} of a completion"
                        f" of prompt {row}; its weights or its KV cache hold NaN or infinity"
                    )
