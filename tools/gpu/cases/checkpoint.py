"""How long a step waits for a checkpoint, and for the export of its weights to servers."""

from __future__ import annotations

import shutil
import time
from typing import Any

from tools.gpu.models import batch_of, engine, make, scratch, wait

from areal_torch.algorithms.losses import sft_loss


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Seconds until a save returns and until it is written, of a resume, and of an export.

    An export returns, is gathered (from then on the weights may change), and then ends.
    """
    folder = scratch()
    seconds: dict[str, float] = {}
    sizes: list[int] = []
    try:
        with engine(make(setting["shape"], miniature)) as made:
            made.train_batch(batch_of([64], 512), lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
            for kind in ("first_", ""):  # the first makes its buffers
                wait()
                started = time.perf_counter()
                done = made.export(
                    "bfloat16", lambda tensors, _: sizes.append(sum(len(t.data) for t in tensors))
                )
                made.exporter.wait_gathered()
                seconds[f"{kind}gathered_s"] = time.perf_counter() - started
                done.result(200)
                seconds[f"{kind}export_s"] = time.perf_counter() - started
            for kind in ("first_", ""):
                wait()
                started = time.perf_counter()
                saved = made.save_checkpoint(folder, background=True)
                seconds[f"{kind}blocked_s"] = time.perf_counter() - started
                saved.result(200)
                seconds[f"{kind}saved_s"] = time.perf_counter() - started
            written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            started = time.perf_counter()
            made.load_checkpoint(folder)
            wait()
            seconds["resume_s"] = time.perf_counter() - started
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    gigabytes = {"export_gb": sizes[-1] / 1e9, "checkpoint_gb": written / 1e9}
    return {name: round(value, 3) for name, value in {**seconds, **gigabytes}.items()}
