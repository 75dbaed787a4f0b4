"""Attention over packed sequences: no [T, T] mask, and padding inside attention only.

Projections, norms and MLPs see the packed tokens only. Inside attention the queries, keys and
values of similarly long sequences are gathered into [sequences, longest] blocks; the padding lies
behind every sequence's end, where a causal mask already hides it, so that no mask tensor is needed.

    tokens of a batch   A = p q x y     B = p q z        (same group, common prefix p q)
    computed tokens     p q x y z                        each distinct prefix once
    bucket              [[p q x y],
                         [p q z .]]                      '.' comes after z, which never sees it

A token's hidden states depend on the tokens up to it and on nothing else, so the common prefix of a
group's sequences is the same wherever it stands and is computed once (the gradients of all its
copies add up through the gather).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal.algorithms.packing import Batch, position_ids, sequence_index, sequence_lengths

NAME = "areal_packed"

# Below this length one batched matmul is faster than SDPA's tiled kernel on CPU (measured: 21
# against 31 ms for 512 x 25 tokens, forward and backward).
_SHORT = 64


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
    buckets: tuple[Bucket, ...]
    output: Tensor
    """Place of each computed token in the concatenated buckets, int64 [U]."""


def build_layout(batch: Batch, *, share_prefixes: bool) -> PackedLayout:
    """Plan the computation of a batch.

    Args:
        batch: packed batch.
        share_prefixes: compute the prefix that a sequence has in common with its group's first
            sequence once.
    """
    cu_seqlens = batch["cu_seqlens"].long()
    offsets = position_ids(cu_seqlens)
    everything = torch.arange(len(offsets), device=offsets.device)
    stands_for = _prefix_leaders(batch, offsets) if share_prefixes else everything
    computed = torch.nonzero(stands_for == everything).flatten()
    slot = torch.empty_like(everything)
    slot[computed] = torch.arange(len(computed), device=offsets.device)
    locate = slot[stands_for]
    buckets, place = _bucketize(cu_seqlens, offsets, locate)
    return PackedLayout(computed, locate, offsets[computed], buckets, place[computed])


def _prefix_leaders(batch: Batch, offsets: Tensor) -> Tensor:
    """Map each token to its equal in its group's first sequence, as long as prefixes agree."""
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
    """Cut sequences, longest first, into buckets that are at most about a quarter padding."""
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


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence; an attention function for transformers' registry.

    Args:
        module: attention module (unused; the registry's signature).
        query: [1, heads, U, head_dim].
        key: [1, key_value_heads, U, head_dim].
        value: [1, key_value_heads, U, head_dim].
        attention_mask: always None here.
        packed_layout: from `build_layout`.
        scaling: of the scores; default head_dim ** -0.5.
        sliding_window: tokens a query looks back at, itself included; None: all.

    Returns:
        [1, U, heads, head_dim], and no weights.
    """
    heads, dim = query.shape[1], query.shape[3]
    kv_heads = key.shape[1]
    if scaling is None:
        scaling = dim**-0.5
    flat = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    outputs = []
    for bucket in packed_layout.buckets:
        shape = (bucket.sequences, bucket.longest)
        q, k, v = (x.index_select(0, bucket.index) for x in flat)
        attend = _short_attention if bucket.longest <= _SHORT else _long_attention
        out = attend(
            q.view(*shape, heads, dim),
            k.view(*shape, kv_heads, dim),
            v.view(*shape, kv_heads, dim),
            scaling,
            sliding_window,
        )
        outputs.append(out.reshape(-1, heads * dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packed_layout.output).view(1, -1, heads, dim), None


def _visible(length: int, sliding_window: int | None, device: torch.device) -> Tensor:
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if sliding_window is not None:
        visible = visible.triu_(1 - sliding_window)
    return visible


def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
) -> Tensor:
    """[S, L, heads, D] -> the same; query heads of one key head are folded into the length."""
    sequences, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    fold = heads // kv_heads
    q = q.view(sequences, length, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(sequences * kv_heads, fold * length, dim)
    k = k.permute(0, 2, 3, 1).reshape(sequences * kv_heads, dim, length)
    v = v.permute(0, 2, 1, 3).reshape(sequences * kv_heads, length, dim)
    hidden = ~_visible(length, sliding_window, q.device)
    bias = torch.zeros(length, length, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(hidden, float("-inf")).repeat(fold, 1)
    weights = torch.baddbmm(bias, q, k, alpha=scaling).softmax(-1)
    out = torch.bmm(weights, v).view(sequences, kv_heads, fold, length, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(sequences, length, heads, dim)


def _long_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, sliding_window: int | None
) -> Tensor:
    """[S, L, heads, D] -> [S, L, heads, D] with scaled_dot_product_attention."""
    length = q.shape[1]
    windowed = sliding_window is not None and sliding_window < length
    mask = _visible(length, sliding_window, q.device) if windowed else None
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=not windowed,
        scale=scaling,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
