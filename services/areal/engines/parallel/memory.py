"""What is computed again instead of kept."""

from __future__ import annotations

from typing import Any

import torch

from areal.config.training import RefConfig, TrainEngineConfig
from areal.errors import InvalidInput


def checkpoints_activations(config: TrainEngineConfig | RefConfig, device: torch.device) -> bool:
    """Whether the backward pass recomputes each layer: as configured, or where there is a GPU."""
    if isinstance(config, RefConfig) or config.optimizer is None:
        return False
    chosen = config.gradient_checkpointing
    return device.type == "cuda" if chosen is None else chosen


def recompute_layers(hf: Any) -> None:
    """Recompute each decoder layer in the backward pass.

    Raises:
        InvalidInput: the architecture cannot.
    """
    if not hf.supports_gradient_checkpointing:
        raise InvalidInput(
            f"model {type(hf).__name__} cannot recompute its layers; "
            "expected gradient_checkpointing=false"
        )
    hf.activation_checkpointing_enable()
    for module in hf.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers looks at it; their children stay in eval()
