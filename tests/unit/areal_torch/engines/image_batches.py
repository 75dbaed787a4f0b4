"""Packed batches whose groups have images, and the same sequences alone."""

import torch
from tests.unit.areal_torch.engines.hub_families import IMAGE, VISION_START

from areal_torch.algorithms import packing

GRIDS = {0: [(1, 4, 4)], 1: [], 2: [(1, 4, 8), (1, 8, 4)]}
"""Of groups: patches by time, height and width; 4 of them make a token."""
_PATCH = 3 * 2 * 4 * 4


def image_batch(seed=0, per_group=3, sampled=()):
    """Three groups, with one image, none and two; `sampled` are tokens of each answer."""
    g = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randint(2, 80, (count,), generator=g).tolist()

    sequences, groups, pixels, grids, owners = [], [], [], [], []
    for group, own in GRIDS.items():
        prompt = draw(3)
        for grid in own:
            patches = grid[0] * grid[1] * grid[2]
            prompt += [VISION_START, *[IMAGE] * (patches // 4), *draw(2)]
            pixels.append(torch.randn(patches, _PATCH, generator=g))
            grids.append(grid)
            owners.append(group)
        for number in range(per_group):
            answer = [*draw(3 + number), *sampled, *draw(2)]
            mask = [False] * len(prompt) + [True] * len(answer)
            sequences.append(
                {
                    "input_ids": prompt + answer,
                    "loss_mask": mask,
                    "behavior_logprobs": [-4.5 * m for m in mask],
                    "token_versions": [1 if m else -1 for m in mask],
                    "rewards": [0.0] * (len(mask) - 1) + [float(number == 0)],
                }
            )
            groups.append(group)
    return {
        **packing.pack(sequences, groups),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.tensor(grids),
        "image_group": torch.tensor(owners),
    }
