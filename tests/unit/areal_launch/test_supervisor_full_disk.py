"""A full disk is waited for; it neither ends supervision nor uses up restarts."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.unit.areal_launch.supervised import FAST, Recorder, python
from tests.waiting import until

from areal.config.experiment import GRPOConfig
from areal_launch import run_folder
from areal_launch.processes.descendants import find_tagged
from areal_launch.processes.process import Child, ProcessSpec
from areal_launch.processes.supervisor import ProcessState, StackFailure, Supervised
from areal_launch.stack.events import EventLog
from areal_launch.stack.local import LocalStack
from areal_launch.stack.secret_files import write_secret

GIB = 1 << 30


class Disk:
    """What is free, as the test says."""

    def __init__(self) -> None:
        self.free = 0

    def __call__(self, folder: Path) -> int:
        assert folder.is_dir()
        return self.free


async def test_service_when_it_ends_on_a_full_disk_then_started_once_there_is_space(
    tmp_path: Path, stack_id: str
) -> None:
    disk, recorder, mark = Disk(), Recorder(), tmp_path / "died"
    code = (
        f"import pathlib, sys, time; m = pathlib.Path({str(mark)!r})\n"
        "if not m.exists(): m.touch(); sys.exit(1)\n"
        "time.sleep(60)"
    )
    process = Supervised(
        python("redis", code, tmp_path), stack_id, FAST, recorder, Child.start, disk
    )
    process.start()
    await until(lambda: process.state is ProcessState.BACKOFF, "the wait", 60.0)
    (said,) = recorder.texts("warning")
    assert said == (
        f"redis ended with exit code 1; the disk of {tmp_path} is full: waiting for space"
    )
    disk.free = GIB
    await until(lambda: process.state is ProcessState.UP, "the next life", 60.0)
    assert process.restarts == 0
    assert recorder.texts("info")[0].startswith("disk space is available again after")
    await process.stop(0.0)


async def test_service_when_stopped_while_it_waits_for_space_then_it_stops(
    tmp_path: Path, stack_id: str
) -> None:
    process = Supervised(
        python("redis", "raise SystemExit(1)", tmp_path),
        *(stack_id, FAST, Recorder(), Child.start, Disk()),
    )
    process.start()
    await until(lambda: process.state is ProcessState.BACKOFF, "the wait", 60.0)
    await process.stop()
    assert process.state is ProcessState.STOPPED


async def test_service_when_it_cannot_be_started_for_want_of_space_then_it_waits(
    tmp_path: Path, stack_id: str
) -> None:
    disk, failed = Disk(), []

    async def spawn(spec: ProcessSpec, stack: str) -> Child:
        if disk.free == 0:
            failed.append(spec.name)
            raise OSError(28, "No space left on device")
        return await Child.start(spec, stack)

    spec = python("nats", "import time; time.sleep(60)", tmp_path)
    process = Supervised(spec, stack_id, FAST, Recorder(), spawn, disk)
    process.start()
    await until(lambda: bool(failed), "the first try", 60.0)
    disk.free = GIB
    await until(lambda: process.state is ProcessState.UP, "the start", 60.0)
    await process.stop(0.0)


async def test_supervision_when_it_fails_itself_then_the_process_is_given_up(
    tmp_path: Path, stack_id: str
) -> None:
    async def spawn(spec: ProcessSpec, stack: str) -> Child:
        raise RuntimeError("a bug")

    process = Supervised(
        python("buffer", "pass", tmp_path), stack_id, FAST, Recorder(), spawn, Disk()
    )
    process.start()
    with pytest.raises(StackFailure, match="its supervision failed: RuntimeError: a bug"):
        await process.wait_up(60.0)
    await process.stop()
    assert process.state is ProcessState.FAILED


async def test_stack_when_its_file_cannot_be_written_then_it_is_said_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    events = EventLog()
    stack = LocalStack(GRPOConfig(run_root=str(tmp_path)), events, with_trainer=False)
    stack._lock = 0  # as an open one
    monkeypatch.setattr(run_folder, "write_json", full)
    events.report("state", "redis", "backoff")
    assert "stack.json could not be updated: [Errno 28]" in events.recent[-1].text


async def test_stack_when_its_run_folder_is_deleted_then_stop_leaves_no_process(
    tmp_path: Path,
) -> None:
    events = EventLog()
    stack = LocalStack(GRPOConfig(run_root=str(tmp_path)), events, with_trainer=False)
    stack._lock = stack.folder.lock()
    # Its program stands in for any of the stack's.
    stack.supervisor.start(python("redis", "import time; time.sleep(60)", stack.folder.logs))
    process = stack.processes["redis"]
    await process.wait_up(60.0)
    shutil.rmtree(tmp_path)
    await stack.stop(grace_s=0.0)
    assert process.state is ProcessState.STOPPED
    assert find_tagged(stack.stack_id) == []
    assert "stack.json could not be updated: [Errno 2]" in events.recent[-1].text


async def test_stack_when_its_run_folder_was_made_again_by_another_then_stop_leaves_its_files(
    tmp_path: Path,
) -> None:
    config, events = GRPOConfig(run_root=str(tmp_path)), EventLog()
    first, second = (LocalStack(config, each, with_trainer=False) for each in (events, EventLog()))
    first._lock = first.folder.lock()
    await first._control.open()
    shutil.rmtree(first.folder.path)
    second._lock = second.folder.lock()
    secret = write_secret(second.folder, "token", "0123456789abcdef")
    await second._control.open()
    second._write_stack()
    await first.stop()
    assert secret.exists()
    assert second.folder.control_file.exists()
    assert second.folder.read_stack()["stack_id"] == second.stack_id
    assert "the run folder was deleted, and is another run's now" in events.recent[-1].text
    await second.stop()
    assert not second.folder.secrets.exists()
    assert not second.folder.control_file.exists()


async def test_service_when_the_run_folder_is_deleted_under_it_then_its_next_life_has_a_log(
    tmp_path: Path, stack_id: str
) -> None:
    run = tmp_path / "run"
    spec = python("nats", "import time; print('here', flush=True); time.sleep(60)", run / "logs")
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    await process.wait_up(60.0)
    first = process.pid
    shutil.rmtree(run)
    os.kill(first, signal.SIGKILL)
    await until(lambda: process.pid not in (0, first) and spec.log.exists(), "its log", 60.0)
    assert process.restarts == 1
    await process.stop(0.0)


def test_write_json_when_the_disk_is_full_then_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        run_folder.write_json(tmp_path / "nowhere" / "stack.json", {})
    file = tmp_path / "stack.json"
    file.mkdir()  # cannot be replaced by a file
    with pytest.raises(OSError):
        run_folder.write_json(file, {})
    assert [each.name for each in tmp_path.iterdir()] == ["stack.json"]
