"""Inside a box: forks a session on request, in namespaces of its own, one after the other.

A bare interpreter runs this file: it imports nothing but the standard library and its neighbor.
Requests and answers are JSON after four bytes of length:

    zygote (stays)  ── fork ──> guard    new user, pid, mount and IPC namespace
                                  └───> init     pid 1 in there (session.py): fresh /proc, /tmp
                                          ├───> program   no capability, rlimits, seccomp
                                          └───> program   …

When init ends, the kernel kills whatever programs left behind: daemons, forks, everything.
With a folder as its argument (`rlimits`, the weaker mode) there are no namespaces: init is a plain
child that finds its programs by descent. Further arguments are all that they may read of the
machine's files (Landlock); without them the kernel cannot hide files.

| waits for                | unblocked by                             |
|--------------------------|------------------------------------------|
| a request                | the pipe; its end ends the zygote        |
| the end of a session     | init, which ends when told, or at the end of the pipe |
"""

import base64
import ctypes
import os
import resource
import signal
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from areal.sandbox.session import Session, receive, send
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from session import Session, receive, send

    del sys.path[0], sys.modules["session"]  # neither is a program's to import

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEW = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000  # user, pid, mount, IPC
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 24, 36
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 38, 22
NOBODY = 65534
PLAIN = sys.argv[1] if len(sys.argv) > 1 else ""
FOLDER = PLAIN or "/tmp"
READABLE = sys.argv[2:]
AT_HAND = "ast bisect collections copy functools heapq itertools math random re string"
"""Modules that short programs import most; they are imported before the first fork."""


def main() -> None:
    """Serves requests until the pipe closes."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if os.getuid() == 0:
        if not PLAIN:
            check(LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    if READABLE:
        hide_files()
    # Nothing in the box can read this process, or be traced by what it runs.
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    if os.path.isdir("/packages"):
        sys.path.append("/packages")
    for name in AT_HAND.split():
        import_module(name)
    program = base64.b64decode((receive(requests) or {})["seccomp"])
    send(answers, {"ready": True})
    while (request := receive(requests)) is not None:
        if "open" not in request:
            continue  # input or a signal for a program that has ended meanwhile
        child = os.fork()
        if child == 0:
            (init if PLAIN else guard)(request["open"], program, requests, answers)
        os.waitpid(child, 0)
        if not PLAIN and others():
            raise SystemExit("a program outlived its namespace")  # its box is closed
        send(answers, {"closed": True})


def others() -> list[str]:
    """Processes in this namespace but the box's own two."""
    ours = {"1", str(os.getpid())}
    return [name for name in os.listdir("/proc") if name.isdigit() and name not in ours]


def others_of_user() -> int:
    """Threads of this user on the whole machine: the kernel counts them all against one limit."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended
    return count


def check(result: int) -> None:
    """Raises OSError for what a function of libc returned if it failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def hide_files() -> None:
    """Leaves this process and its children the box's folder, and READABLE to read and execute.

    Signals and abstract sockets end at the box, too, where the kernel knows how (6.12).
    """
    version = LIBC.syscall(444, None, 0, 1)
    # linux/landlock.h: 13 rights in the first version; moves between folders, truncate and ioctl
    # of devices came with 2, 3 and 5.
    rights = (1 << 13 + (version >= 2) + (version >= 3) + (version >= 5)) - 1
    execute, write, read, read_folder = 1, 2, 4, 8
    handled = (ctypes.c_uint64 * 3)(rights, 0, 3 if version >= 6 else 0)
    rules = LIBC.syscall(444, handled, ctypes.sizeof(handled), 0)
    check(rules < 0)
    allowed = {FOLDER: rights, "/proc": read | read_folder}
    allowed |= {f"/dev/{name}": read | write for name in ("null", "zero", "full", "urandom")}
    allowed |= dict.fromkeys(READABLE, execute | read | read_folder)

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    for path, may in allowed.items():
        try:
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rule = Rule(may if os.path.isdir(path) else may & ~read_folder, parent)
        check(LIBC.syscall(445, rules, 1, ctypes.byref(rule), 0))
        os.close(parent)
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    check(LIBC.syscall(446, rules, 0))
    os.close(rules)


