"""A real vLLM engine in this process: sync, proof, planted faults, grouping, thinking budget. No mock anywhere.

One engine serves several assertions, since starting one is what takes the time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_lab.engines.forward import forward_logprobs
from grpo_lab.engines.generators import VllmGenerator
from grpo_lab.engines.grouping import EngineFault
from grpo_lab.engines.thinking_budget import BudgetedGenerator, ThinkingBudget
from grpo_lab.engines.weights.proof import differing_tensors, draw_probe, prove_sync, sync_gap, tolerance_for
from grpo_lab.engines.weights.sync import WeightSyncError, engine_model, needs_repair, push_weights, worker_runner
from rollouts.thinking_oracle import inserted_mask

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPTS = [[5, 6, 7, 8], [40, 50, 60], [100, 3], [9] * 40]


@pytest.fixture(scope="module")
def tied(start_engine: Callable[..., Any]) -> tuple[Any, Any]:
    """An engine and the model whose weights it has; each test leaves them so."""
    return start_engine("qwen2-tied")  # type: ignore[no-any-return]


def move(model: Any, seed: int, size: float = 0.1) -> None:
    """Stands for an optimizer step: every parameter moves by `size` of its spread."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.float().std() if parameter.float().std() > 0 else torch.tensor(0.1)
            parameter.add_((size * spread * torch.randn(parameter.shape)).to(parameter.dtype))


def proven(engine: Any, model: Any, **options: Any) -> float:
    """Gap of a full proof under the stated tolerance; raises where it fails."""
    tolerance = tolerance_for(engine.llm_engine.model_config.dtype, model.dtype)
    before = torch.get_rng_state()
    gap = prove_sync(engine, model, model.named_parameters, PROMPTS, tolerance=tolerance, **options).mean
    assert torch.equal(torch.get_rng_state(), before), "the probe moved the training's random numbers"
    return gap


@pytest.mark.thorough(but=["llama-tied-bfloat16", "stories-float32"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2-tied", "float32"),
        ("qwen2-untied", "float32"),
        ("qwen3-tied", "float32"),
        ("qwen3-untied", "bfloat16"),
        ("llama-tied", "bfloat16"),
        ("llama-untied", "float32"),
        ("stories", "float32"),
    ],
)
def test_sync_is_proven_after_every_step(start_engine: Callable[..., Any], name: str, dtype: str) -> None:
    engine, model = start_engine(name, dtype)
    assert str(engine.llm_engine.model_config.dtype) == f"torch.{dtype}"  # not silently bfloat16
    proven(engine, model)
    for step in range(4):
        move(model, seed=step, size=0.05)
        with pytest.raises(WeightSyncError):
            proven(engine, model)  # moved, not pushed
        tensors = push_weights(engine, model.named_parameters())
        assert tensors == len(list(model.named_parameters()))
        proven(engine, model)


def test_planted_faults_are_caught(tied: tuple[Any, Any]) -> None:
    engine, model = tied
    if not needs_repair(engine):
        pytest.skip("this engine does not pack its weights (a GPU): the tied head cannot go stale")

    # The obvious repair: reload without packing the tied head again.
    move(model, seed=1)
    worker_runner(engine).reload_weights(weights_iterator=model.named_parameters())
    engine.reset_prefix_cache()
    with pytest.raises(WeightSyncError, match=r"1 tensors differ; most:\n  lm_head.weight"):
        proven(engine, model)
    push_weights(engine, model.named_parameters())
    proven(engine, model)

    # One stale layer: the trainer moves it, the stream leaves it out.
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.25)
    rest = [(n, p) for n, p in model.named_parameters() if "layers.1.mlp.down_proj" not in n]
    with pytest.raises(WeightSyncError, match=r"not in the trainer's stream.*layers\.1\.mlp\.down_proj\.weight"):
        push_weights(engine, rest)
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.down_proj\.weight: relative 0\.2"):
        proven(engine, model)
    push_weights(engine, model.named_parameters())
    proven(engine, model)

    # Weights that no engine should hold are refused.
    for value, told in ((torch.ones(1, dtype=torch.int64), "is of torch.int64"), (torch.tensor(math.nan), "NaN")):
        with pytest.raises(WeightSyncError, match=rf"model\.norm\.weight .*{told}"):
            push_weights(engine, [(n, value if n == "model.norm.weight" else p) for n, p in model.named_parameters()])
    push_weights(engine, model.named_parameters())

    # Weights whose products are NaN give NaN log-probs: an error, not an importance ratio of one.
    broken = {n: p.detach().clone() for n, p in model.named_parameters()}
    broken["model.norm.weight"].fill_(3e38)  # the last one: no page of the cache gets any of it
    push_weights(engine, broken.items())
    with pytest.raises(EngineFault, match="NaN"):
        draw_probe(engine, PROMPTS)
    push_weights(engine, model.named_parameters())
    proven(engine, model)

    # A stream that reuses one buffer for every tensor of a shape, as a gather of shards does.
    def reusing() -> Any:
        buffers: dict[torch.Size, torch.Tensor] = {}
        for parameter_name, parameter in model.named_parameters():
            buffer = buffers.setdefault(parameter.shape, torch.empty(parameter.shape))
            yield parameter_name, buffer.copy_(parameter.detach())

    move(model, seed=2)
    push_weights(engine, reusing())
    proven(engine, model)


