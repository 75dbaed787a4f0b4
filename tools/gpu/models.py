"""Code that the cases share: models made from a shape, engines, batches, timing."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tools.tiny_architectures import tiny_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal.config.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal_torch.algorithms import packing
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.models.tiny import save_tokenizer

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
_TINY_STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_ANSWERS = 8


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def scratch() -> Path:
    """A new folder, which is removed with its worker."""
    return Path(tempfile.mkdtemp(dir=os.environ.get("GPU_KIT_SCRATCH")))


def make(shape: str, miniature: bool, *, layers: int = 0, positions: int = 0) -> Path:
    """A directory with config.json and a tokenizer, without weights.

    Args:
        shape: Of a file in shapes/.
        miniature: Tiny widths, the same architecture.
        layers: Depth; 0: the shape's.
        positions: Of its longest sequence, if the shape has fewer.
    """
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    if miniature:
        config |= _TINY | (_TINY_EXPERTS if "num_experts" in config else {})
        config |= {"head_dim": 16} if "head_dim" in config else {}
        config |= _TINY_STATES if "linear_num_key_heads" in config else {}
    elif layers:
        config["num_hidden_layers"] = layers
    if "layer_types" in config:  # the last is an attention layer
        config["layer_types"] = config["layer_types"][-config["num_hidden_layers"] :]
    config["max_position_embeddings"] = max(config["max_position_embeddings"], positions)
    directory = scratch()
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_tiny(architecture: str) -> Path:
    """The same for one of transformers' architectures, by its `model_type`."""
    config = tiny_config(architecture)
    for name, value in _TINY_STATES.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture]]
    directory = scratch()
    save_tokenizer(directory)
    config.save_pretrained(directory)
    return directory


def vocabulary_of(path: Path) -> int:
    """How many tokens a model knows."""
    return int(json.loads((path / "config.json").read_text())["vocab_size"])


@contextmanager
def engine(
    path: Path, *, tokens: int = 10240, lr: float = 1e-6, optimizer: Any = "adamw", **keys: Any
) -> Iterator[FSDPEngine]:
    """An initialized engine, destroyed at the end.

    Args:
        path: Of `make`; its weights are random unless `init_from_scratch=False`.
        tokens: Of a micro-batch.
        lr: Learning rate.
        optimizer: Its type.
        keys: Other fields of `TrainEngineConfig`; those that are None have their defaults.
    """
    given = {"init_from_scratch": True} | {k: v for k, v in keys.items() if v is not None}
    made = FSDPEngine(
        TrainEngineConfig(
            path=str(path),
            optimizer=OptimizerConfig(type=optimizer, lr=lr),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens),
            **given,
        )
    )
    try:
        made.initialize()
        yield made
    finally:
        made.destroy()


def lengths_of(total: int, kind: str) -> list[int]:
    """Lengths that add up to `total`: `one`, `even` (512 each) or `long` (a heavy tail)."""
    if kind == "one":
        return [total]
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := total - sum(lengths)) > 8:
        draw = 512.0
        if kind == "long":
            draw = float(64 * torch.rand((), generator=generator).clamp(1e-3) ** -0.8)
        lengths.append(min(left, max(8, int(draw))))
    return lengths


def batch_of(lengths: list[int], vocabulary: int, *, trained: float = 0.5, seed: int = 1) -> Batch:
    """Random tokens; the last part of each sequence, a share of `trained`, is trained on."""
    generator = torch.Generator().manual_seed(seed)
    return packing.pack(
        [
            {
                "input_ids": torch.randint(vocabulary, (length,), generator=generator).tolist(),
                "loss_mask": [at >= max(1, length * (1 - trained)) for at in range(length)],
            }
            for length in lengths
        ]
    )


def groups_of(tokens: int, vocabulary: int, *, seed: int = 1) -> Batch:
    """Groups of eight answers to one prompt each; a prompt is as long as an answer."""
    generator = torch.Generator().manual_seed(seed)
    length = min(512, tokens // (2 * _ANSWERS))

    def draw() -> list[int]:
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    groups = max(1, tokens // (2 * _ANSWERS * length))
    mask = [False] * length + [True] * length
    prompts = [draw() for _ in range(groups)]
    sequences = [
        {"input_ids": prompt + draw(), "loss_mask": mask}
        for prompt in prompts
        for _ in range(_ANSWERS)
    ]
    return packing.pack(sequences, [group for group in range(groups) for _ in range(_ANSWERS)])


def timed(
    run: Callable[[int], object], *, rounds: int = 5, warm: int = 2, at_most_s: float = 6.0
) -> tuple[float, float]:
    """Returns the median seconds of a call and their spread, (largest - smallest) / median.

    Args:
        run: Gets the number of the call, to take another batch each time.
        rounds: Timed calls, one at least.
        warm: Calls before them, one at least.
        at_most_s: After that no other warming call begins, and after as long no other timed one.
    """
    index, began = 0, time.monotonic()
    while index < warm and (index == 0 or time.monotonic() - began < at_most_s):
        run(index)
        index += 1
    seconds: list[float] = []
    began = time.monotonic()
    while len(seconds) < rounds and (not seconds or time.monotonic() - began < at_most_s):
        seconds.append(_once(run, index))
        index += 1
    middle = statistics.median(seconds)
    return middle, round((max(seconds) - min(seconds)) / middle, 3)


def _once(run: Callable[[int], object], index: int) -> float:
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run(index)
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run(index)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def wait() -> None:
    """Waits until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
