"""Inside a box: forks a process for each program, in namespaces of its own, and watches it.

A bare interpreter runs this file: it imports nothing but the standard library.
Requests and answers are JSON after four bytes of length, one at a time:

    zygote (stays)  ── fork ──> guard    new user, pid, mount and IPC namespace
                                  └───> init     pid 1 in there: fresh /proc, /tmp and /dev/shm
                                          └───> program   no capability, rlimits, seccomp

When init ends, the kernel kills whatever the program left behind: daemons, forks, everything.

| consumes | waits for | unblocked by |
|---|---|---|
| the program's CPU, memory, disk | its end | its end, or the first limit that it passes |
"""

import base64
import ctypes
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEW = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000  # user, pid, mount, IPC
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 4, 24, 38, 22
NOBODY = 65534
LOOK_S = 0.02
AT_HAND = "bisect collections copy functools heapq itertools math random re string"
"""What short programs import most: imported before the first fork."""


def main() -> None:
    """Serve requests until the pipe closes."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if os.getuid() == 0:
        check(LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # Nothing in the box can read this process, or be traced by what it runs.
    LIBC.prctl(PR_SET_DUMPABLE, 0)
    if os.path.isdir("/packages"):
        sys.path.append("/packages")
    for name in AT_HAND.split():
        import_module(name)
    program = base64.b64decode((receive(requests) or {})["seccomp"])
    send(answers, {"ready": True})
    while (request := receive(requests)) is not None:
        send(answers, run(request, program))


def receive(fd: int) -> dict[str, Any] | None:
    """Reads the next message; None at the end."""
    head = exactly(fd, 4)
    if not head:
        return None
    message: dict[str, Any] = json.loads(exactly(fd, int.from_bytes(head, "big")))
    return message


def exactly(fd: int, size: int) -> bytes:
    """Reads exactly that many bytes; none at the end."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(fd: int, message: dict[str, Any]) -> None:
    """Sends one whole message."""
    body = json.dumps(message).encode()
    rest = len(body).to_bytes(4, "big") + body
    while rest:
        rest = rest[os.write(fd, rest) :]


def run(request: dict[str, Any], program: bytes) -> dict[str, Any]:
    """Run one program to its end or to a limit."""
    began = time.monotonic()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    said_read, said_write = os.pipe()  # what went wrong before the program began
    child = os.fork()
    if child == 0:
        guard(request, program, (out_write, err_write), said_write)
    for fd in (out_write, err_write, said_write):
        os.close(fd)
    kept = {out_read: bytearray(), err_read: bytearray()}
    cause, peak = watch(request, child, kept, began)
    status: int = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(said_read, 1 << 12)
    for fd in (out_read, err_read, said_read):
        os.close(fd)
    if others():
        raise SystemExit("a program outlived its namespace")  # its box is closed
    return {
        "cause": cause,
        "exit_code": 128 - status if status < 0 else status,
        "failed": said.decode(errors="replace"),
        "stdout": bytes(kept[out_read]).decode(errors="replace"),
        "stderr": bytes(kept[err_read]).decode(errors="replace"),
        "seconds": time.monotonic() - began,
        "memory": peak,
    }


def watch(
    request: dict[str, Any], child: int, kept: dict[int, bytearray], began: float
) -> tuple[str, int]:
    """Read output and count use until the guard ends: (the limit that was passed, peak bytes)."""
    limit, cause, peak = request["output_bytes"], "", 0
    end, looked = began + request["seconds"], 0.0
    guarded = os.pidfd_open(child)
    with selectors.DefaultSelector() as selector:
        for fd in (guarded, *kept):
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(LOOK_S):
                part = b"" if key.fd == guarded else os.read(key.fd, 1 << 16)
                if not part:  # the guard ended, or the last writer
                    selector.unregister(key.fd)
                    continue
                kept[key.fd] += part[: limit - sum(map(len, kept.values()))]
                if sum(map(len, kept.values())) >= limit:
                    cause = cause or "output"
            now = time.monotonic()
            if now > looked + LOOK_S:
                looked, found = now, others()
                used = sum(memory(pid) for pid in found)
                peak = max(peak, used)
                if used > request["memory_bytes"]:
                    cause = cause or "memory"
                if len(found) > request["processes"] + 2:  # guard and init
                    cause = cause or "processes"
            if now > end and guarded in {key.fd for key in selector.get_map().values()}:
                cause = cause or "time"
            if cause:
                kill_all(child)
    os.close(guarded)
    return cause, peak


