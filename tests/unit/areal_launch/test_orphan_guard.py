"""The guard ends a stack whose launcher died, whatever the shape of its process tree."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from areal.errors import CannotStart
from areal_launch.processes.descendants import end_tagged, find_tagged
from areal_launch.processes.process import child_environment
from areal_launch.run_folder import RunFolder
from areal_launch.stack.secret_files import write_secret

SLEEP = "import time; time.sleep(300)"


def spawn(stack_id: str, code: str, name: str = "service") -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=child_environment(stack_id, name, {}),
        start_new_session=True,
    )
    # Popen returns in the middle of exec, where its environment cannot be read yet.
    deadline = time.monotonic() + 60.0
    while psutil.Process(child.pid).environ().get("AREAL_STACK") != stack_id:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


HIDE_ENVIRONMENT = """
import ctypes, time
fields = open("/proc/self/stat").read().rsplit(")", 1)[1].split()
start, end = int(fields[47]), int(fields[48])  # env_start, env_end
ctypes.memset(start, 0, end - start)
print("hidden", flush=True)
time.sleep(300)
"""


def write_stack(file: Path, stack_id: str, *children: subprocess.Popen[bytes]) -> Path:
    processes = {
        f"p{child.pid}": {"pid": child.pid, "spawned": psutil.Process(child.pid).create_time()}
        for child in children
    }
    file.write_text(json.dumps({"stack_id": stack_id, "processes": processes}))
    return file


def spawn_guard(
    stack_id: str, stack_file: Path, grace_s: float, lock: int = -1, **options: object
) -> subprocess.Popen[bytes]:
    environment = child_environment(stack_id, "guard", {})
    del environment["AREAL_STACK"]
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "areal_launch.processes.orphan_guard",
            str(stack_file),
            stack_id,
            str(lock),
            str(grace_s),
        ],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        pass_fds=() if lock < 0 else (lock,),
        **options,  # type: ignore[call-overload]
    )


def wait_for(file: Path) -> str:
    deadline = time.monotonic() + 60.0
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return file.read_text()


def test_guard_when_pipe_closes_then_ends_children_and_grandchildren(tmp_path: Path) -> None:
    stack_id, note, deaf = f"test/{uuid.uuid4().hex}", tmp_path / "pid", tmp_path / "deaf"
    nested = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); time.sleep(300)"
    )
    stubborn = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(deaf)!r}).write_text('yes'); time.sleep(300)"
    )
    children = [spawn(stack_id, nested), spawn(stack_id, stubborn, "other")]
    grandchild = psutil.Process(int(wait_for(note)))
    wait_for(deaf)
    guard = spawn_guard(stack_id, write_stack(tmp_path / "stack.json", stack_id), 0.3)
    assert guard.poll() is None
    deadline = time.monotonic() + 60.0
    while len(find_tagged(stack_id)) < 3:  # the grandchild may be in the middle of its exec
        assert time.monotonic() < deadline
        time.sleep(0.01)
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(60.0) == 0
    assert [child.wait(60.0) for child in children][1] == -signal.SIGKILL
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_guard_when_it_has_cleaned_up_then_the_secrets_of_the_stack_are_gone_too(
    tmp_path: Path,
) -> None:
    stack_id = f"test/{uuid.uuid4().hex}"
    folder = RunFolder(tmp_path)
    secret = write_secret(folder, "token", "0123456789abcdef")
    (tmp_path / "mine").write_text("a user's own file")
    child = spawn(stack_id, SLEEP)
    guard = spawn_guard(stack_id, write_stack(folder.stack_file, stack_id), 0.0)
    assert secret.read_text() == "0123456789abcdef\n"
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(60.0) == 0
    assert child.wait(60.0) == -signal.SIGKILL
    assert not folder.secrets.exists()
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize("left", ["nothing", "half of it", "not an object", "another stack's"])
def test_guard_when_the_run_folder_was_deleted_then_no_process_is_left(
    tmp_path: Path, left: str
) -> None:
    stack_id, run = f"test/{uuid.uuid4().hex}", tmp_path / "run"
    run.mkdir()
    child, other = spawn(stack_id, SLEEP), spawn(f"test/{uuid.uuid4().hex}", SLEEP)
    try:
        file = write_stack(run / "stack.json", stack_id, child)
        guard = spawn_guard(stack_id, file, 0.0)
        shutil.rmtree(run)
        if left != "nothing":
            run.mkdir()
            write_stack(file, "another", other)
            text = {"half of it": '{"stack', "not an object": "[1]"}.get(left, file.read_text())
            file.write_text(text)
        guard.stdin.close()  # type: ignore[union-attr]
        assert guard.wait(60.0) == 0
        assert child.wait(60.0) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(60.0)


def test_guard_when_another_run_has_the_folder_then_its_secrets_stay(tmp_path: Path) -> None:
    stack_id, folder = f"test/{uuid.uuid4().hex}", RunFolder(tmp_path / "run")
    first = folder.lock()
    child = spawn(stack_id, SLEEP)
    guard = spawn_guard(stack_id, write_stack(folder.stack_file, stack_id, child), 0.0, first)
    shutil.rmtree(folder.path)
    second = folder.lock()
    secret = write_secret(folder, "token", "0123456789abcdef")
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(60.0) == 0
    assert child.wait(60.0) == -signal.SIGKILL
    assert secret.exists()
    os.close(first)
    os.close(second)


def test_guard_when_a_child_wrote_over_its_environment_then_ends_it_too(tmp_path: Path) -> None:
    stack_id = f"test/{uuid.uuid4().hex}"
    child = subprocess.Popen(
        [sys.executable, "-c", HIDE_ENVIRONMENT],
        env=child_environment(stack_id, "titled", {}),
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"hidden\n"
    child.stdout.close()
    assert find_tagged(stack_id) == []
    guard = spawn_guard(stack_id, write_stack(tmp_path / "stack.json", stack_id, child), 0.0)
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(60.0) == 0
    assert child.wait(60.0) == -signal.SIGKILL


def test_find_tagged_when_a_leaders_pid_was_given_to_another_then_spared() -> None:
    child = spawn(f"test/{uuid.uuid4().hex}", SLEEP)
    try:
        started = psutil.Process(child.pid).create_time()
        assert [p.pid for p in find_tagged("x", leaders={child.pid: started})] == [child.pid]
        assert find_tagged("x", leaders={child.pid: started - 3600}) == []
    finally:
        child.kill()
        child.wait(60.0)


def ignored(pid: int) -> set[int]:
    """The signals that a process ignores."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    return {signum for signum in range(1, 65) if bits >> (signum - 1) & 1}


