"""Train a run's preference model along with the policy. Another reward, the *judge*, compares completions of each
generation batch. Every so many steps the preference model is trained on all comparisons so far. On held-out prompts its
agreement with the judge is logged. A checkpoint holds model and comparisons."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from transformers import TrainerCallback

from grpo_lab.batch import RewardTable
from grpo_lab.io import write_json_lines
from grpo_lab.reading import read_json_lines
from grpo_lab.rewards.preference import PAIR, Pair, PreferenceReward, holds_out, orders, right_way_round
from grpo_lab.settings import one_of
from grpo_lab.trainer.ports import StepPort
from grpo_lab.trainer.ranks import named_place
from grpo_lab.trainer.resume.state import STATE, SavedState

FOLDER = "grpo_lab_preference"
"""Folder of the preference model in a checkpoint, as transformers saves it."""
COMPARISONS = "comparisons.jsonl"
"""File in that folder with the comparisons."""
PER_GROUP = 2
"""Largest number of comparisons that are kept of a group."""


class PreferenceInTraining(TrainerCallback):  # type: ignore[misc]
    """Trains the run's preference model, a `PreferenceReward` with a judge. Every rank holds the whole model and trains
    it on the same comparisons. Does nothing if there is no such reward.

    Attributes:
        reward: the reward that holds the preference model; None if there is none.
        kept: whether the model is trained during the run (the reward's ``every``), and not only compared.
        pairs: all comparisons so far.
        trained: the optimizer step at which the model was last trained.

    Raises:
        ValueError: several rewards are preference models with a judge, or ``judge`` names no other reward of the run.
    """

    holds = (
        "with a preference reward that is kept in training the step of its last training; its weights and comparisons "
        "are in `grpo_lab_preference/`"
    )

    def __init__(self, trainer: StepPort) -> None:
        self.trainer = trainer
        self.pairs = list[Pair]()
        self.trained = 0
        names = list(trainer.reward_func_names)
        rewards = trainer.reward_funcs
        found = [i for i, one in enumerate(rewards) if isinstance(one, PreferenceReward) and one.judge is not None]
        if len(found) > 1:
            raise ValueError(f"`rewards` has {len(found)} preference models with a `judge`; at most one can have it")
        self.reward: PreferenceReward | None = rewards[found[0]] if found else None
        self.kept = self.reward is not None and self.reward.every is not None
        if self.reward is None:
            return
        judge = self.reward.judge
        others = [name for i, name in enumerate(names) if i != found[0]]
        if judge not in others:
            said = one_of(judge, others)
            raise ValueError(f"`judge` of the preference model is {judge!r}, which no other reward is{said}")
        self.columns = found[0], names.index(judge)
        self.start = self.reward.model
        self.reward.seen = []

    def learn(self, table: RewardTable) -> None:
        """Collect comparisons from the rewards of all ranks' completions, log the agreement on held-out prompts, and
        train the model if that is due. Called after each generation in training. A collective."""
        if (reward := self.reward) is None:
            return
        step = self.trainer.state.global_step
        right = list[float]()
        with named_place("comparisons for the preference model"):
            texts = gather_object(list(reward.seen or ()))
        scores, judged = (table.values[:, column].tolist() for column in self.columns)
        draw = random.Random(f"{reward.seed}/{step}/{len(self.pairs)}")
        for group in orders(judged, table.group_size):
            different = [(better, worse) for better, worse in group if texts[better][1] != texts[worse][1]]
            if different and holds_out(texts[different[0][0]][0], reward.held_out):
                right += right_way_round((scores[better], scores[worse]) for better, worse in different)
            elif self.kept:
                for better, worse in draw.sample(different, min(PER_GROUP, len(different))):
                    if draw.random() < reward.noise:  # a simulated error of the judge
                        better, worse = worse, better
                    self.pairs.append(dict(zip(PAIR, (*texts[better], texts[worse][1]), strict=True)))
        book = self.trainer.recorder.book()
        book.add_alike("preference/pair_accuracy", torch.tensor(sum(right)), len(right))
        if self.kept:
            book.add_alike("preference/comparisons", torch.tensor(float(len(self.pairs))), 1)
        if reward.every is not None and step - self.trained >= reward.every:
            reward.fit(self.pairs, step)
            self.trained = step
            if self.trainer.accelerator.num_processes > 1:  # kernels may round differently
                with named_place("weights of the preference model"), torch.no_grad():
                    for weights in reward.classifier.parameters():
                        weights.copy_(broadcast(weights.detach().clone()))

    def save(self, folder: Path) -> dict[str, Any] | None:
        """Write the preference model and its comparisons into ``folder``, a checkpoint or that of the trained policy,
        and return the checkpoint's entry. Called on every rank; one writes."""
        if self.reward is None or not self.kept:
            return None
        if self.trainer.args.should_save:
            place = folder / FOLDER
            self.reward.classifier.save_pretrained(place)
            self.reward.tokenizer.save_pretrained(place)
            write_json_lines(place / COMPARISONS, self.pairs)
        return {"trained": self.trained, "pairs": len(self.pairs)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the start model and its comparisons, unless the training resumes after some steps."""
        if self.reward is not None and self.kept and state.global_step == 0:
            self.reward.restart(self.start)
            self.pairs = self.reward.earlier()
            self.trained = 0

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` wrote. Raise ValueError if the checkpoint has no preference model."""
        if self.reward is None or not self.kept or saved is None:
            return
        place = saved.checkpoint / FOLDER
        entry = saved.entry("preference", dict, "the preference model is then that of the start")
        if entry is None or not (place / COMPARISONS).is_file():
            raise ValueError(
                f"`resume_from_checkpoint`: {saved.checkpoint} was written without a preference model that is kept in "
                f"training ({FOLDER}, {STATE}); take another checkpoint, or set `every` of the reward to null"
            )
        self.reward.restart(str(place))
        self.pairs = [row for _, row in read_json_lines(place / COMPARISONS)]
        self.trained = int(entry["trained"])
