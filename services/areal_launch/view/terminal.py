"""The terminal: a console that prints what models, web pages and stack traces say as text only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from areal_launch.view.output import visible


class Visible:
    """Anything that can be printed, with its text `visible`."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments(console, options)

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._content, options):
            # Control segments are rich's own: they move the cursor of a live screen.
            text = segment.text if segment.control else visible(segment.text)
            yield Segment(text, segment.style, segment.control)


class _AllVisible(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Visible(each) for each in renderables]


def make_console(*, highlight: bool = True) -> Console:
    """Returns a console without markup, on which all text is `visible`.

    Text that is escaped only here may be cut off at the right border: where columns matter, escape
    it before.
    """
    console = Console(markup=False, emoji=False, highlight=highlight)
    console.push_render_hook(_AllVisible())
    return console
