"""The table of all sections, the most telling first, and the quotients that compare two of them."""

from __future__ import annotations

from gpu_checks.section import Section

STOCK_ON_A_CPU = (
    "stock TRL's sync does not reach vLLM's CPU build, which packs its weights (`Parameter` has no "
    "attribute `weight_loader`)"
)
FLEX_ON_A_CPU = "FlexAttention's kernel has no backward on a CPU; its mask is read by PyTorch's unfused one instead"
FLASH_ON_A_CPU = "flash kernels are a GPU's; the tests put a loop in the kernel's place"
SLEEP_ON_A_CPU = "sleep mode unmaps GPU memory; vLLM's CPU build has none of it"
ENGINE = {"tags": ("engine",), "needs": ("vllm",), "limit": 120.0, "tiny_limit": 90.0, "cores": 2}
ALONE = {"timed": True, "tags": ("engine",), "needs": ("vllm",), "limit": 120.0, "tiny_limit": 90.0}


def engine(name: str, kind: str, **more: object) -> Section:
    """Return a section of ``gpu_checks.engine`` for one kind of engine; ``more`` replaces its usual attributes."""
    given = {**ENGINE, "options": {"kind": kind}, **more}
    return Section(f"engine, {name}", "gpu_checks.engine:section", 90, 25, **given)  # type: ignore[arg-type]


def update(shape: str, variant: str, seconds: float) -> Section:
    """Return a section of ``gpu_checks.update`` for one shape and variant."""
    options = {"shape": shape, "variant": variant}
    return Section(f"update, {shape}, {variant}", "gpu_checks.update:section", seconds, 6, timed=True, tags=("update",),
                   options=options)  # fmt: skip


FUNCTIONAL = (
    Section("versions", "gpu_checks.device:versions", 3, 1),
    Section("parity, fp32", "gpu_checks.parity:fp32", 35, 5),
    engine("lengths that vary", "lengths"),
    engine("LoRA adapter", "adapter", needs=("vllm", "peft")),
    Section("shared prompts, fp32", "gpu_checks.shared_prompts:gradients", 20, 10, tags=("shared",)),
    Section("FlexAttention, fp32", "gpu_checks.shared_prompts:flex_gradients", 40, 10, tags=("shared", "flex"),
            gpu_only=FLEX_ON_A_CPU, builds="gpu_checks.shared_prompts:flex_unfused"),
    engine("partial rollouts", "partial"),
    engine("LoRA merged", "merged", needs=("vllm", "peft")),
    engine("float32", "float32"),
    engine("sleep mode", "sleep", gpu_only=SLEEP_ON_A_CPU, builds="gpu_checks.engine:built"),
    Section("resume to the bit", "gpu_checks.resume:section", 45, 10),
    Section("bins without a wait", "gpu_checks.bins:section", 40, 10, tags=("update",)),
    Section("parity, bf16", "gpu_checks.parity:bf16", 40, 5),
    Section("FSDP2", "gpu_checks.sharded:fsdp2", 50, 20, tags=("sharded",), cores=2, tiny_cores=2),
    Section("DeepSpeed, ZeRO-2", "gpu_checks.sharded:zero", 45, 20, tags=("sharded",), needs=("deepspeed",),
            cores=2, tiny_cores=2, options={"stage": 2}),
    Section("DeepSpeed, ZeRO-3", "gpu_checks.sharded:zero", 45, 20, tags=("sharded",), needs=("deepspeed",),
            cores=2, tiny_cores=2, options={"stage": 3}),
)  # fmt: skip
TIMED = (
    Section("shared prompts, 0.5B", "gpu_checks.shared_prompts:seconds", 20, 10, timed=True, tags=("shared",)),
    Section("whole step, vLLM, ours", "gpu_checks.whole_step:ours", 80, 30, **ALONE),  # type: ignore[arg-type]
    Section("whole step, vLLM, stock", "gpu_checks.whole_step:stock", 55, 30, gpu_only=STOCK_ON_A_CPU,
            builds="gpu_checks.whole_step:stock_built", **ALONE),  # type: ignore[arg-type]
    Section("overlap on one card", "gpu_checks.overlap:section", 80, 40, **ALONE),  # type: ignore[arg-type]
    Section("FlexAttention, 0.5B", "gpu_checks.shared_prompts:flex_seconds", 40, 10, timed=True,
            gpu_only=FLEX_ON_A_CPU, builds="gpu_checks.shared_prompts:flex_built",
            tags=("shared", "flex")),
    Section("flash kernel, 0.5B", "gpu_checks.shared_prompts:flash_seconds", 20, 10, timed=True,
            gpu_only=FLASH_ON_A_CPU, builds="gpu_checks.shared_prompts:flash_built", tags=("shared", "flash")),
    Section("quick start", "gpu_checks.quick_start:section", 52, 20, timed=True),
    Section("fast tests", "gpu_checks.fast_tests:section", 55, 10, timed=True, tags=("tests",)),  # they need all cores
    *(update("0.5B", variant, 45) for variant in ("plain", "LoRA", "checkpointing")),
    Section("whole step, transformers", "gpu_checks.whole_step:with_transformers", 50, 10, timed=True),
    Section("decoding, 0.5B", "gpu_checks.decoding:section", 32, 10, timed=True),
    *(update("1.5B", variant, 55) for variant in ("plain", "LoRA", "checkpointing")),
)  # fmt: skip
SECTIONS = (*FUNCTIONAL, *TIMED)

#: question → (section, column) of stock's seconds, and of ours
RATIOS = {
    "whole step with vLLM, stock over ours": (
        ("whole step, vLLM, stock", "step s"),
        ("whole step, vLLM, ours", "step s"),
    ),
    "update in it, stock over ours": (("whole step, vLLM, stock", "update s"), ("whole step, vLLM, ours", "update s")),
}
