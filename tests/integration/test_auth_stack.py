"""A whole stack with a token, passwords of its stores and mutual TLS: who gets in, who does not."""

from __future__ import annotations

import json
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import grpc
import nats
import psutil
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry
from tests.certificates import Authority
from tests.integration.stack_tools import RunningStack, areal, eventually

from areal.chassis.waits import Waits
from areal.config.experiment import GRPOConfig, load_service_config
from areal.security import Security
from areal.v1 import (
    buffer_service_pb2,
    reward_service_pb2,
    rollout_service_pb2,
    weight_sync_service_pb2,
)
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.http import HttpEngine, open_session

pytestmark = pytest.mark.timeout(240)

TOKEN = "correct-horse-battery-staple"
WRONG = "Bearer incorrect-horse-battery-staple"
RIGHT = f"Bearer {TOKEN}"
SERVICES: dict[str, ModuleType] = {
    "buffer": buffer_service_pb2,
    "reward": reward_service_pb2,
    "rollout-0": rollout_service_pb2,
    "weight-sync": weight_sync_service_pb2,
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"


def methods_of(module: ModuleType) -> list[tuple[str, bool]]:
    """(path, whether the answer is a stream) of every method that a contract defines."""
    [service] = module.DESCRIPTOR.services_by_name.values()
    return [(f"/{service.full_name}/{m.name}", m.server_streaming) for m in service.methods]


def code_of(channel: grpc.Channel, path: str, stream: bool, header: str | None) -> grpc.StatusCode:
    """How a call with an empty message ends; a stream: with its first answer."""
    metadata = [("authorization", header)] if header is not None else None
    try:
        if stream:
            call = channel.unary_stream(path)(b"", metadata=metadata, timeout=2)
            next(iter(call), None)
            call.cancel()
        else:
            channel.unary_unary(path)(b"", metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@dataclass
class SecureStack:
    """What a user of it holds."""

    stack: RunningStack
    config: GRPOConfig
    security: Security

    def channel(self, name: str) -> grpc.Channel:
        tls = self.security.tls
        assert tls is not None
        credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
        return grpc.secure_channel(self.stack.address(name), credentials)

    @property
    def secrets(self) -> list[str]:
        return [self.security.token, self.security.redis_password, self.security.nats_token]

    def areal(self, *arguments: str, cwd: Path) -> Any:
        return areal(*arguments, "--run", str(self.stack.run_dir), cwd=cwd)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureStack]:
    from areal_torch.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("secure")
    model = make_tiny_model(folder / "model", seed=0)
    certificates = Authority.make(folder / "pki").tls_dir("areal")
    (folder / "own").mkdir()
    (folder / "own" / "token").write_text(TOKEN + "\n")
    running = RunningStack(folder / "runs" / "secure" / "t0")
    try:
        started = areal(
            *("up", "--detach", f"model.path={model}", "model.context_length=128"),
            *("experiment_name=secure", "trial_name=t0", "gconfig.max_new_tokens=4"),
            *("allocation_mode=sglang:d1+fsdp:d1", "security.dir=own"),
            f"security.tls_dir={certificates}",
            cwd=folder,
        )
        assert started.returncode == 0, started.stderr + running.log("launcher")
        config = load_service_config(running.run_dir / "config.yaml")
        yield SecureStack(running, config, Security.load(config.security, {}))
        stopped = areal("down", cwd=folder)
        assert stopped.returncode == 0, stopped.stderr
        running.assert_gone()
        assert not (running.run_dir / "secrets").exists(), "what was made goes with the stack"
    finally:
        running.clean_up()


def test_tasks_when_submitted_with_the_token_then_served(
    secure: SecureStack, tmp_path: Path
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "one", "prompt": "1+1=", "answer": "2"}\n')
    done = secure.areal("submit", str(file), "--wait", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["counts"] == {"delivered": 1}
    status = secure.areal("status", "--json", cwd=tmp_path)
    content = json.loads(status.stdout)
    assert content["problems"] == {}
    assert [server["state"] for server in content["servers"]] == ["serving"]
    assert not any(secret in status.stdout for secret in secure.secrets)


@pytest.mark.parametrize("name", SERVICES)
def test_grpc_when_any_method_is_called_then_only_with_the_token(
    secure: SecureStack, name: str
) -> None:
    methods = methods_of(SERVICES[name])
    assert methods
    with closing(secure.channel(name)) as channel:
        for path, stream in methods:
            for header in (None, WRONG, TOKEN, f"Basic {TOKEN}"):
                code = code_of(channel, path, stream, header)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (path, header)
            code = code_of(channel, path, stream, RIGHT)
            refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
            assert code not in refused, path
        assert code_of(channel, HEALTH, False, None) is grpc.StatusCode.OK
        assert reflected(channel, None) is grpc.StatusCode.UNAUTHENTICATED
        assert methods[0][0].split("/")[1] in str(reflected(channel, RIGHT))


def reflected(channel: grpc.Channel, header: str | None) -> Any:
    """The services that a server tells of, or how it refuses."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = channel.stream_stream(REFLECTION)(
        iter([request.SerializeToString()]),
        metadata=[("authorization", header)] if header else None,
        timeout=5,
    )
    try:
        return reflection_pb2.ServerReflectionResponse.FromString(next(call))
    except grpc.RpcError as error:
        return error.code()


def gateway_routes() -> list[tuple[str, str]]:
    from areal_gateway.app import build_app
    from areal_gateway.config import GatewayConfig
    from areal_gateway.login import Sessions
    from areal_gateway.metrics import GatewayMetrics
    from areal_gateway.status import RunStatus

    app = build_app(
        RunStatus({}, history=1, max_rows=1),
        None,
        None,
        GatewayMetrics(CollectorRegistry()),
        Waits(),
        GatewayConfig(),
        Sessions(Security(token=TOKEN), "secure/t0"),
    )
    return routes_of(app.routes)


def inference_routes() -> list[tuple[str, str]]:
    from types import SimpleNamespace
    from typing import cast

    from areal_inference.frontend import Frontend
    from areal_inference.http_api.app import build_app

    # The routes are made before anything of the service is used.
    service = SimpleNamespace(
        config=SimpleNamespace(command_timeout_s=1.0, enable_lora=True),
        model=None,
        encode=lambda: None,
        decode=lambda: None,
    )
    return routes_of(build_app(cast("Frontend", service), Security()).routes)


def routes_of(routes: Any) -> list[tuple[str, str]]:
    """(method, path) of each route of an application."""
    found = [
        (method, route.path.replace("{task_id}", "one"))
        for route in routes
        for method in getattr(route, "methods", None) or ()
    ]
    assert len(found) > 10
    return found


async def ask(http: aiohttp.ClientSession, method: str, url: str, header: str | None) -> int:
    """The status of an answer; an event stream: of its beginning."""
    headers = {"Authorization": header} if header else {}
    async with http.request(method, url, headers=headers, json={}, allow_redirects=False) as reply:
        if reply.status == 401:
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        return reply.status


@pytest.mark.parametrize(
    ("name", "routes", "open_to_all"),
    [
        ("gateway", gateway_routes, {"/healthz", "/login"}),
        ("inference-0", inference_routes, {"/health", "/ready"}),
    ],
)
async def test_http_when_any_route_is_asked_then_only_with_the_token(
    secure: SecureStack, name: str, routes: Any, open_to_all: set[str]
) -> None:
    url = f"http://{secure.stack.address(name)}"
    seen = set()
    async with aiohttp.ClientSession() as http:
        for method, path in [*routes(), ("GET", "/no-such-route")]:
            seen.add(path)
            for header in (None, WRONG):
                status = await ask(http, method, url + path, header)
                if path in open_to_all - {"/login"}:
                    assert status in (200, 405), path
                elif path.startswith("/sessions/"):  # asks for the session's own key
                    assert status in (401, 404), (method, path, header)
                else:  # the form is for everyone, and says 401 to a wrong token by itself
                    assert status == 401 or path == "/login", (method, path, header)
            # No one would continue, or bring the weights back.
            if path not in ("/pause_generation", "/release_memory_occupation"):
                assert await ask(http, method, url + path, RIGHT) != 401 or path == "/login"
    assert open_to_all < seen


async def test_operations_when_asked_then_health_is_open_and_metrics_are_not(
    secure: SecureStack,
) -> None:
    async with aiohttp.ClientSession() as http:
        for name in ("buffer", "reward", "rollout-0", "weight-sync", "gateway"):
            url = f"http://{secure.stack.process(name)['metrics']}"
            assert await ask(http, "GET", f"{url}/healthz", None) == 200
            for path in ("/metrics", "/waits"):
                for header, expected in ((None, 401), (WRONG, 401), (RIGHT, 200)):
                    assert await ask(http, "GET", url + path, header) == expected, name


async def test_dashboard_when_opened_in_a_browser_then_a_form_takes_the_token_once(
    secure: SecureStack,
) -> None:
    url = f"http://{secure.stack.address('gateway')}"
    jar = aiohttp.CookieJar(unsafe=True)  # an address is no domain
    async with aiohttp.ClientSession(cookie_jar=jar) as browser:

        async def post(token: str) -> tuple[int, str]:
            async with browser.post(
                f"{url}/login", data={"token": token}, allow_redirects=False
            ) as reply:
                return reply.status, reply.headers.get("Set-Cookie", "") + await reply.text()

        async with browser.get(url) as reply:
            assert (reply.status, reply.content_type) == (401, "text/html")
            assert 'action="login"' in await reply.text()
        async with browser.get(f"{url}/static/style.css") as reply:
            assert reply.status == 200
        status, text = await post("incorrect")
        assert status == 401
        assert "Wrong token" in text
        assert not len(jar)
        status, text = await post(TOKEN)
        assert status == 303
        assert "HttpOnly" in text
        assert "SameSite=strict" in text
        assert TOKEN not in text
        async with browser.get(url) as reply:
            assert reply.status == 200
            assert "dashboard.js" in await reply.text()
        async with browser.get(f"{url}/v1/events") as reply:
            assert reply.status == 200
            assert (await reply.content.readline()) == b"event: history\n"
        # A session reads; it cannot act, whichever page asks the browser to.
        async with browser.post(f"{url}/v1/tasks", json={"tasks": []}) as reply:
            assert reply.status == 401


async def test_stores_when_asked_without_their_secrets_then_they_refuse(
    secure: SecureStack,
) -> None:
    host, port = secure.stack.address("redis").split(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(64).startswith(b"-NOAUTH")
    stranger = nats.NATS()
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await stranger.connect(
            secure.config.endpoints.nats, allow_reconnect=False, connect_timeout=5
        )
    await stranger.close()  # refused, its connection is open nevertheless
    # Both are used all the same: announcements flow.
    assert "announcements_unavailable" not in secure.stack.log("rollout-0")
    assert "nats" not in secure.stack.log("weight-sync")


async def test_weight_sync_when_its_token_is_refused_then_the_cause_says_so(
    secure: SecureStack,
) -> None:
    url = f"http://{secure.stack.address('inference-0')}"
    async with open_session({}) as session:
        with pytest.raises(EngineError, match=r"/model_info: HTTP 401: .*bearer token") as caught:
            await HttpEngine(url, session).weight_version()
        assert caught.value.fault is Fault.HTTP_STATUS
    async with open_session(secure.security.headers()) as session:
        assert await HttpEngine(url, session).weight_version() == "0"


def test_stores_when_killed_then_restarted_with_their_secrets_and_found_again(
    secure: SecureStack, tmp_path: Path
) -> None:
    names = ("redis", "nats")
    before = {name: secure.stack.process(name)["pid"] for name in names}
    for pid in before.values():
        psutil.Process(pid).kill()

    def back() -> bool:
        entries = [secure.stack.process(name) for name in names]
        return all(e["state"] == "up" and e["pid"] not in before.values() for e in entries)

    eventually(back, "both stores are up again", 60.0)
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "after", "prompt": "1+1=", "answer": "2"}\n')
    done = secure.areal("submit", str(file), "--wait", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_secrets_when_the_stack_has_worked_then_nowhere_but_in_private_files(
    secure: SecureStack,
) -> None:
    assert len(set(secure.secrets)) == 3
    folder = secure.stack.run_dir / "secrets"
    for file in [folder, *folder.iterdir(), secure.stack.run_dir / "config.yaml"]:
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0
    files = [file for file in secure.stack.run_dir.rglob("*") if file.is_file()]
    written = [file for file in files if file.parent != folder]
    names = {file.name for file in written}
    assert {"config.yaml", "stack.json", "redis.log", "nats.log", "gateway.log"} <= names
    for file in written:
        content = file.read_bytes()
        for secret in secure.secrets:
            assert secret.encode() not in content, file
    processes = [*secure.stack.processes(), psutil.Process(secure.stack.content["launcher"]["pid"])]
    assert len(processes) > 8
    deadline = time.monotonic() + 60
    for process in processes:
        assert time.monotonic() < deadline
        told = [*process.cmdline(), *process.environ().values()]
        for secret in secure.secrets:
            assert not any(secret in word for word in told), process
