"""What can be broken, how, and how one sees that it works again.

    deck of (victim, action) ──> break ─> kill: launcher (or owner) starts another ──┐
                                   └────> stop: SIGSTOP, seconds later SIGCONT ──────┴──> ready?

"Ready" is more than alive: a store answers, a service is healthy, an inference server serves the
current version, a trainer has finished another step.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
from tests.integration.stack_tools import RunningStack

from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError
from areal.weights.servers import ServerState
from areal_launch.processes.probes import Probe, http_probe, nats_probe, redis_probe

KILL, STOP = "kill -9", "stop"


@dataclass
class Fault:
    """One thing done to one process, and what came of it."""

    victim: str
    action: str
    at_s: float
    """Since the faults began."""
    stopped_s: float = 0.0
    """How long it was stopped."""
    ready_s: float | None = None
    """From the kill, or from SIGCONT, until it was ready; None: the run ended first."""
    pause_s: float | None = None
    """The longest time without a finished step, between then and its recovery."""
    late: bool = False
    """It was not ready, or training had not gone on, within the time allowed."""


class Victims:
    """The processes of a running stack."""

    def __init__(self, stack: RunningStack) -> None:
        self._stack = stack
        self._content: dict[str, Any] = {}
        self._http: aiohttp.ClientSession | None = None
        self._security = stack.security
        self._weight_sync = WeightSyncClient(stack.address("weight-sync"), self._security)

    async def close(self) -> None:
        await self._weight_sync.close()
        if self._http is not None:
            await self._http.close()

    # -- who there is ----------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """Name to pid of all that are up; trainer ranks and reward workers have names too."""
        content = self._stack.content
        found = {
            name: entry["pid"]
            for name, entry in content["processes"].items()
            if entry["state"] == "up" and entry["pid"]
        }
        found["guard"] = content["guard"]["pid"]
        if "reward" in found:
            found |= _children(found["reward"], "areal_reward.worker", "reward-worker")
        if "trainer" in found and (ranks := _children(found["trainer"], "areal_trainer", "rank")):
            found["torchrun"] = found.pop("trainer")
            found |= ranks
        return {name: pid for name, pid in found.items() if pid and psutil.pid_exists(pid)}

    def ended(self) -> bool:
        """The launcher is stopping, or has stopped."""
        return self._stack.state() != "ready"

    def stepped_at(self) -> float:
        """Unix time at which the trainer last finished a step; 0 before the first."""
        file = self._stack.run_dir / "metrics.jsonl"
        try:
            return float(json.loads(file.read_bytes().splitlines()[-1])["time"])
        except (OSError, IndexError, ValueError, KeyError):
            return 0.0  # none yet, or being written

    # -- is it well ------------------------------------------------------------------------------

    async def ready(self, name: str, gone: int, released: float) -> bool:
        """Whether it is ready now.

        Args:
            name: As `pids` calls it.
            gone: The pid that was killed; 0: it was stopped only.
            released: Unix time of the kill, or of SIGCONT.
        """
        pid = self.pids().get(name, 0)
        if name in ("trainer", "torchrun") or name.startswith("rank"):
            # A rank may end its step after torchrun, or another rank, was killed: that is not it.
            life = float(self._stack.process("trainer")["spawned"]) if gone else released
            return life >= released and self.stepped_at() > life
        if pid in (0, gone):
            return False
        if name == "guard" or name.startswith("reward-worker"):
            return True
        if await self._probe(name)():
            return False
        return not name.startswith("inference") or await self._serves(self._stack.address(name))

    def _probe(self, name: str) -> Probe:
        host, _, port = self._stack.address(name).rpartition(":")
        if name == "redis":
            return redis_probe(host, int(port), self._security.redis_password)
        if name == "nats":
            return nats_probe(host, int(port))
        if name.startswith("inference"):
            return http_probe(host, int(port), "/health")
        metrics = str(self._stack.process(name)["metrics"])
        return http_probe(host, int(metrics.rpartition(":")[2]), "/healthz")

    async def _serves(self, address: str) -> bool:
        """weight-sync says SERVING, or that it sleeps, and the server itself says the same."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=2.0), headers=self._security.headers()
            )
        try:
            servers, current = await self._weight_sync.list_servers()
            async with self._http.get(f"http://{address}/model_info") as reply:
                says = str((await reply.json())["weight_version"])
        except (ArealError, aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            return False
        return any(
            server.server_id == address
            and server.cause.startswith("asleep")
            and says.startswith("asleep")
            for server in servers
        ) or any(
            server.server_id == address
            and server.state is ServerState.SERVING
            and server.version >= current - 1
            and says.isdigit()
            and int(says) >= current - 1
            for server in servers
        )


def _children(pid: int, program: str, name: str) -> dict[str, int]:
    """Living children that run `program`, as name-0, name-1, …"""
    found: dict[str, int] = {}
    try:
        for child in psutil.Process(pid).children():
            if child.status() != psutil.STATUS_ZOMBIE and program in " ".join(child.cmdline()):
                found[f"{name}-{len(found)}"] = child.pid
    except psutil.Error:
        return {}
    return found


def send(pid: int, signum: signal.Signals) -> bool:
    """False when there is no such process any more."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True
