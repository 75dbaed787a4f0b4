"""Properties of this machine: versions and what is missing, speed of a product and of copies."""

from __future__ import annotations

import importlib.util
import inspect
import platform
import shutil
import subprocess
from importlib import metadata
from time import perf_counter
from typing import Any

import torch

_PACKAGES = (
    *("transformers", "triton", "pydantic", "structlog", "tokenizers", "safetensors", "peft"),
    *("flash_attn", "liger_kernel", "sglang", "omegaconf", "obstore"),
)


def measure(setting: dict[str, Any], miniature: bool) -> dict[str, Any]:
    """Versions; TFLOP/s of a product; GB/s to and from the GPU, and of filling new host memory."""
    return {"versions": _versions, "matmul": _matmul, "copies": _copies}[setting["of"]](miniature)


def _versions(miniature: bool) -> dict[str, Any]:
    del miniature
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if program := shutil.which("nvidia-smi"):
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        found["driver"] = said.stdout.split("\n")[0]
    found["compiler"] = shutil.which("nvcc") or "no nvcc"
    found["missing"] = [name for name in _PACKAGES if not importlib.util.find_spec(name)]
    for name in set(_PACKAGES) - set(found["missing"]):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a package's name is not always its module's
            found[name] = "there"
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        found["varlen_attn"] = " ".join(inspect.signature(varlen_attn).parameters)
    return found


def _matmul(miniature: bool) -> dict[str, Any]:
    from tools.gpu.models import device, timed

    size = 128 if miniature else 8192
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in "ab")
    seconds, spread = timed(lambda _: left @ right, rounds=10, warm=3)
    return {"tflops": round(2 * size**3 / seconds / 1e12, 3), "spread": spread}


def _copies(miniature: bool) -> dict[str, Any]:
    from tools.gpu.models import device, timed

    count = (1 << 20) if miniature else (1 << 28)
    there = torch.empty(count, dtype=torch.uint8, device=device())
    rates = {}
    for pinned in (False, True):
        kind = "pinned" if pinned else "pageable"
        for turn in ("first", "again"):  # an allocator may keep what it gets back
            began = perf_counter()
            here = torch.empty(count, dtype=torch.uint8, pin_memory=pinned and there.is_cuda)
            here.fill_(1)
            rates[f"{kind}_new_{turn}"] = perf_counter() - began
        rates[f"{kind}_out"] = timed(lambda _, here=here: here.copy_(there), rounds=3, warm=1)[0]
        rates[f"{kind}_in"] = timed(lambda _, here=here: there.copy_(here), rounds=3, warm=1)[0]
    return {f"{name}_gb_s": round(count / s / 1e9, 2) for name, s in rates.items()}
