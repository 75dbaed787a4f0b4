"""Weights in the layout the forward pass wants, read from safetensors and checked name by name.

``load_weights`` is both the initial load and every update: it builds a complete new set and the
engine swaps the reference between two decode steps. A set is therefore never half written, and a
rejected folder leaves no trace.

Layout: projections are stored [in, out] (a decode step multiplies from the left), query, key and
value side by side, gate and up side by side. The rows of query and key are reordered so that the
two halves a rotary embedding pairs become neighbors (then the rotation is one complex product);
attention scores do not change when both sides are reordered alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_inference.model_config import ModelConfig, ModelError

_FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


class WeightError(ModelError):
    """A checkpoint folder does not hold exactly this model's tensors; names the tensor."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Shapes in terms of H hidden, Q query width, K key/value width, I inner."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [H, Q + 2K]
    qkv_bias: Tensor | None  # [Q + 2K]
    o: Tensor  # [Q, H]
    o_bias: Tensor | None  # [H]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [H, 2I]
    down: Tensor  # [I, H]


@dataclass(frozen=True, slots=True)
class Weights:
    """All parameters; ``views`` names each checkpoint tensor's place (see `_View`)."""

    embed: Tensor  # [vocab, H]
    head: Tensor  # [H, vocab]
    final_norm: Tensor  # [H]
    layers: tuple[LayerWeights, ...]
    views: dict[str, _View]

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each checkpoint tensor's bytes, in this engine's dtype and HF's layout."""
        return {name: view.digest() for name, view in self.views.items()}


