"""A worker process that starts on a machine that has no time for it."""

from __future__ import annotations

from contextlib import aclosing

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
    async with aclosing(_Closing()) as closing:
        with capture_logs() as lines:
            worker = await WorkerProcess.start(RewardConfig(load_timeout_s=0.01), closing.children)
        await worker.end()
    slow = [line for line in lines if line["event"] == "worker_starts_slowly"]
    assert slow
    assert "overloaded" in slow[0]["hint"]


async def test_worker_when_it_never_starts_then_the_wait_ends_and_so_does_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_module, "_PATIENCE", 2)
    async with aclosing(_Closing()) as closing:
        with pytest.raises(WaitTimeout, match="a reward worker to start"):
            await WorkerProcess.start(RewardConfig(load_timeout_s=0.001), closing.children)


class _Closing:
    def __init__(self) -> None:
        self.children = Children()

    async def aclose(self) -> None:
        await self.children.close()
