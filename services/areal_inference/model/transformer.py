"""Forward pass of Qwen2 and Llama decoders in plain torch, for prefill and for one decode step.

Equal to transformers' logits within float rounding: test_inference_model.py shows it.
Layout of the weights: see `areal_inference.model.weights`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from areal_inference.model.adapters import Adapter, Pairs, fused, rows_by_adapter
from areal_inference.model.config import ModelConfig
from areal_inference.model.kv_cache import KVCache
from areal_inference.model.vision import Seen, features
from areal_inference.model.weights import Weights


class Model:
    """A decoder whose weights can be replaced between two calls.

    Args:
        config: Shapes.
        weights: Parameters, in one dtype.
        max_length: Longest sequence, in tokens; sizes the rotary table.
    """

    def __init__(self, config: ModelConfig, weights: Weights, max_length: int):
        self.config = config
        self.weights = weights
        self.adapters: Sequence[Adapter | None] = ()
        self._adapted: list[tuple[Tensor | slice, Any]] = []
        self._rotary = _rotary_table(config, max_length)

    def adapt(self, pairs: Pairs) -> Any:
        """See `runner.Decoder`."""
        return fused(pairs, self.config)

    def prefill(
        self,
        cache: KVCache,
        rows: list[int],
        sequences: Sequence[list[int]],
        seen: Sequence[Seen | None] = (),
    ) -> Tensor:
        """Writes the keys and values of whole prompts into cache rows.

        Args:
            cache: Has room for the longest sequence's positions in each row.
            rows: Cache row of each prompt.
            sequences: Token ids of each prompt, at least one of them not empty. They are padded on
                the right (attention is causal, so padding only writes positions that are masked
                until they are overwritten).
            seen: The images of each prompt; empty: none has any.

        Returns:
            Final hidden states [prompts, longest, hidden], normalized: `logits` takes them.
        """
        config = self.config
        count, length = len(sequences), max(map(len, sequences))
        ids = torch.tensor([each + [0] * (length - len(each)) for each in sequences])
        heads, kv_heads = config.num_heads, config.num_kv_heads
        rotary = self._rotary[:length].view(1, length, 1, -1)
        hidden = F.embedding(ids.reshape(-1), self.weights.embed)
        self._adapted = rows_by_adapter(self.adapters, length)
        if any(each is not None for each in seen):
            rotary = torch.stack([self._turns(each, length) for each in seen]).unsqueeze(2)
            self._put_images(hidden.view(count, length, -1), seen)
        for index, layer in enumerate(self.weights.layers):
            qkv = self._qkv(index, hidden).view(count, length, -1, config.head_dim)
            _rotate(qkv[:, :, : heads + kv_heads], rotary)
            by_head = qkv.transpose(1, 2)
            query, key = by_head[:, :heads], by_head[:, heads : heads + kv_heads]
            value = by_head[:, heads + kv_heads :]
            cache.tensor[index, 0, rows, :, :length] = key
            cache.tensor[index, 1, rows, :, :length] = value
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=heads != kv_heads
            )
            hidden = self._finish_layer(
                index, hidden, mixed.transpose(1, 2).reshape(-1, layer.o.shape[0])
            )
        return self._norm(hidden, self.weights.final_norm).view(count, length, -1)

    def _turns(self, seen: Seen | None, length: int) -> Tensor:
        """Rotary factors of the first tokens of a sequence, [length, head_dim / 2]."""
        if seen is None:
            return self._rotary[:length]
        vision = self.config.vision
        assert vision is not None, "of a model that sees"
        turned = self._rotary[seen.rotary_positions(length)]
        by_axis = torch.split(turned, list(vision.sections), dim=-1)
        return torch.cat([part[axis] for axis, part in enumerate(by_axis)], dim=-1)

    def _put_images(self, hidden: Tensor, seen: Sequence[Seen | None]) -> None:
        for row, each in enumerate(seen):
            if each is not None and self.weights.tower is not None:
                hidden[row, each.places] = features(self.weights.tower, each)

    def decode(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        span: int,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """Advances rows 0..n-1 by one token each.

        Args:
            cache: Has the first positions[i] positions of row i filled, and room for one more.
            tokens: [n] int64, the token at positions[i].
            positions: [n] int64.
            span: Attend over this many positions, > max(positions).
            shifts: [n] int64, rotary positions less positions; None: they are the same.

        Returns:
            Logits [n, vocab] float32.
        """
        config = self.config
        count = tokens.shape[0]
        rotated = config.num_heads + config.num_kv_heads
        group = config.num_heads // config.num_kv_heads
        turned = positions if shifts is None else positions + shifts
        rotary = self._rotary[turned].unsqueeze(1)
        rows = torch.arange(count)
        hidden = F.embedding(tokens, self.weights.embed)
        self._adapted = rows_by_adapter(self.adapters)
        mask = torch.zeros(count, span, dtype=hidden.dtype)
        mask.masked_fill_(torch.arange(span) > positions.unsqueeze(1), -torch.inf)
        mask = mask.view(count, 1, 1, span)
        keys, values = cache.tensor[:, :, :count, :, :span].unbind(1)
        for index in range(config.num_layers):
            qkv = self._qkv(index, hidden).view(count, -1, config.head_dim)
            _rotate(qkv[:, :rotated], rotary)
            new = qkv[:, config.num_heads :].view(count, 2, -1, config.head_dim)
            cache.by_position[index][rows, positions] = new
            # The query heads of one key head attend together, as if they were a short sequence.
            query = qkv[:, : config.num_heads].view(count, -1, group, config.head_dim)
            mixed = F.scaled_dot_product_attention(
                query, keys[index], values[index], attn_mask=mask
            )
            hidden = self._finish_layer(index, hidden, mixed.view(count, -1))
        return self.logits(self._norm(hidden, self.weights.final_norm))

    def routes(self, cache: KVCache, row: int) -> Sequence[npt.NDArray[np.int32]]:
        """Returns nothing: these architectures have no experts."""
        del cache, row
        return ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] float32 of normalized hidden states [n, hidden]."""
        return (hidden @ self.weights.head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.config.rms_norm_eps)

    def _qkv(self, index: int, hidden: Tensor) -> Tensor:
        layer = self.weights.layers[index]
        normed = self._norm(hidden, layer.input_norm)
        if layer.qkv_bias is None:
            return self._adapt(index, "qkv", normed, normed @ layer.qkv)
        return self._adapt(index, "qkv", normed, torch.addmm(layer.qkv_bias, normed, layer.qkv))

    def _finish_layer(self, index: int, hidden: Tensor, mixed: Tensor) -> Tensor:
        layer = self.weights.layers[index]
        hidden = self._adapt(index, "o", mixed, torch.addmm(hidden, mixed, layer.o))
        if layer.o_bias is not None:
            hidden += layer.o_bias
        normed = self._norm(hidden, layer.post_norm)
        both = self._adapt(index, "gate_up", normed, normed @ layer.gate_up)
        gate, up = both.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        return self._adapt(index, "down", inner, hidden.addmm_(inner, layer.down))

    def _adapt(self, index: int, matrix: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Adds to the outputs of a layer's matrix what the adapters of the rows add."""
        for rows, layers in self._adapted:
            if (pair := layers[index].get(matrix)) is not None:
                outputs[rows] += pair.of(inputs[rows])
        return outputs


def _rotate(heads: Tensor, rotary: Tensor) -> None:
    """Rotates neighboring pairs of the last dimension in place by complex factors."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.view(*heads.shape[:-1], -1, 2)).mul_(rotary)
        return
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    heads.copy_(torch.view_as_real(pairs * rotary).flatten(-2))


def _rotary_table(config: ModelConfig, max_length: int) -> Tensor:
    """exp(i * position * frequency), [max_length, head_dim / 2] complex64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is not None:
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the band
        # between them interpolated.
        wavelengths = 2 * math.pi / frequencies
        original = scaling.original_max_position_embeddings
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        frequencies = frequencies * (smooth + (1 - smooth) / scaling.factor)
    angles = torch.arange(max_length).float().unsqueeze(1) * frequencies
    return torch.polar(torch.ones_like(angles), angles)
