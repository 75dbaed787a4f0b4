"""More or fewer inference servers while the stack runs.

    grow:   start ──> up ──> register ──> SERVING at the current version
    shrink: drain (no new requests; running ones aborted with their tokens, and on elsewhere)
            ──> forgotten ──> SIGTERM

| step      | consumes     | waits for                 | unblocked by                          |
|-----------|--------------|---------------------------|---------------------------------------|
| start     | CPU, memory  | its probe                 | it answers, rollout.setup_timeout_s   |
| register  | an update    | weight-sync               | SERVING, rollout.setup_timeout_s      |
| drain     | its requests | weight-sync               | forgotten, 30 s                       |
| stop      | nothing      | its exit                  | exit, SIGKILL after its grace         |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError, InvalidInput, NotFound, WaitTimeout
from areal.weights.servers import InferenceServer, ServerState
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import Supervisor
from areal_launch.stack.control_socket import Say
from areal_launch.stack.plan import StackPlan

# Every rollout worker hears within it that the server takes no new requests.
DRAIN_S = 1.0
_FORGOTTEN_WITHIN_S = 30.0
MAX_SERVERS = 256


class Scaler:
    """Changes how many of `plan.inference` there are."""

    def __init__(self, plan: StackPlan, supervisor: Supervisor, client: WeightSyncClient) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._client = client

    async def scale(self, count: int, say: Say) -> str:
        """Starts or drains servers until there are `count`; returns a summary.

        Raises:
            InvalidInput: There must be at least one, and they must be ours.
            ArealError: A server did not start or was not released; the others are as requested.
        """
        plan = self._plan
        if not plan.inference:
            raise InvalidInput(
                "inference: this stack started no servers; it uses those in endpoints.inference"
            )
        if not 1 <= count <= MAX_SERVERS:
            raise InvalidInput(f"inference={count}: expected 1 to {MAX_SERVERS}")
        if plan.capacity is not None and count > plan.capacity:
            raise InvalidInput(
                f"inference={count}: expected at most {plan.capacity}, for which the stack has GPUs"
            )
        before = len(plan.inference)
        began = time.monotonic()
        newcomers = [plan.add_inference() for _ in range(count - before)]
        leavers = plan.inference[count:]
        results = await asyncio.gather(
            *(self._bring(spec, say) for spec in newcomers),
            *(self._release(spec, say) for spec in leavers),
            return_exceptions=True,
        )
        failures = [error for error in results if isinstance(error, BaseException)]
        if failures:
            raise failures[0]
        return f"{before} -> {count} inference servers in {time.monotonic() - began:.1f} s"

    async def _bring(self, spec: ProcessSpec, say: Say) -> None:
        deadline = time.monotonic() + self._plan.config.setup_timeout_s
        try:
            # Not vital before it serves: a new server that cannot start must not end the run.
            self._supervisor.start(spec, vital=False)
            say(f"{spec.name} is starting at {spec.url}")
            await self.admit(spec, deadline)
            self._supervisor.processes[spec.name].vital = True
            say(f"{spec.name} is serving")
        except ArealError:
            await self._remove(spec)
            raise

    async def admit(self, spec: ProcessSpec, deadline: float) -> None:
        """Registers a server once it is up; returns when it serves the current version.

        Args:
            spec: Description of a server that was started.
            deadline: On the clock of `time.monotonic`.

        Raises:
            StackFailure: The server failed too often.
            WaitTimeout: Names the server and what weight-sync says of it.
        """
        await self._supervisor.processes[spec.name].wait_up(deadline - time.monotonic())
        await self._client.register_server(spec.url)
        left = max(1.0, deadline - time.monotonic())
        await self._until(spec.url, f"{spec.name} to reach the current version", left, _serves)

    async def _release(self, spec: ProcessSpec, say: Say) -> None:
        say(f"{spec.name} is draining")
        try:
            await self._client.drain_server(spec.url, deadline=DRAIN_S)
            gone = f"{spec.name} to drain"
            await self._until(spec.url, gone, _FORGOTTEN_WITHIN_S, lambda server: server is None)
        except NotFound:
            pass  # weight-sync has never heard of it
        await self._remove(spec)
        say(f"{spec.name} has stopped")

    async def _remove(self, spec: ProcessSpec) -> None:
        if (process := self._supervisor.processes.get(spec.name)) is not None:
            await process.stop()
            del self._supervisor.processes[spec.name]
        self._plan.inference.remove(spec)

    async def _until(
        self,
        url: str,
        what: str,
        timeout: float,
        condition: Callable[[InferenceServer | None], bool],
    ) -> None:
        """Waits for weight-sync to say so of a server."""
        since, server = time.monotonic(), None
        try:
            async with asyncio.timeout(timeout), aclosing(self._client.watch()) as changes:
                async for status in changes:
                    server = _find((await self._client.list_servers())[0], url)
                    current = server is None or server.version == status.current_version
                    if condition(server) and current:
                        return
        except TimeoutError:
            state = "not known to weight-sync"
            if server is not None:
                state = f"{server.state} at version {server.version} {server.cause}".strip()
            raise WaitTimeout(what, on="weight-sync", since=since, hint=state) from None


def _serves(server: InferenceServer | None) -> bool:
    return server is not None and server.state is ServerState.SERVING


def _find(servers: Sequence[InferenceServer], url: str) -> InferenceServer | None:
    return next((server for server in servers if server.url == url), None)
