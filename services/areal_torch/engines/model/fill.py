"""Gives a model on the meta device its weights: each rank allocates and reads its own part.

    source.build ──> parallel.apply ──> materialize ──> load_own, from a directory
    (shapes only)    (who has what)     (memory)        draw_own, from a seed

A rank holds its shards and, while it reads, one more tensor (or the tensors of one conversion,
where transformers keeps tensors in another shape than files do: the experts of one layer).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from areal.errors import InvalidInput
from areal_torch.engines.model import hub_names
from areal_torch.engines.model.tensor_directory import TensorDirectory

# Options of malloc.h, and the largest values that glibc itself would reach.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
_GATHERED = 1 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Returns a context in which the system gets freed tensors of 1 MiB and more back at once.

    glibc keeps what is freed, up to blocks of 32 MiB once one was freed, so that a start, which
    gathers layers one by one, would leave hundreds of MB with each rank. Training is faster with
    memory that is kept, so afterwards it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ:  # another libc, or a user's wish
        yield
        return
    mallopt(_MMAP_THRESHOLD, _GATHERED)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)


def materialize(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    """Allocates memory for a meta model's own shards; their content is undefined until filled.

    Tied parameters stay tied, and buffers that have values (rotary frequencies) keep them.

    Args:
        model: Already sharded, if it will be.
        device: Device of buffers.
        parameters_on: Device of parameters: the same, or the host if they are offloaded.
    """
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    keep = []  # so that no id is used twice
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                keep.append(parameter)
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=parameters_on)
    for module, name, buffer in buffers:
        made = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        module._buffers[name] = made
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]


@torch.no_grad()
def load_own(hf: Any, directory: Path) -> tuple[list[hub_names.Step], list[Any]]:
    """Reads this rank's part of every tensor of a Hub directory.

    Returns:
        How it was read, for `hub_names.remember`.

    Raises:
        InvalidInput: A tensor is unknown, missing, of another shape, quantized, or given twice,
            differently; nothing is changed.
    """
    live = hub_names.live_tensors(hf)
    with TensorDirectory(directory) as tensors:
        try:
            # First, because scales beside them would be unknown tensors.
            _expect_floats(tensors, (n for n, d in tensors.dtypes.items() if d.startswith("F")))
            steps, used = hub_names.import_steps(hf, tensors)
            for step in steps:
                if live[step.target].is_floating_point():
                    _expect_floats(tensors, step.names)
        except InvalidInput as error:
            raise InvalidInput(f"directory {str(directory)!r}: {error}") from None
        for step in steps:
            if step.converter is None:
                target = live[step.target]
                local(target).copy_(tensors.read(step.names[0], own_box(target)))
                continue
            for name, tensor in step.run(hf, map(tensors.read, step.names)):
                local(live[name]).copy_(tensor[own_box(live[name])])
    return steps, used


def _expect_floats(tensors: TensorDirectory, names: Iterable[str]) -> None:
    """Refuses numbers of 8 bits and integers, which mean nothing without their scales."""
    for name in names:
        if (dtype := tensors.dtypes[name]) not in _FLOATS:
            raise InvalidInput(
                f"tensor {name!r} has dtype {dtype}; expected one of {', '.join(_FLOATS)}: a "
                "bfloat16 copy of the model"
            )


@torch.no_grad()
def draw_own(hf: Any, skeleton: Any, seed: int) -> None:
    """Fills a model with random weights, the same for any number of ranks and any layout.

    Each module's weights are drawn whole, as transformers draws them, with a generator seeded with
    its name; then every rank takes its part.

    Args:
        hf: The model; its tensors have memory.
        skeleton: The same model on the meta device.
        seed: The run's seed.
    """
    live = hub_names.live_tensors(hf)
    for prefix, module, owner in _modules(skeleton, "", skeleton):
        owned = {
            name: f"{prefix}.{name}" if prefix else name
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and (f"{prefix}.{name}" if prefix else name) in live
        }
        if not owned:
            continue
        device = local(live[next(iter(owned.values()))]).device
        for name in owned:
            _replace(module, name, device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {prefix}".encode()) >> 1)
            owner._init_weights(module)
        for name, full in owned.items():
            local(live[full]).copy_(getattr(module, name)[own_box(live[full])])
            _replace(module, name, torch.device("meta"))


@torch.no_grad()
def make_buffers(hf: Any) -> None:
    """Computes the buffers that are not in a model's files: rotary frequencies, embedding scales.

    transformers does the same at the end of `from_pretrained`. A buffer may be a matter of its
    module or of one around it: Falcon-H1's decoder computes those of its layers.

    Raises:
        InvalidInput: No module computes one of them.
    """
    modules = list(_modules(hf, "", hf))
    missing = [
        (f"{prefix}.{name}", module, name)
        for prefix, module, _ in modules
        for name in sorted(module._non_persistent_buffers_set)
        if module._buffers[name] is not None
    ]
    for _, module, name in missing:
        _replace(module, name, torch.device("cpu"))
        _spoil(module._buffers[name])
    around = {full[:at] for full, _, _ in missing for at, c in enumerate(full) if c == "."} | {""}
    for prefix, module, owner in reversed(modules):
        if prefix in around and missing:
            owner._init_weights(module)  # on parameters, which are meta, this does nothing
    for full, module, name in missing:
        if _is_spoiled(module._buffers[name]):
            raise InvalidInput(
                f"model {type(hf).__name__} does not compute its buffer {full!r} when it is "
                "loaded; choose another model (docs/models.md)"
            )


def _spoil(buffer: Tensor | None) -> None:
    """Fills a buffer with a value that nothing computes."""
    assert buffer is not None
    if buffer.is_floating_point():
        buffer.fill_(float("nan"))
    elif buffer.dtype != torch.bool and not buffer.is_complex():
        buffer.fill_(torch.iinfo(buffer.dtype).max)


def _is_spoiled(buffer: Tensor | None) -> bool:
    assert buffer is not None
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    if buffer.dtype == torch.bool or buffer.is_complex() or not buffer.numel():
        return False
    return bool((buffer == torch.iinfo(buffer.dtype).max).all())


def own_box(tensor: Tensor) -> tuple[slice, ...]:
    """Returns this rank's part of a tensor: a range of each dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def local(tensor: Tensor) -> Tensor:
    """Returns the memory of that part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _modules(module: nn.Module, prefix: str, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields (name, module, the innermost transformers model around it, which can draw it)."""
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    yield prefix, module, owner
    for name, child in module.named_children():
        yield from _modules(child, f"{prefix}.{name}" if prefix else name, owner)


def _replace(module: nn.Module, name: str, device: torch.device) -> None:
    """Puts zeros, or nothing on the meta device, in the place of a module's own tensor."""
    parameter = module._parameters.get(name)
    if parameter is not None:
        zeros = torch.zeros_like(parameter, device=device)
        module._parameters[name] = nn.Parameter(zeros, parameter.requires_grad)
        return
    buffer = module._buffers[name]
    assert buffer is not None
    module._buffers[name] = torch.zeros_like(buffer, device=device)
