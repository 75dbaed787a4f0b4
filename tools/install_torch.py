"""`install_torch.py LOCK [pip options]`: the locked CPU build of torch, or one that can be had.

The lock names one wheel: the CPU build for CPython 3.11 on Linux x86-64, with its hash. That build
is not on PyPI. Where pip's own indexes have it, it is what is installed. Elsewhere, and with
TORCH_INDEX (e.g. https://download.pytorch.org/whl/cpu, or …/cu128 for GPUs), the same version
comes from there without a hash: builds differ, and so do the CUDA libraries that they bring.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

NOT_THERE = "No matching distribution found for torch"


def pip(*arguments: str) -> tuple[int, str]:
    """Runs this interpreter's pip; its exit code, and what it said on stderr."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *arguments], stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def main(lock: Path, options: list[str]) -> int:
    index = os.environ.get("TORCH_INDEX", "")
    said = ""
    if not index:
        # Only "there is no such wheel" leads on; a wheel with another hash ends this.
        code, said = pip(*options, "--no-deps", "--require-hashes", "--requirement", str(lock))
        if code == 0 or NOT_THERE not in said:
            sys.stderr.write(said)
            return code
    found = re.search(r"^torch==([0-9.]+)", lock.read_text(), re.MULTILINE)
    assert found is not None, f"{lock}: no line torch==VERSION"
    where = f"from {index}" if index else f"from pip's own index, which has no {lock.name} wheel"
    print(f"torch {found[1]} {where}: not checked against a hash", file=sys.stderr)
    from_index = ("--index-url", index) if index else ()
    code, said = pip(*options, *from_index, f"torch=={found[1]}")
    sys.stderr.write(said)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
