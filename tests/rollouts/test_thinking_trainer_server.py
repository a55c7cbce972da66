"""The thinking budget with ``vllm_mode: server``: a real vLLM in a second process, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

from grpo_lab import LabConfig
from grpo_lab.engines.vllm.engine import EngineOptions
from grpo_lab.engines.vllm.server import Server, ServerOptions
from ports import free_port
from rollouts.checkpoints import servable
from rollouts.server_runs import odd_share
from rollouts.thinking_oracle import TappedTrainer, check_budget_is_obeyed, difference, oracle, questions, run, settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("thinking_server")
    model = servable(folder / "model", initializer_range=0.1)
    engine = EngineOptions(kv_cache_gib=0.125, max_model_len=256)
    options = ServerOptions(model, free_port(), engine)
    running = Server(options, log=folder / "server.log", start_timeout=300).start()
    yield running
    running.stop()


@pytest.mark.parametrize("budget", [0, 8])
def test_gradient_is_the_oracles(server: Server, budget: int, tmp_path: Path) -> None:
    written = settings(
        tmp_path, budget, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.options.base_url
    )
    written["rollout"]["verify_every"] = 1
    trainer = TappedTrainer(
        model=server.options.model, reward_funcs=odd_share, args=LabConfig(**written), train_dataset=questions()
    )
    asked: list[tuple[int, int]] = []
    client: Any = trainer.vllm_generation.vllm_client
    generate = client.generate

    def counted(prompts: Any, **arguments: Any) -> Any:
        asked.append((len(prompts), arguments["n"]))
        return generate(prompts, **arguments)

    client.generate = counted
    steps = run(trainer)
    history = trainer.state.log_history
    shares = [row["rollout/cut_share"] for row in history if "rollout/cut_share" in row]
    assert max(row["rollout/sync_gap"] for row in history if "rollout/sync_gap" in row) < 1e-4
    assert ((4, 3) in asked) == (budget > 0)  # the thinking of 4 groups of 3 is asked for in 4 requests
    for number, step in enumerate(steps):
        cut = check_budget_is_obeyed(step, trainer.processing_class, budget)
        assert 0 < cut < 12, "a batch of one kind proves less"
        assert shares[number] == pytest.approx(cut / 12)
        assert difference(step.gradient, oracle(step, trainer.processing_class, budget)) < 2e-5, step.aggregation
