"""The gateway as a process, before small services on real gRPC servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.integration.upstream_fakes import FakeRun, Upstream
from tests.service_process import service_process

from areal.v1 import buffer_service_pb2, policy_pb2, trajectory_pb2


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "reward/mean": step / 100, "time/step": 0.5, **values}


def server(number: int, state: str, version: int, cause: str = "") -> policy_pb2.InferenceServer:
    return policy_pb2.InferenceServer(
        server_id=f"127.0.0.1:{30000 + number}",
        url=f"http://127.0.0.1:{30000 + number}",
        state=policy_pb2.ServerState.Value(f"SERVER_STATE_{state}"),
        version=version,
        cause=cause,
    )


class Gateway:
    def __init__(self, http: aiohttp.ClientSession, url: str, upstream: Upstream, service: Any):
        self.http, self.url, self.upstream, self.service = http, url, upstream, service

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as reply:
            return reply.status, await reply.json(content_type=None)

    async def post(
        self, path: str, body: Any, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": content_type}
        async with self.http.post(self.url + path, data=data, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)

    async def status_when(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status event that fulfills a condition, within a minute."""
        async with asyncio.timeout(60):
            async for name, body in self.events():
                if name == "status" and condition(body):
                    return body
        raise AssertionError("the event stream ended")

    async def events(self, query: str = "") -> AsyncIterator[tuple[str, Any]]:
        async with self.http.get(f"{self.url}/v1/events{query}") as reply:
            assert reply.content_type == "text/event-stream"
            name = ""
            buffer = b""
            async for chunk in reply.content.iter_any():
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    if line.startswith(b"event: "):
                        name = line[7:].decode()
                    elif line.startswith(b"data: "):
                        yield name, json.loads(line[6:])


@asynccontextmanager
async def gateway(
    folder: Path, run: FakeRun, *names: str, configured: tuple[str, ...] | None = None
) -> AsyncIterator[Gateway]:
    upstream = Upstream(run)
    await upstream.start(*names)
    ends = {k: v for k, v in upstream.addresses.items() if configured is None or k in configured}
    config = "experiment_name: arithmetic\ntrial_name: seed0\nendpoints:\n" + "".join(
        f"  {key}: {address}\n" for key, address in ends.items()
    )
    config += "" if ends else "  redis: ''\n"
    try:
        async with (
            service_process("areal_gateway", folder, config) as service,
            aiohttp.ClientSession() as http,
        ):
            yield Gateway(http, f"http://{service.listen}", upstream, service)
    finally:
        await upstream.stop()


TASK = {"task_id": "t-1", "data": {"messages": [{"role": "user", "content": "1+1="}]}}


async def test_tasks_when_the_ledger_is_full_then_429_says_when_to_try_again(tmp_path):
    async with gateway(tmp_path, FakeRun()) as gate:
        body = {"tasks": [TASK | {"workflow": {"name": "full"}}]}
        async with gate.http.post(gate.url + "/v1/tasks", json=body) as reply:
            assert (reply.status, reply.headers["Retry-After"]) == (429, "4")
            assert (await reply.json())["error"].endswith("memory limit; try again in 4 s")


