"""How an episode may end, and whose fault it is."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.areal_rollout.fakes import Rig, group_of_four, lease, one_sample, request

from areal.errors import InvalidInput, Unavailable, WaitTimeout, WorkflowError
from areal.protocol.leases import ReturnCause
from areal.protocol.scores import ScoreError, ScoreFailure
from areal.types import Purpose, TrajectoryGroup
from areal.workflows.base import make_trajectory
from areal_rollout.generation.client import GenerationFailed
from areal_rollout.journal import decode


async def test_episode_when_it_succeeds_then_its_group_is_handed_in_with_ids():
    async with Rig(group_of_four) as rig:
        rig.ledger.add(lease("a", token=7, version=2, failed=("http://bad",), answer="4"))
        await rig.ended(1)
    group = rig.ledger.completed["a"]
    assert (group.task_id, group.traceparent) == ("a", "00-t-s-01")
    assert [t.trajectory_id for t in group.trajectories] == ["a.7.0", "a.7.1", "a.7.2", "a.7.3"]
    assert [t.reward for t in group.trajectories] == [1.0] * 4
    for sent, had, min_version, avoid in rig.generation.requests:
        assert (sent.affinity_key, had, min_version, avoid) == ("a", 0, 2, ("http://bad",))
    [(name, digest, kwargs, items)] = rig.scorer.calls
    assert (name, digest, kwargs, len(items)) == ("math", "", {}, 4)
    assert items[0].data == {"answer": "4"}
    assert rig.observer.outcomes == {"completed": 1}


async def test_session_when_leased_then_the_group_of_its_ended_attempts_is_handed_in():
    async with Rig() as rig:
        group = TrajectoryGroup("kept", [])
        errors = {"away": Unavailable("buffer"), "bad": InvalidInput("no reward")}
        rig.sessions.update(kept=group, silent=None, **errors)
        rig.ledger.add(*[replace(lease(name, workflow="x"), attempts=3) for name in rig.sessions])
        await rig.ended(4)
    assert rig.ledger.completed == {"kept": group}
    assert rig.ledger.rejected == {"silent": "its sessions ended without an answered call"}
    assert rig.observer.outcomes["no_answer"] == 1
    causes = {name: cause for name, (cause, _) in rig.ledger.returned.items()}
    assert causes == {"away": ReturnCause.INFRASTRUCTURE, "bad": ReturnCause.WORKFLOW_ERROR}
    assert not rig.generation.requests


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


async def test_episode_when_it_returns_none_then_rejected():
    async def episode(engine, data):
        return None

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.ledger.rejected == {"a": "arun_episode returned None"}
    assert rig.ledger.rejected_groups == {"a": None}


async def test_group_when_all_rewards_are_equal_then_rejected_by_dynamic_sampling_and_counted():
    async def episode(engine, data):
        responses = [await engine.agenerate(request()) for _ in data["rewards"]]
        return [make_trajectory(r, w) for r, w in zip(responses, data["rewards"], strict=True)]

    async with Rig(episode, dynamic_sampling=True) as rig:
        rig.ledger.add(lease("same", rewards=[1.0, 1.0]), lease("different", rewards=[1.0, 0.0]))
        await rig.ended(2)
    assert rig.ledger.rejected == {"same": "all samples have the same reward"}
    assert list(rig.ledger.completed) == ["different"]
    same = rig.ledger.rejected_groups["same"]
    assert [each.trajectory_id for each in same.trajectories] == ["same.1.0", "same.1.1"]
    assert rig.observer.outcomes == {"equal_rewards": 1, "completed": 1}


async def test_a_rejected_group_when_the_ledger_refuses_it_then_the_task_is_rejected_without():
    async def episode(engine, data):
        return [make_trajectory(await engine.agenerate(request()), 1.0) for _ in range(2)]

    async with Rig(episode, dynamic_sampling=True) as rig:
        rig.ledger.errors.append(InvalidInput("group 'a' has 90000000 bytes: at most 67108864"))
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    assert rig.ledger.rejected_groups == {"a": None}
    assert rig.ledger.returned == {}


async def test_group_when_completed_then_it_says_how_long_it_took_and_where_it_was_sampled():
    async def episode(engine, data):
        response = await engine.agenerate(request())
        response.servers, response.latency_s = ["http://a:1"], 2.0
        [reward] = await engine.score("math", completions=["1"], data={})
        return make_trajectory([response], reward)

    async with Rig(episode) as rig:
        rig.ledger.add(replace(lease("a"), queued_time=time.time() - 60.0))
        await rig.ended(1)
    group = rig.ledger.completed["a"]
    assert 59.0 < group.queued_s < 120.0
    assert 0.0 <= group.score_s <= group.episode_s < 60.0
    (one,) = group.trajectories
    assert (one.generation_s, one.servers) == (2.0, ("http://a:1",))


async def test_group_when_all_rewards_are_equal_then_kept_for_evaluation_alone_or_by_default():
    evaluated = lease("evaluated")
    evaluated = replace(evaluated, task=replace(evaluated.task, purpose=Purpose.SERVE))
    async with Rig(group_of_four, dynamic_sampling=True) as rig:
        rig.ledger.add(evaluated)
        await rig.ended(1)
    assert list(rig.ledger.completed) == ["evaluated"]
    async with Rig(one_sample, dynamic_sampling=True) as rig:
        rig.ledger.add(lease("single"))
        await rig.ended(1)
    assert list(rig.ledger.completed) == ["single"]
    async with Rig(group_of_four) as rig:
        rig.ledger.add(lease("default"))
        await rig.ended(1)
    assert list(rig.ledger.completed) == ["default"]


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
        (WorkflowError("mine"), "WORKFLOW_ERROR", "mine", ""),
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
    own = cause == "WORKFLOW_ERROR"
    line = episode.__code__.co_firstlineno + 1
    assert more["detail"] == detail + (f" ({__file__}:{line})" if own else "")
    kind = detail.split(":")[0] if detail != "mine" else "WorkflowError"
    assert more["site"] == (f"{kind} at {Path(__file__).name}:{line}" if own else "")
    assert more["failed_server"] == server
    assert (Path(__file__).name in more["traceback"]) == (cause == "WORKFLOW_ERROR")
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
    assert f"{Path(__file__).name}:" in more["detail"]
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
    assert "cancelled itself" in rig.ledger.returned["a"][1]["detail"]


async def test_episode_when_a_later_prompt_is_other_ids_then_counted_and_told_what_to_use():
    async def episode(engine, data):
        first = await engine.agenerate(request((1, 2)))
        second = await engine.agenerate(request((1, 2, 3)))
        return make_trajectory([first, second], 1.0)

    async with Rig(episode) as rig:
        rig.ledger.add(lease("a"))
        await rig.ended(1)
    cause, more = rig.ledger.returned["a"]
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert "response 1 does not begin with" in more["detail"]
    assert "areal.Conversation" in more["detail"]
    assert rig.observer.drifts == 1


async def test_group_when_it_has_one_sample_to_compare_then_rejected_by_dynamic_sampling():
    """Where a reward is compared with those of its group, a single one teaches nothing."""
    async with Rig(one_sample, dynamic_sampling=True, reject_single=True) as rig:
        rig.ledger.add(lease("single"))
        await rig.ended(1)
    assert rig.ledger.rejected == {"single": "all samples have the same reward"}
    async with Rig(one_sample, reject_single=True) as rig:
        rig.ledger.add(lease("default"))
        await rig.ended(1)
    assert list(rig.ledger.completed) == ["default"]
