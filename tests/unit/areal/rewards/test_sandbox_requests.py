"""What is refused before a box starts, and the table of system calls."""

import struct

import pytest

from areal.errors import CannotStart, InvalidInput
from areal.rewards.sandbox import Limits, Sandbox
from areal.rewards.sandbox.box import bubblewrap
from areal.rewards.sandbox.syscalls import seccomp_program


async def test_a_program_is_either_code_or_a_command():
    for request in ({}, {"code": "1", "argv": ["true"]}):
        with pytest.raises(InvalidInput, match="either code or argv"):
            await Sandbox().run(**request)


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "processes", "output_kb", "disk_mb"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_above_zero(name, value):
    with pytest.raises(InvalidInput, match=rf"Limits\.{name}: .*expected a number above 0"):
        Limits(**{name: value})


def test_without_bubblewrap_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotStart, match="apt-get install bubblewrap"):
        bubblewrap(None)


def test_a_machine_whose_system_calls_are_unknown_is_refused():
    with pytest.raises(CannotStart, match="'riscv64': expected one of x86_64, aarch64"):
        seccomp_program("riscv64")


def evaluate(program: bytes, arch: int, number: int, argument: int = 0) -> int:
    """What the kernel does with a filter, for the few instructions that this one has."""
    data = struct.pack("=IIQQ", number, arch, 0, argument)
    rows = [struct.unpack_from("=HBBI", program, 8 * i) for i in range(len(program) // 8)]
    at, accumulator = 0, 0
    while True:
        code, true, false, k = rows[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:
            return k
        else:
            found = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}
            at += true if found[code] else false


@pytest.mark.parametrize(
    ("machine", "arch", "read", "ptrace", "clone"),
    [("x86_64", 0xC000003E, 0, 101, 56), ("aarch64", 0xC00000B7, 63, 117, 220)],
)
def test_the_filter_allows_reading_and_refuses_namespaces(machine, arch, read, ptrace, clone):
    program = seccomp_program(machine)
    allow, kill, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    assert evaluate(program, arch, read) == allow
    assert evaluate(program, arch, ptrace) == eperm
    assert evaluate(program, arch, clone, 0x11) == allow  # fork
    assert evaluate(program, arch, clone, 0x003D0F00) == allow  # a thread
    assert evaluate(program, arch, clone, 0x10000011) == eperm  # a user namespace
    assert evaluate(program, arch, 435) == enosys  # clone3
    assert evaluate(program, 0x40000003, read) == kill  # 32-bit calls
    if machine == "x86_64":
        assert evaluate(program, arch, 0x40000000 | read) == eperm  # x32
