"""One child process under its keeper: what to start, and one run of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, Self

import areal
from areal.addresses import loopback
from areal.chassis.process import PROCESS_VARIABLE
from areal.security import without_secrets
from areal_launch.processes.descendants import STACK_VARIABLE, end_tagged
from areal_launch.processes.inherited import around_proxies, without_other_launchers
from areal_launch.processes.keeper import keeper_argv
from areal_launch.processes.log_tail import read_end
from areal_launch.processes.probes import Probe

# Many processes share few cores: each one's thread pools would fight the others'. As for NCCL,
# SGLang turns both off in its own processes: a group of trainer and servers may hang otherwise.
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Whatever the locale: what processes write for one another, and names of files, are UTF-8.
    "PYTHONUTF8": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
# A keeper needs some 0.1 s to start its process, and less to end what the process has left.
_KEEPER_S = 60.0
_SWEEP_S = 6.0


@dataclass(frozen=True)
class Node:
    """A node, and the GPUs of it that one process may use.

    Example:
        >>> Node("node07", "10.0.0.7", gpus=("0", "1"))
    """

    name: str = ""
    """Its name in the cluster (Slurm, Ray); empty: the launcher's own."""
    address: str = field(default_factory=loopback)
    """Address at which other processes reach it."""
    gpus: tuple[str, ...] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them: indices, UUIDs or slices (MIG)."""


@dataclass(frozen=True)
class ProcessSpec:
    """What to start and how to know that it is up."""

    name: str
    """Unique in the stack, e.g. "inference-0"."""
    argv: tuple[str, ...]
    log: Path
    """The file to which both output streams are appended; what no longer fits is in its
    predecessor."""
    probe: Probe | None = None
    """Checks whether it is up; None: it is up as soon as it has started."""
    address: str = ""
    """Address at which it serves, for display and stack.json."""
    metrics: str = ""
    """host:port of its /metrics; may be empty."""
    job: bool = False
    """Whether exit code 0 is a success, not a failure to recover from (the trainer)."""
    stop_grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    """The nodes on each of which one is started, the first with node rank 0; empty: beside the
    launcher."""
    verdict: Path | None = None
    """Where a process below it says that its input is bad (see `areal.chassis.bad_input`)."""

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def python_environment() -> dict[str, str]:
    """Returns our environment without other launchers' jobs, this very `areal` importable."""
    source = str(Path(areal.__file__).parent.parent)
    inherited = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != source]
    own = without_other_launchers(os.environ)
    return {**own, "PYTHONPATH": os.pathsep.join([source, *inherited])}


def child_environment(stack_id: str, process: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns a child's environment: ours without secrets, few threads, the stack's tags."""
    tags = {STACK_VARIABLE: stack_id, PROCESS_VARIABLE: process}
    inherited = around_proxies(without_secrets(python_environment()))
    return {**inherited, **CHILD_ENVIRONMENT, **tags, **extra}


class Child:
    """One life of a process, in a session of its own so that the terminal's Ctrl-C spares it."""

    def __init__(self, spec: ProcessSpec, stack_id: str, keeper: asyncio.subprocess.Process):
        self._spec = spec
        self._stack_id = stack_id
        self._keeper = keeper
        self.pid = 0

    @classmethod
    async def start(cls, spec: ProcessSpec, stack_id: str) -> Self:
        """Starts the process; raises OSError when its program cannot be executed."""
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        try:
            with spec.log.open("ab") as log:
                keeper = await asyncio.create_subprocess_exec(
                    *keeper_argv(spec.log, spec.argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=writing,
                    stderr=log,
                    env=child_environment(stack_id, spec.name, spec.environment),
                    start_new_session=True,
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        child = cls(spec, stack_id, keeper)
        try:
            child.pid = await child._hear_pid(reading)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                keeper.kill()  # and the process with it
            await keeper.wait()
            raise
        return child

    async def _hear_pid(self, pipe: int) -> int:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            partial(asyncio.StreamReaderProtocol, reader), os.fdopen(pipe, "rb", buffering=0)
        )
        try:
            said = await asyncio.wait_for(reader.readline(), _KEEPER_S)
        except TimeoutError:
            why = f"its keeper process did not start it within {_KEEPER_S:.0f} s"
            raise OSError(errno.ETIMEDOUT, why) from None
        finally:
            transport.close()
        word, _, number = said.decode().strip().partition(" ")
        if word == "error":
            raise OSError(int(number), os.strerror(int(number)), self._spec.argv[0])
        if word != "pid":
            raise OSError(
                errno.ECHILD, f"its keeper process ended with code {await self._keeper.wait()}"
            )
        return int(number)

    async def wait(self) -> int:
        """Returns the exit code, once nothing of it is left; -N when signal N ended it."""
        return await self._keeper.wait()

    async def stop(self, grace_s: float | None = None) -> int:
        """Sends SIGTERM, then SIGKILL to it and all its descendants; returns the exit code.

        Args:
            grace_s: Seconds between the two; None: the spec's.
        """
        grace_s = self._spec.stop_grace_s if grace_s is None else grace_s
        if grace_s > 0 and self._keeper.returncode is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._keeper.wait(), grace_s)
        await self.sweep()
        return await self._keeper.wait()

    async def sweep(self) -> None:
        """Kills what is left of it; returns once its keeper has ended all the rest."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._keeper.wait(), _SWEEP_S)
        await asyncio.to_thread(end_tagged, self._stack_id, self._spec.name)

    def _signal(self, signum: signal.Signals) -> None:
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            return  # gone: that is what we want


class Life(Protocol):
    """What the supervisor needs of a process that was started: `Child`, or one elsewhere."""

    pid: int
    """Process id if it runs on this machine; 0: it runs on another."""

    async def wait(self) -> int: ...

    async def stop(self, grace_s: float | None = None) -> int: ...

    async def sweep(self) -> None: ...


Spawn = Callable[[ProcessSpec, str], Awaitable[Life]]
"""Starts a process of a stack, given the stack's id."""


def last_lines(log: Path, count: int = 3, limit: int = 16384) -> list[str]:
    """Returns the end of a log: at most `count` lines out of its last `limit` bytes."""
    text = read_end(log, limit).decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-count:]
