"""The launcher's side of the guard: it is started again, whatever is in the way of that."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from areal_launch.processes.orphan_guard import Guard


async def test_guard_when_it_died_and_cannot_be_started_then_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    up = asyncio.Event()

    def report(level: str, _: str, text: str) -> None:
        said.append(text)
        if level == "state":
            up.set()

    guard = Guard(tmp_path / "stack.json", "test/none", None, report)
    await guard.start()
    first, execute = guard.pid, asyncio.create_subprocess_exec

    async def refuse(*_: Any, **__: Any) -> asyncio.subprocess.Process:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", execute)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    try:
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(up.wait(), 60)
        assert guard.pid != first
        assert "cannot be started: [Errno 11]" in "\n".join(said)
    finally:
        await guard.stop()


async def test_guard_when_its_keeper_fails_then_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def report(level: str, _: str, text: str) -> None:
        if level == "error":
            told.set_result(text)

    guard = Guard(tmp_path / "stack.json", "test/none", None, report)
    await guard.start()

    async def fail() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(guard, "_spawn", fail)
    try:
        os.kill(guard.pid, signal.SIGKILL)
        text = await asyncio.wait_for(told, 60)
        assert text == "the orphan guard is no longer supervised: ValueError: a bug"
    finally:
        await guard.stop()
