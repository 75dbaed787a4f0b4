import asyncio
from dataclasses import replace

import pytest
from tests.unit.areal_rollout.fakes import Rig, Unreplayable, lease

from areal.clients.buffer_types import ReturnCause
from areal.engines.sglang import GenerationFailed
from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    Unavailable,
    WaitTimeout,
    WorkflowError,
)
from areal.rewards.types import ScoreError, ScoreFailure
from areal.types import GenerationHyperparameters, LLMRequest, Purpose, StopReason
from areal.workflows.base import make_trajectory
from areal_rollout.journal import decode, encode


def request(prompt=(1, 2), n=6):
    return LLMRequest(list(prompt), GenerationHyperparameters(max_new_tokens=n))


async def one_sample(engine, data):
    response = await engine.agenerate(request())
    [reward] = await engine.score("math", completions=["x"], data=data)
    return make_trajectory(response, reward)


async def group_of_four(engine, data):
    responses = await asyncio.gather(*[engine.agenerate(request()) for _ in range(4)])
    rewards = await engine.score("math", completions=["x"] * 4, data=data)
    return [make_trajectory(r, w) for r, w in zip(responses, rewards, strict=True)]


async def test_episode_when_it_succeeds_then_its_group_is_handed_in_with_ids():
    async with Rig(group_of_four) as rig:
        rig.ledger.add(lease("a", token=7, version=2, failed=("http://bad",), answer="4"))
        await rig.ended(1)
    group = rig.ledger.completed["a"]
    assert (group.group_id, group.traceparent) == ("a", "00-t-s-01")
    assert [t.trajectory_id for t in group.trajectories] == ["a.7.0", "a.7.1", "a.7.2", "a.7.3"]
    assert [t.reward for t in group.trajectories] == [1.0] * 4
    for sent, had, min_version, avoid in rig.generation.requests:
        assert (sent.affinity_key, had, min_version, avoid) == ("a", 0, 2, ("http://bad",))
    [(name, digest, kwargs, items)] = rig.scorer.calls
    assert (name, digest, kwargs, len(items)) == ("math", "", {}, 4)
    assert items[0].data == {"answer": "4"}
    assert rig.observer.outcomes == {"completed": 1}


async def test_episode_when_its_version_is_gone_then_refused_by_name():
    async with Rig(one_sample) as rig:  # its server is at version 3
        for name, version in (("current", 3), ("gone", 2)):
            given = lease(name)
            task = replace(given.task, purpose=Purpose.SERVE, policy_version=version)
            rig.ledger.add(replace(given, task=task))
        await rig.ended(2)
    assert set(rig.ledger.completed) == {"current"}
    cause, more = rig.ledger.returned["gone"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "policy_version 2: tokens were sampled by version 3" in str(more)
    asked = {min_version for *_, min_version, _ in rig.generation.requests}
    assert asked == {2, 3}  # no server below it was asked


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


async def test_episode_when_it_returns_none_then_rejected():
    async def episode(engine, data):
        return None

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.ledger.rejected == {"a": "arun_episode returned None"}


@pytest.mark.parametrize("result", [{}, [], [1], "x"])
async def test_episode_when_it_returns_nonsense_then_workflow_error(result):
    async def episode(engine, data):
        return result

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "expected a Trajectory, a list of them, or None" in more["detail"]


@pytest.mark.parametrize(
    ("error", "cause", "detail", "server"),
    [
        (ZeroDivisionError("oh\nno"), "WORKFLOW_ERROR", "ZeroDivisionError: oh no", ""),
        (SystemExit(3), "WORKFLOW_ERROR", "SystemExit: 3", ""),
        (InvalidInput("input_ids: empty"), "WORKFLOW_ERROR", "InvalidInput: input_ids: empty", ""),
        (WorkflowError("mine"), "WORKFLOW_ERROR", "WorkflowError: mine", ""),
        (Unavailable("reward is away"), "INFRASTRUCTURE", "reward is away", ""),
        (WaitTimeout("a server"), "INFRASTRUCTURE", "waited for a server", ""),
        (GenerationFailed("x failed", "http://x"), "INFRASTRUCTURE", "x failed", "http://x"),
        (
            ExceptionGroup("g", [Unavailable("away"), KeyError("mine")]),
            "WORKFLOW_ERROR",
            "KeyError: 'mine'",
            "",
        ),
        (
            ExceptionGroup("g", [ExceptionGroup("h", [GenerationFailed("down", "http://y")])]),
            "INFRASTRUCTURE",
            "down",
            "http://y",
        ),
    ],
)
async def test_episode_when_it_raises_then_returned_with_whose_fault(error, cause, detail, server):
    async def episode(engine, data):
        raise error

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    got, more = rig.ledger.returned["a"]
    assert got is ReturnCause[cause]
    assert more["detail"] == detail
    assert more["failed_server"] == server
    assert ("test_executor.py" in more["traceback"]) == (cause == "WORKFLOW_ERROR")
    assert rig.ledger.completed == {}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (ScoreError.FUNCTION, ReturnCause.WORKFLOW_ERROR),
        (ScoreError.TIMEOUT, ReturnCause.WORKFLOW_ERROR),
        (ScoreError.INVALID, ReturnCause.WORKFLOW_ERROR),
        (ScoreError.CRASH, ReturnCause.INFRASTRUCTURE),
    ],
)
async def test_episode_when_scoring_fails_then_never_a_reward(kind, cause):
    async with Rig(one_sample) as rig:
        rig.scorer.outcome = ScoreFailure(kind, "boom", "Traceback: line 3")
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    got, more = rig.ledger.returned["a"]
    assert got is cause
    assert "boom" in more["detail"]
    if cause is ReturnCause.WORKFLOW_ERROR:
        assert more["traceback"] == "Traceback: line 3"
    assert rig.ledger.completed == {}


