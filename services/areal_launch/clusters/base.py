"""Where the processes of a stack run: which nodes it needs, and which process gets which.

The launcher plans and supervises the same processes everywhere. A cluster (this machine, a Slurm
allocation, a Ray cluster) lends nodes and starts processes on them; nothing else differs. Stores
and services run beside the launcher, inference servers and trainer ranks on the nodes:

| nodes have | trainer ranks         | inference servers                                         |
|------------|-----------------------|-----------------------------------------------------------|
| GPUs       | on the first nodes    | on what is left of a single node, or on nodes of their own |
| none       | on the first nodes    | spread over all, as CPU engines always are                |

With `|` in `allocation_mode`, servers are on the trainer's GPUs, and there is one node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal.addresses import loopback
from areal.config.allocation import Sharing, of_ranks, parse_allocation
from areal.config.experiment import BaseExperimentConfig
from areal.errors import CannotStart, ConfigError
from areal_launch.gpus.engine import CPU, uses_cpu_engine
from areal_launch.gpus.visible import lent
from areal_launch.processes.process import Child, Life, Node, ProcessSpec


@dataclass(frozen=True)
class Placement:
    """Addresses of a stack before it has ports."""

    control: str = field(default_factory=loopback)
    """Address at which others reach processes that run beside the launcher."""
    bind: str = field(default_factory=loopback)
    """Address on which servers listen."""
    inference: tuple[Node, ...] = field(default_factory=lambda: (Node(),))
    """Place of each inference server, in order; further servers use the last place."""
    trainer: tuple[Node, ...] = field(default_factory=lambda: (Node(),))
    """Places of the trainer, one for each node; its ranks are distributed evenly."""
    servers_part: float = 0.0
    """Part of a GPU's free memory that a server takes for weights and cache, where the trainer uses
    the same GPU; 0: its engine decides."""


@dataclass(frozen=True)
class NodeCounts:
    """How an allocation falls into nodes."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    servers_per_node: int
    """Servers on a node that has only servers; 0: without GPUs they are spread."""


def count_nodes(config: BaseExperimentConfig) -> NodeCounts:
    """Returns the nodes that `allocation_mode` takes.

    Raises:
        ConfigError: Ranks do not share nodes evenly, or a server needs more GPUs than a node has;
            or `allocation_mode` is `auto`, which only a launcher on this machine replaces.
    """
    allocation, stack = parse_allocation(config.allocation_mode), config.stack
    if not allocation.chosen:
        raise ConfigError(
            "allocation_mode 'auto': only this machine's GPUs can be looked at: expected e.g. "
            "'sglang:d4+fsdp:d4' elsewhere"
        )
    ranks, gpus = allocation.trainer_ranks, stack.gpus_per_node
    per_node = stack.ranks_per_node or (min(ranks, gpus) if gpus else ranks)
    per_node = min(per_node, ranks)
    if ranks % per_node:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: {ranks} trainer ranks cannot be spread "
            f"evenly over nodes of {per_node}; set stack.ranks_per_node to a divisor of {ranks}"
        )
    trainer_nodes = ranks // per_node
    if allocation.sharing.together and trainer_nodes > 1:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: '|' is for the GPUs of one machine, and "
            f"{ranks} trainer ranks take {trainer_nodes} nodes of {per_node}: expected '+'"
        )
    if not gpus:
        return NodeCounts(trainer_nodes, trainer_nodes, per_node, 0)
    servers = servers_on_gpus(config)
    if per_node > gpus:
        raise ConfigError(
            f"stack.gpus_per_node {gpus}: {config.allocation_mode!r} puts {per_node} trainer ranks "
            f"on a node: expected a stack.ranks_per_node of at most {gpus}"
        )
    if servers and allocation.inference_gpus > gpus:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: a server of {allocation.inference_gpus} "
            f"GPUs would span nodes of stack.gpus_per_node {gpus}, which servers that are started "
            f"here cannot: expected at most {gpus} GPUs per server (e.g. a smaller t, or weights "
            "in fp8), or servers that you start yourself, named in endpoints.inference"
        )
    alone = 0 if allocation.sharing.together else servers * allocation.inference_gpus
    if trainer_nodes == 1 and per_node + alone <= gpus:
        return NodeCounts(1, 1, per_node, 0)
    per_server_node = gpus // allocation.inference_gpus
    return NodeCounts(
        trainer_nodes + -(-servers // per_server_node), trainer_nodes, per_node, per_server_node
    )


def servers_on_gpus(config: BaseExperimentConfig) -> int:
    """Returns how many inference servers of the stack take GPUs from its nodes."""
    if config.endpoints.inference or uses_cpu_engine(config):
        return 0
    return parse_allocation(config.allocation_mode).inference_replicas


def refuse_sharing(config: BaseExperimentConfig, where: str) -> None:
    """Refuses servers on the trainer's GPUs where no one looks at their memory.

    Raises:
        ConfigError: `allocation_mode` has `|`.
    """
    if parse_allocation(config.allocation_mode).sharing.together:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: '|' works on one machine (--on local), "
            f"not on {where}: expected '+'"
        )


