"""The process that outlives a launcher killed with -9, and ends what it left behind.

    launcher ──pipe──> guard (stdin)
       │ dies: the kernel closes its end of the pipe
       v
    guard reads EOF ──> SIGTERM to every process of the stack, SIGKILL after the grace
                    ──> removes the stack's secrets ──> exit

The launcher starts it before any other child and holds the only writing end. A child that is
being started still holds a copy until its exec, so EOF cannot come before it carries its tag.
It is told the stack's id at its start: the run folder may have been deleted when it is needed.
The guard also holds the run's lock: a new stack of the trial cannot start before it is done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from areal.chassis import endless
from areal.errors import NotFound
from areal.security import without_secrets
from areal_launch.processes.descendants import end_tagged, leaders_of
from areal_launch.processes.process import python_environment
from areal_launch.processes.supervisor import Report
from areal_launch.run_folder import RunFolder, remove_secrets

_GRACE_S = 8.0


class Guard:
    """A guard process whose stdin is held open for as long as this process runs."""

    def __init__(self, stack_file: Path, stack_id: str, lock: int | None, report: Report) -> None:
        """`lock` is the run's lock, if held; the guard keeps it until it has cleaned up."""
        self._stack_file = stack_file
        self._stack_id = stack_id
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
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, str(self._stack_file.resolve()), self._stack_id),
            str(-1 if self._lock is None else self._lock),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=without_secrets(python_environment()),  # without the stack's tag
            pass_fds=() if self._lock is None else (self._lock,),
            start_new_session=True,
        )
        self.pid = self._process.pid

    def _unguarded(self, error: BaseException) -> None:
        text = f"the orphan guard is no longer supervised: {type(error).__name__}: {error}"
        self._report("error", "guard", text)

    async def _keep(self) -> None:
        while True:
            assert self._process is not None  # `start` has made it
            code = await self._process.wait()
            self._report("warning", "guard", f"guard exited with code {code}; restarting it")
            try:
                await self._spawn()
                self._report("state", "guard", "up")
            except OSError as error:  # no memory, or no process number, for now
                self._report("warning", "guard", f"cannot be started: {error}; retrying")
            # A guard that cannot start must not cause a busy loop.
            await asyncio.sleep(1.0)


def main(argv: list[str]) -> int:
    """Waits for EOF on stdin, then ends a stack.

    Args:
        argv: The stack's stack.json, its id, the descriptor of its lock (-1: none), and (default:
            8) the seconds that processes get to end by themselves.
    """
    # The terminal's and the launcher's signals are not for us: only the end of the pipe is.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    folder, stack_id = RunFolder(Path(argv[0]).parent), argv[1]
    lock = int(argv[2])
    grace_s = float(argv[3]) if len(argv) > 3 else _GRACE_S
    while os.read(0, 4096):
        pass
    try:
        end_tagged(stack_id, grace_s=grace_s, leaders=_leaders(folder, stack_id))
    finally:
        if not folder.replaced(lock):
            remove_secrets(folder)
    return 0


def _leaders(folder: RunFolder, stack_id: str) -> dict[int, float]:
    """The session leaders that stack.json names; none if it is gone, or another stack's."""
    try:
        stack = folder.read_stack()
        return leaders_of(stack) if stack.get("stack_id") == stack_id else {}
    except (NotFound, ValueError, TypeError, AttributeError):
        # Its keepers carry the stack's tag, and all else descends from them.
        return {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
