"""What a process of a stack prints and leaves behind: bounded, and ended with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.daemons import SOURCE, Daemon
from tests.unit.areal_launch.supervised import FAST, Recorder, python
from tests.waiting import until

from areal_launch.processes.descendants import end_tagged, find_tagged
from areal_launch.processes.log_tail import LogTail
from areal_launch.processes.process import child_environment, last_lines
from areal_launch.processes.supervisor import ProcessState, Supervised

MIB = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    left = Daemon(tmp_path / "daemon")
    yield left
    left.clean_up()


def leaving(tmp_path: Path) -> str:
    """Leaves a daemon behind, and works."""
    return f"{SOURCE}\nimport time; leave_daemon({str(tmp_path / 'daemon')!r}); time.sleep(600)"


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_process_when_it_left_a_daemon_then_the_daemon_ends_with_it(
    tmp_path: Path, stack_id: str, daemon: Daemon, how: str
) -> None:
    process = Supervised(python("reward", leaving(tmp_path), tmp_path), stack_id, FAST, Recorder())
    process.start()
    try:
        await until(daemon.left, "the daemon", 60.0)
        assert daemon.lives()
        if how == "killed":
            os.kill(process.pid, signal.SIGKILL)
            await until(lambda: process.restarts > 0, "its next life", 60.0)
        else:
            await process.stop()
        await until(lambda: not daemon.lives(), "the end of the daemon", 20.0)
    finally:
        await process.stop(0.0)
    assert not find_tagged(stack_id)


async def test_end_tagged_when_a_process_left_a_daemon_then_it_is_ended_too(
    tmp_path: Path, stack_id: str, daemon: Daemon
) -> None:
    """As the guard of a dead launcher ends a stack."""
    process = Supervised(python("reward", leaving(tmp_path), tmp_path), stack_id, FAST, Recorder())
    process.start()
    await until(daemon.left, "the daemon", 60.0)
    stopping = process.stop(30.0)  # no restart: the launcher is as good as dead
    end_tagged(stack_id, grace_s=0.2)
    assert not daemon.lives()
    await stopping


async def test_process_when_its_keeper_is_killed_then_it_ends_and_is_started_again(
    tmp_path: Path, stack_id: str
) -> None:
    process = Supervised(
        python("reward", "import time; time.sleep(600)", tmp_path), stack_id, FAST, Recorder()
    )
    process.start()
    await process.wait_up(60.0)
    first = psutil.Process(process.pid)
    keeper = first.parent()
    assert keeper is not None
    keeper.send_signal(signal.SIGTERM)  # it ends when its process does
    keeper.kill()
    await until(lambda: process.restarts == 1, "its next life", 60.0)
    assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE
    await process.stop(0.0)
    assert not find_tagged(stack_id)


FLOOD = """
import sys, time
line = b"%07d " + b"x" * 1015 + b"\\n"
for number in range(200 * 1024):
    sys.stdout.buffer.write(line % number)
sys.stdout.buffer.write(b"the last line\\n")
sys.stdout.flush()
time.sleep(600)
"""


def held(folder: Path) -> int:
    """Bytes of the log and of its predecessor."""
    return sum(file.stat().st_size for file in folder.glob("reward.log*"))


async def test_log_when_200_mib_are_printed_then_40_stay_with_the_newest_lines(
    tmp_path: Path, stack_id: str
) -> None:
    process = Supervised(python("reward", FLOOD, tmp_path), stack_id, FAST, Recorder())
    log = process.spec.log
    tail, followed = LogTail(log), []

    def all_printed() -> bool:
        assert held(tmp_path) < 42 * MIB
        followed.extend(tail.read())
        return bool(followed) and followed[-1] == "the last line"

    process.start()
    try:
        await until(all_printed, "the last line", 120.0)
    finally:
        await process.stop(0.0)
    kept = b"".join(file.read_bytes() for file in (log.with_name("reward.log.1"), log)).splitlines()
    assert 20 * MIB < sum(map(len, kept)) < 41 * MIB
    numbers = [int(line.split()[0]) for line in kept[:-1]]
    assert numbers == list(range(numbers[0], 200 * 1024)), "the newest, none missing between"
    assert last_lines(log, count=1) == ["the last line"]


async def test_process_when_it_ends_then_all_it_said_is_in_its_log(
    tmp_path: Path, stack_id: str
) -> None:
    """What is read from the log right after the end decides what is told."""
    code = "import sys; sys.stderr.write('why it failed\\n'); sys.exit(2)"
    process = Supervised(python("trainer", code, tmp_path, job=True), stack_id, FAST, Recorder())
    process.start()
    await until(process.ended.done, "its end", 60.0)
    assert process.state is ProcessState.FAILED
    assert "why it failed" in str(process.ended.exception())


def test_keeper_when_its_launcher_is_dead_then_the_log_is_still_bounded(
    tmp_path: Path, stack_id: str
) -> None:
    """The launcher here only starts one process, and ends without a word."""
    launcher = (
        "import asyncio, os, pathlib, sys\n"
        "from areal_launch.processes.process import Child, ProcessSpec\n"
        f"spec = ProcessSpec('reward', (sys.executable, '-c', {FLOOD!r}), "
        f"pathlib.Path({str(tmp_path)!r}) / 'reward.log')\n"
        f"asyncio.run(Child.start(spec, {stack_id!r})); os.kill(os.getpid(), 9)"
    )
    environment = child_environment(stack_id, "launcher", {})
    subprocess.run([sys.executable, "-c", launcher], env=environment, check=False, timeout=60)
    try:
        tail = LogTail(tmp_path / "reward.log")
        seen: list[str] = []

        def printed() -> bool:
            seen.extend(tail.read())
            return bool(seen) and seen[-1] == "the last line"

        deadline = time.monotonic() + 120.0
        while not printed():
            assert time.monotonic() < deadline, "not within 120 s: the last line"
            time.sleep(0.1)
        assert held(tmp_path) < 42 * MIB
    finally:
        end_tagged(stack_id)
