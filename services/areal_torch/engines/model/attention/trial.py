"""Runs an attention kernel on a few tokens, forward and backward, before a model depends on it.

    queries, keys, values at random      kernel, on the engine's device and in its precision
    the same, rounded the same           the formula, on the host in float64
                                         output and gradients differ: the kernel is not taken

A kernel's package, torch and driver are each of some version, so only a call shows whether they
work together: an argument may be missing, a head's width may have no kernel for this GPU, or heads
that share keys may be computed wrong without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from areal_torch.algorithms import packing
from areal_torch.engines.model.attention.layout import build_layout
from areal_torch.engines.model.layer_types import layer_configs

# One token, one block, and more than `packed` computes as one dense product.
_LENGTHS = (1, 9, 70)
MIDDLE = 9
"""Tokens of a sequence that is neither the shortest nor the longest of those that are tried."""
_WINDOW = 5
# Norm of the difference over the result's. bfloat16 rounding makes about 0.005; a wrong mask or
# wrong keys make 0.1 and more.
_TOLERANCE = 0.03


@dataclass(frozen=True)
class Shape:
    """What some of a model's layers ask of attention."""

    heads: int
    kv_heads: int
    width: int
    """Width of queries and keys."""
    value_width: int
    window: int | None = None
    """Tokens a query looks back at, itself included; None: all."""
    softcap: float | None = None


def shapes_of(config: Any) -> list[Shape]:
    """Returns what a model's layers ask of attention, from its config; none if it has no heads."""
    return list(dict.fromkeys(s for each in layer_configs(config) for s in _shapes_of(each)))


def _shapes_of(config: Any) -> list[Shape]:
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if heads == 0:
        return []

    def size(key: str) -> int:
        return int(getattr(config, key, None) or 0)

    width = size("head_dim") or config.hidden_size // heads
    kv_heads, value_width = size("num_key_value_heads") or heads, width
    if latent := size("qk_nope_head_dim"):
        width, kv_heads = latent + size("qk_rope_head_dim"), heads
        value_width = size("v_head_dim") or width
    softcap = getattr(config, "attn_logit_softcapping", None)
    found = [Shape(heads, kv_heads, width, value_width, None, softcap)]
    if wide := size("global_head_dim"):
        kv = size("num_global_key_value_heads") or kv_heads
        found.append(Shape(heads, kv, wide, wide, None, softcap))
    if size("sliding_window"):
        found.append(Shape(heads, kv_heads, width, value_width, _WINDOW, softcap))
    return found


def difference(
    attend: Callable[..., tuple[Tensor, Any]],
    shape: Shape,
    device: torch.device,
    compute: torch.dtype,
    *,
    buckets: bool,
) -> str | None:
    """Returns how a kernel's results differ from the formula's; None if they agree.

    Args:
        attend: Attention function, from `dispatch.attention_function`.
        shape: Heads and options.
        device: The device that computes.
        compute: Precision of queries, keys and values.
        buckets: Whether the kernel reads the layout's buckets.
    """
    rows = [{"input_ids": [0] * n, "loss_mask": [True] * n} for n in _LENGTHS]
    batch = packing.pack(rows, list(range(len(rows))))
    layout = build_layout(batch, share_prefixes=False, buckets=buckets)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, width: int) -> Tensor:
        drawn = torch.randn(1, heads, sum(_LENGTHS), width, generator=generator)
        return drawn.to(compute)

    # Drawn and rounded on the host, so that both see the same values.
    leaves = [
        draw(shape.heads, shape.width),
        draw(shape.kv_heads, shape.width),
        draw(shape.kv_heads, shape.value_width),
    ]
    weight = draw(shape.heads, shape.value_width).transpose(1, 2)
    options = {
        "packed_layout": layout.map(lambda x: _move(x, device)),
        "sliding_window": shape.window,
        "softcap": shape.softcap,
    }
    found = _results(
        lambda q, k, v: attend(None, q, k, v, None, **options)[0],
        [_move(x, device) for x in leaves],
        _move(weight, device),
    )
    bounds = layout.cu_seqlens.tolist()
    expected = _results(
        lambda q, k, v: _formula(q, k, v, bounds, shape),
        [x.double() for x in leaves],
        weight.double(),
    )
    names = ("output", "gradient of the queries", "of the keys", "of the values")
    for name, one, other in zip(names, found, expected, strict=True):
        relative = float((one - other).norm() / other.norm())
        if not relative <= _TOLERANCE:  # NaN is not
            return f"its {name} differs from plain attention by {relative:.1%}"
    return None


def _move(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device)


def _results(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], leaves: list[Tensor], weight: Tensor
) -> list[Tensor]:
    """Returns output and gradients, in float64 on the host."""
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    out = compute(q, k, v)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    return [x.detach().cpu().double() for x in (out, *gradients)]


def _formula(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], shape: Shape) -> Tensor:
    """[1, heads, T, width] -> [1, T, heads, value_width], one sequence after another."""
    fold = shape.heads // shape.kv_heads
    k, v = k.repeat_interleave(fold, 1), v.repeat_interleave(fold, 1)
    parts = []
    for begin, end in pairwise(bounds):
        q_, k_, v_ = (x[0, :, begin:end] for x in (q, k, v))
        scores = q_ @ k_.transpose(1, 2) * shape.width**-0.5
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        places = torch.arange(end - begin)
        back = places[:, None] - places
        hidden = (back < 0) | (back >= (shape.window or end))
        parts.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v_)
    return torch.cat(parts, 1).transpose(0, 1)[None]
