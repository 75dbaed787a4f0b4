"""Which tokens of a packed batch are computed, and where attention finds each sequence.

    tokens of a batch   A = p q x y     B = p q z        (same group, common prefix p q)
    computed tokens     p q x y z                        each distinct prefix once

A token's hidden states depend only on the tokens up to it, so the common prefix of a group's
sequences has the same states in each of them and is computed once (the gradients of all its copies
add up through the gather). The layout is planned in host memory, where the batch is, and then
moved.

Layers of type `chunked_attention` cut each sequence at multiples of a number of tokens. To them a
batch is one of more and shorter sequences, of the same computed tokens. With chunks of 3:

    their sequences     p q x | y       p q z            a chunk around a prefix's end has all of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_torch.algorithms.packing import Batch, position_ids, sequence_index, sequence_lengths


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, attended together."""

    index: Tensor
    """Computed token at each place, int64 [sequences * longest]; places behind an end hold any
    token."""
    sequences: int
    longest: int


@dataclass(frozen=True)
class PackedLayout:
    """Which tokens of a batch are computed, and where attention finds them."""

    computed: Tensor
    """Batch positions of the computed tokens, int64 [U]."""
    locate: Tensor
    """Computed token that stands for each batch token, int64 [T]."""
    position_ids: Tensor
    """Position of each computed token in its sequence, int64 [U]."""
    cu_seqlens: Tensor
    """Where sequences begin among the batch's tokens, and the end, int32 [S + 1]."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    shared: bool
    """Whether fewer tokens are computed than the batch has."""
    buckets: tuple[Bucket, ...] = ()
    """Buckets, only for the `packed` kernel."""
    output: Tensor | None = None
    """Place of each computed token in the concatenated buckets, int64 [U]."""
    chunks: PackedLayout | None = None
    """The layout for layers of type `chunked_attention`: chunks in the places of sequences and of
    batch tokens. None: there are no such layers, or no sequence is longer than a chunk."""

    @property
    def longest(self) -> int:
        """Returns the number of tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def map(self, move: Callable[[Tensor], Tensor]) -> PackedLayout:
        """Returns the same layout with each tensor moved, for example to a device."""
        return PackedLayout(
            computed=move(self.computed),
            locate=move(self.locate),
            position_ids=move(self.position_ids),
            cu_seqlens=move(self.cu_seqlens),
            lengths=self.lengths,
            shared=self.shared,
            buckets=tuple(Bucket(move(b.index), b.sequences, b.longest) for b in self.buckets),
            output=None if self.output is None else move(self.output),
            chunks=None if self.chunks is None else self.chunks.map(move),
        )


def build_layout(
    batch: Batch,
    *,
    share_prefixes: bool,
    buckets: bool = True,
    least: float = 0.0,
    chunk: int | None = None,
) -> PackedLayout:
    """Plans the computation of a batch.

    Args:
        batch: Packed batch.
        share_prefixes: Compute the prefix that a sequence has in common with its group's first
            sequence once.
        buckets: True for the `packed` kernel; the others find sequences by `cu_seqlens`.
        least: Prefixes are shared only if this part of the tokens need not be computed then.
        chunk: Tokens of a chunk of the model's `chunked_attention` layers; None: it has none.
    """
    cu_seqlens = batch["cu_seqlens"].long()
    offsets = position_ids(cu_seqlens)
    everything = torch.arange(len(offsets), device=offsets.device)
    stands_for = _prefix_leaders(batch, offsets) if share_prefixes else everything
    computed = torch.nonzero(stands_for == everything).flatten()
    if len(computed) > (1 - least) * len(everything):
        stands_for = computed = everything
    slot = torch.empty_like(everything)
    slot[computed] = torch.arange(len(computed), device=offsets.device)
    locate = slot[stands_for]
    layout = PackedLayout(
        computed=computed,
        locate=locate,
        position_ids=offsets[computed],
        cu_seqlens=cu_seqlens.int(),
        lengths=tuple(cu_seqlens.diff().tolist()),
        shared=len(computed) < len(offsets),
    )
    chunks = None
    if chunk is not None and layout.longest > chunk:
        chunks = _in_chunks(layout, offsets % chunk == 0)
        chunks = _with_buckets(chunks) if buckets else chunks
    return replace(_with_buckets(layout) if buckets else layout, chunks=chunks)


def _in_chunks(layout: PackedLayout, begins: Tensor) -> PackedLayout:
    """Puts chunks, which begin at some tokens of the batch, in the places of sequences.

    Those without any token that is computed there are left out: a prefix that is computed once
    attends once, but for its last chunk, if that continues in each sequence.
    """
    number = begins.long().cumsum(0) - 1
    needed = torch.zeros_like(number, dtype=torch.bool)  # by the number of a chunk
    needed[number[layout.computed]] = True
    kept = needed[number]
    ends = torch.nonzero(torch.cat([begins[kept], begins.new_ones(1)])).flatten()
    return replace(
        layout,
        computed=(kept.long().cumsum(0) - 1)[layout.computed],
        locate=layout.locate[kept],
        cu_seqlens=ends.int(),
        lengths=tuple(ends.diff().tolist()),
        shared=int(ends[-1]) > len(layout.computed),
    )


def _with_buckets(layout: PackedLayout) -> PackedLayout:
    cu_seqlens = layout.cu_seqlens.long()
    found, place = _bucketize(cu_seqlens, position_ids(cu_seqlens), layout.locate)
    return replace(layout, buckets=found, output=place[layout.computed])


def _prefix_leaders(batch: Batch, offsets: Tensor) -> Tensor:
    """Maps each token to its equal in its group's first sequence, as long as prefixes agree."""
    ids, cu_seqlens = batch["input_ids"], batch["cu_seqlens"].long()
    owner = sequence_index(cu_seqlens)
    _, group = torch.unique(batch["group_index"], return_inverse=True)
    numbers = torch.arange(len(group), device=ids.device)
    first = torch.full_like(numbers, len(numbers)).scatter_reduce_(0, group, numbers, "amin")
    leader = first[group][owner]
    inside = offsets < sequence_lengths(batch)[leader]
    candidate = torch.where(inside, cu_seqlens[leader] + offsets, 0)
    differs = ~inside | (ids[candidate] != ids)
    # Differences up to and including this token, counted from the sequence's start.
    count = differs.cumsum(0)
    before = torch.cat([count.new_zeros(1), count])[cu_seqlens[:-1]]
    shared = count == before[owner]
    return torch.where(shared, candidate, torch.arange(len(ids), device=ids.device))


def _bucketize(
    cu_seqlens: Tensor, offsets: Tensor, locate: Tensor
) -> tuple[tuple[Bucket, ...], Tensor]:
    """Cuts sequences, longest first, into buckets that are at most about a quarter padding."""
    lengths = cu_seqlens.diff()
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[order].tolist()
    row_start = torch.zeros_like(lengths)  # place of each sequence's first token
    buckets, begin, place = [], 0, 0
    while begin < len(sizes):
        longest = sizes[begin]
        end = begin + 1
        while end < len(sizes) and sizes[end] + 8 >= 0.75 * longest:
            end += 1
        rows = order[begin:end]
        column = torch.arange(longest, device=lengths.device)
        valid = column < lengths[rows, None]
        index = locate[torch.where(valid, cu_seqlens[rows, None] + column, 0)].flatten()
        buckets.append(Bucket(index, end - begin, longest))
        row_start[rows] = place + longest * torch.arange(end - begin, device=lengths.device)
        place += longest * (end - begin)
        begin = end
    return tuple(buckets), torch.repeat_interleave(row_start, lengths) + offsets