def others() -> list[int]:
    """Processes of the running program: all in this pid namespace but its init and this one."""
    ours = {1, os.getpid()}
    return [
        pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) not in ours
    ]


def memory(pid: int) -> int:
    """Bytes of a process that no file backs."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def kill_all(guard: int) -> None:
    """Kills all processes. Init is among them and takes the rest along; the guard sees its end."""
    found = others()
    for pid in found:
        if pid != guard or len(found) == 1:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def check(result: int) -> None:
    """Raises OSError for what a function of libc returned if it failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def exit_code(pid: int) -> int:
    """Waits for a child; a signal is 128 plus its number, as in a shell."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def guard(request: dict[str, Any], program: bytes, output: tuple[int, int], said: int) -> NoReturn:
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
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
        LIBC.prctl(PR_SET_DUMPABLE, 0)
        pid = os.fork()
        if pid == 0:
            init(request, program, output, said)
        for fd in (*output, said):
            os.close(fd)
        os._exit(exit_code(pid))
    except BaseException as error:
        os.write(said, f"namespaces: {error!r}".encode())
        os._exit(125)


def init(request: dict[str, Any], program: bytes, output: tuple[int, int], said: int) -> NoReturn:
    """Pid 1: mounts what the program sees, starts it, reaps, and ends with it."""
    try:
        os.setsid()
        check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        check(LIBC.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
        size = f"size={request['disk_bytes']},nr_inodes=20000,mode=0700".encode()
        for folder in (b"/tmp", b"/dev/shm"):
            check(LIBC.mount(b"tmpfs", folder, b"tmpfs", MS_NOSUID | MS_NODEV, size))
        os.chdir("/tmp")
        for name, content in request["files"].items():
            path = os.path.normpath(os.path.join("/tmp", name))
            if not path.startswith("/tmp/"):
                raise ValueError(f"file {name!r}: expected a path inside the box's folder")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(content)
        stdin = os.memfd_create("stdin")
        os.write(stdin, request["stdin"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            become_program(request, program, (stdin, *output), said)
        os.closerange(0, 1024)
        os._exit(exit_code(pid))
    except BaseException as error:
        os.write(said, f"init: {error!r}".encode())
        os._exit(125)


def become_program(
    request: dict[str, Any], program: bytes, streams: tuple[int, ...], said: int
) -> NoReturn:
    """The program itself: gives up all rights, then runs."""
    try:
        os.nice(19)  # the watching comes first, also beside a fork bomb
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
        os.closerange(3, said)
        os.closerange(said + 1, 1024)
        for name, value in (
            (resource.RLIMIT_AS, request["memory_bytes"] + (256 << 20)),
            (resource.RLIMIT_NPROC, request["processes"] + 2),
            (resource.RLIMIT_FSIZE, request["disk_bytes"]),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(name)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(name, (most, most))
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
        if request["argv"]:
            os.set_inheritable(said, False)
            os.execvp(request["argv"][0], request["argv"])
        os.close(said)
    except BaseException as error:
        os.write(said, f"program: {error!r}".encode())
        os._exit(125)
    os._exit(execute(request["code"]))


def execute(code: str) -> int:
    """Run Python source as __main__ in this process; its exit code."""
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    sys.argv, sys.path[:0] = ["main.py"], ["/tmp"]
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
