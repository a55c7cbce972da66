"""The tokens that the engine kept at each place (``top_p``, ``top_k``, ``min_p``), for log-probs over just these.

TRL's engine answers with log-probs *after* the cut: a token that was cut has −∞. With ``top_k`` = K at most K tokens
stay, so an answer with 2·K log-probs a place holds the whole set, ties included. That is proven at every place: the
probabilities of the set must sum to 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: How far the probabilities of a kept set may be from 1, a sum of float32 numbers.
MASS = 1e-4
#: Answers hold so many times ``top_k`` log-probs a place: more tokens stay where several are equally likely.
TIES = 2


class KeptSets:
    """Reads the kept sets out of the engine's answers, and holds those of the last generation.

    Args:
        top_k: the run's; 0: log-probs are of the whole vocabulary, and answers are left alone.
    """

    def __init__(self, top_k: int) -> None:
        self.logprobs = TIES * top_k
        self._rows: list[list[list[int]]] = []

    def taken(self, answer: Any) -> Any:
        """Return the engine's answer with the sampled tokens' log-probs alone, as TRL reads them; keep the sets. Raises
        ValueError where the answer does not hold a whole set."""
        if not self.logprobs:
            return answer
        prompt_ids, completion_ids, logprobs, token_ids = answer
        self._rows = []
        own = []
        for ids, values, names in zip(completion_ids, logprobs, token_ids, strict=True):
            places = [
                dict(zip(at_place, of_place, strict=True)) for at_place, of_place in zip(names, values, strict=True)
            ]
            sets = [[name for name, value in place.items() if value not in (None, -math.inf)] for place in places]
            for token, place, kept in zip(ids, places, sets, strict=True):
                mass = sum(math.exp(place[name]) for name in kept)
                if token not in kept or abs(mass - 1) > MASS:
                    raise ValueError(
                        f"the engine kept more tokens at a place than it named ({len(kept)} of probability {mass:.6f} "
                        f"together): more than {self.logprobs} are equally likely; lower `top_k`, or set "
                        "`vllm_importance_sampling_correction: false`"
                    )
            self._rows.append(sets)
            own.append([[place[token]] for token, place in zip(ids, places, strict=True)])
        return prompt_ids, completion_ids, own, [[[token] for token in ids] for ids in completion_ids]

    def tensor(self, completion_ids: Tensor) -> Tensor | None:
        """Return the sets of the last generation as long ``[B, T, K]``: token ids + 1, and 0 for no token. None if they
        are not read. ``completion_ids``: ``[B, T]``, the batch that was made of it."""
        if not self.logprobs:
            return None
        rows, width = completion_ids.shape
        if len(self._rows) != rows:
            raise ValueError(
                f"`top_p`, `top_k` or `min_p`: the engine was last asked for {len(self._rows)} completions, and the "
                f"batch has {rows}; where something else asks it (tools, a `rollout_func`), leave them out"
            )
        widest = max((len(kept) for sets in self._rows for kept in sets), default=1)
        found = torch.zeros(rows, width, widest, dtype=torch.long)
        for row, sets in enumerate(self._rows):
            for place, kept in enumerate(sets):
                found[row, place, : len(kept)] = torch.tensor(kept) + 1
        return found.to(completion_ids.device)
