"""Properties of this machine: versions, speed of a matrix product and of copies."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import torch
from tools.gpu.models import device, timed

_MODULES = ("transformers", "flash_attn", "liger_kernel", "peft", "obstore", "sglang")


def settings(miniature: bool) -> list[dict[str, Any]]:
    """What is measured; the same in miniature."""
    del miniature
    return [{"measures": "versions"}, {"measures": "matmul"}, {"measures": "copies"}]


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """See `settings`."""
    return {"versions": _versions, "matmul": _matmul, "copies": _copies}[setting["measures"]](
        miniature
    )


def _versions(miniature: bool) -> dict[str, Any]:
    del miniature
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found |= {name: importlib.util.find_spec(name) is not None for name in _MODULES}
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        found["varlen_attn"] = list(inspect.signature(varlen_attn).parameters)
    return found


def _matmul(miniature: bool) -> dict[str, Any]:
    size = 128 if miniature else 8192
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in "ab")
    seconds = timed(lambda: left @ right, rounds=10, warm=3)
    return {"size": size, "tflops": round(2 * size**3 / seconds / 1e12, 3)}


def _copies(miniature: bool) -> dict[str, Any]:
    """GB/s from and to the GPU, with pinned and unpinned host memory."""
    count = (1 << 20) if miniature else (1 << 30)
    there = torch.empty(count, dtype=torch.uint8, device=device())
    rates = {}
    for pinned in (False, True):
        pin = pinned and torch.cuda.is_available()
        here = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
        kind = "pinned" if pinned else "pageable"
        rates[f"{kind}_out"] = timed(lambda here=here: here.copy_(there), rounds=3)
        rates[f"{kind}_in"] = timed(lambda here=here: there.copy_(here), rounds=3)
    return {name: round(count / seconds / 1e9, 2) for name, seconds in rates.items()}
