"""Drives `areal` as a user does: as a command, in a folder of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from areal.config.experiment import load_service_config
from areal.security import Security
from areal_launch.processes.descendants import end_tagged, find_tagged, leaders_of
from areal_launch.processes.process import python_environment

READY_S = 90.0


def areal_argv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "areal_launch.cli", *arguments]


def environment() -> dict[str, str]:
    return {**python_environment(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def areal(
    *arguments: str, cwd: Path, timeout: float = 150.0, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        areal_argv(*arguments),
        cwd=cwd,
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def areal_background(*arguments: str, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts a command and returns at once."""
    with log.open("wb") as output:
        return subprocess.Popen(
            areal_argv(*arguments), cwd=cwd, env=environment(), stdout=output, stderr=output
        )


def eventually(
    condition: Callable[[], Any], what: str, timeout: float, log: Callable[[], str] = str
) -> Any:
    """The condition's first truthy value; when time is over, an error with `what` and the log."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}\n{log()[-3000:]}"
        time.sleep(0.05)
    return value


def lives(pid: int, program: str) -> bool:
    """Whether `pid` is a living process (not a zombie that no one waits for) of that program."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and program in " ".join(process.cmdline())
    except psutil.Error:
        return False


class RunningStack:
    """A run folder, looked at from outside."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def content(self) -> dict[str, Any]:
        file = self.run_dir / "stack.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def state(self) -> str:
        return str(self.content.get("state", ""))

    def wait_ready(self, timeout: float = READY_S) -> None:
        """Fails at once when the start has failed."""

        def done() -> bool:
            assert self.state() != "failed", self.log("launcher")
            return self.state() == "ready"

        eventually(done, "the stack is ready", timeout)

    def process(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = self.content["processes"][name]
        return entry

    def address(self, name: str) -> str:
        return str(self.process(name)["address"])

    @property
    def security(self) -> Security:
        """What its clients present: the token of a stack that asks for one."""
        return Security.load(load_service_config(self.run_dir / "config.yaml").security)

    def log(self, name: str) -> str:
        file = self.run_dir / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def processes(self) -> list[psutil.Process]:
        return find_tagged(self.content["stack_id"], leaders=leaders_of(self.content))

    def assert_gone(self, timeout: float = 60.0) -> None:
        """No process of it lives, and its guard has let the run go."""
        stack = self.content
        eventually(lambda: not self.processes(), "all processes are gone", timeout)
        guard = stack["guard"]["pid"]
        eventually(
            lambda: not lives(guard, "areal_launch.processes.orphan_guard"),
            "the guard is gone",
            timeout,
        )

    def clean_up(self) -> None:
        """For fixtures: whatever the test did, nothing stays."""
        if stack := self.content:
            launcher = stack["launcher"]["pid"]
            if lives(launcher, "areal_launch.cli"):
                psutil.Process(launcher).kill()
            end_tagged(stack["stack_id"], leaders=leaders_of(stack))


def end_all(stack: RunningStack) -> int:
    """Kills every process of a stack on this machine; how many there were."""
    return end_tagged(stack.content["stack_id"], leaders=leaders_of(stack.content))


@contextmanager
def running_stack(folder: Path, experiment: str, *overrides: str) -> Iterator[RunningStack]:
    """From `areal up` to `areal down`, after which nothing of it is left."""
    stack = RunningStack(folder / "runs" / experiment / "t0")
    names = (f"experiment_name={experiment}", "trial_name=t0")
    try:
        started = areal("up", "--detach", *names, *overrides, cwd=folder)
        assert started.returncode == 0, started.stderr + stack.log("launcher")
        yield stack
        stopped = areal("down", cwd=folder)
        assert stopped.returncode == 0, stopped.stderr
        stack.assert_gone()
    finally:
        stack.clean_up()
