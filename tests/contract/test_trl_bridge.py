"""What ``grpo_lab/trainer`` relies on inside TRL 1.16, pinned: when TRL moves, this file says where.

Everything runs against the installed TRL; nothing is stubbed but the vLLM engine, of which only the weight sync is
called.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import re
import runpy
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils

import grpo_lab.trainer as room
from grpo_lab import LabConfig
from grpo_lab.objectives import CORRECTIONS, sampler_log_ratio
from grpo_lab.testing import ScriptedRollout
from grpo_lab.trainer import trl_bridge
from grpo_lab.trainer.lab_trainer import LabTrainer
from grpo_lab.trainer.ports import Phase
from grpo_lab.trainer.trl_bridge.names import WHILE_TRAINING
from parity.harness import LENGTHS, arguments, mixed_reward, problems
from parity.sampler import NoisySampler, as_with_vllm

ROOM = Path(room.__file__).parent
GENERATE = inspect.getsource(GRPOTrainer._generate_and_score_completions)
LOSS = inspect.getsource(GRPOTrainer._compute_loss)
#: methods of ``VLLMGeneration`` that ``rollout.engine`` overrides or calls
ENGINE = {
    "_init_vllm": ("self",),
    "sync_weights": ("self",),
    "_iter_named_params": ("self",),
    "generate": ("self", "prompts", "images", "num_generations", "profiler"),
}
#: methods of ``VLLMClient`` that ``server_client`` overrides or calls
CLIENT = {
    "__init__": ("self", "base_url", "host", "server_port", "group_port", "connection_timeout"),
    "check_server": ("self", "total_timeout", "retry_interval"),
    "_get": ("self", "url", "kwargs"),
    "_post": ("self", "url", "kwargs"),
    "close_communicator": ("self",),
    "init_communicator": ("self", "device"),
    "update_named_params": ("self", "metadata", "named_params"),
    "reset_prefix_cache": ("self",),
    "image_features": ("self", "images", "max_concurrent_requests"),
}


def build(folder: Path, model: Path, trainer_class: Any = GRPOTrainer, **changes: Any) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    options = {name: changes.pop(name) for name in ("peft_config",) if name in changes}
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    built = trainer_class(
        model=policy,
        reward_funcs=mixed_reward(),
        args=GRPOConfig(**arguments(folder, **changes)),
        train_dataset=problems(),
        processing_class=tokenizer,
        rollout_func=ScriptedRollout(
            range(20, 90),
            LENGTHS,
            end_id=tokenizer.eos_token_id,
            truncated_share=0.2,
            sampler_logps=NoisySampler(policy),
        ),
        **options,
    )
    built.model.train()  # as inside train(): otherwise TRL takes the batch for an evaluation's
    return built


@pytest.fixture(scope="module")
def trainer(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A stock trainer with a reference model whose completions outlive an optimizer step."""
    return build(tmp_path_factory.mktemp("stock"), tiny_folder, beta=0.04, num_iterations=2)


