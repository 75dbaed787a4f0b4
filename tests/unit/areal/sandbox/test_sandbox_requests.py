"""What is refused before a box starts, and the table of system calls."""

import struct

import pytest

from areal.errors import CannotStart, InvalidInput
from areal.sandbox import Limits, Sandbox
from areal.sandbox.box import Box, Command, bubblewrap
from areal.sandbox.syscalls import seccomp_program


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
    memfd, prlimit = {"x86_64": (319, 302), "aarch64": (279, 261)}[machine]
    assert evaluate(program, arch, memfd) == eperm
    assert evaluate(program, arch, prlimit, 0) == allow  # its own limits
    assert evaluate(program, arch, prlimit, 1) == eperm
    if machine == "x86_64":
        assert evaluate(program, arch, 0x40000000 | read) == eperm  # x32


@pytest.mark.parametrize(
    ("machine", "arch", "calls"),
    [("x86_64", 0xC000003E, (41, 53)), ("aarch64", 0xC00000B7, (198, 199))],
)
@pytest.mark.parametrize("only_unix", [False, True])
def test_socket_when_its_family_is_not_on_the_list_then_it_is_refused(
    machine, arch, calls, only_unix
):
    program = seccomp_program(machine, only_unix_sockets=only_unix)
    allowed = {1} if only_unix else {1, 2, 10}
    for call in calls:
        found = {
            family for family in range(64) if evaluate(program, arch, call, family) == 0x7FFF0000
        }
        assert found == allowed
        assert evaluate(program, arch, call, 16) == 0x00050061  # EAFNOSUPPORT


async def test_program_when_its_box_fails_after_it_began_then_it_was_killed():
    """What a program does to its box is its own failure, not this machine's."""
    box = Box()
    began, waiting = Command(box, 1, {}), Command(box, 2, {})
    box.commands = {1: began, 2: waiting}
    box._take({"id": 1, "pid": 7})
    box._take({"failed": "init: OSError(24)"})
    assert (began.ended.cause, began.ended.failed) == ("killed", "")
    assert (waiting.ended.cause, waiting.ended.failed) == ("", "init: OSError(24)")
