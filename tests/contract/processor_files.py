"""What folders of checkpoints of several models have on the Hub beside weights and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tests.inference_server import save_tokenizer

_SIZES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
_PROCESSORS: dict[str, tuple[str, str, str | None]] = {
    "gemma3": ("Gemma3Processor", "Gemma3ImageProcessor", None),
    "glm4v": ("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    "mistral3": ("PixtralProcessor", "PixtralImageProcessor", None),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
}
"""Of each family: the classes of its processor, for images, and for videos, if it has them."""


def save_processor(kind: str, folder: Path) -> None:
    """Writes the tokenizer and the processor's files of a family beside its tiny model.

    Args:
        kind: A key of `_PROCESSORS`.
        folder: Exists.
    """
    save_tokenizer(folder)
    processor, images, videos = _PROCESSORS[kind]
    of = {"processor_class": processor}
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "preprocessor_config.json": {**of, "image_processor_type": images, **_SIZES},
    }
    if videos is not None:
        files["video_preprocessor_config.json"] = {**of, "video_processor_type": videos}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
