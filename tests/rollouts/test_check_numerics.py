"""`grpo-lab check numerics` with real engines: what is right passes, and each planted fault is found and named.

A tiny Qwen3 with the real Qwen3 tokenizer. An engine serves several cases, since starting one is what takes the time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make setup-vllm` installs the CPU build")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.cli import main
from grpo_lab.diagnostics.numerics import Evidence, likely_cause, verdict
from grpo_lab.engines.generators import stop_token_ids
from grpo_lab.engines.vllm.asked_engine import ColocatedEngine, ServedEngine
from grpo_lab.engines.vllm.engine import EngineOptions, engine_factory
from grpo_lab.engines.vllm.server import Server, ServerOptions
from grpo_lab.engines.weights.adapter import AdapterFiles, adapter_tensors
from grpo_lab.engines.weights.proof import tolerance_for
from grpo_lab.engines.weights.sync import load_into_runner, push_weights, worker_runner
from grpo_lab.pipelines import check_numerics
from grpo_lab.pipelines.check_numerics import TOOLS, first_difference, measure, write_transcripts
from grpo_lab.testing import tiny_model
from grpo_lab.turns.trajectory import Trajectory
from ports import free_port
from rollouts.test_engine import move

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LIMIT = tolerance_for(torch.float32)
PROMPTS = [[{"role": "user", "content": f"What is {k} times {k + 7}?"}] for k in (3, 4)]
TURNS, LENGTH = 3, 340
LONGER = ["--turns", "3", "--length", "460", "--prompts", "2"]  # the prompts of word_problems take more
ENGINE: Any = {"kv_cache_gib": 0.25, "max_model_len": LENGTH}


@pytest.fixture(scope="module", autouse=True)
def few_prefixes() -> Iterator[None]:
    """The trainer scores each part of a transcript over a vocabulary of 150,000: most of a check's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_numerics, "PREFIXES", 8)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, grpo_lab_data: Path) -> Path:
    """A random Qwen3, whose attention is strong enough to show, with Qwen3's tokenizer and template."""
    place = tmp_path_factory.mktemp("numerics") / "qwen3"
    sizes: Any = {"hidden_size": 64, "num_heads": 2, "num_layers": 2, "intermediate_size": 128}
    tokenizer = grpo_lab_data / "tokenizers" / "qwen3"
    model, words = tiny_model("qwen3", tokenizer=tokenizer, initializer_range=0.1, **sizes)
    model.save_pretrained(place)
    words.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def started(folder: Path, rank: int | None = None, **more: Any) -> ColocatedEngine:
    start = engine_factory(EngineOptions(**ENGINE), trainer_dtype=torch.float32, max_lora_rank=rank)
    return ColocatedEngine(start(model=str(folder), logprobs_mode="processed_logprobs", max_num_seqs=64, **more))


@pytest.fixture(scope="module")
def dense(folder: Path) -> ColocatedEngine:
    return started(folder)


@pytest.fixture(scope="module")
def with_adapters(folder: Path) -> ColocatedEngine:
    return started(folder, rank=8)


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def written_by(engine: Any, tokenizer: Any) -> list[Trajectory]:
    return write_transcripts(engine, tokenizer, stop_token_ids(None, tokenizer), PROMPTS, TURNS, LENGTH)


def checked(model: Any, engine: Any, tokenizer: Any) -> Evidence:
    """As the command does it."""
    written = written_by(engine, tokenizer)
    return measure(model, engine, written, first_difference(engine, tokenizer, PROMPTS))


def told(found: Evidence) -> str:
    train, _, sentence = verdict(found, LIMIT, ["float32", "float32"])
    assert not train
    return sentence


def lora(model: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config).eval()


def sent(engine: Any, model: Any, files: AdapterFiles) -> None:
    engine.use(files.write(model, adapter_tensors(model.named_parameters(), files.adapter)))


# --- what is right ----------------------------------------------------------------------------------------------------


