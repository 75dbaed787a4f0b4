"""Which GPUs a stack gets on this machine, or why it gets none: `areal run` and `areal doctor` ask.

    CUDA_VISIBLE_DEVICES, torch, driver, SGLang ──> look ──> judge ──┬─> run: refuses in one line
                                                                     └─> doctor: rows

A GPU that was asked for and cannot be used ends the run: nothing continues on CPUs by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from areal.config.allocation import AUTO, Layout, of_ranks, parse_allocation
from areal.config.experiment import BaseExperimentConfig
from areal.config.transports import TRANSPORTS
from areal.errors import CannotStart
from areal_launch.clusters.base import count_nodes, servers_on_gpus, too_few_nodes
from areal_launch.doctor.findings import Finding, missing, note, ok
from areal_launch.gpus.engine import (
    CPU,
    Installed,
    inference_command,
    missing_engine,
    sglang_installed,
    sglang_python,
)
from areal_launch.gpus.nccl import Nccl, installed_nccl
from areal_launch.gpus.probe import Device, TorchFound, probe
from areal_launch.gpus.visible import MIG, VARIABLE, device_files, lent, listed

_NO_GPUS = "set stack.gpus_per_node=0 to run on CPUs"


@dataclass(frozen=True)
class Machine:
    """The facts that decide about GPUs on this machine."""

    environment: Mapping[str, str]
    """Environment of the launcher; CUDA_VISIBLE_DEVICES counts."""
    torch: TorchFound | None
    """torch of the first environment that uses GPUs; None: not asked, or the environment of another
    program."""
    sglang: Installed
    device_files: int = 0
    nccl: Nccl | None = None
    """None: trainer and servers form no process group on GPUs."""


@dataclass(frozen=True)
class Judged:
    """The result of `judge`: engine, GPUs of the ranks, findings."""

    gpus: Finding
    engine: Finding | None
    """None: the stack starts no servers, or none on GPUs."""
    trainer: tuple[str, ...] = ()
    """GPUs of the trainer's ranks; empty if the run cannot start, or has other nodes."""
    servers: tuple[str, ...] = ()
    nccl: Finding | None = None
    """None: no process group on GPUs of this machine."""
    devices: tuple[Device, ...] = ()
    """torch's description of the GPUs in `trainer`, then of those in `servers`, if it was asked.
    The GPUs are the same if `allocation_mode` has `|`."""

    @property
    def findings(self) -> list[Finding]:
        """The rows of a report."""
        return [each for each in (self.gpus, self.engine, self.nccl) if each is not None]

    def least_free(self, *, trainer: bool) -> int:
        """Returns the free bytes of the fullest GPU of ranks or of servers; 0: not known."""
        split = len(self.trainer)
        own = self.devices[:split] if trainer else self.devices[split:]
        return min((each.free for each in own), default=0)


def look(
    config: BaseExperimentConfig, *, with_trainer: bool = True, memory: bool = False
) -> Machine:
    """Looks at this machine; starts a process for torch if the stack has GPUs.

    Args:
        config: Valid.
        with_trainer: Otherwise torch is SGLang's, if that serves.
        memory: Ask for the free memory of GPUs, too.
    """
    sglang, found = sglang_installed(), None
    if config.stack.gpus_per_node and with_trainer:
        found = probe(sys.executable, memory=memory)
    elif config.stack.gpus_per_node and sglang is Installed.WHOLE and not _own_command(config):
        found = probe(str(sglang_python()), memory=memory)
    grouped = with_trainer and TRANSPORTS[config.weight_sync.transport].process_group
    nccl = installed_nccl(config) if grouped and servers_on_gpus(config) else None
    return Machine(os.environ, found, sglang, device_files(), nccl)


def judge(config: BaseExperimentConfig, machine: Machine, *, servers_only: bool = False) -> Judged:
    """Decides which GPUs a stack on this one machine gets.

    Args:
        config: Valid.
        machine: From `look`.
        servers_only: No GPU is kept for a trainer (`areal serve`).

    Raises:
        ConfigError: The allocation cannot be spread over any nodes.
    """
    engine = _engine(config, machine.sglang)
    wanted = config.stack.gpus_per_node
    if not wanted:
        return Judged(_unused(config, machine), engine)
    ranks = 0 if servers_only else count_nodes(config).ranks_per_node
    refused = _refusal(config, machine, ranks)
    if refused is not None:
        return Judged(replace(refused, name="gpus"), engine)
    names = lent(machine.environment, len(machine.torch.devices) if machine.torch else wanted)
    allocation = parse_allocation(config.allocation_mode)
    first = 0 if allocation.sharing.together else ranks
    ends = first + servers_on_gpus(config) * allocation.inference_gpus
    return Judged(
        _placed(config, names, ranks, range(first, ends), machine.torch),
        engine,
        names[:ranks],
        names[first:ends],
        _nccl(machine.nccl) if machine.nccl and not (engine and engine.verdict.fatal) else None,
        _devices([*range(ranks), *range(first, ends)], machine.torch),
    )


