"""Outside agents drive sessions through two gateways, with unchanged SDKs, and are trained."""

from __future__ import annotations

import asyncio
import re
import uuid

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tests.buffer_client import BufferClient
from tests.integration.gateway_agents import Refused, agents_stack, request

from areal.clients.redis_connection import connect_redis, redis_prefix


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    with agents_stack(tmp_path_factory.mktemp("stack"), 2, lease_ttl_s=3.0) as started:
        yield started


@pytest.fixture
def urls(stack):
    return stack[1]


@pytest.fixture
async def ledger(stack):
    client = BufferClient(stack[0].config.endpoints.buffer)
    yield client
    await client.close()


async def register(ledger, size=1, eta=4):
    stats = await ledger.get_stats()
    trainer = await ledger.register_trainer(
        resume_step=stats.last_taken_step,
        batch_size=size,
        max_head_offpolicyness=eta,
        max_concurrent_rollouts=64,
    )
    return trainer.incarnation, trainer.last_taken_step + 1


async def batch(ledger, incarnation, step):
    """Trains on a batch. No server ever has the new version: at most one test may call it before
    others that ask a model, which would wait for it."""
    taken = await ledger.take_batch(incarnation, step, 30.0)
    ids = [group.task_id for group in taken.groups]
    assert ids, taken.waiting_for
    groups = await ledger.fetch_groups(incarnation, step, ids)
    await ledger.commit_step(incarnation, step, step)
    return groups


def swapped(urls, base_url):
    """The same session at the other gateway."""
    first, second = urls
    return base_url.replace(first, second) if first in base_url else base_url.replace(second, first)


async def test_chat_when_two_gateways_share_a_session_then_its_ids_are_trained(urls, ledger):
    incarnation, step = await register(ledger)
    opened = await request(urls, "POST", "/v1/sessions", body={"task": {"question": "1+1="}})
    key, base = opened["api_key"], opened["base_url"]
    messages = [{"role": "user", "content": "1+1="}]
    said: list[float] = []
    for turn in range(3):
        async with openai.AsyncOpenAI(base_url=base, api_key=key) as llm:
            answer = await llm.chat.completions.create(
                model="any", messages=messages, logprobs=True, max_tokens=12
            )
        choice = answer.choices[0]
        said += [each.logprob for each in choice.logprobs.content]
        messages += [choice.message, {"role": "user", "content": f"again {turn}"}]
        base = swapped(urls, base)
    path = f"/sessions/{opened['id']}"
    state = await request(urls, "GET", path, key)
    assert (state["state"], state["calls"], state["reward"]) == ("running", 3, None)
    await request(urls, "POST", f"{path}/reward", key, {"reward": 0.5})
    ended = await request(urls, "POST", f"{path}/end", key)
    assert ended == {"id": opened["id"], "state": "completed"}
    assert await request(urls, "POST", f"{path}/end", key) == ended
    [group] = await batch(ledger, incarnation, step)
    assert group.task_id == opened["task_id"]
    [trajectory] = group.trajectories
    sampled = trajectory.behavior_logprobs[trajectory.loss_mask]
    np.testing.assert_array_equal(sampled, np.asarray(said, np.float32))
    assert trajectory.reward == 0.5
    [record] = await ledger.get_tasks([opened["task_id"]])
    assert record.state == "trained"
    with pytest.raises(Refused, match=r"410 .*is trained"):
        await request(urls, "POST", f"{path}/v1/chat/completions", key, {"messages": messages[:1]})


async def test_open_when_the_answer_was_lost_then_the_other_gateway_gives_the_same_session(
    urls, ledger
):
    headers, opened = {"Idempotency-Key": uuid.uuid4().hex}, []
    submitted = (await ledger.get_stats()).submitted
    async with httpx.AsyncClient(timeout=60.0) as http:
        for url in urls:
            body = {"n": 2, "purpose": "serve"}
            reply = await http.post(f"{url}/v1/sessions", json=body, headers=headers)
            opened.append([(each["id"], each["api_key"]) for each in reply.json()["sessions"]])
    assert opened[0] == opened[1]
    assert (await ledger.get_stats()).submitted == submitted + 1
    [first, second] = opened[1]
    assert (await request(urls, "GET", f"/sessions/{first[0]}", first[1]))["state"] == "running"
    with pytest.raises(Refused, match="401"):
        await request(urls, "GET", f"/sessions/{first[0]}", second[1])
    await ledger.cancel_tasks([first[0].rpartition("-")[0]])


async def test_end_when_no_call_was_answered_then_the_attempt_is_left_out(urls):
    for failed in (1, 2):
        opened = await request(urls, "POST", "/v1/sessions", body={"n": 2, "purpose": "serve"})
        for number, each in enumerate(opened["sessions"]):
            path, key = f"/sessions/{each['id']}", each["api_key"]
            if number >= failed:
                body = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
                await request(urls, "POST", f"{path}/v1/chat/completions", key, body)
            ended = await request(urls, "POST", f"{path}/end", key, {"reward": number})
        if failed == 1:
            assert ended["state"] == "delivered"
            group = await request(urls, "GET", f"/v1/trajectories/{opened['task_id']}")
            assert [each["reward"] for each in group["trajectories"]] == [1.0]
            continue
        assert ended["state"] == "rejected"
        state = await request(urls, "GET", path, key)
        assert state["reason"] == "its sessions ended without an answered call"


