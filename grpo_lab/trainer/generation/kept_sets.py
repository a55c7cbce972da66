"""The tokens that the engine kept at each place (``top_p``, ``top_k``, ``min_p``), for log-probs over just these.

With these settings an engine samples each token from a part of the vocabulary, the *kept set*, and returns log-probs
normalised over that set; all other tokens have −∞. The trainer must normalise over the same set, so it needs the sets.
With ``top_k`` = K a set can be larger than K, since tokens as likely as the K-th stay, too (in bfloat16 often several).
So more than K log-probs a place are asked for, and they are the whole set if their probabilities sum to 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: How far the sum of a kept set's probabilities, float32 numbers, may be from 1.
MASS = 1e-4
#: Smallest number of log-probs a place that are asked for beyond ``top_k``, for tokens as likely as the K-th.
TIES = 16


class KeptSets:
    """Reads the kept sets from the engine's answers, and holds those of the last generation.

    Args:
        top_k: the run's ``top_k``; 0 if log-probs are of the whole vocabulary: then answers are not changed.

    Attributes:
        logprobs: number of log-probs to ask for at each place, in addition to the sampled token's.
    """

    def __init__(self, top_k: int) -> None:
        self.logprobs = 0
        if top_k:
            self.logprobs = top_k + max(top_k, TIES)
        self._rows: list[list[list[int]]] = []
        self._tokens: list[list[int]] = []

    def taken(self, answer: Any) -> Any:
        """Store the kept set of every place in an engine's answer, and return the answer with the log-probs of the
        sampled tokens alone, as TRL reads them. ``answer``: what ``VLLMGeneration.generate`` returns. Raise ValueError
        if it does not hold a whole set at each place."""
        if not self.logprobs:
            return answer
        prompt_ids, completion_ids, logprobs, token_ids = answer
        self._rows = []
        self._tokens = [list(ids) for ids in completion_ids]
        own = []
        for ids, values, names in zip(completion_ids, logprobs, token_ids, strict=True):
            # token id → log-prob, at each place of the completion
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

    def tensor(self, completion_ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return the sets of the last generation as int ``[B, T, K]``: token ids + 1, and 0 for no token. Return None
        if sets are not read. K is the same on all ranks and in all batches.

        Args:
            completion_ids: long ``[B, T]``, the batch that was made of the last generation.
            mask: ``[B, T]``, 1 at its tokens; 0 throughout a row that is masked out.

        Raises:
            ValueError: the batch has other tokens than the last generation.
        """
        if not self.logprobs:
            return None
        rows = completion_ids.tolist()
        lengths = mask.sum(1).tolist()
        alike = len(rows) == len(self._tokens) and all(
            length <= len(made) and row[: len(made)] == made
            for row, length, made in zip(rows, lengths, self._tokens, strict=True)
        )
        if not alike:
            raise ValueError(
                f"`top_k` is set, and the batch's {len(rows)} completions are not the {len(self._tokens)} that the "
                "engine made last: where tools or a `rollout_func` make them, leave `top_k`, `top_p` and `min_p` out"
            )
        widest = self.logprobs + 1  # the sampled token may be one more
        found = torch.zeros(*completion_ids.shape, widest, dtype=torch.int32)
        for row, sets in enumerate(self._rows):
            padded = [[token + 1 for token in kept] + [0] * (widest - len(kept)) for kept in sets]
            found[row, : len(sets)] = torch.tensor(padded, dtype=torch.int32).view(-1, widest)
        return found.to(completion_ids.device)
