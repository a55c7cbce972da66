"""The preference model of a run, kept in training: fresh comparisons of every generation batch, a training on old and
new ones every so many steps, its accuracy on those of held-out prompts; all of it in the checkpoint."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from transformers import TrainerCallback

from grpo_lab.batch import RewardTable
from grpo_lab.io import json_lines, write_json_lines
from grpo_lab.rewards.preference import PAIR, Pair, PreferenceReward, holds_out, order, orders
from grpo_lab.settings import one_of
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.ranks import at
from grpo_lab.trainer.resume.state import STATE, SavedState

FOLDER, COMPARISONS = "grpo_lab_preference", "comparisons.jsonl"
"""In a checkpoint: the model as transformers saves it, and the comparisons."""


class PreferenceInTraining(TrainerCallback):  # type: ignore[misc]
    """Does nothing where no reward is a `PreferenceReward` with a judge. Every rank holds the model whole and trains
    it on the same comparisons.

    Attributes:
        pairs: comparisons, old and new.
        trained: the optimizer step of the last training.

    Raises:
        ValueError: there are several, or its judge is none of the run's other rewards.
    """

    def __init__(self, trainer: StepPort) -> None:
        self.trainer, self.pairs, self.trained, self._loaded = trainer, list[Pair](), 0, False
        names, rewards = list(trainer.reward_func_names), trainer.reward_funcs
        found = [i for i, one in enumerate(rewards) if isinstance(one, PreferenceReward) and one.judge is not None]
        if len(found) > 1:
            raise ValueError(f"`rewards` has {len(found)} preference models with a `judge`; at most one can have it")
        self.reward: PreferenceReward | None = rewards[found[0]] if found else None
        if self.reward is None:
            return
        others = [name for i, name in enumerate(names) if i != found[0]]
        if self.reward.judge not in others:
            said = one_of(self.reward.judge, others)
            raise ValueError(
                f"`judge` of the preference model is {self.reward.judge!r}, which no other reward is{said}"
            )
        self.columns = found[0], names.index(self.reward.judge)
        self.start, self.reward.seen = self.reward.source, []

    def learn(self, table: RewardTable) -> None:
        """After each generation in training; ``table`` is of all ranks. A collective."""
        reward, trainer = self.reward, self.trainer
        if reward is None:
            return
        step, right = trainer.state.global_step, list[float]()
        with at("comparisons for the preference model"):
            texts = gather_object(list(reward.seen or ()))
        scores, judged = (table.values[:, column].tolist() for column in self.columns)
        draw = random.Random(f"{reward.seed}/{step}/{len(self.pairs)}")
        for group in orders(judged, table.group_size):
            different = [two for two in group if texts[two[0]][1] != texts[two[1]][1]]
            if different and holds_out(texts[different[0][0]][0], reward.held_out):
                known = [two for two in different if all(scores[place] == scores[place] for place in two)]
                right += [order(scores[one], scores[other]) for one, other in known]
                continue
            wanted = 0 if reward.every is None else min(reward.per_group, len(different))
            for two in draw.sample(different, wanted):
                first, second = reversed(two) if draw.random() < reward.noise else two
                self.pairs.append(dict(zip(PAIR, (*texts[first], texts[second][1]), strict=True)))
        book = trainer.recorder.book()
        book.add_alike("preference/pair_accuracy", torch.tensor(sum(right)), len(right))
        if reward.every is not None:
            book.add_alike("preference/comparisons", torch.tensor(float(len(self.pairs))), 1)
            if step - self.trained >= reward.every:
                self._train(reward, step)

    def _train(self, reward: PreferenceReward, step: int) -> None:
        reward.fit(self.pairs, step)
        self.trained = step
        if self.trainer.accelerator.num_processes > 1:  # kernels may round differently
            with at("weights of the preference model"), torch.no_grad():
                for weights in reward.model.parameters():
                    weights.copy_(broadcast(weights.detach().clone()))

    def save(self, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Into a checkpoint; called on every rank, of which one writes."""
        if self.reward is None or self.reward.every is None:
            return None
        if self.trainer.args.should_save:
            self.reward.model.save_pretrained(Path(folder) / FOLDER)
            self.reward.tokenizer.save_pretrained(Path(folder) / FOLDER)
            write_json_lines(Path(folder) / FOLDER / COMPARISONS, self.pairs)
        return {"trained": self.trained, "pairs": len(self.pairs)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.reward is not None and self.reward.every is not None and not self._loaded:
            self.reward.restart(self.start)
            self.pairs, self.trained = self.reward.earlier(), state.global_step
        self._loaded = False

    def load(self, saved: SavedState | None) -> None:
        """Go on with what ``save`` wrote."""
        if self.reward is None or self.reward.every is None or saved is None:
            return
        place = saved.checkpoint / FOLDER
        entry = saved.entry("preference", dict, "the preference model is then that of the start")
        if entry is None or not (place / COMPARISONS).is_file():
            raise ValueError(
                f"`resume_from_checkpoint`: {saved.checkpoint} was written without a preference model that is kept in "
                f"training (no entry `preference` in its {STATE}, or no {FOLDER}); take another checkpoint, or set "
                "`every` of the reward to null"
            )
        self.reward.restart(place)
        self.pairs = [row for _, row in json_lines(place / COMPARISONS) if isinstance(row, dict)]
        self.trained, self._loaded = int(entry["trained"]), True