async def test_responses_when_two_gateways_share_a_session_then_an_id_continues_it(urls, ledger):
    opened = await request(urls, "POST", "/v1/sessions", body={"purpose": "serve"})
    key, base = opened["api_key"], opened["base_url"]
    said: list[float] = []
    known = None
    for turn in range(3):
        async with openai.AsyncOpenAI(base_url=base, api_key=key) as llm:
            stream = await llm.responses.create(
                model="any",
                instructions="Add.",
                input=f"{turn}+1=",
                previous_response_id=known,
                max_output_tokens=12,
                include=["message.output_text.logprobs"],
                stream=True,
            )
            events = [event async for event in stream]
        answer = events[-1].response
        said += [each.logprob for each in answer.output[0].content[0].logprobs]
        known, base = answer.id, swapped(urls, base)
    async with openai.AsyncOpenAI(base_url=base, api_key=key) as llm:
        with pytest.raises(openai.NotFoundError, match="previous_response_id 'resp-9'"):
            await llm.responses.create(model="any", input="?", previous_response_id="resp-9")
    await request(urls, "POST", f"/sessions/{opened['id']}/end", key, {"reward": 1.0})
    [record] = await ledger.get_tasks([opened["task_id"]], include_groups=True)
    [trajectory] = record.group.trajectories
    sampled = trajectory.behavior_logprobs[trajectory.loss_mask]
    np.testing.assert_array_equal(sampled, np.asarray(said, np.float32))


async def test_messages_and_tokens_when_called_then_recorded_as_sampled(urls, ledger):
    opened = await request(urls, "POST", "/v1/sessions", body={"purpose": "serve"})
    key, base = opened["api_key"], opened["base_url"]
    async with anthropic.AsyncAnthropic(base_url=base, api_key=key) as llm:
        message = await llm.messages.create(
            model="any", max_tokens=8, messages=[{"role": "user", "content": "2+2="}]
        )
        async with llm.messages.stream(
            model="any", max_tokens=8, messages=[{"role": "user", "content": "3+3="}]
        ) as stream:
            streamed = await stream.get_final_message()
    assert message.usage.output_tokens
    assert streamed.usage.output_tokens
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 6, "n": 2}}
    path = f"/sessions/{opened['id']}"
    tokens = await request(urls, "POST", f"{path}/inference/v1/generate", key, body)
    ended = await request(urls, "POST", f"{path}/end", key, {"reward": 1})
    assert ended["state"] == "delivered"
    [record] = await ledger.get_tasks([opened["task_id"]], include_groups=True)
    outputs = [each.input_ids[each.loss_mask].tolist() for each in record.group.trajectories]
    assert len(outputs) == 4
    assert outputs[2:] == [choice["token_ids"] for choice in tokens["choices"]]


async def test_stream_when_read_then_text_comes_early_and_ids_are_those_sampled(urls, ledger):
    opened = await request(urls, "POST", "/v1/sessions", body={"purpose": "serve"})
    key, ask = opened["api_key"], {"model": "any", "messages": [{"role": "user", "content": "1+"}]}
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=key) as llm:
        stream = await llm.chat.completions.create(**ask, n=16, stream=True)
        came = [[] for _ in range(16)]
        async for chunk in stream:
            for choice in chunk.choices:
                came[choice.index].append(choice.delta.content or "")
    assert max(len([text for text in parts if text]) for parts in came) > 1, "in parts"
    ended = await request(urls, "POST", f"/sessions/{opened['id']}/end", key, {"reward": 1.0})
    assert ended["state"] == "delivered"
    [record] = await ledger.get_tasks([opened["task_id"]], include_groups=True)
    said = sorted("".join(parts) for parts in came)
    assert said == sorted(each.completion_text.strip() for each in record.group.trajectories)


async def test_stream_when_its_client_hangs_up_then_nothing_more_is_sampled(stack, urls):
    opened = await request(urls, "POST", "/v1/sessions", body={"purpose": "serve"})
    key, ask = opened["api_key"], {"model": "any", "messages": [{"role": "user", "content": "1+"}]}

    async def figure(name: str) -> float:
        total = 0.0
        async with httpx.AsyncClient() as http:
            for url in stack[0].config.endpoints.inference:
                text = (await http.get(f"{url}/metrics")).text
                total += float(re.search(rf"^sglang:{name}\S* (\S+)", text, re.MULTILINE)[1])
        return total

    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=key) as llm:
        whole = await llm.chat.completions.create(**ask, n=32)
        before = await figure("generation_tokens_total")
        stream = await llm.chat.completions.create(**ask, n=32, stream=True)
        await anext(aiter(stream))
        await stream.close()
    async with asyncio.timeout(60):
        while await figure("num_running_reqs"):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)
    sampled = await figure("generation_tokens_total") - before
    assert sampled < 0.5 * whole.usage.completion_tokens, "it was stopped"
    # The session goes on.
    again = {"prompt": "1+1=", "max_tokens": 4}
    await request(urls, "POST", f"/sessions/{opened['id']}/v1/completions", key, again)


