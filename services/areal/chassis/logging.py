"""Structured logs: one JSON object a line (or plain text for a terminal) on stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any, TextIO, cast

import structlog

from areal.security import redact


def configure_logging(
    service: str, namespace: str, *, text: bool = False, stream: TextIO | None = None
) -> None:
    """Sets up the process's logs; call once from a main function.

    Args:
        service: Name in every line.
        namespace: `experiment/trial` in every line.
        text: Human-readable lines instead of JSON.
        stream: Where lines go; None: stderr.
    """
    stream = cast("TextIO", LossyStream(stream or sys.stderr))
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S" if text else "iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    rendering: list[structlog.typing.Processor] = (
        [
            _what_people_know,
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), sort_keys=False, pad_event_to=20),
        ]
        if text
        else [structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *rendering, _redact],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run=namespace)
    # Libraries log through the standard module: same stream, warnings and above.
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


class LossyStream:
    """A text stream that drops what it cannot write, so a full disk does not stop the process.

    Once it can write again it says how many lines are missing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._dropped = 0

    def write(self, text: str) -> int:
        """Writes the whole text or nothing; returns its length either way."""
        try:
            if self._dropped:
                note = {"event": "log_lines_dropped", "level": "warning", "count": self._dropped}
                self._stream.write(json.dumps(note) + "\n")
                self._stream.flush()
                self._dropped = 0
            self._stream.write(text)
        except OSError:
            self._dropped += text.count("\n")
        return len(text)

    def flush(self) -> None:
        """Flushes what it can; the rest stays in the stream's buffer."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Returns whether the output is a terminal."""
        return self._stream.isatty()


class _Formatter(logging.Formatter):
    """Hides secrets in what libraries say, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _what_people_know(
    _: Any, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A reader of plain lines knows whose they are."""
    for key in ("component", "run", "service"):
        event.pop(key, None)
    return event


def _redact(_: Any, __: str, rendered: Any) -> str:
    """The last processor: hides secrets in a finished line."""
    return redact(rendered)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Returns a logger whose lines carry `component=name`; `log.info("event_name", key=value)`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(component=name)
    return logger
