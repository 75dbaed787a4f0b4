"""Where the processes of a stack run: which nodes it needs, and which process gets which.

The launcher plans and supervises the same processes everywhere. A cluster (this machine, a Slurm
allocation, a Ray cluster) lends nodes and starts processes on them; nothing else differs. Stores
and services run beside the launcher, inference servers and trainer ranks on the nodes:

| nodes have | trainer ranks         | inference servers                                         |
|------------|-----------------------|-----------------------------------------------------------|
| GPUs       | on the first nodes    | on what is left of a single node, or on nodes of their own |
| none       | on the first nodes    | spread over all                                           |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.config.allocation import parse_allocation
from areal.config.experiment import BaseExperimentConfig
from areal.errors import CannotStart, ConfigError
from areal_launch.processes.process import Child, Life, Node, ProcessSpec

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - only with a token: see Security.check_bind


@dataclass(frozen=True)
class Placement:
    """Addresses of a stack before it has ports."""

    control: str = HOST
    """At which others reach what runs beside the launcher."""
    bind: str = HOST
    """What servers listen on."""
    inference: tuple[Node, ...] = (Node(),)
    """Of each inference server, in order; the last one's for those beyond."""
    trainer: tuple[Node, ...] = (Node(),)
    """One per node of the trainer, which its ranks share evenly."""


LOCAL = Placement()


@dataclass(frozen=True)
class NodeCounts:
    """How an allocation falls into nodes."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    servers_per_node: int
    """On a node that has servers only; 0: without GPUs they are spread."""


def count_nodes(config: BaseExperimentConfig) -> NodeCounts:
    """Returns the nodes that `allocation_mode` takes.

    Raises:
        ConfigError: Ranks do not share nodes evenly, or a server needs more GPUs than a node has.
    """
    allocation, stack = parse_allocation(config.allocation_mode), config.stack
    ranks, gpus = allocation.trainer_ranks, stack.gpus_per_node
    per_node = stack.ranks_per_node or (min(ranks, gpus) if gpus else ranks)
    per_node = min(per_node, ranks)
    if ranks % per_node:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: {ranks} trainer ranks cannot be spread "
            f"evenly over nodes of {per_node}; set stack.ranks_per_node to a divisor of {ranks}"
        )
    trainer_nodes = ranks // per_node
    if not gpus:
        return NodeCounts(trainer_nodes, trainer_nodes, per_node, 0)
    if max(allocation.inference_gpus, per_node) > gpus:
        raise ConfigError(
            f"stack.gpus_per_node {gpus}: {config.allocation_mode!r} puts {per_node} ranks on a "
            f"node and gives each server {allocation.inference_gpus} GPUs"
        )
    servers = 0 if config.endpoints.inference else allocation.inference_replicas
    if trainer_nodes == 1 and per_node + servers * allocation.inference_gpus <= gpus:
        return NodeCounts(1, 1, per_node, 0)
    per_server_node = gpus // allocation.inference_gpus
    return NodeCounts(
        trainer_nodes + -(-servers // per_server_node), trainer_nodes, per_node, per_server_node
    )


def assign(config: BaseExperimentConfig, nodes: Sequence[Node], bind: str) -> Placement:
    """Gives each process its node and GPUs.

    Args:
        config: Says how many there are.
        nodes: The first is the launcher's.
        bind: Address on which servers listen.

    Raises:
        CannotStart: There are too few nodes.
    """
    counts, allocation = count_nodes(config), parse_allocation(config.allocation_mode)
    if len(nodes) < counts.nodes:
        raise CannotStart(
            f"allocation_mode {config.allocation_mode!r}: needs {counts.nodes} nodes with "
            f"stack.gpus_per_node {config.stack.gpus_per_node} and {counts.ranks_per_node} trainer "
            f"ranks on a node; the job has {len(nodes)}"
        )
    width = allocation.inference_gpus

    def server(index: int) -> Node:
        if not config.stack.gpus_per_node:
            return nodes[index % len(nodes)]
        if counts.nodes == 1:
            node, first = nodes[0], counts.ranks_per_node + index * width
        else:
            node = nodes[counts.trainer_nodes + index // counts.servers_per_node]
            first = index % counts.servers_per_node * width
        return Node(node.name, node.address, tuple(range(first, first + width)))

    ranks = tuple(range(counts.ranks_per_node)) if config.stack.gpus_per_node else ()
    return Placement(
        control=nodes[0].address,
        bind=bind,
        inference=()
        if config.endpoints.inference
        else tuple(server(index) for index in range(allocation.inference_replicas)),
        trainer=tuple(
            Node(node.name, node.address, ranks) for node in nodes[: counts.trainer_nodes]
        ),
    )


class Cluster:
    """Lends nodes for the time of one stack: this machine; the others derive from it."""

    async def open(self, config: BaseExperimentConfig) -> Placement:
        """Takes the nodes.

        Raises:
            CannotStart: The cluster has too few nodes or GPUs, or cannot be reached.
        """
        return assign(config, [Node()], HOST)

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Life:
        """Starts one life of a process on the spec's nodes; raises OSError when that fails."""
        return await Child.start(spec, stack_id)

    def describe(self) -> dict[str, Any]:
        """Returns what `areal down` needs to end the stack from elsewhere, for stack.json."""
        return {}

    async def close(self) -> None:
        """Releases the nodes; idempotent."""
