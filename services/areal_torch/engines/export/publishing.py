"""Publishes the trainer's tensors as a version, by the configured transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from areal.config.experiment import BaseExperimentConfig
from areal.config.transports import in_object_store, transport_named, transport_order
from areal.security import Security
from areal.types import WeightUpdateMeta
from areal.weights.broadcast import Offer, Seats
from areal.weights.delta import DeltaChain
from areal.weights.manifest import PolicyVersion
from areal.weights.objects import ObjectPublisher
from areal.weights.publisher import Publisher
from areal.weights.safetensors import HostTensor
from areal.weights.store_client import TIMEOUT_S
from areal_torch.publish.disk import DiskPublisher
from areal_torch.publish.fallback import FallbackPublisher
from areal_torch.publish.stream import StreamPublisher

if TYPE_CHECKING:
    from torch import Tensor


def make_publisher(
    config: BaseExperimentConfig,
    security: Security,
    meta: WeightUpdateMeta,
    offer: Callable[[PolicyVersion, Offer], Seats],
) -> Publisher:
    """Returns a publisher for the transports in the order that `meta`, or the experiment, asks for.

    Args:
        config: The experiment.
        security: For the weight store.
        meta: The recipe's choice.
        offer: Announces a broadcast to weight-sync.
    """
    own = config.weight_sync
    place = meta.path or own.path
    local = config.run_dir / "weights" if in_object_store(place) or not place else Path(place)
    root = local.resolve()
    chain = DeltaChain() if own.encoding == "delta" else None
    ways: dict[str, Publisher] = {
        "disk": ObjectPublisher(place)
        if in_object_store(place)
        else DiskPublisher(root, chain=chain),
        "stream": StreamPublisher(config.endpoints.weight_store, security, TIMEOUT_S, chain=chain),
    }
    kind = meta.type or own.transport
    stored = FallbackPublisher([ways[name] for name in transport_order(kind)])
    if transport_named(kind).stores:
        return stored
    from areal_torch.publish.distributed import DistributedPublisher

    return DistributedPublisher(stored, offer, root, config.endpoints.weight_sync)


def host_tensors(tensors: Iterable[tuple[str, Tensor]]) -> tuple[HostTensor, ...]:
    """Returns tensors as bytes, with their digests; CPU tensors share their memory."""
    from areal_torch.engines.export.pinned import ToHost

    with ToHost() as host:
        host.add(list(tensors))
        return host.result()