async def test_tasks_when_submitted_then_found_delivered_and_cancelled(tmp_path):
    run = FakeRun()
    async with gateway(tmp_path, run) as gate:
        workflow = {"name": "rlvr", "kwargs": {"reward_fn": "math"}}
        body = {"tasks": [{**TASK, "workflow": workflow, "time_to_live_s": 60}, {"data": {}}]}
        code, reply = await gate.post("/v1/tasks", body)
        assert code == 200
        assert reply["results"][0] == {"task_id": "t-1", "accepted": True}
        made = reply["results"][1]["task_id"]
        assert made.startswith("rest-")
        code, reply = await gate.post("/v1/tasks", {"tasks": [TASK]})
        assert reply["results"] == [{"task_id": "t-1", "accepted": False}]

        code, task = await gate.get("/v1/tasks/t-1")
        assert (code, task["state"], task["purpose"]) == (200, "queued", "serve")
        assert task["workflow"]["kwargs"] == {"reward_fn": "math"}
        assert task["data"] == TASK["data"]
        code, reply = await gate.get("/v1/trajectories/t-1")
        assert code == 404
        assert "'t-1' is queued" in reply["error"]

        gate.upstream.rollout.deliver("t-1")
        code, reply = await gate.get("/v1/trajectories/t-1")
        [trajectory] = reply["trajectories"]
        assert trajectory["input_ids"] == [5, 6, 7]
        assert trajectory["token_versions"] == [-1, 3, 4]
        assert trajectory["loss_mask"] == [False, True, True]
        assert trajectory["behavior_logprobs"] == [0, -0.5, -0.25]
        assert (trajectory["reward"], trajectory["completion_text"]) == (1.0, "42")
        _, plain = await gate.get("/v1/tasks/t-1")
        assert "trajectories" not in plain
        _, full = await gate.get("/v1/tasks/t-1?include_trajectories=true")
        assert full["trajectories"] == reply["trajectories"]

        code, reply = await gate.post("/v1/tasks/query", {"task_ids": ["t-1", "nobody", made]})
        assert [t["task_id"] for t in reply["tasks"]] == ["t-1", made]
        cancel = {"task_ids": [made, "t-1"], "reason": "enough"}
        assert await gate.post("/v1/tasks/cancel", cancel) == (200, {"cancelled": 1})
        _, task = await gate.get(f"/v1/tasks/{made}")
        assert (task["state"], task["reason"]) == ("cancelled", "enough")


BAD_BODIES = [
    ("/v1/tasks", b"{", 400, r"^body: not JSON"),
    ("/v1/tasks", b"", 400, r"^body"),
    ("/v1/tasks", [], 400, r"^body"),
    ("/v1/tasks", {}, 400, r"^tasks: is missing$"),
    ("/v1/tasks", {"tasks": []}, 400, r"^tasks \[\]: "),
    ("/v1/tasks", {"tasks": [TASK, {"task_id": "x"}]}, 400, r"^tasks\[1\]\.data .*'x'.*: is miss"),
    (
        "/v1/tasks",
        {"tasks": [{**TASK, "purpose": "test"}]},
        400,
        r"^tasks\[0\]\.purpose \(task_id 't-1'\) 'test': .*'serve' or 'train'",
    ),
    ("/v1/tasks", {"tasks": [{**TASK, "purpse": "x"}]}, 400, r"purpse \(.*\): unknown field$"),
    ("/v1/tasks", {"tasks": [{**TASK, "task_id": "a b"}]}, 400, r"task_id .*'a b'"),
    ("/v1/tasks", {"tasks": [{**TASK, "task_id": 7}]}, 400, r"task_id 7: "),
    ("/v1/tasks", {"tasks": [{**TASK, "data": "x"}]}, 400, r"data .*'x': "),
    ("/v1/tasks", {"tasks": [{**TASK, "time_to_live_s": -1}]}, 400, r"time_to_live_s .*-1"),
    ("/v1/tasks", b'{"tasks":[{"data":{"a":"\\ud800"}}]}', 400, r"."),
    ("/v1/tasks", b'{"tasks":[{"data":{"a":1e999}}]}', 400, r"."),
    ("/v1/tasks", b'{"tasks":[{"data":{"a":[NaN]}}]}', 400, r"."),
    ("/v1/tasks", b'{"tasks":[{"data":{},"workflow":{"name":"\\ud800"}}]}', 400, r"."),
    ("/v1/tasks/query", b'{"task_ids":["\\ud800"]}', 400, r"^task_ids\[0\]"),
    ("/v1/tasks/cancel", b'{"task_ids":["a"],"reason":"\\ud800"}', 400, r"^reason"),
    ("/v1/tasks", {"tasks": [{**TASK, "workflow": {"name": "nope"}}]}, 400, r"unknown workflow"),
    ("/v1/tasks/query", {"task_ids": []}, 400, r"^task_ids"),
    ("/v1/tasks/cancel", {"task_ids": "t-1"}, 400, r"^task_ids 't-1': "),
]


