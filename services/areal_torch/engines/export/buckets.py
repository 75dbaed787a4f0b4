"""Gathers the weights on rank 0, in buckets; each rank casts its own pieces.

    rank 1, 2, …:  cast own piece ──> one buffer a bucket ──send──┐
    rank 0:        cast own piece ─────────────────────────receive┴─> whole tensors ──> Hub names

Only rank 0 ever holds a whole tensor. A tensor's DTensor says which rank has which piece, so the
same code gathers any mix of replicated and sharded dimensions; of several replicas the lowest rank
sends. Pieces are sent in the dtype of the servers: half the bytes of float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.errors import InvalidInput
from areal.weights.broadcast import BUCKET_BYTES, runs
from areal_torch.engines.model import hub_names, lora
from areal_torch.engines.model.precision import float32_tensors
from areal_torch.engines.model.tensor_directory import TensorDirectory
from areal_torch.training.ranks import gather_json

_ALIGNED = 16  # a tensor may begin at any multiple of its own width in a buffer of bytes

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape) of a piece in its tensor."""


@dataclass(frozen=True)
class _Piece:
    """What one rank sends of one tensor."""

    rank: int
    box: Box
    begin: int
    """First byte in that rank's buffer of the bucket."""


@dataclass
class _Whole:
    """One tensor of the model, and where its pieces are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[_Piece]


@dataclass
class _Bucket:
    steps: list[hub_names.Step]
    wholes: dict[str, _Whole]
    sizes: dict[int, int]
    """Bytes of each rank's buffer."""


class Gathering:
    """One export of the model's current tensors, bucket by bucket; collective.

    The tensors are read until `buckets` has ended. They must not change before.

    Args:
        hf: The model, resharded.
        source: Its directory.
        held: The result of `Held.of`.
        dtype: To cast floating tensors to, but those that stay in float32 (`precision`); None: as
            they are.
        group: Process group of all ranks for the model's device; no one else may use it meanwhile.
        adapters: Gather only the adapters, by peft's names, and not the model with them.

    Raises:
        InvalidInput: A tensor's pieces do not add up to it.
    """

    def __init__(
        self,
        hf: Any,
        source: Path,
        held: Held,
        dtype: str | None,
        group: Any,
        *,
        adapters: bool = False,
    ) -> None:
        self._hf, self._source, self._held, self._group = hf, source, held, group
        self._rank = dist.get_rank()
        live, self._steps = _exported(hf, adapters)
        self._live = {name: tensor.detach() for name, tensor in live.items()}
        exact = {name.replace(".base_layer.", ".") for name in float32_tensors(hf)}
        self._dtypes = {
            name: getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
            for name, tensor in self._live.items()
        }
        # Rounded, they would be other values than those that the trainer computes with.
        self._dtypes |= {
            n: torch.float32 for n in exact & self._live.keys() if self._dtypes[n].itemsize == 2
        }
        self._deltas = {} if adapters else lora.deltas(hf)
        self._buckets = self._plan(held.boxes)

    @torch.no_grad()
    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yields, on rank 0, lists of (Hub name, whole tensor), as `save_pretrained` writes them.

        The tensors are new and on the model's device; the other tensors of the model's directory
        follow, on the CPU. Other ranks yield nothing: they send.
        """
        for bucket in self._buckets:
            mine = self._packed(bucket)
            if self._rank != 0:
                if mine is not None:
                    _exchange([dist.P2POp(dist.isend, mine, 0, self._group)])
                continue
            whole = self._assembled(bucket, mine)
            yield [
                pair
                for step in bucket.steps
                for pair in step.run(self._hf, map(whole.pop, step.names))
            ]
        if self._held.bystanders:
            with TensorDirectory(self._source) as directory:
                for name in self._held.bystanders:
                    yield [(name, directory.read(name))]

    def _plan(self, boxes: Mapping[str, Sequence[Box]]) -> list[_Bucket]:
        """The same on every rank."""
        buckets = []
        for run in runs(self._steps, self._step_bytes, BUCKET_BYTES):
            bucket = _Bucket(run, {}, {})
            for name in (name for step in run for name in step.names):
                bucket.wholes[name] = self._whole(name, boxes[name], bucket.sizes)
            buckets.append(bucket)
        return buckets

    def _step_bytes(self, step: hub_names.Step) -> int:
        return sum(self._live[name].numel() * self._dtypes[name].itemsize for name in step.names)

    def _whole(self, name: str, boxes: Sequence[Box], sizes: dict[int, int]) -> _Whole:
        tensor, dtype = self._live[name], self._dtypes[name]
        pieces, seen, elements = list[_Piece](), set[Box](), 0
        for rank, box in enumerate(boxes):
            count = math.prod(box[1])
            if not count or box in seen:
                continue
            seen.add(box)
            elements += count
            begin = sizes.get(rank, 0)
            pieces.append(_Piece(rank, box, begin))
            size = count * dtype.itemsize
            sizes[rank] = begin + size + -size % _ALIGNED
        if elements != tensor.numel():
            raise InvalidInput(
                f"export: the ranks hold {elements} elements of tensor {name!r}, expected "
                f"{tensor.numel()}: its layout cannot be gathered"
            )
        return _Whole(name, tuple(tensor.shape), dtype, pieces)

    def _packed(self, bucket: _Bucket) -> Tensor | None:
        """Returns this rank's pieces, cast, as bytes; None: it has none."""
        if not bucket.sizes.get(self._rank):
            return None
        buffer = torch.empty(
            bucket.sizes[self._rank], dtype=torch.uint8, device=_local(self._any(bucket)).device
        )
        for whole in bucket.wholes.values():
            for piece in whole.pieces:
                if piece.rank == self._rank:
                    own, delta = _local(self._live[whole.name]), self._deltas.get(whole.name)
                    own = own if delta is None else delta.merged(own)
                    _view(buffer, piece, whole.dtype).copy_(own)
        return buffer

    def _assembled(self, bucket: _Bucket, mine: Tensor | None) -> dict[str, Tensor]:
        """Returns each tensor's name and the whole tensor, from the pieces of all ranks."""
        device = _local(self._any(bucket)).device
        buffers = {
            rank: torch.empty(size, dtype=torch.uint8, device=device)
            for rank, size in bucket.sizes.items()
            if rank != 0
        }
        _exchange([dist.P2POp(dist.irecv, b, r, self._group) for r, b in buffers.items()])
        if mine is not None:
            buffers[0] = mine
        wholes: dict[str, Tensor] = {}
        for whole in bucket.wholes.values():
            first = whole.pieces[0]
            if first.rank == 0 and first.box[1] == whole.shape:
                wholes[whole.name] = _view(buffers[0], first, whole.dtype)
                continue
            tensor = wholes[whole.name] = torch.empty(whole.shape, dtype=whole.dtype, device=device)
            for piece in whole.pieces:
                offset, shape = piece.box
                where = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                tensor[where].copy_(_view(buffers[piece.rank], piece, whole.dtype))
        return wholes

    def _any(self, bucket: _Bucket) -> Tensor:
        return self._live[next(iter(bucket.wholes))]


