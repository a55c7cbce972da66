"""Partial rollouts, ``rollout: {cut_after: c}``: a completion longer than c tokens is put aside and continued with the
next generation batch. So a few long completions do not hold up the rest.

Generation batch k needs P groups of G completions. In place of TRL's generation:

    until P groups are whole, and at least once:                                                           (a *turn*)
        if fewer than P are whole: begin the groups of the loader's next unread batch, at most ⌈T/c⌉ ahead of k
        continue every completion that has not ended, each by at most c tokens: one call of the engine
    train on the P oldest whole groups; all others wait

T is ``max_completion_length`` (completions with fewer than c tokens left of it get a call of their own). A completion
ends by an end token or after T tokens over all its segments, never because a segment ends. A group is whole when all
its completions have ended. At the end of an epoch and of the training no more groups are begun, and the waiting ones
are continued until they are whole. So each prompt of an epoch is trained on once in it, in another order.

Each token keeps the log-prob of the policy that sampled it. So the sampler's correction, a ratio per token, is right
for a completion that several policies wrote. ``policy_version`` of a row is that of its *first* segment, the oldest.

Every rank holds all groups, and asks the engine for its share of the rows. A checkpoint keeps them (``waiting.py``). An
engine call that fails changes no group.

If the engine returns a segment with a log-prob that is not finite (NaN in its weights or KV cache), the segment is
dropped. It is generated again at the next turn, after the weights were sent anew, which clears that cache. From the
``TURNS``-th such turn in a row of one generation batch on, segments are taken as they are. The guard then leaves out
the steps that train on them.

Sources: Kimi k1.5 (arXiv 2501.12599, partial rollouts), which puts a completion aside once it has used up a budget of
tokens; APRIL (arXiv 2509.18521), which begins more completions than it trains on. Both continue under the newer policy.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grpo_lab.trainer.generation.in_step import generate_in_step
from grpo_lab.trainer.generation.read_ahead import ReadAhead, batches_ahead, refuse_turns
from grpo_lab.trainer.generation.rollout_ports import RolloutPort
from grpo_lab.trainer.generation.waiting import (
    Segment,
    WaitingCompletion,
    WaitingGroup,
    begin,
    read_groups,
    write_groups,
)
from grpo_lab.trainer.resume.state import GeneratedTokens, SavedState
from grpo_lab.trainer.settings.parse import RolloutSettings
from grpo_lab.trainer.trl_bridge import has_micro_batches, prompt_tokens, replaced, send_weights_again

Rows = list[dict[str, Any]]
Groups = tuple[WaitingGroup, ...]
#: From this many turns in a row with log-probs that are not finite on, within a generation batch, segments are kept.
TURNS = 3


class Batch(enum.Enum):
    """Stages of the current generation batch; ``PartialState`` says what each means and what follows it."""

    NONE = enum.auto()
    CHOSEN = enum.auto()
    TAKEN = enum.auto()
    LOST = enum.auto()


@dataclass(frozen=True)
class PartialState:
    """All groups that were begun and whose training is not over, the same on every rank, and the stage of the current
    generation batch. ``waiting`` and ``in_training`` hold the groups, the oldest first.

    The way of a group:

        the loader ── begin ──▶ waiting ── whole, one of the P oldest ──▶ in_training ── the batch is used up ──▶ gone
                                 │   ▲
                                 └───┘  a turn: at most c tokens more

    The generation batch whose groups are ``in_training``:

        NONE    none yet, or one is being chosen: calls of ``_generate_single_turn`` go to the engine
        CHOSEN  its completions are ready for TRL's generation
        TAKEN   TRL has them
        LOST    a checkpoint inside the batch was loaded, but its micro-batches could not be

        a training begins ──▶ NONE ──┐
                                     ├─ choose ──▶ CHOSEN ── take ──▶ TAKEN ── choose ──▶ CHOSEN …
        a resume ──▶ NONE, TAKEN ────┤
                └──▶ LOST ───────────┘  (the same groups once more)
    """

    waiting: Groups = ()
    in_training: Groups = ()
    batch: Batch = Batch.NONE


class PartialRollouts(TrainerCallback):  # type: ignore[misc]
    """Generates the groups that each generation batch trains on, and keeps those that wait. Does nothing if
    ``rollout.cut_after`` is not set. Every rank calls every method.

    Attributes:
        cut: c, the most tokens that a completion gets in one turn; None if ``rollout.cut_after`` is not set.
        asked: prompts of the rows that this rank has in the engine at the moment; empty between two calls.

    Raises:
        ValueError: completions are made in turns, or the data may have images.
    """

    holds = (
        "with `rollout.cut_after` how many groups were begun and not yet trained on; they are in "
        "`grpo_lab_generation_waiting.safetensors`"
    )

    def __init__(
        self, trainer: RolloutPort, settings: RolloutSettings, ahead: ReadAhead, generated: GeneratedTokens
    ) -> None:
        self.trainer = trainer
        self._generated = generated
        self.cut = settings.cut_after
        self.asked: list[list[int]] = []
        self._ahead = ahead
        self._batches_ahead = batches_ahead(settings, trainer.max_completion_length)
        self._now = PartialState()
        self._after_step = PartialState()  # as of the last whole optimizer step: what a checkpoint holds
        self._training: Any = None  # HF's state object of the training that the groups belong to
        if self.cut is None:
            return
        turns = "whose completions are put together in turns of its own, and none of them can be put aside"
        images = "whose images would have to be kept with a completion that waits"
        refuse_turns(trainer, "rollout.cut_after", turns, images)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Discard the groups that an earlier training left, but keep those that ``load`` has restored for this one."""
        if self._training is not state:
            self._begin_with(PartialState())
        self._ahead.forget()

    def _begin_with(self, state: PartialState) -> None:
        """Begin the trainer's current training with the groups in ``state``."""
        self._training = self.trainer.state
        self._now = state
        self._after_step = state

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the groups as of this step for checkpoints; those of a batch that is used up are dropped."""
        self._after_step = self._now
        if self.trainer.phase.at_end:
            self._after_step = replace(self._now, in_training=())

    def choose(self, inputs: Rows) -> Rows:
        """Return the rows of the data set that this rank trains on in the coming generation batch, as many as the
        loader's, ``inputs``. In training these may be rows that were read earlier; their completions are then complete,
        and ``take`` returns them. In evaluation return ``inputs``."""
        trainer = self.trainer
        if self.cut is None or not trainer.model.training:
            return inputs
        if self._now.batch is not Batch.LOST:
            self._now = replace(self._now, batch=Batch.NONE)
            self._now = self._with_oldest_whole(inputs)
        self._now = replace(self._now, batch=Batch.CHOSEN)
        rows = self._rows_of_all()
        step = int(trainer.state.global_step)
        ages = float(sum(step - one.version for _, one in rows))
        segments = float(sum(len(one.segments) for _, one in rows))
        book = trainer.recorder.book("train")
        book.add_alike("rollout/staleness", torch.tensor([ages]), len(rows))
        book.add_alike("rollout/segments", torch.tensor([segments]), len(rows))
        book.add_alike("rollout/waiting", torch.tensor([float(len(self._now.waiting))]), 1)
        return [dict(group.row) for group, _ in self._rows_of_this_rank()]

    def take(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]] | None:
        """Return token ids and log-probs of the completions that ``choose`` made; None if the engine is to generate.
        Raise RuntimeError if they belong to other ``prompts`` (token ids). Only a team's code that makes another prompt
        of the same row when it is called a second time causes that."""
        if self._now.batch is not Batch.CHOSEN or not self.trainer.model.training:
            return None
        self._now = replace(self._now, batch=Batch.TAKEN)
        rows = self._rows_of_this_rank()
        if [group.prompt for group, _ in rows] != [list(ids) for ids in prompts]:
            raise RuntimeError(
                "the completions that were begun before (`rollout.cut_after`) are of other prompts than the rows that "
                "are now trained on: a team's `_tokenize_prompts` or `_generate` makes another prompt of a row the "
                "second time; leave `rollout.cut_after` out, or mend that"
            )
        return [list(one.ids) for _, one in rows], [list(one.logprobs) for _, one in rows]

    def versions(self) -> list[int] | None:
        """Return, for each of this rank's rows of the current generation batch, how many optimizer steps the policy of
        its first segment had taken; None in evaluation or without ``rollout.cut_after``."""
        if self.cut is None or not self.trainer.model.training:
            return None
        return [one.version for _, one in self._rows_of_this_rank()]

    def _rows_of_all(self) -> list[tuple[WaitingGroup, WaitingCompletion]]:
        """Return all completions of the current generation batch, each with its group."""
        return [(group, one) for group in self._now.in_training for one in group.completions]

    def _rows_of_this_rank(self) -> list[tuple[WaitingGroup, WaitingCompletion]]:
        """Return this rank's share of the batch's completions, each with its group."""
        rows = self._rows_of_all()
        accelerator = self.trainer.accelerator
        share = len(rows) // accelerator.num_processes
        return rows[accelerator.process_index * share :][:share]

    def _with_oldest_whole(self, inputs: Rows) -> PartialState:
        """Take turns until enough groups for a generation batch are whole. Return the state with the oldest of these in
        training, and all others waiting."""
        trainer = self.trainer
        number = trainer.phase.start // trainer.phase.every
        wanted = len(inputs) * trainer.accelerator.num_processes // trainer.num_generations
        waiting = self._now.waiting
        bad_turns = 0
        while True:
            if len(whole(waiting)) < wanted:
                ahead = len(waiting) // wanted  # what was begun waits, or was trained on in a batch before
                waiting += self._begin(self._rows(inputs, number, ahead))
            waiting, unscored = self._continue(waiting, take_unscored=bad_turns + 1 >= TURNS)
            bad_turns = bad_turns + 1 if unscored else 0
            places = whole(waiting)[:wanted]
            if len(places) == wanted:
                break
        rest = tuple(group for place, group in enumerate(waiting) if place not in places)
        return PartialState(rest, tuple(waiting[place] for place in places))

    def _rows(self, inputs: Rows, number: int, ahead: int) -> Rows:
        """Return this rank's rows of the generation batch that comes ``ahead`` batches after batch ``number``, whose
        rows are ``inputs``. Return none if that is too far ahead, or past the end of the epoch or the training."""
        if ahead == 0:
            return inputs
        if ahead > self._batches_ahead:
            return []
        return self._ahead.rows_to_train(self.trainer, (number + ahead) * self.trainer.phase.every) or []

    def _begin(self, rows: Rows) -> Groups:
        """Return new groups, without a token yet, for the ``rows`` of all ranks. Either every rank has rows, or none
        has. A collective, if there are rows."""
        if not rows:
            return ()
        trainer = self.trainer
        size = int(trainer.num_generations)
        prompts = prompt_tokens(trainer, rows)
        first = trainer.accelerator.process_index * len(rows)
        longest = int(trainer.max_completion_length)
        mine = [
            begin(dict(row), ids, min(longest, trainer.vllm_generation.context - len(ids)), size)
            for place, (row, ids) in enumerate(zip(rows, prompts, strict=True), start=first)
            if place % size == 0
        ]
        return tuple(gather_object(mine))

    def _continue(self, groups: Groups, take_unscored: bool) -> tuple[Groups, bool]:
        """Continue every unfinished completion by one segment of at most ``cut`` tokens. Return the groups, and whether
        the engine returned a segment without finite log-probs. Such a segment is dropped, unless ``take_unscored``.
        ``groups`` itself is not changed, so a call that fails changes nothing."""
        assert self.cut is not None
        trainer = self.trainer
        version = int(trainer.state.global_step)
        completions = [list(group.completions) for group in groups]
        places_of_limit = defaultdict[int, list[tuple[int, int]]](list)
        for place, group in enumerate(groups):
            for number, one in enumerate(group.completions):
                if not one.whole:
                    places_of_limit[min(self.cut, group.room - len(one.ids))].append((place, number))
        unscored = False
        for limit, places in sorted(places_of_limit.items(), reverse=True):
            rows = [(groups[place].prompt, completions[place][number].ids) for place, number in places]
            for (place, number), segment in zip(places, self._made(rows, limit), strict=True):
                self._generated.count += len(segment.ids)
                if not segment.is_scored:
                    unscored = True
                    if not take_unscored:
                        continue
                completions[place][number] = completions[place][number].continued(segment, version, groups[place].room)
        if unscored:
            send_weights_again(trainer)  # at the next turn, and a faulty engine clears its cache then
        longer = [
            replace(group, completions=tuple(of_group)) for group, of_group in zip(groups, completions, strict=True)
        ]
        return tuple(longer), unscored

    def _made(self, rows: list[tuple[list[int], list[int]]], limit: int) -> list[Segment]:
        """Generate at most ``limit`` further tokens for each of ``rows``, (prompt, completion so far), which are the
        same on every rank: each rank generates its share, and all get all segments."""
        trainer = self.trainer
        accelerator = self.trainer.accelerator
        share = math.ceil(len(rows) / accelerator.num_processes)
        mine = rows[accelerator.process_index * share :][:share]
        so_far = [[*prompt, *ids] for prompt, ids in mine]
        filler = [[*rows[0][0], *rows[0][1]]]
        with replaced(self, "asked", [prompt for prompt, _ in mine or rows[:1]]):
            made = generate_in_step(trainer, so_far, filler, 1, limit)
        # an engine that stops short of the limit says that the completion is at its end
        segments = [
            Segment(one.ids, one.logprobs or [None] * len(one.ids), one.ended or len(one.ids) < limit) for one in made
        ]
        return list(gather_object(segments))

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be the same in a checkpoint with groups and in the run that resumes it."""
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
        """Write the groups, as of the last whole optimizer step, into a checkpoint, and return the record's entry.
        Every rank calls this; one writes."""
        trainer = self.trainer
        if self.cut is None or trainer.args.save_only_model or not trainer.is_in_train:
            return None
        waiting = self._after_step.waiting
        in_training = self._after_step.in_training
        if trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            write_groups(folder, [*waiting, *in_training])
        return {"settings": self._settings(), "waiting": len(waiting), "in_training": len(in_training)}

    def load(self, saved: SavedState | None) -> None:
        """Restore what ``save`` wrote. Every rank calls this before a training begins, after the open generation batch
        was restored (``GenerationBuffer``). Raise ValueError on every rank if the groups are damaged, come from a run
        with other settings, or do not fit the engine's context."""
        found: PartialState | None = None
        problem: str | None = None
        if saved is not None:
            try:
                found = saved.entry("waiting", lambda entry: self._read(entry, saved.checkpoint), _LOST)
            except ValueError as error:
                problem = str(error)
            if problem := next(filter(None, gather_object([problem])), None):
                raise ValueError(problem)
        self._begin_with(found or PartialState())

    def _read(self, entry: Any, checkpoint: Path) -> PartialState:
        """Return the groups of a checkpoint, given its record's ``entry``; raise ValueError as ``load`` does."""
        number = int(entry["waiting"])
        then = entry["settings"]
        now = self._settings()
        if self.cut is None:
            if number:
                raise ValueError(f"{number} groups wait there to be gone on with, and `rollout.cut_after` is not set")
            return PartialState()
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
        waiting = groups[:number]
        in_training = groups[number:]
        if not in_training:
            return PartialState(waiting)
        return PartialState(waiting, in_training, Batch.TAKEN if has_micro_batches(self.trainer) else Batch.LOST)


#: What a message says of a checkpoint whose entry cannot be read.
_LOST = "the groups that wait are then lost, and as many prompts of the epoch are trained on twice"


def whole(groups: Groups) -> list[int]:
    """Return the indices of the groups of which every completion has ended, the oldest first."""
    return [place for place, group in enumerate(groups) if group.whole]


def _longest(group: WaitingGroup) -> int:
    """Return the most tokens that prompt and completion of a group may have together."""
    return len(group.prompt) + group.room
