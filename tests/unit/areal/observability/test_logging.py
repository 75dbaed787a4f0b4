from __future__ import annotations

import io
import json

import pytest
import structlog

from areal.observability.logging import configure_logging


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
