"""The filter of system calls: what it says to each call, on both processors, by an interpreter of its instructions;
that its numbers are the kernel's; and that Python's usual programs work behind it, in every set of walls."""

from __future__ import annotations

import platform
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from usual_python import USUAL

from grpo_lab.rewards import CodeReward
from grpo_lab.sandbox import client, kernel, system_calls
from grpo_lab.sandbox.system_calls import ARCHES, numbers, seccomp_filter

OWN, OTHER = 4321, 1234
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
GARBAGE = 0xDEADBEEF << 32  # of the upper half the kernel reads nothing
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
THREAD, FORK, NEW_NETWORK = 0x3D0F00, 0x11, 0x40000000


@pytest.fixture(params=ARCHES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return str(request.param)


def answer(instructions: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would do: the instructions carried out on a ``struct seccomp_data``."""
    given = [value % 2**64 for value in (*arguments, *[0] * 6)][:6]
    data = struct.pack("=iIQ6Q", number - 2**32 if number >= 2**31 else number, arch, 0, *given)
    program = list(struct.iter_unpack("HBBI", instructions))
    at, held = 0, 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == 0x20:  # load
            held = int(struct.unpack_from("=I", data, value)[0])
        elif code == 0x54:  # and
            held &= value
        elif code == 0x15:  # equal?
            at += yes if held == value else no
        elif code == 0x35:  # at least?
            at += yes if held >= value else no
        else:
            assert code == 0x06, code  # return
            return int(value)


def says(machine: str, call: str, *arguments: int, view: bool = False) -> int:
    """``call``: name and numbers, as in the table."""
    (number,) = numbers(call).values()
    return answer(seccomp_filter(OWN, view=view), ARCHES[machine], number, *arguments)


CASES: list[tuple[str, tuple[int, ...], int]] = [
    ("read 0/63", (), ALLOW),
    ("socket 41/198", (1, 2, 0), EPERM),
    ("ptrace 101/117", (16, OTHER), EPERM),
    ("shmat 30/196", (1,), EPERM),
    ("shmctl 31/195", (1, 0), EPERM),
    ("mq_unlink 241/181", (), EPERM),
    ("timer_create 222/107", (), EPERM),
    ("setsid 112/157", (), EPERM),
    ("clone3 435", (), ENOSYS),
    ("io_uring_setup 425", (), ENOSYS),
    ("unheard_of 9999", (), ENOSYS),
    ("kill 62/129", (0, 15), ALLOW),
    ("kill 62/129", (OWN, 15), ALLOW),
    ("kill 62/129", (GARBAGE + OWN, 15), ALLOW),
    ("kill 62/129", (OTHER, 15), EPERM),
    ("kill 62/129", (-1, 15), EPERM),
    ("kill 62/129", (OWN, 9), EPERM),
    ("kill 62/129", (0, GARBAGE + 9), EPERM),
    ("kill 62/129", (OWN, 19), EPERM),
    ("tkill 200/130", (OTHER, 15), EPERM),
    ("tgkill 234/131", (OWN, OTHER, 15), ALLOW),
    ("tgkill 234/131", (OWN, OWN, 9), EPERM),
    ("tgkill 234/131", (OTHER, OTHER, 15), EPERM),
    ("rt_sigqueueinfo 129/138", (OTHER, 15), EPERM),
    ("prlimit64 302/261", (0, 7), ALLOW),
    ("prlimit64 302/261", (OTHER, 7), EPERM),
    ("clone 56/220", (THREAD,), ALLOW),
    ("clone 56/220", (FORK,), EPERM),
    ("clone 56/220", (THREAD | NEW_NETWORK,), EPERM),
    ("clone 56/220", (0,), EPERM),
    ("socketpair 53/199", (1, 1, 0), ALLOW),
    ("socketpair 53/199", (1, 0x80801, 0), ALLOW),
    ("socketpair 53/199", (1, 2, 0), EPERM),
    ("socketpair 53/199", (1, 5, 0), EPERM),
    ("socketpair 53/199", (30, 1, 0), EPERM),
    ("sendto 44/206", (3, 0, 1, 0x4000), ALLOW),
    ("sendto 44/206", (3, 0, 1, 0x4001), EPERM),
    ("recvmsg 47/212", (3, 0, 1), EPERM),
    ("connect 42/203", (3,), EPERM),
    ("futex 202/98", (0, 128 | 256 | 9), ALLOW),
    ("futex 202/98", (0, 128 | 6), EPERM),
    ("ioctl 16/29", (0, 0x5421), ALLOW),
    *(("ioctl 16/29", (0, command), EPERM) for command in (0x8901, 0x8902, 0x5452, 0x5412, 0x5410, 0x40045431)),
    ("ioctl 16/29", (0, GARBAGE + 0x8901), EPERM),
    *(("fcntl 72/25", (0, command, 2**64 - 1), ALLOW) for command in (0, 1, 2, 3, 5, 6, 7, 1030)),
    *(("fcntl 72/25", (0, command), EPERM) for command in (8, 10, 15, 1024, 1026, 1031, 1033)),
    ("fcntl 72/25", (0, 4, 0x800), ALLOW),
    ("fcntl 72/25", (0, 4, 0x2800), EPERM),
    ("prctl 157/167", (15,), ALLOW),
    *(("prctl 157/167", (option, 0), EPERM) for option in (1, 4, 22, 36, 38, 0x59616D61)),
    ("mknodat 259/33", (0, 0, 0o010644), ALLOW),
    ("mknodat 259/33", (0, 0, 0o060644), EPERM),
]


def test_what_each_call_is_told(machine: str) -> None:
    told = [(call, arguments, says(machine, call, *arguments)) for call, arguments, _ in CASES]
    assert [one for one, case in zip(told, CASES, strict=True) if one[2] != case[2]] == []


@pytest.mark.parametrize("call", ["truncate 76/45", "fchmod 91/52", "utimensat 280/88"])
def test_modes_and_times_by_name_are_set_in_a_view_alone(machine: str, call: str) -> None:
    assert says(machine, call, view=True) == ALLOW
    assert says(machine, call) == EPERM


def test_another_architecture_and_x32(machine: str) -> None:
    instructions = seccomp_filter(OWN, view=True)
    others = {arch for name, arch in ARCHES.items() if name != machine} | {0x40000003, 0x40000028}
    assert {answer(instructions, arch, 0) for arch in others} == {KILL}
    assert {answer(instructions, ARCHES[machine], 0x40000000 + call) for call in (0, 1, 62)} == {ENOSYS}


def test_it_is_as_long_as_the_kernel_takes_and_returns_for_every_number(machine: str) -> None:
    instructions = seccomp_filter(OWN, view=True)
    assert len(instructions) // 8 < 4096
    found = {answer(instructions, ARCHES[machine], number) for number in [*range(700), 2**31, 2**32 - 1]}
    assert found == {ALLOW, EPERM, ENOSYS}


def test_on_another_processor_there_is_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not kernel.known_machine()


def test_the_numbers_are_the_kernels(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"no {header} on this machine")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in lines}
    known.setdefault("newfstatat", known.get("fstatat", 0))
    tables = [
        value for name, value in vars(system_calls).items() if re.fullmatch("_[A-Z_]+", name) and isinstance(value, str)
    ]
    tables += [calls for calls, _ in system_calls._looked_at(OWN)]
    ours = {name: number for table in tables for name, number in numbers(table).items()}
    assert len(ours) > 100
    assert {name: number for name, number in ours.items() if known.get(name) != number} == {}


BEHIND = {
    "all walls": None,
    "no namespaces": ["seccomp", "landlock", "limits"],
    "namespaces and filter": ["namespaces", "seccomp", "limits"],
    "filter alone": ["seccomp", "limits"],
}


@pytest.mark.slow
@pytest.mark.parametrize("walls", BEHIND)
def test_what_python_usually_does_works(walls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_is_root", lambda: False)  # a set that root is not given is tried as root, too
    settings: dict[str, Any] = {"timeout_s": 20.0, "wall_s": 300.0, "workers": 2, "walls": BEHIND[walls]}
    made = CodeReward(**settings)
    if "seccomp" not in made._judge.missing or made._judge.missing["seccomp"]:
        pytest.skip("this machine gives no seccomp")
    found = made(completions=list(USUAL.values()), tests=["works()\nassert works"] * len(USUAL))
    made.close()
    assert [name for name, score in zip(USUAL, found, strict=True) if score != 1.0] == []
