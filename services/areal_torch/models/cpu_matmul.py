"""How the CPU engine keeps the matrices of a bfloat16 model: what this machine multiplies fast.

Without AVX-512 or AMX, torch multiplies bfloat16 up to 80 times slower than float32, and how much
slower depends on the order of the matrix in memory. What a CPU and a version of torch do well
cannot be looked up, so each way is timed once, at the start. The command `python -m
areal_torch.models.cpu_matmul` prints the outcome as JSON; `areal doctor` shows it.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Choice", "Storage", "choose", "choose_here", "measure", "room_for_weights"]

_GIB = 1024**3
_WORTH_IT = 1.25
"""Another way must be this many times as fast as the preferred one to be chosen."""
_HOPELESS = 10.0
"""A way that is this many times slower than the fastest one is not timed again."""
_ROUNDS = 3
_ROWS, _WIDTH, _OUT = (1, 16, 64), 512, 4096
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Storage:
    """The type and order in which matrices are kept and multiplied."""

    dtype: torch.dtype
    transposed: bool = False
    """True: [out, in] in memory, as in a checkpoint; False: [in, out]."""

    def __str__(self) -> str:
        """`bfloat16 [out, in]`."""
        order = "[out, in]" if self.transposed else "[in, out]"
        return f"{str(self.dtype).removeprefix('torch.')} {order}"

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Returns an uninitialized matrix [rows, columns], to be multiplied from the left."""
        if self.transposed:
            return torch.empty(columns, rows, dtype=self.dtype).t()
        return torch.empty(rows, columns, dtype=self.dtype)


FLOAT32 = Storage(torch.float32)
_WAYS = (Storage(torch.bfloat16, transposed=True), Storage(torch.bfloat16), FLOAT32)


@dataclass(frozen=True, slots=True)
class Choice:
    """The layout chosen for a bfloat16 model, and the measurements behind it."""

    storage: Storage
    why: str
    """The measured rates, in one line."""


def choose_here(parameters: int) -> Choice:
    """Times every way on this machine, in this thread, and chooses one; takes under a second.

    Args:
        parameters: Of the model; 0: not known, so that memory is not looked at.
    """
    return choose(measure(), parameters, room_for_weights())


def choose(rates: Mapping[Storage, float], parameters: int, room: int) -> Choice:
    """Returns the way that is fastest by a margin; float32 only if it fits in memory.

    Args:
        rates: GFLOP/s of each way, the preferred one first, float32 last.
        parameters: Of the model; two sets of them are in memory during an update.
        room: bytes that they may take.
    """
    said = f"GFLOP/s on this CPU: {', '.join(f'{way} {rate:.2g}' for way, rate in rates.items())}"
    *narrow, wide = rates
    best = narrow[0]
    for way in narrow:
        best = way if rates[way] > _WORTH_IT * rates[best] else best
    if rates[wide] <= _WORTH_IT * rates[best]:
        return Choice(best, f"fastest of the ways with 16 bits; {said}")
    gain = f"{rates[wide] / rates[best]:.1f} times as fast as 16 bits"
    if (needed := 2 * 4 * parameters) > room:
        without = f"two sets of weights would take {needed / _GIB:.1f} GiB, expected at most"
        return Choice(best, f"float32 is {gain}, but {without} {room / _GIB:.1f}; {said}")
    size = (
        f"{4 * parameters / _GIB:.2f} GiB, twice that of" if parameters else "twice the memory of"
    )
    return Choice(wide, f"{gain}, values unchanged; a set takes {size} 16 bits; {said}")


@torch.inference_mode()
def measure() -> dict[Storage, float]:
    """Returns the GFLOP/s of each way with one thread: geometric mean over a few batch sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure()
    finally:
        torch.set_num_threads(threads)


def _measure() -> dict[Storage, float]:
    matrices = {way: way.matrix(_WIDTH, _OUT).fill_(0.01) for way in _WAYS}
    best = {way: [math.inf] * len(_ROWS) for way in _WAYS}
    for turn in range(_ROUNDS):
        fastest = min(sum(times) for times in best.values())
        for way, matrix in matrices.items():
            if turn and sum(best[way]) > _HOPELESS * fastest:
                continue
            for index, rows in enumerate(_ROWS):
                left = torch.full((rows, _WIDTH), 0.5, dtype=way.dtype)
                began = time.perf_counter()
                torch.mm(left, matrix)
                best[way][index] = min(best[way][index], time.perf_counter() - began)
    work = [2e-9 * rows * _WIDTH * _OUT for rows in _ROWS]
    return {
        way: math.prod(each / took for each, took in zip(work, times, strict=True))
        ** (1 / len(_ROWS))
        for way, times in best.items()
    }


def room_for_weights(cgroup: Path = _CGROUP_LIMIT) -> int:
    """Returns half of the memory of this machine or container, in bytes.

    The rest is for the KV cache and for the trainer, which runs beside a CPU engine.
    """
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text(encoding="utf-8").strip()
    except OSError:
        limit = "max"
    return min(there, int(limit) if limit.isdecimal() else there) // 2


if __name__ == "__main__":
    found = choose_here(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(json.dumps({"storage": str(found.storage), "why": found.why}))  # noqa: T201
