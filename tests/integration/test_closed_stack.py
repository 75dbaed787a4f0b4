"""A stack that was started without any setting: who gets in, and who does not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.integration.stack_tools import RunningStack, areal, environment, running_stack

from areal.config.experiment import GRPOConfig, load_service_config

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
NOBODY = 65534
# As browsers send what a page may send unasked.
PAGE = {
    "Origin": "https://evil.example",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Content-Type": "text/plain",
}
BY_TOKEN = ("put_recipe", "submit_tasks", "score", "list_servers")
BY_HTTP = ("read_the_status", "read_waits", "pause_generation", "read_weights")
BY_MODE = {
    "read_config": "config.yaml",
    "read_the_stack": "stack.json",
    "read_token": "secrets/token",
    "list_secrets": "secrets",
}
TASK = {"data": {"prompt": "1+1=", "answer": "2"}}


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[RunningStack]:
    # Not below pytest's own folder, which keeps other users out by itself.
    folder = Path(tempfile.mkdtemp(prefix="areal-closed-"))
    folder.chmod(0o755)
    overrides = (f"model.path={tiny_model}", "model.context_length=128")
    try:
        with running_stack(folder, "closed", *overrides, "gconfig.max_new_tokens=4") as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def config(stack: RunningStack) -> GRPOConfig:
    return load_service_config(stack.run_dir / "config.yaml")


def token_of(stack: RunningStack) -> str:
    """As its owner asks for it."""
    printed = areal("token", "--run", str(stack.run_dir), cwd=stack.run_dir)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.strip()


def test_another_user_when_trying_everything_then_nothing_lets_them_in(
    stack: RunningStack, config: GRPOConfig, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("takes root, to become another user")
    mark = stack.run_dir / "written-by-a-stranger"
    store = config.endpoints.weight_store.removeprefix("http://")
    tried = subprocess.run(
        [
            *(sys.executable, "-m", "tests.integration.stranger"),
            *(str(NOBODY), str(stack.run_dir), store, str(mark)),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    refused = dict.fromkeys(BY_TOKEN, "refused: no token")
    refused |= dict.fromkeys(BY_HTTP, "refused: HTTP 401")
    refused |= {name: f"refused: {stack.run_dir / file}" for name, file in BY_MODE.items()}
    pid = stack.process("buffer")["pid"]
    refused |= {
        "read_an_environment": f"refused: /proc/{pid}/environ",
        "command_the_launcher": "refused: control.sock",
        "ask_redis": "refused: -NOAUTH",
        "ask_nats": "refused: Authorization Violation",
    }
    outcomes = json.loads(tried.stdout)
    assert "Permission denied" in outcomes.pop("ask_the_command_for_the_token")
    assert outcomes == refused
    assert not mark.exists(), "code of a stranger ran as the stack's owner"


async def ask(method: str, url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, f"http://{url}", data=data, headers=headers) as reply,
    ):
        return reply.status, await reply.text()


async def is_paused(stack: RunningStack) -> bool:
    authorization = stack.security.headers()
    url = f"{stack.address('inference-0')}/generate"
    request = {"input_ids": [2, 3], "sampling_params": {"max_new_tokens": 1}}
    status, text = await ask(
        "POST", url, request, **authorization, **{"Content-Type": "application/json"}
    )
    return status != 200 or "output_ids" not in text


async def test_foreign_page_when_it_posts_what_browsers_let_it_then_nothing_is_done(
    stack: RunningStack,
) -> None:
    inference, gateway = stack.address("inference-0"), stack.address("gateway")
    for path in ("pause_generation", "abort_request", "update_weight_version", "generate"):
        status, _ = await ask("POST", f"{inference}/{path}", {"abort_all": True}, **PAGE)
        assert status == 401, path
    assert not await is_paused(stack)
    for path in ("v1/tasks", "v1/tasks/cancel"):
        status, _ = await ask("POST", f"{gateway}/{path}", {"tasks": [TASK]}, **PAGE)
        assert status == 401, path


async def test_foreign_page_when_its_reader_has_logged_in_then_it_cannot_act_either(
    stack: RunningStack,
) -> None:
    gateway = stack.address("gateway")
    jar = aiohttp.CookieJar(unsafe=True)  # an address is no domain
    async with aiohttp.ClientSession(f"http://{gateway}", cookie_jar=jar) as browser:
        async with browser.post("/login", data={"token": token_of(stack)}) as reply:
            assert reply.status == 200, "the owner sees the dashboard"
            assert "dashboard.js" in await reply.text()
        async with browser.get("/v1/status") as reply:
            assert reply.status == 200
        # Worse than a browser: the cookie is sent although it is SameSite=strict.
        for headers in (PAGE, {"Content-Type": "application/json"}):
            body = json.dumps({"tasks": [TASK]})
            async with browser.post("/v1/tasks", data=body, headers=headers) as reply:
                assert reply.status == 401


async def test_rebound_name_when_it_resolves_to_us_then_it_reads_nothing(
    stack: RunningStack, config: GRPOConfig
) -> None:
    named = {"Host": "evil.example:8080", "Sec-Fetch-Site": "same-origin"}
    store = config.endpoints.weight_store.removeprefix("http://")
    for url in (
        f"{stack.address('gateway')}/v1/status",
        f"{stack.address('gateway')}/v1/events",
        f"{stack.address('inference-0')}/get_model_info",
        f"{stack.process('buffer')['metrics']}/waits",
        f"{stack.process('rollout-0')['metrics']}/metrics",
        f"{store}/versions/v00000000-inc0",
    ):
        assert (await ask("GET", url, **named))[0] == 401, url
    tasks = {**named, "Content-Type": "application/json"}
    url = f"{stack.address('gateway')}/v1/tasks"
    assert (await ask("POST", url, {"tasks": [TASK]}, **tasks))[0] == 401


async def test_owner_when_using_the_commands_then_they_find_the_token_by_themselves(
    stack: RunningStack, tmp_path: Path
) -> None:
    run = ("--run", str(stack.run_dir))
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"task_id": "mine", **TASK["data"]}) + "\n")
    submitted = areal("submit", str(file), "--wait", "--json", *run, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert json.loads(submitted.stdout.splitlines()[-1])["counts"] == {"delivered": 1}
    status = areal("status", "--json", *run, cwd=tmp_path)
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["problems"] == {}
    for command in (("versions", "list"), ("dead-letters", "list"), ("scale", "inference=1")):
        done = areal(*command, *run, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    headers = {"Authorization": f"Bearer {token_of(stack)}"}
    assert (await ask("GET", f"{stack.address('gateway')}/v1/status", **headers))[0] == 200


def test_secrets_when_looked_for_then_in_no_argument_environment_or_log(
    stack: RunningStack, config: GRPOConfig
) -> None:
    security = stack.security
    secrets = (security.token, security.redis_password, security.nats_token)
    assert all(secrets)
    said = {file: file.read_text() for file in (stack.run_dir / "logs").iterdir()}
    said |= {file: (stack.run_dir / file).read_text() for file in ("stack.json", "config.yaml")}
    for process in stack.processes():
        said[f"arguments of {process.pid}"] = " ".join(process.cmdline())
        with contextlib.suppress(psutil.AccessDenied):  # a service's: not even its owner may
            said[f"environment of {process.pid}"] = str(process.environ())
    assert not [name for name, text in said.items() if any(each in text for each in secrets)]
