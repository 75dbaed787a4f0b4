"""Ray: nodes of a cluster by a placement group, one actor for each life of a process there.

    areal run --on ray (the driver: launcher, stores, services)
        ├── bundle 0 ── actor ── inference-0
        ├── bundle 1 ── actor ── inference-1
        └── bundle 2 ── actor ── torchrun, ranks

An actor starts a process, waits for it and passes signals on; nothing else goes through Ray. When
the driver dies Ray ends the actors, and the kernel tells their processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from areal.addresses import everywhere, loopback
from areal.chassis.process import PROCESS_VARIABLE
from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig
from areal.errors import ArealError, CannotStart, WaitTimeout
from areal_launch.clusters.base import (
    Cluster,
    Placement,
    count_nodes,
    refuse_sharing,
    servers_on_gpus,
)
from areal_launch.gpus.visible import VARIABLE
from areal_launch.processes.descendants import STACK_VARIABLE
from areal_launch.processes.inherited import FOREIGN
from areal_launch.processes.process import (
    CHILD_ENVIRONMENT,
    Child,
    Life,
    Node,
    ProcessSpec,
    child_environment,
)

# Without GPUs processes share cores, as they do on one machine.
_SHARED_CPU = 0.1
CALL_TIMEOUT_S = 60.0
# Where this very `areal` is imported from, on every node.
_SOURCE = str(Path(__file__).resolve().parents[2])
# When its parent dies, a process gets SIGTERM, also after exec (prctl's PR_SET_PDEATHSIG).
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
)


def bundles_of(config: BaseExperimentConfig) -> list[dict[str, float]]:
    """Returns the placement group's bundles: one per inference server, then one per trainer node.

    Raises:
        ConfigError: The allocation does not fall into nodes.
    """
    refuse_sharing(config, "Ray")
    counts, allocation = count_nodes(config), parse_allocation(config.allocation_mode)
    servers = 0 if config.endpoints.inference else allocation.inference_replicas
    width = allocation.inference_gpus if servers_on_gpus(config) else 0
    widths = [width] * servers + [counts.ranks_per_node] * counts.trainer_nodes
    if not config.stack.gpus_per_node:
        return [{"CPU": _SHARED_CPU} for _ in widths]
    return [{"CPU": 1.0, **({"GPU": float(width)} if width else {})} for width in widths]


class RayCluster(Cluster):
    """A placement group of the cluster at RAY_ADDRESS, of the one that runs here, or of a new one.

    This process has to be on a node of that cluster.
    """

    def __init__(self) -> None:
        self._ray: Any = None
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []

    async def open(self, config: BaseExperimentConfig) -> Placement:
        """Connects and waits for the placement group, at most `rollout.setup_timeout_s`."""
        self._bundles = bundles_of(config)
        # In a thread: it blocks, and in the main thread Ray would take our signal handlers.
        return await asyncio.to_thread(self._open, config)

    def _open(self, config: BaseExperimentConfig) -> Placement:
        try:
            import ray
            from ray.util.placement_group import placement_group, placement_group_table
        except ImportError as error:
            raise CannotStart(
                f"--on ray: the package ray cannot be imported ({error}); "
                "pip install 'areal-services[ray]'"
            ) from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(namespace="areal", log_to_driver=False, configure_logging=False)
        except Exception as error:  # ray raises many classes
            raise ArealError(f"--on ray: {' '.join(str(error).split())[:300]}") from None
        self._ray = ray
        since = time.monotonic()
        self._group = placement_group(self._bundles, strategy="PACK")
        if not self._group.wait(config.setup_timeout_s):
            raise WaitTimeout(
                f"a placement group of {self._bundles}",
                on="Ray",
                since=since,
                hint=f"the cluster has {ray.cluster_resources()}",
            )
        placed = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        here = ray.get_runtime_context().get_node_id()
        alone = set(placed.values()) == {here}

        def node(bundle: int) -> Node:
            gpus = tuple(map(str, range(int(self._bundles[bundle].get("GPU", 0)))))
            return Node(str(bundle), loopback() if alone else addresses[placed[bundle]], gpus)

        servers = len(self._bundles) - count_nodes(config).trainer_nodes
        return Placement(
            control=loopback() if alone else addresses[here],
            bind=loopback() if alone else everywhere(),
            inference=tuple(node(bundle) for bundle in range(servers)),
            trainer=tuple(node(bundle) for bundle in range(servers, len(self._bundles))),
        )

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Life:
        """Starts an actor on each of the spec's bundles, or a child process if it has none."""
        if not spec.nodes:
            return await Child.start(spec, stack_id)
        actors = [self._actor(int(node.name)) for node in spec.nodes]
        return await RayLife.start(self._ray, actors, spec, stack_id)

    def _actor(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._bundles[bundle]
        return (
            self._ray.remote(_runner())
            .options(
                num_cpus=needs["CPU"],
                num_gpus=needs.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )

    async def close(self) -> None:
        """Releases the bundles; a cluster that we started ends."""
        if self._ray is None:
            return
        ray, self._ray = self._ray, None
        await asyncio.to_thread(self._close, ray)

    def _close(self, ray: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


@cache
def _runner() -> type:
    """The actor's class; made in a function so that Ray sends it along with its code."""

    class Runner:
        """One life of one process on one node."""

        def __init__(self) -> None:
            import threading

            self._started = threading.Event()
            self._ended = threading.Event()
            self._process: Any = None
            self._error = ""

        def start(
            self,
            argv: list[str],
            environment: dict[str, str],
            log: str,
            folder: str,
            foreign: str,
        ) -> tuple[str, int]:
            """Returns its node and its pid; raises RuntimeError when it cannot be started."""
            import os
            import re
            import subprocess
            import threading

            import ray

            # The node's variables; another launcher may have started Ray there.
            known = {k: v for k, v in os.environ.items() if not re.fullmatch(foreign, k)}

            def run() -> None:
                try:
                    with open(log, "ab") as output:  # noqa: PTH123 - no areal needed here
                        self._process = subprocess.Popen(  # noqa: S603 - the stack's own
                            argv,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            env={**known, **environment},
                            cwd=folder,
                            start_new_session=True,
                        )
                except OSError as error:
                    self._error = str(error)
                self._started.set()
                if self._process is not None:
                    self._process.wait()
                self._ended.set()

            # The thread lasts as long as the process: to the kernel, it is the "parent".
            threading.Thread(target=run, daemon=True).start()
            self._started.wait()
            if self._error:
                raise RuntimeError(self._error)
            return ray.get_runtime_context().get_node_id(), int(self._process.pid)

        def wait(self) -> int:
            """The exit code, negative for a signal."""
            self._ended.wait()
            return int(self._process.returncode)

        def signal(self, signum: int) -> None:
            """Sends a signal to its process group; does nothing if it has ended."""
            import os

            try:
                os.killpg(self._process.pid, signum)
            except (ProcessLookupError, PermissionError):
                return

        def sweep(self, source: str, stack_id: str, name: str) -> None:
            """Kills what its process has left on this node."""
            import sys

            if source not in sys.path:
                sys.path.insert(0, source)
            from areal_launch.processes.descendants import end_tagged

            self.signal(9)
            end_tagged(stack_id, name)

    return Runner


class RayLife:
    """One life of a process on one or several nodes; the first that fails ends the others."""

    def __init__(self, ray: Any, actors: list[Any], spec: ProcessSpec, stack_id: str) -> None:
        self._ray = ray
        self._actors = actors
        self._spec = spec
        self._stack_id = stack_id
        self._ended: asyncio.Task[int] | None = None
        self.pid = 0

    @classmethod
    async def start(cls, ray: Any, actors: list[Any], spec: ProcessSpec, stack_id: str) -> RayLife:
        """Starts it everywhere; OSError when that cannot be."""
        life = cls(ray, actors, spec, stack_id)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-c", _WITH_PARENT, *spec.argv]
        here = ray.get_runtime_context().get_node_id()
        environment = life._environment()
        try:
            starting = [
                actor.start.remote(
                    argv,
                    {**environment, "PET_NODE_RANK": str(rank)},
                    str(spec.log.resolve()),
                    str(Path.cwd()),
                    FOREIGN,
                )
                for rank, actor in enumerate(actors)
            ]
            started = await asyncio.wait_for(asyncio.gather(*starting), CALL_TIMEOUT_S)
        except Exception as error:  # whatever Ray raises, it does not run
            life._release()
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise OSError(f"Ray: {said[-1]}") from error
        node, pid = started[0]
        life.pid = pid if node == here else 0
        life._ended = asyncio.create_task(life._wait_all(), name=f"ray-{spec.name}")
        return life

    async def wait(self) -> int:
        """Returns the exit code: 0 if it is 0 on all nodes, else the first other one."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float | None = None) -> int:
        """Sends SIGTERM, then SIGKILL to it and all its descendants; returns the exit code."""
        grace_s = self._spec.stop_grace_s if grace_s is None else grace_s
        assert self._ended is not None
        if grace_s > 0 and not self._ended.done():
            await self._tell(signal.SIGTERM)
            await asyncio.wait({self._ended}, timeout=grace_s)
        await self.sweep()
        return await self.wait()

    async def sweep(self) -> None:
        """Kills what is left on every node and releases the actors."""
        calls = [a.sweep.remote(_SOURCE, self._stack_id, self._spec.name) for a in self._actors]
        await self._settle(calls)
        if self._ended is not None:
            await asyncio.wait({self._ended}, timeout=CALL_TIMEOUT_S)
        self._release()

    def _environment(self) -> dict[str, str]:
        """Returns the environment that a child gets in addition to the node's own."""
        whole = child_environment(self._stack_id, self._spec.name, {})
        keys = ("PYTHONPATH", *CHILD_ENVIRONMENT, STACK_VARIABLE, PROCESS_VARIABLE)
        own = {key: whole[key] for key in (*keys, "no_proxy", "NO_PROXY") if key in whole}
        # Which GPUs a bundle has is for Ray to say; a process without any sees none.
        given = {k: v for k, v in self._spec.environment.items() if k != VARIABLE or not v}
        return {**own, **given}

    async def _wait_all(self) -> int:
        waiting = {asyncio.ensure_future(self._wait_one(actor)) for actor in self._actors}
        code = 0
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                if each.result() and not code:
                    code = each.result()
                    if waiting:
                        await self._tell(signal.SIGTERM)
        return code

    async def _wait_one(self, actor: Any) -> int:
        try:
            return int(await actor.wait.remote())
        except self._ray.exceptions.RayError:
            return 1  # the node or the actor is gone, and the process with it

    async def _tell(self, signum: int) -> None:
        await self._settle([actor.signal.remote(signum) for actor in self._actors])

    async def _settle(self, calls: list[Any]) -> None:
        """Waits for calls to actors that may be gone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await asyncio.gather(*calls, return_exceptions=True)

    def _release(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
