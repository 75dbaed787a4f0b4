"""Outside agents, while everything that serves them is killed: each is trained once, or by name."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.buffer_client import BufferClient
from tests.chaos.session_faults import Kills, under
from tests.integration.gateway_agents import Refused, agents_stack, request
from tests.integration.one_port import one_port
from tests.integration.test_sandbox import REASON
from tests.ports import free_port
from tests.redis_server import RedisServer
from tests.rollout_stack import Stack

from areal.clients.sandbox import LentBox, SandboxClient
from areal.config.experiment import save_config
from areal.errors import ArealError, CapacityExceeded, NotFound, Unavailable, WaitTimeout
from areal.protocol.boxes import Limits, Outcome
from areal.protocol.leases import TaskRecord
from areal.types import TrajectoryGroup

# The full run, `make chaos-sessions`: CHAOS_AGENTS=200 CHAOS_KILLS=30, with three seeds.
AGENTS = int(os.environ.get("CHAOS_AGENTS", "60"))
KILLS = int(os.environ.get("CHAOS_KILLS", "15"))
GATEWAYS = WORKERS = 3  # each gateway has one connection, to a worker of its own
AT_ONCE = 20
TURNS = 3
# Under load a killed service is away for a minute, and silence must not be what ends most sessions.
IDLE_S = max(120.0, float(AGENTS))
AGENTS_S = 180.0 + 4 * AGENTS
"""Within this all agents must have ended after the last kill."""


SMALL = Limits(seconds=60, memory_mb=128, processes=16)
# What an agent tries again with the sandbox service; NotFound: its box ended with the service.
RETRYABLE = (Unavailable, CapacityExceeded, WaitTimeout, NotFound)

Http = openai.DefaultAsyncHttpxClient


async def speak(url: str, http: Http, path: str, key: str, call: Any) -> str:
    """A call by the SDK that agents use, unchanged; it decides itself what it tries again."""
    base_url = f"{url}{path}/v1"
    llm = openai.AsyncOpenAI(base_url=base_url, api_key=key, http_client=http, max_retries=100)
    answer = await llm.chat.completions.create(model="any", **call)
    return answer.choices[0].message.content or ""


class Boxes:
    """One agent's boxes: a tool of some, the verifier of others. They end with their service."""

    def __init__(self, client: SandboxClient, number: int, seen: Counter[str]) -> None:
        self._client, self._number, self._seen = client, number, seen
        self._box: LentBox | None = None

    async def tool(self) -> str:
        """Counts the calls in a file of a lent box; where that is gone, in another one."""
        return await self._persist(self._count)

    async def reward(self) -> float:
        """The agent's number, by a program in a box of its own."""
        return float(await self._persist(self._verify))

    async def close(self) -> None:
        if self._box is not None:
            with suppress(ArealError):  # it is gone, or its time ends it
                await self._box.kill()

    async def _count(self) -> str:
        if self._box is None:
            self._box = await self._client.lend(SMALL, ttl_s=60.0)
        try:
            outcome = await self._box.run(argv=["sh", "-c", "echo call >> calls; wc -l < calls"])
        except NotFound:
            self._box = None
            raise
        return self._checked(outcome)

    async def _verify(self) -> str:
        return self._checked(await self._client.run(f"print({self._number})", limits=SMALL))

    def _checked(self, outcome: Outcome) -> str:
        if outcome.cause == "killed":
            raise Unavailable("the box was killed")
        assert (outcome.exit_code, outcome.cause) == (0, ""), outcome
        return outcome.stdout.strip()

    async def _persist(self, call: Callable[[], Awaitable[str]]) -> str:
        for _ in range(1000):
            try:
                return await call()
            except RETRYABLE as error:
                self._seen[type(error).__name__] += 1
                await asyncio.sleep(0.3)
        raise AssertionError("the sandbox service did not come back")


def alike_of(number: int) -> int:
    """How many equal questions an agent asks at once before its conversation."""
    return 3 if number % 3 == 0 else 0


