"""Attention over packed sequences on any device: no [T, T] mask, and padding inside attention only.

Projections, norms and MLPs see the packed tokens only. Inside attention the queries, keys and
values of similarly long sequences are gathered into [sequences, longest] blocks; the padding lies
behind every sequence's end, where a causal mask already hides it, so that no mask tensor is needed.

    computed tokens     p q x y z                        of A = p q x y and B = p q z
    bucket              [[p q x y],
                         [p q z .]]                      '.' comes after z, which never sees it
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_torch.engines.model.attention.layout import PackedLayout

# Below this length one batched matmul is faster than SDPA's tiled kernel on CPU (measured: 21
# against 31 ms for 512 x 25 tokens, forward and backward).
_SHORT = 64
# Queries whose scores exist at once where SDPA cannot be used.
_ROWS = 512


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float,
    window: int | None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends within each sequence, to tokens up to the query's own.

    Args:
        query: [U, heads, head_dim].
        key: [U, key_value_heads, head_dim].
        value: [U, key_value_heads, value_dim].
        layout: With buckets.
        scaling: Factor of the scores.
        window: Tokens a query looks back at, itself included; None: all.
        softcap: Scores become softcap * tanh(scores / softcap), as in Gemma 2.
        sinks: [heads], a score that joins each softmax and has no value, as in gpt-oss; not with
            `softcap`.

    Returns:
        [U, heads, value_dim].
    """
    heads, value_dim = query.shape[1], value.shape[2]
    # One row a token, so that a bucket is gathered with one copy.
    flat = [x.reshape(x.shape[0], -1) for x in (query, key, value)]
    outputs = []
    for bucket in layout.buckets:
        q, k, v = (
            rows.index_select(0, bucket.index).view(
                bucket.sequences, bucket.longest, *like.shape[1:]
            )
            for rows, like in zip(flat, (query, key, value), strict=True)
        )
        sink = sinks is not None
        if sinks is not None:
            q, k, v = _prepend_sink(q, k, v, sinks / scaling)
        if softcap is not None:
            out = _capped_attention(q, k, v, scaling, window, softcap)
        elif q.shape[1] <= _SHORT:
            out = _short_attention(q, k, v, scaling, window, sink=sink)
        else:
            out = _long_attention(q, k, v, scaling, window, sink=sink)
        out = out[:, 1:] if sink else out
        outputs.append(out.reshape(-1, heads * value_dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    assert layout.output is not None
    return joined.index_select(0, layout.output).view(-1, heads, value_dim)


def _prepend_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts a token before each sequence whose score is the sink's and whose value is 0.

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
    """Returns which key positions each query position sees, bool [queries, keys]."""
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
    """Computes capped scores, for which SDPA has no kernel, a few rows at a time, twice."""
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
