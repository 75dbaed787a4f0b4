r"""Boxes on this machine: bubblewrap around an interpreter that forks a process for each program.

    sandbox = Sandbox()                        # starts nothing
    outcome = await sandbox.run("print(6 * 7)")
    outcome.stdout                             # "42\n"

A program sees the interpreter and its standard library, read-only, an empty folder (its current
one), no network and no other process. It may use what `Limits` allows; what it leaves behind ends
with it. A box is reused: the namespaces of a program are not. docs/isolation.md says what this
keeps out, and what not.

| consumes | waits for | unblocked by |
|---|---|---|
| a box for each of `slots` programs at a time | a free box | a program's end; its limit of time |
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from areal.errors import CannotStart, InvalidInput
from areal.rewards.sandbox.syscalls import seccomp_program

_START_S = 20.0
_GRACE_S = 15.0
"""On top of a program's own seconds, for a machine that is busy; then the whole box is killed."""
_NOBODY = 65534
_FOLDER = "/tmp"  # noqa: S108  (of the box)
_SYSTEM = ("/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")


@dataclass(frozen=True)
class Limits:
    """What one program may use. All its processes together, unless it says otherwise."""

    seconds: float = 10.0
    """Of wall time."""
    memory_mb: int = 512
    processes: int = 32
    output_kb: int = 256
    """Of stdout and stderr together."""
    disk_mb: int = 64
    """Of /tmp, and as much of /dev/shm."""

    def __post_init__(self) -> None:
        """Raises InvalidInput for a limit that is not above zero."""
        for name, value in asdict(self).items():
            if not value > 0:
                raise InvalidInput(f"Limits.{name}: {value!r}: expected a number above 0")


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int
    """Of the program; 128 and a signal's number if one ended it."""
    cause: Literal["", "time", "memory", "processes", "output"]
    """The limit that ended it; empty: it ended by itself."""
    stdout: str
    stderr: str
    seconds: float
    memory: int
    """Peak in bytes, as sampled every 20 ms; 0 for a shorter program."""


class Sandbox:
    """Runs programs, `slots` at a time; safe to use from any task of one event loop."""

    def __init__(self, *, slots: int = 0, packages: Path | None = None) -> None:
        """Starts nothing.

        Args:
            slots: Programs at a time; 0: the number of this process's cores.
            packages: A folder of packages (site-packages) that programs may import, read-only.
                If this process is root's, they see of it what everybody may see.
        """
        self._count = slots or len(os.sched_getaffinity(0))
        self._packages = packages
        self._free: asyncio.Semaphore | None = None
        self._idle: list[_Box] = []

    async def run(
        self,
        code: str = "",
        *,
        argv: Sequence[str] = (),
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        limits: Limits | None = None,
    ) -> Outcome:
        """Run Python source, or a command, to its end or to a limit.

        Args:
            code: Python source; runs as `__main__`.
            argv: A command instead, e.g. `["sh", "-c", "…"]`.
            files: Content of text files in the program's folder.
            stdin: What it reads.
            limits: See Limits.

        Raises:
            InvalidInput: neither or both of code and argv, or a file outside the folder.
            CannotStart: bubblewrap is missing, or this machine allows no user namespaces.
        """
        if bool(code) == bool(argv):
            raise InvalidInput("Sandbox.run: expected either code or argv")
        limits = limits or Limits()
        request = {
            "code": code,
            "argv": list(argv),
            "files": dict(files or {}),
            "stdin": stdin,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_mb << 20,
            "processes": limits.processes,
            "output_bytes": limits.output_kb << 10,
            "disk_bytes": limits.disk_mb << 20,
        }
        if self._free is None:
            self._free = asyncio.Semaphore(self._count)
        async with self._free:
            box = self._idle.pop() if self._idle else _Box(self._packages)
            try:
                answer = await box.ask(request, limits.seconds + _GRACE_S)
            except BaseException:  # also when the caller gives up: what runs must end
                await box.close()
                raise
            if box.lost:
                await box.close()
            else:
                self._idle.append(box)
        if failed := answer.pop("failed"):
            if "expected a path inside" in failed or "FileNotFoundError" in failed:
                raise InvalidInput(f"Sandbox.run: {failed}")
            raise CannotStart(f"sandbox: {failed}")
        return Outcome(**answer)

    async def close(self) -> None:
        """End all idle boxes; those in use end with this process."""
        while self._idle:
            await self._idle.pop().close()


