"""How a session shows itself: a live screen, plain lines, JSON lines, or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from areal.errors import ArealError
from areal_launch.view.live_view import LiveView, dashboard_listens, login_hint, plain_line
from areal_launch.view.output import visible, warn
from areal_launch.view.rows import read_rows
from areal_launch.view.summary import summary_lines
from areal_launch.view.terminal import Visible, make_console

if TYPE_CHECKING:
    from areal_launch.processes.usage import UsageSampler
    from areal_launch.stack.events import StackEvent
    from areal_launch.stack.local import LocalStack
    from areal_launch.stack.remote import RemoteStack
    from areal_launch.view.poller import StackPoller

    Stack = LocalStack | RemoteStack


class Display:
    """Shows nothing; the others override what they show."""

    def begin(self, stack: Stack, poller: StackPoller, usage: UsageSampler | None) -> None:
        self._stack = stack
        self._poller = poller
        self._usage = usage

    async def run(self) -> None:
        await asyncio.Event().wait()

    def end(self, word: str) -> None:
        """Shows that the work is over; `word` says what comes now."""

    def summary(self, stack: Stack, summary: Mapping[str, Any], error: ArealError | None) -> None:
        """Shows the summary once the run has ended and everything is stopped."""


class PlainDisplay(Display):
    """A line every few seconds, and each event when it happens."""

    interval_s = 5.0

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, stack: Stack, poller: StackPoller, usage: UsageSampler | None) -> None:
        super().begin(stack, poller, usage)
        self._line(f"run folder {stack.folder.path}")
        stack.events.listen(self._event)

    async def run(self) -> None:
        ready = told = False
        while True:
            await asyncio.sleep(self.interval_s if ready else 1.0)
            if not told and dashboard_listens(self._stack):
                told = True
                self._line(
                    f"dashboard {self._stack.config.endpoints.gateway}{login_hint(self._stack)}"
                )
            if not ready and self._stack.state == "starting":
                continue
            ready = True
            self._line(plain_line(self._stack, self._poller.snapshot))

    def end(self, word: str) -> None:
        self._line(word)

    def summary(self, stack: Stack, summary: Mapping[str, Any], error: ArealError | None) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bright_black", no_wrap=True)
        grid.add_column()
        for label, text in summary_lines(summary):
            grid.add_row(label, text)
        grid.add_row("", "")
        files = {
            "summary": stack.folder.summary_file,
            "curve": stack.folder.plot_file,
            "every step": stack.folder.metrics_file,
            "logs": stack.folder.logs,
        }
        for label, file in files.items():
            if file.exists():
                grid.add_row(label, str(file))
        if error is not None:
            grid.add_row("cause", Text(visible(str(error)), "bold red"))
        name = f"{stack.config.experiment_name}/{stack.config.trial_name}"
        title = Text(name, "bold")
        self._console.print(Panel(grid, title=title, title_align="left", padding=(1, 2)))

    def _event(self, event: StackEvent) -> None:
        if event.level != "state":
            self._line(f"{event.level}: {event.process}: {event.text}")

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(PlainDisplay):
    """One screen that stays up to date."""

    interval_s = 0.5

    def begin(self, stack: Stack, poller: StackPoller, usage: UsageSampler | None) -> None:
        Display.begin(self, stack, poller, usage)
        self._view = LiveView(stack, usage)
        self._view.snapshot = poller.snapshot
        # Drawn by the event loop, not by a thread: the view never sees half a change.
        # On the alternate screen: what the user had in the terminal comes back at the end.
        self._live = Live(
            Visible(self._view), console=self._console, auto_refresh=False, screen=True
        )
        self._live.start(refresh=True)

    async def run(self) -> None:
        while True:
            self._live.refresh()
            await asyncio.sleep(self.interval_s)

    def end(self, word: str) -> None:
        self._live.stop()
        self._line(f"{word} …")


class JsonDisplay(Display):
    """One JSON object per step, and the summary at the end; nothing else on stdout."""

    def begin(self, stack: Stack, poller: StackPoller, usage: UsageSampler | None) -> None:
        super().begin(stack, poller, usage)
        self._printed = {int(row["step"]) for row in read_rows(stack.folder.metrics_file)}
        poller.listen(self._row)
        stack.events.listen(self._event)

    def summary(self, stack: Stack, summary: Mapping[str, Any], error: ArealError | None) -> None:
        """Steps whose row came too late for the poller, then the summary."""
        for row in read_rows(stack.folder.metrics_file):
            self._row(row)
        cause = {"cause": str(error)} if error is not None else {}
        self._print({"event": "summary", **summary, **cause})

    def _row(self, row: dict[str, Any]) -> None:
        step = int(row["step"])
        if step not in self._printed:
            self._printed.add(step)
            self._print({"event": "step", **row})

    def _event(self, event: StackEvent) -> None:
        if event.level in ("warning", "error"):
            warn(event.text)

    @staticmethod
    def _print(content: Mapping[str, Any]) -> None:
        print(json.dumps(content, separators=(",", ":")), flush=True)  # noqa: T201 - the output


def choose_display(*, as_json: bool, quiet: bool) -> Display:
    """Returns a screen on a terminal, else plain lines."""
    if quiet:
        return Display()
    if as_json:
        return JsonDisplay()
    console = make_console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
