"""Following a log, and saying what a line says."""

from __future__ import annotations

import json
from pathlib import Path

from areal_launch.processes.log_tail import LogTail, gist, humanize
from areal_launch.processes.process import last_lines


def test_read_when_file_grows_then_only_whole_new_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    tail = LogTail(file)
    assert tail.read() == []
    file.write_text("one\ntw")
    assert tail.read() == ["one"]
    with file.open("a") as stream:
        stream.write("o\nthree\n")
    assert tail.read() == ["two", "three"]
    assert tail.read() == []


def test_read_when_from_end_then_what_was_there_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("before\n")
    tail = LogTail(file, from_end=True)
    with file.open("a") as stream:
        stream.write("after\n")
    assert tail.read() == ["after"]


def test_read_when_file_is_truncated_then_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("a long first line\n")
    tail = LogTail(file)
    tail.read()
    file.write_text("new\n")
    assert tail.read() == ["new"]


def test_humanize_when_structured_then_event_and_values() -> None:
    line = json.dumps({"event": "loss", "step": 3, "level": "info", "timestamp": "now"})
    assert humanize(line) == "loss step=3"
    assert humanize("  plain text ") == "plain text"
    assert humanize("[1, 2]") == "[1, 2]"


def test_gist_when_line_has_a_traceback_then_only_its_last_line() -> None:
    line = json.dumps(
        {"event": "trainer_failed", "exception": "Traceback …\n  File x\nRuntimeError: boom"}
    )
    assert gist(line) == "trainer_failed: RuntimeError: boom"
    assert gist("areal-buffer: endpoints.redis '': expected …").startswith("areal-buffer")


def test_last_lines_when_log_is_missing_then_none(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none.log") == []
    (tmp_path / "a.log").write_text("1\n2\n\n3\n4\n")
    assert last_lines(tmp_path / "a.log", count=2) == ["3", "4"]
