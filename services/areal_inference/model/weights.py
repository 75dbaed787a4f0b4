"""Weights in the layout the forward pass wants, read from a source and checked name by name.

``load_weights`` is both the initial load and every update: it fills a complete set that no one uses
(a new one, or the one before last) and the engine swaps the reference between two decode steps. So
what serves is never half written, and a rejected source leaves no trace.

Layout: projections are [in, out] (a decode step multiplies from the left), query, key and value
side by side, gate and up side by side. Their type and their order in memory are those that the
machine multiplies fast (`areal_torch.models.cpu_matmul`); what is read, summed and sent to others
has the type of the checkpoint, whose values the parameters keep. The rows of query and key are
reordered so that the two halves a rotary embedding pairs become neighbors (then the rotation is one
complex product); attention scores do not change when both sides are reordered alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor, nn

from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.weights.manifest import PolicyVersion, WeightTensor
from areal.weights.publisher import TransportError, in_threads
from areal_inference.model.config import ModelConfig, ServedModel
from areal_inference.model.sources import (
    Published,
    Source,
    Stored,
    StoreSource,
    WeightError,
    open_changes,
    open_source,
)
from areal_inference.model.vision import make_tower
from areal_torch.models.cpu_matmul import Storage

__all__ = [
    "CheckpointModel",
    "LayerWeights",
    "View",
    "WeightError",
    "WeightSet",
    "Weights",
    "load_weights",
    "model_shapes",
]

FLOAT_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
TYPE_NAMES = {dtype: name for name, dtype in FLOAT_TYPES.items()}
_BLOCK_ROWS = 64
"""Rows moved at once between a checkpoint's order or type and ours: the lines of both stay in the
cache, which makes a transpose four times as fast as moving the matrix in one call."""
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"
_TOWER = "visual."


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


@dataclass(slots=True, kw_only=True)
class WeightSet:
    """All tensors of a checkpoint; ``views`` names each one's place (see `View`)."""

    views: dict[str, View]
    sums: dict[str, str] = field(default_factory=dict)
    """Checksums of what the set holds; empty until asked for."""
    published: Published | None = None
    """The version that the set equals bit for bit, if it was pulled whole."""

    def checksums(self) -> dict[str, str]:
        """Returns the xxh3-128 of each checkpoint tensor, in this model's dtype and HF's layout.

        Read back from the parameters' memory, once for each time the set is filled.
        """
        if not self.sums:
            digests = in_threads(lambda view: view.digest(), self.views.values())
            self.sums.update(zip(self.views, digests, strict=True))
        return self.sums

    def emptied(self) -> WeightSet:
        """Returns a set of the same kind that holds nothing."""
        return WeightSet(views={})

    def digest(self) -> str:
        """`PolicyVersion.digest` of these weights, if they were published in this dtype."""
        tensors = tuple(
            WeightTensor(name, self.views[name].shape, TYPE_NAMES[self.views[name].dtype], digest)
            for name, digest in self.checksums().items()
        )
        return PolicyVersion(0, 0, "", tensors=tensors).digest

    def copy_of(self, name: str) -> memoryview:
        """Returns a copy of a checkpoint tensor's bytes, in this model's dtype."""
        return self.views[name].copy()

    def part_of(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of a checkpoint tensor, in this model's dtype."""
        return self.views[name].part(begin, end)


class CheckpointModel(ServedModel):
    """A model whose own checkpoint says what tensors it has (`plain.PlainConfig`)."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of a version, by the checkpoint's names."""
        raise NotImplementedError

    @property
    def repeated(self) -> Mapping[str, str]:
        """Returns second names of tied tensors -> the name in `shapes`."""
        raise NotImplementedError

    def allocate(self) -> WeightSet:
        """Returns a set whose tensors have memory and no content."""
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class Weights(WeightSet):
    """All parameters of the fast decoder."""

    embed: Tensor  # [vocab, H]
    head: Tensor  # [H, vocab]
    final_norm: Tensor  # [H]
    layers: tuple[LayerWeights, ...]
    tower: nn.Module | None = None
    """For a model that sees: transformers' vision tower, whose parameters are also views."""

    def emptied(self) -> Weights:
        """Returns a set of the same dtype that holds nothing."""
        none = self.embed.new_empty(0)
        return Weights(views={}, embed=none, head=none, final_norm=none, layers=())


@dataclass(frozen=True, slots=True)
class View:
    """Where a checkpoint tensor is: a view that, read in order, gives the tensor's order."""

    target: Tensor
    shape: tuple[int, ...]
    published_as: torch.dtype | None = None
    """Type of the tensor in published versions; None: the target's. The target holds its values,
    possibly in a wider type."""
    finite: bool = True
    """Whether all values must be finite. False for a part that is not used here, because some
    buffers contain infinity."""

    @property
    def dtype(self) -> torch.dtype:
        return self.published_as or self.target.dtype

    def parts(self) -> Iterator[Tensor]:
        """The view in pieces, in order."""
        if self.target.dim() < 2:
            yield self.target
            return
        rows = self.target[0].numel() // self.target.shape[-1]
        yield from torch.split(self.target, max(1, _BLOCK_ROWS // rows))

    def data(self) -> Iterator[memoryview]:
        """The tensor's bytes in pieces, in order."""
        for part in self.parts():
            flat = part.to(self.dtype).contiguous().view(-1)
            yield flat.view(torch.uint8).numpy().data

    def digest(self) -> str:
        digest = xxhash.xxh3_128()
        for data in self.data():
            digest.update(data)
        return digest.hexdigest()

    def part(self, begin: int, end: int) -> bytes:
        found, offset = bytearray(), 0
        for part in self.parts():
            size = part.numel() * self.dtype.itemsize
            if offset < end and begin < offset + size:
                data = part.to(self.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
                found += data[max(0, begin - offset) : end - offset]
            offset += size
        return bytes(found)

    def copy(self) -> memoryview:
        flat, offset = torch.empty(math.prod(self.shape), dtype=self.dtype), 0
        for part in self.parts():
            flat[offset : offset + part.numel()].view(part.shape).copy_(part)
            offset += part.numel()
        return flat.view(torch.uint8).numpy().data


@torch.inference_mode()
def load_weights(
    location: str,
    config: ServedModel,
    dtype: torch.dtype,
    *,
    storage: Storage | None = None,
    headers: Mapping[str, str] | None = None,
    spare: WeightSet | None = None,
    held: WeightSet | None = None,
    source: Source | None = None,
) -> WeightSet:
    """Reads every tensor of a source into a set of weights.

    A version that was published as what changed since `held` is made from that; when the delta does
    not fit, or is damaged, and for all others, the whole snapshot is read.

    Args:
        location: A folder with model.safetensors, or shards and model.safetensors.index.json; or
            a version of a weight store, http://host:port/versions/NAME.
        config: The running model; names and shapes must be exactly its own.
        dtype: The model's type; floating-point checkpoints of another type are rounded to it.
        storage: Type and order in memory of a new set; None: `dtype`, [in, out].
        headers: For the weight store: the bearer token.
        spare: A set that no one uses any more, to be filled; None: a new one.
        held: The set in use, only read.
        source: Opened source at `location`; None: it is opened here.

    Raises:
        WeightError: File missing or broken, tensor missing, unknown, wrong-shaped, not a float, not
            finite, or not the one that the manifest names.
        TransportError: The weight store is away or sends other bytes than asked for.
    """
    expected = model_shapes(config)
    if spare is None and isinstance(config, ModelConfig):
        spare = _allocate(config, dtype, storage or Storage(dtype), expected)
    elif spare is None:
        spare = _checkpoint(config).allocate()
    log = get_logger(__name__)
    if held is not None and source is None:
        try:
            changes = open_changes(location, headers or {}, held.digest, held.copy_of)
            if changes is not None:
                _load(location, changes, config, expected, spare)
                log.info("delta_applied", source=location)
                return spare
        except (InvalidInput, TransportError) as error:
            log.warning("delta_unusable", cause=str(error))
    source = source or open_source(location, headers or {})
    try:
        _load(location, source, config, expected, spare)
    finally:
        source.close()
    return spare


def _load(
    location: str,
    source: Source,
    config: ServedModel,
    expected: dict[str, tuple[int, ...]],
    weights: WeightSet,
) -> None:
    """Fills a set from a source."""
    _check(location, source, expected, config)
    weights.sums.clear()
    weights.published = None

    def fill(names: list[str]) -> None:
        # Inference mode belongs to a thread.
        with torch.inference_mode():
            for name in names:
                _fill(location, source, source.tensors[name], weights.views[name])

    in_threads(fill, source.together(weights.views))
    if isinstance(weights, Weights):
        _tie(weights, tied=bool(_repeated(config)))
    for second, first in _repeated(config).items():
        _check_repeated(location, source, second, first, weights)
    if isinstance(source, StoreSource) and all(
        name in weights.views
        and stored.place.dtype == TYPE_NAMES[weights.views[name].dtype]
        and stored.digest
        for name, stored in source.tensors.items()
    ):
        weights.published = source.published


def _tie(weights: Weights, *, tied: bool) -> None:
    if tied and weights.head.data_ptr() != weights.embed.data_ptr():
        _copy_rows(weights.embed, weights.head.t())


def _copy_rows(source: Tensor, target: Tensor) -> None:
    for to, rows in zip(
        torch.split(target, _BLOCK_ROWS), torch.split(source, _BLOCK_ROWS), strict=True
    ):
        to.copy_(rows)


def _fill(location: str, source: Source, stored: Stored, view: View) -> None:
    """Checks and copies one tensor, a block at a time while the block is in the cache."""
    data = source.read(stored)
    place = stored.place
    flat = torch.frombuffer(data, dtype=FLOAT_TYPES[place.dtype])
    # A sum is the cheapest pass that NaN and infinity survive (half could overflow).
    wide = torch.float32 if flat.dtype == torch.float16 else None
    digest, total, offset = xxhash.xxh3_128(), 0.0, 0
    for part in view.parts():
        block = flat[offset : offset + part.numel()]
        start = offset * flat.element_size()
        digest.update(data[start : start + block.numel() * flat.element_size()])
        total += float(block.sum(dtype=wide))
        part.copy_(block.view(part.shape).to(view.dtype))
        offset += part.numel()
    if stored.digest and digest.hexdigest() != stored.digest:
        raise WeightError(
            f"{location}: tensor {place.name} has digest {digest.hexdigest()[:16]}…, expected "
            f"{stored.digest[:16]}…: not the one that was published"
        )
    if view.finite and not math.isfinite(total):
        raise WeightError(f"{location}: tensor {place.name} holds NaN or infinity")


def _checkpoint(config: ServedModel) -> CheckpointModel:
    assert isinstance(config, CheckpointModel), "no third kind"
    return config


def _repeated(config: ServedModel) -> Mapping[str, str]:
    """Returns second names of tied tensors, which a checkpoint may have, and the first names."""
    if isinstance(config, ModelConfig):
        return {_HEAD: _EMBED} if config.tie_word_embeddings else {}
    return _checkpoint(config).repeated


def model_shapes(config: ServedModel) -> dict[str, tuple[int, ...]]:
    """Returns checkpoint names and shapes of this model, in checkpoint order."""
    if not isinstance(config, ModelConfig):
        return _checkpoint(config).shapes
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
    if config.vision is not None:
        with torch.device("meta"):
            tower = make_tower(config, torch.float32)
        assert tower is not None, "of a model that sees"
        shapes |= {f"{_TOWER}{name}": tuple(p.shape) for name, p in tower.named_parameters()}
    return shapes


def _check(
    location: str, source: Source, expected: dict[str, tuple[int, ...]], config: ServedModel
) -> None:
    """Checks everything that the headers show, before any tensor is read."""
    for name, shape in expected.items():
        if name not in source.tensors:
            raise WeightError(f"{location}: tensor {name} is missing, expected shape {list(shape)}")
        place = source.tensors[name].place
        if place.shape != shape:
            raise WeightError(
                f"{location}: tensor {name} has shape {list(place.shape)}, expected {list(shape)}"
            )
        if place.dtype not in FLOAT_TYPES:
            raise WeightError(
                f"{location}: tensor {name} has dtype {place.dtype}, "
                f"expected one of {sorted(FLOAT_TYPES)}"
            )
    for name in source.tensors.keys() - expected.keys():
        # Old checkpoints carry this buffer; it follows from config.json.
        if name not in _repeated(config) and not name.endswith("rotary_emb.inv_freq"):
            raise WeightError(f"{location}: tensor {name} is unknown to {config.architecture}")


def _check_repeated(
    location: str, source: Source, second: str, first: str, weights: WeightSet
) -> None:
    """A tied checkpoint may repeat the embedding as lm_head, but not contradict it."""
    stored = source.tensors.get(second)
    if stored is None:
        return
    place, view = stored.place, weights.views[first]
    if place.dtype not in FLOAT_TYPES or place.shape != view.shape:
        equal = False
    else:
        repeated = torch.frombuffer(source.read(stored), dtype=FLOAT_TYPES[place.dtype])
        equal = all(
            torch.equal(rows.to(view.dtype).to(own.dtype), own)
            for rows, own in zip(
                torch.split(repeated.view(place.shape), _BLOCK_ROWS), view.parts(), strict=True
            )
        )
    if not equal:
        raise WeightError(f"{location}: tensor {second} differs from {first}, expected them tied")


def _allocate(
    config: ModelConfig, dtype: torch.dtype, storage: Storage, expected: dict[str, tuple[int, ...]]
) -> Weights:
    """Allocates empty weights; also returns the view of each checkpoint tensor in them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide = config.num_heads * config.head_dim
    narrow = config.num_kv_heads * config.head_dim
    total = wide + 2 * narrow

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=storage.dtype)

    embed, final_norm = empty(config.vocab_size, hidden), empty(hidden)
    one_matrix = config.tie_word_embeddings and storage.transposed
    head = embed.t() if one_matrix else storage.matrix(hidden, config.vocab_size)
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=storage.matrix(hidden, total),
            qkv_bias=empty(total) if config.qkv_bias else None,
            o=storage.matrix(wide, hidden),
            o_bias=empty(hidden) if config.o_bias else None,
            post_norm=empty(hidden),
            gate_up=storage.matrix(hidden, 2 * inner),
            down=storage.matrix(inner, hidden),
        )
        for _ in range(config.num_layers)
    )
    targets: dict[str, Tensor] = {_EMBED: embed, "model.norm.weight": final_norm}
    if not config.tie_word_embeddings:
        targets[_HEAD] = head.t()
    for index, layer in enumerate(layers):
        for name, target in _layer_targets(layer, config):
            targets[f"model.layers.{index}.{name}"] = target
    tower = make_tower(config, storage.dtype)
    if tower is not None:
        targets |= {f"{_TOWER}{name}": p.data for name, p in tower.named_parameters()}
    views = {name: View(targets[name], shape, dtype) for name, shape in expected.items()}
    return Weights(
        embed=embed, head=head, final_norm=final_norm, layers=layers, views=views, tower=tower
    )


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
            interleave(matrix, config.head_dim) if rotary else matrix,
        )
        if layer.qkv_bias is not None:
            bias = layer.qkv_bias[start : start + width]
            yield (
                f"self_attn.{name}_proj.bias",
                interleave(bias, config.head_dim) if rotary else bias,
            )
        start += width
    if layer.o_bias is not None:
        yield "self_attn.o_proj.bias", layer.o_bias


def interleave(rows: Tensor, head_dim: int) -> Tensor:
    """View of [heads * head_dim, ...] storage rows (i, half) in checkpoint order (half, i)."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2)
