"""Groups that were begun and are not yet trained on (``rollout.cut_after``): their data, and their file in a checkpoint
(``grpo_lab_generation_waiting.safetensors``: tensors, and a description in JSON; nothing is pickled)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from grpo_lab.io import write_whole
from grpo_lab.trainer.resume.generation_buffer import flattened, rebuilt

FILE = "grpo_lab_generation_waiting.safetensors"


class Segment(NamedTuple):
    """Tokens that one engine call adds to a completion.

    Attributes:
        ids: the tokens.
        logprobs: of each token, in nats; None if the engine returned none.
        ended: whether the completion ends with this segment.
    """

    ids: list[int]
    logprobs: list[float | None]
    ended: bool

    @property
    def is_scored(self) -> bool:
        """Return whether every token has a finite log-prob."""
        return all(value is not None and math.isfinite(value) for value in self.logprobs)


@dataclass(frozen=True)
class WaitingCompletion:
    """A completion of T tokens so far, which may have to be continued.

    Attributes:
        ids: the tokens, ``[T]``.
        logprobs: of each token under the policy that sampled it, in nats, ``[T]``; NaN if the engine returned none.
        segments: one pair for each policy that wrote a part of it, in order: the number of optimizer steps that the
            policy had taken, and the number of tokens that it wrote.
        whole: whether it has ended, by an end token or because no room is left.
    """

    ids: list[int]
    logprobs: list[float]
    segments: list[tuple[int, int]]
    whole: bool

    @property
    def version(self) -> int:
        """Number of optimizer steps that the policy of the first segment had taken."""
        return self.segments[0][0]

    def continued(self, segment: Segment, version: int, room: int) -> WaitingCompletion:
        """Return the completion with ``segment`` appended, written by the policy after ``version`` optimizer steps. It
        is whole if the segment ended it, or if it now has ``room`` tokens. Adjacent segments of one policy become one.
        """
        *before, last = self.segments or [(version, 0)]
        segments = [*before, (version, last[1] + len(segment.ids))]
        if last[0] != version:
            segments = [*before, last, (version, len(segment.ids))]
        ids = [*self.ids, *segment.ids]
        values = [math.nan if value is None else float(value) for value in segment.logprobs]
        return WaitingCompletion(ids, [*self.logprobs, *values], segments, segment.ended or len(ids) >= room)


@dataclass(frozen=True)
class WaitingGroup:
    """A prompt and its G completions.

    Attributes:
        row: the row of the data set.
        prompt: the prompt's token ids.
        room: largest number of tokens of a completion.
        completions: G of them, in the order of the group's rows.
    """

    row: dict[str, Any]
    prompt: list[int]
    room: int
    completions: tuple[WaitingCompletion, ...]

    @property
    def whole(self) -> bool:
        """Return whether every completion has ended."""
        return all(one.whole for one in self.completions)


def begin(row: dict[str, Any], prompt: list[int], room: int, size: int) -> WaitingGroup:
    """Return a group of ``size`` completions without tokens. Raise ValueError if ``row`` holds a value that cannot be
    written into a checkpoint."""
    try:
        flattened(row, "row")
    except ValueError as unknown:
        raise ValueError(
            "`rollout.cut_after` keeps the rows of waiting completions in checkpoints, and of a row of `train_dataset` "
            f"{unknown}, which is neither text, number, list, mapping nor tensor: drop or convert that column"
        ) from unknown
    return WaitingGroup(row, prompt, room, (WaitingCompletion([], [], [], whole=False),) * size)


def write_groups(folder: Path, groups: Sequence[WaitingGroup]) -> None:
    """Write waiting groups into a checkpoint's folder."""
    plain = [
        {
            "row": group.row,
            "prompt": group.prompt,
            "room": group.room,
            "completions": [
                {
                    "ids": torch.tensor(one.ids, dtype=torch.long),
                    "logprobs": torch.tensor(one.logprobs, dtype=torch.float64),
                    "segments": one.segments,
                    "whole": one.whole,
                }
                for one in group.completions
            ],
        }
        for group in groups
    ]
    description, tensors = flattened(plain, "group ")
    words = bytearray(json.dumps(description).encode())  # rows may be longer than a header of safetensors
    held = {**tensors, "description": torch.frombuffer(words, dtype=torch.uint8)}
    write_whole(folder / FILE, lambda partial: save_file(held, partial))


def read_groups(folder: Path, device: torch.device) -> list[WaitingGroup]:
    """Read what ``write_groups`` wrote, with the rows' tensors on ``device``. Raise ValueError if it is damaged or
    missing."""
    try:
        tensors = load_file(folder / FILE)
        description = json.loads(tensors.pop("description").numpy().tobytes())
        return [
            WaitingGroup(
                plain["row"],
                plain["prompt"],
                plain["room"],
                tuple(
                    WaitingCompletion(one["ids"].tolist(), one["logprobs"].tolist(), one["segments"], one["whole"])
                    for one in plain["completions"]
                ),
            )
            for plain in rebuilt(description, tensors, device)
        ]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{FILE}, the completions that wait, is damaged or missing: {error!r}") from error
