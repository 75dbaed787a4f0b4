"""Runs blocking calls of environments and tools in threads, so that one that hangs costs little.

Each call has a daemon thread of its own: threads that a hung call keeps are neither those of the
worker's event loop nor waited for when the worker exits. A slot is held until the call returns or
its deadline passes; calls past their deadline are counted, and too many of them refuse the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from areal.errors import WorkflowError

T = TypeVar("T")

MAX_RUNNING = 32
"""Calls that run at the same time; more wait for a slot."""
MAX_HUNG = 32
"""Calls past their deadline, each with a thread, before the next call is refused."""


class CallOverdue(TimeoutError):
    """A call has not returned within its limit; its thread is left behind."""


class TooManyHung(WorkflowError):
    """Too many calls hang, so no further call is started."""


class BlockingCalls:
    """The blocking calls of one workflow; used from one event loop."""

    def __init__(self, max_running: int = MAX_RUNNING, max_hung: int = MAX_HUNG) -> None:
        """Starts no thread.

        Args:
            max_running: Calls at the same time, not counting those past their deadline.
            max_hung: Calls past their deadline.
        """
        self._slots = asyncio.Semaphore(max_running)
        self._max_hung = max_hung
        self.hung = 0

    async def run(self, name: str, timeout_s: float, call: Callable[[], T]) -> T:
        """Returns what the call returns.

        Waits for a slot first; each is free when its call's deadline passes, at the latest. If the
        caller is canceled, the call runs on in its thread and keeps its slot as before.

        Args:
            name: Stands in errors.
            timeout_s: Limit of the call, from when it starts.
            call: Runs in a thread.

        Raises:
            CallOverdue: The limit has passed.
            TooManyHung: Too many earlier calls are past their limit and have not returned.
            WorkflowError: The call raised something that would end the process (`SystemExit`).
        """
        self._refuse_if_hung(name)
        await self._slots.acquire()
        try:
            self._refuse_if_hung(name)  # those that it waited for
        except TooManyHung:
            self._slots.release()
            raise
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        overdue = False

        def expire() -> None:
            nonlocal overdue
            overdue = True
            self.hung += 1
            self._slots.release()
            if not outcome.done():
                outcome.set_exception(CallOverdue(f"{name}: no result within {timeout_s:g} s"))

        timer = loop.call_later(timeout_s, expire)

        def ended(value: Any, error: BaseException | None) -> None:
            if overdue:
                self.hung -= 1
            else:
                timer.cancel()
                self._slots.release()
            if outcome.done():
                return
            if error is None:
                outcome.set_result(value)
            else:
                outcome.set_exception(_catchable(name, error))

        context = contextvars.copy_context()

        def work() -> None:
            value, error = None, None
            try:
                value = context.run(call)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: no one waits
                loop.call_soon_threadsafe(ended, value, error)

        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            ended(None, error)
        return await outcome

    def _refuse_if_hung(self, name: str) -> None:
        if self.hung >= self._max_hung:
            raise TooManyHung(
                f"{name}: not called: {self.hung} earlier calls are still running past their "
                "limit; add a timeout to what they wait for"
            )


def _catchable(name: str, error: BaseException) -> Exception:
    """The error, unless it would end the event loop or cannot be set on a future."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return WorkflowError(f"{name}: {type(error).__name__}: {error}")