def test_prompt_of_a_group_is_prefilled_once(tied: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    group, length = 8, 100
    engine, model = tied
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    computed: list[int] = []
    schedule = scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        computed.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", counting)
    prompts = [[(7 * p + i) % 700 + 3 for i in range(length)] for p in range(3)]
    rows = [{"prompt_token_ids": ids} for ids in prompts for _ in range(group)]
    outputs = engine.generate(rows, SamplingParams(n=1, temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True))
    decoded = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    page = engine.llm_engine.vllm_config.cache_config.block_size
    # 3 prompts * (96 shared + 8 * 4 own) = 384 prompt tokens, not 3 * 8 * 100 = 2400.
    shared = page * ((length - 1) // page)  # whole pages; the last token's logits are needed
    assert sum(computed) - decoded == 3 * (shared + group * (length - shared))
    assert [output.prompt_token_ids for output in outputs] == [row["prompt_token_ids"] for row in rows]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(rows)

    # The engine's log-probs of grouped, prefix-shared completions are the trainer's.
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    theirs = [[entry[t].logprob for t, entry in zip(row, o.outputs[0].logprobs)] for row, o in zip(ids, outputs)]
    ours = forward_logprobs(model, [row["prompt_token_ids"] for row in rows], ids)
    assert sync_gap(theirs, ours).mean < tolerance_for(torch.float32)


def test_a_load_that_breaks_off_leaves_an_engine_that_answers(tied: tuple[Any, Any]) -> None:
    """Without it vLLM's layers are left without storage, and the next token ends the process."""
    from vllm import SamplingParams

    engine, model = tied
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=0)

    def answer() -> Any:
        (output,) = engine.generate([{"prompt_token_ids": [5, 6, 7]}], sampling)
        return list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob

    before = answer()

    def breaks_off(after: int) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, tensor) in enumerate(model.named_parameters()):
            if count == after:
                raise OSError("No space left on device")
            yield name, tensor

    with pytest.raises(OSError, match="No space left"):
        push_weights(engine, breaks_off(5))
    assert answer() == before  # the five that came are the old ones, too
    assert math.isfinite(before[1])
    with pytest.raises(WeightSyncError, match=r"could not load .*k_proj\.weight of shape \[4, 128\]"):
        push_weights(engine, ((n, t[:4] if n.endswith("k_proj.weight") else t) for n, t in model.named_parameters()))
    push_weights(engine, model.named_parameters())
    assert differing_tensors(engine_model(engine), model.named_parameters()) == []
    assert answer() == before


def test_thinking_budget_on_the_engine(tied: tuple[Any, Any], checkpoint: Any) -> None:
    from transformers import AutoTokenizer

    engine, model = tied
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("qwen2-tied"))
    prompts = [ids for ids in PROMPTS for _ in range(2)]
    for budget in (0, 8, 32):
        limits = ThinkingBudget.for_tokenizer(tokenizer, budget, max_completion_length=64, text="\nSo:\n</think>\n")
        generator = BudgetedGenerator(VllmGenerator(engine, sorted(limits.eos_ids), logprobs=True), limits)
        done = [one for (one,) in generator(prompts, n=1, temperature=1.0, max_new_tokens=64, seed=None)]
        assert any(completion.was_cut for completion in done)
        for prompt, completion in zip(prompts, done, strict=True):
            assert len(completion.ids) <= 64
            assert inserted_mask(prompt, completion.ids, limits) == completion.mask
            assert completion.logprobs is not None
            # Sampled positions carry log-probs of exactly this context, the inserted text included.
            scores = forward_logprobs(model, [prompt], [completion.ids])[0]
            for own, value, score in zip(completion.mask, completion.logprobs, scores, strict=True):
                assert (own == 0 and math.isnan(value)) or value == pytest.approx(score, abs=1e-4)


def test_engine_leaves_the_process_as_it_found_it(start_engine: Callable[..., Any]) -> None:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "3"
    before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "VLLM_CPU_KVCACHE_SPACE")}
    threads = torch.get_num_threads()
    try:
        engine, _ = start_engine("qwen2-untied")
        assert {name: os.environ.get(name) for name in before} == before
        assert engine.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes == 0.125 * 1024**3  # the recipe's
        torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == threads + 1
        assert engine_model(engine) is not None
    finally:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]
        torch.set_num_threads(threads)


def test_head_size_without_a_kernel_is_refused(vllm_or_skip: None, tiny_folder: Any) -> None:
    from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory, runs_on_cpu

    if not runs_on_cpu():
        pytest.skip("head sizes are limited on the CPU build only")
    with pytest.raises(ValueError, match="heads of size 8"):
        engine_factory(EngineOptions(kv_cache_gib=0.125, max_model_len=64))(model=str(tiny_folder))
