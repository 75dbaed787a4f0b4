"""Code that the cases share: models made from a shape, batches, timing."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from areal.algorithms import packing
from areal.algorithms.packing import Batch
from areal.models.tiny import save_tokenizer

SHAPES = Path(__file__).parent / "shapes"
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def make(shape: str, miniature: bool, *, layers: int = 0) -> Path:
    """A directory with config.json and a tokenizer, without weights.

    Args:
        shape: of a file in shapes/.
        miniature: tiny widths, the same architecture.
        layers: depth; 0: the shape's.
    """
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    if miniature:
        config |= _TINY | (_TINY_EXPERTS if "num_experts" in config else {})
        config |= {"head_dim": 16} if "head_dim" in config else {}
    elif layers:
        config["num_hidden_layers"] = layers
    directory = Path(tempfile.mkdtemp(prefix="gpu-"))
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def lengths_of(total: int, kind: str) -> list[int]:
    """Sequence lengths that add up to `total`: `even` (512 each) or `long` (a heavy tail)."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := total - sum(lengths)) > 8:
        draw = 512.0
        if kind == "long":
            draw = float(64 * torch.rand((), generator=generator).clamp(1e-3) ** -0.8)
        lengths.append(min(left, max(8, int(draw))))
    return lengths


def batch_of(lengths: list[int], vocabulary: int) -> Batch:
    """Random tokens; the second half of each sequence is trained on."""
    generator = torch.Generator().manual_seed(1)
    return packing.pack(
        [
            {
                "input_ids": torch.randint(vocabulary, (length,), generator=generator).tolist(),
                "loss_mask": [position >= length // 2 for position in range(length)],
            }
            for length in lengths
        ]
    )


def timed(run: Callable[[], object], *, rounds: int, warm: int = 1) -> float:
    """Return the median seconds of one call, including the GPU's work."""
    for _ in range(warm):
        run()
    seconds = []
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def wait() -> None:
    """Wait until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