async def test_episode_when_the_workflow_cannot_be_built_then_only_its_tasks_suffer():
    async with Rig(one_sample) as rig:
        rig.workflows["broken"] = InvalidInput("recipe r.py:3: invalid syntax")
        rig.workflows["away"] = Unavailable("buffer is away")
        rig.ledger.add(lease("a", workflow="broken"), lease("b"), lease("c", workflow="away"))
        await rig.ended(3)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "r.py:3" in more["detail"]
    assert rig.ledger.returned["c"][0] is ReturnCause.INFRASTRUCTURE
    assert set(rig.ledger.completed) == {"b"}


async def test_episode_when_one_of_a_gather_fails_then_the_others_are_ended():
    ended = []

    async def episode(engine, data):
        async def call(index):
            if index == 0:
                await asyncio.sleep(0.01)
                raise Unavailable("server died")
            try:
                await engine.agenerate(request())
            finally:
                ended.append(index)

        await asyncio.gather(*[call(i) for i in range(3)])

    async with Rig(episode) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.ended(1)
        await rig.until(lambda: len(ended) == 2)
        assert rig.generation.running == 0
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.INFRASTRUCTURE
    assert len(decode(more["partial"], 1 << 20)) == 2


async def test_hand_in_when_the_ledger_is_away_or_full_then_tried_again():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.extend([Unavailable("x"), CapacityExceeded("memory")])
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert set(rig.ledger.completed) == {"a"}


async def test_hand_in_when_the_group_is_refused_then_returned_as_workflow_error():
    async with Rig(one_sample) as rig:
        rig.ledger.errors.append(InvalidInput("group 'a': 70 MB, expected at most 64 MB"))
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "70 MB" in more["detail"]


async def test_hand_in_when_the_journal_is_refused_then_returned_without_it():
    async with Rig(one_sample) as rig:
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: rig.generation.running)
        rig.ledger.errors.append(InvalidInput("partial: too large"))
        await rig.executor.drain(2.0)
    cause, more = rig.ledger.returned["a"]
    assert (cause, more["partial"]) == (ReturnCause.DRAIN, b"")


async def test_hand_in_when_the_ledger_stays_away_then_given_up_at_the_deadline():
    async with Rig(one_sample, hand_in_timeout_s=0.3) as rig:
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
    class Away(Exception):
        pass

    async with Rig(one_sample, lease_ttl_s=0.03) as rig:

        async def renew_leases(worker_id, leases):
            rig.ledger.renewed.append(leases)
            raise Unavailable("away")

        rig.ledger.renew_leases = renew_leases
        rig.generation.hold = True
        rig.ledger.add(lease("a"))
        await rig.until(lambda: len(rig.ledger.renewed) > 3)
        assert rig.executor.running == 1


async def test_episode_when_it_hangs_then_ended_by_name_with_the_place_where_it_waits():
    async def deep():
        await asyncio.Event().wait()

    async def arun_episode(engine, data):
        await deep()  # the line that is named

    async with Rig(arun_episode, lease_ttl_s=0.03, episode_timeout_s=0.1) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "episode of workflow 'rlvr' ran longer than 0.1 s" in more["detail"]
    assert "test_executor.py:" in more["detail"]
    assert "in deep" in more["traceback"]


async def test_episode_when_it_swallows_cancellation_then_cancelled_again():
    async def episode(engine, data):
        for _ in range(3):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        raise KeyError("at last")

    async with Rig(episode, lease_ttl_s=0.03, episode_timeout_s=0.05) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.ledger.returned["a"][0] is ReturnCause.WORKFLOW_ERROR


async def test_episode_when_it_cancels_itself_then_workflow_error():
    async def episode(engine, data):
        raise asyncio.CancelledError

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.ledger.returned["a"][0] is ReturnCause.WORKFLOW_ERROR
    assert "cancelled by itself" in rig.ledger.returned["a"][1]["detail"]


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


# -------------------------------------------------------------------- drain and journal


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

    kept = request(), (await _response())
    async with Rig(one_sample, Unreplayable) as again:
        again.ledger.add(lease("a", partial=encode([kept], 1 << 20)))
        await again.ended(1)
    assert again.generation.requests[0][1] == 0


async def _response():
    rig = Rig(None)
    engine_request = request()
    from areal.types import LLMResponse

    response = LLMResponse([1, 2], [], [], [], StopReason.ABORT)
    return await rig.generation.generate(engine_request, response, min_version=0, avoid=())


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
        async with asyncio.timeout(1.5):
            await rig.executor.drain(0.5)
        await rig.until(lambda: rig.executor.running == 0)


async def test_journal_when_it_is_broken_then_the_episode_starts_afresh():
    async with Rig(one_sample) as rig:
        rig.ledger.add(lease("a", partial=b"garbage"))
        await rig.ended(1)
    assert rig.generation.requests[0][1] == 0
    assert set(rig.ledger.completed) == {"a"}
