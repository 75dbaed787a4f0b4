"""Pid 1 of a session: starts programs on request, passes their output on, and keeps the limits.

Its /tmp and what programs leave in it last as long as the session. A bare interpreter runs this
file inside a box; it imports nothing but the standard library.

| to it                                   | from it                                |
|-----------------------------------------|----------------------------------------|
| start: id, code or argv, limits         | id, pid                                |
| input: id, data, eof                    | id, stdout or stderr                   |
| signal: id, number                      | id, ended: exit code, cause, peak      |
| close, or the end of the pipe           | nothing: it ends, and all with it      |

| consumes                      | waits for                      | unblocked by                  |
|-------------------------------|--------------------------------|-------------------------------|
| programs' CPU, memory, disk   | requests, output, program ends | any of them; 20 ms, if        |
|                               |                                | anything runs, for the limits |
"""

import base64
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LOOK_S = 0.02
KILL_S = 2.0


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


class Program:
    """A command that was started: a process that leads a process session of its own."""

    def __init__(self, request: dict[str, Any], pid: int, streams: dict[int, str]) -> None:
        self.id: int = request["start"]
        self.pid = pid
        self.last: bool = request["last"]
        self.began = time.monotonic()
        self.end = self.began + request["seconds"]
        self.room: int = request["output_bytes"]
        self.streams = streams
        self.stdin = -1
        self.pending = bytearray()
        self.eof = False
        self.said = -1
        self.guarded = -1
        self.cause = ""
        self.peak = 0


