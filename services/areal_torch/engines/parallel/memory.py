"""Sets what a layer keeps between forward and backward pass, and which kernels compute it.

| `gradient_checkpointing` | a layer keeps | it recomputes |
|---|---|---|
| `none`, false | everything | nothing |
| `selective` | its input, what products of matrices and attention return | norms, rotary, gates |
| `full`, true | its input | all of it: a third more operations |
| `offload` | nothing: its input lies in pinned host memory | all of it |

Selective is better than recomputing every second layer, which keeps half and recomputes a sixth of
a step. Selective keeps less than half, and the work that it repeats is limited by memory bandwidth,
not by arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from areal import memory_estimate as estimate
from areal.config.training import Checkpointing, Kernels, RefConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal.memory_estimate import GIB, ModelShape, Need, Setting
from areal_torch.engines.model import guards
from areal_torch.engines.model.recurrent import modules_of
from areal_torch.engines.model.routes import routers_of
from areal_torch.engines.parallel.mesh import Mesh, reduce_scalars


@dataclass(frozen=True)
class Budget:
    """The memory that a rank is expected to need, and the free memory."""

    mode: Checkpointing
    need: Need | None
    """None: the model's sizes are not known."""
    there: int
    """Free bytes on the rank that has the least."""
    chunk: int
    """Elements of the largest logits tensor."""
    ways_out: str
    """Settings with which it needs less."""

    def __str__(self) -> str:
        """`about 31.8 GiB (states 14.2, activations 8.0) of 79.1`."""
        need = "an unknown size" if self.need is None else f"about {self.need}"
        return f"{need} of {self.there / GIB:.1f} GiB"


def budget(config: TrainEngineConfig, mesh: Mesh, device: torch.device) -> Budget:
    """Decides what layers keep, the same on every rank; collective, before the model has memory."""
    here = {"taken_max": -float(free_bytes(device))}
    everyone = dist.group.WORLD if dist.get_world_size() > 1 else None
    there = int(-reduce_scalars(here, everyone)["taken_max"])
    try:
        shape = ModelShape.read(Path(config.path))
    except InvalidInput:
        shape = None
    tokens = config.largest_micro_batch or config.mb_spec.max_tokens_per_mb
    setting = Setting(mesh.layout, tokens, device.type == "cuda")
    # A reference takes its memory after the actor has chosen.
    beside = config.reference
    mode = estimate.choose(config, shape, setting, there, beside)
    chunk = estimate.choose_chunk(config, shape, setting, mode, there, beside)
    need = None
    if shape is not None:
        need = estimate.trainer_rank(config, shape, setting, mode, beside, chunk)
    return Budget(mode, need, there, chunk, estimate.ways_out(need, config, mode, setting))


def frozen_chunk(config: TrainEngineConfig | RefConfig, hf: Any, device: torch.device) -> int:
    """Returns the elements of the largest logits tensor of a model that is only read."""
    if config.logits_chunk_elements:
        return config.logits_chunk_elements
    if device.type != "cuda":
        return estimate.LEAST_CHUNK
    # The rest is for the model itself and for what other models of this rank compute.
    room = free_bytes(device) // 4
    vocabulary = int(hf.config.get_text_config().vocab_size)
    return estimate.largest_chunk(vocabulary, lambda chunk: estimate.LOGIT_BYTES * chunk <= room)