async def fall_silent(stack, task_id):
    """As if the agents of a session had made no call for all of its time."""
    config = stack[0].config
    async with connect_redis(config.endpoints.redis) as redis:
        running = f"{redis_prefix(config.namespace)}running:serve"
        assert await redis.zadd(running, {task_id: 1}, xx=True, ch=True) == 1


async def test_attempts_when_one_agent_is_silent_then_the_others_are_delivered(stack, urls, ledger):
    asked = {"n": 3, "ttl_s": 300.0, "purpose": "serve"}
    opened = await request(urls, "POST", "/v1/sessions", body=asked)
    *ended, silent = [(f"/sessions/{each['id']}", each["api_key"]) for each in opened["sessions"]]
    call = {"prompt": "1+1=", "max_tokens": 4}
    await request(urls, "POST", f"{silent[0]}/v1/completions", silent[1], call)
    for number, (path, key) in enumerate(ended):
        await request(urls, "POST", f"{path}/v1/completions", key, call)
        await request(urls, "POST", f"{path}/end", key, {"reward": number})
    await fall_silent(stack, opened["task_id"])
    assert await ledger.wait_tasks([opened["task_id"]], 30.0)
    states = [(await request(urls, "GET", *each))["state"] for each in (*ended, silent)]
    assert states == ["delivered", "delivered", "expired"]
    with pytest.raises(Refused, match=r"410 .*silent for 300 s; 2 of 3 attempts had ended"):
        await request(urls, "POST", f"{silent[0]}/end", silent[1], {"reward": 9})
    [record] = await ledger.get_tasks([opened["task_id"]], include_groups=True)
    assert [each.reward for each in record.group.trajectories] == [0.0, 1.0]


async def test_attempts_when_several_then_one_group_once_all_have_ended(urls, ledger):
    incarnation, step = await register(ledger)
    opened = await request(urls, "POST", "/v1/sessions", body={"n": 3})
    assert len(opened["sessions"]) == 3
    for number, session in enumerate(opened["sessions"]):
        path, key = f"/sessions/{session['id']}", session["api_key"]
        call = {"prompt": "1+1=", "max_tokens": 4}
        await request(urls, "POST", f"{path}/v1/completions", key, call)
        body = {"reward": number, "parts": {"correct": number / 2}}
        ended = await request(urls, "POST", f"{path}/end", key, body)
        assert ended["state"] == ("completed" if number == 2 else "running")
    [group] = await batch(ledger, incarnation, step)
    assert [each.reward for each in group.trajectories] == [0.0, 1.0, 2.0]
    parts = [each.reward_parts for each in group.trajectories]
    assert parts == [{"correct": 0.0}, {"correct": 0.5}, {"correct": 1.0}]


async def test_open_when_the_staleness_bound_is_reached_then_429_says_when(urls, ledger):
    incarnation, step = await register(ledger, size=1, eta=0)
    await ledger.confirm_version(incarnation, step - 1)  # no model call follows
    opened = await request(urls, "POST", "/v1/sessions")
    async with httpx.AsyncClient() as http:
        reply = await http.post(f"{urls[0]}/v1/sessions", json={})
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
    assert "admission: 1 running" in reply.json()["error"]
    assert await ledger.cancel_tasks([opened["task_id"]], reason="enough") == 1
    with pytest.raises(Refused, match=r"410 .*is cancelled: enough"):
        await request(urls, "POST", f"/sessions/{opened['id']}/end", opened["api_key"])


async def test_session_when_the_request_is_wrong_then_refused_in_one_line(urls, ledger):
    await register(ledger)
    opened = await request(urls, "POST", "/v1/sessions", body={"ttl_s": 1.0})
    path, key = f"/sessions/{opened['id']}", opened["api_key"]
    with pytest.raises(Refused, match=r"401 .*does not belong to this session"):
        await request(urls, "GET", path, "sk-another")
    with pytest.raises(Refused, match=r"404 .*unknown"):
        await request(urls, "GET", "/sessions/session-0-0", key)
    with pytest.raises(Refused, match=r"404 .*no such route"):
        await request(urls, "POST", f"{path}/v1/embeddings", key, {})
    with pytest.raises(Refused, match=r"400 .*n 65: input should be"):
        await request(urls, "POST", "/v1/sessions", body={"n": 65})

    assert await ledger.wait_tasks([opened["task_id"]], 30.0)
    assert (await request(urls, "GET", path, key))["state"] == "expired"
    with pytest.raises(Refused, match=r"410 .*its agent was silent for 1 s"):
        await request(urls, "POST", f"{path}/v1/completions", key, {"prompt": "1"})
