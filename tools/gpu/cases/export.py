"""How long a step waits for the export of its weights."""

from __future__ import annotations

import time
from typing import Any

from tools.gpu.models import make, wait

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.engines.fsdp import FSDPEngine


def settings(miniature: bool) -> list[dict[str, Any]]:
    """The precision of the trainer, and that of the servers."""
    del miniature
    shapes = ("qwen2.5-0.5b", "qwen2.5-1.5b")
    return [{"shape": shape, "dtype": dtype} for shape in shapes for dtype in (None, "bfloat16")]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds and bytes until every tensor is in host memory, for the second of two exports."""
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(make(setting["shape"], miniature)),
            init_from_scratch=True,
            optimizer=OptimizerConfig(lr=1e-6),
        )
    )
    engine.initialize()
    try:
        for _ in range(2):
            wait()
            started = time.perf_counter()
            size = sum(tensor.nbytes for _, tensor in engine.iter_full_tensors(setting["dtype"]))
            seconds = time.perf_counter() - started
    finally:
        engine.destroy()
    return {
        "gb": round(size / 1e9, 3),
        "s": round(seconds, 3),
        "gb_s": round(size / seconds / 1e9, 2),
    }