async def agent(
    url: str, number: int, http: Http, boxes: Boxes, seen: Counter[str]
) -> tuple[str, str]:
    """One agent's whole life; returns its task and how its session ended, as far as it was told."""
    body = {"task": {"number": number}, "ttl_s": IDLE_S}
    opened = await request([url], "POST", "/v1/sessions", body=body, tries=5000, seen=seen)
    path, key, task_id = f"/sessions/{opened['id']}", opened["api_key"], opened["task_id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number}+1="}]
    chat = f"{path}/v1/chat/completions"

    async def alike(index: int) -> None:
        """One of several equal questions at once; its answer has a reward of its own."""
        call = {"messages": messages[:1], "max_tokens": 24}
        answer = await request([url], "POST", chat, key, call, tries=1000, seen=seen)
        told = {"completion_id": answer["id"], "reward": number + index / 4}
        await request([url], "POST", f"{path}/v1/reward", key, told, tries=1000, seen=seen)

    try:
        await asyncio.gather(*(alike(index) for index in range(1, alike_of(number) + 1)))
        for _ in range(TURNS):
            call = {"messages": messages, "max_tokens": 24}
            if number % 2:
                said = await speak(url, http, path, key, call)
            else:
                answer = await request([url], "POST", chat, key, call, tries=1000, seen=seen)
                said = answer["choices"][0]["message"]["content"]
            found = await boxes.tool() if number % 4 == 0 else "?"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
            await asyncio.sleep(random.uniform(0.0, 1.0))
        last = {"reward": await boxes.reward() if number % 4 == 1 else number}
        ended = await request([url], "POST", f"{path}/end", key, last, tries=1000, seen=seen)
    except (Refused, openai.APIStatusError) as refused:
        # Nothing but the end of its session may be final.
        status = getattr(refused, "status_code", None) or int(str(refused)[:3])
        if status != 410:
            raise
        return task_id, "expired"
    finally:
        await boxes.close()
    return task_id, ended["state"]


class Trainer:
    """Takes and commits batches of two until it is told to stop; the weights stay as they are."""

    def __init__(self, address: str) -> None:
        self._client = BufferClient(address)
        self.trained: list[str] = []
        self.groups: dict[str, TrajectoryGroup] = {}
        self.stopping = False

    async def run(self) -> None:
        client = self._client
        register = lambda: client.register_trainer(  # noqa: E731
            resume_step=0,
            batch_size=2,
            max_head_offpolicyness=10 * AGENTS,
            max_concurrent_rollouts=AT_ONCE,
        )
        incarnation, step = (await persist(register)).incarnation, 1
        while True:
            taken = await persist(
                lambda: client.take_batch(incarnation, step, 1.0, confirmed_version=0)  # noqa: B023
            )
            ids = [group.task_id for group in taken.groups]
            if not ids:
                if taken.state == "exhausted":
                    return
                if self.stopping:
                    await persist(lambda: client.submit_tasks([], seal=True))
                continue
            groups = await persist(lambda: client.fetch_groups(incarnation, step, ids))  # noqa: B023
            self.trained += ids
            self.groups |= {group.task_id: group for group in groups}
            await persist(lambda: client.commit_step(incarnation, step, step))  # noqa: B023
            step += 1

    async def close(self) -> None:
        await self._client.close()


async def persist(call: Callable[[], Any], tries: int = 300) -> Any:
    for _ in range(tries):
        try:
            return await call()
        except ArealError as error:
            last = error
            await asyncio.sleep(0.2)
    raise AssertionError(last)


def start_sandbox(whole: Stack) -> None:
    """Adds a sandbox service; where there are no user namespaces, its weaker mode."""
    whole.config.sandbox.boxes = 16
    whole.config.sandbox.isolation = "rlimits" if REASON else "namespaces"
    whole.config.endpoints.sandbox = f"127.0.0.1:{free_port()}"
    save_config(whole.config, whole.config_file)
    whole.service("sandbox", whole.config.endpoints.sandbox)
    whole.wait("sandbox", whole.config.endpoints.sandbox)


