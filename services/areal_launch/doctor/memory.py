"""How much memory a run will need, from config.json and the experiment file; nothing is started.

A trainer rank's is `areal.memory_estimate`. A server holds its weights over its GPUs, and
2 layers kv_heads head_dim elements for each token in its KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal import memory_estimate as estimate
from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig, micro_batch_tokens
from areal.config.training import Checkpointing
from areal.memory_estimate import (
    BYTES,
    CUDA,
    GIB,
    MASTER,
    PROCESS,
    ModelShape,
    Need,
    Setting,
)
from areal.model_directory import serving_dtype

_CPU_CACHE = 1 * GIB
"""Largest KV cache of the CPU engine, in bytes."""


@dataclass(frozen=True)
class Trainer:
    """A trainer rank's memory."""

    need: Need
    mode: Checkpointing
    """The mode of gradient checkpointing: what layers keep."""
    ways_out: str
    """Settings with which the run needs less memory."""


def trainer_rank(config: GRPOConfig, shape: ModelShape, *, gpu: bool, there: int = 0) -> Trainer:
    """Returns the memory that one trainer rank needs at its peak, on its device.

    Args:
        config: The experiment's configuration.
        shape: The model's sizes.
        gpu: It has one.
        there: Free bytes of its device; 0: not known.
    """
    actor = config.actor
    layout = parse_allocation(config.allocation_mode).layout
    setting = Setting(layout, micro_batch_tokens(config), gpu)
    mode = estimate.choose(actor, shape, setting, there, config.ref)
    need = estimate.trainer_rank(actor, shape, setting, mode, config.ref)
    return Trainer(need, mode, estimate.ways_out(need, actor, mode, setting))


def trainer_ranks(config: GRPOConfig, shape: ModelShape) -> Iterator[Trainer]:
    """Yields what a rank needs on a GPU, the fastest of what its layers may keep first."""
    chosen = config.actor.gradient_checkpointing
    layout = parse_allocation(config.allocation_mode).layout
    setting = Setting(layout, micro_batch_tokens(config), gpu=True)
    for mode in estimate.MODES if chosen is None else ():
        need = estimate.trainer_rank(config.actor, shape, setting, mode, config.ref)
        yield Trainer(need, mode, estimate.ways_out(need, config.actor, mode, setting))
    if chosen is not None:
        yield trainer_rank(config, shape, gpu=True)


def server(config: BaseExperimentConfig, shape: ModelShape, *, gpu: bool) -> Need:
    """Returns the memory that one inference server needs on each of its GPUs, or on CPUs in total.

    Its cache holds every request that may run at once at full length; a GPU server that has less
    room lets requests wait. The CPU engine's cache ends at 1 GiB; where float32 is faster, it keeps
    16-bit weights in 32 bits, which is counted here.
    """
    width = parse_allocation(config.allocation_mode).inference_gpus if gpu else 1
    dtype = serving_dtype(config.model.dtype, Path(config.model.path), gpu=gpu)
    element = BYTES[dtype] if gpu else BYTES["float32"]
    cache = config.stack.inference_max_running * config.model.context_length
    cache *= cache_bytes(shape, element)
    return Need(
        {
            "weights": element * shape.parameters // width,
            "cache": cache // width if gpu else min(cache, _CPU_CACHE),
            "process": CUDA if gpu else PROCESS,
        }
    )


def cache_bytes(shape: ModelShape, element: int) -> int:
    """Returns the bytes of one token's keys and values."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * element


def host(config: BaseExperimentConfig, shape: ModelShape, *, ranks: int) -> Need:
    """Returns the host memory that a node needs for `ranks` trainer ranks with a GPU each.

    A rank reads its own part of one tensor after the other, or the experts of one layer, which are
    put together. A checkpoint's weights and moments are copied here before they are written, and
    rank 0 holds a published version. With `actor.offload`, the states stay here.
    """
    layout = parse_allocation(config.allocation_mode).layout
    element = BYTES[serving_dtype(config.model.dtype, Path(config.model.path), gpu=True)]
    matrix = shape.hidden * max(shape.vocabulary, shape.intermediate) // layout.per_copy
    # The experts' gate and up matrices are read and copied into one tensor.
    largest = max(matrix, 4 * shape.expert_parameters // 3)
    parts = {
        "loading": MASTER * largest * ranks,
        "publishing": element * shape.parameters,
        "processes": PROCESS * ranks,
    }
    if isinstance(config, GRPOConfig) and config.actor.lora is None:
        own = MASTER * shape.parameters * ranks // layout.per_copy
        parts["checkpoint"] = 3 * own  # the weight and two moments
        if config.actor.offload:
            parts["states"] = 4 * own
        elif parse_allocation(config.allocation_mode).sharing is Sharing.ALTERNATING:
            parts["states"] = 3 * own  # while the servers have the GPU; there are no gradients then
    return Need(parts)
