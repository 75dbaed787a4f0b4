"""What the executor does with leases: takes them, renews them, loses them, hands groups in."""

import asyncio
import time

from tests.unit.areal_rollout.fakes import Rig, lease, one_sample

from areal.errors import CapacityExceeded, InvalidInput, NotFound, Unavailable, WaitTimeout
from areal.protocol.leases import ReturnCause


async def test_executor_when_many_tasks_then_never_more_than_capacity_and_all_end():
    most = 0

    async def episode(engine, data):
        nonlocal most
        most = max(most, rig.executor.running)
        return await one_sample(engine, data)

    async with Rig(episode, capacity=10) as rig:
        rig.ledger.add(*[lease(f"t{i}") for i in range(200)])
        await rig.ended(200)
    assert most == 10
    assert len(rig.ledger.completed) == 200
    assert max(rig.ledger.calls) == 10


async def test_executor_when_capacity_is_large_then_leases_at_most_max_leases_a_call():
    async with Rig(one_sample, capacity=5000, max_leases=64) as rig:
        rig.ledger.add(*[lease(f"t{i}") for i in range(300)])
        await rig.ended(300)
    assert max(rig.ledger.calls) == 64


async def test_report_when_the_ledger_is_away_or_full_then_tried_again():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.extend([Unavailable("x"), CapacityExceeded("memory")])
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert set(rig.ledger.completed) == {"a"}


async def test_report_when_the_ledger_says_when_to_try_again_then_not_before():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.append(CapacityExceeded("memory; try again in 0.7 s"))
        rig.ledger.add(lease("a"))
        began = time.monotonic()
        await rig.ended(1)
    assert set(rig.ledger.completed) == {"a"}
    assert time.monotonic() - began > 0.7


async def test_report_when_the_task_is_gone_then_the_work_is_dropped():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.append(NotFound("task a: unknown"))
        rig.ledger.add(lease("a"), lease("b"))
        await rig.until(lambda: rig.ledger.completed and not rig.executor.running)
    assert len(rig.ledger.completed) == 1


async def test_report_when_the_group_is_refused_then_returned_as_workflow_error():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.append(InvalidInput("group 'a': 70 MB, expected at most 64 MB"))
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "70 MB" in more["detail"]


async def test_report_when_the_journal_is_refused_then_returned_without_it():
    async with Rig(one_sample) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        rig.ledger.errors.append(InvalidInput("partial: too large"))
        await rig.executor.drain(2.0)
    cause, more = rig.ledger.returned["a"]
    assert (cause, more["partial"]) == (ReturnCause.DRAIN, b"")


async def test_report_when_the_ledger_stays_away_then_given_up_at_the_deadline():
    async with Rig(one_sample, report_timeout_s=0.3) as rig:
        rig.ledger.errors.extend([Unavailable("away")] * 50)
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.observer.outcomes["lost"])
        assert rig.executor.running == 0
    assert rig.ledger.ended == 0


async def test_lease_when_lost_then_the_episode_is_stopped_and_hands_nothing_in():
    async with Rig(one_sample, lease_ttl_s=0.06) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a", token=5), lease("b", token=6))
        await rig.until(lambda: rig.generation.running == 2)
        await rig.until(lambda: rig.ledger.renewed)
        assert rig.ledger.renewed[0] == [("a", 5), ("b", 6)]
        rig.ledger.lost.add("a")
        await rig.until(lambda: rig.observer.outcomes["lost"])
        assert rig.executor.running == 1
        rig.generation.hold = False
        assert rig.generation.running == 1
    assert rig.ledger.ended == 0


async def test_renewal_when_the_ledger_is_slow_then_no_lease_waits_for_another(monkeypatch):
    monkeypatch.setattr("areal_rollout.executor._RENEW_CHUNK", 2)
    async with Rig(one_sample, lease_ttl_s=0.06) as rig:
        rig.generation.hold = True
        answered = asyncio.Event()

        async def renew_leases(worker_id, leases):
            rig.ledger.renewed.append([task_id for task_id, _ in leases])
            await answered.wait()
            return {"c"}

        rig.ledger.add(*[lease(task_id) for task_id in "abcde"])
        await rig.until(lambda: rig.generation.running == 5)
        rig.ledger.renewed.clear()
        rig.ledger.renew_leases = renew_leases
        await rig.until(lambda: len(rig.ledger.renewed) == 3)  # before any is answered
        assert rig.ledger.renewed == [["a", "b"], ["c", "d"], ["e"]]
        answered.set()
        await rig.until(lambda: rig.executor.running == 4)


async def test_lease_when_the_same_task_comes_again_then_the_older_episode_stops():
    async with Rig(one_sample) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a", token=1))
        await rig.until(lambda: rig.generation.running == 1)
        rig.ledger.add(lease("a", token=2))
        await rig.until(lambda: len(rig.generation.requests) == 2)
        await rig.until(lambda: rig.generation.running == 1)
        assert rig.executor.running == 1
        await rig.executor.drain(2.0)
    assert rig.ledger.returned["a"][0] is ReturnCause.DRAIN
    assert rig.observer.outcomes == {"lost": 1, "drain": 1}


async def test_renewal_when_the_ledger_is_away_then_episodes_go_on():
    async with Rig(one_sample, lease_ttl_s=0.03) as rig:

        async def renew_leases(worker_id, leases):
            rig.ledger.renewed.append(leases)
            raise Unavailable("away")

        rig.ledger.renew_leases = renew_leases
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: len(rig.ledger.renewed) > 3)
        assert rig.executor.running == 1


async def test_lease_loop_when_the_ledger_is_away_then_goes_on_after_it():
    async with Rig(one_sample) as rig:
        rig.ledger.lease_errors.extend([Unavailable("away"), WaitTimeout("LeaseTasks")])
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.observer.reasons["ledger"] == 2


async def test_lease_loop_when_no_server_serves_then_takes_no_task():
    async with Rig(one_sample) as rig:
        rig.generation.ready = False
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.observer.reasons["no_server"] > 2)
        assert rig.ledger.calls == []
        rig.generation.ready = True
        await rig.ended(1)


async def test_lease_loop_when_there_is_nothing_then_the_reason_is_counted():
    async with Rig(one_sample, lease_wait_s=0.01) as rig:
        await rig.until(lambda: rig.observer.reasons["queue"])
        rig.ledger.reason = "admission: 4 groups are ahead"
        await rig.until(lambda: rig.observer.reasons["admission"])