class _Box:
    """One bubblewrap with a zygote in it."""

    def __init__(self, packages: Path | None) -> None:
        self._packages = packages
        self._process: asyncio.subprocess.Process | None = None
        self.lost = False
        """It does not answer any more."""

    async def ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        """One program; a box that died since its last one is made again."""
        if self._process is not None and self._process.returncode is not None:
            self._process = None
        if self._process is None:
            self._process = await self._start()
        try:
            async with asyncio.timeout(patience):
                await self._send(request)
                return await self._receive()
        except TimeoutError:
            cause = "time"
        except (asyncio.IncompleteReadError, ConnectionError):
            cause = "memory"  # the kernel took the whole box
        self.lost = True
        return {
            "exit_code": 137,
            "cause": cause,
            "failed": "",
            "stdout": "",
            "stderr": "the whole box was ended",
            "seconds": patience,
            "memory": 0,
        }

    async def close(self) -> None:
        """Kill it, and with it all that is inside."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()
        if process.stdin:
            process.stdin.close()

    async def _start(self) -> asyncio.subprocess.Process:
        command, program = bubblewrap(self._packages), seccomp_program()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/"
        )
        self._process = process
        try:
            async with asyncio.timeout(_START_S):
                await self._send({"seccomp": base64.b64encode(program).decode()})
                await self._receive()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self.close()
            said = (await process.stderr.read()).decode(errors="replace") if process.stderr else ""
            raise CannotStart(f"sandbox: {_advice(said) or repr(error)}") from None
        return process

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        self._process.stdin.write(len(body).to_bytes(4, "big") + body)
        await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(4)
        body = await self._process.stdout.readexactly(int.from_bytes(head, "big"))
        message: dict[str, Any] = json.loads(body)
        return message


def bubblewrap(packages: Path | None) -> list[str]:
    """Returns the command of a box; raises CannotStart if bubblewrap is missing."""
    found = shutil.which("bwrap")
    if not found:
        raise CannotStart("sandbox: no `bwrap`; install bubblewrap (apt-get install bubblewrap)")
    base = Path(sys.base_prefix).resolve()
    inside = base if base.is_relative_to("/usr") else Path("/python")
    command = [found, "--die-with-parent", "--new-session", "--clearenv"]
    command += [f"--unshare-{each}" for each in ("ipc", "pid", "net", "uts", "cgroup-try")]
    if os.getuid() == 0:
        # Root would stay root in a user namespace, and /proc/sys would obey it. It needs none to
        # make the others; the zygote mounts /proc and becomes nobody.
        for capability in ("SYS_ADMIN", "SETUID", "SETGID"):
            command += ["--cap-add", f"CAP_{capability}"]
        command += ["--dir", "/proc"]
    else:
        command += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
        command += ["--proc", "/proc"]
    command += ["--hostname", "box", "--perms", "0755", "--dir", "/etc"]
    command += ["--ro-bind", "/usr", "/usr"]
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    if inside != base:
        command += ["--ro-bind", str(base), str(inside)]
    if packages is not None:
        command += ["--ro-bind", str(packages), "/packages"]
    command += ["--ro-bind", str(Path(__file__).with_name("zygote.py")), "/zygote.py"]
    command += ["--dev", "/dev", "--tmpfs", _FOLDER, "--chdir", _FOLDER]
    for name, value in (
        ("PATH", f"{inside}/bin:/usr/local/bin:/usr/bin:/bin"),
        ("LD_LIBRARY_PATH", f"{inside}/lib"),
        ("HOME", _FOLDER),
        ("LANG", "C.UTF-8"),
        ("OMP_NUM_THREADS", "1"),
    ):
        command += ["--setenv", name, value]
    python = inside / "bin" / f"python3.{sys.version_info.minor}"
    return [*command, str(python), "-I", "-B", "/zygote.py"]


def _advice(said: str) -> str:
    said = said.strip()[-500:]
    if "namespace" in said or "Operation not permitted" in said or "uid map" in said:
        return (
            f"{said}; expected a machine that lets unprivileged users create namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0, "
            "kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    return said