def free_bytes(device: torch.device) -> int:
    """Returns the GPU's free memory, or this rank's part of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // dist.get_world_size()


def recompute_layers(hf: Any, mode: Checkpointing, kernels: Kernels) -> None:
    """Makes each decoder layer keep what `mode` says; call it before the model is sharded.

    With torch.compile, the graphs of a layer recompute the same values as `selective`.

    Raises:
        InvalidInput: The architecture does not support it.
    """
    if mode == "none" or (mode == "selective" and kernels == "compile"):
        return
    if not hf.supports_gradient_checkpointing:
        raise InvalidInput(
            f"model {type(hf).__name__} cannot recompute its layers; "
            "expected gradient_checkpointing=false"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # no dropout
    if mode == "selective":
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # Older transformers have only the second, which newer ones deprecate.
    enable = getattr(hf, "activation_checkpointing_enable", None)
    (enable or hf.gradient_checkpointing_enable)(options)
    for module in hf.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers looks at it; their children stay in eval()
            if mode == "offload":
                module._gradient_checkpointing_func = partial(
                    _with_inputs_on_host, module._gradient_checkpointing_func
                )


def _with_inputs_on_host(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # transformers' own would pin memory where there is no GPU to copy it to.
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return run(*args, **kwargs)


# Products of matrices and attention, by the name of their operator.
_KEPT = frozenset(
    {
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm",
        "aten::_scaled_mm", "aten::linear",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward", "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd",
    }
)  # fmt: skip


_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::linear"})
_WIDER = 8
"""A product whose result has more than this many times the width of its rows costs a GPU less than
to read that result from memory: an adapter's second one, as wide as the layer's own."""


def _policy(_: Any, operator: Any, *args: Any, **__: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = operator.name().partition(".")[0]
    keeps = name in _KEPT
    if name in _PRODUCTS:
        rows, matrix = args[1:3] if name == "aten::addmm" else args[:2]
        keeps = matrix.numel() <= _WIDER * rows.shape[-1] ** 2
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def use_kernels(
    hf: Any, layers: Sequence[nn.Module], kernels: Kernels, device: torch.device
) -> None:
    """Lets torch.compile or Liger compute the layers' norms and activations.

    torch.compile compiles each layer on its own, again when the number of tokens first changes,
    then for any number; sizes of the model stay constants. Attention and recurrent layers are left
    out: the graph breaks there, because the layout differs from batch to batch. Liger replaces
    modules of an architecture that it knows.

    Raises:
        InvalidInput: Liger is not installed, there is no GPU, or it does not know the architecture.
    """
    if kernels == "compile":
        from transformers import AttentionInterface

        name = hf.config.get_text_config()._attn_implementation
        apart = f"{name}_apart"
        disable: Any = torch.compiler.disable
        attend = disable(AttentionInterface()[name], reason="the layout varies")
        AttentionInterface.register(apart, attend)
        guards.use_attention(hf, apart)
        for _, module in modules_of(guards.decoder_of(hf)):
            module.forward = disable(module.forward, reason="the layout varies")
        for router in routers_of(hf, guards.decoder_of(hf)).values():
            router.forward = disable(router.forward, reason="the routes vary")
        layer: Any
        for layer in layers:
            if getattr(layer, "gradient_checkpointing", False):
                # transformers recomputes inside `forward`. A graph that breaks in there is dropped,
                # and with it all of the layer, so compile what is recomputed.
                again = layer._gradient_checkpointing_func
                layer._gradient_checkpointing_func = partial(_recompute_compiled, again)
            else:
                layer.compile()
    elif kernels == "liger":
        _use_liger(hf, device)


def _recompute_compiled(again: Callable[..., Any], forward: partial[Any], *args: Any) -> Any:
    """Call `again`, a function that checkpoints, with a compiled `forward` of a layer."""
    compiled = torch.compile(forward.func)
    return again(partial(compiled, *forward.args, **forward.keywords), *args)


def _use_liger(hf: Any, device: torch.device) -> None:
    if device.type != "cuda":
        raise InvalidInput(
            f"kernels=liger: its kernels need a GPU, but the device is a {device.type}; expected "
            "kernels=eager or compile"
        )
    try:
        monkey_patch: Any = import_module("liger_kernel.transformers.monkey_patch")
    except ImportError as error:
        raise InvalidInput(
            "kernels=liger: expected the package liger-kernel (pip install liger-kernel==0.8.5), "
            "or kernels=eager or compile"
        ) from error
    kind = hf.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InvalidInput(
            f"kernels=liger: Liger has no kernels for model_type {kind!r}; expected kernels=eager "
            "or compile"
        )
    # The head is ours: it returns entropies, too. Liger's rotary embedding changes queries and keys
    # in their place, which `selective` has kept: they would be rotated twice, without an error.
    monkey_patch._apply_liger_kernel_to_instance(
        hf, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
    )