async def _megabytes(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * (1 << 20)


async def test_requests_when_malformed_then_one_clear_line_and_nothing_is_queued(tmp_path):
    run = FakeRun()
    async with gateway(tmp_path, run) as gate:
        for path, body, expected, message in BAD_BODIES:
            code, reply = await gate.post(path, body)
            assert code == expected, (path, str(body)[:100], reply)
            assert re.search(message, reply["error"]), reply
            assert "\n" not in reply["error"]
            assert len(reply["error"]) < 500
        # What a page of another site could send without asking first is not JSON to us.
        code, reply = await gate.post("/v1/tasks", {"tasks": [TASK]}, content_type="text/plain")
        assert (code, "Content-Type: application/json" in reply["error"]) == (400, True)
        assert run.tasks == {}
        code, reply = await gate.get("/v1/tasks/nobody")
        assert (code, reply) == (
            404,
            {"error": "task 'nobody': unknown, or released since it ended"},
        )
        code, reply = await gate.get("/v1/steps?after=-1")
        assert (code, reply["error"].startswith("after '-1': ")) == (400, True)
        assert await gate.get("/nothing") == (404, {"error": "GET /nothing: Not Found"})
        code, reply = await gate.get("/v1/tasks")
        assert code == 405
        # A body without a length is stopped while it comes; one with a length before it comes.
        for lengthy in ({}, {"Content-Length": str(64 << 20)}):
            headers = {"Content-Type": "application/json", **lengthy}
            try:
                async with gate.http.post(
                    gate.url + "/v1/tasks", data=_megabytes(64), headers=headers
                ) as reply:
                    assert reply.status == 413
            except aiohttp.ClientError:
                pass  # it was cut off in the middle of sending: just as well
        assert psutil.Process(gate.service.pid).memory_info().rss < 200 << 20
        code, reply = await gate.get("/openapi.json")
        assert set(reply["paths"]) >= {"/v1/tasks", "/v1/events", "/v1/steps", "/v1/status"}


async def test_status_when_a_recipe_fails_then_its_failures_and_the_stop_are_told(tmp_path):
    run = FakeRun(stopped="the first 16 tasks all failed with the same error: …")
    words = "reward_fn raised KeyError: 'solution' (/tmp/mine.py:41)"
    run.failures = [
        buffer_service_pb2.WorkflowFailure(
            site="KeyError at mine.py:41", attempts=48, task_id="e0-2", detail=words
        )
    ]
    async with gateway(tmp_path, run) as gate:
        status = await gate.status_when(lambda s: s["ledger"])
        [failure] = status["ledger"]["failures"]
        assert (failure["task_id"], failure["attempts"]) == ("e0-2", 48)
        assert (failure["site"], failure["detail"]) == ("KeyError at mine.py:41", words)
        assert status["ledger"]["stopped"] == run.stopped


async def test_status_when_all_answer_then_everything_is_there(tmp_path):
    run = FakeRun(trajectories=512, generated_tokens=4096, policy_version=3, staleness_max=2)
    run.counts.update(queued=1, running=2, completed=3, batched=4, trained=5, rejected=6)
    run.servers = [server(1, "QUARANTINED", -1, "probe failed"), server(0, "SERVING", 3)]
    run.rows, run.step = [row(1), row(2), row(3)], 3
    async with gateway(tmp_path, run) as gate:
        status = await gate.status_when(
            lambda s: s["trainer"] and s["ledger"] and s["servers"] and s["versions"]
        )
        assert status["run"]["experiment"] == "arithmetic"
        assert status["ledger"]["submitted"] == 21
        assert status["ledger"]["counts"]["rejected"] == 6
        assert sum(status["ledger"]["counts"].values()) == 21
        assert [s["state"] for s in status["servers"]] == ["serving", "quarantined"]
        assert status["servers"][1]["cause"] == "probe failed"
        assert (status["versions"]["current_version"], status["versions"]["servers"]) == (3, 2)
        assert status["trainer"]["state"] == "training"
        assert status["trainer"]["world_size"] == 2
        assert status["last_step"] == row(3)
        assert status["eta_s"] == pytest.approx(0.5 * 97)
        assert all(s["ok"] for s in status["sources"].values())
        assert (await gate.get("/v1/status"))[1].keys() == status.keys()
        assert (await gate.get("/v1/steps?after=1"))[1] == {"steps": [row(2), row(3)]}
        assert await gate.get("/healthz") == (200, {"service": "gateway", "serving": True})
        async with gate.http.get(gate.url + "/metrics") as reply:
            assert 'areal_gateway_requests_total{code="200",route="/v1/steps"} 1.0' in (
                await reply.text()
            )


async def test_events_when_steps_finish_then_rows_come_once_and_at_once(tmp_path):
    run = FakeRun(total_steps=50)
    async with gateway(tmp_path, run) as gate:
        seen: list[int] = []
        async with asyncio.timeout(60):
            async for name, body in gate.events():
                if name == "steps":
                    seen += [r["step"] for r in body["rows"]]
                    if len(seen) >= 10:
                        break
                if len(seen) == run.step:  # the page has all there is: the next step finishes
                    run.step += 1
                    run.rows.append(row(run.step))
                    run.change()
        assert seen == list(range(1, 11))


async def test_events_when_many_watch_then_one_poller_asks(tmp_path):
    run = FakeRun()
    async with gateway(tmp_path, run) as gate:

        async def watch() -> int:
            count = 0
            async for name, _ in gate.events():
                count += name == "status"
                if count == 3:
                    return count
            raise AssertionError("ended")

        before, began = gate.upstream.ledger.calls, time.monotonic()
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(watch() for _ in range(40))) == [3] * 40
        # One look a second, not one a page.
        assert gate.upstream.ledger.calls - before <= time.monotonic() - began + 5


