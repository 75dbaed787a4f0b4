"""What a recipe's code leaves behind does not outlive the stack, however the stack ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.daemons import SOURCE, Daemon
from tests.integration.stack_tools import RunningStack, areal, eventually

pytestmark = pytest.mark.timeout(300)

RECIPE = (
    SOURCE
    + """
import asyncio, os, subprocess, sys
from areal import RLVRWorkflow

def reward_fn(completions, **data):
    note = PLACE + "/of-reward"
    if not os.path.exists(note):
        leave_daemon(note)
    return 1.0

class Leaves(RLVRWorkflow):
    async def arun_episode(self, engine, data):
        note = PLACE + "/of-workflow"
        if not os.path.exists(note):
            code = SOURCE + "leave_daemon(" + repr(note) + ")"
            await asyncio.to_thread(subprocess.run, [sys.executable, "-S", "-c", code], env={})
        return await super().arun_episode(engine, data)

def main(argv): pass
"""
)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    left = [Daemon(tmp_path / "of-reward"), Daemon(tmp_path / "of-workflow")]
    yield left
    for daemon in left:
        daemon.clean_up()


@pytest.mark.parametrize("end", ["areal down", "kill -9 of the launcher"])
def test_daemons_when_the_stack_ends_then_they_are_gone(
    tiny_model: Path, tmp_path: Path, daemons: list[Daemon], end: str
) -> None:
    recipe = tmp_path / "recipe.py"
    names = f"PLACE, SOURCE = {str(tmp_path)!r}, {SOURCE!r}\n"
    recipe.write_text(names + RECIPE)
    stack = RunningStack(tmp_path / "runs" / "leftovers" / "t0")
    try:
        started = areal(
            *("up", "--detach", f"model.path={tiny_model}", "model.context_length=128"),
            *("experiment_name=leftovers", "trial_name=t0", "allocation_mode=sglang:d1+fsdp:d1"),
            cwd=tmp_path,
        )
        assert started.returncode == 0, started.stderr + stack.log("launcher")
        submitted = areal(
            *("submit", "-", "--wait", "--timeout", "60", "--recipe", str(recipe)),
            *("--workflow", "Leaves", "--run", str(stack.run_dir)),
            cwd=tmp_path,
            stdin=json.dumps({"task_id": "a", "prompt": "1+1=", "answer": "2"}) + "\n",
        )
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        eventually(lambda: all(daemon.left() for daemon in daemons), "the daemons", 60.0)
        assert all(daemon.lives() for daemon in daemons)
        if end == "areal down":
            stopped = areal("down", cwd=tmp_path)
            assert stopped.returncode == 0, stopped.stderr
        else:
            psutil.Process(stack.content["launcher"]["pid"]).kill()
        stack.assert_gone()
        eventually(
            lambda: not any(daemon.lives() for daemon in daemons), "the daemons are gone", 10.0
        )
    finally:
        stack.clean_up()
