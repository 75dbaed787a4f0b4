"""The protocol between both ends of a broadcast. No torch here.

    trainer                    weight-sync                       inference servers
    ───────                    ───────────                       ─────────────────
    offer(version, address) ──> seats those that serve ──join──> rank 1, 2, …
    rank 0, joins               (SGLang's endpoints)   ──names─> receive
    broadcasts every tensor, in the order of the offer ────────>

Tensors are sent one by one in that order, so each end may divide them into buckets as it likes. The
group is used again for the next version while the same servers serve. Any failure ends it, and the
next version gets a new group, with the servers that serve then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from areal.errors import InvalidInput
from areal.weights.manifest import WeightTensor
from areal.weights.publisher import patience_s

T = TypeVar("T")

JOIN_S = 10.0
"""Seconds that the trainer waits for every member before it uses another transport. Members wait a
little longer: the end of the trainer's wait tells them, and only a member that is stuck misses its
own deadline."""
MEMBER_JOIN_S = 12.0
MEMBER_ANSWER_S = 15.0
BUCKET_BYTES = 512 << 20
"""Bytes that the trainer gathers, and that SGLang is told to receive, at once: each allocates this
much in addition to its weights."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of torch's dtypes, as SGLang's requests use them."""
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Offer:
    """The address from which a trainer will broadcast a version.

    Example:
        >>> Offer("10.0.0.3", 41873, "gloo", group="")
    """

    address: str
    port: int
    """Port of the rendezvous; nothing connects to it if the group is kept."""
    backend: str
    """gloo or nccl."""
    group: str = ""
    """The group that its last broadcast left intact; empty: none."""


@dataclass(frozen=True)
class Seats:
    """Weight-sync's answer to an offer: the group.

    Example:
        >>> Seats("areal-7f3a91", world_size=3)
    """

    group: str
    """The offered group if it is kept, otherwise a new name."""
    world_size: int
    """Number of members, including the trainer; 0: no server takes part."""


@dataclass(frozen=True)
class Seat:
    """One server's place in a group."""

    offer: Offer
    group: str
    rank: int
    world_size: int
    tensors: tuple[WeightTensor, ...]
    """Tensors in the order in which they are broadcast; the manifest of the stored version may have
    another order."""


def runs(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields the items in order, grouped as long as their sizes add up to at most the limit.

    An item above the limit is a run of its own.
    """
    run, total = list[T](), 0
    for item in items:
        own = size(item)
        if run and total + own > most:
            yield run
            run, total = [], 0
        run.append(item)
        total += own
    if run:
        yield run


def buckets(tensors: Iterable[WeightTensor]) -> Iterator[list[WeightTensor]]:
    """Runs of tensors of at most `BUCKET_BYTES`, or of one; raises InvalidInput for odd dtypes."""
    return runs(tensors, _size_of, BUCKET_BYTES)


def bucket_s(bucket: Sequence[WeightTensor]) -> float:
    """How long each end waits for a bucket, once all members have joined."""
    return patience_s(sum(map(_size_of, bucket)))


def _size_of(tensor: WeightTensor) -> int:
    if tensor.dtype not in DTYPES:
        raise InvalidInput(
            f"tensor {tensor.name} has dtype {tensor.dtype}, expected one of {sorted(DTYPES)}"
        )
    return math.prod(tensor.shape) * _BYTES[tensor.dtype]