async def test_trainer_when_it_restarts_then_page_starts_over_from_its_checkpoint(tmp_path):
    run = FakeRun(step=5, rows=[row(s, life=1) for s in range(1, 6)])
    async with gateway(tmp_path, run) as gate:
        await gate.status_when(lambda s: s["last_step"] and s["last_step"]["step"] == 5)
        await gate.upstream.stop("trainer")
        away = await gate.status_when(lambda s: not s["sources"]["trainer"]["ok"])
        assert away["trainer"]["step"] == 5  # the last that was known
        assert "GetStatus" in away["sources"]["trainer"]["error"]
        # It resumes from the checkpoint of step 3 and trains step 4 again.
        run.incarnation, run.step, run.rows = 2, 4, [row(4, life=2)]
        await gate.upstream.start("trainer")
        back = await gate.status_when(
            lambda s: s["sources"]["trainer"]["ok"] and s["trainer"]["incarnation"] == 2
        )
        assert back["last_step"] == row(4, life=2)
        _, reply = await gate.get("/v1/steps")
        assert [(r["step"], r["life"]) for r in reply["steps"]] == [(1, 1), (2, 1), (3, 1), (4, 2)]


async def test_gateway_when_nothing_else_runs_then_it_serves_and_says_what_is_missing(tmp_path):
    async with gateway(tmp_path, FakeRun(), configured=()) as gate:
        code, status = await gate.get("/v1/status")
        assert code == 200
        assert status["ledger"] is status["trainer"] is None
        code, reply = await gate.post("/v1/tasks", {"tasks": [TASK]})
        assert (code, "no rollout service" in reply["error"]) == (503, True)
    await asyncio.sleep(0)
    folder = tmp_path / "two"
    folder.mkdir()
    async with gateway(folder, FakeRun()) as gate:
        await gate.upstream.stop("rollout", "buffer")
        code, reply = await gate.post("/v1/tasks", {"tasks": [TASK]})
        assert code == 503
        # Each source is asked in its own time.
        await gate.status_when(
            lambda s: not s["sources"]["ledger"]["ok"] and s["sources"]["servers"]["ok"]
        )
        await gate.upstream.start("rollout", "buffer")
        await gate.status_when(lambda s: s["sources"]["ledger"]["ok"])
        # A page that is open does not hold up the end.
        stream = gate.events()
        await anext(stream)
        assert await gate.service.stop(signal.SIGTERM) == 0
        await stream.aclose()


