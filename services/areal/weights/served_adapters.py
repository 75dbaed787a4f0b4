"""Whether inference servers get adapters (LoRA) or merged weights, and what servers start with.

The launcher and the trainer ask here, and weight-sync takes each version as it comes. So servers
that were started for adapters can also be given whole weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from areal.config.allocation import Sharing, parse_allocation
from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.config.training import LoraConfig
from areal.config.transports import transport_named
from areal.errors import InvalidInput
from areal.weights.manifest import read_tensors, weight_files

AT_ONCE = 4
"""Adapters that a server computes with at once: the new version's, the previous one, one that is
being unloaded, and none."""
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LINEAR = re.compile(r"model\.layers\.\d+\.(?:self_attn|mlp)\.(\w+)\.weight")
_OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class ServedAdapters:
    """What servers must be started for."""

    rank: int
    modules: tuple[str, ...]
    """Last parts of the names of linear layers."""


def served_adapters(config: BaseExperimentConfig) -> tuple[ServedAdapters | None, str]:
    """Returns what servers are started for, and why not; one of the two is None or "".

    Raises:
        InvalidInput: `actor.lora.publish` is `adapter`, and that is not possible.
    """
    lora = config.actor.lora if isinstance(config, GRPOConfig) else None
    if lora is None:
        return None, "actor.lora is not set"
    if lora.publish == "merged":
        return None, "actor.lora.publish is merged"
    modules = tuple(lora.targets) or _MODULES
    why = _obstacle(config, lora, modules)
    if not why:
        return ServedAdapters(lora.rank, modules), ""
    if lora.publish == "adapter":
        raise InvalidInput(f"actor.lora.publish 'adapter': {why}; expected 'merged'")
    return None, why


def _obstacle(config: BaseExperimentConfig, lora: LoraConfig, modules: tuple[str, ...]) -> str:
    transport = config.weight_sync.transport
    if not transport_named(transport).stores:
        return f"weight_sync.transport is {transport}, which broadcasts whole weights"
    if parse_allocation(config.allocation_mode).sharing is Sharing.ALTERNATING:
        return "servers and trainer have the GPU in turns, and servers that sleep lose adapters"
    if config.endpoints.inference and lora.publish == "auto":
        return "endpoints.inference is set: servers may have been started without --enable-lora"
    unknown = sorted(set(modules) - set(_MODULES))
    if unknown:
        return f"servers have no adapters for layers named {unknown[0]}"
    folder = Path(config.model.path)
    if not any(folder.glob("*.safetensors")):  # a recipe will create it
        return ""
    return _foreign(folder, bool(lora.targets))


def _foreign(folder: Path, chosen: bool) -> str:
    """Says which tensor servers would have no adapter for, of those that the trainer adapts."""
    for file in weight_files(folder):
        for tensor in read_tensors(file):
            if len(tensor.shape) < 2 or tensor.name in _OUTSIDE:
                continue
            linear = _LINEAR.fullmatch(tensor.name)
            if linear is None or (not chosen and linear[1] not in _MODULES):
                return f"servers may have no adapters for this model's {tensor.name}"
    return ""
