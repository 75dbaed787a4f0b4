"""`areal logs --follow` beside a process that prints until its log is rotated."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.integration.stack_tools import areal_argv, environment, eventually

from areal_launch.processes.log_file import LogFile

LINES = 400


def test_logs_when_the_log_is_rotated_then_every_line_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "stack.json").write_text("{}")
    log = LogFile(tmp_path / "logs" / "reward.log", limit=2000)
    log.write(b"before\n")
    following = subprocess.Popen(
        areal_argv("logs", "reward", "--follow", "--run", str(tmp_path)),
        env=environment(),
        stdout=subprocess.PIPE,
    )
    printed = bytearray()
    assert following.stdout is not None
    os.set_blocking(following.stdout.fileno(), False)

    def heard(line: str) -> bool:
        assert following.stdout is not None
        printed.extend(following.stdout.read() or b"")
        return line in printed.decode().splitlines()

    try:
        eventually(lambda: heard("before"), "the first line", 60.0)
        for number in range(LINES):
            log.write(b"line %d\n" % number)
            if number % 100 == 99:  # less than two rotations
                eventually(lambda n=number: heard(f"line {n}"), f"line {number}", 60.0)
    finally:
        following.kill()
        following.wait(10.0)
        following.stdout.close()
    assert (tmp_path / "logs" / "reward.log.1").exists()
    assert printed.decode().splitlines() == [
        "before",
        *(f"line {number}" for number in range(LINES)),
    ]