def free_bytes(config: BaseExperimentConfig, machine: Machine) -> list[int]:
    """Returns the free memory of each GPU that the stack may have, as far as torch was asked.

    Args:
        config: Valid.
        machine: From `look`.

    Raises:
        CannotStart: It cannot have them; see `refuse_unusable`.
    """
    wanted = config.stack.gpus_per_node
    if not wanted:
        return []
    # One server and one rank on one GPU fit into any number of GPUs.
    refuse_unusable(replace(config, allocation_mode="sglang:d1|fsdp:d1"), machine=machine)
    return [each.free for each in _devices(range(wanted), machine.torch)] or [0] * wanted


def refuse_unusable(
    config: BaseExperimentConfig,
    *,
    with_trainer: bool = True,
    servers_only: bool = False,
    machine: Machine | None = None,
) -> None:
    """Ends a command whose stack could not use its GPUs on this machine.

    Args:
        config: Valid.
        with_trainer: See `look`.
        servers_only: See `judge`.
        machine: From `look`, if it was called before.

    Raises:
        CannotStart: The first row that a doctor would call missing, in one line.
        ConfigError: See `judge`.
    """
    if not config.stack.gpus_per_node:
        return
    machine = machine or look(config, with_trainer=with_trainer)
    for each in judge(config, machine, servers_only=servers_only).findings:
        if each.verdict.fatal:
            asked = f"stack.gpus_per_node {config.stack.gpus_per_node}"
            raise CannotStart(f"{asked}: {each.found}; {each.fix}")


def unused_gpus(config: BaseExperimentConfig) -> str:
    """Returns one line about GPUs that a run leaves alone, as it was told to; "" without any."""
    if config.stack.gpus_per_node:
        return ""
    found = _unused(config, Machine(os.environ, None, Installed.ABSENT, device_files()))
    return f"{found.found}; {found.fix}" if found.fix else ""


def _own_command(config: BaseExperimentConfig) -> bool:
    return bool(config.stack.inference_command.strip())


def _unused(config: BaseExperimentConfig, machine: Machine) -> Finding:
    """Judges a stack without GPUs; it sees none, even if there are some."""
    names = listed(machine.environment)
    there = machine.device_files
    if names is not None:
        there = min(there, len(names))
    if not there:
        return replace(ok("none, and none requested"), name="gpus")
    found = f"{there} found, unused: servers and trainer compute on CPUs"
    return replace(note(found, f"set stack.gpus_per_node={there}"), name="gpus")


def _refusal(config: BaseExperimentConfig, machine: Machine, ranks: int) -> Finding | None:
    """Returns why a stack with so many trainer ranks cannot have its GPUs; None if it can."""
    wanted, torch = config.stack.gpus_per_node, machine.torch
    names = listed(machine.environment)
    shown = "" if names is None else f" ({VARIABLE}={machine.environment[VARIABLE]})"
    if torch is not None and (why := why_no_cuda(torch)):
        return missing(f"no GPU can be used{shown}: {torch}: {why[0]}", f"{why[1]}, or {_NO_GPUS}")
    if names == ():
        return missing(f"0 found, {wanted} requested{shown}", f"unset {VARIABLE}, or {_NO_GPUS}")
    usable = _usable(machine, wanted)
    if wanted > usable:
        fix = f"set stack.gpus_per_node={usable}"
        return missing(f"{usable} found, {wanted} requested{shown}", fix)
    if ranks and (line := too_few_nodes(config, 1)):
        found, _, fix = line.partition("; ")
        return missing(found, fix)
    width = parse_allocation(config.allocation_mode).inference_gpus
    several = max(ranks, width * bool(servers_on_gpus(config)))
    if names and names[0].startswith(MIG) and several > 1:
        found = f"a process sees one slice of a GPU (MIG){shown}, and {config.allocation_mode!r} "
        fix = "give the trainer and each server one: sglang:d1+fsdp:d1"
        return missing(f"{found}gives one {several}", fix)
    return None


