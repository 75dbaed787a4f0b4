"""The whole stack as processes of this machine, and of the nodes that its cluster lends.

    lock, guard -> prepare model -> redis, nats --> buffer, weight-sync --> reward, rollout, gateway
                                |                             |                       |
                                |                             +--> trainer            v
                                +--> inference servers --> registered, SERVING --> ready

| state    | consumes        | waits for                         | unblocked by                   |
|----------|-----------------|-----------------------------------|--------------------------------|
| starting | ports, CPU      | each process up, servers SERVING  | probes; rollout.setup_timeout_s|
| ready    | what it runs    | the trainer's end, or a failure   | exit 0, or a process given up  |
|          |                 | commands (`control_socket.py`)    | `areal scale`                  |
| stopping | its grace time  | each stage's processes            | their exit, or SIGKILL         |
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal.clients.weight_sync import WeightSyncClient
from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig, save_config
from areal.errors import CannotStart, InvalidInput, NotFound, WaitTimeout
from areal.security import Security
from areal_launch.clusters.base import Cluster
from areal_launch.gpus.visible import hidden_unless
from areal_launch.processes.log_tail import LogTail, humanize
from areal_launch.processes.orphan_guard import Guard
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import RestartPolicy, Supervised, Supervisor
from areal_launch.run_folder import RunFolder, remove_secrets
from areal_launch.stack.control_socket import ControlSocket, Say
from areal_launch.stack.events import EventLog, StackEvent
from areal_launch.stack.plan import StackPlan, missing_model, plan_stack, ports_of
from areal_launch.stack.recipe_check import refuse_failing
from areal_launch.stack.scaling import Scaler

PREPARE_TIMEOUT_S = 1800.0
FETCH_TIMEOUT_S = 6 * 3600.0


class StackState(StrEnum):
    """The state of the whole stack."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class LocalStack:
    """Starts, supervises and ends one run's processes.

    Example:
        stack = LocalStack(config, events, with_trainer=True)
        await stack.open()
        try:
            await stack.start()
            await stack.wait()
        finally:
            await stack.stop()
    """

    interrupt_hint = "Ctrl-C stops everything"

    def __init__(
        self,
        config: BaseExperimentConfig,
        events: EventLog,
        *,
        with_trainer: bool,
        only_evaluate: bool = False,
        cluster: Cluster | None = None,
        first_port: int | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: Valid; endpoints that are set are used, the others are started.
            events: Is told what happens.
            with_trainer: Whether a trainer is part of it.
            only_evaluate: Whether the trainer's recipe ends at its first batch.
            cluster: Lends the nodes; None: this machine.
            first_port: Inference servers alone are started, from this port on.
        """
        self._cluster = cluster or Cluster()
        self.folder = RunFolder(config.run_dir)
        self.config = config
        self.state = StackState.STOPPED
        self.stack_id = f"{config.namespace}:{uuid.uuid4().hex}"
        self.plan = StackPlan(config)
        self.cause = ""
        """Why the stack failed, for stack.json."""
        self.started = time.time()
        self.killed: list[float] = []
        """See `RunFolder.killed`; for stack.json and the summary."""
        self.ready_seconds: float | None = None
        """Seconds from the start of the first process to serving; the creation of a model does not
        count."""
        self.supervisor = Supervisor(
            self.stack_id,
            RestartPolicy(config.stack.max_restarts, config.setup_timeout_s),
            events.report,
            self._cluster.spawn,
        )
        self.events = events
        self.with_trainer = with_trainer
        self._only_evaluate = only_evaluate
        self._first_port = first_port
        self._lock: int | None = None
        self._guard: Guard | None = None
        self._control = ControlSocket(self.folder.control_file, self._obey)
        events.listen(self._on_event)

    async def open(self) -> None:
        """Takes the run folder, starts the guard, fills in the endpoints; starts no service.

        Raises:
            CannotStart: The run is held by another launcher, or a program is missing.
        """
        elsewhere = self.config.endpoints.gateway
        self._lock = self.folder.lock()
        self.started, self.killed = time.time(), self.folder.killed()
        try:
            self.plan = plan_stack(
                self.config,
                self.folder,
                with_trainer=self.with_trainer,
                only_evaluate=self._only_evaluate,
                servers_only=self._first_port is not None,
                preferred_ports=self._preferred_ports(),
                placement=await self._cluster.open(self.config),
            )
            self.config = self.plan.config
            self._save_config()
            self._write_stack()  # the guard reads it
            self._guard = Guard(
                self.folder.stack_file, self.stack_id, self._lock, self.events.report
            )
            await self._guard.start()
        except BaseException:
            remove_secrets(self.folder)
            await self._cluster.close()
            os.close(self._lock)
            self._lock = None
            raise
        self._set(StackState.STARTING)
        if elsewhere:
            self.events.report(
                "info",
                "gateway",
                f"endpoints.gateway is set: the dashboard is {elsewhere}, and none is started here "
                "(to start one on a port of your choice, set stack.gateway_port instead)",
            )

    async def start(self, *, prepare: bool = False, source: str = "") -> None:
        """Returns when the stack is ready.

        Args:
            prepare: Make the model first: by the recipe's `prepare_model`, or from `source`.
            source: Address to fetch it from.

        Raises:
            CannotStart: There is no model.
            StackFailure | WaitTimeout: Names the process, its log and its last lines.
        """
        if prepare:
            await self._prepare_model(source)
            if self.with_trainer:
                await refuse_failing(self.config, model_later="")
        if self.plan.inference and (why := missing_model(self.config)):
            raise CannotStart(why)
        began = time.monotonic()
        await self._start_all(began + self.config.setup_timeout_s)
        self.ready_seconds = round(time.monotonic() - began, 2)
        self.events.report("info", "stack", f"ready after {self.ready_seconds:.1f} s")
        self._set(StackState.READY)
        await self._control.open()

    async def _obey(self, request: dict[str, Any], say: Say) -> str:
        wanted = request.get("scale")
        if not isinstance(wanted, dict) or not isinstance(wanted.get("inference"), int):
            raise InvalidInput('request: expected {"scale": {"inference": COUNT}}')

        def tell(text: str) -> None:
            self.events.report("info", "scale", text)
            say(text)

        client = WeightSyncClient(
            self.config.endpoints.weight_sync, Security.load(self.config.security)
        )
        try:
            scaler = Scaler(self.plan, self.supervisor, client)
            return await scaler.scale(wanted["inference"], tell)
        finally:
            await client.close()
            self._update_stack()

    async def wait(self) -> None:
        """Returns when the trainer has finished; without one, never.

        Raises:
            StackFailure: A process was given up.
        """
        trainer = self.supervisor.processes.get("trainer")
        forever: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = trainer.ended if trainer is not None else forever
        await self.supervisor.or_failure(asyncio.shield(waiting))

    async def stop(self, *, grace_s: float | None = None, failed: bool = False) -> None:
        """Ends everything, stage by stage; idempotent.

        Args:
            grace_s: Seconds between SIGTERM and SIGKILL; None: each process's own.
            failed: Written into stack.json.
        """
        if self._lock is None:
            return
        self._set(StackState.STOPPING)
        await self._control.close()
        await self.supervisor.stop(self.plan.stop_order(), grace_s)
        if self._guard is not None:
            await self._guard.stop()
        await self._cluster.close()
        if not self.folder.replaced(self._lock):
            remove_secrets(self.folder)
        self._set(StackState.FAILED if failed else StackState.STOPPED)
        os.close(self._lock)
        self._lock = None

    @property
    def processes(self) -> Mapping[str, Supervised]:
        return self.supervisor.processes

    def pids(self) -> dict[str, int]:
        """Returns the pids of running processes, by name."""
        return {n: p.pid for n, p in self.supervisor.processes.items() if p.pid}

    def leaders(self) -> dict[int, float]:
        """Returns their pids and start times, as `descendants.end_tagged` takes them."""
        return {p.pid: p.spawned for p in self.supervisor.processes.values() if p.pid}

    async def _start_all(self, deadline: float) -> None:
        supervisor, plan = self.supervisor, self.plan
        # Importing torch takes longest: those go first, and overlap with everything else.
        supervisor.start(*plan.inference)
        if self._first_port is not None:
            names = [spec.name for spec in plan.inference]
            await supervisor.wait_up(names, deadline - time.monotonic())
            return
        supervisor.start(*plan.stores)
        await supervisor.wait_up([s.name for s in plan.stores], deadline - time.monotonic())
        supervisor.start(*plan.services)
        first = [s.name for s in plan.services if s.name in ("buffer", "weight-sync")]
        await supervisor.wait_up(first, deadline - time.monotonic())
        # On the same GPU, a server takes its part of what is free when it starts.
        first_servers = parse_allocation(self.config.allocation_mode).sharing.together
        if first_servers:
            await supervisor.or_failure(self._bring_servers_in(deadline))
        if plan.trainer is not None:
            supervisor.start(plan.trainer)
        others = [s.name for s in plan.services if s.name not in first]
        await supervisor.or_failure(
            asyncio.gather(
                supervisor.wait_up(others, deadline - time.monotonic()),
                *(() if first_servers else (self._bring_servers_in(deadline),)),
            )
        )

    async def _bring_servers_in(self, deadline: float) -> None:
        """Registers our inference servers as they come up; waits until all serve."""
        servers = self.plan.inference
        if not servers:
            return
        client = WeightSyncClient(
            self.config.endpoints.weight_sync, Security.load(self.config.security), retry_s=30.0
        )
        try:
            # Servers of an earlier run of this trial are in Redis still, on ports now gone.
            for server in (await client.list_servers())[0]:
                if server.url not in {spec.url for spec in servers}:
                    await client.drain_server(server.server_id, deadline=0.0)
            scaler = Scaler(self.plan, self.supervisor, client)
            await asyncio.gather(*(scaler.admit(spec, deadline) for spec in servers))
        finally:
            await client.close()

    async def _prepare_model(self, source: str) -> None:
        """Runs the recipe's `prepare_model`, which imports torch, or a fetch: in a process."""
        model, patience = self.config.model.path, FETCH_TIMEOUT_S if source else PREPARE_TIMEOUT_S
        module = "areal_trainer.bring_model" if source else "areal_trainer.prepare"
        fetched = ("--model", model, "--source", source, "--deadline", str(patience - 10))
        spec = ProcessSpec(
            name="prepare",
            argv=(
                *(sys.executable, "-m", module, "--config", str(self.folder.config_file)),
                *(fetched if source else ()),
            ),
            log=self.folder.log_of("prepare"),
            job=True,
            environment=hidden_unless(self.config.stack.gpus_per_node),
        )
        self.events.report("info", "prepare", "preparing the model (version 0)")
        tail = LogTail(spec.log, from_end=True)
        self.supervisor.start(spec)
        process = self.supervisor.processes["prepare"]
        since = time.monotonic()
        done: set[asyncio.Future[int]] = set()
        while not done and time.monotonic() - since < patience:
            done, _ = await asyncio.wait({process.ended}, timeout=0.5)
            for line in tail.read():
                self.events.report("info", "prepare", humanize(line))
        if not done:
            raise WaitTimeout(
                source or "the recipe's prepare_model",
                on="prepare",
                since=since,
                hint=process.log_end(),
            )
        process.ended.result()
        del self.supervisor.processes["prepare"]

    def _preferred_ports(self) -> dict[str, int]:
        if self._first_port is not None:
            return {f"inference-{index}": self._first_port + index for index in range(64)}
        try:
            return ports_of(self.folder.read_stack())
        except NotFound:
            return {}

    def _save_config(self) -> None:
        # It may hold a store's password: no one else may read it, not even for a moment.
        self.folder.config_file.touch(mode=0o600)
        self.folder.config_file.chmod(0o600)
        save_config(self.config, self.folder.config_file)

    def _set(self, state: StackState) -> None:
        self.state = state
        self._update_stack()

    def _on_event(self, event: StackEvent) -> None:
        if event.level == "state" and self._lock is not None:
            self._update_stack()

    def _update_stack(self) -> None:
        # A full disk, or a folder that was deleted, must not keep us from ending the processes.
        # It is written again at the next change.
        try:
            self._write_stack()
        except OSError as error:
            self.events.report("warning", "stack", f"stack.json could not be updated: {error}")

    def _write_stack(self) -> None:
        if self._lock is not None and self.folder.replaced(self._lock):
            raise FileExistsError("the run folder was deleted, and is another run's now")
        self.folder.write_stack(
            {
                "stack_id": self.stack_id,
                "experiment": self.config.experiment_name,
                "trial": self.config.trial_name,
                "state": self.state.value,
                "cause": self.cause,
                "started": self.started,
                "killed": self.killed,
                "started_in": str(Path.cwd()),
                "ready_seconds": self.ready_seconds,
                "launcher": {
                    "pid": os.getpid(),
                    "log": str(self.folder.log_of("launcher")),
                    **self._cluster.describe(),
                },
                "guard": {"pid": self._guard.pid if self._guard else 0},
                "config": str(self.folder.config_file),
                "dashboard": self.config.endpoints.gateway,
                "processes": {
                    name: {
                        "pid": process.pid,
                        "spawned": process.spawned,
                        "state": process.state.value,
                        "address": process.spec.address,
                        "metrics": process.spec.metrics,
                        "log": str(process.spec.log),
                        "restarts": process.restarts,
                        "since": process.since,
                    }
                    for name, process in self.supervisor.processes.items()
                },
            }
        )
