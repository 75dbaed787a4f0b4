"""Keeps processes alive: starts, watches, restarts with backoff, gives up in bounds.

                    probe says yes
    ┌─> STARTING ──────────────────> UP
    │      │ exit, or not ready         │ exit, or a silent job
    │      │ within the deadline        v
    │      ├──────────────────────> ended ── job and code 0 ──> FINISHED
    │      │                          │ bad input (code 2), or too many restarts ──> FAILED
    │      │                          v
    └──────── timer, and room ──── BACKOFF
    any state ── stop() ──> STOPPED

| state    | consumes        | waits for               | unblocked by                      |
|----------|-----------------|-------------------------|-----------------------------------|
| STARTING | a free port     | the probe               | it answers, exit, deadline, stop  |
| UP       | CPU and memory  | its own exit            | exit, stop, a job's long silence  |
| BACKOFF  | nothing         | a timer of 0.5 to 10 s; | the timer, stop; space, or the    |
|          |                 | room on a full disk     | end of an hour without any        |

Exit code 2 (bad input, a recipe that fails), or a verdict that says so, is final for a job, and for
a service that has never been up: starting it again would say the same. A service that was up before
may answer 2 because a dependency is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, cast

from areal.chassis.bad_input import read_verdict
from areal.errors import ArealError, WaitTimeout
from areal_launch.processes.liveness import wait_silent
from areal_launch.processes.log_tail import LogPlace, LogTail, gist, last_error
from areal_launch.processes.probes import wait_ready
from areal_launch.processes.process import Child, ProcessSpec, Spawn, last_lines

ResultT = TypeVar("ResultT")

BAD_INPUT = 2
WINDOW_S = 600.0
"""Window for counting restarts, in seconds. Only the time that a process is up counts, because each
start may take longer than this."""
# Redis, NATS, logs and a small checkpoint begin to fail at once below this.
LEAST_BYTES = 16 * 1024 * 1024
WAIT_S = 3600.0
"""The run ends if a disk stays full for this many seconds."""
LOOK_INTERVAL_S = 1.0
"""Seconds between checks for free space, which nothing announces."""
FreeBytes = Callable[[Path], int]
"""Folder to the bytes that this user may still write there."""


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of the file system that holds `folder`; ignores quotas.

    A folder that was deleted is created again at the next start: its parent tells.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    return shutil.disk_usage(there).free


class ProcessState(StrEnum):
    """The states of a supervised process."""

    STARTING = "starting"
    UP = "up"
    BACKOFF = "backoff"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RemoteProcess:
    """A process that another machine supervises, as far as it is shown here."""

    state: ProcessState
    restarts: int = 0


@dataclass(frozen=True)
class RestartPolicy:
    """How often and how fast a process is started again."""

    max_restarts: int = 5
    """Restarts within `WINDOW_S` seconds of being up; one more ends the run."""
    ready_timeout_s: float = 120.0
    """Seconds from start to ready."""
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    silent_s: float = 50.0
    """A job without a sign of life for this many seconds is killed. Ranks that watch each other
    need a little over 30 s to end, and they name the rank at fault, so they get the time to do so
    first."""
    progress_s: float = 10.0
    """While a process starts, the newest line of its log is shown at this interval, in seconds."""
    steady_s: float = 20.0
    """Seconds after which a process does not count as crash-looping: the next delay is the first
    one again."""


# (level: info | warning | error, process name, text)
Report = Callable[[str, str, str], None]


class StackFailure(ArealError):
    """A process of the stack cannot be kept alive; names it, its log and its last words."""


class Supervised:
    """One process and all its restarts."""

    def __init__(
        self,
        spec: ProcessSpec,
        stack_id: str,
        policy: RestartPolicy,
        report: Report,
        spawn: Spawn = Child.start,
        free: FreeBytes = free_bytes,
    ) -> None:
        self.spec = spec
        self.vital = True
        """Whether the stack ends if this process is given up."""
        self.state = ProcessState.STOPPED
        self.pid = 0
        self.spawned = 0.0
        """Unix seconds at which `pid` was started."""
        self.restarts = 0
        self.since = time.time()
        self._stack_id = stack_id
        self._policy = policy
        self._report = report
        self._spawn = spawn
        self._free = free
        self._up_s = 0.0
        """Seconds for which it was up, over all its restarts."""
        self._recent: deque[float] = deque()
        """The value of `_up_s` at each restart."""
        self._in_a_row = 0
        self._was_up = False
        self._life_begins = LogPlace(spec.log)
        self._stopping = asyncio.Event()
        self._grace_s: float | None = None
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Result: the exit code of a finished job. Exception: StackFailure.
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._set(ProcessState.STARTING)
        self._task = asyncio.create_task(self._run(), name=f"supervise-{self.spec.name}")
        self._task.add_done_callback(self._supervision_ended)

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in here must not look like a process that is still cared for."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(f"its supervision failed: {type(error).__name__}: {error}")

    async def wait_up(self, timeout: float) -> None:
        """Returns once it is up.

        Raises:
            StackFailure: The process failed too often.
            WaitTimeout: Names the process, its log and its last lines.
        """
        since = time.monotonic()
        try:
            await asyncio.wait_for(unless(self._up.wait(), self.ended), timeout)
        except TimeoutError:
            raise WaitTimeout(
                "readiness", on=self.spec.name, since=since, hint=self.log_end()
            ) from None
        if self.ended.done():
            self.ended.result()

    async def stop(self, grace_s: float | None = None) -> None:
        """Ends it for good, within its grace period; idempotent."""
        if self._task is None or self.state in (ProcessState.FINISHED, ProcessState.FAILED):
            return
        self._grace_s = grace_s
        self._stopping.set()
        await asyncio.wait({self._task})  # what it raised has been reported
        self._set(ProcessState.STOPPED)

    def log_end(self) -> str:
        """Returns the end of its log, with the log's name."""
        said = " | ".join(gist(line) for line in last_lines(self.spec.log)) or "(empty)"
        return f"log {self.spec.log}: {said}"

    async def _run(self) -> None:
        while not self._stopping.is_set():
            cause = await self._live_once()
            if cause is None or self._stopping.is_set():
                return
            if not self._has_room():
                if not await self._wait_for_room(cause):
                    return
                continue  # no fault of its own: it does not count as a restart
            delay = self._next_delay()
            if delay is None:
                self._give_up(
                    f"{cause}; {self._policy.max_restarts} restarts within "
                    f"{WINDOW_S / 60:.0f} minutes of being up did not help"
                )
                return
            self.restarts += 1
            # First of all the cause: a reader of the new state finds it in the log.
            self._report(
                "warning",
                self.spec.name,
                f"{cause}; restart {len(self._recent)} of {self._policy.max_restarts} in "
                f"{delay:.1f} s",
            )
            self._set(ProcessState.BACKOFF)
            await self._pause(delay)

    def _has_room(self) -> bool:
        return self._free(self.spec.log.parent) >= LEAST_BYTES

    async def _wait_for_room(self, cause: str) -> bool:
        """Waits until what has ended can write again; False: stopped or given up meanwhile."""
        folder, since = self.spec.log.parent, time.monotonic()
        full = f"the disk of {folder} is full"
        self._report("warning", self.spec.name, f"{cause}; {full}: waiting for space")
        self._set(ProcessState.BACKOFF)
        while not self._has_room():
            if time.monotonic() - since > WAIT_S:
                self._give_up(f"{cause}; {full}, and has been for {WAIT_S / 60:.0f} minutes")
                return False
            await self._pause(LOOK_INTERVAL_S)
            if self._stopping.is_set():
                return False
        waited = time.monotonic() - since
        self._report("info", self.spec.name, f"disk space is available again after {waited:.0f} s")
        return True

    async def _live_once(self) -> str | None:
        """Runs the process once; returns why it ended, None if there is nothing to recover from."""
        self._up.clear()
        self._set(ProcessState.STARTING)
        self._life_begins = LogPlace.end(self.spec.log)
        if self.spec.verdict is not None:
            self.spec.verdict.unlink(missing_ok=True)
        try:
            child = await self._spawn(self.spec, self._stack_id)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return f"{self.spec.name} cannot be started: {error}"
            self._give_up(f"cannot be started: {error}")
            return None
        self.pid, self.spawned = child.pid, time.time()
        # Known to the guard before it can have hidden its environment behind a title.
        self._report("state", self.spec.name, "spawned")
        exited = asyncio.ensure_future(child.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            cause = await self._become_ready(exited, stopping)
            if not cause and not exited.done() and not self._stopping.is_set():
                since = time.monotonic()
                cause = await self._until_silent(exited, stopping)
                lived = time.monotonic() - since
                self._up_s += lived
                if lived >= self._policy.steady_s:
                    self._in_a_row = 0
            if self._stopping.is_set() or not exited.done():
                # The silent one is not asked to leave: it would not hear, or half a minute late.
                await child.stop(0.0 if cause and self._was_up else self._grace_s)
            else:
                await child.sweep()
            code = await exited
        finally:
            stopping.cancel()
            if not exited.done():  # cancelled: leave nothing behind
                await child.stop(0.0)
            exited.cancel()
        self.pid = 0
        return cause or self._judge(code)

    async def _until_silent(
        self, exited: asyncio.Future[int], stopping: asyncio.Future[Any]
    ) -> str:
        """Waits for the end of a life; returns why a job that has not ended counts as dead."""
        if not self.spec.job:  # a service that hangs is waited for: its callers retry
            await asyncio.wait({exited, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return ""
        silent = wait_silent(self.spec.probe, self.pid, self._policy.silent_s)
        why = await unless(silent, exited, stopping)
        return f"{self.spec.name} {why}" if why else ""

    async def _become_ready(
        self, exited: asyncio.Future[int], stopping: asyncio.Future[Any]
    ) -> str:
        """Waits for the probe; returns why it failed, "" when up or when the process has ended."""
        if self.spec.probe is not None:
            limit = self._policy.ready_timeout_s
            telling = asyncio.create_task(self._tell_progress())
            try:
                await unless(wait_ready(self.spec.probe, self.spec.name, limit), exited, stopping)
            except WaitTimeout as error:
                return str(error)
            finally:
                telling.cancel()
            if stopping.done():
                return ""
        if not exited.done():
            self._was_up = True
            self._set(ProcessState.UP)
            self._up.set()
        return ""

    async def _tell_progress(self) -> None:
        """Reports what a process says while it starts, until it is canceled.

        A server may load and compile for minutes; a log that is silent is not reported again.
        """
        tail, since = LogTail(self.spec.log, from_end=True), time.monotonic()
        while not self._stopping.is_set():
            await self._pause(self._policy.progress_s)
            if lines := [line for line in tail.read() if line.strip()]:
                waited = time.monotonic() - since
                self._report(
                    "info", self.spec.name, f"starting for {waited:.0f} s: {gist(lines[-1])}"
                )

    def _judge(self, code: int) -> str | None:
        """Returns what an exit code means; None if it is final."""
        if self._stopping.is_set():
            return None
        if self.spec.job and code == 0:
            self._set(ProcessState.FINISHED)
            self.ended.set_result(0)
            return None
        said = f"signal {-code}" if code < 0 else f"exit code {code}"
        cause = f"{self.spec.name} ended with {said}"
        if self.spec.job and (why := last_error(self._life_begins)):
            cause += f": {why}"
        if self.spec.verdict is not None and (line := read_verdict(self.spec.verdict)):
            self._give_up(f"{self.spec.name}: {line}", words=False)
            return None
        if code == BAD_INPUT and (self.spec.job or not self._was_up):
            self._give_up(cause)
            return None
        return cause

    def _next_delay(self) -> float | None:
        """Returns the seconds to the next start; None: there were too many starts already."""
        while self._recent and self._up_s - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        if len(self._recent) >= self._policy.max_restarts:
            return None
        self._recent.append(self._up_s)
        delay: float = self._policy.first_delay_s * 2.0 ** min(self._in_a_row, 10)
        self._in_a_row += 1
        return min(delay, self._policy.max_delay_s)

    def _give_up(self, cause: str, *, words: bool = True) -> None:
        self._set(ProcessState.FAILED)
        self._report("error", self.spec.name, cause.removeprefix(f"{self.spec.name}: "))
        if not self.ended.done():
            hint = f" ({self.log_end()})" if words else ""
            self.ended.set_exception(StackFailure(f"{cause}{hint}"))
            self.ended.exception()  # read by the waiter; never "was never retrieved"

    def _set(self, state: ProcessState) -> None:
        if state is not self.state:
            self.state = state
            self.since = time.time()
            self._report("state", self.spec.name, state.value)

    async def _pause(self, seconds: float) -> None:
        """Sleeps, until it is stopped."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


async def unless(work: Coroutine[Any, Any, ResultT], *ends: asyncio.Future[Any]) -> ResultT | None:
    """Returns the result of `work`; None, after canceling it, when one of `ends` is done first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return None if any(end.done() for end in ends) else task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # superseded; but never "was never retrieved"


class Supervisor:
    """All processes of a stack by their names, in the order in which they were added."""

    def __init__(
        self, stack_id: str, policy: RestartPolicy, report: Report, spawn: Spawn = Child.start
    ) -> None:
        self.processes: dict[str, Supervised] = {}
        self._stack_id = stack_id
        self._policy = policy
        self._report = report
        self._spawn = spawn

    def start(self, *specs: ProcessSpec, vital: bool = True) -> None:
        """Starts processes without waiting; the stack fails with those that are `vital`."""
        for spec in specs:
            process = Supervised(spec, self._stack_id, self._policy, self._report, self._spawn)
            process.vital = vital
            process.ended.add_done_callback(partial(self._ended, process))
            self.processes[spec.name] = process
            process.start()

    def _ended(self, process: Supervised, ended: asyncio.Future[int]) -> None:
        error, failure = ended.exception(), self._failed
        if error is not None and process.vital and not failure.done():
            failure.set_exception(error)
            failure.exception()  # read by the waiter; never "was never retrieved"

    @cached_property
    def _failed(self) -> asyncio.Future[None]:
        """Ends when the first vital process is given up, whenever it was started."""
        return asyncio.get_running_loop().create_future()

    async def wait_up(self, names: list[str], timeout: float) -> None:
        """Returns when all named processes are up; the first failure of ANY process ends it.

        Raises:
            StackFailure | WaitTimeout: Naming the process, its log and its last lines.
        """
        await self.or_failure(
            asyncio.gather(*(self.processes[name].wait_up(timeout) for name in names))
        )

    async def or_failure(self, waiting: Awaitable[ResultT]) -> ResultT:
        """Awaits something, unless a process is given up first: then raises its StackFailure."""

        async def wait() -> ResultT:
            return await waiting

        failure = self._failed
        result = await unless(wait(), failure)
        if failure.done():
            failure.result()
        return cast("ResultT", result)

    async def stop(self, order: list[list[str]], grace_s: float | None = None) -> None:
        """Stops stage after stage; processes that no stage names go last."""
        named = {name for stage in order for name in stage}
        rest = [name for name in self.processes if name not in named]
        for stage in [*order, rest]:
            stopping = [
                self.processes[name].stop(grace_s) for name in stage if name in self.processes
            ]
            await asyncio.gather(*stopping)
