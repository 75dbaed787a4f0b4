"""Adapters (LoRA) beside the weights: read from a version's folder, and in the decoder's layout.

    y = W x + alpha / rank * B (A x)      W: the weights that serve;  A, B: the request's adapter

Requests with different adapters, or none, are computed together: the product with W is one for all
rows, and each adapter adds its own to the rows of its requests.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.config.transports import in_object_store
from areal.errors import InvalidInput
from areal.weights.adapters import paired, split_name
from areal.weights.fetch import fetch_version
from areal.weights.manifest import ADAPTER_CONFIG, ADAPTER_FILE, MANIFEST, read_manifest
from areal.weights.safetensors import digest_of, read_layout
from areal_inference.model.config import ModelConfig
from areal_inference.model.weights import FLOAT_TYPES, interleave


@dataclass(frozen=True, slots=True)
class Pair:
    """Both matrices of one layer, to multiply from the left; `up` contains alpha / rank."""

    down: Tensor  # [in, rank]
    up: Tensor  # [rank, out]

    def of(self, inputs: Tensor) -> Tensor:
        """Returns what it adds, [rows, out], for inputs [rows, in]."""
        return (inputs @ self.down) @ self.up


Pairs = Mapping[str, Pair]
"""Pairs of matrices by module, with the checkpoint's names."""


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """An adapter that has been loaded."""

    name: str
    path: str
    parts: Any
    """The adapter's matrices, in the form that the decoder takes."""
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Requests share prompt work only if this is equal; a name may be reused."""


def read_adapter(location: str, headers: Mapping[str, str], dtype: torch.dtype, most: int) -> Pairs:
    """Reads an adapter; blocking.

    Args:
        location: A folder as peft writes it, or a published version in a store.
        headers: Those that a weight store requires.
        dtype: To compute in.
        most: Highest rank.

    Raises:
        InvalidInput: It is none, is damaged, or its rank is higher.
        TransportError: The store is away, or refuses.
    """
    if not (location.startswith("http://") or in_object_store(location)):
        return _read_folder(Path(location), dtype, most)
    with tempfile.TemporaryDirectory(prefix="areal-adapter-") as folder:
        version = fetch_version(location, headers, Path(folder))
        return _read_folder(Path(version.path), dtype, most)


def _read_folder(folder: Path, dtype: torch.dtype, most: int) -> Pairs:
    file = folder / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_bytes())
        rank, alpha = config["r"], config["lora_alpha"]
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidInput(f"{file}: expected a JSON object with r and lora_alpha") from None
    if type(rank) is not int or not 1 <= rank <= most:
        raise InvalidInput(f"{file}: r {rank!r}: expected 1 to {most} (--max-lora-rank)")
    if type(alpha) not in (int, float) or not 0 < alpha < 1e9:
        raise InvalidInput(f"{file}: lora_alpha {alpha!r}: expected a number above 0")
    for key in ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise InvalidInput(f"{file}: {key}: not supported by this engine")
    tensors = _read_tensors(folder)
    sides = {split_name(name): tensor.float() for name, tensor in tensors.items()}
    shapes = paired({name: tuple(t.shape) for name, t in tensors.items()}, str(folder))
    for module, (down, up) in shapes.items():
        if (down[0], up[1]) != (rank, rank):
            raise InvalidInput(f"{folder}: {module}: A {list(down)}, B {list(up)}: expected {rank}")
    return {
        module: Pair(
            sides[module, "A"].t().contiguous().to(dtype),
            (sides[module, "B"].t() * (alpha / rank)).contiguous().to(dtype),
        )
        for module in shapes
    }


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads all tensors of the safetensors file; checks them if there is a manifest."""
    file = folder / ADAPTER_FILE
    layout = read_layout(file)
    known = {}
    if (folder / MANIFEST).is_file():
        known = {tensor.name: tensor.digest for tensor in read_manifest(folder).tensors}
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    found = {}
    for place in layout.places:
        if (dtype := FLOAT_TYPES.get(place.dtype)) is None:
            raise InvalidInput(f"{file}: tensor {place.name} has dtype {place.dtype}")
        data = bytearray(raw[place.begin : place.end])
        wanted = known.get(place.name, "")
        if known and digest_of(data) != wanted:
            raise InvalidInput(f"{file}: tensor {place.name} is not the one that was published")
        if not data:
            raise InvalidInput(f"{file}: tensor {place.name} is empty")
        tensor = torch.frombuffer(data, dtype=dtype).view(place.shape)
        if not torch.isfinite(tensor).all():
            raise InvalidInput(f"{file}: tensor {place.name}: expected finite numbers")
        found[place.name] = tensor
    return found


