"""The weight transports that `weight_sync.transport` names, and the addresses of versions.

The checks of the experiment file, the order in which transports are tried, docs/weight-sync.md and
the contract tests read this table. A test holds the chart equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal.errors import InvalidInput, nearest


@dataclass(frozen=True)
class Transport:
    """What the rest of the system has to know of a transport."""

    goes: str
    """Where the bytes go, for docs/weight-sync.md."""
    needs: str
    """What it needs, for docs/weight-sync.md."""
    shared_volume: bool
    """Whether the servers of the chart mount the volume that has the versions."""
    stores: bool = True
    """Whether a server can read a version later. If a transport fails, the transports that store
    versions are tried, in the order of the table. A version sent over a transport that does not
    store versions is also stored."""
    process_group: bool = False
    """Whether trainer and servers form a process group: each can reach every other on any port, no
    two share a GPU, and all servers update at once."""


TRANSPORTS: dict[str, Transport] = {
    "disk": Transport(
        "to a folder that servers read, or with `weight_sync.path=s3://…` to a bucket that they "
        "fetch from",
        "a volume that trainer, weight-sync and servers mount at the same path, or an [object "
        "store](#in-an-object-store)",
        shared_volume=True,
    ),
    "stream": Transport(
        "to weight-sync's store, from there to one server, and then from server to server",
        "`endpoints.weight_store`; for SGLang, the [sidecar](#beside-an-unmodified-sglang)",
        shared_volume=False,
    ),
    "distributed": Transport(
        "from the trainer to all servers that are serving, through a [process "
        "group](#by-broadcast) (gloo, or NCCL on GPUs); also to the folder, as with `disk`, or "
        "without a shared volume to the store, as with `stream`: for new servers, and for those "
        "that the broadcast did not reach",
        "trainer and servers that can reach each other on any port, and what `disk` needs (without "
        "a shared volume: what `stream` needs)",
        shared_volume=True,
        stores=False,
        process_group=True,
    ),
}

STORING = tuple(name for name, transport in TRANSPORTS.items() if transport.stores)
"""The transports whose versions can be read later, in the order in which they are tried."""

if TYPE_CHECKING:
    TransportName = str
else:
    TransportName = Literal[tuple(TRANSPORTS)]

OBJECT_STORES = ("s3://", "gs://", "az://")
"""What `weight_sync.path` begins with when it is no folder."""
_FETCHED = ("http://", *OBJECT_STORES)


def transport_named(name: str) -> Transport:
    """Returns a transport that a recipe or the checked configuration names; raises InvalidInput."""
    if name not in TRANSPORTS:
        raise InvalidInput(
            f"WeightUpdateMeta.type {name!r}: no such transport{nearest(name, TRANSPORTS)}"
        )
    return TRANSPORTS[name]


def transport_order(first: str) -> tuple[str, ...]:
    """Returns the ways to store and read a version: the configured one, then the others."""
    ahead = (first,) if first in STORING else ()
    return (*ahead, *(name for name in STORING if name != first))


def in_object_store(place: str) -> bool:
    """Returns whether an address is in a bucket; otherwise it is a folder."""
    return place.startswith(OBJECT_STORES)


def is_fetched(location: str) -> bool:
    """Returns whether a version is fetched from a weight store or a bucket, not read in place."""
    return location.startswith(_FETCHED)
