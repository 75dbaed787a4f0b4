"""Folders that look like a model's: a real safetensors file, a configuration, a tokenizer."""

from __future__ import annotations

import json
import random
import struct


def safetensors(size: int, seed: int = 0) -> bytes:
    """One tensor of `size` bytes."""
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"weight": tensor, "__metadata__": {"format": "pt"}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(size)


def model_files(size: int = 1000) -> dict[str, bytes]:
    """File name to content."""
    return {
        "config.json": b'{"model_type": "qwen2"}',
        "model.safetensors": safetensors(size),
        "tokenizer.json": b'{"version": "1.0"}',
    }
