"""A real `grpo-lab serve` under a tool loop: masks, log-probs, the context; then its engine is killed while it
generates. One server for the file; the last test ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer import grpo_trainer

from distributed.turns_worker import Trained, calls
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.cli import main
from grpo_lab.trainer.generation.server_client import LabVLLMClient
from parity.conftest import TOOL_TEMPLATE
from parity.drop_in_cases import chats, multiply
from parity.harness import arguments
from rollouts.served import Served, children, served_from
from rollouts.server_runs import odd_share

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTEXT, LONGEST = 780, 240


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("turns")
    with served_from(folder, "--max-model-len", str(CONTEXT), ends=range(100, 160), max_positions=1024) as running:
        yield running


def told_and_computed(folder: str, policy: dict[str, torch.Tensor], rows: list[dict[str, Any]]) -> float:
    """Largest difference in nats between the engine's log-probs and a float64 forward, over the sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.load_state_dict({name: value.double() for name, value in policy.items()})
    worst = 0.0
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["ids"]])
        with torch.no_grad():
            logps = model(ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        own = logps.gather(1, torch.tensor(row["ids"]).unsqueeze(1)).squeeze(1)
        sampled = torch.tensor(row["own"]).bool()
        worst = max(worst, float((own - torch.tensor(row["told"]).double()).abs()[sampled].max()))
    return worst


def test_masks_and_log_probs_of_a_tool_loop(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt with an answer in it leaves less of the context than the longest completion takes."""
    tokenizer = AutoTokenizer.from_pretrained(served.model)
    tokenizer.chat_template = TOOL_TEMPLATE
    monkeypatch.setattr(grpo_trainer, "parse_response", calls(0, again=True))
    settings = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1, max_completion_length=LONGEST)
    settings |= {"per_device_train_batch_size": 8, "max_tool_calling_iterations": 2, "learning_rate": 1.0}
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": served.url}
    config = LabConfig(**settings, **server, objective="dr_grpo", rollout={"verify_every": 1})
    trainer = LabTrainer(served.model, odd_share, config, chats(), processing_class=tokenizer, tools=[multiply])
    trained = Trained(trainer)
    trainer.add_callback(trained)
    policies: list[dict[str, torch.Tensor]] = []
    sync = trainer.vllm_generation.sync_weights

    def noted() -> None:
        policies.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
        sync()

    monkeypatch.setattr(trainer.vllm_generation, "sync_weights", noted)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert not torch.equal(policies[0]["model.norm.weight"], policies[1]["model.norm.weight"])
    answered = 0
    for number, log in enumerate(logs):
        rows = trained.rows[8 * number : 8 * number + 8]
        assert told_and_computed(served.model, policies[number], rows) < 2e-5
        assert log["completions/mean_length"] == pytest.approx(sum(sum(row["own"]) for row in rows) / 8, rel=1e-6)
        assert log["rollout/sync_gap"] < 1e-5
        for row in rows:
            heard = tokenizer.decode([token for token, own in zip(row["ids"], row["own"], strict=True) if not own])
            said = tokenizer.decode([token for token, own in zip(row["ids"], row["own"], strict=True) if own])
            assert heard.count("<tool_response>") == heard.count("<|im_start|>user") == heard.count("</tool_response>")
            assert "<tool_response>" not in said
            assert len(row["prompt"]) + len(row["ids"]) <= CONTEXT
            answered += heard.count("<tool_response>") > 0
    assert answered >= 4


def test_the_engine_killed_while_it_generates_ends_the_server_and_the_training(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM would never answer the request, nor end; both commands end with 3 in less than half a minute."""
    processes = [served.process.pid, *children(served.process.pid)]
    _, _, engine = processes  # the command, the server, its engine
    recipe = {
        "name": "killed", "model": {"path": served.model}, "data": {"loader": "word_problems", "n": 32},
        "rewards": ["rollouts.server_runs:odd_share"], "objective": "dr_grpo", "use_vllm": True, "vllm_mode": "server",
        "vllm_server_base_url": served.url, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 5,
        "max_completion_length": 400, "save_strategy": "steps", "save_steps": 100, "gradient_checkpointing": False,
        "rollout": {"server": {"retries": 1, "backoff": 0.1}}, "use_cpu": True, "bf16": False, "report_to": "none",
        "disable_tqdm": True, "generation_kwargs": {"min_tokens": 350}, "output_dir": str(tmp_path / "run"),
        "vllm_importance_sampling_correction": False,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    generate = LabVLLMClient.generate
    asked: list[int] = []
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(engine, signal.SIGKILL)

    def then_kill(client: Any, *args: Any, **arguments: Any) -> Any:
        asked.append(arguments["n"])
        if asked.count(4) == 2 and not killed:
            threading.Timer(0.1, kill).start()
        return generate(client, *args, **arguments)

    monkeypatch.setattr(LabVLLMClient, "generate", then_kill)
    assert main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 3
    assert time.monotonic() - killed[0] < 30
    assert "A checkpoint of step 1 was written" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoint-1" / "optimizer.pt").is_file()
    assert served.process.wait(timeout=30 - (time.monotonic() - killed[0])) == 3
    assert "grpo-lab: error: the vLLM server " in (served.folder / "out").read_text()
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