@dataclass
class Held:
    """Facts about a model that do not change while it is trained."""

    boxes: dict[str, list[Box]]
    """Name of each exported tensor, and the boxes of it that each rank holds."""
    bystanders: list[str]
    """On rank 0, tensors that are in the model's directory, do not belong to the model, and are
    exported with it."""

    @classmethod
    def of(cls, hf: Any, source: Path, *, adapters: bool = False) -> Held:
        """Reads them from the model; collective, and not allowed during a forward pass."""
        live, steps = _exported(hf, adapters)
        names = [name for step in steps for name in step.names]
        mine = [_box(live[name]) for name in names]
        found = gather_json(mine) if dist.get_world_size() > 1 else [mine]
        boxes = {
            name: [(tuple(rank[i][0]), tuple(rank[i][1])) for rank in found]
            for i, name in enumerate(names)
        }
        whole = dist.get_rank() == 0 and not adapters
        return cls(boxes, hub_names.bystanders(hf, source) if whole else [])


def _exported(hf: Any, adapters: bool) -> tuple[dict[str, Tensor], list[hub_names.Step]]:
    """The tensors that leave, by the names that they have here, and what becomes of them."""
    if not adapters:
        return hub_names.live_tensors(hf), hub_names.export_steps(hf)
    live = lora.published(hf)
    return live, [hub_names.Step(name, sources=[(name, name)]) for name in live]


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _view(buffer: Tensor, piece: _Piece, dtype: torch.dtype) -> Tensor:
    shape = piece.box[1]
    size = math.prod(shape) * dtype.itemsize
    return buffer[piece.begin : piece.begin + size].view(dtype).view(shape)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _box(tensor: Any) -> Box:
    """Returns the part of a tensor that this rank holds."""
    if not hasattr(tensor, "to_local"):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(shape)
