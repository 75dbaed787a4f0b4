"""What follows a stack that others run: its screen, and the signals of this terminal."""

from __future__ import annotations

import asyncio
import signal
import sys

from areal.chassis import endless
from areal.chassis.logging import configure_logging
from areal.config.services import EndpointsConfig
from areal.security import Security
from areal_launch.stack.remote import RemoteStack
from areal_launch.view.display import Display
from areal_launch.view.poller import StackPoller


class Follower:
    """One stack on one screen."""

    def __init__(self, name: str, stack: RemoteStack, display: Display) -> None:
        """`name`: of the cluster, before what is said."""
        self.stack = stack
        self.display = display
        self.poller: StackPoller | None = None
        self.signals = 0
        self.signalled = asyncio.Event()
        self._name = name
        self._drawing: asyncio.Task[None] | None = None
        stack.folder.logs.mkdir(parents=True, exist_ok=True)
        # Open until this process ends: libraries may log to the very last.
        log = stack.folder.log_of("follower").open("a", buffering=1)
        configure_logging("follower", stack.config.namespace, stream=log)

    def handle_signals(self) -> None:
        """Counts them from now on."""

        def handle() -> None:
            self.signals += 1
            self.signalled.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, handle)

    def show(self, endpoints: EndpointsConfig, security: Security) -> None:
        """Begins to ask the services and to draw; once."""
        if self.poller is not None:
            return
        self.poller = StackPoller(endpoints, security)
        self.poller.listen_notices(lambda text: self.stack.events.report("warning", "recipe", text))
        self.poller.start()
        self.display.begin(self.stack, self.poller, None)
        self._drawing = endless.keep(self.display.run(), "display", self._not_drawing)

    def _not_drawing(self, error: BaseException) -> None:
        self._drawing = None
        self.display.end("not drawn any longer")
        self.say(f"the display ended: {type(error).__name__}: {error}")

    async def stop_showing(self, word: str) -> None:
        """Gives the terminal back; idempotent."""
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.gather(self._drawing, return_exceptions=True)
            self._drawing = None
            self.display.end(word)
        if self.poller is not None:
            await self.poller.close()

    def say(self, text: str) -> None:
        """On the screen, or as a line while there is none."""
        if self._drawing is None:
            print(f"areal: {text}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            self.stack.events.report("info", self._name, text)
