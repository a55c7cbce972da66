"""Partial rollouts, ``rollout: {cut_after: c}``: a completion that is longer than c tokens is put aside and gone on
with at the next generation batch, so that a few long ones do not hold up the rest.

Generation batch k is to have P groups of G completions. In place of TRL's generation:

    until P groups are whole, and at least once:
        begin the loader's next unread generation batch, where fewer than P are whole; it may be up to ⌈T/c⌉ ahead of k
        go on with every completion that has no end, each by at most c tokens: one call of the engine
    train on the P oldest whole groups; all others wait

T is ``max_completion_length`` (completions with fewer than c tokens left to it are a call of their own). A completion
ends by an end token or by T tokens over all its segments, never because a segment ends. A group waits until all of it
is whole. At the end of an epoch and of the training there is nothing more to begin, and the waiting groups are gone on
with until they are whole: each prompt of an epoch is trained on once in it, in another order.

Each token keeps the log-prob of the policy that sampled it, so the sampler's correction, a ratio per token, is right
for a completion of several policies. ``policy_version`` of a row is that of its *first* segment, the oldest.

The groups are the same on every rank; each asks the engine for its share of the rows. A checkpoint keeps them
(``waiting.py``). What an engine call that fails would have added is not in it.

A row that comes without a finite log-prob of each token (NaN in the engine's weights or KV cache) is not gone on with:
it is asked for again at the next turn, after the weights were sent anew, which clears that cache. From the ``TURNS``-th
such turn in a row of one generation batch on rows are taken as they are, and the guard leaves out what trains on them.

Sources: Kimi k1.5 (arXiv 2501.12599, partial rollouts), which puts aside what passes a budget of tokens; APRIL (arXiv
2509.18521), which begins more than it trains on. Both go on under the newer policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_lab.trainer.generation.in_step import generate_in_step
from grpo_lab.trainer.generation.read_ahead import ReadAhead, batches_ahead, refuse_turns
from grpo_lab.trainer.generation.waiting import WaitingCompletion, WaitingGroup, begin, read_groups, write_groups
from grpo_lab.trainer.resume.state import GeneratedTokens, SavedState
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import replaced

Rows = list[dict[str, Any]]
Groups = tuple[WaitingGroup, ...]
#: turns in a row, within a generation batch, of which the last takes rows without log-probs as they are
TURNS = 3


class PartialRollouts(TrainerCallback):  # type: ignore[misc]
    """Chooses the groups that a generation batch trains on, and keeps those that wait; does nothing where it is not
    asked for. Every rank calls every method.

    Attributes:
        asked: prompts of the rows that this rank has in the engine at the moment; empty between two calls.

    Raises:
        ValueError: completions that are made in turns, or bring images.
    """

    holds = (
        "with `rollout.cut_after` how many groups were begun and not yet trained on; they are in "
        "`grpo_lab_generation_waiting.safetensors`"
    )

    def __init__(
        self, trainer: GRPOTrainer, settings: RolloutSettings, ahead: ReadAhead, generated: GeneratedTokens
    ) -> None:
        self.trainer: Any = trainer
        self._generated = generated
        self.cut = settings.cut_after
        self._ahead = ahead
        self._batches_ahead = batches_ahead(settings, trainer.max_completion_length)
        self.asked: list[list[int]] = []
        self._begun: Any = None  # HF's state object of the training that memory was cleared for
        self._forget()
        if self.cut is None:
            return
        turns = "whose completions are put together in turns of its own, and none of them can be put aside"
        images = "whose images would have to be kept with a completion that waits"
        refuse_turns(trainer, "rollout.cut_after", turns, images)

    def _forget(self) -> None:
        self._waiting: Groups = ()
        self._open: Groups = ()  # those of the generation batch at hand
        self._again = False  # a checkpoint was written inside of that batch, and its micro-batches are lost
        self._kept: tuple[Groups, Groups] = (), ()  # after the last whole optimizer step
        self._answer: tuple[list[list[int]], list[WaitingCompletion]] | None = None
        self._versions: list[int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._begun is not state:
            self._forget()
        self._begun = state
        self._ahead.forget()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._kept = self._waiting, () if self.trainer.phase.at_end else self._open

    def choose(self, inputs: Rows) -> Rows:
        """Choose this rank's rows of the generation batch, of ``len(inputs)`` as the loader gave them; in training the
        completions to them are then ready to be taken."""
        trainer = self.trainer
        self._answer = self._versions = None
        if self.cut is None or not trainer.model.training:
            return inputs
        if not self._again:
            self._open, self._waiting = self._oldest_whole(inputs)
        self._again = False
        rows = [(group, one) for group in self._open for one in group.completions]
        step = int(trainer.state.global_step)
        first = trainer.accelerator.process_index * len(inputs)
        ages = float(sum(step - _oldest(one) for _, one in rows))
        segments = float(sum(len(one.segments) for _, one in rows))
        book = trainer.recorder.book("train")
        book.add_alike("rollout/staleness", torch.tensor([ages]), len(rows))
        book.add_alike("rollout/segments", torch.tensor([segments]), len(rows))
        book.add_alike("rollout/waiting", torch.tensor([float(len(self._waiting))]), 1)
        mine = rows[first : first + len(inputs)]
        self._answer = [group.prompt for group, _ in mine], [one for _, one in mine]
        self._versions = [_oldest(one) for _, one in mine]
        return [dict(group.row) for group, _ in mine]

    def take(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]] | None:
        """(ids, log-probs) of the completions that ``choose`` made ready; None where the engine is to be asked.
        RuntimeError: they are of other prompts, which can only come of code that makes another prompt of a row the
        second time."""
        if self._answer is None:
            return None
        (theirs, made), self._answer = self._answer, None
        if theirs != [list(ids) for ids in prompts]:
            raise RuntimeError(
                "the completions that were begun before (`rollout.cut_after`) are of other prompts than the rows that "
                "are now trained on: a team's `_tokenize_prompts` or `_generate` makes another prompt of a row the "
                "second time; leave `rollout.cut_after` out, or mend that"
            )
        return [list(one.ids) for one in made], [list(one.logprobs) for one in made]

    def versions(self) -> list[int] | None:
        """Optimizer steps that the policy of each row's first segment had taken, for the generation batch at hand; None
        where all are of one policy, that of the step or of ``overlap``."""
        if self.trainer.model.training:
            return self._versions
        return None

    def _oldest_whole(self, inputs: Rows) -> tuple[Groups, Groups]:
        """(groups to train on, groups that wait)."""
        trainer = self.trainer
        waiting = self._waiting
        number = trainer.phase.start // trainer.phase.every
        wanted = len(inputs) * trainer.accelerator.num_processes // trainer.num_generations
        whole = sum(group.whole for group in waiting)
        turns = bad = 0
        while whole < wanted or turns == 0:
            coming = number + len(waiting) // wanted  # what was begun waits, or was trained on in a batch before
            rows = inputs if coming == number else self._rows(coming, number)
            if whole < wanted and rows is not None:
                waiting += self._begin(rows)
            waiting, unscored = self._continue(waiting, bad + 1 >= TURNS)
            turns += 1
            bad = bad + 1 if unscored else 0
            whole = sum(group.whole for group in waiting)
        places = [place for place, group in enumerate(waiting) if group.whole][:wanted]
        rest = tuple(group for place, group in enumerate(waiting) if place not in places)
        return tuple(waiting[place] for place in places), rest

    def _rows(self, coming: int, number: int) -> Rows | None:
        """Read this rank's rows of generation batch ``coming``, while ``number`` is made; None where it is too far
        ahead, or there is none in this epoch and training."""
        if coming - number > self._batches_ahead:
            return None
        rows: Rows | None = self._ahead.rows_to_train(self.trainer, coming * self.trainer.phase.every)
        return rows

    def _begin(self, rows: Rows) -> Groups:
        """The groups of this rank's ``rows`` and of all others', without a token."""
        trainer = self.trainer
        size = int(self.trainer.num_generations)
        prompts, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
        first = trainer.accelerator.process_index * len(rows)
        longest = int(trainer.max_completion_length)
        mine = [
            begin(dict(row), list(ids), min(longest, trainer.vllm_generation.context - len(ids)), size)
            for place, (row, ids) in enumerate(zip(rows, prompts, strict=True), start=first)
            if place % size == 0
        ]
        return tuple(gather_object(mine))

    def _continue(self, groups: Groups, take_unscored: bool) -> tuple[Groups, bool]:
        """Make every completion that has no end longer by at most ``cut`` tokens; return the groups, and whether rows
        came without log-probs. Those are as they were, but with ``take_unscored``. Where a call fails all groups are as
        they were."""
        assert self.cut is not None
        trainer = self.trainer
        unscored = False
        version = int(trainer.state.global_step)
        found = [list(group.completions) for group in groups]
        limits: dict[int, list[tuple[int, int]]] = {}
        for place, group in enumerate(groups):
            for number, one in enumerate(group.completions):
                if not one.whole:
                    limits.setdefault(min(self.cut, group.room - len(one.ids)), []).append((place, number))
        for limit, places in sorted(limits.items(), reverse=True):
            rows = [(groups[place].prompt, found[place][number].ids) for place, number in places]
            for (place, number), (ids, logprobs, ended) in zip(places, self._made(rows, limit), strict=True):
                one = found[place][number]
                room = groups[place].room
                self._generated.count += len(ids)
                if not all(value is not None and math.isfinite(value) for value in logprobs):
                    unscored = True
                    if not take_unscored:
                        continue
                whole = ended or len(one.ids) + len(ids) >= room
                found[place][number] = one.continued(ids, logprobs, version, whole)
        if unscored:
            trainer._last_loaded_step = -1  # the next turn sends the weights, and a faulty engine clears its cache then
        made = zip(groups, found, strict=True)
        return tuple(replace(group, completions=tuple(completions)) for group, completions in made), unscored

    def _made(self, rows: list[tuple[list[int], list[int]]], limit: int) -> list[tuple[list[int], list[Any], bool]]:
        """Generate what follows (prompt, completion so far) of each row of all ranks: (ids, log-probs, whether it
        ended)."""
        trainer = self.trainer
        accelerator = self.trainer.accelerator
        share = math.ceil(len(rows) / accelerator.num_processes)
        mine = rows[accelerator.process_index * share :][:share]
        whole = [[*prompt, *ids] for prompt, ids in mine]
        with replaced(self, "asked", [prompt for prompt, _ in mine or rows[:1]]):
            made = generate_in_step(trainer, whole, [[*rows[0][0], *rows[0][1]]], 1, limit)
        # an engine that stops short of the limit says that the completion is at its end
        logprobs: list[Any] = [one.logprobs or [None] * len(one.ids) for one in made]
        ended = [one.ended or len(one.ids) < limit for one in made]
        return list(gather_object([(one.ids, *rest) for one, *rest in zip(made, logprobs, ended, strict=True)]))

    def _settings(self) -> dict[str, Any]:
        """Settings in which the groups of a checkpoint must agree with those of this run."""
        trainer = self.trainer
        phase = self.trainer.phase
        return {
            "generation_batch_size": trainer.args.generation_batch_size,
            "num_generations": trainer.num_generations,
            "max_completion_length": trainer.max_completion_length,
            "temperature": trainer.temperature,
            "micro-batches a generation batch": phase.every,
            "gradient_accumulation_steps": phase.accumulation,
        }

    def save(self, folder: Path) -> dict[str, Any] | None:
        """The groups that wait into a checkpoint, and the record's entry; on every rank, one of which writes."""
        trainer = self.trainer
        if self.cut is None or trainer.args.save_only_model or not trainer.is_in_train:
            return None
        waiting, in_training = self._kept
        if trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            write_groups(folder, [*waiting, *in_training])
        return {"settings": self._settings(), "waiting": len(waiting), "in_training": len(in_training)}

    def load(self, saved: SavedState | None) -> None:
        """Take up what ``save`` wrote; called on every rank before a training begins, after the open generation batch
        is back. ValueError: it is damaged, or of a run with other settings, or this run has no place for it."""
        self._forget()
        self._begun = self.trainer.state
        if saved is None:
            return
        problem: str | None = None
        try:
            found = saved.entry("waiting", lambda entry: self._read(entry, saved.checkpoint), _LOST)
            self._waiting, self._open = found or ((), ())
        except ValueError as error:
            problem = str(error)
        if problem := next(filter(None, gather_object([problem])), None):
            raise ValueError(problem)
        self._again = bool(self._open) and self.trainer._buffered_inputs is None
        self._kept = self._waiting, self._open

    def _read(self, entry: Any, checkpoint: Path) -> tuple[Groups, Groups]:
        number = int(entry["waiting"])
        then = entry["settings"]
        now = self._settings()
        if self.cut is None:
            if number:
                raise ValueError(f"{number} groups wait there to be gone on with, and `rollout.cut_after` is not set")
            return (), ()
        changed = [f"{name} {then.get(name)} → {value}" for name, value in now.items() if then.get(name) != value]
        if changed:
            raise ValueError(f"the groups that wait there are of another run ({', '.join(changed)})")
        groups = tuple(read_groups(checkpoint, self.trainer.accelerator.device))
        if len(groups) != number + int(entry["in_training"]):
            raise ValueError(f"{len(groups)} groups are there of {number + int(entry['in_training'])}")
        context = int(self.trainer.vllm_generation.context)
        if (longest := max((_longest(group) for group in groups if not group.whole), default=0)) > context:
            raise ValueError(
                f"prompts and completions that wait there were begun for {longest} tokens, and the engine's context is "
                f"{context} tokens: give it the larger one again (`grpo-lab serve --max-model-len`, "
                "`rollout.engine.max_model_len`)"
            )
        return groups[:number], groups[number:]


_LOST = "the groups that wait are then lost, and as many prompts of the epoch are trained on twice"


def _oldest(one: WaitingCompletion) -> int:
    return one.segments[0][0]


def _longest(group: WaitingGroup) -> int:
    return len(group.prompt) + group.room
