"""Attention that counts positions on its own counts them in each sequence, not in the packed row.

Llama 4's layers without rope scale a query by its position. They take that from its place in the
row and from the number of tokens that a cache already has, which here is a number for each token:

    row         p q x y  p q z
    place       0 1 2 3  4  5  6
    in a cache  0 0 0 0 -4 -4 -4
    position    0 1 2 3  0  1  2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def counting(decoder: nn.Module) -> list[Any]:
    """Returns the attention modules that take positions from places in the row."""
    return [
        module
        for module in decoder.modules()
        if getattr(module, "attn_temperature_tuning", False)
        and not getattr(module, "use_rope", False)
    ]


def count_in_sequences(decoder: nn.Module) -> None:
    """Tells such modules the positions of a packed batch; a plain row stays as it is."""
    for module in counting(decoder):
        # A function of its own for each module would be compiled for each.
        module.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if (layout := kwargs.get("packed_layout")) is None:
        return args, kwargs
    positions, context = layout.position_ids, kwargs.get("context")
    if context is not None:
        positions = context.cut(positions)
    places = torch.arange(len(positions), device=positions.device)
    return args, {**kwargs, "past_key_values": _Seen(positions - places)}


class _Seen:
    """The part of transformers' cache that attention calls; it keeps nothing."""

    def __init__(self, tokens: Tensor) -> None:
        """Holds the number of tokens that were seen before the row, for each of its tokens."""
        self._tokens = tokens

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        del layer_idx
        return self._tokens

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        return key, value
