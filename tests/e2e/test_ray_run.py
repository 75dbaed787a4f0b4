"""`areal run --on ray` on a local Ray cluster (`make e2e-ray`)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.cluster_runs import arguments, check_books, rows_of
from tests.integration.stack_tools import RunningStack, areal_background, end_all, eventually

from areal_launch.processes.descendants import find_tagged

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("AREAL_TEST_RAY"), reason="make e2e-ray runs these"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="the package ray is not installed"
    ),
]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_ray_when_a_server_is_killed_then_the_run_finishes_and_nothing_is_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = 6
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "ray")
    log = tmp_path / "out.jsonl"
    launcher = areal_background(
        *("run", "--on", "ray", "--json"),
        *arguments(tiny_model, "ray", steps, "sglang:d2+fsdp:d2"),
        "stack.ranks_per_node=1",
        cwd=tmp_path,
        log=log,
    )
    try:
        eventually(lambda: len(rows_of(stack)) >= 2, "two steps", 400.0)
        (server,) = (
            process
            for process in find_tagged(stack.content["stack_id"], "inference-1")
            if "areal_inference" in process.cmdline()
        )
        server.kill()
        ray_processes = descendants(launcher.pid)
        assert launcher.wait(400.0) == 0, log.read_text() + stack.log("launcher")
    finally:
        launcher.kill()
        left = end_all(stack) if stack.content else 0
    assert left == 0
    eventually(
        lambda: not any(process.is_running() for process in ray_processes), "Ray has ended", 60.0
    )
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["restarts"] == {"inference-1": 1}
    check_books(summary, steps)


def test_ray_when_the_driver_is_killed_then_its_processes_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "orphan")
    log = tmp_path / "out.log"
    launcher = areal_background(
        *("run", "--on", "ray", *arguments(tiny_model, "orphan", 50, "sglang:d1+fsdp:d1")),
        cwd=tmp_path,
        log=log,
    )
    try:
        eventually(lambda: len(rows_of(stack)) >= 1, "a step", 300.0)
        ray_processes = descendants(launcher.pid)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(10.0)
        gone = lambda: not stack.processes()  # noqa: E731
        eventually(gone, "all processes of the stack are gone", 90.0)
        eventually(
            lambda: not any(process.is_running() for process in ray_processes), "so is Ray", 90.0
        )
    finally:
        launcher.kill()
        if stack.content:
            end_all(stack)
