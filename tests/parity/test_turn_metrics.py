"""``turns/…``: by hand from trajectories of two ranks; and of a training and an evaluation with a scripted sampler."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab import LabConfig
from grpo_lab.advantages import StepTable
from grpo_lab.batch import RewardTable
from grpo_lab.evaluation.panels import panels_of
from grpo_lab.rewards import TurnRewards
from grpo_lab.trainer.metrics.book import MetricBook
from grpo_lab.trainer.metrics.turn_metrics import record_turns
from grpo_lab.turns.trajectory import Call, Turn
from parity import drop_in_cases
from parity.drop_in_cases import chats
from parity.harness import arguments
from parity.test_tool_loop import Script, Scripted

GOOD = Call("look", {}, "1", seconds=0.5)
LATE = Call("look", {}, "late", failure="timed_out", seconds=3.0, tries=2)
LONG = Call("look", {}, "1 …", seconds=1.0, cut=True)
UNKNOWN = Call("lok", {}, "no such tool", failure="unknown", tries=0)
#: of two ranks, two rows each
MADE: list[tuple[Turn, ...]] = [
    (Turn(0, 4, 0, (GOOD, LATE)), Turn(6, 9, 0, (LONG,)), Turn(12, 13, 0, ended="answered")),
    (Turn(0, 2, 0, (UNKNOWN,)), Turn(5, 10, 0, ended="turns", inserted=2)),
    (Turn(0, 7, 0, ended="completion"),),
    tuple(Turn(2 * k, 2 * k + 1, 0, (GOOD,), ended="unparsable" if k == 9 else None) for k in range(10)),
]
SCORES: list[list[tuple[int, float | None]]] = [[(3, 1.0), (8, None), (12, 0.5)], [(1, 2.0), (9, 4.0)], [], [(0, 6.0)]]
#: a step reward that does not score turns: its steps end within them; the last one ends behind the last turn
STEPS: list[list[tuple[int, float | None]]] = [[(1, 10.0), (4, 20.0)], [], [(9, 70.0)], []]


def test_by_hand_on_two_ranks() -> None:
    tables = {0: StepTable.of(SCORES, 2), 2: StepTable.of(STEPS, 2)}
    table = RewardTable(torch.zeros(4, 3), ("a", "b", "c"), torch.tensor([1.0, 1.0, 0.1]), 2, steps=tables)
    gathered: list[torch.Tensor] = []
    book = MetricBook()

    def gather(local: torch.Tensor) -> torch.Tensor:
        gathered.append(local)
        return torch.cat(gathered)

    rows = [{"turns": own} for own in MADE]
    for rank, kept in enumerate([MetricBook(), book]):
        one: Any = SimpleNamespace(process_index=rank, device=torch.device("cpu"), gather=gather)
        record_turns(rows[2 * rank : 2 * rank + 2], table, one, kept)
    calls = 2 + 1 + 1 + 10
    expected = {
        "turns/per_trajectory": (3 + 2 + 1 + 10) / 4,
        "turns/tokens": ((4 + 3 + 1) + (2 + 3) + 7 + 10) / 16,
        "turns/tool_seconds": (0.5 + 3.0 + 1.0 + 10 * 0.5) / (calls - 1),  # an unknown tool was not called
        "turns/calls": calls / 4,
        "turns/failed_share": 2 / calls,
        "turns/timed_out_share": 1 / calls,
        "turns/cut_share": 1 / calls,
        **{f"turns/ended_{reason}": 0.25 for reason in ("answered", "turns", "completion", "unparsable")},
        "turns/ended_turn_tokens": 0.0,
        "turns/1/tokens": (4 + 2 + 7 + 1) / 4,
        "turns/1/failed_share": 2 / 4,
        "turns/1/reward": ((1.0 + 0.1 * 10.0) + 2.0 + 6.0) / 3,
        "turns/2/tokens": (3 + 3 + 1) / 3,  # without the two that a thinking budget inserted
        "turns/2/failed_share": 0 / 2,
        "turns/2/reward": (0.1 * 20.0 + 4.0) / 2,  # tokens of a tool belong to the turn behind them
        "turns/3/tokens": (1 + 1) / 2,
        "turns/3/failed_share": 0 / 1,
        "turns/3/reward": 0.5,
        **{f"turns/{k}/tokens": 1.0 for k in (4, 5, 6, 7, 8)},
        **{f"turns/{k}/failed_share": 0.0 for k in (4, 5, 6, 7, 8)},
    }
    assert book.read() == pytest.approx(expected)


def test_a_line_for_each_turn() -> None:
    names = ["turns/tokens", "turns/2/tokens", "turns/1/tokens", "turns/1/reward", "eval_turns/1/reward"]
    record: Any = SimpleNamespace(metrics=dict.fromkeys(names), first_of=lambda *_: [])
    drawn = {panel.title: panel.lines for panel in panels_of(record)}
    assert drawn["Tokens by turn"] == {"1": ("turns/1/tokens",), "2": ("turns/2/tokens",)}
    assert drawn["Reward by turn"] == {"1": ("turns/1/reward",)}
    assert "Reward by task" not in drawn


class Talk(Scripted):
    """Rows of four make one, two, three calls and none. One of a batch writes a call that cannot be read."""

    def _turn(self, ids: list[int], row: int) -> str:
        if row == 7 and "<tool_response>" not in self._tokenizer.decode(ids):
            return '<tool_call>\n{"name": "multiply", "arguments": {"a": 3\n</tool_call>'
        return super()._turn(ids, row)


@functools.wraps(drop_in_cases.multiply)
def multiply(a: int, b: int) -> str:
    if (int(a), int(b)) == (1, 2):
        raise ValueError("no")
    if (int(a), int(b)) == (1, 3):
        time.sleep(5)
    if (int(a), int(b)) == (2, 2):
        return "4 " * 200
    return str(int(a) * int(b))


def by_number(messages: Any, turns: Any, **_: Any) -> list[float | None]:
    """Score the k-th turn with k; where there is one alone, not at all."""
    return [float(k) if len(turns) > 1 else None for k in range(1, len(turns) + 1)]


@pytest.mark.not_fast
def test_a_training_and_an_evaluation(models: dict[str, Path], tmp_path: Path) -> None:
    """A generation batch of two micro-batches, then one of an evaluation."""
    rollout = {"turns": {"max_turns": 3, "tool_seconds": 0.3, "tool_tokens": 40}}
    changes = {"gradient_accumulation_steps": 2, "max_completion_length": 600, "max_steps": 1, "objective": "dr_grpo"}
    changes |= {"advantage": "turn_returns", "rollout": rollout, "per_device_eval_batch_size": 4}
    trainer = Talk(
        AutoModelForCausalLM.from_pretrained(models["tools"], dtype=torch.float32),
        [TurnRewards(by_number)],
        LabConfig(**arguments(tmp_path, **changes)),
        chats(),
        chats(1),
        processing_class=AutoTokenizer.from_pretrained(models["tools"]),
        tools=[multiply],
    )
    trainer.script = Script()
    trainer.train()
    said = [len(ids) for _, ids in trainer.script.turns]
    trainer.script.turns.clear()
    trainer.evaluate()
    said_then = [len(ids) for _, ids in trainer.script.turns]
    (log,) = (row for row in trainer.state.log_history if "loss" in row)
    (later,) = (row for row in trainer.state.log_history if "eval_loss" in row)

    # rows 0 4: a call, an answer; 1 5: two calls, an answer; 2 6: three calls, the last one beyond the limit; 3 7: none
    turns = [2, 3, 3, 1] * 2
    calls = [1, 2, 2, 0] * 2
    assert len(said) == sum(turns)
    expected = {
        "turns/per_trajectory": sum(turns) / 8,
        "turns/tokens": sum(said) / sum(turns),
        "turns/calls": sum(calls) / 8,
        "turns/failed_share": 2 / 10,  # 1·2 of row 1, 1·3 of row 1
        "turns/timed_out_share": 1 / 10,
        "turns/cut_share": 1 / 10,
        "turns/ended_answered": 5 / 8,
        "turns/ended_turns": 2 / 8,
        "turns/ended_unparsable": 1 / 8,
        "turns/ended_completion": 0.0,
        "turns/ended_turn_tokens": 0.0,
        "turns/1/tokens": sum(said[:8]) / 8,
        "turns/2/tokens": sum(said[8:14]) / 6,
        "turns/3/tokens": sum(said[14:]) / 4,
        "turns/1/failed_share": 1 / 6,
        "turns/2/failed_share": 1 / 4,
        **{f"turns/{k}/reward": float(k) for k in (1, 2, 3)},
    }
    assert 0.3 / 10 < log.pop("turns/tool_seconds") < 2 / 10
    assert {name: value for name, value in log.items() if name.startswith("turns/")} == pytest.approx(expected)
    assert later["eval_turns/per_trajectory"] == 9 / 4  # one prompt: rows 0 to 3
    assert later["eval_turns/calls"] == 5 / 4
    assert later["eval_turns/tokens"] == pytest.approx(sum(said_then) / 9)
    assert later["eval_turns/failed_share"] == 2 / 5
    assert later["eval_turns/3/reward"] == 3.0
