"""A log that is bounded, on a disk that may be full, and reading it across its rotation."""

from __future__ import annotations

import os
from pathlib import Path

from areal_launch.processes.log_file import LogFile
from areal_launch.processes.log_tail import LogPlace, LogTail, last_error
from areal_launch.processes.process import last_lines

ERROR = b'{"event": "it_broke", "level": "error"}\n'


def test_write_when_the_limit_is_passed_then_rotated_between_two_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    log = LogFile(file, limit=20)
    log.write(b"first line\n")
    log.write(b"second line\nthird")
    log.write(b" line\n")
    assert (tmp_path / "a.log.1").read_bytes() == b"first line\nsecond line\n"
    assert file.read_bytes() == b"third line\n"
    assert last_lines(file, count=2) == ["second line", "third line"]


def test_write_when_a_line_never_ends_then_bounded_all_the_same(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", limit=1000)
    for _ in range(100):
        log.write(b"x" * 100)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000


def test_write_when_opened_again_then_appended(tmp_path: Path) -> None:
    for text in (b"one\n", b"two\n"):
        LogFile(tmp_path / "a.log", limit=6).write(text)
    assert (tmp_path / "a.log.1").read_bytes() == b"one\ntwo\n"


def test_write_when_the_disk_is_full_then_dropped_and_counted_once_there_is_space(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.log"
    log = LogFile(Path("/dev/full"))
    for _ in range(3):
        log.write(b"lost\n")
    space = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(space, log._descriptor)
    os.close(space)
    log.write(b"kept\n")
    log.write(b"kept too\n")
    dropped, *kept = file.read_text().splitlines()
    assert dropped == '{"event": "log_lines_dropped", "level": "warning", "count": 3}'
    assert kept == ["kept", "kept too"]


def test_write_when_it_cannot_be_rotated_then_emptied_in_place(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    (tmp_path / "a.log.1" / "in the way").mkdir(parents=True)
    log = LogFile(file, limit=10)
    log.write(b"12345\n")
    log.write(b"67890\nnewest")
    assert file.read_bytes() == b"newest"


def test_read_when_rotated_between_two_looks_then_no_line_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    log, tail = LogFile(file, limit=20), LogTail(file)
    log.write(b"one\ntw")
    assert tail.read() == ["one"]
    log.write(b"o\nthree\nfour\n")
    log.write(b"five\nsi")
    assert (tmp_path / "a.log.1").exists()
    assert tail.read() == ["two", "three", "four", "five"]
    log.write(b"x\n")
    assert tail.read() == ["six"]


def test_read_when_rotated_twice_between_two_looks_then_it_says_what_is_missing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.log"
    log, tail = LogFile(file, limit=10), LogTail(file)
    log.write(b"seen\n")
    assert tail.read() == ["seen"]
    with (tmp_path / "a.log").open("rb"):  # its inode is not used again meanwhile
        for number in range(6):
            log.write(b"line %d\n" % number)
        first, *rest = tail.read()
    assert "rotated more than once" in first
    assert rest[-1] == "line 5"


def test_last_error_when_the_log_was_rotated_in_that_life_then_found(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    log = LogFile(file, limit=200)
    log.write(b"an earlier life\n" * 10)
    begin = LogPlace.end(file)
    log.write(b"x" * 60 + b"\n" + ERROR + b"y\n")
    assert (tmp_path / "a.log.1").exists()
    assert last_error(begin) == "it_broke"
    assert last_error(LogPlace.end(file)) == ""
