"""Flash attention over packed sequences: one call, which finds each sequence by its bounds.

    tokens      p q x y | p q z
    cu_seqlens  0       4       7     on the device; the longest length is known on the host

Torch's own kernel and the two packages take the same tensors. They need a GPU, 16 bits, and heads
of one width for queries, keys and values, a multiple of 8: narrower ones are padded with zeros,
which changes no score and is cut off the result.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor, nn

from areal.engines.model.attention.layout import PackedLayout

TORCH, FLASH_2, FLASH_3 = "varlen", "flash_attention_2", "flash_attention_3"
PACKAGES = {FLASH_2: "flash_attn", FLASH_3: "flash_attn_interface"}
"""What has to be installed."""
WIDEST = 256
"""Largest width of a head."""


def varlen_attention(
    kernel: str,
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
        kernel: `TORCH`, `FLASH_2` or `FLASH_3`.
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
    out = _call(kernel, rows, layout, scaling, seen, softcap)[..., :value_dim]
    return out.index_select(0, layout.computed) if layout.shared else out


def _widen(x: Tensor, width: int) -> Tensor:
    return x if x.shape[2] == width else nn.functional.pad(x, (0, width - x.shape[2]))


def _call(
    kernel: str,
    rows: list[Tensor],
    layout: PackedLayout,
    scaling: float,
    seen: tuple[int, int],
    softcap: float | None,
) -> Tensor:
    q, k, v = rows
    bounds, longest = layout.cu_seqlens, layout.longest
    if kernel == TORCH:
        from torch.nn.attention.varlen import varlen_attn

        found: Any = varlen_attn(
            q, k, v, bounds, bounds, longest, longest,
            scale=scaling, window_size=seen, enable_gqa=True,
        )  # fmt: skip
    else:
        flash: Any = import_module(PACKAGES[kernel])
        capped = {} if softcap is None else {"softcap": softcap}
        found = flash.flash_attn_varlen_func(
            q, k, v, bounds, bounds, longest, longest,
            softmax_scale=scaling, causal=True, window_size=seen, **capped,
        )  # fmt: skip
    # Early versions of flash attention 3 add the log-sum-exp.
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out
