"""The view of TRL's dict: names in one place, none of them TRL's."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lab.trainer.row_table import OURS, Carried, loss_mask
from grpo_lab.trainer.step.log_probs import ProximalSource, needs_old_logprobs, reads_own_forward, with_same_fields

TRAINER = Path(__file__).resolve().parents[3] / "grpo_lab" / "trainer"
FIELDS = {name: field.key for name, field in vars(Carried).items() if hasattr(field, "key")}


def test_a_view_reads_writes_and_takes_out() -> None:
    fields: dict[str, Any] = {"old_per_token_logps": torch.ones(2, 3)}
    carried = Carried(fields)
    assert carried.proximal_logps is fields["old_per_token_logps"]
    assert carried.unmoved is None
    carried.unmoved = torch.tensor([1, 0])
    assert fields[f"{OURS}unmoved"].tolist() == [1, 0]
    carried.unmoved = None
    carried.as_generated = None  # was not there
    assert set(fields) == {"old_per_token_logps"}


def test_the_fields_say_where_proximal_log_probs_come_from() -> None:
    mask = torch.ones(2, 3, dtype=torch.long)
    batch: dict[str, Any] = dict.fromkeys(("prompt_mask", "completion_mask", "completion_ids"), mask)
    assert ProximalSource.of(batch) is ProximalSource.LOSS
    assert reads_own_forward(batch).tolist() == [True, True]
    carried = Carried(batch)
    carried.proximal_logps = torch.zeros(2, 3)
    carried.as_generated = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # a team has changed the second row
    assert ProximalSource.of(batch) is ProximalSource.GENERATION
    assert reads_own_forward(batch).tolist() == [True, False]
    assert needs_old_logprobs(batch)
    carried.as_generated = None
    assert ProximalSource.of(batch) is ProximalSource.STORED
    assert reads_own_forward(batch).tolist() == [False, False]
    assert not needs_old_logprobs(batch)
    (of_step, _) = with_same_fields([batch, dict.fromkeys(batch, mask)])
    assert ProximalSource.of(of_step) is ProximalSource.ROW_BY_ROW
    assert reads_own_forward(of_step).tolist() == [False, False]


def test_what_is_ours_begins_with_our_name() -> None:
    ours = {name for name in FIELDS if FIELDS[name].startswith(OURS)}
    of_us = {"as_generated", "unmoved", "policy_version", "length_quartile", "position_offset", "old_values", "returns"}
    of_us |= {"pass_rate", "bonus_tokens", "group_tokens"}
    of_us |= {"task", "task_rows", "task_tokens"}
    of_us |= {"looked_logps", "looked_entropies", "kept_tokens"}
    assert ours == of_us


@pytest.mark.not_fast
def test_no_other_file_writes_these_names_out() -> None:
    """One place: a literal key elsewhere would go past the carrier. ``trl_bridge`` lists TRL's names."""
    known = {*FIELDS.values()} - {FIELDS["ref_logps"], FIELDS["proximal_logps"]}
    found = [
        f"{path.name}:{node.lineno}"
        for path in sorted(TRAINER.rglob("*.py"))
        if path.name != "row_table.py" and path.parent.name != "trl_bridge"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in known
    ]
    assert not found


@pytest.mark.parametrize("tools", [False, True])
def test_the_loss_mask_leaves_out_padding_and_tools(tools: bool) -> None:
    fields = {"completion_mask": torch.tensor([[1, 1, 1, 0]])}
    if tools:
        fields["tool_mask"] = torch.tensor([[1, 0, 1, 1]])
    assert loss_mask(fields).tolist() == [[True, not tools, True, False]]
