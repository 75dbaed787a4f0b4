"""The executor where a limit, a version or a server decides."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.areal_rollout.fakes import Rig, lease, one_sample, request

from areal.errors import InvalidInput, Unavailable
from areal.protocol.leases import ReturnCause
from areal.types import Purpose
from areal.workflows.base import make_trajectory
from areal_launch.processes.descendants import PROCESS_VARIABLE
from areal_rollout.config import worker_identity
from areal_rollout.journal import decode


async def test_report_when_overdue_and_the_ledger_is_away_then_it_is_still_offered():
    async def hangs(engine, data):
        await asyncio.Event().wait()

    async with Rig(hangs, lease_ttl_s=0.03, episode_timeout_s=0.05) as rig:
        rig.ledger.errors.extend([Unavailable("away")] * 3)
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "ran longer than 0.05 s" in more["detail"]


@pytest.mark.parametrize(("leased", "pinned", "asked"), [(3, None, 3), (3, 5, 5), (7, 5, 7)])
async def test_request_when_the_lease_or_the_task_names_a_version_then_none_below_either(
    leased, pinned, asked
):
    async with Rig(one_sample) as rig:
        rig.generation.version = pinned or leased
        one = lease("a", version=leased)
        task = replace(one.task, purpose=Purpose.SERVE, policy_version=pinned)
        rig.ledger.add(replace(one, task=task))
        await rig.ended(1)
    [(_, _, min_version, _)] = rig.generation.requests
    assert min_version == asked
    assert set(rig.ledger.completed) == {"a"}


async def test_request_when_earlier_attempts_failed_on_servers_then_those_are_avoided():
    async with Rig(one_sample) as rig:
        rig.ledger.add(lease("a", failed=("http://bad:1", "http://bad:2")))
        await rig.ended(1)
    [(_, _, _, avoided)] = rig.generation.requests
    assert list(avoided) == ["http://bad:1", "http://bad:2"]


async def test_score_when_there_are_token_ids_then_each_completion_has_its_own():
    async def scores(engine, data):
        response = await engine.agenerate(request())
        rewards = await engine.score(
            "math",
            completions=["x", "y"],
            data={"answer": "2"},
            prompt="p",
            prompt_ids=[1],
            completion_ids=[[2, 3], [4]],
            kwargs={"k": 1},
        )
        return make_trajectory(response, rewards[0])

    async with Rig(scores) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    [(name, digest, kwargs, items)] = rig.scorer.calls
    assert (name, digest, kwargs) == ("math", "", {"k": 1})
    assert [
        (i.prompt, i.completion, list(i.prompt_ids), list(i.completion_ids)) for i in items
    ] == [
        ("p", "x", [1], [2, 3]),
        ("p", "y", [1], [4]),
    ]
    assert all(item.data == {"answer": "2"} for item in items)


async def test_drain_when_the_workflow_is_not_there_yet_then_the_earlier_journal_stays():
    class Slow(dict):
        async def get(self, spec):
            self["asked"] = True
            await asyncio.Event().wait()

    async with Rig(one_sample) as rig:
        rig.executor._workflows = slow = Slow()
        rig.ledger.add(lease("a", partial=b"of an earlier attempt"))
        await rig.until(lambda: slow)
        await rig.executor.drain(2.0)
    cause, more = rig.ledger.returned["a"]
    assert (cause, more["partial"]) == (ReturnCause.DRAIN, b"of an earlier attempt")


async def test_return_when_a_server_failed_then_the_tokens_so_far_go_with_it_and_else_do_not():
    """An attempt that infrastructure ended continues; the recipe's own error begins again."""

    async def episode(engine, data):
        await engine.agenerate(request((1, 2)))
        if data["own"]:
            raise ValueError("mine")
        raise Unavailable("no server")

    async with Rig(episode) as rig:
        rig.ledger.add(lease("theirs", own=False), lease("mine", own=True))
        await rig.ended(2)
    assert len(decode(rig.ledger.returned["theirs"][1]["partial"], 1 << 20)) == 1
    assert rig.ledger.returned["mine"][1]["partial"] == b""


async def test_journal_when_longer_than_allowed_then_the_lease_returns_without_it():
    for size, kept in ((1 << 20, True), (8, False)):
        async with Rig(one_sample, journal_max_bytes=size) as rig:
            rig.generation.hold = True
            rig.ledger.add(lease("a"))
            await rig.until(lambda: rig.generation.running)
            await rig.executor.drain(5.0)
        assert bool(rig.ledger.returned["a"][1]["partial"]) is kept


async def test_busy_when_accounted_in_between_then_no_second_counts_twice(monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])  # the loop keeps its own
    monkeypatch.setattr("areal_rollout.executor.time", clock)
    async with Rig(one_sample, lease_ttl_s=3600.0) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        while not rig.generation.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(3):
            now[0] += 2.0
            rig.executor.busy_s()
        assert rig.executor.busy_s() == 6.0
        assert rig.observer.busy_s == 6.0
        now[0] += 1.0
        rig.generation.hold = False
        rig.generation._interrupted.set()
        while rig.executor.running:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert rig.observer.busy_s == 7.0


async def test_waits_when_tasks_stay_away_then_from_when_this_reason_began():
    async with Rig(one_sample, lease_wait_s=0.01) as rig:
        await rig.until(lambda: rig.observer.reasons["queue"] > 2)
        [first] = rig.executor.waits()
        assert (first.what, first.detail) == ("task", "queue")
        seen = rig.observer.reasons["queue"]
        await rig.until(lambda: rig.observer.reasons["queue"] > seen + 3)
        [later] = rig.executor.waits()
        assert later.seconds > first.seconds
        rig.ledger.reason = "admission: 4 groups are ahead"
        await rig.until(lambda: rig.observer.reasons["admission"])
        assert [wait.detail for wait in rig.executor.waits()] == ["admission"]
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        assert [wait.what for wait in rig.executor.waits() if wait.what == "episode"] == ["episode"]


async def test_lease_loop_when_the_ledger_refuses_then_it_ends_and_says_so():
    """Not a thing that passes: the process must end with it."""
    async with Rig(one_sample) as rig:
        rig.ledger.lease_errors.append(InvalidInput("worker_id ''"))
        await rig.until(lambda: rig.tasks[0].done())
        with pytest.raises(InvalidInput, match="worker_id"):
            rig.tasks.pop(0).result()


def test_worker_identity_when_named_then_the_same_with_a_larger_number_at_each_start(monkeypatch):
    monkeypatch.setenv(PROCESS_VARIABLE, "rollout-0")
    (name, first), (again, second) = worker_identity(), worker_identity()
    assert name == again
    assert name.endswith("-rollout-0")
    assert 0 < first <= second < 2**53
    monkeypatch.delenv(PROCESS_VARIABLE)
    (one, boot), (other, _) = worker_identity(), worker_identity()
    assert one != other
    assert boot == 0
