"""What an engine makes once: precision and shards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from areal.config.training import RefConfig, TrainEngineConfig
from areal.engines.model.packed import PackedCausalLM

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
    device: torch.device,
    compute: torch.dtype,
    master: torch.dtype,
    *,
    offload: bool = False,
) -> None:
    """Shards layers, then the rest, over all ranks; gradients are reduced in `master`.

    With `offload` the shards stay in host memory, and a layer is on the device while it computes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != master else None, reduce_dtype=master
    )
    pinned = device.type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    layer_classes = set(model.hf._no_split_modules or ())
    for module in list(model.hf.modules()):
        if type(module).__name__ in layer_classes:
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=place)
