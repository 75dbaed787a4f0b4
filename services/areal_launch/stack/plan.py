"""Which processes a stack needs, where they listen, and how each is started. Starts nothing."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal.addresses import join_address
from areal.chassis.bad_input import VERDICT_VARIABLE
from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import BaseExperimentConfig
from areal.errors import ConfigError
from areal.model_directory import RouteShape, serving_dtype
from areal.security import Security
from areal.weights.served_adapters import AT_ONCE, served_adapters
from areal_launch.clusters.base import Placement
from areal_launch.gpus.engine import inference_command
from areal_launch.gpus.visible import VARIABLE
from areal_launch.processes.free_ports import PortPicker
from areal_launch.processes.probes import http_probe
from areal_launch.processes.process import Node, ProcessSpec
from areal_launch.run_folder import RunFolder
from areal_launch.stack.secret_files import place_secrets, sglang_config
from areal_launch.stack.stores import nats_spec, redis_spec

# Services that take part in gRPC: process name to module and to the key in `endpoints`.
_SERVICES = {
    "buffer": ("areal_buffer", "buffer"),
    "weight-sync": ("areal_weight_sync", "weight_sync"),
    "reward": ("areal_reward", "reward"),
    "sandbox": ("areal_sandbox", "sandbox"),
}

_MEMORY = "mem-fraction-static"
"""SGLang's flag for the part of a GPU's free memory that weights and cache take."""
_ROUTES = "enable-return-routed-experts"


@dataclass
class StackPlan:
    """What to start, in stages.

    `config` has every endpoint filled in, except `endpoints.inference`: the servers we start are
    registered with weight-sync once they are up.
    """

    config: BaseExperimentConfig
    stores: list[ProcessSpec] = field(default_factory=list)
    inference: list[ProcessSpec] = field(default_factory=list)
    services: list[ProcessSpec] = field(default_factory=list)
    trainer: ProcessSpec | None = None
    make_inference: Callable[[int], ProcessSpec] | None = None
    """Describes the process of a server by its index; None if we start none."""
    ports: PortPicker | None = None
    """Keeps the promised ports reserved as long as the plan exists."""
    capacity: int | None = None
    """Number of servers that the nodes have GPUs for; None: it does not depend on GPUs."""

    def add_inference(self) -> ProcessSpec:
        """Adds a server, with the lowest free name, on a port of its own."""
        assert self.make_inference is not None, "this stack starts no inference servers"
        taken = {spec.name for spec in self.inference}
        free = next(index for index in itertools.count() if f"inference-{index}" not in taken)
        self.inference.append(self.make_inference(free))
        return self.inference[-1]

    def stop_order(self) -> list[list[str]]:
        """Stages of process names: who calls goes before who is called."""
        rollout = [s.name for s in self.services if s.name.startswith("rollout")]
        backends = [s.name for s in self.services if s.name in _SERVICES]
        return [
            ["trainer"],
            [*rollout, "gateway"],
            [s.name for s in self.inference],
            backends,
            [s.name for s in self.stores],
        ]


def plan_stack(
    config: BaseExperimentConfig,
    folder: RunFolder,
    *,
    with_trainer: bool,
    only_evaluate: bool = False,
    servers_only: bool = False,
    preferred_ports: Mapping[str, int] | None = None,
    placement: Placement | None = None,
) -> StackPlan:
    """Plans everything whose endpoint is empty.

    Args:
        config: Resolved and valid; a copy of it gets the endpoints.
        folder: The run folder.
        with_trainer: False: `areal up`.
        only_evaluate: The trainer's recipe ends at its first batch: `areal eval`.
        servers_only: Start only inference servers: `areal serve`.
        preferred_ports: Ports of an earlier run of this trial, by process name.
        placement: Where things run; None: on this machine.

    Raises:
        ConfigError: A store's program is missing, or a secret's file, or `stack.inference_command`
            is no command.
        CannotStart: Servers have GPUs, and SGLang is not installed.
    """
    config, placement = copy.deepcopy(config), placement or Placement()
    picker = PortPicker(preferred_ports)
    planner = _Planner(config, folder, picker, placement)
    plan = StackPlan(config, ports=picker)
    security = place_secrets(config, folder)
    if servers_only:
        _plan_servers(plan, planner)
        return plan
    if not config.offline:
        _plan_services(plan, planner, security)
    elif not with_trainer:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: has no servers: expected e.g. "
            "'sglang:d1+fsdp:d1' for a stack without a trainer"
        )
    if not config.endpoints.trainer:
        config.endpoints.trainer = join_address(
            placement.trainer[0].address, picker.pick("trainer")
        )
    if with_trainer:
        plan.trainer = planner.trainer(only_evaluate=only_evaluate)
    return plan


def _plan_servers(plan: StackPlan, planner: _Planner) -> None:
    """The inference servers of `allocation_mode`."""
    config = plan.config
    count = parse_allocation(config.allocation_mode).inference_replicas
    plan.make_inference = planner.inference
    plan.capacity = count if config.stack.gpus_per_node else None
    for _ in range(count):
        plan.add_inference()


def _plan_services(plan: StackPlan, planner: _Planner, security: Security) -> None:
    """Plans every process except the trainer."""
    config, endpoints = plan.config, plan.config.endpoints
    folder, picker, placement = planner.folder, planner.picker, planner.placement
    if not endpoints.redis:
        password = security.redis_password
        plan.stores.append(redis_spec(folder, picker.pick("redis"), password, placement))
        endpoints.redis = f"redis://{plan.stores[-1].address}/0"
    if not endpoints.nats:
        plan.stores.append(nats_spec(folder, picker.pick("nats"), security.nats_token, placement))
        endpoints.nats = f"nats://{plan.stores[-1].address}"
    if not endpoints.inference:
        _plan_servers(plan, planner)
    endpoints.weight_store = endpoints.weight_store or planner.weight_store()
    for name, (module, key) in _SERVICES.items():
        wanted = config.sandbox.boxes > 0 if name == "sandbox" else True
        if wanted and not getattr(endpoints, key):
            plan.services.append(planner.service(name, module))
            setattr(endpoints, key, plan.services[-1].address)
            if name == "sandbox" and not endpoints.sandbox_http:
                at = join_address(placement.control, picker.pick("sandbox.http"))
                endpoints.sandbox_http = f"http://{at}"
    if not endpoints.rollout:
        workers = [
            planner.service(f"rollout-{index}", "areal_rollout")
            for index in range(config.stack.rollout_workers)
        ]
        plan.services += workers
        endpoints.rollout = ",".join(worker.address for worker in workers)
    if not endpoints.gateway:
        port = config.stack.gateway_port
        plan.services.append(planner.service("gateway", "areal_gateway", port))
        endpoints.gateway = f"http://{plan.services[-1].address}"


@dataclass(frozen=True)
class _Planner:
    """Makes the specs of processes that are ours."""

    config: BaseExperimentConfig
    folder: RunFolder
    picker: PortPicker
    placement: Placement

    def weight_store(self) -> str:
        """Returns where our weight-sync keeps its store; "" when it is another stack's."""
        if self.config.endpoints.weight_sync:
            return ""
        port = self.picker.pick("weight-sync.store")
        return f"http://{join_address(self.placement.control, port)}"

    def service(self, name: str, module: str, port: int = 0) -> ProcessSpec:
        """Plans one service; `port` 0 means a free one."""
        spec = self._ours(name, (module,), self.placement.control, port or self.picker.pick(name))
        return replace(spec, argv=(*spec.argv, "--grace", "8"))

    def _ours(self, name: str, module: tuple[str, ...], host: str, port: int) -> ProcessSpec:
        """A Python process with health checks, on a host that others reach at that address."""
        bind, metrics = self.placement.bind, self.picker.pick(f"{name}.metrics")
        return ProcessSpec(
            name=name,
            argv=(
                *(sys.executable, "-m", *module, "--config", str(self.folder.config_file)),
                *("--listen", join_address(bind, port)),
                *("--metrics", join_address(bind, metrics)),
            ),
            log=self.folder.log_of(name),
            probe=http_probe(host, metrics, "/healthz"),
            address=join_address(host, port),
            metrics=join_address(host, metrics),
        )

    def inference(self, index: int) -> ProcessSpec:
        config, folder = self.config, self.folder
        name = f"inference-{index}"
        port = self.picker.pick(name)
        node = self.placement.inference[index % len(self.placement.inference)]
        command = inference_command(config)
        arguments = {
            "model-path": config.model.path,
            "host": self.placement.bind,
            "port": str(port),
            "dtype": self._dtype(own_engine=not command),
            "context-length": str(config.model.context_length),
            "max-running-requests": str(config.stack.inference_max_running),
            # Servers must differ, and a rerun should not.
            "random-seed": str(1_000 * config.seed + index),
        }
        if config.security.token_file and not command:
            arguments["token-file"] = config.security.token_file
        elif config.security.token_file:
            command, arguments["config"] = sglang_config(config, folder, command)
        allocation = parse_allocation(config.allocation_mode)
        if command and allocation.inference_gpus > 1:
            arguments["tensor-parallel-size"] = str(allocation.inference_gpus)
        part = self.placement.servers_part
        if command and part and not any(_MEMORY in each for each in command):
            arguments[_MEMORY] = f"{part:.2f}"
        adapters, modules = served_adapters(config)[0], tuple[str, ...]()
        if adapters is not None:
            arguments["max-lora-rank"] = str(adapters.rank)
        if adapters is not None and command:
            arguments["max-loras-per-batch"] = str(AT_ONCE)
            modules = ("--lora-target-modules", *adapters.modules)
        turns = command and allocation.sharing is Sharing.ALTERNATING
        flags = ["--enable-memory-saver"] if turns else []
        if adapters is not None:
            flags.append("--enable-lora")
        replays = config.rollout.router_replay and RouteShape.of_folder(Path(config.model.path))
        if command and replays and not any(_ROUTES in each for each in command):
            flags.append(f"--{_ROUTES}")
        return ProcessSpec(
            name=name,
            argv=(
                *(command or (sys.executable, "-m", "areal_inference")),
                *(part for key, value in arguments.items() for part in (f"--{key}", value)),
                *flags,
                *modules,
            ),
            log=folder.log_of(name),
            probe=http_probe(node.address, port, "/health"),
            address=join_address(node.address, port),
            metrics=join_address(node.address, port),
            environment=_devices(node),
            nodes=_remote(node),
        )

    def _dtype(self, *, own_engine: bool) -> str:
        """Returns the value of `--dtype`; the CPU engine decides only when it loads the model."""
        model, gpu = self.config.model, self.config.stack.gpus_per_node > 0
        return model.dtype if own_engine else serving_dtype(model.dtype, Path(model.path), gpu=gpu)

    def trainer(self, *, only_evaluate: bool = False) -> ProcessSpec:
        config, folder = self.config, self.folder
        ranks = parse_allocation(config.allocation_mode).trainer_ranks
        nodes, first = len(self.placement.trainer), self.placement.trainer[0]
        launch: tuple[str, ...] = ()
        if ranks > 1:
            # On several nodes each finds its rank among them in PET_NODE_RANK.
            port = self.picker.pick("torchrun")
            launch = (
                "torch.distributed.run",
                *("--nnodes", str(nodes), "--nproc-per-node", str(ranks // nodes)),
                *("--master-addr", first.address, "--master-port", str(port), "-m"),
            )
        port = int(config.endpoints.trainer.rpartition(":")[2])
        ours = self._ours("trainer", (*launch, "areal_trainer"), first.address, port)
        return replace(
            ours,
            argv=(*ours.argv, *(["--only-evaluate"] if only_evaluate else [])),
            address=config.endpoints.trainer,
            job=True,
            stop_grace_s=30.0,
            environment={VERDICT_VARIABLE: str(folder.verdict_file.resolve()), **_devices(first)},
            nodes=_remote(*self.placement.trainer),
            verdict=folder.verdict_file,
        )


def _devices(node: Node) -> dict[str, str]:
    """A process sees its own GPUs; one without any sees none, so that it uses none."""
    # Where loopback has only IPv6, gloo does not find it by itself.
    network = {"GLOO_SOCKET_IFNAME": "lo"} if node.address == "::1" else {}
    return {VARIABLE: ",".join(node.gpus), **network}


def _remote(*nodes: Node) -> tuple[Node, ...]:
    return nodes if nodes[0].name else ()


def ports_of(stack: Mapping[str, object]) -> dict[str, int]:
    """Returns the ports in an earlier stack.json, by process name, for `preferred_ports`."""
    ports: dict[str, int] = {}
    processes = stack.get("processes")
    for name, entry in processes.items() if isinstance(processes, dict) else ():
        for key, suffix in (("address", ""), ("metrics", ".metrics")):
            port = str(entry.get(key, "")).rpartition(":")[2]
            if port.isdigit():
                ports[f"{name}{suffix}"] = int(port)
    return ports


def missing_model(config: BaseExperimentConfig) -> str:
    """Returns why version 0 cannot be served from `model.path`; "" when it can."""
    if not config.model.path:
        return "model.path '': expected a Hugging Face model directory"
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        return f"model.path {config.model.path!r}: no config.json there"
    if not any(path.glob("*.safetensors")):
        return f"model.path {config.model.path!r}: no *.safetensors there"
    return ""
