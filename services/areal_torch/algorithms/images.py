"""Images of a packed batch: kept once for each group, in the prompt of all its sequences.

    pixel_values     f32   [P, D]   patches of all images, one image after the other
    image_grid_thw   int64 [I, 3]   patches of each image: time, height, width
    image_group      int64 [I]      `group_index` of the group that it belongs to

A batch has all of these keys or none. The images of a group are in the order of its prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal.errors import InvalidInput

IMAGE_KEYS = frozenset({"pixel_values", "image_grid_thw", "image_group"})


def has_images(batch: dict[str, Tensor]) -> bool:
    """Whether any sequence of a batch has an image."""
    return len(batch.get("image_group", ())) > 0


def of_groups(batch: dict[str, Tensor], group_index: Tensor) -> dict[str, Tensor]:
    """Returns the image keys of some groups of a batch; an empty dict if the batch has none."""
    if "image_group" not in batch:
        return {}
    kept = torch.isin(batch["image_group"], group_index)
    patches = batch["image_grid_thw"].prod(-1)
    return {
        "pixel_values": batch["pixel_values"][torch.repeat_interleave(kept, patches)],
        "image_grid_thw": batch["image_grid_thw"][kept],
        "image_group": batch["image_group"][kept],
    }


def check_images(batch: dict[str, Tensor]) -> None:
    """Checks the image keys of a batch against each other.

    Raises:
        InvalidInput: One is missing or has another shape than the others say.
    """
    found = IMAGE_KEYS & batch.keys()
    if not found:
        return
    if missing := sorted(IMAGE_KEYS - found):
        raise InvalidInput(f"batch has {sorted(found)}: expected {', '.join(missing)} as well")
    pixels, grid, group = (batch[k] for k in ("pixel_values", "image_grid_thw", "image_group"))
    count = len(group)
    if group.ndim != 1 or tuple(grid.shape) != (count, 3):
        raise InvalidInput(
            f"batch['image_grid_thw'] has shape {tuple(grid.shape)}: expected [{count}, 3] as "
            f"image_group has {tuple(group.shape)}"
        )
    patches = int(grid.prod(-1).sum())
    if pixels.ndim != 2 or len(pixels) != patches:
        raise InvalidInput(
            f"batch['pixel_values'] has shape {tuple(pixels.shape)}: expected [{patches}, D], the "
            "patches of image_grid_thw"
        )
