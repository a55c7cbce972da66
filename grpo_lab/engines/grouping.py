"""Rows of a batch -> one request with `n = G` per prompt.

TRL's colocated engine gets every row of the batch as its own request: a prompt with G completions arrives G times with
`n = 1`. `GroupedEngine` stands in front of the engine, folds neighbouring equal prompts into one request with
`n = run length`, and hands the answers back row by row, so that the caller does not see the difference.

What this buys, and what does it: with prefix caching the pages of a prompt are computed once either way; folding saves
G - 1 requests per prompt, and makes the sharing visible in the request. Without prefix caching vLLM 0.31 computes the
prompt for each of the n samples, folded or not. Pages are shared whole, so a prompt of L tokens with pages of b tokens
costs  b * ⌊(L-1)/b⌋ + G * (L - b * ⌊(L-1)/b⌋)  prompt tokens per group instead of  G * L.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any


class EngineFault(RuntimeError):
    """The engine answered with something that must not be trained on."""


def runs_of_equal(rows: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Neighbouring equal rows -> [(index of the first, how many)], in order.

    >>> runs_of_equal(["a", "a", "b", "a"])
    [(0, 2), (2, 1), (3, 1)]
    """
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        if runs and rows[runs[-1][0]] == row:
            first, count = runs[-1]
            runs[-1] = (first, count + 1)
        else:
            runs.append((index, 1))
    return runs


class GroupedEngine:
    """A `vllm.LLM` whose `generate` folds equal prompts and refuses answers that cannot be trained on.

    Everything else is passed through to the engine.

    Attributes:
        on_fault: is given the ``EngineFault`` of a log-prob that is NaN or infinite; None: it is raised.
        faulty: there was one, so pages of the KV cache may hold NaN until `sync.clear_cache`.
    """

    on_fault: Callable[[EngineFault], None] | None = None
    faulty = False

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_llm"], name)

    @property
    def llm(self) -> Any:
        return self._llm

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        """One request output per row of `prompts`, each with `sampling_params.n` completions.

        Rows are folded when they hold token ids only; rows with images are passed on as they are. So are rows with
        a fixed `seed`, where folding would change which completion is drawn.
        """
        foldable = sampling_params.n == 1 and sampling_params.seed is None
        if not foldable or any(set(row) != {"prompt_token_ids"} for row in prompts):
            outputs = self._llm.generate(prompts, sampling_params=sampling_params, use_tqdm=use_tqdm)
            self._check(outputs)
            return list(outputs)

        runs = runs_of_equal([tuple(row["prompt_token_ids"]) for row in prompts])
        requests = [prompts[first] for first, _ in runs]
        parameters = [with_samples(sampling_params, count) for _, count in runs]
        outputs = self._llm.generate(requests, sampling_params=parameters, use_tqdm=use_tqdm)
        self._check(outputs)
        return [row for output, (_, count) in zip(outputs, runs, strict=True) for row in one_per_row(output, count)]

    def _check(self, outputs: Sequence[Any]) -> None:
        try:
            check_logprobs(outputs)
        except EngineFault as fault:
            self.faulty = True
            if self.on_fault is None:
                raise
            self.on_fault(fault)


def with_samples(sampling_params: Any, count: int) -> Any:
    parameters = sampling_params.clone()
    parameters.n = count
    return parameters


def one_per_row(output: Any, count: int) -> list[Any]:
    """A request output with `count` completions -> `count` request outputs with one completion each."""
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    if len(completions) != count:
        raise EngineFault(f"asked the engine for {count} completions of a prompt, got {len(completions)}")
    rows = []
    for completion in completions:
        row = copy.copy(output)
        row.outputs = [completion]
        rows.append(row)
    return rows


def check_logprobs(outputs: Sequence[Any]) -> None:
    """EngineFault where the log-prob of a sampled token is NaN or infinite.

    TRL turns such a value into `None` and then into an importance ratio of one: a broken engine would train on.
    """
    for row, output in enumerate(outputs):
        for completion in output.outputs:
            if completion.logprobs is None:
                continue
            for position, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                value = entries[token].logprob
                if not math.isfinite(value):
                    raise EngineFault(
                        f"the engine returned log-prob {value} for token {token} at position {position} of a "
                        f"completion of prompt {row}; its weights or its KV cache hold NaN or infinity"
                    )
