"""Slotted KV cache: one tensor, one row per running request, grown as needed within a budget."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_inference.model.config import ModelConfig

_LENGTH_STEP = 32
"""Attention spans are rounded up to this many tokens, so that a step rarely changes shape."""


def round_up(length: int, step: int = _LENGTH_STEP) -> int:
    """Returns the smallest multiple of step that is >= length."""
    return -(-length // step) * step


class KVCache:
    """Keys and values, [layers, 2, rows, kv_heads, length, head_dim].

    Rows 0..n-1 belong to the n running requests, in order, so a decode step attends over plain
    slices. Positions beyond a row's own length hold leftovers: they are masked, and written before
    they count. They must be finite, though (zero times NaN is NaN): hence zeros and `clear`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, max_rows: int, max_length: int):
        self._max_rows = max_rows
        self._max_length = round_up(max_length)
        self._dtype = dtype
        self._shape = (config.num_layers, 2, 0, config.num_kv_heads, 0, config.head_dim)
        self.tensor = torch.zeros(self._shape, dtype=dtype)
        self.by_position: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Number of rows that are allocated."""
        return self.tensor.shape[2]

    @property
    def length(self) -> int:
        """Positions allocated per row."""
        return self.tensor.shape[4]

    def reserve(self, rows: int, length: int, budget: int) -> None:
        """Makes room for this many rows of this length, and keeps the content.

        Grows in powers of two where the budget (rows x length, tokens) allows, else exactly.
        """
        if rows <= self.rows and length <= self.length:
            return
        exact = (rows, round_up(length))
        roomy = (
            min(self._max_rows, max(8, 1 << (rows - 1).bit_length())),
            min(self._max_length, max(64, 1 << (length - 1).bit_length())),
        )
        for new in (roomy, (exact[0], roomy[1]), (roomy[0], exact[1]), exact):
            if new[0] * new[1] <= budget:
                break
        old = self.tensor
        self.reset(*new)
        kept_rows, kept_length = min(old.shape[2], new[0]), min(old.shape[4], new[1])
        self.tensor[:, :, :kept_rows, :, :kept_length] = old[:, :, :kept_rows, :, :kept_length]

    def reset(self, rows: int = 0, length: int = 0) -> None:
        """Replaces the storage by an empty one of this shape (0: release the memory)."""
        layers, pair, _, heads, _, width = self._shape
        self.tensor = torch.zeros((layers, pair, rows, heads, length, width), dtype=self._dtype)
        # Per layer [rows, length, 2, kv_heads, head_dim]: where a step's keys and values go.
        self.by_position = [layer.permute(1, 3, 0, 2, 4) for layer in self.tensor]

    def clear(self, row: int) -> None:
        """Overwrites a row with zeros, because it may hold values that are not finite."""
        if row < self.rows:
            self.tensor[:, :, row].zero_()

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copies the first `length` positions of each source row to its target row."""
        kv = self.tensor
        kv[:, :, targets, :, :length] = kv[:, :, sources, :, :length]

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Copies the first `length` positions of one row to several."""
        kv = self.tensor
        kv[:, :, targets, :, :length] = kv[:, :, source : source + 1, :, :length]
