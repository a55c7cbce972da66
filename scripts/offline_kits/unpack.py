#!/usr/bin/env python3
"""Unpack an offline kit on a machine that has nothing but Python, and say what imports there.

    python3 unpack.py --to FOLDER                    # verify, unpack, check
    python3 unpack.py --to FOLDER --only packages    # the engine stays packed, and off the path
    python3 unpack.py --to FOLDER --check            # what imports, and what is missing

Every part is verified before anything is unpacked; an archive is unpacked beside its place and then renamed, so half of
one never lies on the path. Then ``. FOLDER/activate`` puts it on the path. Uses the standard library alone.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

KIT = Path(__file__).resolve().parent
ASK = (
    "import importlib, importlib.metadata as m, sys\n"
    "importlib.import_module(sys.argv[1])\n"
    "try: print('version', m.version(sys.argv[2]))\n"
    "except m.PackageNotFoundError: print('version ?')\n"
)
INSIDE = "site-packages"
"""The folder in each archive's: dill, by which datasets makes fingerprints, writes out modules of any other path."""
WHOLE = {"grpo_lab": "grpo_lab.trainer"}


class KitError(Exception):
    """A sentence for who unpacks."""


def say(words):
    print(words, flush=True)


def refuse_another_machine(manifest):
    """A kit is for one minor release of Python: extensions of another do not load."""
    here = "{}.{}".format(*sys.version_info)
    if here != manifest["python"]:
        said = "this kit is for Python {}, and {} is {}: start it with that Python, or pack one for this"
        raise KitError(said.format(manifest["python"], sys.executable, here))
    if platform.machine() != manifest["machine"] or sys.platform != "linux":
        raise KitError(
            "this kit is for Linux on {}, this is {} on {}".format(
                manifest["machine"], sys.platform, platform.machine()
            )
        )


def verify(archive):
    """KitError that names every part that is missing or is not what was packed."""
    wrong = []
    for part in archive["parts"]:
        file = KIT / part["file"]
        if not file.is_file():
            wrong.append(part["file"] + " is missing")
        elif file.stat().st_size != part["bytes"]:
            wrong.append("{} has {:,} bytes of {:,}".format(part["file"], file.stat().st_size, part["bytes"]))
        elif digest(file) != part["sha256"]:
            wrong.append(part["file"] + " is not what was packed (SHA-256)")
    if wrong:
        raise KitError("nothing was unpacked: " + "; ".join(wrong))


def digest(file):
    found = hashlib.sha256()
    with file.open("rb") as read:
        for piece in iter(lambda: read.read(1 << 20), b""):
            found.update(piece)
    return found.hexdigest()


class Joined:
    """The parts as one file to read from."""

    def __init__(self, files):
        self._left = list(files)
        self._file = None

    def read(self, most=-1):
        found = []
        while most:
            if self._file is None:
                if not self._left:
                    break
                self._file = self._left.pop(0).open("rb")
            piece = self._file.read(most)
            if not piece:
                self._file.close()
                self._file = None
                continue
            found.append(piece)
            most = most - len(piece) if most > 0 else most
        return b"".join(found)


