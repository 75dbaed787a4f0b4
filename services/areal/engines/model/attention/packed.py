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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal.algorithms.packing import Batch, position_ids, sequence_index, sequence_lengths
from areal.errors import InvalidInput

NAME = "areal_packed"

# Below this length one batched matmul is faster than SDPA's tiled kernel on CPU (measured: 21
# against 31 ms for 512 x 25 tokens, forward and backward).
_SHORT = 64
# Queries whose scores exist at once where SDPA cannot be used.
_ROWS = 512


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
    longest: int
    """Tokens of the longest sequence."""

    def map(self, move: Callable[[Tensor], Tensor]) -> PackedLayout:
        """The same layout with each tensor moved, as to a device."""
        return PackedLayout(
            computed=move(self.computed),
            locate=move(self.locate),
            position_ids=move(self.position_ids),
            buckets=tuple(Bucket(move(b.index), b.sequences, b.longest) for b in self.buckets),
            output=move(self.output),
            longest=self.longest,
        )


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
    longest = max((bucket.longest for bucket in buckets), default=0)
    return PackedLayout(computed, locate, offsets[computed], buckets, place[computed], longest)


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
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence; an attention function for transformers' registry.

    Args:
        module: attention module, named in errors.
        query: [1, heads, U, head_dim].
        key: [1, key_value_heads, U, head_dim].
        value: [1, key_value_heads, U, value_dim].
        attention_mask: always None here.
        packed_layout: from `build_layout`.
        scaling: of the scores; default head_dim ** -0.5.
        sliding_window: tokens a query looks back at, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
        s_aux: [heads], a score that joins each softmax and has no value: gpt-oss's sinks.
        others: what else the architecture passes; refused unless it changes nothing.

    Returns:
        [1, U, heads, value_dim], and no weights.

    Raises:
        InvalidInput: the architecture asks for attention that this function does not compute.
    """
    others["attention_mask"] = attention_mask
    if softcap is not None:
        others["s_aux"] = s_aux  # no architecture has both
    layout = _checked(module, query, key, packed_layout, sliding_window, others)
    heads, value_dim = query.shape[1], value.shape[3]
    if scaling is None:
        scaling = query.shape[3] ** -0.5
    # One row a token, so that a bucket is gathered with one copy.
    flat = [x[0].transpose(0, 1).reshape(x.shape[2], -1) for x in (query, key, value)]
    outputs = []
    for bucket in layout.buckets:
        q, k, v = (
            rows.index_select(0, bucket.index).view(
                bucket.sequences, bucket.longest, like.shape[1], like.shape[3]
            )
            for rows, like in zip(flat, (query, key, value), strict=True)
        )
        sink = s_aux is not None
        if s_aux is not None:
            q, k, v = _prepend_sink(q, k, v, s_aux / scaling)
        if softcap is not None:
            out = _capped_attention(q, k, v, scaling, sliding_window, softcap)
        elif q.shape[1] <= _SHORT:
            out = _short_attention(q, k, v, scaling, sliding_window, sink=sink)
        else:
            out = _long_attention(q, k, v, scaling, sliding_window, sink=sink)
        out = out[:, 1:] if sink else out
        outputs.append(out.reshape(-1, heads * value_dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, layout.output).view(1, -1, heads, value_dim), None


# What architectures pass along that changes nothing here, and for which values; None never does.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout": (0, 0.0),  # switched off when the model is loaded
    "is_causal": (True,),  # it always is
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
    "use_cache": (False,),
    "return_dict": (True, False),
}
# Queries and keys come with their positions applied.
_APPLIED = frozenset({"position_ids"})


def _checked(
    module: Any,
    query: Tensor,
    key: Tensor,
    layout: PackedLayout | None,
    sliding_window: int | None,
    others: dict[str, Any],
) -> PackedLayout:
    """Return the layout, when nothing is asked for that packed attention does not compute."""
    name = type(module).__name__
    if layout is None:
        raise InvalidInput(
            f"{name} is not told how the batch is packed: expected decoder layers that pass "
            "keyword arguments on to attention"
        )
    unknown = [
        f"{argument}={_short(value)}"
        for argument, value in others.items()
        if value is not None
        and argument not in _APPLIED
        and (isinstance(value, Tensor) or value not in _NEUTRAL.get(argument, ()))
    ]
    if unknown:
        raise InvalidInput(
            f"{name} asks attention for {', '.join(unknown)}, "
            "which packed attention does not compute"
        )
    tokens = len(layout.computed)
    if not query.shape[2] == key.shape[2] == tokens:
        raise InvalidInput(
            f"{name} attends from {query.shape[2]} positions to {key.shape[2]}: packed attention "
            f"computes {tokens} to {tokens}, each token of the batch once"
        )
    config = getattr(module, "config", None)
    layer_types = list(getattr(config, "layer_types", None) or ())
    index = getattr(module, "layer_idx", None)
    window = getattr(config, "sliding_window", None)
    if layer_types and index is not None and layer_types[index] != "sliding_attention":
        window = None
    longest = layout.longest
    if sliding_window is None and window is not None and longest > window:
        raise InvalidInput(
            f"{name} does not tell attention its sliding window of {window} tokens, which packed "
            f"attention cannot apply to a sequence of {longest}"
        )
    return layout


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _prepend_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a token before each sequence whose score is the sink's and whose value is 0.

    One more dimension makes that score: every query holds its head's sink there, and only the
    first key a 1. The first query is there for the causal mask, which counts from the start.
    """
    sequences, length, heads, dim = q.shape
    wider = dim + 8  # kernels want dimensions in multiples of 8
    queries = q.new_zeros(sequences, length + 1, heads, wider)
    keys = k.new_zeros(sequences, length + 1, k.shape[2], wider)
    queries[:, 1:, :, :dim] = q
    queries[:, 1:, :, dim] = sinks.to(q.dtype)
    keys[:, 1:, :, :dim] = k
    keys[:, 0, :, dim] = 1.0
    return queries, keys, nn.functional.pad(v, (0, 0, 0, 0, 1, 0))


