"""Section about what the numbers were measured on: versions, device, and the peak of operations that an MFU refers
to."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch
from memory_table import GPUS

from gpu_checks.section import Row, Setting

PACKAGES = (
    "grpo_lab",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "vllm",
    "deepspeed",
    "flash_attn",
    "liger_kernel",
)
_FLOPS = {gpu.name.split()[0]: gpu.flops for gpu in GPUS}
#: part of the device's name → bf16 FLOP/s without sparsity (accumulated in float32), and the data sheet. The first that
#: fits counts.
PEAKS: tuple[tuple[str, float, str], ...] = (
    ("H100 PCIe", 756e12, "NVIDIA H100 PCIe product brief"),
    ("H100 NVL", 835e12, "NVIDIA H100 data sheet, NVL"),
    ("H100", _FLOPS["H100"], "NVIDIA H100 data sheet, SXM"),
    ("H200 NVL", 836e12, "NVIDIA H200 data sheet, NVL"),
    ("H200", 989e12, "NVIDIA H200 data sheet, SXM"),
    ("A100", _FLOPS["A100"], "NVIDIA A100 data sheet"),
    ("L40S", 362e12, "NVIDIA L40S data sheet"),
    ("RTX 4090", 165e12, "NVIDIA Ada GPU architecture paper, float32 accumulation"),
    ("RTX 3090", 71e12, "NVIDIA Ampere GA102 architecture paper, float32 accumulation"),
)


def peak_flops(name: str) -> tuple[float, str] | None:
    """Return the peak in FLOP/s of a device by its name, and the source; None if the table does not have it."""
    return next(((flops, source) for part, flops, source in PEAKS if part in name), None)


def device_name() -> str:
    """Return the name of the GPU or, without one, of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def installed(package: str) -> str:
    """Return the version of a package, or of its build for CPUs."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def versions(setting: Setting) -> list[Row]:
    """Return a row for each fact: the device, its memory and peak, precision, and versions of packages."""
    name = device_name()
    peak = peak_flops(name)
    facts: dict[str, str] = {
        "device": name,
        "peak, bf16 dense": "unknown" if peak is None else f"{peak[0] / 1e12:.0f} TFLOP/s ({peak[1]})",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
    if setting.gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "capability": f"{properties.major}.{properties.minor}",
            "CUDA": str(torch.version.cuda),
            "bf16": str(torch.cuda.is_bf16_supported()),
        }
    facts["float32 products in TF32"] = str(torch.backends.cuda.matmul.allow_tf32)
    facts |= {package: installed(package) for package in PACKAGES}
    return [{"fact": fact, "value": value} for fact, value in facts.items()]