def unpack(name, archive, target):
    """One archive below ``target``, whole or not at all."""
    place, part = target / name, target / (name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    (part / INSIDE).mkdir(parents=True)
    total, done, told = archive["files"], 0, 0
    with decompressed([KIT / one["file"] for one in archive["parts"]]) as tar:
        for entry in tar:
            tar.extract(entry, part / INSIDE, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            done += 1
            if done * 10 // total > told:
                told = done * 10 // total
                say(f"  {name}: {told * 10:3d}%  {done:,} of {total:,} files")
    if done != total:
        raise KitError(f"{name}: {done:,} files of {total:,}")
    part.rename(place)


def decompressed(files):
    """The tar in the parts; by ``xz`` where this Python was built without lzma."""
    try:
        import lzma
    except ImportError:
        if shutil.which("xz") is None:
            raise KitError("this Python has no lzma, and there is no `xz`: one of them is needed") from None
        reader, writer = os.pipe()
        cat = subprocess.Popen(["cat", *map(str, files)], stdout=writer)
        os.close(writer)
        xz = subprocess.Popen(["xz", "-dc"], stdin=reader, stdout=subprocess.PIPE)
        os.close(reader)
        assert cat.pid
        return tarfile.open(fileobj=xz.stdout, mode="r|")
    return tarfile.open(fileobj=lzma.open(Joined(files)), mode="r|")


def folders(target):
    """What is unpacked there; the engine before the packages."""
    places = [target / name / INSIDE for name in ("engine", "packages")]
    return [one for one in places if one.is_dir()]


def write_activate(target):
    path = ":".join(str(one) for one in folders(target))
    lines = [f"export PYTHONPATH={path}${{PYTHONPATH:+:$PYTHONPATH}}", "export HF_HUB_OFFLINE=1"]
    lines.append(f"alias grpo-lab='{sys.executable} -m grpo_lab'")
    if (target / "engine").is_dir():
        lines.append("export VLLM_USE_FLASHINFER_SAMPLER=0  # flashinfer is not packed")
    (target / "activate").write_text("\n".join(lines) + "\n")


def check(manifest, target, python):
    """Import each needed package in a process of its own; a table, and the names of what does not import."""
    path = os.pathsep.join([str(one) for one in folders(target)] + [os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    environment = dict(os.environ, PYTHONPATH=path, HF_HUB_OFFLINE="1")
    modules = dict(manifest["needed"])
    if not (target / "engine").is_dir():
        modules.pop("vllm", None)
    modules.update(WHOLE)
    lacking = []
    say("{:<16} {:<24} {}".format("package", "version", "imports"))
    for name, module in modules.items():
        done = subprocess.run(
            [python, "-c", ASK, module, name],
            cwd=str(target),  # a checkout in the current folder would be imported in place of the kit's package
            env=environment,
            capture_output=True,
            text=True,
        )
        found = [one.split(None, 1)[1] for one in done.stdout.splitlines() if one.startswith("version ")]
        if done.returncode == 0 and found:
            say(f"{name:<16} {found[-1]:<24} yes")
            if name == "torch" and found[-1].split("+")[0] != manifest["torch"]:
                say("  the kit was packed for torch {}".format(manifest["torch"]))
            continue
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        lacking.append(name)
        say("{:<16} {:<24} no: {}".format(name, "-", why[:300]))
    said = "missing: " + ", ".join(lacking) if lacking else "everything imports"
    expected = [one for one in lacking if one in manifest["expected_there"]]
    if expected:
        said += " ({} was not packed: it was said to be on this machine)".format(", ".join(expected))
    say(said)
    return 1 if lacking else 0


def main():
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--to", type=Path, required=True, help="a folder; archives that are there are left as they are")
    asked.add_argument("--only", choices=["packages", "engine"], help="one archive")
    asked.add_argument("--check", action="store_true", help="unpack nothing, say what imports")
    asked.add_argument("--no-check", action="store_true", help="unpack and import nothing")
    asked = asked.parse_args()
    manifest = json.loads((KIT / "manifest.json").read_text())
    target = asked.to.resolve()
    try:
        refuse_another_machine(manifest)
        if not asked.check:
            wanted = [one for one in manifest["archives"] if asked.only in (None, one) and not (target / one).is_dir()]
            for name in wanted:
                verify(manifest["archives"][name])
            for name in wanted:
                say("unpacking {} ({:.0f} MB) to {}".format(name, manifest["archives"][name]["bytes"] / 1e6, target))
                unpack(name, manifest["archives"][name], target)
            write_activate(target)
            say(". {}   puts it on the path".format(target / "activate"))
    except KitError as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 2
    return 0 if asked.no_check else check(manifest, target, sys.executable)


if __name__ == "__main__":
    sys.exit(main())