def _visible(queries: Tensor, keys: Tensor, window: int | None, *, sink: bool) -> Tensor:
    """Which of the key positions each query position sees, bool [queries, keys]."""
    back = queries[:, None] - keys
    visible = back >= 0
    if window is not None:
        visible &= (back < window) | (keys == 0) if sink else back < window
    return visible


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """[S, L, heads, D] -> [S, L, heads, value_dim]; heads of one key fold into the length."""
    sequences, length, heads, dim = q.shape
    seen, kv_heads = k.shape[1:3]
    fold = heads // kv_heads
    q = q.reshape(sequences, length, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(sequences * kv_heads, fold * length, dim)
    k = k.permute(0, 2, 3, 1).reshape(sequences * kv_heads, dim, seen)
    v = v.permute(0, 2, 1, 3).reshape(sequences * kv_heads, seen, v.shape[3])
    bias = torch.zeros(length, seen, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(~visible, float("-inf")).repeat(fold, 1)
    if softcap is None:
        scores = torch.baddbmm(bias, q, k, alpha=scaling)
    else:
        scores = torch.tanh(torch.bmm(q, k) * (scaling / softcap)) * softcap + bias
    out = torch.bmm(scores.softmax(-1), v).view(sequences, kv_heads, fold, length, v.shape[2])
    return out.permute(0, 3, 1, 2, 4).reshape(sequences, length, heads, v.shape[2])


def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, *, sink: bool
) -> Tensor:
    places = torch.arange(q.shape[1], device=q.device)
    return _dense_attention(q, k, v, _visible(places, places, window, sink=sink), scaling, None)


def _capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    window: int | None,
    softcap: float,
) -> Tensor:
    """Capped scores, which SDPA has no kernel for: some rows of them at a time, twice."""
    places = torch.arange(q.shape[1], device=q.device)
    outputs = []
    for begin in range(0, q.shape[1], _ROWS):
        end = min(begin + _ROWS, q.shape[1])
        visible = _visible(places[begin:end], places[:end], window, sink=False)
        block = (q[:, begin:end], k[:, :end], v[:, :end], visible, scaling, softcap)
        if q.shape[1] <= _ROWS:
            return _dense_attention(*block)
        outputs.append(checkpoint(_dense_attention, *block, use_reentrant=False))
    return torch.cat(outputs, dim=1)


def _long_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, *, sink: bool
) -> Tensor:
    """[S, L, heads, D] -> [S, L, heads, value_dim] with scaled_dot_product_attention."""
    length = q.shape[1]
    places = torch.arange(length, device=q.device)
    windowed = window is not None and window < length
    mask = _visible(places, places, window, sink=sink) if windowed else None
    out = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=not windowed,
        scale=scaling,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
