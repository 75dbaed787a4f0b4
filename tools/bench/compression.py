"""Whether compressing groups pays: ratio and CPU time of zstd and zlib.

    PYTHONPATH=services python tools/bench/compression.py     # a table, then JSON

Groups have 8 trajectories of 4, 1,024 or 16,384 tokens. Ids are distributed like the words of a
text (Zipf), and logprobs exponentially. There is one policy version, and one reward at the end.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

SAMPLES, VOCABULARY = 8, 32_000


def group(length: int) -> bytes:
    """Returns a serialized group."""
    from areal.protocol.trajectories import group_to_pb
    from areal.types import Trajectory, TrajectoryGroup

    rng = np.random.default_rng(length)
    prompt = max(2, length // 8)
    words = rng.zipf(1.2, (SAMPLES, length)).clip(max=VOCABULARY - 1).astype(np.int32)
    words[:, :prompt] = words[0, :prompt]
    sampled = np.arange(length) >= prompt
    trajectories = [
        Trajectory(
            trajectory_id=f"e0-17.3.{sample}",
            input_ids=words[sample],
            loss_mask=sampled,
            behavior_logprobs=(-rng.exponential(0.4, length) * sampled).astype(np.float32),
            token_versions=np.where(sampled, 7, -1).astype(np.int32),
            rewards=(np.arange(length) == length - 1).astype(np.float32),
        )
        for sample in range(SAMPLES)
    ]
    return group_to_pb(TrajectoryGroup("e0-17", trajectories)).SerializeToString()


def microseconds(work: Callable[[bytes], bytes], data: bytes) -> float:
    """CPU time, the median of 20."""
    found = []
    for _ in range(20):
        began = time.process_time()
        work(data)
        found.append((time.process_time() - began) * 1e6)
    return statistics.median(found)


def main() -> None:
    """Measures both codecs and prints."""
    contenders: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        "zstd 1": (zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress),
        "zstd 3": (zstandard.ZstdCompressor(3).compress, zstandard.ZstdDecompressor().decompress),
        "zlib 1": (lambda data: zlib.compress(data, 1), zlib.decompress),
    }
    rows = []
    for length in (4, 1024, 16384):
        raw = group(length)
        for name, (pack, unpack) in contenders.items():
            packed = pack(raw)
            rows.append(
                {
                    "tokens": length,
                    "bytes": len(raw),
                    "codec": name,
                    "ratio": round(len(raw) / len(packed), 2),
                    "compress_us": round(microseconds(pack, raw)),
                    "expand_us": round(microseconds(unpack, packed)),
                }
            )
    print("tokens    bytes   codec  ratio  compress us  expand us")
    for row in rows:
        print(
            f"{row['tokens']:>6} {row['bytes']:>8} {row['codec']:>7} {row['ratio']:>6} "
            f"{row['compress_us']:>12} {row['expand_us']:>10}"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
