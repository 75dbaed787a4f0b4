"""`install_torch.py LOCK [pip options]`: the locked build of torch, or one that can be had.

torch-cuda.txt has PyPI's build and the CUDA libraries that it needs, with hashes. torch-cpu.txt has
one wheel, the CPU build for CPython 3.11 on Linux x86-64, which is not on PyPI; where pip's own
indexes lack it, the same version comes from PyTorch's index of CPU builds, without a hash: PyPI's
would bring gigabytes of CUDA. TORCH_INDEX names another index for the locked version, without a
hash; its builds, and the drivers that they need, are in requirements/torch-builds.json.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

NOT_THERE = "No matching distribution found for torch"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def pip(*arguments: str) -> tuple[int, str]:
    """Runs this interpreter's pip; its exit code, and what it said on stderr."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def main(lock: Path, options: list[str]) -> int:
    index = os.environ.get("TORCH_INDEX", "")
    found = re.search(r"^torch==([0-9.]+)(\+cpu)?", lock.read_text(), re.MULTILINE)
    assert found is not None, f"{lock}: no line torch==VERSION"
    why = ""
    if not index:
        # Only "there is no such wheel" leads on, for CPUs; a wheel with another hash ends this.
        code, said = pip(*options, "--no-deps", "--require-hashes", "--requirement", str(lock))
        if code == 0 or NOT_THERE not in said or not found[2]:
            sys.stderr.write(said)
            return code
        index, why = CPU_INDEX, f", since pip's own indexes have no wheel of {lock.name}"
    print(f"torch {found[1]} from {index}{why}: not checked against a hash", file=sys.stderr)
    code, said = pip(*options, "--index-url", index, f"torch=={found[1]}")
    sys.stderr.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
