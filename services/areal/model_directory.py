"""Reads the config of a Hugging Face model directory. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput


def read_model_config(directory: Path) -> dict[str, Any]:
    """Like `read_config`; for a model with several parts (text and vision), the text part's."""
    config = read_config(directory)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        InvalidInput: The file is missing, or is not a JSON object.
    """
    file = directory / "config.json"
    if file.exists() and not file.is_file():  # a FIFO would be waited for
        raise InvalidInput(f"{str(file)!r}: expected a file")
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidInput(f"model {str(directory)!r}: {file.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(file)!r}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{str(file)!r}: expected a JSON object")
    return config


def serving_dtype(requested: str, directory: Path, *, gpu: bool) -> str:
    """Returns the precision of inference servers and of the weights published to them.

    Args:
        requested: `model.dtype`; any value but `auto` is used as it is.
        directory: The model's folder; one that a recipe will create counts as float32, the dtype in
            which an engine saves.
        gpu: True if servers have GPUs; then it is 16 bits, like the trainer's precision on GPUs.

    Returns:
        `float32` or `bfloat16`; for `auto` on CPUs that of the checkpoint (bfloat16 for float16).

    Raises:
        InvalidInput: config.json cannot be read.
    """
    if requested != "auto":
        return requested
    if gpu:
        return "bfloat16"
    if not (directory / "config.json").is_file():
        return "float32"
    config = read_model_config(directory)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "bfloat16" if stored.removeprefix("torch.") in ("bfloat16", "float16") else "float32"
