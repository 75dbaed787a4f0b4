"""`areal doctor`: would a run work on this machine? It changes and starts nothing."""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig, cautions
from areal.engines.parallel.estimate import ModelShape
from areal.errors import ArealError, InvalidInput
from areal.security import Security
from areal_launch.clusters.base import count_nodes
from areal_launch.doctor import memory
from areal_launch.doctor.preflight import (
    answers_problem,
    dataset_problem,
    gateway_problem,
    run_root_problem,
    tokenizer_problem,
    weights_problem,
)
from areal_launch.processes.free_ports import FIRST_PORT, LAST_PORT, PortPicker
from areal_launch.stack.plan import inference_command, missing_model
from areal_launch.stack.stores import find_nats_server, find_redis_server
from areal_launch.view.output import CheckResult

_GIB = 1024**3
# Besides the model: services, logs, stores of a small run.
_BASE_DISK, _BASE_MEMORY = 1 * _GIB, 1 * _GIB
# An estimate so far above what there is would not fit if it were wrong by all of its error.
_SURELY = 1.3
# Of a GPU: what SGLang takes for weights and cache (--mem-fraction-static, which it chooses).
_SERVERS_SHARE = 0.88


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: CheckResult
    found: str
    fix: str = ""
    """How to fix it; empty when ok."""


def ok(found: str) -> Finding:
    """Reports a check that passed; `examine` fills in its name."""
    return Finding("", CheckResult.OK, found)


def note(found: str, fix: str) -> Finding:
    """Reports that a run works, with a drawback."""
    return Finding("", CheckResult.NOTE, found, fix)


def missing(found: str, fix: str = "see the message") -> Finding:
    """Reports that a run would fail."""
    return Finding("", CheckResult.MISSING, found, fix)


Check = Callable[[], Finding]


def examine(checks: dict[str, Check]) -> list[Finding]:
    """Runs checks; one that fails is a finding itself."""
    findings = []
    for name, check in checks.items():
        try:
            found = check()
        except ArealError as error:
            found = missing(str(error))
        findings.append(replace(found, name=name))
    return findings


def examine_here(config: BaseExperimentConfig, *, can_prepare: bool) -> list[Finding]:
    """This machine.

    Args:
        config: Valid.
        can_prepare: The recipe makes its model.
    """
    shape, training = _shape(config), config if isinstance(config, GRPOConfig) else None
    will_prepare = can_prepare and bool(missing_model(config))
    tokenizer = "the recipe creates it" if will_prepare else str(config.tokenizer_dir)
    rows = (training and training.train_dataset.path) or "the recipe's own"
    longest = training.gconfig.max_new_tokens if training else 0
    answers = f"up to {longest} tokens; with the prompt, up to {config.model.context_length}"
    devices: dict[str, Check] = {}
    if shape is not None and config.stack.gpus_per_node:
        if training is not None:
            devices["trainer memory"] = partial(_trainer_memory, training, shape)
        if not config.endpoints.inference:
            devices["server memory"] = partial(_server_memory, config, shape)
    if config.stack.gpus_per_node and not config.endpoints.inference:
        devices["engine"] = partial(_engine, config)
        if config.weight_sync.transport == "distributed":
            devices["nccl"] = partial(_nccl, config)
    return examine(
        {
            # An older Python would not have come this far: pyproject.toml refuses it.
            "python": lambda: ok(f"{platform.python_version()} in {sys.prefix}"),
            "torch": _torch,
            "gpus": lambda: _gpus(config),
            "redis": lambda: _store("redis", config.endpoints.redis, find_redis_server),
            "nats": lambda: _store("nats", config.endpoints.nats, find_nats_server),
            "ports": _ports,
            "disk": lambda: _disk(config),
            "memory": lambda: _memory(config, shape),
            **devices,
            "model": lambda: _model(config, can_prepare=can_prepare),
            "tokenizer": lambda: _unless(
                tokenizer_problem(config, will_prepare=will_prepare), tokenizer
            ),
            "dataset": lambda: _unless(dataset_problem(config), rows),
            "answers": lambda: _unless(answers_problem(config), answers),
            "run folder": lambda: _unless(
                run_root_problem(config) or weights_problem(config), str(config.run_dir)
            ),
            "dashboard": lambda: _unless(gateway_problem(config), _dashboard(config)),
            "secrets": lambda: _secrets(config),
            "config": lambda: _config(config),
        }
    )


