"""`--dry-run`'s memory and tokens: by hand, against what torch holds, and over the recipes for real models."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_lab.pipelines.estimate import Estimates, activations, meta_model, states
from grpo_lab.pipelines.pipeline_recipe import pipeline_from
from grpo_lab.pipelines.runner import plan_of_pipeline
from grpo_lab.recipe.sections import ModelSection, recipe_from
from grpo_lab.settings import read
from grpo_lab.stages.held_out import Evaluate
from grpo_lab.stages.sample import Sample
from grpo_lab.stages.supervised import Distill, Dpo, Train
from grpo_lab.testing import tiny_model

ROOT = Path(__file__).resolve().parents[3]
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
MODELS: dict[str, tuple[tuple[Any, ...], int]] = {
    "Qwen/Qwen2.5-0.5B": (("qwen2", 896, 4864, 24, 14, 2, 64, True), 494_032_768),
    # embedding 151,936 × 1,536 (tied: once) = 233,373,696; a layer: q and o 1,536² × 2, k and v 1,536 × 256 × 2, their
    # biases 1,536 + 512, MLP 3 × 1,536 × 8,960, norms 3,072 = 46,797,824; × 28 + 1,536 of the last norm
    "Qwen/Qwen2.5-1.5B": (("qwen2", 1536, 8960, 28, 12, 2, 128, True), 233_373_696 + 28 * 46_797_824 + 1536),
    # q and o 2 × 2,048 × 2,048, k and v 2 × 2,048 × 1,024, their norms 256, MLP 3 × 2,048 × 6,144, norms 4,096
    "Qwen/Qwen3-1.7B-Base": (("qwen3", 2048, 6144, 28, 16, 8, 128, True), 311_164_928 + 28 * 50_336_000 + 2048),
    "Qwen/Qwen3-8B": (("qwen3", 4096, 12288, 36, 32, 8, 128, False), 8_190_735_360),
}
"""As their config.json on the hub has it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder a model: its config, no weights, and a small tokenizer."""
    words, found = tiny_model(hidden_size=16, num_layers=1, thinking=True)[1], {}
    for name, (shape, _) in MODELS.items():
        folder = tmp_path_factory.mktemp("models") / name.split("/")[1]
        words.save_pretrained(folder)
        said = {"vocab_size": 151936, "max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps({**said, **dict(zip(SHAPE, shape, strict=True))}))
        found[name] = str(folder)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_real_models(name: str, folders: dict[str, str]) -> None:
    assert meta_model(ModelSection(path=folders[name])).num_parameters() == MODELS[name][1]
    assert MODELS["Qwen/Qwen2.5-1.5B"][1] == 1_543_714_304


ZERO_3 = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}}
ZERO_2 = {**ZERO_3, "deepspeed_config": {"zero_stage": 2}}
DDP = {"distributed_type": "MULTI_GPU", "num_processes": 8}
FSDP = {"distributed_type": "FSDP", "num_processes": 8}


@pytest.mark.parametrize(("launch", "layout"), [({}, "single"), (DDP, "ddp"), (ZERO_2, "zero2"), (FSDP, "fsdp2")])
def test_states_are_those_of_the_docs_table(launch: dict[str, Any], layout: str, folders: dict[str, str]) -> None:
    spec = importlib.util.spec_from_file_location("memory_table", ROOT / "scripts" / "memory_table.py")
    assert spec is not None
    assert spec.loader is not None
    table = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    for shape in table.SHAPES[:2]:
        model = meta_model(ModelSection(path=folders[f"Qwen/Qwen2.5-{shape.name}"])).to(torch.float32)
        assert states(model, launch, half=True) == pytest.approx(table.state_bytes(shape, layout), rel=1e-5)


def rl(path: str, **more: Any) -> Any:
    data = {"loader": "countdown", "n": 10}
    written = {"model": {"path": path}, "data": data, "rewards": ["accuracy"], "max_completion_length": 100, **more}
    return recipe_from({"beta": 0.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **written})


@pytest.mark.not_fast
def test_a_stage_of_rl_by_hand(folders: dict[str, str], tmp_path: Path) -> None:
    path, n = folders["Qwen/Qwen2.5-1.5B"], 1_543_714_304
    model = meta_model(ModelSection(path=path)).to(torch.float32)
    # bf16 over float32 weights: 4 weights + 4 gradients + 8 AdamW + 2 copies, 18 bytes a parameter
    assert states(model, {}, half=True) == 18 * n
    # ZeRO-3 on 8: 16N / 8, and 4 bytes of each parameter of the layer at work (a 28th of what is no embedding) and the
    # embedding; the reference 4N / 8
    layer = (n - 233_373_696) // 28
    assert states(model, ZERO_3, half=True) == 2 * n + 4 * (233_373_696 + layer)
    assert states(model, ZERO_3, trained=False) == 4 * n // 8
    # a = 28 × 1,536 + 8 × 4 × (1,536 + 256) + 4 × 4 × 8,960 = 243,712 bytes; 28 layers and the last norm; with
    # checkpointing 4 × 1,536 × 29 and one a; bf16: a = 28 × 1,536 + 8 × 2 × (1,536 + 256) + 4 × 2 × 8,960 = 143,360
    assert activations(model, 10, checkpointing=False) == 10 * 29 * 243_712
    assert activations(model, 10, checkpointing=True) == 10 * (29 * 6_144 + 243_712)
    assert activations(model, 10, checkpointing=False, half=True) == 10 * 29 * 143_360
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(ZERO_3))
    for launch, ranks in ((None, 1), (str(tmp_path / "zero3.yaml"), 8)):
        # 5 steps × 4 × 2 completions × 100 tokens, on each process
        said = Estimates().of(rl(path, max_steps=5, beta=0.1, num_generations=4), launch)
        assert f"at most {5 * 8 * 100 * ranks:,} tokens generated" in said
        assert "1,543,714,304 parameters, 4 × " in said
        gib = 2**30  # trained, reference
        sizes = (18 * n, 4 * n) if ranks == 1 else (2 * n + 4 * (233_373_696 + layer), n // 2)
        assert f"reference {sizes[1] / gib:.1f}, trained {sizes[0] / gib:.1f}" in said
    assert "reference" not in Estimates().of(rl(path, max_steps=5))
    for asked, said in ((4096, False), ("auto", True)):
        line = Estimates().of(rl(path, max_steps=5, update={"max_tokens": asked}))
        assert ("as many as what is left holds (`update.max_tokens: auto`) at once" in line) is said


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"num_train_epochs": 2, "num_generations": 4}, 10 * 2 * 4 * 100),  # rows × epochs × completions × tokens
        ({"max_steps": 5, "num_generations": 4, "num_iterations": 2}, 3 * 8 * 100),  # a batch of 8 serves two steps
        ({"max_steps": 5, "num_generations": 4, "steps_per_generation": 8}, 2 * 32 * 100),  # 40 of 2 batches of 32
        ({"max_steps": 5, "num_generations": 4, "update": {"dead_groups": "resample", "max_rounds": 3}}, 3 * 4000),
        # before and after, and after steps 2 and 4: 10 rows × 1 answer × 50 tokens each
        (
            {"max_steps": 5, "num_generations": 4,
             "evaluation": {"data": {"loader": "countdown", "n": 10}, "every": 2, "max_new_tokens": 50}},
            4000 + 4 * 10 * 50,
        ),
    ],
)  # fmt: skip
def test_tokens_of_rl(settings: dict[str, Any], tokens: int, folders: dict[str, str]) -> None:
    found = Estimates()
    found.of(rl(folders["Qwen/Qwen2.5-0.5B"], **settings))
    assert found.tokens == {"generated": tokens, "trained on": 0}


def test_a_reward_model_in_a_folder_called_training_is_not_trained(folders: dict[str, str], tmp_path: Path) -> None:
    path = folders["Qwen/Qwen2.5-0.5B"]
    judge = tmp_path / "training" / "judge"
    shutil.copytree(path, judge)
    said = Estimates().of(rl(path, max_steps=1, num_generations=4, rewards=[str(judge)]))
    assert f"({judge} {2 * 494_032_768 / 2**30:.1f}, " in said  # its bfloat16 weights, and no gradients or moments


@pytest.mark.not_fast
def test_tokens_of_other_stages(folders: dict[str, str]) -> None:
    path, data = folders["Qwen/Qwen2.5-0.5B"], {"loader": "countdown", "n": 10}
    sft = {"model": path, "rows": "rows.jsonl", "max_steps": 3, "max_length": 50, "per_device_train_batch_size": 2}
    asked = {"n_samples": 2, "thinking_budget": [0, 8], "max_new_tokens": 7}
    for kind, written, said in (
        (Sample, {"n_samples": 3, "max_completion_length": 20, "data": data}, "600 tokens generated"),
        # (1 greedy + 2 sampled) × 2 budgets × 10 rows × 7 tokens
        (Evaluate, {**asked, "data": data}, "420 tokens generated"),
        (Train, sft, "300 tokens trained on"),  # 3 steps × 2 rows × 50 tokens
        (Dpo, sft, "600 tokens trained on"),  # each row is a pair
        (Train, {**sft, "max_steps": -1, "num_train_epochs": 2}, "100 tokens trained on for each row"),
        # 1,000, and what the step writes that passes them: 2 × 1 rows of 30, its log comes at once
        (
            Distill,
            {"teacher": path, "data": data, "tokens": 1000, "max_completion_length": 30, "logging_steps": 1,
             "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            "1,060 tokens generated",
        ),
    ):  # fmt: skip
        assert f"at most {said}" in Estimates().of(read(kind, {"model": path, **written}, "stage"))


@pytest.mark.parametrize("lora", [False, True])
def test_states_are_what_torch_holds(lora: bool) -> None:
    """The bytes of a training on the CPU: weights, gradients, moments, to the byte."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model(hidden_size=32)[0]
    section = ModelSection(tiny={"hidden_size": 32}, lora={"r": 4, "target_modules": ["q_proj"]} if lora else None)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = sum(one.nbytes for one in (*model.parameters(), *gradients, *moments))
    assert states(meta_model(section), {}) == held
    assert states(meta_model(section), {}, trained=False) == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_not_below_what_autograd_keeps(architecture: str, half: bool, checkpointing: bool) -> None:
    model = tiny_model(architecture, hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=3)[0].train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, Any]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16, half):
        model.model(input_ids=torch.ones(4, 100, dtype=torch.long), use_cache=False)
    held = sum(one.nbytes() for place, one in kept.items() if place not in weights)
    if half:  # autocast's copies of the weights are the states'
        held -= sum(2 * p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight"))
    bound = activations(model, 400, checkpointing, half)
    assert held <= bound
    assert checkpointing or bound < 2.5 * held


@pytest.mark.thorough(cases="qwen3-4-1133838336")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "tokens"),
    [
        # steps × 512 completions × 1,024; of 6 rows: samples 8 + 16 + 8 + 4, evaluations 5 and 5 × (1 + 16), × 1,024;
        # distillation: 6 M and the step that reaches them, 64 completions
        ("r1", "62.5", (1400 * 512 + 6 * (8 + 16 + 8 + 4 + 5 + 85) + 64) * 1024 + 6_000_000),
        # the same × 8,192: samples 2 + 2 and the pass rates' 8, 16 evaluations
        ("qwen3", "4", (170 + 100) * 512 * 8192 + 6 * (2 + 2 + 8 + 16) * 8192),
        # samples 4, pass rates 10, 3 evaluations × 2,048, guesses 8 × 32; RL's rows are not there yet
        ("kimi", "39.9", 6 * ((4 + 10 + 3) * 2048 + 8 * 32)),
    ],
)
def test_the_recipes_for_real_models(
    name: str, most: str, tokens: int, folders: dict[str, str], tmp_path: Path, grpo_lab_data: Path
) -> None:
    """Offline, with the models' configs in folders and 6 rows of each data set; without the configs it says so."""
    text = (ROOT / "recipes" / name / "pipeline.yaml").read_text()
    gsm8k, math = str(grpo_lab_data / "gsm8k"), str(grpo_lab_data / "math" / "math500.jsonl")
    places = {"openai/gsm8k": gsm8k, "nlile/hendrycks-MATH-benchmark": math, "HuggingFaceH4/MATH-500": math, **folders}
    written = yaml.safe_load(text)
    if name == "kimi":
        plan = plan_of_pipeline(pipeline_from({**written, "output_dir": str(tmp_path / "out")}))
        assert sum("memory is not known: the config of 'Qwen/Qwen2.5-1.5B'" in words for words in plan.values()) == 9
        assert plan["in all"] == "more where a line says that something is not known"
    general = tmp_path / "general.jsonl"  # a team's own
    general.write_text('{"prompt": "Who?", "completion": "Me."}\n')
    places["data/general.jsonl"] = str(general)
    for hub, place in places.items():
        text = text.replace(hub, place)
    written = json.loads(json.dumps(yaml.safe_load(text)))  # no section is another's alias
    parts = [(stage, one) for stage in written["stages"] for one in (stage.get("data"), *stage.get("plain", ()))]
    for stage, one in parts:
        if one and one["loader"] != "file":
            one["limit"] = 64 if stage["stage"] == "rl" else 6  # a generation batch takes 32
    plan = plan_of_pipeline(pipeline_from({**written, "output_dir": str(tmp_path / "out")}))
    assert "memory is not known" not in " ".join(plan.values())
    assert plan["in all"].startswith(f"at most {most}")
    assert f" GiB a process, {tokens:,} tokens generated" in plan["in all"]
    assert not (tmp_path / "out").exists()


@pytest.mark.not_fast
def test_a_model_is_the_one_that_an_earlier_stage_leaves(folders: dict[str, str], tmp_path: Path) -> None:
    """Whose weights RL leaves in float32."""
    data, path = {"loader": "countdown", "n": 6}, folders["Qwen/Qwen2.5-0.5B"]
    stages = [
        {"stage": "sample", "name": "first", "model": path, "data": data},
        {"stage": "rl", "name": "rl", "model": {"path": path}, "data": data, "rewards": ["countdown"], "max_steps": 1},
        {"stage": "sample", "name": "second", "inputs": {"model": "rl.model"}, "data": data},
        {"stage": "sample", "name": "nowhere", "model": "no/where", "data": data},
    ]
    plan = plan_of_pipeline(pipeline_from({"output_dir": str(tmp_path / "out"), "stages": stages}))
    n, gib = 494_032_768, 2**30
    assert f"(weights {2 * n / gib:.1f}, " in plan["1. first"]
    assert f"(weights {4 * n / gib:.1f}, " in next(words for title, words in plan.items() if "second" in title)
    assert "the config of 'no/where' is not in the cache" in next(
        words for title, words in plan.items() if "nowhere" in title
    )
    assert plan["in all"].endswith("; more where a line says that something is not known")
