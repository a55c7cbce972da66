#!/usr/bin/env python
"""Pack what a machine without a network lacks into a folder that can be carried there (docs/no_network.md).

    python scripts/offline_kit.py pack KIT --python 3.12 --torch 2.11.0 --lock scripts/offline_kits/py312.txt
    python scripts/offline_kit.py pack KIT … --vllm 0.26.0 --lock scripts/offline_kits/py312-vllm0.26.txt --max-part 22M
    python scripts/offline_kit.py lock --python 3.12 --torch 2.11.0 >LOCK     # for another Python or torch (asks uv)

and on that machine, with nothing but its Python:    python3 KIT/unpack.py --to FOLDER

``pack`` downloads the wheels of a lock file (in pip's format) for another Python. It leaves out what that machine has
already (``--have``, and always torch) and files that are never used, adds this checkout, compresses everything, and
cuts it into parts of at most ``--max-part``. There are two archives: ``packages`` and, with ``--vllm``, ``engine``.
``manifest.json`` holds the versions, what was left out, and the SHA-256 of every part.

``lock`` prints such a lock file for another Python or torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grpo_lab.requirements import NEEDED, module_of, name_of  # noqa: E402

UNPACK = ROOT / "scripts" / "offline_kits" / "unpack.py"
OF_TORCH = ("torch", "triton", "nvidia-*", "cuda-*", "setuptools")
"""Names of packages that come with torch on the other machine, and are never packed."""
NEVER_USED = (
    *("bin/*", "mistral_common/data/*", "*/locales/*", "*.pyi", "*/__pycache__/*"),
    *("pyarrow/include/*", "pyarrow/src/*", "*/numpy/tests/*"),
    *(f"{one}/*/tests/*" for one in ("numpy", "scipy", "pandas", "sympy", "pyarrow")),
    *(f"{one}/tests/*" for one in ("numpy", "scipy", "pandas", "sympy", "pyarrow")),
)
NEVER_USED_OF_VLLM = (
    *("vllm/vllm-rs*", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*"),
    *("vllm/benchmarks/*", "*/_vllm_fa2_C.abi3.so", "*_flashmla*.so", "*_qutlass_C.abi3.so"),
    *("*_rust_tool_parser.abi3.so", "*.cu", "*.cuh", "*.hpp", "*.h", "*.data/*"),
)
"""Files of vLLM that an engine for text models does not need."""
CHECKOUT = ("grpo_lab", "recipes", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
GLIBC = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31")
UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


class KitError(Exception):
    """Raised if a kit cannot be made; the message is for the user."""


def size(text: str) -> int:
    """Return the number of bytes that a text such as ``60M`` means."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 60M or 500K")
    return int(found[1]) * UNITS[found[2]]


def pip(*words: str) -> None:
    """Run this Python's pip, whose output goes to the terminal. Raises KitError if it fails."""
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words])
    if done.returncode:
        raise KitError(f"`pip {' '.join(words[:3])} …` failed (exit code {done.returncode}); what it said stands above")


def for_target(python: str, machine: str) -> list[str]:
    """Return pip's options for wheels of another Python on Linux."""
    platforms = [f"manylinux_{one}_{machine}" for one in GLIBC] + [f"manylinux2014_{machine}", f"linux_{machine}"]
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    return words + [word for one in platforms for word in ("--platform", one)]


def read_lock(lock: Path, have: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Read a lock file.

    Args:
        lock: the file, with a line ``name==version`` for each package.
        have: names or patterns of packages that the other machine has.

    Returns:
        The lines of packages for the kit, name → version of them, and the names of those that the machine has.
    """
    kept = list[str]()
    versions = dict[str, str]()
    left = list[str]()
    for line in lock.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", line)
        if found is None:
            if line.strip() and not line.lstrip().startswith(("#", "--hash")):
                raise KitError(f"{lock}: {line.strip()!r} is no pinned package (name==version)")
            continue
        name = found[1].lower().replace("_", "-")
        if any(fnmatch.fnmatch(name, one) for one in (*OF_TORCH, *have)):
            left.append(name)
            continue
        versions[name] = found[2]
        kept.append(f"{found[1]}=={found[2]}")
    return kept, versions, left


def install_packages(site: Path, lines: Sequence[str], python: str, machine: str) -> None:
    """Install the packages of a lock, and this checkout, into the folder ``site``, as the other machine's site-packages
    will hold them."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        where = ["--no-deps", "--no-compile", "--target", str(site)]
        pip("install", *where, *for_target(python, machine), "-r", str(wanted))
        source = Path(folder) / "checkout"  # a build writes into its source
        source.mkdir()
        for name in CHECKOUT:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, source / name)
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(source))
        with zipfile.ZipFile(next(Path(folder).glob("grpo_lab-*.whl"))) as wheel:
            wheel.extractall(site)


