"""What an engine makes once: precision and shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from areal.config.training import RefConfig, TrainEngineConfig
from areal.engines.model.packed import PackedCausalLM
from areal.engines.parallel.mesh import Mesh
from areal.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_precision(
    config: TrainEngineConfig | RefConfig, device: torch.device
) -> tuple[torch.dtype, torch.dtype, bool]:
    """(dtype to compute in, dtype of the master weights, whether to use flash attention)."""
    on_gpu = device.type == "cuda"
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    compute = DTYPES[name]
    if isinstance(config, RefConfig):
        master = compute  # nothing updates them
    else:  # the larger of the two: never below the compute precision
        master = max(compute, torch.float32, key=lambda dtype: dtype.itemsize)
    flash = config.attn_impl == "flash_attention_2"
    if config.attn_impl == "auto" and on_gpu and compute == torch.bfloat16:
        from transformers.utils import is_flash_attn_2_available

        flash = bool(is_flash_attn_2_available())
    return compute, master, flash


def shard(
    model: PackedCausalLM,
    mesh: Mesh,
    compute: torch.dtype,
    master: torch.dtype,
    *,
    offload: bool = False,
) -> None:
    """Shards layers, then the rest, over ranks; gradients are reduced in `master`.

    With `offload` the shards stay in host memory, and a layer is on the device while it computes.

    Raises:
        InvalidInput: the model does not say what its layers are: its ranks would gather all of it.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != master else None, reduce_dtype=master
    )
    pinned = mesh.shards.device_type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for module in [*_layers(model.hf), model]:
        fully_shard(module, mesh=mesh.shards, mp_policy=policy, offload_policy=place)


def _layers(hf: Any) -> list[nn.Module]:
    """The modules that are gathered one at a time."""
    classes = set(hf._no_split_modules or ())
    layers = [module for module in hf.modules() if type(module).__name__ in classes]
    if not layers:
        raise InvalidInput(
            f"model {type(hf).__name__} has no layer of the classes it names as such "
            f"({', '.join(sorted(classes)) or 'none'}): each rank would gather the whole model"
        )
    return layers