def batch(trainer: Any) -> list[dict[str, Any]]:
    """One generation batch of rows as the sampler gives them: each prompt G times."""
    rows = [trainer.train_dataset[i] for i in range(trainer.args.generation_batch_size // trainer.num_generations)]
    return [dict(row) for row in rows for _ in range(trainer.num_generations)]


# -- names -------------------------------------------------------------------------------------------------------------


def test_an_environments_methods_are_found_by_inspect() -> None:
    """In the constructor and before each generation: ``offers_hidden`` stands in its place."""
    for method in (GRPOTrainer.__init__, GRPOTrainer._generate_and_score_completions):
        assert inspect.getsource(method).count("inspect.getmembers(") == 1
    assert grpo_trainer.inspect is inspect
    with trl_bridge.offers_hidden(True):
        members = grpo_trainer.inspect.getmembers(type("World", (), dict.fromkeys(trl_bridge.OFFERED, len)))
        assert not {name for name, _ in members} & set(trl_bridge.OFFERED)
        assert grpo_trainer.inspect.signature is inspect.signature
    assert grpo_trainer.inspect is inspect


@pytest.mark.parametrize("name", sorted(trl_bridge.METHODS))
def test_methods_have_the_known_parameters(name: str) -> None:
    assert tuple(inspect.signature(getattr(GRPOTrainer, name)).parameters) == trl_bridge.METHODS[name]


def test_attributes_exist_on_a_constructed_trainer(trainer: Any) -> None:
    assert [name for name in trl_bridge.ATTRIBUTES if not hasattr(trainer, name)] == []


def test_constructor_takes_what_trl_takes() -> None:
    """The same parameters in the same order, with the same defaults."""
    theirs = {n: p.default for n, p in inspect.signature(GRPOTrainer.__init__).parameters.items()}
    ours = {n: p.default for n, p in inspect.signature(LabTrainer.__init__).parameters.items()}
    assert list(ours) == list(theirs)
    assert ours == theirs


@pytest.mark.parametrize(("kind", "methods"), [(VLLMGeneration, ENGINE), (VLLMClient, CLIENT)])
def test_vllm_methods_have_the_known_parameters(kind: Any, methods: dict[str, tuple[str, ...]]) -> None:
    """TRL's trainer must look the engine's class up in its own module."""
    assert {name: tuple(inspect.signature(getattr(kind, name)).parameters) for name in methods} == methods
    assert vars(grpo_trainer)["VLLMGeneration"] is VLLMGeneration


def test_server_mode_is_built_as_we_complete_it() -> None:
    """The constructor checks the server before its first request; the main process talks, the others wait for a
    broadcast."""
    constructor = inspect.getsource(VLLMClient.__init__)
    assert (
        constructor.index("self.session =") < constructor.index("self.check_server(") < constructor.index("self._get(")
    )
    generate = inspect.getsource(VLLMGeneration.generate)
    assert generate.index("self.vllm_client.image_features(") < generate.index("self.vllm_client.generate(")
    assert generate.index("self.vllm_client.generate(") < generate.index("broadcast_object_list(obj_list")
    assert generate.count("self.vllm_client.") == 2
    sync = inspect.getsource(VLLMGeneration.sync_weights)
    assert "self.vllm_client.update_named_params(self._weight_metadata, self._iter_named_params())" in sync
    stream = inspect.getsource(VLLMGeneration._iter_named_params)  # `engine.unmerged` switches both off
    assert stream.count("model.merge_adapter()") == stream.count("model.unmerge_adapter()") == 1


def test_a_colocated_engine_that_sleeps_is_woken_and_put_to_sleep_as_we_do_it() -> None:
    """``engine.awake`` does between two generations what a generation of TRL's does: weights, cache, sleep and mark."""
    started, sync, generate = map(
        inspect.getsource, (VLLMGeneration._init_vllm, VLLMGeneration.sync_weights, VLLMGeneration.generate)
    )
    sleeps, mark = "self.llm.sleep(level=2)", "self._llm_weights_sleeping"
    assert started.index(sleeps) < started.index(f"{mark} = self.enable_sleep_mode")
    assert (
        sync.index('self.llm.wake_up(tags=["weights"])') < sync.index(f"{mark} = False") < sync.index(".load_weights([")
    )
    order = (f"{mark}:", "self.sync_weights()", 'self.llm.wake_up(tags=["kv_cache"])', "self.llm.generate(", sleeps)
    places = [generate.index(words) for words in (*order, f"{mark} = True")]
    assert places == sorted(places)
    assert [source.count(words) for source in (sync, generate) for words in ("wake_up(", "sleep(")] == [1, 0, 1, 1]


@pytest.mark.not_fast
def test_every_private_name_in_the_room_is_listed() -> None:
    """A private attribute of the trainer that our code touches is in ``METHODS``, ``ATTRIBUTES`` or ``WHILE_TRAINING``,
    or ours."""
    listed = {*trl_bridge.METHODS, *trl_bridge.ATTRIBUTES, *WHILE_TRAINING, *ENGINE}
    trainers = {Path(inspect.getfile(base)) for base in LabTrainer.__mro__ if base.__module__.startswith("grpo_lab")}
    missing: set[str] = set()
    for file in sorted(ROOM.rglob("*.py")):
        tree = ast.parse(file.read_text())
        ours = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        stored = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not re.fullmatch(r"_[a-z]\w*", node.attr):
                continue
            owner = ast.unparse(node.value)
            of_trl = owner.rpartition(".")[2] in ("trainer", "_trainer") or (
                owner == "super()" and hasattr(GRPOTrainer, node.attr)
            )
            own = owner == "self" and file in trainers and node.attr not in ours | stored
            if (of_trl or own) and node.attr not in listed:
                missing.add(f"{file.relative_to(ROOM)}: {owner}.{node.attr}")
    missing = {name for name in missing if name.rsplit(".", 1)[1] not in vars(LabTrainer)}
    assert missing == set(), "add these to trl_bridge.METHODS, ATTRIBUTES or WHILE_TRAINING"


def test_what_a_training_sets_is_set_there() -> None:
    homes = (Trainer._inner_training_loop, Trainer._prepare_for_training, Trainer.__init__, GRPOTrainer, SFTTrainer)
    source = "".join(inspect.getsource(home) for home in homes)
    assert [name for name in WHILE_TRAINING if f"self.{name}" not in source] == []


def test_hfs_loop_has_the_norm_before_the_step_and_asks_whether_it_was_skipped() -> None:
    """Where a step is left out (``step.guard``): else the schedule would move on, or the gradient stay. A callback that
    asks after the step (``metrics.token_weight_log``) is asked before the mark is taken back."""
    loop = inspect.getsource(Trainer)
    order = (
        "grad_norm = self._get_grad_norm(",
        "self.optimizer.step()",
        "self.callback_handler.on_optimizer_step(",
        "optimizer_step_was_skipped:",
        "model.zero_grad()",
        "self.callback_handler.on_step_end(",
    )
    start = loop.index(order[0])
    places = [loop.index(words, start) for words in order]
    assert places == sorted(places)
    assert loop.count(order[0]) == loop.count(order[1]) == 1


def test_hfs_step_runs_the_backward_of_what_compute_loss_returns() -> None:
    """So that a team that asks ``super().training_step`` cannot change a loss between the two, and TRL's own step asks
    HF's."""
    step = inspect.getsource(Trainer.training_step)
    assert step.index("loss = self.compute_loss(") < step.index("self.accelerator.backward(loss, **kwargs)")
    assert "super().training_step(model, inputs, num_items_in_batch)" in inspect.getsource(GRPOTrainer.training_step)


def test_only_public_modules_of_trl_are_imported() -> None:
    """``from trl import …`` everywhere; the exceptions are written down here."""
    known = {
        "trl.models.utils",  # disable_gradient_checkpointing
        "trl.trainer.utils",  # is_async_callable
        "trl.trainer",  # grpo_trainer.VLLMGeneration
        "trl.generation",  # vllm_generation
        "trl.generation.vllm_client",  # VLLMClient
        "trl.experimental.cpo",  # SimPO
    }
    found = set()
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trl":
                found.add(node.module)
    assert found - {"trl"} <= known


def test_accelerate_lets_a_backward_stay_silent(trainer: Any) -> None:
    before = trainer.accelerator.gradient_state.sync_gradients
    with trl_bridge.without_gradient_sync(trainer.accelerator, trainer.model):
        assert trainer.accelerator.sync_gradients is False
    assert trainer.accelerator.sync_gradients is before


# -- sharded parameters ------------------------------------------------------------------------------------------------


def test_the_reference_model_is_sharded_by_prepare_fsdp_and_nobody_hands_out_its_weights() -> None:
    """``reference_model_in_full`` wraps it; when TRL broadcasts by itself the wrapper can go."""
    assert tuple(inspect.signature(grpo_trainer.prepare_fsdp).parameters) == ("model", "accelerator")
    assert "prepare_fsdp(self.ref_model, self.accelerator)" in inspect.getsource(GRPOTrainer.__init__)
    sharding = inspect.getsource(grpo_trainer.prepare_fsdp)
    assert "fully_shard(model" in sharding
    assert "broadcast" not in sharding
    assert "cpu_ram_efficient_loading" not in sharding


def test_the_reference_model_gets_rank_zeros_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the collective: what arrives from rank 0 is 7 everywhere."""
    model, sharded = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.fill_(7 - src))
    monkeypatch.setattr(grpo_trainer, "prepare_fsdp", lambda model, accelerator: sharded.append(model))
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True)
    accelerator = SimpleNamespace(is_fsdp2=True, device="cpu", state=SimpleNamespace(fsdp_plugin=plugin))
    with trl_bridge.reference_model_in_full():
        grpo_trainer.prepare_fsdp(model, accelerator)
    assert sharded == [model]
    assert all((value == 7).all() for value in model.state_dict().values())
    plugin.cpu_ram_efficient_loading = False  # every rank has loaded the weights by itself
    torch.nn.init.zeros_(model[0].weight)
    with trl_bridge.reference_model_in_full():
        grpo_trainer.prepare_fsdp(model, accelerator)
    assert (model[0].weight == 0).all()


# -- the micro-batch ---------------------------------------------------------------------------------------------------


def test_the_micro_batch_holds_no_unknown_field() -> None:
    """A new field in TRL's output may have to be cut with the rows: each is known as per-token, multimodal or
    per-row."""
    literal = re.search(r"output = \{(.*?)\}", GENERATE, re.S)
    assert literal is not None
    written = set(re.findall(r'"(\w+)":', literal.group(1))) | set(re.findall(r'output\["(\w+)"\] =', GENERATE))
    rows = {"prompt_ids", "prompt_mask", "advantages", "num_items_in_batch", "importance_sampling_ratio"}
    assert written == rows | set(trl_bridge.COMPLETION_FIELDS) | set(trl_bridge.MULTIMODAL_FIELDS)


def test_the_loss_reads_every_multimodal_field() -> None:
    read = set(re.findall(r'(\w+)=inputs\.get\("\1"\)', LOSS))
    assert read - {"importance_sampling_ratio"} == set(trl_bridge.MULTIMODAL_FIELDS)
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert set(trl_bridge.MULTIMODAL_FIELDS) <= set(parameters)


def test_per_token_fields_have_the_width_of_the_completions(trainer: Any) -> None:
    output = trainer._generate_and_score_completions(batch(trainer))
    shape = output["completion_ids"].shape
    for name in set(trl_bridge.COMPLETION_FIELDS) - {"tool_mask"}:
        assert output[name].shape == shape, name
    assert output["prompt_mask"].shape == output["prompt_ids"].shape
    assert output["advantages"].shape == shape[:1]
    assert output["num_items_in_batch"] == output["completion_mask"].sum()
    assert not trl_bridge.is_multimodal(output)


def test_prompts_are_padded_on_the_left_and_completions_on_the_right(trainer: Any) -> None:
    output = trainer._generate_and_score_completions(batch(trainer))
    assert (output["prompt_mask"].diff(dim=1) >= 0).all()
    assert output["prompt_mask"].sum(1).unique().numel() > 1, "prompts of one length prove nothing"
    assert (output["completion_mask"].diff(dim=1) <= 0).all()


# -- fused LM head -----------------------------------------------------------------------------------------------------


def test_fused_lm_head_scores_the_next_token(trainer: Any, tiny_folder: Path) -> None:
    """log_probs[:, t] = log softmax(logits[:, t] / temperature)[labels[:, t + 1]], 0 where the label is −100; the
    entropy is that of the same distribution. Compared with the model's own logits in float64."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids = torch.tensor([[5, 30, 41, 52, 63], [7, 31, 44, 70, 71]])
    labels = ids.clone()
    labels[0, :2] = -100
    labels[1, 4:] = -100
    mask = torch.ones_like(ids)
    positions = torch.arange(5).expand(2, 5) + torch.tensor([[0], [3]])
    with torch.no_grad():
        logps, entropy = trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, positions)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.double()
    expected = torch.log_softmax(logits / trainer.temperature, dim=-1)
    assert logps.shape == entropy.shape == (2, 4)
    scored = labels[:, 1:] != -100
    assert torch.allclose(
        logps[scored].double(), expected[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)[scored], atol=1e-5
    )
    assert (logps[~scored] == 0).all()
    assert torch.allclose(entropy[scored].double(), -(expected.exp() * expected).sum(-1)[:, :-1][scored], atol=1e-5)


@pytest.mark.not_fast
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_compiled_model_is_scored_anew_for_every_choice_of_tokens(
    trainer: Any, tiny_folder: Path, tmp_path: Path, how: str
) -> None:
    """A graph made with one choice of positions must not be used for another (guards on hooks are a setting of
    Dynamo)."""
    torch._dynamo.reset()
    plain = trainer.accelerator.unwrap_model(trainer.model)
    if how == "wrapped":
        compiled: Any = torch.compile(plain, backend="eager")
    else:
        compiled = build(tmp_path, tiny_folder).model
        compiled.compile(backend="eager")
    ids = torch.tensor([[5, 30, 41, 52, 63], [7, 31, 44, 70, 71]])
    positions = torch.arange(5).expand(2, 5)
    for first in (1, 3, 2):
        labels = ids.clone()
        labels[:, :first] = -100
        with torch.no_grad():
            expected, _ = trl_bridge.completion_log_probs(trainer.accelerator, plain, ids, labels, positions)
            found, _ = trl_bridge.completion_log_probs(trainer.accelerator, compiled, ids, labels, positions)
        assert torch.allclose(found, expected, atol=1e-5), first
    assert not trl_bridge.backbone(trainer.accelerator, plain)._forward_hooks


def test_the_head_sees_only_what_is_scored(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where TRL would score every position."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    seen = []
    head = trl_utils._ChunkedLogProbFunction

    class Counting:
        @staticmethod
        def apply(hidden: torch.Tensor, *args: Any) -> Any:
            seen.append(hidden.size(0))
            return head.apply(hidden, *args)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Counting)
    ids = torch.tensor([[5, 30, 41, 52, 63], [7, 31, 44, 70, 71]])
    labels = ids.clone()
    labels[0, :2] = -100
    labels[1, :] = -100
    trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, torch.arange(5).expand(2, 5))
    assert seen == [3]
    nothing, _ = trl_bridge.completion_log_probs(
        trainer.accelerator, model, ids, torch.full_like(ids, -100), torch.arange(5).expand(2, 5)
    )
    assert seen == [3, 0]
    assert (nothing == 0).all()
    nothing.sum().backward()  # connected: a rank without a live row takes part in every collective
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_the_head_gives_energies_where_they_are_asked_for(trainer: Any) -> None:
    """1 − 2π + Σπ² of the scored tokens at the sampling temperature; afterwards it gives log-probs again."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    ids, positions = torch.tensor([[5, 30, 41, 52, 63]]), torch.arange(5)[None]
    labels = ids.clone()
    labels[0, :2] = -100
    with torch.no_grad(), trl_bridge.energies_for_log_probs():
        found, _ = trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, positions)
    with torch.no_grad():
        shares = (model(ids).logits[0, :-1].double() / trainer.temperature).softmax(-1)
        plain, _ = trl_bridge.completion_log_probs(trainer.accelerator, model, ids, labels, positions)
    chosen = shares.gather(1, ids[0, 1:, None]).squeeze(1)
    expected = (1 - 2 * chosen + shares.square().sum(-1)).masked_fill(labels[0, 1:] == -100, 0.0)
    assert found[0].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert plain[0, 1:].tolist() == pytest.approx(chosen.log()[1:].tolist(), abs=1e-4)


def test_the_head_takes_few_tokens_at_once_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back, with the same results: 20 tokens in tiles of 8, 8, 4."""
    kernel = pytest.importorskip("trl.kernels.chunked_logprob")
    whole, tiles, product = kernel.TOKEN_CHUNK_SIZE, list[int](), torch.mm
    monkeypatch.setattr(sys.modules[trl_bridge.small_tiles.__module__], "CPU_TILE", 8)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: tiles.append(len(out)) or product(a, b, out=out))
    results = []
    for device in ("cuda", "cpu"):
        tiles.clear()
        torch.manual_seed(0)
        hidden, weight = torch.randn(20, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
        with trl_bridge.small_tiles(torch.device(device)):
            token = torch.arange(20) % 11
            scored, entropy, *_ = kernel.ChunkedLogProbFunction.apply(hidden, weight, None, token, 0.7, 16)
            (scored.sum() + entropy.sum()).backward()
        assert tiles == ([20] if device == "cuda" else [8, 8, 4]) * 2
        results.append([scored, entropy, hidden.grad, weight.grad])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*results, strict=True))
    assert whole == kernel.TOKEN_CHUNK_SIZE > trl_bridge.forwards.CPU_TILE


