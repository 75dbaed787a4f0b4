"""Flash attention over packed sequences: one call, which finds each sequence by its bounds.

    tokens      p q x y | p q z
    cu_seqlens  0       4       7     on the device; the longest length is known on the host

Torch's own kernel and the two packages take the same tensors. They need a GPU, 16 bits, and heads
of one width for queries, keys and values, a multiple of 8: narrower ones are padded with zeros,
which changes no score and is cut off the result.

Torch's function has other arguments in each release, so its signature is read once, when the kernel
is bound:

| torch | `scale`, `window_size` | `enable_gqa` |
|---|---|---|
| 2.10 | no: it cannot be used | no |
| 2.11 | yes | no, and nothing compares the numbers of heads |
| 2.12 to 2.14 | yes | yes, and needed where keys have fewer heads |

`CUDNN` takes torch's function for short sequences. Each of `CUDNN_FROM` tokens or more goes through
cuDNN's attention for one sequence, which was 1.9 times as fast there on an H200. (Its attention for
packed sequences took four times as long as torch's, and its gradients were wrong for narrow heads:
torch 2.11.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from areal.errors import CannotStart
from areal_torch.engines.model.attention.layout import PackedLayout
from areal_torch.engines.versions import installed

TORCH, FLASH_2, FLASH_3 = "varlen", "flash_attention_2", "flash_attention_3"
TORCH_REPEATED, CUDNN = "varlen_repeat_kv", "varlen_cudnn"
PACKAGES = {FLASH_2: "flash_attn", FLASH_3: "flash_attn_interface"}
"""The package that has to be installed."""
WIDEST = 256
"""Largest width of a head."""
CUDNN_FROM = 16_384
_CUDNN_STEP = 1024
"""Sequences are padded to a multiple of this many tokens, because cuDNN compiles a plan for each
length."""

Varlen = Callable[[list[Tensor], PackedLayout, float, tuple[int, int], float | None], Tensor]
"""Takes queries, keys and values of one width, the layout, the factor of the scores, the tokens
seen to the left and right (-1: all), and the cap of the scores."""


def bind(kernel: str, *, cudnn_from: int = CUDNN_FROM) -> Varlen:
    """Looks a kernel's function up, and reads from its signature how to call it.

    Args:
        kernel: Its name.
        cudnn_from: Tokens of a sequence from which `CUDNN` gives it to cuDNN.

    Raises:
        CannotStart: This version of it lacks an argument that every model needs.
        ImportError: It is not there.
    """
    if kernel in PACKAGES:
        return partial(_call_package, import_module(PACKAGES[kernel]).flash_attn_varlen_func)
    if kernel == CUDNN:
        return partial(_call_cudnn, bind(TORCH), cudnn_from)
    from torch.nn.attention.varlen import varlen_attn

    takes = inspect.signature(varlen_attn).parameters
    if lacking := [name for name in ("scale", "window_size") if name not in takes]:
        raise CannotStart(
            f"varlen_attn of torch {installed('torch')} has no argument {' and no '.join(lacking)}"
        )
    options = {"enable_gqa": True} if "enable_gqa" in takes else {}
    return partial(_call_torch, varlen_attn, options, kernel == TORCH_REPEATED)


def varlen_attention(
    call: Varlen,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float,
    window: int | None,
    *,
    softcap: float | None = None,
) -> Tensor:
    """Attends within each sequence, to tokens up to the query's own.

    Args:
        call: From `bind`.
        query: [U, heads, head_dim].
        key: [U, key_value_heads, head_dim].
        value: [U, key_value_heads, value_dim].
        layout: The batch's layout, on the same device.
        scaling: Factor of the scores.
        window: Tokens a query looks back at, itself included; None: all.
        softcap: Scores become softcap * tanh(scores / softcap); `FLASH_2` only.

    Returns:
        [U, heads, value_dim].
    """
    value_dim = value.shape[2]
    widest = max(query.shape[2], value_dim)
    width = widest + -widest % 8
    # Norms and rotary embeddings of some models return 32 bits.
    rows = [_widen(x.to(value.dtype), width) for x in (query, key, value)]
    if layout.shared:  # a prefix that was computed once is attended to by each of its sequences
        rows = [x.index_select(0, layout.locate) for x in rows]
    # Kernels count the tokens before the query's own.
    seen = (-1 if window is None else window - 1, 0)
    out = call(rows, layout, scaling, seen, softcap)[..., :value_dim]
    return out.index_select(0, layout.computed) if layout.shared else out


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[2] == width else nn.functional.pad(x, (0, width - x.shape[2]))


def _call_torch(
    varlen_attn: Any,
    options: dict[str, Any],
    repeat: bool,
    rows: list[Tensor],
    layout: PackedLayout,
    scaling: float,
    seen: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    assert softcap is None, "it has none"
    q, k, v = rows
    if repeat and (fold := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)
    bounds, longest = layout.cu_seqlens, layout.longest
    out: Tensor = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=seen, **options
    )
    return out


def _call_package(
    flash_attn_varlen_func: Any,
    rows: list[Tensor],
    layout: PackedLayout,
    scaling: float,
    seen: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    q, k, v = rows
    bounds, longest = layout.cu_seqlens, layout.longest
    capped = {} if softcap is None else {"softcap": softcap}
    found: Any = flash_attn_varlen_func(
        q, k, v, bounds, bounds, longest, longest,
        softmax_scale=scaling, causal=True, window_size=seen, **capped,
    )  # fmt: skip
    # Early versions of flash attention 3 add the log-sum-exp.
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def _call_cudnn(
    otherwise: Varlen,
    cudnn_from: int,
    rows: list[Tensor],
    layout: PackedLayout,
    scaling: float,
    seen: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    if layout.longest < cudnn_from:
        return otherwise(rows, layout, scaling, seen, softcap)
    assert softcap is None, "it has none"
    assert seen[0] < 0, "it has no windows"
    found, first, start = list[Tensor](), 0, 0
    for short, group in groupby(layout.lengths, key=lambda tokens: tokens < cudnn_from):
        lengths = tuple(group)
        last, end = first + len(lengths), start + sum(lengths)
        q, k, v = (x[start:end] for x in rows)
        if short:
            bounds = layout.cu_seqlens[first : last + 1] - start
            part = replace(layout, cu_seqlens=bounds, lengths=lengths)
            found.append(otherwise([q, k, v], part, scaling, seen, softcap))
        else:
            each = zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True)
            found += [_one_sequence(query, key, value, scaling) for query, key, value in each]
        first, start = last, end
    return torch.cat(found)


def _one_sequence(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Returns the slice [tokens, heads, width] of one sequence."""
    tokens = len(query)
    # No token sees those that are added, which come after it.
    added = (0, 0, 0, 0, 0, -tokens % _CUDNN_STEP)
    q, k, v = (nn.functional.pad(x, added).transpose(0, 1)[None] for x in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out[0].transpose(0, 1)[:tokens]
