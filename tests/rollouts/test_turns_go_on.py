"""Trajectories of a real vLLM engine go on where they were: in a run that was killed, and with the server that comes
after a killed one. Each call stands for the tokens before it, so that one that is lost or drawn anew shows."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from transformers import AutoTokenizer, TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import parse_response as stock_parse

from grpo_lab import LabConfig
from parity.conftest import TOOL_TEMPLATE
from parity.drop_in_cases import chats
from parity.harness import arguments
from rollouts.served import Again, served_from
from rollouts.trajectory_runs import Kept, odd_share, saved_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTEXT = 900


def calling(tokenizer: Any, ids: list[int], prefix: list[int], **named: Any) -> dict[str, Any]:
    """In the place of TRL's ``parse_response``: three of four turns call ``note``."""
    if "<tool_call>" in tokenizer.decode(ids):  # the template, which is checked before the first step
        return stock_parse(tokenizer, ids, prefix=prefix, **named)  # type: ignore[no-any-return]
    name = hashlib.sha256(json.dumps([*prefix, *ids]).encode()).hexdigest()[:12]
    said: dict[str, Any] = {"role": "assistant", "content": tokenizer.decode(ids)}
    if int(name, 16) % 4:
        said["tool_calls"] = [{"type": "function", "function": {"name": "note", "arguments": {"name": name}}}]
    return said


class Notes:
    """A tool with an effect; ``then`` is called once, in the middle of call number ``at``."""

    def __init__(self, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.written: list[str] = []
        self.begun: list[str] = []
        self.at = at
        self._then = then
        self._lock = threading.Lock()

    @property
    def tool(self) -> Callable[..., Any]:
        def note(name: str) -> str:
            """Note a name.

            Args:
                name: what to note.

            Returns:
                Its length.
            """
            time.sleep(int(name, 16) % 5 / 40)
            with self._lock:
                self.begun.append(name)
                if len(self.begun) == self.at:
                    self._then()
                self.written.append(name)
            return str(len(name))

        return note


def build(model: str, out: Path, notes: Notes, rollout: dict[str, Any], **changes: Any) -> Kept:
    settings = arguments(out, max_steps=2, gradient_accumulation_steps=1, max_completion_length=300)
    settings |= {"per_device_train_batch_size": 8, "objective": "dr_grpo", "use_vllm": True, "learning_rate": 1e-2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_tool_calling_iterations": 3, **changes}
    settings["rollout"] = {"verify_every": 1, "turns": {}, **rollout}
    return Kept(model, odd_share, LabConfig(**settings), chats(), tools=[notes.tool])


def called(rows: list[dict[str, Any]]) -> list[str]:
    """The calls of trajectories that were answered."""
    messages = [message for row in rows for message in row["messages"]]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [call["function"]["arguments"]["name"] for call in calls]


def test_a_killed_run_goes_on_inside_its_trajectories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk in the middle of a call of the second step is what a kill would leave there."""
    monkeypatch.setattr(grpo_trainer, "parse_response", calling)
    model = str(saved_model(tmp_path / "model"))
    engine = {"engine": {"kv_cache_gib": 0.25, "max_model_len": CONTEXT}}
    before: list[str] = []
    first_step: list[str] = []

    def keep_what_is_there() -> None:
        before.extend(notes.written)
        shutil.copytree(tmp_path / "run", tmp_path / "killed")

    notes = Notes(then=keep_what_is_there)
    trainer = build(model, tmp_path / "run", notes, engine, vllm_mode="colocate")

    class Counts(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                first_step.extend(notes.written)
                notes.at = len(notes.begun) + 6

    trainer.add_callback(Counts())
    trainer.train()
    journal = next((tmp_path / "killed" / "_turns").glob("00000001-0-0.jsonl"))
    kept = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    answered = sum("tokens" in entry for entry in kept)
    assert answered >= 3
    second = Notes()
    resumed = build(model, tmp_path / "killed", second, engine, vllm_mode="colocate")
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-1"))
    made = called(resumed.rows)
    assert not set(second.written) & set(before)
    earlier = set(before) - set(first_step)
    assert len(earlier) >= 3
    assert earlier <= set(made)
    assert len(resumed.rows) == 8
    (log,) = [row for row in resumed.state.log_history if row.get("step") == 2 and "loss" in row]
    assert log["rollout/sync_gap"] < 1e-4
    assert len({json.dumps(row["ids"]) for row in resumed.rows}) == 8  # none was drawn from another's random numbers
    assert not list((tmp_path / "killed" / "_turns").glob("*"))


@pytest.mark.thorough
def test_a_server_killed_in_a_turn_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """What was written and answered before stays; the rest is asked of the server that comes after."""
    monkeypatch.setattr(grpo_trainer, "parse_response", calling)
    sizes = {"max_positions": 2048, "initializer_range": 0.2}
    with served_from(tmp_path, "--max-model-len", str(CONTEXT), ends=range(100, 200), **sizes) as served:
        tokenizer = AutoTokenizer.from_pretrained(served.model)
        tokenizer.chat_template = TOOL_TEMPLATE
        tokenizer.save_pretrained(served.model)
        second = Again(served, tmp_path / "next")
        request.addfinalizer(second.stop)
        notes = Notes(5, second.start)
        talk = {"retries": 1, "backoff": 0.1, "request_timeout": 600, "return_timeout": 600}
        mode = {"vllm_mode": "server", "vllm_server_base_url": served.url, "max_steps": 1}
        trainer = build(served.model, tmp_path / "run", notes, {"server": talk}, **mode)
        trainer.train()
        (log,) = [row for row in trainer.state.log_history if "loss" in row]
        assert log["rollout/server_returns"] == 1
        assert log["rollout/sync_gap"] < 1e-4
        assert len(notes.written) == len(set(notes.written)) >= 8
        assert set(notes.written) <= set(called(trainer.rows))
        second.stop()
