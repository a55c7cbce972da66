"""Tools on two ranks that make unlike many turns, with an engine that both share and with shards that both gather.

TRL asks each rank's turns by itself: a server's answer was cut by places that only equal numbers of rows have, so that
rows got each other's completions, and a rank that was done left the others waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launch import run_worker
from grpo_lab.testing import tiny_model
from parity.conftest import TOOL_TEMPLATE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template of tool calls, in which a tenth of the vocabulary ends a completion."""
    folder = tmp_path_factory.mktemp("calling")
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, max_positions=2048, initializer_range=0.2)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(100, 200)]
    model.save_pretrained(folder)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def ranks_of(kind: str, calling: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    run_worker("turns_worker", "fsdp2" if kind == "fsdp2" else "ddp", 2, calling, out, kind, *more)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def turns_in(row: dict[str, Any]) -> int:
    """Pieces of a completion that the policy wrote."""
    own = row["own"]
    return sum(now and not before for before, now in zip([0, *own], own, strict=False))


@pytest.mark.parametrize(("kind", "turns"), [("rows", {1, 3}), ("turns", {1, 2})])
def test_every_row_has_the_completions_that_the_server_drew_for_it(
    kind: str, turns: set[int], calling: Path, tmp_path: Path
) -> None:
    ranks = ranks_of(kind, calling, tmp_path)
    drawn = ranks[0]["drawn"]
    for rank in ranks:
        for prompt, ids in rank["turns"]:
            assert (*prompt, -1, *ids) in drawn
        for row in rank["rows"]:
            told = torch.tensor(row["told"])
            begun = 0
            while begun < len(row["ids"]):
                end = begun + next((n for n, own in enumerate(row["own"][begun:]) if not own), len(row["own"]) - begun)
                _, logps = drawn[(*row["prompt"], *row["ids"][:begun], -1, *row["ids"][begun:end])]
                assert torch.allclose(told[begun:end], torch.tensor(logps), atol=1e-6)
                begun = end + next((n for n, own in enumerate(row["own"][end:]) if own), len(row["own"]) - end)
    assert {turns_in(row) for row in ranks[0]["rows"]} == {3}
    assert {turns_in(row) for row in ranks[1]["rows"]} == turns


def test_shards_are_gathered_though_one_rank_has_no_turn_left(calling: Path, tmp_path: Path) -> None:
    ranks = ranks_of("fsdp2", calling, tmp_path)
    assert max(turns_in(row) for row in ranks[0]["rows"]) == 3
    assert max(turns_in(row) for row in ranks[1]["rows"]) == 2


def test_trajectories_of_ranks_in_step_are_those_of_trls_loop(calling: Path, tmp_path: Path) -> None:
    """``rollout.turns`` without an engine, on shards: the same draws on both ranks, and nobody waits for ever."""
    folders = [tmp_path / "stock", tmp_path / "ours"]
    for folder in folders:
        folder.mkdir()
    stock = ranks_of("fsdp2", calling, folders[0])
    ours = ranks_of("fsdp2", calling, folders[1], "trajectories")
    for one, other in zip(ours, stock, strict=True):
        assert one["turns"] == other["turns"]
        assert one["rows"] == other["rows"]