def test_fused_lm_head_divides_by_the_temperature(tiny_folder: Path, tmp_path: Path) -> None:
    hot = build(tmp_path, tiny_folder, temperature=2.0)
    ids = torch.tensor([[5, 30, 41, 52]])
    with torch.no_grad():
        logps, _ = trl_bridge.completion_log_probs(hot.accelerator, hot.model, ids, ids, torch.arange(4)[None])
        logits = hot.model(input_ids=ids).logits[:, :-1] / 2.0
    assert torch.allclose(logps, logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2), atol=1e-5)


def test_explicit_positions_make_the_numbers_of_left_padding(trainer: Any) -> None:
    """TRL feeds left-padded rows without position ids, so the first real token sits at position ``padding``; the same
    row without padding and with those positions has the same log-probs."""
    row = torch.tensor([[30, 41, 52, 63]])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), row], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        theirs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, padded, mask, 3)
        ours, _ = trl_bridge.completion_log_probs(
            trainer.accelerator, trainer.model, row, row, torch.arange(4)[None] + 3
        )
    assert torch.allclose(ours, theirs, atol=2e-6)


# -- old log-probs -----------------------------------------------------------------------------------------------------


def recorded_forwards(trainer: Any) -> Iterator[str]:
    """Who is asked for log-probs during one generation, in order."""
    original = trainer._get_per_token_logps_and_entropies
    calls: list[str] = []

    def recording(model: Any, *args: Any, **kwargs: Any) -> Any:
        unwrapped = trainer.accelerator.unwrap_model(trainer.model)
        reference = model is not trainer.model or not adapter_is_active(unwrapped)
        calls.append("reference" if reference else "policy")
        return original(model, *args, **kwargs)

    with trl_bridge.replaced(trainer, "_get_per_token_logps_and_entropies", recording):
        trainer._generate_and_score_completions(batch(trainer))
    return iter(calls)