def install_engine(site: Path, version: str, python: str, machine: str) -> None:
    """Unpack vLLM's wheel into ``site``, without what it requires, which is in the lock."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--no-deps", "--abi", "abi3", "--abi", "cp" + python.replace(".", ""), *for_target(python, machine)]
        pip("download", *words, "--dest", folder, f"vllm=={version}")
        with zipfile.ZipFile(next(Path(folder).glob("vllm-*.whl"))) as wheel:
            wheel.extractall(site, [one for one in wheel.namelist() if not matches(one, NEVER_USED_OF_VLLM)])


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Return whether a path matches one of the patterns."""
    return any(fnmatch.fnmatch(path, one) for one in patterns)


class Parts:
    """File-like object for writing, which cuts what it gets into the files ``NAME.000``, ``NAME.001``, and so on.

    Attributes:
        most: most bytes of a file.
        made: name, bytes and SHA-256 of each finished file.
    """

    def __init__(self, folder: Path, name: str, most: int) -> None:
        self.folder = folder
        self.name = name
        self.most = most
        self.made: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._room = 0

    def write(self, data: bytes) -> int:
        place = 0
        while place < len(data):
            if not self._room:
                self.close()
                self._file = (self.folder / f"{self.name}.{len(self.made):03d}").open("wb")
                self._hash = hashlib.sha256()
                self._room = self.most
            piece = data[place : place + self._room]
            assert self._file is not None
            self._file.write(piece)
            self._hash.update(piece)
            self._room -= len(piece)
            place += len(piece)
        return len(data)

    def close(self) -> None:
        if self._file is None:
            return
        bytes_in = self._file.tell()
        self._file.close()
        file = Path(self._file.name).name
        self.made.append({"file": file, "bytes": bytes_in, "sha256": self._hash.hexdigest()})
        self._file = None


@contextmanager
def xz_into(parts: Parts) -> Iterator[Any]:
    """Yield a file-like object whose bytes go, compressed, into ``parts``: by the program ``xz`` on all cores or,
    without it, by Python on one."""
    if shutil.which("xz") is None:
        compressor = lzma.LZMACompressor(preset=6)

        class Slow:
            def write(self, data: bytes) -> int:
                parts.write(compressor.compress(data))
                return len(data)

        yield Slow()
        parts.write(compressor.flush())
        return
    with tempfile.TemporaryFile() as packed:
        xz = subprocess.Popen(["xz", "-T0", "-6", "-c"], stdin=subprocess.PIPE, stdout=packed)
        assert xz.stdin is not None
        yield xz.stdin
        xz.stdin.close()
        if xz.wait():
            raise KitError(f"`xz` failed (exit code {xz.returncode})")
        packed.seek(0)
        while data := packed.read(1024**2):
            parts.write(data)