def fused(pairs: Pairs, config: ModelConfig) -> list[dict[str, Pair]]:
    """Returns the pairs of each layer by the matrix of `weights.LayerWeights` that they go with.

    Raises:
        InvalidInput: The model has no such layer, or one of another shape.
    """
    wide = config.num_heads * config.head_dim
    narrow = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    # Name: matrix, inputs, width of the matrix, first column, columns, whether rotary.
    places = {
        "self_attn.q_proj": ("qkv", hidden, wide + 2 * narrow, 0, wide, True),
        "self_attn.k_proj": ("qkv", hidden, wide + 2 * narrow, wide, narrow, True),
        "self_attn.v_proj": ("qkv", hidden, wide + 2 * narrow, wide + narrow, narrow, False),
        "self_attn.o_proj": ("o", wide, hidden, 0, hidden, False),
        "mlp.gate_proj": ("gate_up", hidden, 2 * inner, 0, inner, False),
        "mlp.up_proj": ("gate_up", hidden, 2 * inner, inner, inner, False),
        "mlp.down_proj": ("down", inner, hidden, 0, hidden, False),
    }
    parts: list[dict[str, list[Pair]]] = [{} for _ in range(config.num_layers)]
    for module, pair in pairs.items():
        words = module.split(".", 3)
        place = places.get(words[3]) if words[:2] == ["model", "layers"] and words[3:] else None
        index = int(words[2]) if place and words[2].isdecimal() else config.num_layers
        if place is None or index >= config.num_layers:
            raise InvalidInput(f"adapter for {module}: this model has no such linear layer")
        matrix, inputs, width, begin, columns, rotary = place
        if (pair.down.shape[0], pair.up.shape[1]) != (inputs, columns):
            raise InvalidInput(
                f"adapter for {module}: {pair.up.shape[1]} x {pair.down.shape[0]}, expected "
                f"{columns} x {inputs}"
            )
        own = pair.up.t()
        if rotary:
            ours = torch.empty_like(own, memory_format=torch.contiguous_format)
            view = interleave(ours, config.head_dim)
            view.copy_(own.reshape(view.shape))
            own = ours
        up = torch.zeros(pair.up.shape[0], width, dtype=pair.up.dtype)
        up[:, begin : begin + columns] = own.t()
        parts[index].setdefault(matrix, []).append(Pair(pair.down, up))
    return [
        {
            matrix: Pair(torch.cat([p.down for p in some], 1), torch.cat([p.up for p in some]))
            for matrix, some in layer.items()
        }
        for layer in parts
    ]


def rows_by_adapter(
    adapters: Sequence[Adapter | None], length: int = 1
) -> list[tuple[Tensor | slice, Any]]:
    """Returns (rows, parts) of each adapter, for `length` rows of each request in order."""
    distinct = {id(each): each for each in adapters if each is not None}
    if not distinct:
        return []
    if len(distinct) == 1 and None not in adapters:
        return [(slice(None), next(iter(distinct.values())).parts)]
    found: list[tuple[Tensor | slice, Any]] = []
    for adapter in distinct.values():
        numbers = torch.tensor([n for n, each in enumerate(adapters) if each is adapter])
        rows = (numbers.unsqueeze(1) * length + torch.arange(length)).view(-1)
        found.append((rows, adapter.parts))
    return found