def adapter_is_active(model: Any) -> bool:
    layers = [m for m in model.modules() if hasattr(m, "disable_adapters") and hasattr(m, "lora_A")]
    return not layers or not any(layer.disable_adapters for layer in layers)


def test_the_policy_is_asked_once_and_before_the_reference(trainer: Any) -> None:
    assert list(recorded_forwards(trainer)) == ["policy", "reference"]


def test_the_same_with_peft_where_both_are_one_model(tiny_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    adapted = build(tmp_path, tiny_folder, beta=0.04, num_iterations=2, peft_config=lora)
    assert adapted.ref_model is None
    assert list(recorded_forwards(adapted)) == ["policy", "reference"]


def test_aligned_generation_asks_nobody(trainer: Any) -> None:
    """With one iteration TRL computes no old log-probs: ``Phase`` says the same."""
    assert Phase.of(trainer).outlives_a_step
    with trl_bridge.replaced(trainer, "num_iterations", 1):
        assert not Phase.of(trainer).outlives_a_step
        assert list(recorded_forwards(trainer)) == ["reference"]


def test_forwards_at_generation_are_answered_by_ours(trainer: Any) -> None:
    """Inside ``forwards_replaced`` old and reference log-probs come from the given forward; ``without_policy`` the old
    ones are zeros and nobody is asked for them."""
    asked: list[str] = []

    def forward(model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, width: int) -> torch.Tensor:
        asked.append("policy" if model is trainer.model else "reference")
        assert attention_mask.shape == input_ids.shape
        return torch.full((input_ids.size(0), width), float(len(asked)))

    with trl_bridge.forwards_replaced(trainer, forward):
        output = trainer._generate_and_score_completions(batch(trainer))
    assert asked == ["policy", "reference"]
    assert (output["old_per_token_logps"] == 1).all()
    assert (output["ref_per_token_logps"] == 2).all()
    asked.clear()
    with trl_bridge.forwards_replaced(trainer, forward, without_policy=True):
        output = trainer._generate_and_score_completions(batch(trainer))
    assert asked == ["reference"]
    assert (output["old_per_token_logps"] == 0).all()
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


def test_entropies_and_images_stay_trls_forward(trainer: Any) -> None:
    ids = torch.tensor([[5, 30, 41, 52]])
    mask = torch.ones_like(ids)

    def never(*_: Any) -> torch.Tensor:
        raise AssertionError("asked")

    with torch.no_grad(), trl_bridge.forwards_replaced(trainer, never):
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2, compute_entropy=True)
    assert entropies is not None
    with trl_bridge.forwards_replaced(trainer, never), pytest.raises(AssertionError, match="asked"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2, batch_size=1)


