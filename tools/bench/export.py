"""How long a train step waits for the export of weights: 2 ranks, gloo, 500 MB, to a folder.

    python tools/bench/export.py [--rounds 3] [--tokens 192] [--ranks 2]

Each round exports weights as trained (float32) and as bfloat16 while a train step runs. For each,
the bench prints the seconds from the start of the export until the version is announced, the
seconds that the step waited (at the start, and before the optimizer), their ratio, the bytes that
the other ranks sent, and the seconds of the same export without a train step. A table, then one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "services")]
TARGET_PERCENT = 5.0
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}


def rank_main(folder: Path, rounds: int, tokens: int) -> None:
    """What each rank does; rank 0 writes out.json."""
    import torch
    import torch.distributed as dist

    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal.weights.publisher import NewVersion
    from areal_torch.algorithms import packing
    from areal_torch.algorithms.losses import sft_loss
    from areal_torch.engines.fsdp import FSDPEngine
    from areal_torch.publish.disk import DiskPublisher

    torch.set_num_threads(1)
    config = TrainEngineConfig(
        path=str(folder), dtype="float32", init_from_scratch=True, optimizer=OptimizerConfig()
    )
    engine = FSDPEngine(config)
    engine.initialize()
    ids = torch.randint(0, 32000, (tokens,))
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[0] = False
    batch = packing.pack([{"input_ids": ids, "loss_mask": mask}], [0])
    publisher, version = DiskPublisher(folder / "weights"), 0

    def export(dtype: str, *, step: bool) -> dict[str, float]:
        nonlocal version
        version += 1
        ended, sizes = list[float](), list[int]()

        def deliver(tensors: Any, _: Any) -> None:
            sizes.append(sum(tensor.data.nbytes for tensor in tensors))
            publisher.publish(NewVersion(version, 1, tensors, folder), lambda _: None)
            ended.append(time.perf_counter())

        dist.barrier()
        engine.exporter.waited_s = 0.0
        began = time.perf_counter()
        done = engine.export(dtype, deliver)
        waited = time.perf_counter() - began
        if step:
            engine.train_batch(batch, lambda p, _, mb: sft_loss(p, mb["loss_mask"]))
            waited += engine.exporter.waited_s
        stepped = time.perf_counter() - began
        done.result(600)
        exported = (ended[0] if ended else time.perf_counter()) - began
        dist.barrier()
        return {"export": exported, "waited": waited, "step": stepped, "bytes": sum(sizes)}

    rows: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        for dtype in ("float32", "bfloat16"):
            for beside in (True, False):
                row = {"dtype": dtype, "beside": beside, **export(dtype, step=beside)}
                if number:  # the first round allocates
                    rows.append(row)
    if dist.get_rank() == 0:
        (folder / "out.json").write_text(json.dumps(rows))
    engine.destroy()


def main() -> None:
    """Starts the ranks, prints what they measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="of a rank; used by this program itself")
    asked = parser.parse_args()
    if asked.folder:
        rank_main(asked.folder, asked.rounds, asked.tokens)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={asked.ranks}", __file__, "--folder", str(folder)]
        command += ["--rounds", str(asked.rounds), "--tokens", str(asked.tokens)]
        path = f"{ROOT / 'services'}:{ROOT}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        subprocess.run(command, env=environment, check=True)
        rows = json.loads((folder / "out.json").read_text())
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    print(
        f"{'dtype':<10}{'MB':>6}{'export':>9}{'step':>8}{'waited':>9}{'of export':>11}{'alone':>8}"
    )
    for dtype in ("float32", "bfloat16"):
        own = [row for row in rows if row["dtype"] == dtype]
        beside = [row for row in own if row["beside"]]
        seconds = {
            key: statistics.median(row[key] for row in beside)
            for key in ("export", "step", "waited", "bytes")
        }
        alone = statistics.median(row["export"] for row in own if not row["beside"])
        percent = statistics.median(100 * row["waited"] / row["export"] for row in beside)
        print(
            f"{dtype:<10}{seconds['bytes'] / 1e6:>6.0f}{seconds['export']:>8.2f}s"
            f"{seconds['step']:>7.2f}s{seconds['waited']:>8.3f}s{percent:>10.2f}%{alone:>7.2f}s"
        )
        result[dtype] = {**seconds, "alone": alone, "waited_percent": percent}
    worst = max(result[dtype]["waited_percent"] for dtype in ("float32", "bfloat16"))
    result["target"] = {"waited_percent_below": TARGET_PERCENT, "met": worst < TARGET_PERCENT}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