def test_transcripts_are_joined_as_the_template_has_it_and_fill_the_length(dense: Any, tokenizer: Any) -> None:
    stops = stop_token_ids(None, tokenizer)
    for one in written_by(dense, tokenizer):
        assert len(one.turns) == TURNS
        assert LENGTH - 90 < len(one.so_far) < LENGTH
        heard = tokenizer.decode([token for token, own in zip(one.ids, one.mask, strict=True) if not own])
        assert heard.count("<tool_response>") == heard.count("<|im_start|>assistant\n<think>\n") == TURNS - 1
        assert tokenizer.decode(one.prompt).endswith("<|im_start|>assistant\n<think>\n")
        for turn in one.turns[:-1]:
            ended = [token in stops for token in one.ids[turn.end - 1 : turn.end + 1]]
            assert sum(ended) == 1  # of the policy, or put behind a turn that was cut


def test_the_same_model_is_passed_dense(model: Any, dense: Any, tokenizer: Any) -> None:
    found = checked(model, dense, tokenizer)
    train, cause, sentence = verdict(found, LIMIT, ["float32", "float32"])
    assert train
    assert cause == ""
    assert sentence.startswith("Train: in no turn is the mean gap above ")
    assert sorted(found.turns) == [1, 2, 3]
    assert sum(gap.tokens for gap in found.turns.values()) == sum(gap.tokens for gap in found.quarters.values())
    assert max(gap.mean for gap in [*found.turns.values(), found.anew, found.far]) < 2e-5


def test_the_same_adapter_is_passed(model: Any, with_adapters: Any, tokenizer: Any) -> None:
    adapted = lora(model)
    files = AdapterFiles(adapted)
    sent(with_adapters, adapted, files)
    found = checked(adapted, with_adapters, tokenizer)
    assert verdict(found, LIMIT, ["float32", "float32"])[0]
    assert found.unused is not None
    assert found.unused.mean > 100 * LIMIT


# --- planted faults ---------------------------------------------------------------------------------------------------


def test_a_stale_adapter(model: Any, with_adapters: Any, tokenizer: Any) -> None:
    """The engine has the adapter of an earlier step: off with it, right without it."""
    adapted = lora(model)
    sent(with_adapters, adapted, AdapterFiles(adapted))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.mul_(1.2)
    found = checked(adapted, with_adapters, tokenizer)
    assert likely_cause(found, LIMIT)[0] == "adapter"
    assert found.base is not None
    assert found.base.mean < LIMIT < found.anew.mean
    assert "the engine holds another adapter than the trainer, such as that of an earlier step." in told(found)


def test_an_adapter_that_is_not_used(model: Any, dense: Any, tokenizer: Any) -> None:
    found = checked(lora(model), dense, tokenizer)
    assert likely_cause(found, LIMIT)[0] == "adapter"
    assert told(found).endswith("the engine does not use the adapter at all.")


def test_pages_of_an_older_policy(model: Any, dense: Any, tokenizer: Any) -> None:
    """The prompts were served before a sync that kept the cache: off as written, right where they are read anew."""
    written_by(dense, tokenizer)
    move(model, seed=1, size=0.3)
    load_into_runner(worker_runner(dense.engine), model.named_parameters())
    try:
        found = checked(model, dense, tokenizer)
        assert likely_cause(found, LIMIT)[0] == "cache"
        assert found.anew.mean < LIMIT < min(gap.mean for gap in found.turns.values())
        assert "cached pages of an older policy" in told(found)
        push_weights(dense.engine, model.named_parameters())  # the same weights, and the cache is dropped
        assert verdict(checked(model, dense, tokenizer), LIMIT, ["float32", "float32"])[0]
    finally:
        first = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.float32)
        push_weights(dense.engine, first.named_parameters())


def test_other_weights(model: Any, dense: Any, tokenizer: Any) -> None:
    """Moved and not sent: off after a single token already, and everywhere alike."""
    move(model, seed=2)
    found = checked(model, dense, tokenizer)
    assert likely_cause(found, LIMIT)[0] == "weights"
    assert "the engine holds other weights" in told(found)
    gaps = [gap.mean for gap in found.turns.values()]
    assert max(gaps) < 2 * min(gaps)


def test_query_and_key_alone_are_not_guessed_at(model: Any, dense: Any, tokenizer: Any) -> None:
    """They show from the second token on, and do not grow: no cause of which this would be the pattern."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    found = checked(model, dense, tokenizer)
    assert likely_cause(found, LIMIT)[0] == ""
    assert "The gaps name no cause" in told(found)


def test_another_template(model: Any, dense: Any, folder: Path) -> None:
    """The ids are compared before anything else; the first that differs is named."""
    ours = AutoTokenizer.from_pretrained(folder)
    ours.chat_template = ours.chat_template.replace("assistant\\n<think>\\n'", "assistant\\n'")
    found = checked(model, dense, ours)
    assert likely_cause(found, LIMIT)[0] == "template"
    place = len(dense.rendered(PROMPTS[0], TOOLS)) - 2
    assert f"prompt 1 differs from token {place} on, '' in the trainer and '<think>\\n' in the engine" in told(found)


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        pytest.param({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, marks=pytest.mark.thorough),
    ],
    ids=["theta", "scaling"],
)
def test_other_rotary_settings_of_the_engine(rotary: Any, folder: Path, model: Any, tokenizer: Any) -> None:
    """Right after a single token, and growing with the distance. Last: an engine that ends takes the others' groups."""
    engine = started(folder, hf_overrides={"rope_parameters": rotary})
    found = checked(model, engine, tokenizer)
    assert likely_cause(found, LIMIT)[0] == "rotary"
    assert found.alone.mean < 1e-5
    assert found.far.mean > 4 * found.near.mean > 0
    assert "other rotary settings (rope_theta, scaling)" in told(found)


# --- the command ------------------------------------------------------------------------------------------------------


def test_bfloat16_against_float32_is_no_alarm(folder: Path, tmp_path: Path, capfd: Any) -> None:
    output = tmp_path / "numerics.json"
    words = [*LONGER, "--kv-cache-gib", "0.25", "--dtype", "bfloat16"]
    assert main(["check", "numerics", str(folder), *words, "--output", str(output)]) == 0
    said = json.loads(output.read_text())
    assert said["train"] is True
    assert said["dtypes"] == ["bfloat16", "float32"]
    assert said["limit"] == tolerance_for(torch.bfloat16)
    assert LIMIT < said["found"]["anew"]["mean"] < said["limit"]
    shown = capfd.readouterr().out
    for words in ("turn 3", "quarter 4", "drawn anew", "Train: in no turn", "bfloat16 against float32"):
        assert words in shown


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("served") / "log"
    options = ServerOptions(
        str(folder), port=free_port(), engine=EngineOptions(kv_cache_gib=0.25, max_model_len=480), max_lora_rank=8
    )
    with Server(options, log=log):
        yield options.base_url


@pytest.mark.thorough
def test_a_server_dense_and_with_an_adapter(
    served: str, folder: Path, model: Any, tokenizer: Any, tmp_path: Path, capfd: Any
) -> None:
    adapted = lora(model)
    adapted.save_pretrained(tmp_path / "adapter")
    words = ["check", "numerics", str(folder), "--server", served, *LONGER]
    words += ["--output", str(tmp_path / "numerics.json")]
    assert main(words) == 0
    assert main([*words, "--adapter", str(tmp_path / "adapter")]) == 0
    assert json.loads((tmp_path / "numerics.json").read_text())["found"]["unused"]["mean"] > 100 * LIMIT
    shutil.copytree(folder, tmp_path / "other")
    ours = AutoTokenizer.from_pretrained(folder)
    ours.chat_template = ours.chat_template.replace("# Tools", "# Tools:")
    ours.save_pretrained(tmp_path / "other")
    capfd.readouterr()
    assert main([*words, "--tokenizer", str(tmp_path / "other")]) == 1
    assert "prompt 1 differs from token " in capfd.readouterr().out
    engine = ServedEngine(served)
    assert likely_cause(checked(adapted, engine, tokenizer), LIMIT)[0] == "adapter"
    with pytest.raises(SystemExit):
        main(["check", "numbers", str(folder)])
    assert main([*words, "--dtype", "bfloat16"]) == 2
