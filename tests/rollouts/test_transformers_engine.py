"""The thinking budget on a real transformers model."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, XLNetConfig

from grpo_lab.batch import padded
from grpo_lab.engines.generators import TransformersGenerator, context_of_config, until_end
from grpo_lab.engines.thinking_budget import BudgetedGenerator, ThinkingBudget
from rollouts.thinking_oracle import inserted_mask


def test_padding_and_cutting_by_hand() -> None:
    ids, mask = padded([[5, 6], [7]], 0, "cpu", left=True)
    assert ids.tolist() == [[5, 6], [0, 7]]
    assert mask.tolist() == [[1, 1], [0, 1]]
    assert until_end([4, 9, 0, 0], {9}) == [4, 9]
    assert until_end([4, 5], {9}) == [4, 5]


def test_a_model_without_a_limit_of_positions_has_none() -> None:
    """XLNet says -1, and every prompt was too long for it."""
    assert context_of_config(XLNetConfig()) is None
    assert context_of_config(Qwen2Config(max_position_embeddings=64)) == 64


@pytest.mark.not_fast
def test_rows_keep_their_order_and_batches_do_not_matter() -> None:
    from grpo_lab.testing import tiny_model

    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_heads=2, initializer_range=0.3)
    model.eval()
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13], [14, 15]]

    def run(batch_size: int, rows: list[list[int]]) -> list[list[int]]:
        generator = TransformersGenerator(model, tokenizer, batch_size, progress=False)
        return [one.ids for (one,) in generator(rows, n=1, temperature=0.0, max_new_tokens=12, seed=None)]

    alone = [run(1, [prompt])[0] for prompt in prompts]
    assert run(2, prompts) == alone
    assert run(64, prompts) == alone


@pytest.mark.not_fast
@pytest.mark.parametrize("budget", [0, 8, 32])
def test_budget_is_obeyed(budget: int) -> None:
    from grpo_lab.testing import tiny_model

    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_heads=2, initializer_range=0.3)
    model.eval()
    torch.manual_seed(0)
    limits = ThinkingBudget.for_tokenizer(tokenizer, budget, max_completion_length=64, text="\nSo:\n</think>\n")
    generator = BudgetedGenerator(TransformersGenerator(model, tokenizer, 64, progress=False), limits)
    prompts = [tokenizer("Tom has 3 apples.")["input_ids"], tokenizer("2 + 3 =")["input_ids"]] * 2
    done = [one for (one,) in generator(prompts, n=1, temperature=1.0, max_new_tokens=64, seed=None)]
    assert any(completion.was_cut for completion in done)
    for prompt, completion in zip(prompts, done, strict=True):
        assert len(completion.ids) <= 64
        assert completion.logprobs is None
        assert inserted_mask(prompt, completion.ids, limits) == completion.mask
        if completion.was_cut:
            assert completion.ids[budget : budget + len(limits.stop_ids)] == list(limits.stop_ids)


def test_a_model_on_the_cpu_leaves_the_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To put back the random state of a GPU that the process does not use would begin to use it."""
    from grpo_lab.testing import tiny_model

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("asked a GPU"))
    model, tokenizer = tiny_model("qwen2", hidden_size=32, num_heads=2)
    generator = TransformersGenerator(model.eval(), tokenizer, 4, progress=False)
    state = torch.get_rng_state()
    generator([[5, 6]], n=2, temperature=1.0, max_new_tokens=2, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
