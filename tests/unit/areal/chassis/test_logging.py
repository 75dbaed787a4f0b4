from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import structlog

from areal.chassis.logging import LossyStream, configure_logging


@pytest.fixture(autouse=True)
def _restore() -> object:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def logged(*, text: bool) -> str:
    stream = io.StringIO()
    configure_logging("trainer", "a/b", text=text, stream=stream)
    # Not get_logger: what it caches would outlive this test's configuration.
    structlog.get_logger(component="areal.x").info("training", step="3/9", url="redis://:pw@h/0")
    return stream.getvalue()


def test_logging_when_text_then_a_line_is_time_level_event_and_what_was_said() -> None:
    line = logged(text=True)
    assert line.rstrip().endswith("training             step=3/9 url=redis://***@h/0")
    assert "component" not in line
    assert "trainer" not in line


def test_logging_when_json_then_a_line_says_whose_it_is() -> None:
    line = json.loads(logged(text=False))
    assert (line["service"], line["run"], line["component"]) == ("trainer", "a/b", "areal.x")
    assert (line["event"], line["url"]) == ("training", "redis://***@h/0")


class FullDisk(io.StringIO):
    """Takes no line while it is full."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_logging_when_the_disk_is_full_then_lines_are_dropped_and_counted() -> None:
    disk = FullDisk()
    configure_logging("trainer", "a/b", stream=disk)
    log = structlog.get_logger(component="areal.x")
    log.info("lost")
    log.info("lost_too")
    disk.full = False
    log.info("kept")
    lines = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["log_lines_dropped", "kept"]
    assert lines[0]["count"] == 2


def test_stream_when_what_it_holds_cannot_be_written_then_flush_says_nothing() -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115 - its end is part of the test
    lossy = LossyStream(stream)
    assert lossy.write("x\n") == 2
    lossy.flush()
    with pytest.raises(OSError, match="No space"):
        stream.close()
