"""The tokens that the engine kept at each place (``top_p``, ``top_k``, ``min_p``), for log-probs over just these.

TRL's engine answers with log-probs *after* the cut: a token that was cut has −∞. With ``top_k`` = K tokens as likely as
the K-th stay, too (in bfloat16 often several). So an answer holds more than K log-probs a place, and it is proven that
they are the whole set: their probabilities sum to 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

#: How far the probabilities of a kept set may be from 1, a sum of float32 numbers.
MASS = 1e-4
#: Answers hold ``top_k`` log-probs a place and as many more, at least these: for tokens as likely as the last.
TIES = 16


class KeptSets:
    """Reads the kept sets out of the engine's answers, and holds those of the last generation.

    Args:
        top_k: the run's; 0: log-probs are of the whole vocabulary, and answers are left alone.
    """

    def __init__(self, top_k: int) -> None:
        self.logprobs = top_k and top_k + max(top_k, TIES)
        self._rows: list[list[list[int]]] = []
        self._tokens: list[list[int]] = []

    def taken(self, answer: Any) -> Any:
        """Return the engine's answer with the sampled tokens' log-probs alone, as TRL reads them; keep the sets. Raises
        ValueError where the answer does not hold a whole set."""
        if not self.logprobs:
            return answer
        prompt_ids, completion_ids, logprobs, token_ids = answer
        self._rows = []
        self._tokens = [list(ids) for ids in completion_ids]
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

    def tensor(self, completion_ids: Tensor, mask: Tensor) -> Tensor | None:
        """Return the sets of the last generation as int ``[B, T, K]``: token ids + 1, and 0 for no token. None if they
        are not read. K is the same on all ranks and in all batches.

        Args:
            completion_ids: ``[B, T]``, the batch that was made of it.
            mask: ``[B, T]``, 1 at its tokens; 0 at all of a row that is left out.

        Raises ValueError if these are not the tokens that the sets are of.
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