def guard(limits: dict[str, Any], program: bytes, requests: int, answers: int) -> NoReturn:
    """The child: makes namespaces, and waits for what is pid 1 in them."""
    try:
        uid, gid = os.getuid(), os.getgid()
        LIBC.prctl(PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root
        check(LIBC.unshare(CLONE_NEW))
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:
                file.write(line)
        LIBC.prctl(PR_SET_DUMPABLE, 0)
        pid = os.fork()
    except BaseException as error:
        send(answers, {"failed": f"namespaces: {error!r}"})
        os._exit(125)
    if pid == 0:
        init(limits, program, requests, answers)
    os.waitpid(pid, 0)
    os._exit(0)


def init(limits: dict[str, Any], program: bytes, requests: int, answers: int) -> NoReturn:
    """Runs as pid 1: mounts the file systems that programs see, and serves their session."""
    try:
        os.setsid()
        if PLAIN:
            check(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        else:
            check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
            check(LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
            size = f"size={limits['disk_bytes']},nr_inodes=20000,mode=0700".encode()
            for folder in (b"/tmp", b"/dev/shm"):
                check(LIBC.mount(b"tmpfs", folder, b"tmpfs", MS_NOSUID | MS_NODEV, size))
        os.chdir(FOLDER)

        def become(command: dict[str, Any], streams: tuple[int, int, int], said: int) -> NoReturn:
            become_program(limits, command, program, streams, said)

        Session(requests, answers, limits, become, plain=bool(PLAIN)).serve()
        os._exit(0)
    except BaseException as error:
        send(answers, {"failed": f"init: {error!r}"})
        os._exit(125)


def become_program(
    limits: dict[str, Any],
    command: dict[str, Any],
    program: bytes,
    streams: tuple[int, int, int],
    said: int,
) -> NoReturn:
    """The program itself: gives up all rights, then runs."""
    try:
        os.setsid()
        os.nice(19)  # the watching comes first, also beside a fork bomb
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
        os.closerange(3, said)
        os.closerange(said + 1, 4096)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        restrict(limits, program)
        os.environ.update(command["env"])
        for name, content in command["files"].items():
            path = os.path.normpath(os.path.join(FOLDER, name))
            if not path.startswith(FOLDER + "/"):
                raise ValueError(f"file {name!r}: expected a path inside the box's folder")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
        os.chdir(os.path.join(FOLDER, command["cwd"]))
        if command["argv"]:
            os.set_inheritable(said, False)
            os.execvp(command["argv"][0], command["argv"])
        os.close(said)
    except BaseException as error:
        os.write(said, f"program: {error!r}".encode()[:4000])
        os._exit(125)
    os._exit(execute(command["code"], command["args"]))


def restrict(limits: dict[str, Any], program: bytes) -> None:
    """Limits of this process and its children, no capability, no new ones, the filter."""
    cpu = max(1, round(limits["cpu_seconds"]))
    for name, soft, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"] + (256 << 20), 0),
        (resource.RLIMIT_NPROC, limits["processes"] + (others_of_user() if PLAIN else 2), 0),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"], 0),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_NOFILE, 256, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        hard = resource.getrlimit(name)[1]
        values = [
            value if hard == resource.RLIM_INFINITY else min(value, hard)
            for value in (soft, most or soft)
        ]
        resource.setrlimit(name, (values[0], values[1]))
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(LIBC.capset(header, (ctypes.c_uint32 * 6)()))
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    rows = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("rows", ctypes.c_ushort), ("first", ctypes.c_void_p)]

    whole = Program(len(program) // 8, ctypes.addressof(rows))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(whole), 0, 0))


def execute(code: str, arguments: list[str]) -> int:
    """Runs Python source as __main__ in this process; returns its exit code."""
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, encoding="utf-8"),
        open(1, "w", encoding="utf-8"),
        open(2, "w", encoding="utf-8"),
    )
    sys.argv, sys.path[:0] = ["main.py", *arguments], [os.getcwd()]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    result = 0
    try:
        exec(compile(code, "main.py", "exec"), module.__dict__)
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            result = end.code or 0
        else:
            print(end.code, file=sys.stderr)
            result = 1
    except BaseException:
        traceback.print_exc()
        result = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            result = result or 1
    return result & 0xFF


main()
