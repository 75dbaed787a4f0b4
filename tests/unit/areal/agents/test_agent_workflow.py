"""An agent's runs become one group, and its failures are told apart from the model's."""

from __future__ import annotations

import asyncio

import openai
import pytest
from tests.unit.areal_rollout.fakes import Rig, lease

from areal.agents.workflow import AgentWorkflow
from areal.errors import InvalidInput, Unavailable
from areal.protocol.leases import ReturnCause
from areal.rewards.rubric import rubric
from areal.types import GenerationHyperparameters
from areal.workflows.specs import build_workflow, describe_workflow

ASK = {"role": "user", "content": "1+1="}


async def two_turns(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as llm:
        messages = [ASK]
        for _ in range(2):
            answer = await llm.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": task["reply"]}]
    return len(messages) / 10


async def tells_the_time(task, base_url, api_key):
    """Its first message differs in each call, so no call continues the one before."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as llm:
        messages = [{"role": "system", "content": "12:00"}, ASK]
        for minute in range(3):
            messages[0] = {"role": "system", "content": f"It is 12:0{minute}."}
            answer = await llm.chat.completions.create(model="any", messages=messages)
            messages += [answer.choices[0].message, ASK]
    return 1.0


async def asks_two_experts(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as llm:
        for name in "AB":
            messages = [{"role": "system", "content": f"You are {name}."}, ASK]
            await llm.chat.completions.create(model="any", messages=messages)
    return 1.0


async def posts_its_reward(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        await llm.chat.completions.create(model="any", messages=[ASK])
        await llm.post("/reward", body={"reward": 0.75}, cast_to=object)


async def returns_a_rubric(task, base_url, api_key):
    await posts_its_reward(task, base_url, api_key)
    return rubric(correct=0, short=(0.5, 0.0))


async def posts_parts(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        await llm.chat.completions.create(model="any", messages=[ASK])
        body = {"reward": 0, "parts": {"correct": False, "short": 0.5}}
        await llm.post("/reward", body=body, cast_to=object)


async def posts_a_bad_part(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        await llm.post("/reward", body={"reward": 0, "parts": {"mean": 1}}, cast_to=object)


async def forgets_its_reward(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        await llm.chat.completions.create(model="any", messages=[ASK])


async def breaks(task, base_url, api_key):
    return float(task["nothing"])


def workflow(run, options=None, **gconfig):
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 4, **gconfig})
    return AgentWorkflow(run, gconfig, **(options or {}))


async def ended(run, *, error=None, options=None, **gconfig):
    """The ledger after one task."""
    rig = Rig()
    rig.generation.error = error
    rig.workflows["rlvr"] = workflow(run, options, **gconfig)
    async with rig:
        rig.ledger.add(lease("t1", reply="no"))
        await rig.ended(1)
    return rig.ledger


async def test_run_when_of_two_turns_then_a_trajectory_each_of_both_answers():
    ledger = await ended(two_turns, n_samples=3)
    [group] = ledger.completed.values()
    assert len(group.trajectories) == 3
    for trajectory in group.trajectories:
        sampled = trajectory.input_ids[trajectory.loss_mask].tolist()
        assert sampled == [48, 49, 50, 51] * 2
        assert trajectory.reward == 0.5
        assert (trajectory.token_versions[trajectory.loss_mask] == 3).all()


@pytest.mark.parametrize(
    ("run", "marked"), [(tells_the_time, [0, 1, 1] * 2), (asks_two_experts, [0] * 4)]
)
async def test_conversation_when_its_agent_rewrites_it_then_each_piece_but_the_first_is_marked(
    run, marked
):
    ledger = await ended(run, n_samples=2)
    [group] = ledger.completed.values()
    assert [each.reward_parts.get("splits", 0) for each in group.trajectories] == marked
    where = {0: "", 1: "messages[0].content"}
    assert [each.split for each in group.trajectories] == [where[each] for each in marked]


async def test_run_when_it_posts_its_reward_then_that_counts():
    ledger = await ended(posts_its_reward)
    [group] = ledger.completed.values()
    assert [trajectory.reward for trajectory in group.trajectories] == [0.75]


@pytest.mark.parametrize("run", [returns_a_rubric, posts_parts])
async def test_reward_when_it_has_parts_then_they_are_kept_even_if_it_is_0(run):
    ledger = await ended(run)
    [group] = ledger.completed.values()
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0]
    assert group.trajectories[0].reward_parts == {"correct": 0.0, "short": 0.5}


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (posts_a_bad_part, "BadRequestError: Error code: 400 - "),
        (breaks, "KeyError: 'nothing' ("),
        (forgets_its_reward, "InvalidInput: reward: none was sent"),
    ],
)
async def test_run_when_it_fails_then_the_recipe_is_named(run, said):
    ledger = await ended(run, n_samples=2)
    [(cause, more)] = ledger.returned.values()
    assert cause is ReturnCause.WORKFLOW_ERROR
    assert more["detail"].startswith(said)


async def test_model_when_away_then_the_task_is_tried_again_and_the_agent_is_not_blamed():
    ledger = await ended(two_turns, error=Unavailable("no server"))
    [(cause, more)] = ledger.returned.values()
    assert (cause, more["detail"]) == (ReturnCause.INFRASTRUCTURE, "no server")


async def gives_up(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as llm:
        try:
            await llm.chat.completions.create(model="any", messages=[ASK])
        except openai.APIStatusError:
            return 0.0
    return 1.0


async def test_model_when_away_and_the_agent_gives_up_then_the_task_is_tried_again():
    ledger = await ended(gives_up, error=Unavailable("no server"))
    [(cause, more)] = ledger.returned.values()
    assert (cause, more["detail"]) == (ReturnCause.INFRASTRUCTURE, "no server")


def test_workflow_when_described_then_a_worker_rebuilds_it():
    import sys

    spec = describe_workflow(workflow(two_turns, n_samples=5))
    assert spec.name == "AgentWorkflow"
    rebuilt = build_workflow(spec, sys.modules[__name__])
    assert rebuilt.run is two_turns
    assert rebuilt.gconfig.n_samples == 5


def test_workflow_when_run_is_not_async_then_refused():
    with pytest.raises(InvalidInput, match="expected an async function"):
        AgentWorkflow(len)


def some(*behaviors):
    """An agent that calls the model and then does the next of these: a reward, an error, a wait."""
    left = list(behaviors)

    async def run(task, base_url, api_key):
        behavior = left.pop(0)
        if behavior == "silent":
            return 1.0
        await posts_its_reward(task, base_url, api_key)
        if isinstance(behavior, Exception):
            raise behavior
        if behavior == "hangs":
            await asyncio.Event().wait()
        return behavior

    return run


@pytest.mark.parametrize("bad", [ValueError("no"), TimeoutError("its own"), "hangs"])
@pytest.mark.parametrize(
    ("on_error", "rewards"), [("drop", [0.25, 0.5]), ("zero", [0, 0.25, 0.5]), ("fail", None)]
)
async def test_attempt_when_it_fails_or_hangs_then_the_group_is_made_as_the_recipe_says(
    bad, on_error, rewards
):
    options = {"on_error": on_error, "timeout_s": 2.0 if bad == "hangs" else None}
    ledger = await ended(some(0.25, bad, 0.5), options=options, n_samples=3)
    if rewards is None:
        [(cause, more)] = ledger.returned.values()
        assert cause is ReturnCause.WORKFLOW_ERROR
        assert ("timeout_s = 2 s" if bad == "hangs" else str(bad)) in more["detail"]
        return
    [group] = ledger.completed.values()
    assert sorted(trajectory.reward for trajectory in group.trajectories) == rewards


@pytest.mark.parametrize("on_error", ["drop", "zero"])
async def test_attempts_when_none_is_left_then_the_row_fails_with_the_first_error(on_error):
    bad = ["silent", "silent"] if on_error == "zero" else [ValueError("no"), ValueError("no")]
    ledger = await ended(some(*bad), options={"on_error": on_error}, n_samples=2)
    [(cause, more)] = ledger.returned.values()
    assert cause is ReturnCause.WORKFLOW_ERROR
    said = "ValueError: no" if on_error == "drop" else "no token was sampled"
    assert "AgentWorkflow: all 2 attempts failed; the first: " in more["detail"]
    assert said in more["detail"]


async def test_model_when_away_then_no_attempt_is_dropped_for_it():
    ledger = await ended(two_turns, error=Unavailable("no server"), options={"on_error": "drop"})
    [(cause, more)] = ledger.returned.values()
    assert (cause, more["detail"]) == (ReturnCause.INFRASTRUCTURE, "no server")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout_s": 0}, "timeout_s 0: expected a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s nan: expected"),
        ({"on_error": "ignore"}, "on_error 'ignore': expected one of fail, drop, zero"),
    ],
)
def test_workflow_when_an_option_is_wrong_then_refused_in_one_line(options, said):
    with pytest.raises(InvalidInput, match=said):
        workflow(two_turns, options)