class Session:
    """All programs of one lease, and the limits that they share."""

    def __init__(
        self,
        requests: int,
        answers: int,
        limits: dict[str, Any],
        become: Callable[[dict[str, Any], tuple[int, int, int], int], None],
        *,
        plain: bool,
    ) -> None:
        self._requests, self._answers = requests, answers
        self._limits, self._become, self._plain = limits, become, plain
        self._programs: dict[int, Program] = {}
        self._by_fd: dict[int, Program] = {}
        self._selector = selectors.DefaultSelector()
        self._looked = 0.0
        self._left = False
        """Whether daemons are running: processes that no program waits for."""

    def serve(self) -> None:
        """Serves until told to end; then nothing that it started is left."""
        self._selector.register(self._requests, selectors.EVENT_READ)
        while True:
            busy = bool(self._programs) or self._left
            for key, _ in self._selector.select(LOOK_S if busy else None):
                if key.fd == self._requests:
                    if not self._take():
                        self._kill_all()
                        return
                elif (program := self._by_fd.get(key.fd)) is not None:
                    self._pass(program, key.fd)
            if time.monotonic() > self._looked + LOOK_S:
                self._look()
            if self._reap():
                self._kill_all()
                return

    def _take(self) -> bool:
        """Handles one request; returns False after the last one."""
        request = receive(self._requests)
        if request is None or "close" in request:
            return False
        if "start" in request:
            self._start(request)
            return True
        program = self._programs.get(request["id"])
        if program is not None and "signal" in request:
            if request["signal"] == signal.SIGKILL:
                self._kill(program, "")
            else:
                with suppress(ProcessLookupError):
                    os.kill(program.pid, request["signal"])
        elif program is not None:
            program.pending += base64.b64decode(request["input"])
            program.eof = program.eof or request["eof"]
            self._feed(program)
        return True

    def _start(self, request: dict[str, Any]) -> None:
        pipes = [os.pipe() for _ in range(4)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write), said = pipes
        pid = os.fork()
        if pid == 0:
            self._become(request, (in_read, out_write, err_write), said[1])
        for fd in (in_read, out_write, err_write, said[1]):
            os.close(fd)
        program = Program(request, pid, {out_read: "stdout", err_read: "stderr"})
        program.stdin, program.said = in_write, said[0]
        program.guarded = os.pidfd_open(pid)
        self._programs[program.id] = program
        for fd in (out_read, err_read, in_write):
            os.set_blocking(fd, False)
        for fd in (out_read, err_read, program.guarded):
            self._by_fd[fd] = program
            self._selector.register(fd, selectors.EVENT_READ)
        send(self._answers, {"id": program.id, "pid": pid})

    def _feed(self, program: Program) -> None:
        """Writes what the program's standard input takes now; the rest when it takes more."""
        if program.stdin < 0:
            return
        try:
            while program.pending:
                del program.pending[: os.write(program.stdin, program.pending[: 1 << 16])]
        except BlockingIOError:
            if program.stdin not in self._by_fd:
                self._by_fd[program.stdin] = program
                self._selector.register(program.stdin, selectors.EVENT_WRITE)
            return
        except OSError:  # it does not read any more
            program.eof = True
        if self._by_fd.pop(program.stdin, None):
            self._selector.unregister(program.stdin)
        if program.eof:
            program.pending.clear()
            os.close(program.stdin)
            program.stdin = -1

    def _pass(self, program: Program, fd: int) -> None:
        """Passes data on: a pipe has room or input, or has ended."""
        if fd == program.stdin:
            self._feed(program)
            return
        over = fd == program.guarded or not self._read(program, fd)
        if over and fd in self._by_fd:  # a program that ended is collected by _reap
            del self._by_fd[fd]
            self._selector.unregister(fd)

    def _read(self, program: Program, fd: int) -> bool:
        """Passes on what a stream has; False: there is no more, at least now."""
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        kept = part[: max(0, program.room)]
        program.room -= len(part)
        if kept:
            data = base64.b64encode(kept).decode()
            send(self._answers, {"id": program.id, program.streams[fd]: data})
        if program.room < 0:
            self._kill(program, "output")
        return bool(part)

    def _look(self) -> None:
        """Counts what runs, and ends what passed a limit."""
        found = self._processes()
        used = sum(memory(pid) for pid in found)
        used += sum(len(each.pending) for each in self._programs.values())
        for program in self._programs.values():
            program.peak = max(program.peak, used)
        cause = ""
        if used > self._limits["memory_bytes"]:
            cause = "memory"
        elif len(found) > self._limits["processes"]:
            cause = "processes"
        if cause:
            for program in self._programs.values():
                program.cause = program.cause or cause
            self._kill_all()
        self._looked = now = time.monotonic()
        self._left = bool(found)
        for program in list(self._programs.values()):
            if now > program.end:
                self._kill(program, "time")

    def _reap(self) -> bool:
        """Collects what ended; True: the program that was to be the session's last did."""
        by_pid = {program.pid: program for program in self._programs.values()}
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return False
            program = by_pid.get(pid)
            if program is not None:
                self._end(program, status, used.ru_utime + used.ru_stime)
                if program.last:
                    return True

    def _end(self, program: Program, status: int, cpu: float) -> None:
        """Says how a program ended, after the rest of its output."""
        for fd in program.streams:
            while self._read(program, fd):
                pass
        said = os.read(program.said, 1 << 12)
        for fd in (*program.streams, program.guarded, program.stdin, program.said):
            if self._by_fd.pop(fd, None):
                self._selector.unregister(fd)
            if fd >= 0:
                os.close(fd)
        del self._programs[program.id]
        code = os.waitstatus_to_exitcode(status)
        spent = code == -signal.SIGKILL and cpu >= self._limits["cpu_seconds"]
        if spent or code == -signal.SIGXCPU:
            program.cause = program.cause or "cpu"
        self._left = True  # until the next look
        ended = {
            "cause": program.cause,
            "exit_code": 128 - code if code < 0 else code,
            "failed": said.decode(errors="replace"),
            "seconds": time.monotonic() - program.began,
            "memory": program.peak,
        }
        send(self._answers, {"id": program.id, "ended": ended})

    def _kill(self, program: Program, cause: str) -> None:
        """Ends a program and all that did not leave its process session; daemons stay."""
        program.cause = program.cause or cause
        if program.last:
            self._kill_all()
            return
        until = time.monotonic() + KILL_S
        while family := [
            pid
            for pid in self._processes()
            if (fields := stat(pid))
            and fields[0] != "Z"
            and program.pid in (pid, int(fields[3]))  # it, or of its process session
        ]:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:  # it forks faster than this
                self._kill_all()
                return

    def _kill_all(self) -> None:
        if not self._plain:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # in this namespace: all but this process
            return
        until = time.monotonic() + KILL_S
        while found := [pid for pid in self._processes() if (s := stat(pid)) and s[0] != "Z"]:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
            if time.monotonic() > until:
                return

    def _processes(self) -> list[int]:
        """Returns the pids of all processes of this session except this one."""
        found = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
        if not self._plain:
            return list(found)
        parents = {pid: int(fields[1]) for pid in found if (fields := stat(pid))}
        ours, more = set(), {os.getpid()}
        while more:
            ours |= more
            more = {pid for pid, parent in parents.items() if parent in more}
        return list(ours - {os.getpid()})


def stat(pid: int) -> list[str]:
    """Returns state, parent, process group, session, …; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def memory(pid: int) -> int:
    """Returns the bytes of a process that no file on disk backs: its own, and shared ones."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            lines = [line.split() for line in file if line.startswith(("RssAnon", "RssShmem"))]
        return sum(int(line[1]) << 10 for line in lines)
    except (OSError, IndexError):
        return 0
