"""Images of a prompt: transformers' processor and vision tower, and where their features stand.

    file ──processor──> patches, grid ──tower, in the engine's thread──> features
    prompt, one token an image ──> as many as its features, in whose places they stand
                               ──> rotary positions by time, height and width

What Qwen2-VL and Qwen2.5-VL have beside a Qwen2 decoder. The trainer makes the same patches of a
file, with the same processor. transformers and Pillow are only asked for by a model that sees.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.errors import InvalidInput
from areal_inference.model.config import ModelConfig, ModelError, VisionConfig

See = Callable[[list[int], Sequence[bytes]], "tuple[list[int], Seen]"]
"""(prompt, its images' files) -> (prompt as the model reads it, what it sees)."""
_MOST_PIXELS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The images of one prompt."""

    pixels: Tensor
    """Patches, float [P, D]."""
    grid: Tensor
    """Patches of each image by time, height and width, int64 [I, 3]."""
    places: Tensor
    """Where the prompt has a feature in place of a token, int64 [V]."""
    positions: Tensor
    """Rotary positions of the prompt, int64 [3, length]."""
    shift: int
    """For a token behind the prompt, its rotary position minus its place."""
    digest: bytes
    """Digest of the images' files."""

    def rotary_positions(self, length: int) -> Tensor:
        """Returns positions of the first `length` tokens, prompt and answer, int64 [3, length]."""
        known = self.positions[:, :length]
        behind = torch.arange(known.shape[1], length) + self.shift
        return torch.cat([known, behind.expand(3, -1)], dim=1)


def make_see(folder: Path, config: ModelConfig) -> See | None:
    """Returns what turns images into patches; None if the model takes no images.

    Raises:
        ModelError: The folder has no image processor, or a package is missing.
    """
    vision = config.vision
    if vision is None:
        return None
    try:
        from PIL import Image
        from transformers import AutoImageProcessor

        process = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model path {folder}: no image processor (transformers and Pillow read "
            f"preprocessor_config.json): {why}"
        ) from None

    def opened(file: bytes, number: int) -> Any:
        try:
            with Image.open(io.BytesIO(file)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise InvalidInput(
                        f"image_data[{number}]: {image.width} x {image.height} pixels, expected "
                        f"at most {_MOST_PIXELS}"
                    )
                return image.convert("RGB")
        except (OSError, Image.DecompressionBombError) as error:
            raise InvalidInput(f"image_data[{number}]: cannot be read: {error}") from None

    def see(ids: list[int], files: Sequence[bytes]) -> tuple[list[int], Seen]:
        images = [opened(file, number) for number, file in enumerate(files)]
        found = process(images=images, return_tensors="pt")
        digest = hashlib.blake2b(b"".join(hashlib.blake2b(f).digest() for f in files)).digest()
        return _place(ids, vision, found["pixel_values"], found["image_grid_thw"], digest)

    return see


def _place(
    ids: list[int], vision: VisionConfig, pixels: Tensor, grid: Tensor, digest: bytes
) -> tuple[list[int], Seen]:
    """Fills each image's token in as many times as it has features."""
    count = ids.count(vision.image_token_id)
    if count != len(grid):
        raise InvalidInput(
            f"input_ids: {count} image tokens (id {vision.image_token_id}), expected "
            f"{len(grid)}, one for each of image_data"
        )
    if ids[-1] == vision.image_token_id:
        raise InvalidInput("input_ids: end with an image, expected text after it")
    filled: list[int] = []
    places: list[Tensor] = []
    positions: list[Tensor] = []
    position, images = 0, iter((grid // torch.tensor([1, vision.merge, vision.merge])).tolist())
    for token in ids:
        if token != vision.image_token_id:
            filled.append(token)
            positions.append(torch.full((3, 1), position))
            position += 1
            continue
        shape = next(images)
        axes = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
        own = torch.stack([axis.flatten() for axis in axes])
        places.append(torch.arange(own.shape[1]) + len(filled))
        positions.append(own + position)
        filled += [token] * own.shape[1]
        position += max(shape)
    return filled, Seen(
        pixels=pixels,
        grid=grid,
        places=torch.cat(places),
        positions=torch.cat(positions, dim=1),
        shift=position - len(filled),
        digest=digest,
    )


def make_tower(config: ModelConfig, dtype: torch.dtype) -> nn.Module | None:
    """Returns the vision tower, with weights to be filled; None if the model takes no images."""
    vision = config.vision
    if vision is None:
        return None
    try:
        from transformers import AutoConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VisionTransformerPretrainedModel,
        )
    except ImportError as error:
        raise ModelError(
            f"a model of type {config.model_type} needs transformers: {error}"
        ) from None
    whole = AutoConfig.for_model(config.model_type, vision_config=vision.settings)
    kinds: dict[str, Any] = {
        "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
        "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
    }
    tower: nn.Module = kinds[config.model_type]._from_config(whole.vision_config, dtype=dtype)
    return tower.eval().requires_grad_(False)


def features(tower: nn.Module, seen: Seen) -> Tensor:
    """Returns the vectors for the prompt's image tokens, [V, hidden]."""
    dtype = next(tower.parameters()).dtype
    found: Tensor = tower(seen.pixels.to(dtype), grid_thw=seen.grid, return_dict=True).pooler_output
    return found
