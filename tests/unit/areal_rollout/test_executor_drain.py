"""Draining: leases go back with the tokens they have, and the next worker continues from them."""

import asyncio

from tests.unit.areal_rollout.fakes import (
    FakeGeneration,
    Rig,
    Unreplayable,
    group_of_four,
    lease,
    one_sample,
    request,
)

from areal.errors import Unavailable
from areal.protocol.leases import ReturnCause
from areal.types import LLMResponse, StopReason
from areal.workflows.base import make_trajectory
from areal_rollout.journal import decode, encode


async def test_drain_when_episodes_run_then_leases_go_back_and_the_rerun_continues():
    async with Rig(group_of_four) as rig:
        rig.generation.hold = True
        rig.ledger.add(*[lease(f"t{i}") for i in range(5)])
        await rig.until(lambda: rig.generation.running == 20)
        await rig.executor.drain(2.0)
        assert rig.executor.running == 0
    assert set(rig.ledger.returned) == {f"t{i}" for i in range(5)}
    cause, more = rig.ledger.returned["t0"]
    assert cause is ReturnCause.DRAIN
    assert len(decode(more["partial"], 1 << 20)) == 4

    async with Rig(group_of_four) as again:
        again.generation.version = 9
        again.ledger.add(lease("t0", token=2, partial=more["partial"]))
        await again.ended(1)
    assert [had for _, had, _, _ in again.generation.requests] == [2, 2, 2, 2]
    assert again.observer.tokens == 8
    for trajectory in again.ledger.completed["t0"].trajectories:
        assert trajectory.token_versions.tolist() == [-1, -1, 3, 3, 9, 9, 9, 9]
        assert trajectory.input_ids.tolist() == [1, 2, 48, 49, 50, 51, 52, 53]


async def test_drain_when_many_run_then_those_with_most_tokens_go_back_first():
    gate, at_gate = asyncio.Event(), []

    async def two_calls(engine, data):
        await engine.agenerate(request(n=data["tokens"]))
        at_gate.append(data["tokens"])
        await gate.wait()
        if data["scores"]:
            await asyncio.Event().wait()
        await engine.agenerate(request((1, 2, 3)))

    async with Rig(two_calls) as rig:
        for number, tokens in enumerate([3, 9, 1, 7, 5, 8]):
            rig.ledger.add(lease(f"t{tokens}", tokens=tokens, scores=number % 2 == 0))
        await rig.until(lambda: len(at_gate) == 6)
        rig.generation.hold = True
        gate.set()
        await rig.until(lambda: rig.generation.running == 3)
        await rig.executor.drain(2.0)
    assert list(rig.ledger.returned) == ["t9", "t8", "t7", "t5", "t3", "t1"]


async def test_drain_when_a_call_had_finished_then_the_rerun_does_not_make_it_again():
    async def two_turns(engine, data):
        first = await engine.agenerate(request((1, 2)))
        rig.generation.hold = True
        second = await engine.agenerate(request((*first.input_tokens, *first.output_tokens, 9)))
        return make_trajectory([first, second], 1.0)

    async with Rig(two_turns) as rig:
        rig.ledger.add(lease("a"))
        await rig.until(lambda: len(rig.generation.requests) == 2)
        await asyncio.sleep(0.01)
        await rig.executor.drain(2.0)
    partial = rig.ledger.returned["a"][1]["partial"]

    async with Rig(two_turns) as again:
        again.ledger.add(lease("a", token=2, partial=partial))
        await again.ended(1)
    assert len(again.generation.requests) == 1
    sent, had, _, _ = again.generation.requests[0]
    assert (len(sent.input_ids), had) == (9, 2)
    assert len(again.ledger.completed["a"].trajectories[0].input_ids) == 15


async def test_drain_when_the_workflow_is_not_replayable_then_no_journal():
    async with Rig(one_sample, Unreplayable) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        await rig.executor.drain(2.0)
    assert rig.ledger.returned["a"][1]["partial"] == b""

    answer = LLMResponse([1, 2], [], [], [], StopReason.ABORT)
    await FakeGeneration().generate(request(), [answer], min_version=0, avoid=())
    async with Rig(one_sample, Unreplayable) as again:
        again.ledger.add(lease("a", partial=encode([(request(), answer)], 1 << 20)))
        await again.ended(1)
    assert again.generation.requests[0][1] == 0


async def test_drain_when_the_workflow_hides_the_interruption_then_it_is_still_returned():
    async def hides(engine, data):
        try:
            response = await engine.agenerate(request())
        except Unavailable:
            return None
        return make_trajectory(response, 1.0)

    async with Rig(hides) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        await rig.executor.drain(2.0)
    assert rig.ledger.rejected == {}
    assert rig.ledger.returned["a"][0] is ReturnCause.DRAIN


async def test_drain_when_an_episode_only_scores_then_its_calls_are_kept():
    async def scoring(engine, data):
        await engine.agenerate(request())
        await asyncio.Event().wait()

    async with Rig(scoring) as rig:
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.requests and not rig.generation.running)
        await rig.executor.drain(2.0)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.DRAIN
    [kept] = decode(more["partial"], 1 << 20).values()
    assert (len(kept.output_tokens), kept.stop_reason) == (6, StopReason.LENGTH)


async def test_drain_when_a_lease_arrives_meanwhile_then_it_goes_back_too():
    async with Rig(one_sample, lease_wait_s=0.5) as rig:
        await rig.until(lambda: rig.ledger.calls)
        draining = asyncio.create_task(rig.executor.drain(3.0))
        await asyncio.sleep(0.05)
        rig.ledger.add(lease("late", partial=b"kept"))
        await draining
    assert rig.ledger.returned["late"][0] is ReturnCause.DRAIN
    assert len(rig.ledger.calls) == 1


async def test_drain_when_the_ledger_is_away_then_ends_at_its_deadline():
    async with Rig(one_sample) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        rig.ledger.errors.extend([Unavailable("away")] * 100)
        async with asyncio.timeout(30.0):
            await rig.executor.drain(0.5)
        await rig.until(lambda: rig.executor.running == 0)


async def test_journal_when_it_is_broken_then_the_episode_starts_afresh():
    async with Rig(one_sample) as rig:
        rig.ledger.add(lease("a", partial=b"garbage"))
        await rig.ended(1)
    assert rig.generation.requests[0][1] == 0
    assert set(rig.ledger.completed) == {"a"}
