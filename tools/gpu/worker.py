"""Runs tries one after another in one process, so packages are imported once.

    stdin   one JSON object a line: module, setting, miniature, limit_s
    stdout  one JSON object a line: the GPU and torch once packages are imported, then each result

What anything else prints goes to stderr, and so do all stacks, shortly before a try's limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any


def main() -> None:
    """Serves until stdin ends, or until a try has left the GPU in doubt."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for name in ("torch", "transformers", "areal_torch.engines.fsdp"):
        with contextlib.suppress(Exception):  # a try that needs it says so
            import_module(name)
    print(json.dumps(_describe()), file=results)
    for line in sys.stdin:
        order = json.loads(line)
        limit_s = order["limit_s"]
        faulthandler.dump_traceback_later(max(limit_s - 5, 0.9 * limit_s))
        result = run(order["module"], order["setting"], miniature=order["miniature"])
        faulthandler.cancel_dump_traceback_later()
        usable = clean(result)
        print(json.dumps(result | {"usable": usable}), file=results)
        if not usable:
            return


def _describe() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"gpu": "", "torch": ""}
    there = torch.cuda.is_available()
    return {"gpu": torch.cuda.get_device_name() if there else "", "torch": torch.__version__}


def run(module: str, setting: dict[str, Any], *, miniature: bool) -> dict[str, Any]:
    """Returns the outcome of a try and its figures; never raises."""
    try:
        measure = import_module(f"tools.gpu.cases.{module}").measure
        return {"outcome": "ok", **measure(setting, miniature)}
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("areal", "tools"):
            return _failed(error)
        return {"outcome": "skipped", "why": f"needs {package}"}
    except BaseException as error:  # a library's exit would end the worker
        name = type(error).__name__
        if name == "Skipped":
            return {"outcome": "skipped", "why": f"needs {error}"}
        if name == "InvalidInput":
            return {"outcome": "refused", "why": str(error)[:300]}
        if name in ("OutOfMemoryError", "CapacityExceeded"):
            return {"outcome": "out of memory", "why": str(error).splitlines()[0][:300]}
        return _failed(error)


def _failed(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = [f"{os.path.relpath(f.filename)}:{f.lineno} {f.name}" for f in frames]
    said = " ".join(str(error).split())[:300]
    return {"outcome": "failed", "why": f"{type(error).__name__}: {said}", "frames": places}


def clean(result: dict[str, Any]) -> bool:
    """Releases a try's memory; returns whether the process can run another."""
    gc.collect()
    torch = sys.modules.get("torch")
    roomy = result["outcome"] != "out of memory"
    if torch is None:
        return roomy
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not torch.cuda.is_available():
        return roomy
    try:
        torch.cuda.synchronize()
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    except RuntimeError as error:
        result["afterwards"] = str(error).splitlines()[0][:200]
        return False
    return roomy


if __name__ == "__main__":
    main()