def _unless(problem: str, found: str) -> Finding:
    return missing(problem) if problem else ok(found)


def _torch() -> Finding:
    installed = {}
    for name in ("torch", "transformers", "safetensors"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    trainer = "'areal-services[trainer]'"
    if "torch" not in installed:
        fix = f"pip install 'areal-services[cpu]', or your CUDA build of torch and {trainer}"
        return missing("not installed", fix)
    if absent := {"transformers", "safetensors"} - installed.keys():
        return missing(f"no {', '.join(sorted(absent))}", f"pip install {trainer}")
    return ok(installed["torch"])


def _gpus(config: BaseExperimentConfig) -> Finding:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    wanted = config.stack.gpus_per_node
    if wanted > devices:
        fix = f"install the GPU driver, or set stack.gpus_per_node={devices}"
        return missing(f"{devices} found, {wanted} requested", fix)
    if wanted:
        nodes = count_nodes(config).nodes
        if nodes > 1:
            fix = "run it --on slurm, ray or kubernetes, or choose a smaller allocation_mode"
            return missing(f"allocation_mode needs {nodes} nodes, and this is one", fix)
        return ok(f"{devices} found, at most {wanted} used")
    if devices:
        return note(f"{devices} found, unused", f"set stack.gpus_per_node={devices}")
    return ok("none, and none requested")


def _store(name: str, endpoint: str, find: Callable[[], str]) -> Finding:
    """An endpoint is not shown: it may hold a password."""
    return ok(f"endpoints.{name} is set" if endpoint else find())


def _ports() -> Finding:
    try:
        port = PortPicker().pick("doctor")
    except OSError as error:
        return missing(str(error), "stop the processes that listen there")
    return ok(f"some are free from {FIRST_PORT} to {LAST_PORT}, e.g. {port}")


def _disk(config: BaseExperimentConfig) -> Finding:
    model = sum(
        each.stat().st_size for each in Path(config.model.path or ".").glob("*.safetensors")
    )
    # Published versions, and checkpoints with two moments of the optimizer in float32.
    versions = config.checkpoint.keep + 2
    needed = _BASE_DISK + model * versions + 6 * model * (config.checkpoint.keep + 1)
    folder = Path(config.run_root).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < needed:
        fix = f"make room for about {needed / _GIB:.1f} GiB, or set a smaller checkpoint.keep"
        return missing(found, fix)
    return ok(f"{found}, about {needed / _GIB:.1f} GiB needed")


def _shape(config: BaseExperimentConfig) -> ModelShape | None:
    """None: the model is not there, or its memory cannot be estimated."""
    try:
        return ModelShape.read(Path(config.model.path)) if config.model.path else None
    except InvalidInput:
        return None


def _memory(config: BaseExperimentConfig, shape: ModelShape | None) -> Finding:
    """Host memory: on CPUs the whole run; with GPUs, loading and publishing."""
    allocation = parse_allocation(config.allocation_mode)
    needed = _BASE_MEMORY + config.buffer.max_memory_mb * 1024**2 // 8
    said = [f"services {needed / _GIB:.1f} GiB"]
    servers = 0 if config.endpoints.inference else allocation.inference_replicas
    if shape is None:
        said.append("and a model of unknown size, not counted")
    elif config.stack.gpus_per_node:
        ranks = min(allocation.trainer_ranks, config.stack.gpus_per_node)
        node = memory.host(config, shape, ranks=ranks)
        needed += node.total
        said.append(f"trainer {node}")
    else:
        if servers:
            one = memory.server(config, shape, gpu=False)
            needed += servers * one.total
            said.append(f"each of {servers} servers {one}")
        if isinstance(config, GRPOConfig):
            rank = memory.trainer_rank(config, shape, gpu=False).need
            needed += allocation.trainer_ranks * rank.total
            said.append(f"each of {allocation.trainer_ranks} trainer ranks {rank}")
    there = psutil.virtual_memory()
    found = (
        f"{there.available / _GIB:.1f} GiB available, about {needed / _GIB:.1f} GiB needed: "
        f"{'; '.join(said)}"
    )
    fix = "use fewer servers or ranks, smaller micro-batches, or a machine with more memory"
    if needed > _SURELY * there.total:
        return missing(found, fix)
    return note(found, fix) if needed > there.available else ok(found)


def _trainer_memory(config: GRPOConfig, shape: ModelShape) -> Finding:
    there = memory.gpu_bytes()
    rank = memory.trainer_rank(config, shape, gpu=True, there=there)
    found = f"each rank needs about {rank.need} with gradient_checkpointing={rank.mode}"
    if not there:
        return ok(f"{found}; there is no GPU here to compare with")
    found += f"; its GPU has {there / _GIB:.1f} GiB free"
    return ok(found) if rank.need.total <= there else missing(found, rank.ways_out)


def _engine(config: BaseExperimentConfig) -> Finding:
    if command := inference_command(config):
        return ok(" ".join(command))
    fix = "run make sglang-gpu, or set stack.inference_command='PYTHON -m sglang.launch_server'"
    return note("the CPU engine, which does not use the servers' GPUs", fix)


def _nccl(config: BaseExperimentConfig) -> Finding:
    """A group of trainer and servers needs the same NCCL on both sides."""
    here = _nccl_in([Path(each) for each in sys.path if each])
    python = Path((inference_command(config) or [sys.executable])[0])
    there = _nccl_in(python.parent.parent.glob("lib/python*/site-packages"))
    if not (here and there):
        side = "the servers' environment" if here else "this environment"
        fix = "compare torch.cuda.nccl.version() of both, or set weight_sync.transport=disk"
        return note(f"the version in {side} is unknown", fix)
    if here != there:
        fix = f"install a torch with NCCL {there} here, or set weight_sync.transport=disk"
        return note(f"{here} for the trainer, {there} for the servers: they may not connect", fix)
    return ok(f"{here} for trainer and servers")


def _nccl_in(folders: Iterable[Path]) -> str:
    """The version of NCCL that is installed as a package; empty: none is."""
    path = [str(each) for each in folders]
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    found = (each for name in names for each in metadata.distributions(name=name, path=path))
    return next((each.version for each in found), "")


def _server_memory(config: BaseExperimentConfig, shape: ModelShape) -> Finding:
    need, there = memory.server(config, shape, gpu=True), memory.gpu_bytes()
    found = f"each server needs about {need} on each of its GPUs"
    if not there:
        return ok(f"{found}; there is no GPU here to compare with")
    running, cache = config.stack.inference_max_running, need.parts["cache"]
    room = int(_SERVERS_SHARE * there) - (need.total - cache)
    fits = max(0, room) * running // max(cache, 1)
    found += f"; a GPU has {there / _GIB:.1f} GiB free"
    if fits < 1:
        fix = "use more GPUs per server (sglang:dNtM), or a smaller model.context_length"
        return missing(f"{found}: no request of full length fits", fix)
    if fits < running:
        found += f": {fits} of {running} requests of full length fit, the rest wait"
    return ok(found)


def _model(config: BaseExperimentConfig, *, can_prepare: bool) -> Finding:
    if config.endpoints.inference and not config.model.path:
        return ok("the servers have their own")
    why = missing_model(config)
    if not why:
        return ok(config.model.path)
    if can_prepare and config.model.path:
        return ok(f"created or downloaded at the start, into {config.model.path}")
    return missing(why, "set model.path to a folder with config.json and *.safetensors")


def _dashboard(config: BaseExperimentConfig) -> str:
    if config.endpoints.gateway:
        return f"at {config.endpoints.gateway}; none is started"
    port = config.stack.gateway_port
    return f"on port {port}" if port else "on a free port (stack.gateway_port chooses one)"


def _secrets(config: BaseExperimentConfig) -> Finding:
    security = Security.load(config.security)
    folder, tls = config.security.dir, config.security.tls_dir
    files = [*(Path(folder).iterdir() if folder else ()), *([Path(tls) / "tls.key"] if tls else ())]
    for file in files:
        if file.stat().st_mode & 0o077:
            return note(f"security: other users may read {file}", f"chmod 600 {file}")
    return ok("a token is set" if security.token else "no token is set: the run creates one")


def _config(config: BaseExperimentConfig) -> Finding:
    if found := cautions(config):
        return note("; ".join(found), "change these values if they are not intended")
    return ok("valid")
