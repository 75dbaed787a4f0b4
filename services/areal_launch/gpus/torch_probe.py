"""Prints what the torch of an environment can do with GPUs, as one line of JSON.

Runs by its source (`python -c`), also where `areal` is not installed. The argument `memory` asks
for the free memory as well, which starts CUDA on each GPU.
"""

import json
import runpy
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def look(*, memory: bool) -> dict[str, Any]:
    """Returns the version, what it is built for, and each GPU; `error`: why CUDA does not start."""
    found: dict[str, Any] = {"version": "", "cuda": "", "hip": "", "devices": [], "error": ""}
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    version = Path(folders[0]) / "version.py" if folders else None
    if version is None or not version.is_file():
        return found
    # Not by importing torch, which takes seconds: a CPU build is known from this file.
    build = runpy.run_path(str(version))
    found["version"] = str(build["__version__"])
    found["cuda"], found["hip"] = (str(build.get(key) or "") for key in ("cuda", "hip"))
    if not (found["cuda"] or found["hip"]):
        return found
    try:
        cuda: Any = import_module("torch.cuda")
        cuda.init()
        for index in range(cuda.device_count()):
            device = {"name": cuda.get_device_name(index), "free": 0}
            if memory:
                device["free"] = cuda.mem_get_info(index)[0]
            found["devices"].append(device)
    except Exception as error:  # torch raises many classes for a driver that does not fit
        found["error"] = " ".join(str(error).split())[:300] or type(error).__name__
    return found


if __name__ == "__main__":
    print(json.dumps(look(memory="memory" in sys.argv[1:])))  # noqa: T201
