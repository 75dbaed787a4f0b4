"""One of three inference servers misbehaves under a real rollout service and weight-sync."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.bad_server import BadServer
from tests.integration.test_rollout_service import finished, rlvr, task
from tests.rollout_stack import Stack, free_port, start_stack

from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.types import TaskState
from areal.weights.servers import InferenceServer, ServerState

pytestmark = pytest.mark.timeout(240)

# What is said, and within how many seconds on an idle machine: the probe interval (1 s), two
# unanswered probes (2 s each); a lie is found out by an update that does not take.
FAULTS = {
    "hang": ("/model_info: no answer within 2.0 s", 5.0),
    "500": ("HTTP 500: Internal Server Error: CUDA error", 1.0),
    "garbage": ("not a JSON object", 1.0),
    "lie": ("reports weight_version '41', expected '0'", 2.0),
    "mute": ("/generate: HTTP 500: Internal Server Error: CUDA error", 1.0),
}
# The machine that runs this may be fifteen times overloaded.
PATIENCE_S = 15.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("bad-servers")
    with start_stack(folder, servers=2, max_concurrent_rollouts=8) as stack:
        url = f"http://127.0.0.1:{free_port()}"
        stack.inference("inference-bad", url)
        stack.behind = url
        address = stack.config.endpoints.rollout
        stack.service("rollout", address)
        stack.wait("rollout", address)
        yield stack


class Rig:
    """The stack's clients, and the bad server once it serves."""

    def __init__(self, stack: Stack, bad: BadServer) -> None:
        self.bad = bad
        self.rollout = RolloutClient(stack.config.endpoints.rollout)
        self.weight_sync = WeightSyncClient(stack.config.endpoints.weight_sync, retry_s=10)

    async def run(self, name: str, count: int, tokens: int) -> asyncio.Task[dict]:
        ids = [f"{name}-{index}" for index in range(count)]
        spec = rlvr(2, tokens, min_new_tokens=tokens)
        await self.rollout.submit_tasks([task(each, spec) for each in ids])
        return asyncio.create_task(finished(self.rollout, ids, timeout=120))

    async def until_it_generates(self, name: str) -> list[asyncio.Task[dict]]:
        """Tasks until the bad server has one: the rollout worker may not have heard of it yet."""
        runs = []
        for number in range(20):
            runs.append(await self.run(f"{name}-during-{number}", 6, 250))
            for _ in range(100):
                if self.bad.generated:
                    return runs
                await asyncio.sleep(0.02)
        raise AssertionError(f"{self.bad.url} got no request")

    async def until(self, state: ServerState, timeout: float) -> InferenceServer:
        end = time.monotonic() + timeout
        while True:
            servers, _ = await self.weight_sync.list_servers()
            server = next((s for s in servers if s.url == self.bad.url), None)
            if server is not None and server.state is state:
                return server
            assert time.monotonic() < end, (
                f"waited {timeout:.0f} s for {state}: {server}; {self.bad.generated} requests for "
                "generation came to it"
            )
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.rollout.close()
        await self.weight_sync.close()


@pytest.fixture
async def rig(stack: Stack) -> AsyncIterator[Rig]:
    bad = BadServer(stack.behind)
    await bad.start()
    rig = Rig(stack, bad)
    await rig.weight_sync.register_server(bad.url)
    await rig.until(ServerState.SERVING, 60.0)
    yield rig
    await rig.weight_sync.drain_server(bad.url, deadline=0.0)
    await rig.close()
    await bad.stop()


@pytest.mark.parametrize("mode", FAULTS)
async def test_server_when_it_misbehaves_then_named_and_left_out_until_it_heals(rig, mode, capsys):
    cause, within_s = FAULTS[mode]
    runs = await rig.until_it_generates(mode)
    rig.bad.mode = mode
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        seeing = group.create_task(rig.until(ServerState.QUARANTINED, within_s + PATIENCE_S))
        # Its probes are fine: only a request can find out, and the next ones may go elsewhere.
        while mode == "mute" and not seeing.done():
            runs.append(await rig.run(f"mute-more-{len(runs)}", 8, 100))
            await asyncio.wait({seeing}, timeout=0.5)
    seen = seeing.result()
    noticed = time.monotonic() - began
    assert cause in seen.cause

    records = {name: record for run in runs for name, record in (await run).items()}
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    assert all(r.attempts == 0 for r in records.values()), "no fault of the workflow's"
    took = time.monotonic() - began
    assert (await rig.until(ServerState.QUARANTINED, 30.0)).cause

    rig.bad.mode = "good"
    await rig.until(ServerState.SERVING, 40.0)
    before, healed = rig.bad.generated, time.monotonic()
    while rig.bad.generated == before:  # the rollout worker hears of it some time later
        assert time.monotonic() < healed + 60.0, "healed, it takes its share again"
        records = await (await rig.run(f"{mode}-after-{time.monotonic()}", 12, 20))
        assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    with capsys.disabled():
        print(f"\n{mode}: named after {noticed:.1f} s, idle {within_s} s; tasks took {took:.1f} s")


@pytest.mark.long
async def test_server_when_fifty_times_slower_then_it_gets_little_and_the_others_go_on(rig, capsys):
    rig.bad.mode = "slow"
    records = await (await rig.run("slow", 30, 40))
    assert {r.state for r in records.values()} == {TaskState.DELIVERED}
    share = rig.bad.generated / (2 * 30)
    with capsys.disabled():
        print(f"\nslow: {share:.0%} of the requests went to one of three servers")
    assert share < 0.25