def archive(site: Path, kit: Path, name: str, most: int, unused: Sequence[str]) -> dict[str, Any]:
    """Write the folder ``site`` into the kit as a tar, compressed and cut into parts, without files that match
    ``unused``. Returns the archive's entry of the manifest."""
    files = sorted(one for one in site.rglob("*") if one.is_file())
    kept = [one for one in files if not matches(one.relative_to(site).as_posix(), unused)]
    parts = Parts(kit, f"{name}.tar.xz", most)
    step = progress(f"packing {name}", sum(one.stat().st_size for one in kept))
    with xz_into(parts) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for file in kept:
            tar.add(file, arcname=file.relative_to(site).as_posix(), filter=anonymous)
            step(file.stat().st_size)
    parts.close()
    return {"parts": parts.made, "bytes": sum(one.stat().st_size for one in kept), "files": len(kept)}


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove from a tar's entry by whom and when it was packed."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def progress(what: str, total: int) -> Callable[[int], object]:
    """Show progress, and return a function to call with the number of bytes done: by tqdm if it is installed, else by
    one line at the beginning."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        print(f"{what}: {total / 1e6:.0f} MB", file=sys.stderr, flush=True)
        return lambda done: None
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=1).update


def pack(asked: argparse.Namespace) -> None:
    """Make a kit. Its folder gets its name only once it is whole."""
    if asked.kit.exists():
        raise KitError(f"{asked.kit} is there already; name a new folder, or remove it")
    have = [one for one in asked.have.split(",") if one]
    unused = [*NEVER_USED, *(one for one in asked.leave_out.split(",") if one)]
    lines, versions, left = read_lock(asked.lock, have)
    kit = asked.kit.with_name(asked.kit.name + ".part")
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir(parents=True)
    archives = {}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "packages"
        engine = Path(folder) / "engine"
        install_packages(site, lines, asked.python, asked.machine)
        archives["packages"] = archive(site, kit, "packages", asked.max_part, unused)
        if asked.vllm is not None:
            unused += NEVER_USED_OF_VLLM
            install_engine(engine, asked.vllm, asked.python, asked.machine)
            archives["engine"] = archive(engine, kit, "engine", asked.max_part, unused)
    needed = {name_of(one): module_of(one) for one in NEEDED} | ({"vllm": "vllm"} if asked.vllm else {})
    manifest = {
        "python": asked.python,
        "machine": asked.machine,
        "torch": asked.torch,
        "vllm": asked.vllm,
        "versions": versions,
        "expected_there": sorted({*left, "torch"}),
        "never_used": unused,
        "needed": needed,
        "archives": archives,
    }
    (kit / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copy2(UNPACK, kit / "unpack.py")
    kit.rename(asked.kit)
    for name, one in archives.items():
        packed = sum(part["bytes"] for part in one["parts"])
        print(f"{name}: {len(one['parts'])} part(s), {packed / 1e6:.1f} MB, {one['bytes'] / 1e6:.0f} MB unpacked")
    print(f"carry {asked.kit} there, then: python{asked.python} {asked.kit.name}/unpack.py --to FOLDER")


def lock(asked: argparse.Namespace) -> None:
    """Print a lock file for another Python and torch, within the version ranges of this package, and with the versions
    of ``constraints.txt`` where they fit."""
    uv = shutil.which("uv")
    if uv is None:
        raise KitError("`lock` asks uv, which resolves for another Python: pip install uv")
    pins = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [one for one in NEEDED if name_of(one) != "torch"] + [f"torch=={asked.torch}"]
    wanted += [f"vllm=={asked.vllm}"] if asked.vllm else []
    with tempfile.TemporaryDirectory() as folder:
        near = Path(folder) / "near.txt"
        words = [uv, "pip", "compile", "--quiet", "--only-binary", ":all:"]
        near.write_text("\n".join(one for one in pins if not one.startswith("torch==")), encoding="utf-8")
        words += ["--no-annotate", "--python-version", asked.python, "--constraint", str(near), "-"]
        words += ["--python-platform", f"{asked.machine}-manylinux_2_28"]
        done = subprocess.run(words, input="\n".join(wanted), text=True, stdout=subprocess.PIPE)
    if done.returncode:
        raise KitError("uv found no such set of packages; what it said stands above")
    print(done.stdout, end="")


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = made.add_subparsers(required=True)
    packs = commands.add_parser("pack", help="download, prune, compress, cut")
    packs.set_defaults(do=pack)
    packs.add_argument("kit", type=Path, help="a new folder")
    packs.add_argument("--lock", type=Path, required=True, help="pinned packages, name==version a line")
    packs.add_argument("--max-part", type=size, default=size("60M"), help="most bytes of a file, as 60M (the default)")
    packs.add_argument("--have", default="", help="what the machine has: torch is one; names or patterns, by commas")
    without = "files that the machine does without, by commas: 'vllm/_moe_C*' where no model is a mixture of experts"
    packs.add_argument("--leave-out", default="", metavar="PATTERNS", help=without)
    locks = commands.add_parser("lock", help="print a lock for another Python and torch")
    locks.set_defaults(do=lock)
    for one in (packs, locks):
        one.add_argument("--python", required=True, help="of the machine, as 3.12")
        one.add_argument("--torch", required=True, help="its version there")
        engine = one.add_mutually_exclusive_group()
        engine.add_argument("--vllm", help="its version; its torch must be the machine's")
        engine.add_argument("--no-vllm", action="store_const", const=None, dest="vllm", help="no engine (the default)")
        one.add_argument("--machine", default="x86_64", help="x86_64 (the default) or aarch64")
    return made


def main(words: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(words)
    try:
        asked.do(asked)
    except KitError as error:
        print(f"offline_kit: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
