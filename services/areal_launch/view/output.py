"""What commands print: a line, JSON, or a table for people."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from areal.types import TaskState

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


class CheckResult(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """The run works, with a disadvantage that is named."""
    UNKNOWN = "unknown"
    """Only a run can show the result."""
    MISSING = "missing"
    FAILED = "failed"

    @property
    def fatal(self) -> bool:
        """Whether a run would fail."""
        return self in (CheckResult.MISSING, CheckResult.FAILED)

    def styled(self) -> Text:
        from rich.text import Text

        fine = "green" if self is CheckResult.OK else "yellow"
        return Text(self.value, "bold red" if self.fatal else fine)


class LastingOutput(io.TextIOBase):
    """A stream whose reader may go, or whose disk may be full: what no one can read is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        drop(self._stream.fileno())


def drop(descriptor: int) -> None:
    """Sends all further output nowhere, including buffered output, so that nothing can fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which a vanished reader of the output ends the view and not the work."""
    with ExitStack() as entered:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            # None: it was closed before this process began (`>&-`).
            there = stream or entered.enter_context(open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123
            entered.enter_context(redirect(LastingOutput(there)))
        yield


class _Stdout(io.FileIO):
    """File descriptor 1, and why it did not take all output."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def whole_output() -> Iterator[None]:
    """Context that exits with 1, and one line, if stdout did not take all output: a full disk.

    Without a line if its reader went away, as `head` does.
    """
    if sys.stdout is None:  # it was closed before this process began (`>&-`)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    descriptor = _Stdout(sys.stdout.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(descriptor),
        # What a model wrote may hold half a surrogate pair.
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=sys.stdout.isatty(),
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error is not descriptor.failure:
            raise
        drop(descriptor.fileno())
        if not isinstance(error, BrokenPipeError):
            warn(f"standard output: {error.strerror}")
        raise SystemExit(1) from None


# What a terminal obeys instead of showing it (ESC, CSI), what changes the order of the text around
# it, what has no width, and halves of a surrogate pair, which cannot be printed.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Returns text with its control and bidirectional characters written out as escapes.

    Models choose the text of completions, and web pages, tools and recipes that of errors: on a
    terminal it could write the clipboard, clear the screen, or look like another text.
    """
    return _INVISIBLE.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def say(text: str) -> None:
    """Prints text for people."""
    print(visible(text), flush=True)  # noqa: T201


def warn(text: str) -> None:
    """Prints a line for people on stderr."""
    print(f"areal: {visible(text)}", file=sys.stderr, flush=True)  # noqa: T201


def print_json(content: Any) -> None:
    """Prints indented JSON: a command's only output."""
    say(json.dumps(content, indent=2))


def print_event(event: str, **content: Any) -> None:
    """Prints one line of JSON Lines."""
    say(json.dumps({"event": event, **content}, separators=(",", ":")))


def make_table(*headers: str, numeric: Iterable[str] = ()) -> Table:
    """Returns a table without lines; columns of `numeric` headers are aligned to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for header in headers:
        table.add_column(header, justify="right" if header in numeric else "left", overflow="fold")
    return table


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Prints rows under headers.

    Away from a terminal the first cell of a row is never broken: it is what programs, and people
    who copy it, name the row by.
    """
    from rich.text import Text

    from areal_launch.view.terminal import make_console

    table, console, longest = make_table(*headers), make_console(), 0
    for row in rows:
        cells = [Text(visible(cell)) if isinstance(cell, str) else cell for cell in row]
        table.add_row(*cells)
        longest = max(longest, cells[0].cell_len)
    if not console.file.isatty():
        table.columns[0].no_wrap = True
        console.width += longest  # the other columns have the usual width for themselves
    console.print(table)


def state_word(state: TaskState) -> str:
    """Returns a task's state in plain words."""
    # A step's tasks are the trainer's until a checkpoint holds what it learned from them.
    words = {TaskState.BATCHED: "in training", TaskState.TRAINED: "trained and saved"}
    return words.get(state, state.value.replace("_", "-"))


def pause_words(seconds: float) -> str:
    """Returns how long a weight update pauses a server; 0: it does not pause."""
    return f"{seconds * 1000:.0f} ms pause each" if seconds else "no pause"
