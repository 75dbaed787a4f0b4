"""Images in a packed batch: computes features with transformers' vision tower and places them.

    images of a group --tower, once--> features --gather--> in place of each sequence's image tokens
    ids, grids --transformers' get_rope_index, per sequence--> rotary positions [3, tokens]

Image tokens occur in prompts only. An image token that the policy samples counts as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms import images
from areal_torch.algorithms.packing import Batch, position_ids, sequence_index
from areal_torch.engines.model.attention.layout import PackedLayout

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Model types that can be trained on images."""


@dataclass(frozen=True)
class Seen:
    """The images of a micro-batch, and the tokens that they fill."""

    pixel_values: Tensor
    """Patches, float [P, D]."""
    grid: Tensor
    """Patches of each image by time, height and width, int64 [I, 3]."""
    position_ids: Tensor
    """Rotary positions of the computed tokens, int64 [3, U]."""
    places: Tensor
    """Computed tokens in whose places an image stands, int64 [V]; none in a blank."""
    rows: Tensor
    """The feature that stands at each of them, int64 [V]."""

    def map(self, move: Callable[[Tensor], Tensor]) -> Seen:
        """Returns the same with each tensor moved, for example to a device."""
        return replace(self, **{name: move(value) for name, value in vars(self).items()})


def sees(hf: Any) -> bool:
    """Returns whether a model can be trained on images."""
    return hf.config.model_type in FAMILIES


def blank(hf: Any, layout: PackedLayout) -> Seen:
    """Returns the smallest image, which fills no token.

    With it the vision tower takes part in the collectives of a micro-batch without images while
    another rank's micro-batch has some.
    """
    vision = hf.config.vision_config
    side = vision.spatial_merge_size
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    nowhere = torch.zeros(0, dtype=torch.int64)
    return Seen(
        pixel_values=torch.zeros(side * side, width),
        grid=torch.tensor([[1, side, side]]),
        position_ids=layout.position_ids.expand(3, -1),
        places=nowhere,
        rows=nowhere,
    )


def plan(hf: Any, batch: Batch, layout: PackedLayout) -> Seen:
    """Plans where a micro-batch's images go, in host memory.

    Args:
        hf: transformers model of one of FAMILIES.
        batch: Has the image keys.
        layout: The batch's layout.

    Raises:
        InvalidInput: A sequence's number of image tokens differs from what its group's images fill.
    """
    ids, cu_seqlens, grid = batch["input_ids"], batch["cu_seqlens"].long(), batch["image_grid_thw"]
    is_image = image_tokens(hf, batch)
    count, features = _per_sequence(hf, batch, is_image)
    positions = position_ids(cu_seqlens).expand(3, -1).clone()
    bounds = cu_seqlens.tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        if count[number]:
            own = grid[batch["image_group"] == batch["group_index"][number]]
            found, _ = hf.base_model.get_rope_index(
                ids[None, begin:end],
                mm_token_type_ids=is_image[None, begin:end].int(),
                image_grid_thw=own,
            )
            positions[:, begin:end] = found[:, 0]
    seen_before = is_image.cumsum(0) - is_image.long()
    at_start = torch.cat([seen_before, seen_before.new_zeros(1)])[cu_seqlens[:-1]]
    owner = sequence_index(cu_seqlens)
    row = features[owner] + seen_before - at_start[owner]
    places = torch.nonzero(is_image[layout.computed]).flatten()
    return Seen(
        pixel_values=batch["pixel_values"],
        grid=grid,
        position_ids=positions[:, layout.computed],
        places=places,
        rows=row[layout.computed][places],
    )


def image_tokens(hf: Any, batch: Batch) -> Tensor:
    """Returns which tokens of a batch an image stands for, bool [T]."""
    token: int = hf.config.image_token_id
    return batch["input_ids"].eq(token) & ~batch["loss_mask"]


def _per_sequence(hf: Any, batch: Batch, is_image: Tensor) -> tuple[list[int], Tensor]:
    """Returns image tokens of each sequence, and the first feature of its group, int64 [S]."""
    size = batch["image_grid_thw"].prod(-1) // hf.config.vision_config.spatial_merge_size**2
    before = size.cumsum(0) - size
    cu_seqlens = batch["cu_seqlens"].long()
    counted = torch.cat([is_image.new_zeros(1).long(), is_image.cumsum(0)])[cu_seqlens].diff()
    first = torch.zeros_like(counted)
    for number, (group, tokens) in enumerate(
        zip(batch["group_index"].tolist(), counted.tolist(), strict=True)
    ):
        own = batch["image_group"] == group
        if (expected := int(size[own].sum())) != tokens:
            raise InvalidInput(
                f"a prompt has {tokens} tokens that stand for images: expected "
                f"{expected}, for the {int(own.sum())} images of its group"
            )
        if tokens:
            first[number] = before[own][0]
    return counted.tolist(), first


def embed(hf: Any, input_ids: Tensor, seen: Seen) -> tuple[dict[str, Any], Tensor]:
    """Computes what the decoder takes instead of token ids.

    Args:
        hf: transformers model of one of FAMILIES.
        input_ids: Ids of the computed tokens, int64 [U].
        seen: Images of the same micro-batch, on the same device.

    Returns:
        The decoder's arguments, and a 0 that depends on the tower (see `blank`).
    """
    base = hf.base_model
    found = base.get_image_features(seen.pixel_values, seen.grid, return_dict=True)
    features = torch.cat(found.pooler_output)
    embedded = base.get_input_embeddings()(input_ids)
    placed = features[seen.rows].to(embedded.dtype)
    inputs = {"inputs_embeds": embedded.index_copy(0, seen.places, placed)[None]}
    deep = [_joined(layer) for layer in getattr(found, "deepstack_features", ())]
    if deep:
        mask = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(0, seen.places, 1)
        inputs["visual_pos_masks"] = mask[None]
        inputs["deepstack_visual_embeds"] = [layer[seen.rows] for layer in deep]
    nothing = sum((layer.sum() for layer in deep), features.sum()) * 0.0
    return inputs, nothing


def _joined(layer: Tensor | Sequence[Tensor]) -> Tensor:
    # Newer transformers split a layer's features by image.
    return layer if isinstance(layer, Tensor) else torch.cat(tuple(layer))


def check(hf: Any, batch: Batch, ranks_per_share: int, placeholders: Tensor) -> None:
    """Refuses images that would be computed wrong, and image tokens without an image.

    Args:
        hf: transformers model.
        batch: Packed batch, in host memory.
        ranks_per_share: Ranks that share the tokens or matrices of one share of the batch.
        placeholders: Tokens that the model replaces with images or sounds, int64.

    Raises:
        InvalidInput: The message says why, in one line.
    """
    if images.has_images(batch):
        if not sees(hf):
            raise InvalidInput(
                f"the batch has images, and {type(hf).__name__} does not train with images: "
                f"expected a model of type {', '.join(FAMILIES)}, or rows without images"
            )
        if ranks_per_share > 1:
            raise InvalidInput(
                "the batch has images, which need a layout with only d and s: expected an "
                "allocation_mode without t, c and e"
            )
        placeholders = placeholders[placeholders != hf.config.image_token_id]
    if not len(placeholders):
        return
    given = batch["input_ids"][~batch["loss_mask"]]
    found = given[torch.isin(given, placeholders)]
    if len(found):
        raise InvalidInput(
            f"a prompt has token {int(found[0])}, which stands for an image, video or sound in "
            f"{type(hf).__name__}, and the batch has none: expected the row's images "
            "(docs/workflows.md), or prompts without it"
        )
