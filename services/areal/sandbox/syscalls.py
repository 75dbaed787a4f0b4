"""A seccomp program for code that is not trusted: what it may not ask of the kernel.

Namespaces and dropped capabilities already refuse most of these. The filter keeps code away from
parts of the kernel that no program under test needs, and from making namespaces of its own.
"""

from __future__ import annotations

import platform
import struct

from areal.errors import CannotStart

# linux/audit.h, linux/seccomp.h, linux/bpf_common.h
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET

_SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}  # socket, socketpair
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # its flags lie in memory, which a filter cannot read; without it libc takes clone
_REFUSED = {  # x86_64, aarch64
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Memory that no process's own counters show.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
}


def seccomp_program(machine: str = "", *, only_unix_sockets: bool = False) -> bytes:
    """Returns the filter, an array of `struct sock_filter`; what it does not refuse is allowed.

    Args:
        machine: As `uname -m` says it; empty: this machine's.
        only_unix_sockets: Refuse sockets of the internet, too: for a program without a network
            namespace of its own. Sockets of families other than these are always refused.

    Raises:
        CannotStart: The numbers of that machine's system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise CannotStart(
            f"sandbox: machine {machine!r}: expected one of {', '.join(_ARCHITECTURES)}"
        )
    column = list(_ARCHITECTURES).index(machine)
    refuse, missing = (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ERRNO | _ENOSYS)
    rows = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the same calls under other numbers
        rows += [(_AT_LEAST, 0, 1, _X32), refuse]
    for numbers in _REFUSED.values():
        rows += [(_EQUAL, 0, 1, numbers[column]), refuse]
    rows += [(_EQUAL, 0, 1, _CLONE3), missing]
    families = (_AF_UNIX,) if only_unix_sockets else (_AF_UNIX, _AF_INET, _AF_INET6)
    for number in _SOCKETS[machine]:
        rows += [(_EQUAL, 0, 3 + len(families), number), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        rows += [(_EQUAL, len(families) - at, 0, each) for at, each in enumerate(families)]
        rows += [(_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    rows += [  # the limits of another process, such as the box's first
        (_EQUAL, 0, 4, _PRLIMIT[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    rows += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        refuse,
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *row) for row in rows)