async def test_dashboard_when_opened_then_it_is_whole_and_loads_nothing_from_elsewhere(tmp_path):
    async with gateway(tmp_path, FakeRun(), configured=()) as gate:
        async with gate.http.get(gate.url + "/") as reply:
            page = await reply.text()
            assert reply.headers["Content-Security-Policy"].startswith("default-src 'self'")
        files = re.findall(r'(?:src|href)="(static/[^"]+)"', page)
        assert set(files) == {"static/style.css", "static/dashboard.js"}
        script = ""
        modules = ["static/charts.js", "static/letters.js", "static/scales.js"]
        for name in [*files, *modules]:
            async with gate.http.get(f"{gate.url}/{name}") as reply:
                assert reply.status == 200
                text = await reply.text()
                assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
                script += text
        assert set(re.findall(r'from "\./(\w+\.js)"', script)) == {
            name.removeprefix("static/") for name in modules
        }
        # Every element that the script looks for is in the page.
        wanted = set(re.findall(r'\$\("([a-z-]+)"\)', script))
        wanted |= set(re.findall(r'getElementById\("([a-z-]+)"\)', script))
        wanted |= set(re.findall(r'(?:text|rich|legend)\("([a-z-]+)"', script))
        ids = set(re.findall(r'id="([a-z-]+)"', page))
        assert wanted
        assert wanted <= ids


async def test_dead_letters_when_asked_for_then_each_says_why(tmp_path):
    letter = buffer_service_pb2.DeadLetter(
        record=trajectory_pb2.TaskRecord(
            task=trajectory_pb2.Task(
                task_id="e0-3", purpose=trajectory_pb2.PURPOSE_TRAIN, data_json="{}"
            ),
            state=trajectory_pb2.TASK_STATE_DEAD_LETTERED,
            reason="ZeroDivisionError: division by zero",
            attempts=3,
        ),
        cause="workflow_error",
        traceback="Traceback\n  recipe.py, line 7\n",
    )
    run = FakeRun(dead_letters=[letter] * 5)
    async with gateway(tmp_path, run) as gate:
        code, body = await gate.get("/v1/dead-letters?limit=2")
        assert (code, len(body["dead_letters"])) == (200, 2)
        shown = body["dead_letters"][0]
        assert (shown["task_id"], shown["state"], shown["attempts"]) == ("e0-3", "dead_lettered", 3)
        assert shown["cause"] == "workflow_error"
        assert shown["reason"] == "ZeroDivisionError: division by zero"
        assert shown["traceback"].endswith("recipe.py, line 7\n")
        code, body = await gate.get("/v1/dead-letters?limit=0")
        assert (code, "limit" in body["error"]) == (400, True)
        await gate.upstream.stop("buffer")
        code, body = await gate.get("/v1/dead-letters")
        assert code == 503


async def test_status_when_held_out_rows_were_measured_then_it_has_each_measurement(tmp_path):
    run = FakeRun(step=2, rows=[row(1), row(2)], evaluations=[("heldout_before", 0, 0.25)])
    async with gateway(tmp_path, run) as gate:
        status = await gate.status_when(lambda s: s["trainer"])
        first = {"name": "heldout_before", "step": 0, "mean_reward": 0.25}
        assert status["trainer"]["evaluations"] == [first]
        run.evaluations.append(("heldout_after", 2, 0.5))
        run.change()
        status = await gate.status_when(lambda s: len(s["trainer"]["evaluations"]) == 2)
        assert status["trainer"]["evaluations"][1]["mean_reward"] == 0.5