# -- sampler correction ------------------------------------------------------------------------------------------------


@pytest.fixture
def sampling(trainer: Any) -> Iterator[Any]:
    """The trainer as with vLLM: its own code for the correction, completions from the scripted rollout."""
    before = {name: getattr(trainer, name) for name in trl_bridge.ATTRIBUTES if name.startswith("vllm_importance")}
    as_with_vllm(trainer)
    trainer.rollout_func.calls = 0
    yield trainer
    trainer.use_vllm = False
    for name, value in before.items():
        setattr(trainer, name, value)
    trainer._metrics["train"].clear()


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.5, 2.0), (0.2, None)], ids=str)
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampler_correction_is_trls(sampling: Any, mode: str, bounds: tuple[float | None, float | None]) -> None:
    """TRL's own method computes the ratio from the sampler's log-probs; ours gives the same numbers to the bit."""
    sampling.vllm_importance_sampling_mode = mode
    sampling.vllm_importance_sampling_clip_min, sampling.vllm_importance_sampling_clip_max = bounds
    output = sampling._generate_and_score_completions(batch(sampling))
    theirs = output["importance_sampling_ratio"]
    mask = output["completion_mask"].bool()
    x = sampler_log_ratio(output["old_per_token_logps"], output["sampling_per_token_logps"], mask)
    ours = CORRECTIONS[mode](*bounds)(x, mask)
    assert output["sampling_per_token_logps"].isnan().any(), "the unscored token was lost: the case is not tested"
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)
    assert theirs.unique().numel() > 1, "every ratio is the same: nothing was compared"


