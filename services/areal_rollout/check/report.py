"""What the check has found, line by line in a file: its reader may have to end the process."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import orjson


class Report:
    """Appends findings, and before what may hang: what it means if nothing follows.

    A finding is {"stage", "of", "verdict", "said", "traceback"}; the verdict is ok, failed, or
    unknown: the check cannot tell.
    """

    def __init__(self, file: Path, trace: TextIO) -> None:
        """Begins a report.

        Args:
            file: Where findings go.
            trace: Open file for the stacks of a process that is late.
        """
        self._file = file
        self._trace = trace
        self._of = ""
        self._late: tuple[float, dict[str, Any]] | None = None
        self._in_time()

    def of(self, subject: str) -> None:
        """Sets what the next findings are about: "" (training), or an evaluation's name."""
        self._of = subject

    def found(self, stage: str, verdict: str, said: str, traceback: str = "") -> None:
        """Adds one finding to the report."""
        self._write(
            {"stage": stage, "of": self._of, "verdict": verdict, "said": said}
            | ({"traceback": traceback} if traceback else {})
        )

    @contextlib.contextmanager
    def within(self, seconds: float, stage: str, verdict: str, said: str) -> Iterator[None]:
        """Ends the process, with its stacks in the trace, when the body takes longer.

        It also does when C code holds the interpreter. May be nested, the inner one's limit counts
        then; an inner one must not await.
        """
        outer = self._late
        late = {"stage": stage, "of": self._of, "verdict": verdict, "said": said, "late": True}
        self._late = (seconds, late)
        self._in_time()
        try:
            yield
        finally:
            self._late = outer
            self._in_time()

    def end(self) -> None:
        """Ends the report with its last line."""
        self._write({"end": True})

    def _in_time(self) -> None:
        """Starts the clock of what is continuing now."""
        faulthandler.cancel_dump_traceback_later()
        if self._late is not None:
            seconds, late = self._late
            self._write(late)
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._trace)

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("ab") as file:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