def too_few_nodes(config: BaseExperimentConfig, there: int) -> str:
    """Returns why an allocation does not fit on `there` nodes, with ways out; "" when it does.

    Raises:
        ConfigError: See `count_nodes`.
    """
    counts, allocation = count_nodes(config), parse_allocation(config.allocation_mode)
    if there >= counts.nodes:
        return ""
    gpus, ranks = config.stack.gpus_per_node, allocation.trainer_ranks
    servers, width = servers_on_gpus(config), allocation.inference_gpus
    taken = f"{_count(ranks, 'trainer rank')} and {_count(servers, 'server')}"
    if width > 1:
        taken += f" of {width} GPUs"
    ways = ["run it --on slurm or ray"] if there == 1 else ["take more nodes"]
    if there == 1 and servers and gpus % width == 0 and allocation.layout.plain:
        same = of_ranks(gpus, gpus // width, width, Sharing.FITTING)
        ways.insert(0, f"put both on the same GPUs with allocation_mode='{same}'")
    if gpus > 1:
        ways.append(f"choose an allocation_mode of at most {gpus * there} GPUs")
    if servers:
        ways += [
            f"serve on CPUs with stack.inference_command={CPU}",
            "name servers elsewhere in endpoints.inference",
        ]
    if there == gpus == 1:
        ways.append("train without servers (allocation_mode=fsdp:d1: SFT, DPO, reward models)")
    needs = f"needs {ranks + servers * width} GPUs for {taken}" if gpus else "does not fit"
    return (
        f"allocation_mode {config.allocation_mode!r}: {needs}, so with stack.gpus_per_node {gpus} "
        f"and {_count(counts.ranks_per_node, 'trainer rank')} on a node it takes "
        f"{counts.nodes} nodes, and there {'is' if there == 1 else 'are'} {there}; "
        f"{', or '.join(ways)}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def assign(config: BaseExperimentConfig, nodes: Sequence[Node], bind: str) -> Placement:
    """Gives each process its node and GPUs.

    Args:
        config: Says how many there are.
        nodes: The first is the launcher's. One whose `gpus` are empty has those that CUDA counts.
        bind: Address on which servers listen.

    Raises:
        CannotStart: There are too few nodes.
    """
    counts, allocation = count_nodes(config), parse_allocation(config.allocation_mode)
    if why := too_few_nodes(config, len(nodes)):
        raise CannotStart(why)
    width, on_gpus = allocation.inference_gpus, servers_on_gpus(config)

    def part(node: Node, first: int, count: int) -> Node:
        names = node.gpus or tuple(map(str, range(config.stack.gpus_per_node)))
        return Node(node.name, node.address, names[first : first + count])

    def server(index: int) -> Node:
        if not on_gpus:
            return part(nodes[index % len(nodes)], 0, 0)
        if counts.nodes == 1:
            first = 0 if allocation.sharing.together else counts.ranks_per_node
            return part(nodes[0], first + index * width, width)
        node = nodes[counts.trainer_nodes + index // counts.servers_per_node]
        return part(node, index % counts.servers_per_node * width, width)

    ranks = counts.ranks_per_node if config.stack.gpus_per_node else 0
    return Placement(
        control=nodes[0].address,
        bind=bind,
        inference=()
        if config.endpoints.inference
        else tuple(server(index) for index in range(allocation.inference_replicas)),
        trainer=tuple(part(node, 0, ranks) for node in nodes[: counts.trainer_nodes]),
    )


class Cluster:
    """Lends nodes for the time of one stack: this machine; the others derive from it."""

    def __init__(self, servers_part: float = 0.0) -> None:
        """`servers_part` is that of `Placement`."""
        self._servers_part = servers_part

    async def open(self, config: BaseExperimentConfig) -> Placement:
        """Takes the nodes.

        Raises:
            CannotStart: The cluster has too few nodes or GPUs, or cannot be reached.
        """
        nodes = [Node(gpus=lent(os.environ, config.stack.gpus_per_node))]
        return replace(assign(config, nodes, loopback()), servers_part=self._servers_part)

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Life:
        """Starts a process on the spec's nodes; raises OSError when that fails."""
        return await Child.start(spec, stack_id)

    def describe(self) -> dict[str, Any]:
        """Returns what `areal down` needs to end the stack from elsewhere, for stack.json."""
        return {}

    async def close(self) -> None:
        """Releases the nodes; idempotent."""
