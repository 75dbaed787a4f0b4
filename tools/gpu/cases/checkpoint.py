"""How long a step waits for a checkpoint that is written in the background."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu.models import batch_of, make, wait

from areal.algorithms.losses import sft_loss
from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.engines.fsdp import FSDPEngine


def settings(miniature: bool) -> list[dict[str, Any]]:
    """One shape is enough, because seconds grow with bytes."""
    del miniature
    return [{"shape": "qwen2.5-0.5b"}]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds until the call returns, until the file is written, and of a resume."""
    engine = FSDPEngine(
        TrainEngineConfig(
            path=str(make(setting["shape"], miniature)),
            init_from_scratch=True,
            optimizer=OptimizerConfig(lr=1e-6),
        )
    )
    engine.initialize()
    folder = Path(tempfile.mkdtemp(prefix="gpu-checkpoint-"))
    try:
        engine.train_batch(batch_of([64], 512), lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
        wait()
        started = time.perf_counter()
        saved = engine.save_checkpoint(folder, background=True)
        blocked = time.perf_counter() - started
        saved.result(200)
        whole = time.perf_counter() - started
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        started = time.perf_counter()
        engine.load_checkpoint(folder)
        wait()
        resumed = time.perf_counter() - started
    finally:
        engine.destroy()
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {"blocked_s": blocked, "whole_s": whole, "resume_s": resumed, "gb": size / 1e9}
    return {name: round(value, 3) for name, value in seconds.items()}