def test_guard_when_signalled_then_keeps_guarding(tmp_path: Path) -> None:
    stack_id = f"test/{uuid.uuid4().hex}"
    child = spawn(stack_id, SLEEP)
    guard = spawn_guard(stack_id, write_stack(tmp_path / "stack.json", stack_id), 0.0)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Until its handlers are set a signal would end it: the launcher has no reason to send any.
    deadline = time.monotonic() + 60.0
    while not ignored(guard.pid).issuperset(signals):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for signum in signals:
        os.kill(guard.pid, signum)
    assert child.poll() is None
    guard.stdin.close()  # type: ignore[union-attr]
    assert guard.wait(60.0) == 0
    assert child.wait(60.0) == -signal.SIGKILL


def test_end_tagged_when_one_process_is_named_then_others_live() -> None:
    stack_id = f"test/{uuid.uuid4().hex}"
    first, second = spawn(stack_id, SLEEP, "a"), spawn(stack_id, SLEEP, "b")
    assert end_tagged(stack_id, "a") == 1
    assert first.wait(60.0) == -signal.SIGKILL
    assert second.poll() is None
    assert end_tagged(stack_id) == 1
    assert second.wait(60.0) == -signal.SIGKILL


def test_lock_when_held_then_refused_with_the_pid(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    descriptor = folder.lock()
    assert folder.held()
    with pytest.raises(CannotStart, match=rf"is already running \(pid {os.getpid()}\)"):
        folder.lock()
    os.close(descriptor)
    assert not folder.held()
    os.close(folder.lock())


def test_lock_when_a_guard_still_cleans_up_then_waits_for_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stack_id = f"test/{uuid.uuid4().hex}"
    descriptor = folder.lock()
    child = spawn(stack_id, SLEEP)
    stack_file = write_stack(tmp_path / "stack.json", stack_id)
    guard = spawn_guard(stack_id, stack_file, 0.0, descriptor)
    os.close(descriptor)
    folder.lock_file.write_text("999999999\n")  # the launcher is dead
    guard.stdin.close()  # type: ignore[union-attr]
    os.close(folder.lock(wait_s=60.0))
    # The lock was free only once the guard had done its work.
    assert child.wait(60.0) == -signal.SIGKILL
    assert guard.wait(60.0) == 0
