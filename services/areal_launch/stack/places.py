"""Where the processes of a stack run: which nodes it needs, and who gets which.

The launcher plans and supervises the same processes everywhere. A place (this machine, a Slurm
allocation, a Ray cluster) lends nodes and starts a process on them; nothing else differs. Stores
and services run beside the launcher, inference servers and trainer ranks on the nodes:

| nodes have | trainer ranks         | inference servers                                         |
|------------|-----------------------|-----------------------------------------------------------|
| GPUs       | on the first nodes    | on what is left of a single node, or on nodes of their own |
| none       | on the first nodes    | spread over all                                           |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal.config.experiment import BaseExperimentConfig, parse_allocation
from areal.errors import CannotStart, ConfigError
from areal_launch.processes.process import Child, Life, ProcessSpec, Slot

HOST = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - only with a token: see Security.check_bind


@dataclass(frozen=True)
class Hosts:
    """Addresses of a stack before it has ports."""

    control: str = HOST
    """At which others reach what runs beside the launcher."""
    bind: str = HOST
    """What servers listen on."""
    inference: tuple[Slot, ...] = (Slot(),)
    """Of each inference server, in order; the last one's for those beyond."""
    trainer: tuple[Slot, ...] = (Slot(),)
    """One per node of the trainer, which its ranks share evenly."""


LOCAL = Hosts()


@dataclass(frozen=True)
class Shape:
    """How an allocation falls into nodes."""

    nodes: int
    trainer_nodes: int
    ranks_per_node: int
    servers_per_node: int
    """On a node that has servers only; 0: without GPUs they are spread."""


def shape_of(config: BaseExperimentConfig) -> Shape:
    """The nodes that `allocation_mode` takes.

    Raises:
        ConfigError: Ranks do not share nodes evenly, or a server needs more GPUs than a node has.
    """
    allocation, stack = parse_allocation(config.allocation_mode), config.stack
    ranks, gpus = allocation.trainer_ranks, stack.gpus_per_node
    per_node = stack.ranks_per_node or (min(ranks, gpus) if gpus else ranks)
    per_node = min(per_node, ranks)
    if ranks % per_node:
        raise ConfigError(
            f"allocation_mode {config.allocation_mode!r}: {ranks} trainer ranks do not share nodes "
            f"of {per_node} evenly; set stack.ranks_per_node to a divisor"
        )
    trainer_nodes = ranks // per_node
    if not gpus:
        return Shape(trainer_nodes, trainer_nodes, per_node, 0)
    if max(allocation.inference_gpus, per_node) > gpus:
        raise ConfigError(
            f"stack.gpus_per_node {gpus}: {config.allocation_mode!r} puts {per_node} ranks on a "
            f"node and gives each server {allocation.inference_gpus}"
        )
    servers = 0 if config.endpoints.inference else allocation.inference_replicas
    if trainer_nodes == 1 and per_node + servers * allocation.inference_gpus <= gpus:
        return Shape(1, 1, per_node, 0)
    per_server_node = gpus // allocation.inference_gpus
    return Shape(
        trainer_nodes + -(-servers // per_server_node), trainer_nodes, per_node, per_server_node
    )


def assign(config: BaseExperimentConfig, nodes: Sequence[Slot], bind: str) -> Hosts:
    """Gives each process its node and GPUs.

    Args:
        config: Says how many there are.
        nodes: The first is the launcher's.
        bind: What servers listen on.

    Raises:
        CannotStart: There are too few nodes.
    """
    shape, allocation = shape_of(config), parse_allocation(config.allocation_mode)
    if len(nodes) < shape.nodes:
        raise CannotStart(
            f"allocation_mode {config.allocation_mode!r}: takes {shape.nodes} nodes with "
            f"stack.gpus_per_node {config.stack.gpus_per_node} and {shape.ranks_per_node} trainer "
            f"ranks on a node; there is {len(nodes)}"
        )
    width = allocation.inference_gpus

    def server(index: int) -> Slot:
        if not config.stack.gpus_per_node:
            return nodes[index % len(nodes)]
        if shape.nodes == 1:
            node, first = nodes[0], shape.ranks_per_node + index * width
        else:
            node = nodes[shape.trainer_nodes + index // shape.servers_per_node]
            first = index % shape.servers_per_node * width
        return Slot(node.node, node.address, tuple(range(first, first + width)))

    ranks = tuple(range(shape.ranks_per_node)) if config.stack.gpus_per_node else ()
    return Hosts(
        control=nodes[0].address,
        bind=bind,
        inference=()
        if config.endpoints.inference
        else tuple(server(index) for index in range(allocation.inference_replicas)),
        trainer=tuple(
            Slot(node.node, node.address, ranks) for node in nodes[: shape.trainer_nodes]
        ),
    )


class Place(Protocol):
    """Lends nodes for the time of one stack."""

    async def open(self, config: BaseExperimentConfig) -> Hosts:
        """Takes the nodes.

        Raises:
            CannotStart: It has too few, or cannot be reached.
        """
        ...

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Life:
        """Starts one life of a process where its slots say; OSError when that cannot be."""
        ...

    def describe(self) -> dict[str, Any]:
        """What `areal down` must know to end the stack from elsewhere, for stack.json."""
        ...

    async def close(self) -> None:
        """Gives the nodes back; idempotent."""
        ...


class LocalPlace:
    """This machine."""

    async def open(self, config: BaseExperimentConfig) -> Hosts:
        """Everything on loopback."""
        return assign(config, [Slot()], HOST)

    async def spawn(self, spec: ProcessSpec, stack_id: str) -> Life:
        """A child of this process."""
        return await Child.start(spec, stack_id)

    def describe(self) -> dict[str, Any]:
        """The launcher's pid suffices."""
        return {}

    async def close(self) -> None:
        """Nothing was taken."""
