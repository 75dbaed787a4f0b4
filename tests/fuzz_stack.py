"""Every service of the project running at once, watched while it is sent nonsense."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.buffer_client import BufferClient
from tests.rollout_stack import Process, Stack, free_port, start_stack

from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import save_config
from areal.types import Purpose, Task, TaskState, WorkflowSpec

# What repeating the same nonsense may add to a process: allocators keep some of what bursts took
# (a request may be tens of MiB), and caches fill up to their bounds. A leak of one request's
# bytes shows at once: what is sent between the two readings is larger than this.
GROWTH_BYTES = 48 * 1024 * 1024
# glibc gives freed memory back at once, so that what a burst took is not mistaken for a leak.
_GIVE_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "8192",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
RLVR = {"reward_fn": "math", "gconfig": {"n_samples": 2, "max_new_tokens": 4}}
ROW = {"prompt": "1+1=", "answer": "2"}


class FuzzedStack:
    """The stack and what must stay true of it."""

    def __init__(self, whole: Stack) -> None:
        self.whole = whole
        ends = whole.config.endpoints
        self.grpc = {
            "buffer": ends.buffer,
            "reward": ends.reward,
            "rollout": ends.rollout,
            "sandbox": ends.sandbox,
            "trainer": ends.trainer,
            "weight_sync": ends.weight_sync,
        }
        self.processes = {"inference": "inference-0"}

    def rss(self, name: str) -> int:
        """Resident bytes of a process and its children."""
        root = psutil.Process(self.whole.processes[self.processes.get(name, name)].pid)
        # How many boxes are warm, lent or ending changes by the second.
        children = [] if name == "sandbox" else root.children(recursive=True)
        return sum(each.memory_info().rss for each in [root, *children])

    def assert_unharmed(self, name: str, rss_before: int) -> None:
        """Alive, not larger, and nothing in its log that only a bug would write."""
        process = self.whole.processes[self.processes.get(name, name)]
        assert process.running, f"{name} ended: {process.log[-3000:]}"
        bad = [
            line
            for line in process.log.splitlines()
            if "Traceback (most recent" in line
            or '"level": "error"' in line
            or line.startswith(("ERROR", "CRITICAL"))
        ]
        assert not bad, f"{name} logged {len(bad)} errors, first: {bad[0][:4000]}"
        grown = self.rss(name) - rss_before
        assert grown < GROWTH_BYTES, f"{name} grew by {grown / 2**20:.0f} MiB"

    def assert_serves(self) -> None:
        """A task goes the whole way: rollout, ledger, weight-sync, inference, reward, and back."""
        asyncio.run(self._serves())

    async def _serves(self) -> None:
        ends = self.whole.config.endpoints
        ledger, client = BufferClient(ends.buffer), RolloutClient(ends.rollout)
        weight_sync = WeightSyncClient(ends.weight_sync)
        try:
            for purpose in Purpose:
                await ledger.cancel_tasks(all_of_purpose=purpose)
            await weight_sync.register_server(ends.inference[0])
            task = Task(
                f"good-{uuid.uuid4().hex}",
                Purpose.SERVE,
                WorkflowSpec("rlvr", "", json.dumps(RLVR)),
                ROW,
            )
            assert await client.submit_tasks([task]) == [True]
            async for record in client.watch_tasks([task.task_id], timeout=40):
                assert record.state is TaskState.DELIVERED, record
        finally:
            for each in (ledger, client, weight_sync):
                await each.close()


@contextmanager
def fuzzed_stack(folder: Path) -> Iterator[FuzzedStack]:
    """All services with one inference server."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name, value in _GIVE_BACK.items():
            patch.setenv(name, value)
        whole = stack.enter_context(start_stack(folder, servers=1, lease_ttl_s=2.0))
        ends = whole.config.endpoints
        ends.trainer, ends.sandbox, gateway, boxes = (f"127.0.0.1:{free_port()}" for _ in range(4))
        ends.gateway, ends.sandbox_http = f"http://{gateway}", f"http://{boxes}"
        whole.config.sandbox.boxes = 2
        if not shutil.which("bwrap"):
            whole.config.sandbox.isolation = "rlimits"
        save_config(whole.config, whole.config_file)
        whole.processes["trainer"] = Process(
            folder / "trainer.log", "tests.trainer_server", ends.trainer
        )
        whole.service("rollout", ends.rollout)
        whole.service("gateway", gateway)
        whole.service("sandbox", ends.sandbox)
        for name in ("trainer", "rollout", "sandbox"):
            whole.wait(name, getattr(ends, name))
        yield FuzzedStack(whole)