def test_sampler_metrics_that_are_forgotten_when_deferred(sampling: Any) -> None:
    """The names that ``forget_sampling_metrics`` drops and ``_record_sampler`` writes anew; a team's own stay."""
    sampling._generate_and_score_completions(batch(sampling))
    names = {name for name in sampling._metrics["train"] if name.startswith("sampling/")}
    assert names == set(trl_bridge.SAMPLING_METRICS)
    sampling._metrics["train"]["sampling/of_a_team"] = [0.5]
    trl_bridge.forget_sampling_metrics(sampling._metrics["train"])
    assert [name for name in sampling._metrics["train"] if name.startswith("sampling/")] == ["sampling/of_a_team"]


# -- metrics and logs --------------------------------------------------------------------------------------------------


@pytest.mark.not_fast
def test_metric_names_of_a_step(tiny_folder: Path, tmp_path: Path) -> None:
    """TRL's own names; ours are written under the same, so a renamed one would be logged twice."""
    stock = build(tmp_path, tiny_folder, beta=0.04, max_steps=1)
    stock.train()
    row = next(row for row in stock.state.log_history if "loss" in row)
    completions = {"mean", "min", "max", "mean_terminated", "min_terminated", "max_terminated"}
    assert set(row) == {
        *("loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens", "step_time"),
        *("reward", "reward_std", "frac_reward_zero_std", "kl", "entropy"),
        *("rewards/parity_reward/mean", "rewards/parity_reward/std", "completions/clipped_ratio"),
        *(f"completions/{name}_length" for name in completions),
        *("clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max"),
        "clip_ratio/region_mean",
    }


