"""What an engine sets up once: the precision, and each rank's part of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from areal.config.allocation import Layout
from areal.config.training import RefConfig, TrainEngineConfig
from areal.errors import ConfigError, InvalidInput
from areal_torch.engines.model import guards
from areal_torch.engines.model.attention.ulysses import Context
from areal_torch.engines.model.layer_types import layer_configs
from areal_torch.engines.model.packed import PackedCausalLM
from areal_torch.engines.model.precision import float32_tensors
from areal_torch.engines.model.recurrent import kind_of, modules_of
from areal_torch.engines.parallel import plans
from areal_torch.engines.parallel.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_precision(
    config: TrainEngineConfig | RefConfig, device: torch.device
) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtype to compute in and the dtype of the master weights."""
    on_gpu = device.type == "cuda"
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if on_gpu else "float32")
    compute = DTYPES[name]
    if isinstance(config, RefConfig):
        master = compute  # nothing updates them
    else:  # the larger of the two: never below the compute precision
        master = max(compute, torch.float32, key=lambda dtype: dtype.itemsize)
    return compute, master


def parallelize(
    model: PackedCausalLM,
    mesh: Mesh,
    compute: torch.dtype,
    master: torch.dtype,
    *,
    offload: bool = False,
) -> None:
    """Spreads a model over ranks: matrices, experts and tokens; then shards the rest with FSDP.

    Its parameters may be on the meta device. Gradients are reduced in `master` and averaged over
    the ranks whose tokens differ. With `offload` the shards stay in host memory, and a layer is on
    the device while it computes.

    Raises:
        ConfigError: The model's heads or experts cannot be shared evenly, or the layout shares
            tokens or matrices and the model has recurrent layers.
        InvalidInput: The model does not say what its layers are, so that its ranks would gather all
            of it; or transformers has no plan for it.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    layout, hf = mesh.layout, model.hf
    layers = decoder_layers(hf)
    _check_sizes(hf, layout)
    if layout.tensor > 1:
        plans.spread_matrices(hf, mesh)
    experts = plans.spread_experts(hf, mesh) if layout.experts > 1 else []
    if mesh.context_group is not None:
        model.context = Context(mesh.context_group)
    # Inputs stay as they are: rotary embeddings or a residual may be of more precision on purpose.
    policy = MixedPrecisionPolicy(
        param_dtype=compute if compute != master else None,
        reduce_dtype=master,
        cast_forward_inputs=False,
    )
    pinned = mesh.shards.device_type == "cuda"
    place = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    for module in experts:
        assert mesh.expert_shards is not None
        fully_shard(module, mesh=mesh.expert_shards, mp_policy=policy, offload_policy=place)
        # The tokens of the whole expert group have come here: fewer ranks, as many tokens.
        own: Any = module
        factor = float(layout.averaged)
        if mesh.expert_shards.size() == 1 and master == torch.float64:
            factor = factor**0.5  # torch divides twice by it: one rank, more than 32 bits
        own.set_gradient_divide_factor(factor)
        if mesh.expert_shards.size() > 1:
            # Else the factor goes into the collective, which gloo cannot, and NCCL not in bfloat16.
            own.set_force_sum_reduction_for_comms(True)
    shard = partial(fully_shard, mesh=mesh.shards, offload_policy=place)
    exact = compute.itemsize == 2 and bool(_float32_parameters(hf))
    if exact:
        _check_unsharded(hf)
        # FSDP casts all that it gathers together, so these are a group of their own, which the
        # decoder gathers. A call leaves out what is sharded inside: layers, around them, come last.
        of_layers = {parameter for layer in layers for parameter in layer.parameters()}
        shard(model, mp_policy=policy, ignored_params=of_layers | _float32_parameters(hf))
        widest = MixedPrecisionPolicy(reduce_dtype=master, cast_forward_inputs=False)
        others = set(model.parameters()) - _float32_parameters(hf)
        shard(guards.decoder_of(hf), mp_policy=widest, ignored_params=others)
    # Each call has put others in their place.
    left = _float32_parameters(hf) if exact else None
    for module in layers if exact else [*layers, model]:
        shard(module, mp_policy=policy, ignored_params=left)


def unsharded(hf: Any) -> dict[str, nn.Parameter]:
    """Returns 16-bit parameters trained in float32 outside the decoder, in no group of FSDP."""
    inside = set(guards.decoder_of(hf).parameters())
    exact = _float32_parameters(hf) - inside
    return {name: p for name, p in hf.named_parameters() if p in exact and p.requires_grad}


def _check_unsharded(hf: Any) -> None:
    if (alone := unsharded(hf)) and dist.get_world_size() > 1:
        raise ConfigError(
            f"model {type(hf).__name__} keeps {next(iter(alone))} in float32, outside its decoder, "
            "where gradients are not summed over ranks; expected actor.dtype=float32, or one rank"
        )


def _float32_parameters(hf: Any) -> set[nn.Parameter]:
    names = float32_tensors(hf)
    return {parameter for name, parameter in hf.named_parameters() if name in names}


def _check_sizes(hf: Any, layout: Layout) -> None:
    config = hf.config.get_text_config()
    recurrent = sorted({kind_of(module) for _, module in modules_of(guards.decoder_of(hf))})
    if recurrent and layout.per_share > 1:
        raise ConfigError(
            f"trainer layout '{layout}': t and c spread attention only, and model "
            f"{type(hf).__name__} has layers of another kind ({', '.join(recurrent)}); expected a "
            "layout without t and c"
        )
    experts = (getattr(config, key, None) for key in ("num_experts", "num_local_experts"))
    count = int(next(filter(None, experts), 0))
    for each in layer_configs(config):
        heads = int(getattr(each, "num_attention_heads", None) or 1)
        layout.check_model(heads, int(getattr(each, "num_key_value_heads", None) or heads), count)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """The modules that are gathered one at a time; none is inside another.

    Raises:
        InvalidInput: There are none.
    """
    classes = guards.layer_classes(hf)
    layers, inside = list[nn.Module](), set[nn.Module]()
    for module in hf.modules():  # the outer one first
        if module in inside or type(module).__name__ not in classes:
            continue
        if any(True for _ in module.parameters()):
            layers.append(module)
            inside |= set(module.modules())
    if not layers:
        raise InvalidInput(
            f"model {type(hf).__name__} has none of the layer classes that it names "
            f"({', '.join(sorted(classes)) or 'none'}): each rank would gather the whole model"
        )
    return layers
