"""`areal doctor`: would a run work on this machine? It changes and starts nothing."""

from __future__ import annotations

import contextlib
import copy
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import psutil

from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig, cautions
from areal.errors import ArealError
from areal.memory_estimate import BYTES, ModelShape
from areal.model_directory import serving_dtype
from areal.security import Security
from areal_launch.clusters.base import servers_on_gpus
from areal_launch.doctor import memory
from areal_launch.doctor.findings import (
    Check,
    Finding,
    examine,
    missing,
    note,
    ok,
    unknown,
)
from areal_launch.doctor.gpus import judge, look
from areal_launch.doctor.preflight import (
    answers_problem,
    dataset_problem,
    gateway_problem,
    run_root_problem,
    tokenizer_problem,
    weights_problem,
)
from areal_launch.doctor.settle import open_question, settle, shape_of
from areal_launch.processes.free_ports import FIRST_PORT, LAST_PORT, PortPicker
from areal_launch.stack.plan import missing_model
from areal_launch.stack.stores import find_nats_server, find_redis_server

_GIB = 1024**3
# Besides the model: services, logs, stores of a small run.
_BASE_DISK, _BASE_MEMORY = 1 * _GIB, 1 * _GIB
# An estimate so far above what there is would not fit if it were wrong by all of its error.
_SURELY = 1.3
# Share of a GPU that SGLang takes for weights and cache (it chooses --mem-fraction-static).
_SERVERS_SHARE = 0.88
_UNKNOWN_SIZE = "unknown until the model is there, because its config.json cannot be read yet"


def examine_here(
    config: BaseExperimentConfig, *, can_prepare: bool, described_in: Path | None = None
) -> list[Finding]:
    """Examines this machine.

    Args:
        config: Valid.
        can_prepare: The recipe makes its model, or a run downloads it.
        described_in: A folder with the config.json of a model that is not there yet; None: it is
            in `model.path`, if anywhere.
    """
    shape = shape_of(described_in or Path(config.model.path)) if config.model.path else None
    config = copy.deepcopy(config)
    allocation = _allocation(config, shape)
    training = config if isinstance(config, GRPOConfig) else None
    will_prepare = can_prepare and bool(missing_model(config))
    tokenizer = "the recipe creates it" if will_prepare else str(config.tokenizer_dir)
    rows = (training and training.train_dataset.path) or "the recipe's own"
    longest = training.gconfig.max_new_tokens if training else 0
    answers = f"up to {longest} tokens; with the prompt, up to {config.model.context_length}"
    before = examine(
        {
            # An older Python would not have come this far: pyproject.toml refuses it.
            "python": lambda: ok(f"{platform.python_version()} in {sys.prefix}"),
            "torch": _torch,
        }
    )
    return [
        *before,
        *allocation,
        *_gpu_findings(config, shape),
        *examine(
            {
                "redis": lambda: _store("redis", config.endpoints.redis, find_redis_server),
                "nats": lambda: _store("nats", config.endpoints.nats, find_nats_server),
                "ports": _ports,
                "disk": lambda: _disk(config, shape),
                "memory": lambda: _memory(config, shape),
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
        ),
    ]


def _allocation(config: BaseExperimentConfig, shape: ModelShape | None) -> list[Finding]:
    """Resolves `allocation_mode` as a run would; no row if the configuration names one."""
    if not open_question(config):
        return []

    def decide() -> Finding:
        settled = settle(config, shape, look(config, memory=True))
        return ok(settled.why or config.allocation_mode)

    return examine({"allocation": decide})


def _gpu_findings(config: BaseExperimentConfig, shape: ModelShape | None) -> list[Finding]:
    """Reports which GPUs the stack gets, what serves, and whether the model fits on them."""
    if not parse_allocation(config.allocation_mode).chosen:
        return []  # the row `allocation` says why none was chosen
    try:
        judged = judge(config, look(config, memory=True))
    except ArealError as error:
        return examine({"gpus": partial(missing, str(error))})
    checks: dict[str, Check] = {}
    if parse_allocation(config.allocation_mode).sharing.together and judged.servers:
        return judged.findings  # the row `allocation` has compared both with the memory
    serves = bool(config.stack.gpus_per_node and servers_on_gpus(config))
    if config.stack.gpus_per_node and isinstance(config, GRPOConfig):
        there = judged.least_free(trainer=True)
        checks["trainer memory"] = partial(_trainer_memory, config, shape, there)
    if serves:
        there = judged.least_free(trainer=False)
        checks["server memory"] = partial(_server_memory, config, shape, there)
    return [*judged.findings, *examine(checks)]


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


def _store(name: str, endpoint: str, find: Callable[[], str]) -> Finding:
    """An endpoint is not shown: it may hold a password."""
    return ok(f"endpoints.{name} is set" if endpoint else find())


def _ports() -> Finding:
    try:
        port = PortPicker().pick("doctor")
    except OSError as error:
        return missing(str(error), "stop the processes that listen there")
    return ok(f"some are free from {FIRST_PORT} to {LAST_PORT}, e.g. {port}")


def _disk(config: BaseExperimentConfig, shape: ModelShape | None) -> Finding:
    model = sum(
        each.stat().st_size for each in Path(config.model.path or ".").glob("*.safetensors")
    )
    # Published versions, and checkpoints with two moments of the optimizer in float32.
    versions = config.checkpoint.keep + 2
    if not model and shape is not None:  # it is still to be downloaded
        gpu = config.stack.gpus_per_node > 0
        dtype = serving_dtype(config.model.dtype, Path(config.model.path), gpu=gpu)
        model = BYTES[dtype] * shape.parameters
        versions += 1
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


def _memory(config: BaseExperimentConfig, shape: ModelShape | None) -> Finding:
    """Reports host memory: on CPUs for the whole run; with GPUs for loading and publishing."""
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


def _trainer_memory(config: GRPOConfig, shape: ModelShape | None, there: int) -> Finding:
    """Reports a rank's memory; `there` is the least free memory of a GPU in bytes, 0 if unknown."""
    if shape is None:
        return unknown(_UNKNOWN_SIZE)
    rank = memory.trainer_rank(config, shape, gpu=True, there=there)
    found = f"each rank needs about {rank.need} with gradient_checkpointing={rank.mode}"
    if not there:
        return unknown(f"{found}; there is no GPU here to compare with")
    found += f"; its GPU has {there / _GIB:.1f} GiB free"
    return ok(found) if rank.need.total <= there else missing(found, rank.ways_out)


def _server_memory(config: BaseExperimentConfig, shape: ModelShape | None, there: int) -> Finding:
    """Reports a server's memory; `there` is as in `_trainer_memory`, for a server's GPUs."""
    if shape is None:
        return unknown(_UNKNOWN_SIZE)
    need = memory.server(config, shape, gpu=True)
    found = f"each server needs about {need} on each of its GPUs"
    if not there:
        return unknown(f"{found}; there is no GPU here to compare with")
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