def test_logged_advantages_are_a_window_of_the_generation_batch(trainer: Any) -> None:
    trainer._generate_and_score_completions(batch(trainer))
    logged = trainer._logs["advantages"]
    assert isinstance(logged, deque)
    assert logged.maxlen == trainer.args.generation_batch_size == len(logged)
    ours = torch.arange(float(len(logged)))
    trl_bridge.replace_logged_rows(trainer._logs, {"advantages": ours.tolist()})
    assert list(trainer._logs["advantages"]) == ours.tolist()
    assert trainer._logs["advantages"].maxlen == trainer.args.generation_batch_size


# -- version -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["1.17.0", "1.14.2", "1.1.0", "2.16.0"])
def test_another_trl_is_refused_with_one_clear_message(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=re.escape(f"tested with trl 1.15.*, 1.16.* and found trl {found}")) as caught:
        runpy.run_path(str(ROOM / "trl_bridge" / "__init__.py"))
    assert "pip install 'trl==1.16.*'" in str(caught.value)
    assert f"check_upstream.py {found}" in str(caught.value)


def test_the_installed_trl_is_a_tested_one() -> None:
    minor = ".".join(importlib.metadata.version("trl").split(".")[:2])
    assert minor in trl_bridge.SUPPORTED_TRL


def test_what_a_critic_inside_the_policys_module_relies_on() -> None:
    """``trl_bridge.values``: the fused output's fields, a callback that moves the reference parameter by parameter, and
    HF's saving."""
    from transformers import PreTrainedModel
    from trl.trainer.callbacks import SyncRefModelCallback
    from trl.trainer.utils import FusedCausalLMOutput

    names = {field.name for field in dataclasses.fields(FusedCausalLMOutput)}
    assert {"log_probs", "entropy", "loss"} <= names
    assert "state_values" not in names
    moved = inspect.signature(SyncRefModelCallback.sync_target_model)
    assert list(moved.parameters) == ["model", "target_model", "alpha"]
    assert "sync_target_model(" in inspect.getsource(SyncRefModelCallback.on_step_end)
    assert "state_dict" in inspect.signature(PreTrainedModel.save_pretrained).parameters


def test_checkpointing_has_either_name(tmp_path: Path) -> None:
    """transformers 5.23 renamed `gradient_checkpointing`. TRL and we read the old name, which mirrors the new one;
    a release that does not know the new one refuses it."""
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    assert LabConfig(**settings).gradient_checkpointing is True  # TRL's default
    if "activation_checkpointing" not in {one.name for one in dataclasses.fields(LabConfig)}:
        with pytest.raises(TypeError, match="activation_checkpointing"):
            LabConfig(**settings, activation_checkpointing=True)
        return
    for wanted in (True, False):
        assert LabConfig(**settings, activation_checkpointing=wanted).gradient_checkpointing is wanted
        assert LabConfig(**settings, gradient_checkpointing=wanted).activation_checkpointing is wanted
