"""OpenEnv environments by their wire: a server that speaks it as openenv-core 0.3.0 does."""

import asyncio
import json
import os

import pytest
from aiohttp import WSMsgType, web
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.errors import InvalidInput, Unavailable, WorkflowError
from areal.types import GenerationHyperparameters
from areal.workflows.environment import EnvWorkflow

FIELDS = {"action": "message", "observation": "text"}
OPEN = web.AppKey("open", set)


async def session(request):
    """A digit to guess, the reset's seed; "hang" has no answer."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    request.app[OPEN].add(socket)
    secret = ""
    async for message in socket:
        assert message.type is WSMsgType.TEXT
        asked = json.loads(message.data)
        if asked["type"] == "close":
            break
        data = asked["data"]
        if asked["type"] == "reset":
            secret = str(data["seed"])
            seen = {"observation": {"text": "digit?"}, "reward": 0.0, "done": False}
        elif set(data) != {"message"}:
            errors = [{"type": "missing", "loc": ["message"], "msg": "Field required"}]
            failed = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            await socket.send_json({"type": "error", "data": failed})
            continue
        elif data["message"] == "hang":
            continue
        else:
            right = data["message"] == secret
            seen = {
                "observation": {"text": "yes" if right else "wrong"},
                "reward": 1.0 if right else -0.1,
                "done": right,
            }
        await socket.send_json({"type": "observation", "data": seen})
    request.app[OPEN].discard(socket)
    return socket


@pytest.fixture
async def server():
    app = web.Application()
    app[OPEN] = set()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}", app[OPEN]
    await runner.cleanup()


def play(url, answers, n=1, row=None, **options):
    options.setdefault("options", FIELDS)
    flow = EnvWorkflow(f"openenv:{url}", GenerationHyperparameters(n_samples=n), **options)
    engine = ScriptedEngine(answers, None)
    return engine, flow.arun_episode(engine, row or {"seed": 7})


async def guesses(url):
    engine, episode = play(url, [["5"], ["7"], ["never"]])
    [one] = await episode
    assert engine.trained(one) == ["5", "7"]
    assert one.rewards[one.rewards != 0].tolist() == pytest.approx([-0.1, 1.0])
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert "digit?" in text
    assert "wrong" in text


async def test_episode_when_played_then_rewards_and_observations_are_the_servers(server):
    url, still_open = server
    await guesses(url)
    assert not still_open  # `close` has ended the session


@pytest.mark.skipif(not os.environ.get("OPENENV_URL"), reason="OPENENV_URL: no server given")
async def test_episode_when_played_on_a_given_server_then_as_on_this_one():
    await guesses(os.environ["OPENENV_URL"])


async def test_fields_when_not_named_then_both_sides_are_json(server):
    answers = [["seven"], ['{"message": "7"}']]
    engine, episode = play(server[0], answers, options={})
    [one] = await episode
    assert one.rewards.sum() == 1.0
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert '{"text": "digit?"}' in text
    assert "expected a JSON object" in text


async def test_action_when_the_server_refuses_it_then_the_failure_says_which_field(server):
    _, episode = play(server[0], [["5"]], options={"action": "word", "observation": "text"})
    with pytest.raises(WorkflowError, match=r"step: VALIDATION_ERROR: .*message.*Field required"):
        await episode


async def test_observation_when_it_lacks_the_field_then_the_failure_names_those_there_are(server):
    _, episode = play(server[0], [["5"]], options={"observation": "said"})
    with pytest.raises(InvalidInput, match="observation 'said': no such field; known: text"):
        await episode


async def test_step_when_the_server_is_silent_then_it_fails_and_its_thread_ends(server):
    url, still_open = server
    engine = ScriptedEngine([["hang"]], None)
    flow = EnvWorkflow(
        f"openenv:{url}", GenerationHyperparameters(), options=FIELDS, step_timeout_s=0.5
    )
    with pytest.raises(WorkflowError, match=r"OpenEnv.step: no step within 0.5 s"):
        await flow.arun_episode(engine, {"seed": 7})
    await asyncio.sleep(0)
    assert flow._calls.hung == 0
    assert not still_open


async def test_server_when_away_then_the_task_is_tried_again(server):
    _, episode = play("http://127.0.0.1:9", [["5"]])
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:9/ws: reset"):
        await episode


def test_url_when_it_is_none_then_refused():
    from areal.workflows.openenv import OpenEnv

    with pytest.raises(InvalidInput, match="expected openenv:http://HOST:PORT"):
        OpenEnv("localhost:8000")
