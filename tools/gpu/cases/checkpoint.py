"""How long a step waits for a checkpoint, and for the export of its weights to servers."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu.models import batch_of, engine, make, wait

from areal.algorithms.losses import sft_loss


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds until a save returns and until it is written, of a resume, and of an export."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-checkpoint-"))
    seconds: dict[str, float] = {}
    try:
        with engine(make(setting["shape"], miniature)) as made:
            made.train_batch(batch_of([64], 512), lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
            for kind in ("first_export", "export"):  # the first pins its buffers
                wait()
                started = time.perf_counter()
                size = sum(t.nbytes for _, t in made.iter_full_tensors("bfloat16"))
                seconds[f"{kind}_s"] = time.perf_counter() - started
            wait()
            started = time.perf_counter()
            saved = made.save_checkpoint(folder, background=True)
            seconds["blocked_s"] = time.perf_counter() - started
            saved.result(200)
            seconds["whole_s"] = time.perf_counter() - started
            written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            started = time.perf_counter()
            made.load_checkpoint(folder)
            wait()
            seconds["resume_s"] = time.perf_counter() - started
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sizes = {"export_gb_s": size / seconds["export_s"] / 1e9, "checkpoint_gb": written / 1e9}
    return {name: round(value, 3) for name, value in {**seconds, **sizes}.items()}
