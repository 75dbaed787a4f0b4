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

`CUDNN` calls the operators beneath torch's function, which never takes cuDNN itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from areal.engines.model.attention.layout import PackedLayout
from areal.engines.versions import installed
from areal.errors import CannotStart

TORCH, FLASH_2, FLASH_3 = "varlen", "flash_attention_2", "flash_attention_3"
TORCH_REPEATED, CUDNN = "varlen_repeat_kv", "varlen_cudnn"
PACKAGES = {FLASH_2: "flash_attn", FLASH_3: "flash_attn_interface"}
"""What has to be installed."""
WIDEST = 256
"""Largest width of a head."""

Varlen = Callable[[list[Tensor], PackedLayout, float, tuple[int, int], float | None], Tensor]
"""Takes queries, keys and values of one width, the layout, the factor of the scores, the tokens
seen to the left and right (-1: all), and the cap of the scores."""


def bind(kernel: str) -> Varlen:
    """Look a kernel's function up, and read from its signature how to call it.

    Raises:
        CannotStart: this version of it lacks an argument that every model needs.
        ImportError: it is not there.
    """
    if kernel in PACKAGES:
        return partial(_call_package, import_module(PACKAGES[kernel]).flash_attn_varlen_func)
    if kernel == CUDNN:
        return _call_cudnn
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
    """Attend within each sequence, to tokens up to the query's own.

    Args:
        call: from `bind`.
        query: [U, heads, head_dim].
        key: [U, key_value_heads, head_dim].
        value: [U, key_value_heads, value_dim].
        layout: the batch's layout, on the same device.
        scaling: factor of the scores.
        window: tokens a query looks back at, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap); `FLASH_2` only.

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
    rows: list[Tensor],
    layout: PackedLayout,
    scaling: float,
    seen: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    assert softcap is None, "it has none"
    assert seen[0] < 0, "it has no windows"
    attend: Any = _Cudnn.apply
    out: Tensor = attend(*rows, layout.cu_seqlens, layout.longest, scaling)
    return out


class _Cudnn(torch.autograd.Function):
    """Causal attention within each sequence: torch has both operators, but joins them nowhere."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        longest: int,
        scaling: float,
    ) -> Tensor:
        found = torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, bounds, bounds, longest, longest, True, 0.0, True, False,
            scale=scaling,
        )  # fmt: skip
        out: Tensor = found[0]
        ctx.save_for_backward(query, key, value, bounds, out, found[1], found[6], found[7])
        ctx.longest, ctx.scaling = longest, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, bounds, out, log_sum_exp, seed, offset = ctx.saved_tensors
        # None becomes an undefined tensor, the only kind that the operator takes for no bias.
        grads = torch.ops.aten._cudnn_attention_backward(
            grad.contiguous(), query, key, value, out, log_sum_exp, seed, offset, None,
            bounds, bounds, ctx.longest, ctx.longest, 0.0, True, scale=ctx.scaling,
        )  # fmt: skip
        return *grads, None, None, None
