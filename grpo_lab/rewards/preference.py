"""`PreferenceReward`: a reward model of preferences that is kept in training while the policy trains against it.

Frozen, it is worth less the farther the policy leaves the completions that it was trained on: its reward rises while
what it stood for falls (over-optimisation, arXiv 2210.10760). With ``every`` it is trained every so many optimizer
steps, with the loss of TRL's RewardTrainer (Bradley-Terry, −log σ(r(x, y⁺) − r(x, y⁻))), on comparisons of the policy's
own current completions *together with* all earlier ones (arXiv 2505.18126). `LabTrainer` makes those, and keeps them
and the weights in its checkpoints (``trainer.scoring.preference``).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.io import json_lines
from grpo_lab.rewards.token_classification import saved_config, saved_tokenizer

Pair = dict[str, Any]
PAIR = ("prompt", "chosen", "rejected")
"""Its fields, in either of TRL's forms."""


class PreferenceReward:
    """``(prompts=[…], completions=[…]) -> [r, …]``; None for a text that is longer than the model's context.

    Args:
        model: folder or hub name of a sequence classifier with one label, as the stage ``reward_model`` leaves it.
        judge: name (as logged) of the run's reward that says which of two completions is better; its weight may be 0.
        every: optimizer steps between two trainings; None freezes the model. With a ``judge`` its pair accuracy is
            logged in any case.
        comparisons: file of JSON lines with the comparisons that it has learned so far.
        noise: share of fresh comparisons that the judge says the wrong way round.
        held_out: share of prompts whose comparisons are never learned: on them ``preference/pair_accuracy`` is
            measured. The stage ``reward_model`` holds the same ones out.
        per_group: most fresh comparisons a group.
        steps: optimizer steps of one training.
        batch_size: comparisons a step.
        learning_rate: of AdamW, whose moments begin anew with each training.
        seed: of noise and draws.
    """

    __name__ = "preference_reward"

    def __init__(
        self,
        model: str,
        *,
        judge: str | None = None,
        every: int | None = None,
        comparisons: str | None = None,
        noise: float = 0.0,
        held_out: float = 0.2,
        per_group: int = 2,
        steps: int = 20,
        batch_size: int = 16,
        learning_rate: float = 1e-5,
        seed: int = 0,
    ) -> None:
        if every is not None and (every < 1 or judge is None):
            raise ValueError(f"`every` is {every}: at least 1, and a `judge` that says which completion is better")
        if not (0.0 <= noise <= 0.5 and 0.0 <= held_out < 1.0):
            raise ValueError(f"`noise` is {noise}, at most 0.5, and `held_out` {held_out}, below 1; both from 0 on")
        if min(per_group, steps, batch_size) < 1:
            raise ValueError(f"`per_group` {per_group}, `steps` {steps}, `batch_size` {batch_size}: at least 1 each")
        config = saved_config(str(model), "SequenceClassification")
        if config.num_labels != 1:
            raise ValueError(f"`model` {str(model)!r} has {config.num_labels} labels; a reward is one number")
        self.source, self.tokenizer = str(model), saved_tokenizer(str(model))
        self.context = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
        self.judge, self.every, self.comparisons, self.noise, self.held_out = judge, every, comparisons, noise, held_out
        self.per_group, self.steps, self.batch_size = per_group, steps, batch_size
        self.learning_rate, self.seed = learning_rate, seed
        #: what was scored last, for the trainer that keeps it in training; None outside of one
        self.seen: list[tuple[Any, Any]] | None = None
        self._model: Any = None

    def __call__(
        self, prompts: Sequence[Any] | None = None, completions: Sequence[Any] | None = None, **_: Any
    ) -> list[float | None]:
        if prompts is None or completions is None or len(prompts) != len(completions):
            raise ValueError("PreferenceReward needs prompts=[…] and completions=[…], one to one")
        if self.seen is None and self.every is not None:
            raise ValueError("`every` of PreferenceReward: only grpo_lab.LabTrainer keeps a reward model in training")
        self.seen = [*zip(prompts, completions, strict=True)]
        return self.scores(self.seen)

    def scores(self, texts: Sequence[tuple[Any, Any]]) -> list[float | None]:
        """r of each (prompt, completion)."""
        import torch

        read = [self.ids(*text) for text in texts]
        found: list[float | None] = [None] * len(read)
        fitting = sorted((row for row, ids in enumerate(read) if len(ids) <= self.context), key=lambda r: len(read[r]))
        for first in range(0, len(fitting), 2 * self.batch_size):
            batch = fitting[first : first + 2 * self.batch_size]
            with torch.no_grad():
                values = self.forward([read[row] for row in batch]).tolist()
            for row, value in zip(batch, values, strict=True):
                found[row] = value
        return found

    def ids(self, prompt: Any, completion: Any) -> list[int]:
        """Prompt and completion as TRL's RewardTrainer reads them."""
        if isinstance(prompt, str):
            end, text = self.tokenizer.eos_token, prompt + completion
            return list(self.tokenizer(text if text.endswith(end) else text + end)["input_ids"])
        whole = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=True, return_dict=True)
        return list(whole["input_ids"])

    def forward(self, rows: Sequence[list[int]]) -> Any:
        """r of each row of ids, ``[B]`` in float32."""
        import torch

        model, width, pad = self.model, max(map(len, rows)), self.tokenizer.pad_token_id
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float()

    @property
    def model(self) -> Any:
        """The classifier, loaded when it is asked for first; without dropout, as in RewardTrainer."""
        if self._model is None:
            from accelerate import PartialState
            from transformers import AutoModelForSequenceClassification as Kind

            self._model, loading = Kind.from_pretrained(self.source, output_loading_info=True)
            if lacking := sorted(loading["missing_keys"]):
                raise ValueError(f"the weights of {self.source!r} lack {lacking}: its scores would be random")
            self._model.config.get_text_config().pad_token_id = (
                self.tokenizer.pad_token_id
            )  # where a row's last token is
            self._model.to(PartialState().device).eval()
        return self._model

    def restart(self, place: str | Path) -> None:
        """Go on with the weights that lie there."""
        self.source, self._model = str(place), None

    def fit(self, pairs: Sequence[Pair], step: int) -> None:
        """One training on ``pairs``, drawn by seed and step. The global random state is left as it was."""
        import torch

        draw, model = random.Random(f"{self.seed}/{step}"), self.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        both = [[self.ids(pair["prompt"], pair[side]) for side in ("chosen", "rejected")] for pair in pairs]
        both = [ids for ids in both if max(map(len, ids)) <= self.context]
        for _ in range(self.steps if both else 0):
            some = draw.sample(both, min(self.batch_size, len(both)))
            with torch.enable_grad():
                chosen, rejected = self.forward([ids[0] for ids in some] + [ids[1] for ids in some]).chunk(2)
                (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def pair_accuracy(self, pairs: Sequence[Pair]) -> float | None:
        """The share of ``pairs`` that it has the right way round, ties as halves; None without any."""
        first, second = (
            self.scores([(pair["prompt"], pair[side]) for pair in pairs]) for side in ("chosen", "rejected")
        )
        known = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
        found = [order(better, worse) for better, worse in known]
        return sum(found) / len(found) if found else None

    def earlier(self) -> list[Pair]:
        """The ``comparisons`` that it may learn. ValueError for a line that is none."""
        found = []
        for number, row in json_lines(self.comparisons) if self.comparisons else ():
            if isinstance(row, str) or not {*PAIR} <= row.keys():
                said = row if isinstance(row, str) else f"it has {sorted(row)}"
                raise ValueError(f"`comparisons`, {self.comparisons}, line {number} is no comparison: {said}")
            found.append({name: row[name] for name in PAIR})
        return [pair for pair in found if not holds_out(pair["prompt"], self.held_out)]


def holds_out(prompt: Any, share: float) -> bool:
    """Whether no comparison of this prompt is learned: by its digest, the same in every run and stage."""
    digest = hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def order(better: float, worse: float) -> float:
    """1 for the right way round, ½ for a tie."""
    return 0.5 if better == worse else float(better > worse)


def orders(judged: Sequence[float], group_size: int) -> Iterator[list[tuple[int, int]]]:
    """For each group all (better, worse), by what the judge said of its completions; NaN is in no pair."""
    for start in range(0, len(judged), group_size):
        group = range(start, start + group_size)
        yield [(one, other) for one in group for other in group if judged[one] > judged[other]]
