"""Packs images of groups into a batch: their patches, and as many tokens as they fill.

A trajectory is stored as it is sent to servers: with one token for each image. How many tokens an
image fills is computed here by transformers' processor; it is always the same, so it is not stored.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal.errors import InvalidInput
from areal.model_directory import read_config
from areal.types import Trajectory, TrajectoryGroup
from areal_torch.algorithms.packing import Batch, pack_groups

_ARRAYS = ("input_ids", "loss_mask", "behavior_logprobs", "token_versions", "rewards")


def pack_groups_with_images(groups: Sequence[TrajectoryGroup], model: str | Path) -> Batch:
    """Packs groups as `pack_groups` does, and adds the image keys of groups that have images.

    Args:
        groups: This rank's share.
        model: Directory of the model, with its preprocessor_config.json.

    Raises:
        InvalidInput: The model takes no images, its directory has no image processor, an image
            cannot be read, or a prompt's number of image tokens differs from its number of images.
    """
    if not any(group.images for group in groups):
        return pack_groups(groups)
    process, token, merged = _processor(Path(model))
    filled, pixels, grids, owners = [], [], [], []
    for index, group in enumerate(groups):
        if not group.images:
            filled.append(group)
            continue
        found = process(images=[_open(each, group) for each in group.images], return_tensors="pt")
        grid = found["image_grid_thw"]
        counts = (grid.prod(-1) // merged).numpy()
        own = [_fill(each, token, counts) for each in group.trajectories]
        filled.append(replace(group, trajectories=own))
        pixels.append(found["pixel_values"])
        grids.append(grid)
        owners += [index] * len(grid)
    return {
        **pack_groups(filled),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.cat(grids),
        "image_group": torch.tensor(owners),
    }


def _processor(model: Path) -> tuple[Any, int, int]:
    """Returns transformers' image processor, the token of an image, and patches per token."""
    from transformers import AutoImageProcessor

    config = read_config(model)
    vision = config.get("vision_config")
    if "image_token_id" not in config or not isinstance(vision, dict):
        raise InvalidInput(
            f"model {str(model)!r} does not take images: expected rows without `images`"
        )
    try:
        process = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        why = " ".join(str(error).split())[:200]
        raise InvalidInput(f"model {str(model)!r}: no image processor: {why}") from None
    return process, int(config["image_token_id"]), int(process.merge_size) ** 2


def _open(file: bytes, group: TrajectoryGroup) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(file)).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"group {group.task_id!r}: an image cannot be read: {error}") from None


def _fill(trajectory: Trajectory, token: int, counts: Any) -> Trajectory:
    """Repeats the token of each image as often as the image fills tokens."""
    places = np.flatnonzero((trajectory.input_ids == token) & (trajectory.token_versions < 0))
    if len(places) != len(counts):
        raise InvalidInput(
            f"trajectory {trajectory.trajectory_id!r}: its prompt has {len(places)} image tokens "
            f"(id {token}): expected {len(counts)}, one for each image of the group"
        )
    repeats = np.ones(len(trajectory.input_ids), dtype=np.int64)
    repeats[places] = counts
    arrays: dict[str, Any] = {
        name: np.repeat(getattr(trajectory, name), repeats) for name in _ARRAYS
    }
    return replace(trajectory, **arrays)