def why_no_cuda(torch: TorchFound) -> tuple[str, str] | None:
    """Returns why a torch cannot use GPUs, and the way out; None if it can."""
    if not torch.version:
        return torch.error or "it is not installed", "install it (docs/gpu.md)"
    if torch.build == "CPU":
        return "a CPU build uses no GPU", "install a GPU build of torch (docs/gpu.md)"
    if torch.error:
        fix = "install a driver for that build, or torch for an older CUDA (docs/gpu.md)"
        return torch.error, fix
    if not torch.devices:
        return "it sees no GPU", f"check nvidia-smi and {VARIABLE}"
    return None


def _usable(machine: Machine, wanted: int) -> int:
    """Returns the GPUs that can be assigned to processes."""
    names = listed(machine.environment)
    if machine.torch is None:  # another program's environment: its own start will tell
        return (wanted if machine.device_files else 0) if names is None else len(names)
    seen = len(machine.torch.devices)
    if names is None:
        return seen
    # CUDA shows a process one slice, whatever is listed.
    return len(names) if names[0].startswith(MIG) else min(seen, len(names))


def _placed(
    config: BaseExperimentConfig,
    names: tuple[str, ...],
    ranks: int,
    served: range,
    torch: TorchFound | None,
) -> Finding:
    """The row of GPUs that are given out."""
    ends = max(ranks, served.stop)
    parts = [f"trainer {','.join(names[:ranks])}"] if ranks else []
    parts += [f"servers {','.join(names[served.start : served.stop])}"] if served else []
    found = f"{'; '.join(parts)}; {torch}" if torch is not None else "; ".join(parts)
    there, wanted = len(names), config.stack.gpus_per_node
    if ends < there and not names[0].startswith(MIG):
        better = _suggestion(config, there)
        more = f" stack.gpus_per_node={there}" if wanted < there else ""
        fix = f"set allocation_mode={better}{more}" if better else "choose a larger allocation_mode"
        return replace(note(f"{ends} of {there} used: {found}", fix), name="gpus")
    return replace(ok(found), name="gpus")


def _suggestion(config: BaseExperimentConfig, gpus: int) -> str:
    """An allocation_mode that takes all GPUs, half of them for servers if there are any."""
    allocation = parse_allocation(config.allocation_mode)
    if allocation.sharing.together:
        return AUTO
    if not allocation.layout.plain:
        return ""
    if not servers_on_gpus(config):
        return str(replace(allocation, layout=Layout(gpus, gpus)))
    width = allocation.inference_gpus
    servers = gpus // 2 // width
    return str(of_ranks(gpus - servers * width, servers, width)) if servers else ""


def _devices(indices: Iterable[int], torch: TorchFound | None) -> tuple[Device, ...]:
    if torch is None or not torch.devices:
        return ()
    last = len(torch.devices) - 1  # of slices (MIG) torch sees one
    return tuple(torch.devices[min(index, last)] for index in indices)


def _engine(config: BaseExperimentConfig, sglang: Installed) -> Finding | None:
    """The row of what serves; None where the stack starts no servers."""
    if config.offline or config.endpoints.inference or not config.stack.gpus_per_node:
        return None
    command = config.stack.inference_command.strip()
    if command == CPU:
        found = "the CPU engine, as stack.inference_command says: the servers take no GPU"
        return replace(ok(found), name="engine")
    problem, fix = ("", "") if command else missing_engine(sglang)
    if problem:
        return replace(missing(problem, fix), name="engine")
    argv = inference_command(config) if command else [str(sglang_python())]
    return replace(ok(" ".join(argv)), name="engine")


def _nccl(found: Nccl) -> Finding:
    """The row of a process group's NCCL."""
    if not (found.trainer and found.servers):
        side = "the servers' environment" if found.trainer else "this environment"
        fix = "compare torch.cuda.nccl.version() of both, or set weight_sync.transport=disk"
        return replace(note(f"the version in {side} is unknown", fix), name="nccl")
    if found.trainer != found.servers:
        differ = f"NCCL {found.trainer} for the trainer, {found.servers} for the servers"
        fix = f"install a torch with NCCL {found.servers} here, or set weight_sync.transport=disk"
        return replace(missing(f"{differ}: they cannot form a process group", fix), name="nccl")
    return replace(ok(f"{found.trainer} for trainer and servers"), name="nccl")
