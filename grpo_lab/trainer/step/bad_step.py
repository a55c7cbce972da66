"""Keep the batch of an optimizer step that was left out, for inspection: safetensors per rank, and the facts in JSON.

    <output_dir>/bad_steps/step-000012/facts.json
                                       rank-0.safetensors, …

At most ``MOST_STEPS`` steps of a run are kept, the first ones, and of each rank at most ``MOST_ROWS`` rows and
``MOST_BYTES``. Rows with something that is not finite come first. If writing fails, that is reported and the run goes
on.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_lab.io import write_whole, write_whole_text
from grpo_lab.reading import read_record
from grpo_lab.trainer.ports import Faults, UpdatePort, row_key
from grpo_lab.trainer.row_table import OURS, row_lengths, row_tensors
from grpo_lab.trainer.trl_bridge import MULTIMODAL_FIELDS

FOLDER, FACTS = "bad_steps", "facts.json"
MOST_STEPS = 8
MOST_ROWS = 32
MOST_BYTES = 64 * 2**20
#: Fields in which NaN means "nothing to learn".
NAN_IS_MEANT = (f"{OURS}returns",)


def keep_bad_step(trainer: UpdatePort, faults: Faults, facts: dict[str, Any]) -> str | None:
    """Write the step's batch, and return a sentence that says where, or None if the run has kept ``MOST_STEPS``
    already. A collective.

    Args:
        trainer: the trainer, whose output folder gets the files.
        faults: the micro-batches of the step, and what was not finite in them.
        facts: what ``facts.json`` shall hold besides; ``facts["step"]`` is the number of the step.
    """
    place = Path(trainer.args.output_dir) / FOLDER / f"step-{facts['step']:06d}"
    rank = trainer.accelerator.process_index
    rows, tensors = _chosen(faults)
    mine = {"rank": rank, "said": faults.said[:MOST_ROWS], "rows": rows}
    full = len(list(place.parent.glob("step-*"))) >= MOST_STEPS and not place.exists()
    gathered = gather_object([(full, mine)])
    if any(is_full for is_full, _ in gathered):
        return None
    problem = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / f"rank-{rank}.safetensors", lambda partial: save_file(tensors, partial))
        if rank == 0:
            ranks = [of_rank for _, of_rank in gathered]
            whole = {"format": 1, **facts, "ranks": len(ranks), "rewards": list(faults.names), "of_rank": ranks}
            write_whole_text(place / FACTS, json.dumps(whole, indent=1, default=str))
    except OSError as error:
        problem = f"its batch could not be kept in {place}: {type(error).__name__}: {error}"
    problem = next((words for words in gather_object([problem]) if words is not None), None)
    return problem or f"its batch is kept in {place}"


def read_bad_step(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """Read what ``keep_bad_step`` wrote: the facts, and each rank's tensors, field → ``[rows, …]``.

    ``facts["of_rank"][r]["rows"][i]`` describes row i of rank r: its micro-batch, its row there, and which fields (or
    ``rewards``) are not finite; the number of tokens of prompt and completion; the rewards in the order of
    ``facts["rewards"]``, or None if they are not known.
    """
    place = Path(folder)
    facts = read_record(place / FACTS, {"ranks": int, "of_rank": list})
    return facts, [load_file(place / f"rank-{rank}.safetensors") for rank in range(facts["ranks"])]


def _chosen(faults: Faults) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the facts of each row that is kept, and these rows' tensors ``[rows, …]``, padded with zeros at the
    end."""
    batches = [
        {name: value for name, value in row_tensors(batch).items() if name not in MULTIMODAL_FIELDS}
        for batch in faults.step
    ]
    places = [(number, row) for number, batch in enumerate(batches) for row in range(batch["prompt_ids"].size(0))]
    rows = [_row(faults, batches[number], number, row) for number, row in places]
    rows.sort(key=lambda row: not row["not_finite"])  # stable: else the order stays
    width = sum(value[0].nbytes for batch in batches for value in batch.values()) // max(len(batches), 1)
    rows = rows[: max(1, min(MOST_ROWS, MOST_BYTES // max(width, 1)))]
    tensors = {}
    for name in sorted({name for batch in batches for name in batch}):
        if all(name in batches[row["micro_batch"]] for row in rows):
            parts = [batches[row["micro_batch"]][name][row["row"]] for row in rows]
            if parts[0].dim():
                stacked = pad_sequence(parts, batch_first=True)
            else:
                stacked = torch.stack(parts)
            tensors[name] = stacked.cpu().contiguous()
    return rows, tensors


def _row(faults: Faults, batch: dict[str, Tensor], number: int, row: int) -> dict[str, Any]:
    """Return the facts of row ``row`` of micro-batch ``number``, whose fields are in ``batch``."""
    before, after = (int(lengths[row]) for lengths in row_lengths(batch))
    prompt = batch["prompt_ids"][row, batch["prompt_ids"].size(1) - before :].tolist()
    completion = batch["completion_ids"][row, :after].tolist()
    floats = [name for name, value in batch.items() if value.is_floating_point() and name not in NAN_IS_MEANT]
    odd = [name for name in floats if not bool(batch[name][row].isfinite().all())]
    known = [None if value != value else value for value in faults.rewards.get(row_key(prompt, completion), [])]
    infinite = [value in (math.inf, -math.inf) for value in known]
    return {
        "micro_batch": number,
        "row": row,
        "not_finite": [*odd, *(["rewards"] if any(infinite) else [])],
        "prompt_tokens": len(prompt),
        "completion_tokens": len(completion),
        "rewards": [str(value) if bad else value for value, bad in zip(known, infinite, strict=True)] or None,
    }
