"""Random optimizer steps on the ranks at hand: what each rank is brought and gives back, against a table of everything.
``exchange_worker.py OUT``

``RowTable.gathered`` (all fields of all rows to every rank) is the oracle: a bin cut from it must be the same to the
bit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from forked import as_rank
from grpo_lab.trainer.row_table import POLICY_VERSION, POSITION_OFFSET, RowTable
from grpo_lab.trainer.step.exchange import Exchange
from grpo_lab.trainer.step.row_numbers import RowNumbers
from grpo_lab.update import Plan, plan_update

#: every combination of the remainders of a case by 2, 3, 4 and 5
CASES = 60
#: bytes of a number on the way: token ids as int32, masks as one byte, everything else as it is
ON_THE_WAY = {"prompt_ids": 4, "completion_ids": 4, "completion_mask": 1, "tool_mask": 1}


def micro_batch(draw: random.Random, rows: int, kind: int, place: int) -> dict[str, Any]:
    """One rank's micro-batch as TRL pads it: to its own longest prompt and completion, or wider. ``kind``: which fields
    there are."""
    prompts = [draw.randint(1, 6) for _ in range(rows)]
    completions = [draw.choice((0, 1, 2, 5, 9)) for _ in range(rows)]
    wide, long = max(prompts) + draw.randint(0, 2), max(1, *completions) + draw.randint(0, 2)
    torch.manual_seed(draw.randint(0, 10**9))
    inside = torch.arange(long) < torch.tensor(completions).unsqueeze(1)
    batch: dict[str, Any] = {
        "prompt_mask": (torch.arange(wide) >= wide - torch.tensor(prompts).unsqueeze(1)).long(),
        "prompt_ids": torch.randint(0, 2**31 - 1, (rows, wide)),
        "completion_ids": torch.randint(0, 2**31 - 1, (rows, long)),
        "completion_mask": inside.long(),
        "advantages": torch.randn(rows) * torch.tensor([draw.random() < 0.6 for _ in range(rows)]),
        "num_items_in_batch": torch.tensor(7),
    }
    if kind % 4 > 1:  # holes, where a team has taken tokens out of a mask
        for mask in (batch["completion_mask"], batch["prompt_mask"][:, :-1]):
            mask *= torch.rand(mask.shape) < 0.7
    if kind % 2:
        batch["tool_mask"] = inside.long() * torch.randint(0, 2, (rows, long))
        batch["old_per_token_logps"] = torch.randn(rows, long)
        batch["advantages"] = batch["advantages"].unsqueeze(1) * torch.randn(rows, long)
        batch[POSITION_OFFSET] = torch.randint(0, 5, (rows,))
    if kind % 3:
        batch["importance_sampling_ratio"] = torch.rand(rows, long if kind % 4 else 1)
        batch["sampling_per_token_logps"] = torch.where(
            torch.rand(rows, long) < 0.5, torch.nan, torch.randn(rows, long)
        )
        batch["a_teams_choices"] = torch.rand(rows, 3) < 0.5
        batch["a_teams_scores"] = torch.randn(rows, long, 2, dtype=torch.float64)
        batch["a_teams_halves"] = torch.randn(rows, long).bfloat16()
        batch["prompt_weights"] = torch.randn(rows, wide)
        batch["policy_unmoved"] = torch.tensor([place] * rows)
    return batch


def bits(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist()


def check(case: int, accelerator: Any) -> int:
    """One random step. Returns how many rows moved."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    alike, mine = random.Random(case), random.Random(f"{case}/{rank}")
    rows, batches = alike.randint(1, 4), alike.randint(1, 3)
    window = [micro_batch(mine, rows, case, place) for place in range(batches)]
    local, slots = RowTable.of(window), torch.arange(batches).repeat_interleave(rows)
    counts = torch.tensor([0.1 + rank + place for place in range(batches)]).repeat_interleave(rows)
    numbers = RowNumbers.of(local, slots, counts, 10 + rank, accelerator)
    everything = local.gathered(accelerator)
    assert numbers.footprint == 10 + ranks - 1
    assert numbers.scored.tolist() == everything.loss_mask.sum(1).tolist()
    assert bits(numbers.token_count) == bits(accelerator.gather(counts))
    plan = plan_update(numbers.rows(all_rows=case % 5 == 0), ranks, alike.choice((1, 20, 60)))
    exchange = Exchange(local, numbers, plan, accelerator)
    assert exchange.bytes_received == expected_bytes(window, plan, accelerator)
    kind = torch.float64 if case % 2 else torch.float32
    made = []
    for places in exchange.bins:
        found, expected = exchange.bin(places), everything.bin(places)
        assert found.fields.keys() == expected.fields.keys()
        if places:
            lengths = (numbers.prompt_lengths + numbers.completion_lengths)[places]
            real = torch.arange(expected.input_ids.size(1)) < lengths.unsqueeze(1)  # any token may stand on padding
            assert bits(found.input_ids[real]) == bits(expected.input_ids[real]), case
            for name in ("labels", "position_ids", "take", "loss_mask"):
                assert bits(getattr(found, name)) == bits(getattr(expected, name)), (case, name)
            seen = [of.attention_mask for of in (found, expected)]
            assert seen == [None, None] or bits(seen[0]) == bits(seen[1]), case
            for name, value in expected.fields.items():
                assert bits(found.fields[name]) == bits(value), (case, name)
            made.append(
                (
                    places,
                    torch.where(
                        expected.fields["completion_mask"].bool(), torch.randn(expected.take.shape, dtype=kind), 0.0
                    ),
                )
            )
        else:
            assert not found.loss_mask.any()
            assert found.input_ids.shape == (1, 2)
    home, done = exchange.home(made, kind)
    owned = range(rank * rows * batches, (rank + 1) * rows * batches)
    whole = {
        row: values[i] for part in gather_object([made]) for places, values in part for i, row in enumerate(places)
    }
    assert done.squeeze(1).tolist() == [row in whole for row in owned]
    for place, row in enumerate(owned):
        length = int(numbers.completion_lengths[row])
        assert home[place, :length].tolist() == (whole[row][:length].tolist() if row in whole else [0.0] * length)
        assert not home[place, length:].any()
    return sum(row // (rows * batches) != at for at, bins in enumerate(plan.bins) for one in bins for row in one)


def expected_bytes(window: list[dict[str, Any]], plan: Plan, accelerator: Any) -> int:
    """What comes to this rank, by loops over rows and fields: 8 bytes for each of the numbers of the others' rows and
    of the widths of their fields, and the rows that they hold and this rank computes."""
    count = window[0]["prompt_ids"].size(0)
    per_row = {name for name, value in window[0].items() if isinstance(value, Tensor) and value.shape[:1] == (count,)}
    names = per_row - {"num_items_in_batch", "prompt_mask", POSITION_OFFSET, POLICY_VERSION}
    table = {
        "prompts": [len(row) - row.index(1) for batch in window for row in batch["prompt_mask"].tolist()],
        "completions": [
            max([0, *(place for place, own in enumerate(row, 1) if own)])
            for batch in window
            for row in batch["completion_mask"].tolist()
        ],
        "widths": {name: max(batch[name].size(1) for batch in window) for name in names if window[0][name].dim() > 1},
    }
    ranks = gather_object([table])
    mine, rows = accelerator.process_index, len(table["prompts"])
    # of a row: two lengths, loss tokens, whether it contributes, its micro-batch and count, footprint, fields; and the
    # prompt's mask has a width, too
    total = 8 * (len(ranks) - 1) * (rows * 8 + len(table["widths"]) + 1)
    lengths = [n for rank in ranks for n in rank["completions"]]
    for places in plan.bins[mine]:
        for row in places:
            home = ranks[row // rows]
            if home is ranks[mine]:
                continue
            total += 8  # its offset
            for name in names:
                value, width = window[0][name], home["widths"].get(name, 1)
                follows = max(r["widths"].get(name, 0) for r in ranks) == max(
                    r["widths"]["completion_ids"] for r in ranks
                )
                if name == "prompt_ids":
                    width = home["prompts"][row % rows]
                elif (
                    value.dim() > 1
                    and not name.startswith("prompt_")
                    and (follows or name.endswith(("ids", "mask", "logps")))
                ):
                    width = min(width, max(1, *(lengths[other] for other in places)))
                numbers = width * (value.size(2) if value.dim() > 2 else 1)
                total += numbers * ON_THE_WAY.get(name, value.element_size())
    return total


def main(out: str) -> None:
    accelerator = Accelerator(cpu=True)
    moved = [check(case, accelerator) for case in range(CASES)]
    assert min(moved) == 0, "no step in which nothing moves"
    assert max(moved) > 5
    refused = ""
    try:
        batch = micro_batch(random.Random(0), 2, accelerator.process_index, 0)
        RowNumbers.of(RowTable.of([batch]), torch.zeros(2, dtype=torch.long), torch.ones(2), 1, accelerator)
    except RuntimeError as error:
        refused = str(error)
    if accelerator.is_main_process:
        Path(out).write_text(refused)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    as_rank(main)