@dataclass(frozen=True, slots=True)
class _View:
    """Where a checkpoint tensor lives: a view that, read in order, gives the tensor's order."""

    target: Tensor
    shape: tuple[int, ...]

    def write(self, source: Tensor) -> None:
        self.target.copy_(source.view(self.target.shape))

    def digest(self) -> str:
        flat = self.target.contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(flat.numpy().data).hexdigest()


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Read every tensor of the folder into a fresh set of weights.

    Args:
        folder: holds model.safetensors, or shards and model.safetensors.index.json.
        config: the running model; names and shapes must be exactly its own.
        dtype: type to store; floating-point checkpoints of another type are converted.

    Raises:
        WeightError: file missing or broken, tensor missing, unknown, wrong-shaped, not a float, or
            not finite.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with ExitStack() as stack, torch.inference_mode():
            source: dict[str, Any] = {}
            for file in _files(folder):
                try:
                    handle = stack.enter_context(safe_open(str(file), framework="pt"))
                except SafetensorError as error:
                    raise WeightError(f"{file}: not a complete safetensors file: {error}") from None
                for name in handle.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                    if name in source:
                        raise WeightError(f"{folder}: tensor {name} is in two files")
                    source[name] = handle
            expected = _shapes(config)
            _check(folder, source, expected, config)
            weights = _allocate(config, dtype, expected)
            for name, view in weights.views.items():
                tensor = source[name].get_tensor(name)
                # A sum is the cheapest pass that NaN and infinity survive (half could overflow).
                wide = torch.float32 if tensor.dtype == torch.float16 else None
                if not torch.isfinite(tensor.sum(dtype=wide)):
                    raise WeightError(f"{folder}: tensor {name} holds NaN or infinity")
                view.write(tensor)
            if config.tie_word_embeddings:
                weights.head.copy_(weights.embed.t())
                _check_tied_head(folder, source)
            return weights
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{folder}: {' '.join(str(error).split())}") from None


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise WeightError(f"{folder}: no model.safetensors and no {index.name}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise WeightError(f"{index}: expected a JSON object with a weight_map") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise WeightError(f"{index}: shard {name!r} is not a file in this folder")
    return [folder / name for name in names]


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of this model, in checkpoint order."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide = config.num_heads * config.head_dim
    narrow = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBED: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        for name, out, width in (
            ("self_attn.q_proj", wide, hidden),
            ("self_attn.k_proj", narrow, hidden),
            ("self_attn.v_proj", narrow, hidden),
            ("self_attn.o_proj", hidden, wide),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{at}{name}.weight"] = (out, width)
            if config.o_bias if name.endswith("o_proj") else config.qkv_bias and "attn" in name:
                shapes[f"{at}{name}.bias"] = (out,)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def _check(
    folder: Path, source: dict[str, Any], expected: dict[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Everything that can be known from the headers, before any tensor is read."""
    for name, shape in expected.items():
        if name not in source:
            raise WeightError(f"{folder}: tensor {name} is missing, expected shape {list(shape)}")
        header = source[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise WeightError(
                f"{folder}: tensor {name} has shape {list(header.get_shape())}, "
                f"expected {list(shape)}"
            )
        if header.get_dtype() not in _FLOAT_TYPES:
            raise WeightError(
                f"{folder}: tensor {name} has dtype {header.get_dtype()}, "
                f"expected one of {sorted(_FLOAT_TYPES)}"
            )
    for name in source.keys() - expected.keys():
        tied_head = config.tie_word_embeddings and name == _HEAD
        # Old checkpoints carry this buffer; it follows from config.json.
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            raise WeightError(f"{folder}: tensor {name} is unknown to {config.architecture}")


def _check_tied_head(folder: Path, source: dict[str, Any]) -> None:
    """A tied checkpoint may repeat the embedding as lm_head, but not contradict it."""
    if _HEAD in source and not torch.equal(
        source[_HEAD].get_tensor(_HEAD), source[_EMBED].get_tensor(_EMBED)
    ):
        raise WeightError(f"{folder}: tensor {_HEAD} differs from {_EMBED}, expected them tied")


def _allocate(
    config: ModelConfig, dtype: torch.dtype, expected: dict[str, tuple[int, ...]]
) -> Weights:
    """Empty weights, and the view of each checkpoint tensor in them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide = config.num_heads * config.head_dim
    narrow = config.num_kv_heads * config.head_dim
    total = wide + 2 * narrow

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    embed, head, final_norm = (
        empty(config.vocab_size, hidden),
        empty(hidden, config.vocab_size),
        (empty(hidden)),
    )
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(hidden, total),
            qkv_bias=empty(total) if config.qkv_bias else None,
            o=empty(wide, hidden),
            o_bias=empty(hidden) if config.o_bias else None,
            post_norm=empty(hidden),
            gate_up=empty(hidden, 2 * inner),
            down=empty(inner, hidden),
        )
        for _ in range(config.num_layers)
    )
    targets: dict[str, Tensor] = {_EMBED: embed, "model.norm.weight": final_norm}
    if not config.tie_word_embeddings:
        targets[_HEAD] = head.t()
    for index, layer in enumerate(layers):
        for name, target in _layer_targets(layer, config):
            targets[f"model.layers.{index}.{name}"] = target
    views = {name: _View(targets[name], shape) for name, shape in expected.items()}
    return Weights(embed=embed, head=head, final_norm=final_norm, layers=layers, views=views)


def _layer_targets(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    wide = config.num_heads * config.head_dim
    narrow = config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    yield "self_attn.o_proj.weight", layer.o.t()
    yield "mlp.gate_proj.weight", layer.gate_up[:, :inner].t()
    yield "mlp.up_proj.weight", layer.gate_up[:, inner:].t()
    yield "mlp.down_proj.weight", layer.down.t()
    start = 0
    for name, width, rotary in (("q", wide, True), ("k", narrow, True), ("v", narrow, False)):
        matrix = layer.qkv[:, start : start + width].t()
        yield (
            f"self_attn.{name}_proj.weight",
            _interleave(matrix, config.head_dim) if rotary else matrix,
        )
        if layer.qkv_bias is not None:
            bias = layer.qkv_bias[start : start + width]
            yield (
                f"self_attn.{name}_proj.bias",
                _interleave(bias, config.head_dim) if rotary else bias,
            )
        start += width
    if layer.o_bias is not None:
        yield "self_attn.o_proj.bias", layer.o_bias


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """View of [heads * head_dim, ...] storage rows (i, half) in checkpoint order (half, i)."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2)
