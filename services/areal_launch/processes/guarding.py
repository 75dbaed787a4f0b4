"""The launcher's side of the guard: starts it, keeps it alive, lets it go."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from areal.chassis import endless
from areal.chassis.process_name import PROCESS_VARIABLE
from areal_launch.processes.descendants import STACK_VARIABLE
from areal_launch.processes.process import child_environment
from areal_launch.processes.supervisor import Report


class Guard:
    """A guard process whose stdin is held open for as long as this process lives."""

    def __init__(self, stack_id: str, stack_file: Path, lock: int | None, report: Report) -> None:
        """`lock`: the run's lock, if it is held: the guard keeps it until it has cleaned up."""
        self._stack_id = stack_id
        self._stack_file = stack_file
        self._lock = lock
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self.pid = 0

    async def start(self) -> None:
        """Returns when the guard exists; from then on nothing can be orphaned."""
        await self._spawn()
        self._task = endless.keep(self._keep(), "guard", self._unguarded)

    async def stop(self) -> None:
        """Closes its stdin: it ends what is left of the stack (normally nothing) and exits."""
        if self._task is not None:
            self._task.cancel()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await asyncio.wait_for(self._process.wait(), 30.0)

    async def _spawn(self) -> None:
        environment = child_environment(self._stack_id, "guard", {})
        # Untagged: it must not find itself.
        for variable in (STACK_VARIABLE, PROCESS_VARIABLE):
            del environment[variable]
        self._process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "areal_launch.processes.guard",
                str(self._stack_file.resolve()),
            ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            pass_fds=() if self._lock is None else (self._lock,),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def _unguarded(self, error: BaseException) -> None:
        text = f"there is no guard any more: {type(error).__name__}: {error}"
        self._report("error", "guard", text)

    async def _keep(self) -> None:
        while True:
            assert self._process is not None  # `start` has made it
            code = await self._process.wait()
            self._report("warning", "guard", f"guard ended with exit code {code}; started again")
            try:
                await self._spawn()
                self._report("state", "guard", "up")
            except OSError as error:  # no memory, or no process number, for now
                self._report("warning", "guard", f"cannot be started: {error}; tried again")
            # A guard that cannot live must not make a busy loop.
            await asyncio.sleep(1.0)