@pytest.mark.timeout(240 + 2 * AGENTS_S)
async def test_sessions_when_everything_is_killed_then_each_is_trained_once_or_ended_by_name(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))
    began = time.monotonic()
    print(f"CHAOS_SEED={seed} CHAOS_AGENTS={AGENTS} CHAOS_KILLS={KILLS}")
    redis = RedisServer(tmp_path / "redis", "always")
    redis.start()
    try:
        with agents_stack(
            tmp_path,
            GATEWAYS,
            WORKERS,
            partial(under, tmp_path),
            redis=redis.url,
            lease_ttl_s=5.0,
        ) as (whole, urls):
            start_sandbox(whole)
            kills = Kills(whole, urls, redis, seed)
            sandbox = SandboxClient(whole.config.endpoints.sandbox)
            trainer = Trainer(whole.config.endpoints.buffer)
            training = asyncio.create_task(trainer.run())
            seen: Counter[str] = Counter()
            lost_boxes: Counter[str] = Counter()
            async with one_port(urls) as url, Http(verify=False, timeout=120.0) as http:
                agents = [
                    asyncio.create_task(
                        agent(url, number, http, Boxes(sandbox, number, lost_boxes), seen)
                    )
                    for number in range(AGENTS)
                ]
                await kills.run(KILLS)
                left = sum(not each.done() for each in agents)
                told = await asyncio.wait_for(asyncio.gather(*agents), AGENTS_S)
            trainer.stopping = True
            await asyncio.wait_for(training, 2 * IDLE_S + 60)
            client = BufferClient(whole.config.endpoints.buffer)
            stats = await persist(client.get_stats)
            records = await persist(lambda: client.get_tasks([task_id for task_id, _ in told]))
            await client.close()
            await trainer.close()
            await sandbox.close()
    finally:
        redis.kill()
    counts = {state.value: tasks for state, tasks in stats.counts.items() if tasks}
    found = [
        outcome(number, state, record, trainer)
        for number, ((_, state), record) in enumerate(zip(told, records, strict=True))
    ]
    ends = Counter(end for end, _ in found)
    answers = sum(number for _, number in found)
    twice = sum(times - 1 for times in Counter(trainer.trained).values())
    print(f"{KILLS} kills, {left} agents left at the last: {dict(kills.done)}")
    print(f"{dict(ends)}; {answers} rewarded answers trained on; {twice} sessions trained on twice")
    print(f"refusals {dict(seen)}, of boxes {dict(lost_boxes)}")
    print(f"{(time.monotonic() - began) / 60:.1f} min, load {os.getloadavg()}")
    # Each has a cause that we name: an unforeseen error would be a 500.
    assert set(seen) <= {"connection", "429", "503", "504"}
    assert set(ends) <= {"trained", "expired"}, found
    # An answer to POST /v1/sessions that is lost leaves no session that no one drives.
    assert dict(ends) == counts
    assert stats.submitted == AGENTS
    assert twice == 0
    assert len(trainer.trained) == counts["trained"]
    assert counts["trained"] > 0.8 * AGENTS
    assert sum(kills.done.values()) == KILLS


def outcome(number: int, told: str, record: TaskRecord, trainer: Trainer) -> tuple[str, int]:
    """How an agent's session ended, and how many answers that had a reward were trained on.

    Args:
        number: The agent.
        told: How its session ended, as far as it knows.
        record: Its task.
        trainer: What trained.

    Returns:
        "trained": each rewarded answer is trained on, and nothing else. "expired": the record names
        the cause. Otherwise, what is wrong.
    """
    if record.state == "expired":
        return ("expired" if told == "expired" and record.reason else f"expired: {record}"), 0
    if record.state != "trained" or told == "expired":
        return f"agent {number} was told {told}: {record}", 0
    *alike, trajectory = trainer.groups[record.task.task_id].trajectories
    own = [number + index / 4 for index in range(1, alike_of(number) + 1)]
    if (rewards := sorted(each.reward for each in alike)) != own or trajectory.reward != number:
        return f"agent {number} gave {own} and {number}: {rewards} and {trajectory.reward}", 0
    turns = int((np.diff(trajectory.loss_mask.astype(int), prepend=0) == 1).sum())
    if turns != TURNS:
        return f"agent {number} had {TURNS} answers: {turns}", 0
    return "trained", len(own) + 1
