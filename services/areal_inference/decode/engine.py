"""The engine's thread: takes requests and commands from the event loop, runs the scheduler.

::

    event loop --submit/call--> inbox --> [engine thread: commands, then one decode step] --+
        ^                                                                                   |
        +---------------- one call_soon_threadsafe per step: wake the requests <------------+

    | consumes             | waits for                      | unblocked by                        |
    |----------------------|--------------------------------|-------------------------------------|
    | inbox                | anything to do (no deadline:   | submit(), call(), stop()            |
    |                      | idle is its normal state)      |                                     |
    | exclusive commands   | Scheduler.quiet, up to the     | pause, or the last running request; |
    |                      | caller's deadline              | at the deadline: the caller's error |

The scheduler and the model belong to this thread alone, so nothing in them needs a lock: a pause,
an abort or a weight swap takes effect between two decode steps.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from areal.errors import Unavailable
from areal_inference.decode.request import Request
from areal_inference.decode.scheduler import Scheduler

T = TypeVar("T")
Command = Callable[[Scheduler], Any]


@dataclass(slots=True)
class _Call:
    """A command in the inbox, and who waits for its result."""

    command: Command
    future: asyncio.Future[Any] | None = None
    exclusive: bool = False

    @property
    def given_up(self) -> bool:
        return self.future is not None and self.future.cancelled()


class EngineError(Unavailable):
    """The engine has stopped or failed; the message says why."""


class Engine:
    """Runs a scheduler in its own thread; every method is called on the event loop.

    Args:
        build: Makes the scheduler (loads the model); runs in the engine's thread.
        on_failure: Called on the event loop when the thread dies of an exception.
    """

    def __init__(self, build: Callable[[], Scheduler], on_failure: Callable[[Exception], None]):
        self._build = build
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._condition = threading.Condition()
        self._inbox: list[Request | _Call] = []
        self._exclusive: deque[_Call] = deque()
        self._stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.scheduler: Scheduler | None = None
        self.last_step_at = time.monotonic()

    async def start(self) -> None:
        """Loads the model; raises what the build raised."""
        self._thread.start()
        await self._started

    async def stop(self, timeout: float) -> None:
        """Ends the thread after the step it is in.

        Raises:
            EngineError: It did not end within `timeout` seconds.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            await self._loop.run_in_executor(None, self._thread.join, timeout)
        if self._thread.is_alive():
            raise EngineError(f"engine thread: still in a step {timeout:g} s after stop")

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests; each request's `woken` is set when it finishes (or streams)."""
        with self._condition:
            self._check_alive()
            self._inbox.extend(requests)
            self._condition.notify()

    def tell(self, command: Command) -> None:
        """Runs a command between two decode steps without waiting for it, if not stopped."""
        with self._condition:
            self._inbox.append(_Call(command))
            self._condition.notify()

    async def call(
        self, command: Callable[[Scheduler], T], timeout: float, *, exclusive: bool = False
    ) -> T:
        """Runs a command between two decode steps and returns its result.

        Args:
            command: Called with the scheduler, in the engine's thread.
            timeout: Seconds.
            exclusive: Wait until generation is paused, or everything accepted so far has
                finished; newer requests are held back meanwhile.

        Raises:
            TimeoutError: The deadline passed; the message says what was waited for.
            EngineError: The engine has stopped.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._condition:
            self._check_alive()
            self._inbox.append(_Call(command, future, exclusive))
            self._condition.notify()
        try:
            async with asyncio.timeout(timeout):
                result: T = await future
                return result
        except TimeoutError:
            with self._condition:
                self._condition.notify()  # the thread drops the cancelled command
            raise TimeoutError(self._waited_for(timeout)) from None

    def _waited_for(self, timeout: float) -> str:
        scheduler = self.scheduler
        if scheduler is None or not scheduler.running:
            return f"waited {timeout:g} s for the engine to finish its step"
        oldest = min(scheduler.running, key=lambda r: r.received_at)
        age = time.time() - oldest.received_at
        return (
            f"waited {timeout:g} s for {len(scheduler.running)} running requests to finish "
            f"(oldest: {oldest.rid}, since {age:.0f} s); pause generation first"
        )

    @property
    def stuck_for(self) -> float:
        """Seconds since the last step while there is work; 0 when idle or paused."""
        scheduler = self.scheduler
        if scheduler is None or not scheduler.can_step:
            return 0.0
        return time.monotonic() - self.last_step_at

    @property
    def failure(self) -> str | None:
        """Returns why the engine no longer works, or None."""
        return self._failure

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    # --- engine thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.scheduler = self._build()
        except Exception as error:
            self._failure = str(error)
            self._post(_set_exception, self._started, error)
            return
        self._post(_set_result, self._started, None)
        try:
            self._work(self.scheduler)
            self._failure = "engine stopped"
        except Exception as error:
            self._failure = f"engine failed: {error!r}"
            self._post(self._on_failure, error)
        self._release_all(self.scheduler, self._failure)

    def _release_all(self, scheduler: Scheduler, reason: str) -> None:
        """Ends the thread: answers all callers that wait for it."""
        with self._condition:
            inbox, self._inbox = self._inbox, []
        for item in [*inbox, *self._exclusive]:
            if isinstance(item, Request):
                scheduler.submit(item)
            elif item.future is not None:
                self._post(_set_exception, item.future, EngineError(reason))
        scheduler.abort(None, reason)
        self._post(_wake, scheduler.take_news())

    def _work(self, scheduler: Scheduler) -> None:
        import torch

        with torch.inference_mode():
            while True:
                with self._condition:
                    while not (
                        self._inbox
                        or self._stopping
                        or scheduler.can_step
                        or (self._exclusive and scheduler.quiet)
                    ):
                        self._condition.wait()
                    if self._stopping:
                        return
                    inbox, self._inbox = self._inbox, []
                for item in inbox:
                    if isinstance(item, Request):
                        scheduler.submit(item)
                    elif item.exclusive:
                        scheduler.close_gate()
                        self._exclusive.append(item)
                    else:
                        self._execute(item, scheduler)
                self._run_exclusive(scheduler)
                self.last_step_at = time.monotonic()
                scheduler.step()
                self.last_step_at = time.monotonic()
                news = scheduler.take_news()
                if news:
                    self._post(_wake, news)

    def _run_exclusive(self, scheduler: Scheduler) -> None:
        while self._exclusive and (scheduler.quiet or self._exclusive[0].given_up):
            self._execute(self._exclusive.popleft(), scheduler)
        if not self._exclusive:
            scheduler.open_gate()

    def _execute(self, call: _Call, scheduler: Scheduler) -> None:
        if call.given_up:
            return
        try:
            result = call.command(scheduler)
        except Exception as error:
            if call.future is None:
                raise
            self._post(_set_exception, call.future, error)
        else:
            if call.future is not None:
                self._post(_set_result, call.future, result)

    def _post(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the loop is closed: the process is on its way out


def _wake(requests: list[Request]) -> None:
    for request in requests:
        request.woken.set()


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
