"""Episodes that an EnvServer plays; the server here speaks the wire of verifiers 0.4.0."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import msgpack
import pytest
import zmq
import zmq.asyncio
from tests.ports import free_port
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine
from tests.waiting import until

from areal.agents import env_server
from areal.agents.verifiers import VerifiersWorkflow, verifiers_rows
from areal.errors import InvalidInput, Unavailable, WorkflowError
from areal.types import GenerationHyperparameters
from areal.workflows.specs import build_workflow, describe_workflow

ROW = {"prompt": "1+1=", "answer": "2"}


class Server:
    """Plays `play(request, trace ids)`, which returns what each trace ends with."""

    def __init__(self, play):
        self.play, self.address = play, f"tcp://127.0.0.1:{free_port()}"
        self.running, self.cancelled = {}, []

    async def serve(self, socket):
        while True:
            client, known, route, payload = await socket.recv_multipart()
            body = msgpack.unpackb(payload)

            async def reply(kind, answer, client=client, known=known):
                await socket.send_multipart([client, known, kind, msgpack.packb(answer)])

            if route == b"health":
                await reply(b"reply", {"success": True, "error": None})
            elif route == b"cancel":
                self.cancelled.append(body["request_id"])
            else:
                self.running[known] = asyncio.create_task(self.run(known, body, reply))

    async def run(self, known, body, reply):
        traces = {}
        try:
            ended = await self.play(body, lambda name: f"{name}-{known.decode()}")
        except Exception as error:
            await reply(b"reply", {"success": False, "error": f"{type(error).__name__}: {error}"})
            return
        for trace, more in ended.items():
            agent = {"name": "agent", "trainable": True}
            start = {"trace": trace, "open": {"id": trace, "version": 1}, "nodes": [{"turn": 0}]}
            await reply(b"delta", start)
            await reply(b"delta", {"trace": trace, "set": {"ok": False, "rewards": {}}})
            last = {"ok": True, "agent": agent, "rewards": {}, **more}
            traces[trace] = [{"turn": 1}]
            await reply(b"delta", {"trace": trace, "nodes": traces[trace], "set": last})
        sizes = [{"id": trace, "nodes": 2, "calls": 1} for trace in traces]
        head = {"ok": True, "errors": []}
        await reply(b"reply", {"success": True, "error": None, "head": head, "traces": sizes})


@asynccontextmanager
async def serving(play):
    server = Server(play)
    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(server.address)
    task = asyncio.create_task(server.serve(socket))
    try:
        yield server
    finally:
        for each in (task, *server.running.values()):
            each.cancel()
        await asyncio.gather(task, *server.running.values(), return_exceptions=True)
        socket.close()


async def chat(body, trace, text="1+1="):
    """A model call as verifiers' client makes it: our key in a header, and the trace's name."""
    client = body["client"]
    headers = {**client["headers"], "X-Session-ID": trace, "Authorization": "Bearer EMPTY"}
    said = {"model": body["model"], "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{client['base_url']}/chat/completions", json=said, headers=headers
        )
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def workflow(server, n=1, **more):
    return VerifiersWorkflow(server.address, GenerationHyperparameters(n_samples=n), **more)


def rewarded(score, weight=1.0):
    return {"rewards": {"right": {"score": score, "weight": weight}, "unscored": None}}


async def test_episodes_when_played_then_each_trace_has_its_calls_and_its_reward():
    async def play(body, trace):
        assert body["task_data"] == ROW
        right = await chat(body, trace("solver"))
        await chat(body, trace("judge"), "Is it right?")
        await chat(body, trace("writer"), "Write.")
        judge = {"agent": {"name": "judge", "trainable": False}}
        return {
            trace("solver"): rewarded(float(right == "2"), 2.0),
            trace("judge"): {**rewarded(1.0), **judge},
            trace("writer"): {},
        }

    engine = ScriptedEngine([["2"], ["yes"], ["text"]], None)
    async with serving(play) as server:
        solver, writer = await workflow(server).arun_episode(engine, ROW)
    assert (engine.trained(solver), engine.trained(writer)) == (["2"], ["text"])
    assert (solver.reward, solver.reward_parts) == (2.0, {"right": 1.0})
    assert (writer.reward, writer.reward_parts) == (0.0, {})


@pytest.mark.parametrize("tokenizer", [None, "a/model"])
async def test_request_when_sent_then_the_recipe_decides_how_tokens_are_sampled(tokenizer):
    seen = []

    async def play(body, trace):
        seen.append(body)
        await chat(body, trace("t"))
        return {trace("t"): {}}

    engine = ScriptedEngine([["2"], ["2"]], None)
    async with serving(play) as server:
        group = await workflow(server, n=2, tokenizer=tokenizer).arun_episode(engine, ROW)
    assert len(group) == len(seen) == 2
    assert seen[0]["client"]["type"] == ("eval" if tokenizer is None else "train")
    assert seen[0]["client"].get("renderer_model_name") == tokenizer
    assert seen[0]["sampling"] == {"temperature": 1.0, "max_tokens": 512}
    keys = {body["client"]["headers"]["X-Areal-Key"] for body in seen}
    assert len(keys) == 2


async def failed(body, trace):
    errors = [{"type": "TaskError", "message": "no such tool"}]
    return {trace("t"): {"ok": False, "errors": errors}}


async def broken(body, trace):
    raise ValueError("task_data: answer: Field required")


async def silent(body, trace):
    return {trace("t"): rewarded(1.0)}


@pytest.mark.parametrize(
    ("play", "why"),
    [
        (failed, "TaskError: no such tool"),
        (broken, "run: ValueError: task_data: answer: Field required"),
        (silent, "no trainable agent called the model"),
    ],
)
async def test_episode_when_the_environment_fails_then_the_error_says_why(play, why):
    async with serving(play) as server:
        with pytest.raises(ExceptionGroup) as raised:
            await workflow(server).arun_episode(ScriptedEngine([], None), ROW)
    [error] = raised.value.exceptions
    assert isinstance(error, WorkflowError)
    assert why in str(error)


async def test_episode_when_the_model_cannot_answer_then_it_is_not_the_environments_fault():
    async def play(body, trace):
        await chat(body, trace("t"))
        return {}

    engine = ScriptedEngine([Unavailable("no server")], None)
    async with serving(play) as server:
        with pytest.raises(ExceptionGroup) as raised:
            await workflow(server).arun_episode(engine, ROW)
    assert [str(error) for error in raised.value.exceptions] == ["no server"]


async def test_episode_when_it_takes_too_long_then_the_server_is_told_to_stop():
    async def play(body, trace):
        await asyncio.sleep(60)
        return {}

    async with serving(play) as server:
        with pytest.raises(ExceptionGroup) as raised:
            await workflow(server, timeout_s=0.2).arun_episode(ScriptedEngine([], None), ROW)
        [known] = server.running
        await until(lambda: server.cancelled == [known.decode()])
    [error] = raised.value.exceptions
    assert "the episode did not end within 0.2 s" in str(error)


async def test_server_when_it_dies_then_the_task_is_tried_again():
    playing = asyncio.Event()

    async def play(body, trace):
        playing.set()
        await asyncio.sleep(60)
        return {}

    async with serving(play) as server:
        engine = ScriptedEngine([], None)
        episode = asyncio.create_task(workflow(server).arun_episode(engine, ROW))
        await playing.wait()
    with pytest.raises(ExceptionGroup) as raised:
        await episode
    [error] = raised.value.exceptions
    assert isinstance(error, Unavailable)
    assert "the connection was lost" in str(error)


async def test_server_when_there_is_none_then_the_task_is_tried_again(monkeypatch):
    monkeypatch.setattr(env_server, "CONNECT_TIMEOUT_S", 0.2)
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"{address}: no EnvServer answered within 0.2 s"):
        await VerifiersWorkflow(address).arun_episode(ScriptedEngine([], None), ROW)


@pytest.mark.parametrize("address", ["", "http://x:1", "tcp://host", "127.0.0.1:5000"])
def test_address_when_it_is_none_then_refused(address):
    with pytest.raises(InvalidInput, match="expected tcp://HOST:PORT"):
        VerifiersWorkflow(address)


def test_rows_when_the_interpreter_fails_then_the_error_has_its_last_line(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'Traceback' >&2\necho 'ModuleNotFoundError: no x' >&2\nexit 1\n"
    )
    python.chmod(0o700)
    with pytest.raises(InvalidInput, match=r"taskset 'x': .*python: ModuleNotFoundError: no x"):
        verifiers_rows(str(python), {"id": "x"}, count=1)
    with pytest.raises(InvalidInput, match=r"taskset 'x': .*No such file"):
        verifiers_rows(str(tmp_path / "none"), {"id": "x"}, count=1)


def test_workflow_when_sent_to_workers_then_no_recipe_is_needed():
    built = build_workflow(describe_workflow(VerifiersWorkflow("tcp://host:1", timeout_s=5)), None)
    assert (built.server, built.timeout_s) == ("tcp://host:1", 5)
