"""A worker process that starts on a machine that has no time for it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from structlog.testing import capture_logs

from areal.errors import WaitTimeout
from areal_reward import process as process_module
from areal_reward.children import Children
from areal_reward.config import RewardConfig
from areal_reward.process import WorkerProcess


async def test_worker_when_it_starts_slowly_then_it_is_waited_for_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Importing takes many times the usual time, as at load 35."""
    monkeypatch.setattr(process_module, "_PATIENCE", 12_000, raising=False)
    async with aclosing(_Beside()) as children:
        with capture_logs() as lines:
            worker = await WorkerProcess.start(RewardConfig(load_timeout_s=0.01), children)
        await worker.end()
    slow = [line for line in lines if line["event"] == "worker_starts_slowly"]
    assert slow
    assert "overloaded" in slow[0]["hint"]


async def test_worker_when_it_starts_beside_another_process_then_that_one_lives() -> None:
    other = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        async with aclosing(_Beside()) as children:
            worker = await WorkerProcess.start(RewardConfig(), children)
            await worker.end()
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_worker_when_it_never_starts_then_the_wait_ends_and_so_does_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "_PATIENCE", 2)
    async with aclosing(_Beside()) as children:
        with pytest.raises(WaitTimeout, match="a reward worker to start"):
            await WorkerProcess.start(RewardConfig(load_timeout_s=0.001), children)


class _Beside(Children):
    """Only the worker: what else this process has started, other tests' servers, is no stray."""

    async def start(self, *argv: str, **options: Any) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*argv, **options)
        self._started.append(process)
        return process

    async def end_strays(self) -> None:
        pass

    async def aclose(self) -> None:
        await self.close()
