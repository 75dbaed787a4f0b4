"""Shows a stack that runs on other machines, and handles the signals of this terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from areal.chassis import endless
from areal.chassis.logging import configure_logging
from areal.config.services import EndpointsConfig
from areal.errors import ArealError, WaitTimeout
from areal.security import Security
from areal_launch.stack.remote import RemoteStack
from areal_launch.view.display import Display
from areal_launch.view.poller import StackPoller

AnswerT = TypeVar("AnswerT")


class Follower:
    """Shows one remote stack on one screen."""

    def __init__(
        self, name: str, stack: RemoteStack, display: Display, *, silence_s: float
    ) -> None:
        """`name`: the kind of cluster; `silence_s`: how long it may fail to answer."""
        self.stack = stack
        self.display = display
        self.poller: StackPoller | None = None
        self.signals = 0
        self.signalled = asyncio.Event()
        self._name = name
        self._silence_s = silence_s
        self._silent_since = 0.0
        self._drawing: asyncio.Task[None] | None = None
        stack.folder.logs.mkdir(parents=True, exist_ok=True)
        # Open until this process ends: libraries may log until then.
        log = stack.folder.log_of("follower").open("a", 1, "utf-8")
        configure_logging("follower", stack.config.namespace, stream=log)

    def handle_signals(self) -> None:

        def handle() -> None:
            self.signals += 1
            self.signalled.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, handle)

    async def ask(self, question: Callable[[], AnswerT], last: AnswerT) -> AnswerT:
        """Asks the cluster in a thread and returns its answer, or `last` while there is none.

        Raises:
            WaitTimeout: The cluster has not answered for `silence_s`, or `question` raised it.
        """
        try:
            answer = await asyncio.to_thread(question)
        except WaitTimeout:
            raise
        except ArealError as error:
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > self._silence_s:
                since = self._silent_since
                raise WaitTimeout(
                    "an answer", on=self._name, since=since, hint=str(error)
                ) from None
            return last
        self._silent_since = 0.0
        return answer

    def show(self, endpoints: EndpointsConfig, security: Security) -> None:
        """Starts the poller and the display, at the first call only."""
        if self.poller is not None:
            return
        self.poller = StackPoller(endpoints, security)
        self.poller.listen_notices(partial(self.stack.events.report, "warning", "recipe"))
        self.poller.listen_servers(partial(self.stack.events.report, "warning", "servers"))
        self.poller.start()
        self.display.begin(self.stack, self.poller, None)
        self._drawing = endless.keep(self.display.run(), "display", self._not_drawing)

    def _not_drawing(self, error: BaseException) -> None:
        self._drawing = None
        self.display.end("the live view stopped")
        self.say(f"the live view ended: {type(error).__name__}: {error}")

    async def stop_showing(self, word: str) -> None:
        """Restores the terminal; idempotent."""
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.gather(self._drawing, return_exceptions=True)
            self._drawing = None
            self.display.end(word)
        if self.poller is not None:
            await self.poller.close()

    def say(self, text: str) -> None:
        """Adds an event to the screen, or prints a line while there is none."""
        if self._drawing is None:
            print(f"areal: {text}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            self.stack.events.report("info", self._name, text)
