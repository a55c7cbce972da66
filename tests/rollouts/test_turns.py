"""The turns of a tool loop against a server whose context is smaller than the model's: the stand-in for it, one
process. (Several ranks: ``tests/distributed/test_turns_ranks.py``.)"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, Qwen2Config
from trl.trainer import grpo_trainer

from distributed.turns_worker import calls
from grpo_lab import LabConfig, LabTrainer
from grpo_lab.engines.vllm.talk import ServerGone
from grpo_lab.testing import tiny_model
from grpo_lab.trainer.generation.prompt_fit import fill_rooms
from grpo_lab.trainer.generation.turns import within_context
from parity.conftest import TOOL_TEMPLATE
from parity.drop_in_cases import chats, multiply
from parity.harness import arguments
from rollouts.server_runs import odd_share
from rollouts.stand_in import stand_in

LONGEST = 160


@pytest.mark.not_fast
def test_prompts_that_have_grown_get_what_the_servers_context_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an engine in the process. Before, the first answer of a tool ended the run: the server has no room for
    ``max_completion_length`` behind it. The server is lost in the second turn, and comes back once."""
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_layers=2, max_positions=2048, initializer_range=0.2)
    tokenizer.chat_template = TOOL_TEMPLATE
    monkeypatch.setattr(grpo_trainer, "parse_response", calls(0, again=True))
    settings = arguments(tmp_path, max_steps=1, gradient_accumulation_steps=1, max_completion_length=LONGEST)
    settings |= {"use_vllm": True, "vllm_mode": "server", "objective": "dr_grpo", "max_tool_calling_iterations": 4}
    settings |= {"rollout": {"server": {"return_timeout": 60}}}
    asked: list[tuple[int, int | None]] = []
    with stand_in(model) as engine:
        engine.longest = 24
        engine.faults["generate 2"] = ServerGone("planted")
        rows = chats()
        told = {"tools": [multiply], "add_generation_prompt": True, "return_dict": False}
        prompts = [tokenizer.apply_chat_template(prompt, **told) for prompt in rows["prompt"]]
        engine.context = max(map(len, prompts)) + LONGEST
        generate = engine.generate

        def noted(prompts: list[list[int]], n: int, max_tokens: int | None, **more: Any) -> dict[str, Any]:
            asked.extend((len(ids), max_tokens) for ids in prompts if n == 1)
            return generate(prompts, n, max_tokens, **more)

        monkeypatch.setattr(engine, "generate", noted)
        trainer = LabTrainer(
            copy.deepcopy(model), odd_share, LabConfig(**settings), rows, processing_class=tokenizer, tools=[multiply]
        )
        trainer.train()
        assert trainer.model.config.max_position_embeddings == 2048
    (log,) = (row for row in trainer.state.log_history if "loss" in row)
    assert log["rollout/server_returns"] == 1  # of the batch, however many turns it took
    turns = [(length, limit) for length, limit in asked if limit != 16]  # 16: a probe of the sync's proof
    assert {limit for _, limit in turns} == {None}  # every prompt with an answer in it leaves less than LONGEST
    assert max(length for length, _ in turns) < engine.context


def test_each_row_is_asked_for_what_its_prompt_leaves() -> None:
    together = threading.Barrier(3, timeout=60)

    def ask(prompts: list[list[int]], max_tokens: int, features: Any, n: int) -> dict[str, Any]:
        together.wait()  # the server has all rows at the same time
        assert features is None
        (prompt,) = prompts
        ids = list(range(max_tokens))
        return {"prompt_ids": [prompt], "completion_ids": [ids], "logprobs": None, "logprob_token_ids": [[ids]]}

    prompts = [[1] * 7, [2] * 9, [3] * 4]
    answer = fill_rooms(ask, prompts, 10, n=1, max_tokens=None)
    assert answer["prompt_ids"] == prompts
    assert [len(ids) for ids in answer["completion_ids"]] == [3, 1, 6]
    assert answer["logprobs"] is None
    assert len(answer["logprob_token_ids"]) == 3


def test_images_go_with_their_rows() -> None:
    seen = []

    def ask(prompts: list[list[int]], max_tokens: int, features: Any) -> dict[str, Any]:
        seen.append((prompts[0][0], features))
        return {"completion_ids": [torch.ones(max_tokens).tolist()]}

    fill_rooms(ask, [[1], [2]], 5, features=["one", None], max_tokens=None)
    assert sorted(seen) == [(1, ["one"]), (2, [None])]


@pytest.mark.parametrize("config", [GPT2Config(n_positions=512), Qwen2Config(max_position_embeddings=512)])
def test_trl_is_told_the_servers_context_and_the_model_keeps_its_positions(config: Any) -> None:
    """A prompt that fills it ends its row; GPT-2 has its positions under another name."""
    generation = SimpleNamespace(context=300)
    trainer: Any = SimpleNamespace(
        use_vllm=True,
        vllm_mode="server",
        _is_vlm=False,
        model=SimpleNamespace(config=config),
        vllm_generation=generation,
    )
    with within_context(trainer):
        assert config.max_position_embeddings == 300
    assert config.max_position_embeddings == 512
    generation.context = 1000
    with within_context(trainer):
        assert config.max_position_embeddings == 512
