"""A group whose agents did not all end their attempts: a worker makes it of those that they did."""

from __future__ import annotations

import orjson
import pytest
from tests.ledger_support import Book
from tests.session_hops import Hops

from areal.errors import LeaseLost
from areal.protocol.leases import Lease
from areal.protocol.trajectories import task_from_pb
from areal.v1 import buffer_service_pb2 as pb
from areal_rollout.sessions import Sessions


class Agents:
    """Those of one group, at any worker."""

    def __init__(self, book: Book, attempts: int) -> None:
        self.hops, self.attempts = Hops(book, letters=3), attempts
        self.book, self.worker = book, self.hops.worker()

    async def open(self) -> None:
        await self.hops.open("s", attempts=self.attempts)

    async def ask(
        self, attempt: int, path: str, body: object = None, method: str = "POST"
    ) -> object:
        self.hops.id = f"s-{attempt}"
        reply = await self.hops.reply(self.worker, path, body, method)
        return reply.status, orjson.loads(reply.body)

    async def end(self, attempt: int, reward: float) -> None:
        body = {"messages": [{"role": "user", "content": f"{attempt}"}], "max_tokens": 8}
        assert (await self.ask(attempt, "/v1/chat/completions", body))[0] == 200
        assert (await self.ask(attempt, "/end", {"reward": reward}))[0] == 200

    async def lease(self) -> Lease:
        [found], _ = await self.book.leases(5)
        return lease_of(found)


def lease_of(found: pb.Lease) -> Lease:
    task = task_from_pb(found.task)
    return Lease(task, found.token, found.policy_version, 9.0, attempts=found.attempts)


async def complete(agents: Agents, worker: Sessions, lease: Lease) -> None:
    group = await worker.group(lease)
    assert await agents.hops.groups.complete_task("s", lease.token, group, "w")


async def test_group_when_one_agent_is_silent_then_the_others_are_delivered_and_it_is_told(book):
    agents = Agents(book, 3)
    await agents.open()
    await agents.end(0, 0.25)
    await agents.end(2, 0.75)
    await agents.ask(1, "/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]})
    await agents.ask(1, "/reward", {"reward": 9.0})
    await book.expire_lease("s")
    assert await agents.ask(0, "/end") == (200, {"id": "s-0", "state": "queued"})
    lease = await agents.lease()
    assert await agents.ask(0, "/end") == (200, {"id": "s-0", "state": "running"})
    await complete(agents, agents.hops.worker(), lease)
    group = agents.hops.groups.group
    assert [each.reward for each in group.trajectories] == [0.25, 0.75]
    assert [each.trajectory_id for each in group.trajectories] == [
        f"s.{lease.token}.{index}" for index in range(2)
    ]
    why = "session expired: its agent was silent for 60 s; 2 of 3 attempts had ended"
    for path in ("/end", "/v1/chat/completions"):
        status, body = await agents.ask(1, path, {"messages": [{"role": "user", "content": "1"}]})
        assert (status, body["error"]["message"]) == (410, f"session s is expired: {why}")
    _, state = await agents.ask(1, "", method="GET")
    assert (state["state"], state["reason"]) == ("expired", why)
    assert (await agents.ask(2, "/end"))[1]["state"] == "delivered"


async def test_group_when_an_agent_rewrites_its_history_then_what_repeats_it_is_marked(book):
    agents = Agents(book, 1)
    await agents.open()
    messages = [{"role": "user", "content": "12:00"}]
    for minute in range(2):
        messages[0] = {"role": "user", "content": f"12:0{minute}"}
        _, reply = await agents.ask(0, "/v1/chat/completions", {"messages": messages})
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "more"}]
    assert (await agents.ask(0, "/end", {"reward": 1.0}))[0] == 200
    group = agents.hops.groups.group
    assert [each.reward_parts for each in group.trajectories] == [{}, {"splits": 1.0}]
    assert [each.split for each in group.trajectories] == ["", "messages[0].content"]


async def test_group_when_the_worker_of_the_last_end_died_then_another_one_makes_it(book):
    agents = Agents(book, 2)
    await agents.open()
    await agents.end(0, 0.0)
    lost = agents.hops.groups.complete_task

    class Died(BaseException):
        """Which no handler of errors answers."""

    async def die(*_: object) -> bool:
        raise Died

    agents.hops.groups.complete_task = die
    with pytest.raises(Died):
        await agents.end(1, 1.0)
    agents.hops.groups.complete_task = lost
    await book.expire_lease("s")
    lease = await agents.lease()
    await complete(agents, agents.hops.worker(), lease)
    assert [each.reward for each in agents.hops.groups.group.trajectories] == [0.0, 1.0]
    assert (await agents.ask(1, "/end"))[1]["state"] == "delivered"


async def test_end_when_it_takes_so_long_that_a_worker_has_the_group_then_it_is_told_so(book):
    agents = Agents(book, 1)
    await agents.open()
    complete_task, taken = agents.hops.groups.complete_task, []

    async def slow(*arguments: object) -> bool:
        await book.expire_lease("s")
        taken.append(await agents.lease())
        return await complete_task(*arguments)

    agents.hops.groups.complete_task = slow
    body = {"messages": [{"role": "user", "content": "1"}]}
    await agents.ask(0, "/v1/chat/completions", body)
    assert await agents.ask(0, "/end", {"reward": 1}) == (200, {"id": "s-0", "state": "running"})
    agents.hops.groups.complete_task = complete_task
    await complete(agents, agents.hops.worker(), taken[0])


async def test_group_when_its_task_has_ended_then_the_worker_is_told(book):
    agents = Agents(book, 2)
    await agents.open()
    await agents.end(0, 1.0)
    await book.expire_lease("s")
    lease = await agents.lease()
    await book.store.cancel(["s"], None, reason="enough", incarnation=0)
    with pytest.raises(LeaseLost, match="session s: it has ended"):
        await agents.hops.worker().group(lease)
