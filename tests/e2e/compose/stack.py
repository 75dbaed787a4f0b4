"""A Compose project under test: commands, what the gateway says, how a service is killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port


class Project:
    """docker-compose.yaml of a checkout, with a name, ports and volumes of its own."""

    def __init__(self, checkout: Path, name: str, **variables: str) -> None:
        self.checkout, self.name = checkout, name
        ports = {"AREAL_HTTP_PORT": free_port(), "AREAL_GRPC_PORT": free_port()}
        self._environment = {
            **os.environ,
            **{key: str(value) for key, value in ports.items()},
            "COMPOSE_PROJECT_NAME": name,
            **variables,
        }
        self._url = f"http://127.0.0.1:{ports['AREAL_HTTP_PORT']}"
        self._token = ""

    def compose(self, *arguments: str, timeout: float = 900, check: bool = True) -> str:
        """`docker compose …`; its output, or an error that carries it."""
        done = subprocess.run(
            ["docker", "compose", "--ansi", "never", "--progress", "plain", *arguments],
            cwd=self.checkout,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(f"docker compose {' '.join(arguments)}:\n{done.stdout[-3000:]}")
        return done.stdout

    def ids(self, service: str) -> list[str]:
        """Its containers, stopped ones too, in the order of their numbers."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def state(self, container: str) -> dict[str, Any]:
        """What the engine says of one container."""
        text = docker("inspect", container)
        found = json.loads(text)[0]
        return {**found["State"], "RestartCount": found["RestartCount"]}

    def serving(self, service: str) -> bool:
        """All its containers run and are healthy."""
        states = [self.state(each) for each in self.ids(service)]
        return bool(states) and all(
            s["Running"] and s["Health"]["Status"] == "healthy" for s in states
        )

    # -- what the system says of itself ------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """/v1/status as one outside sees it; {} while the gateway is away."""
        if not self._token:
            self._token = self.compose("exec", "-T", "nats", "cat", "/secrets/token").strip()
        try:
            return self._get(self._token)
        except (OSError, ValueError):
            return {}

    def refused_without_token(self) -> bool:
        """No one gets in without the token."""
        try:
            self._get("")
        except urllib.error.HTTPError as error:
            return error.code == 401
        return False

    def _get(self, token: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(f"{self._url}/v1/status", headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def step(self) -> int:
        """Finished steps; -1 while it cannot be read."""
        return int((self.status().get("trainer") or {}).get("step", -1))

    def servers(self, state: str = "serving") -> int:
        """Inference servers in that state."""
        return sum(s["state"] == state for s in self.status().get("servers", []))

    # -- hurting -----------------------------------------------------------------------------------

    def crash(self, service: str) -> None:
        """SIGKILL from beside the engine: what an out-of-memory killer does."""
        pid = self.state(self.ids(service)[0])["Pid"]
        tag = self._environment.get("AREAL_TAG", "dev")
        kill = ["run", "--rm", "--pid", "host", "--user", "0", "--cap-drop", "ALL"]
        kill += ["--cap-add", "KILL", "--network", "none", "--entrypoint", "python3"]
        docker(*kill, f"areal/stores:{tag}", "-c", f"import os; os.kill({pid}, 9)")

    def kill(self, service: str) -> None:
        """`docker compose kill`: the engine takes it for a wish and leaves the service down."""
        self.compose("kill", "--signal", "SIGKILL", service)


def wait(what: str, ready: Callable[[], bool], timeout: float) -> float:
    """Seconds until `ready()`; an AssertionError names what did not come."""
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > timeout:
            raise AssertionError(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.5)
    return time.monotonic() - began


def docker(*arguments: str) -> str:
    """`docker …`; its output."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"docker {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout
