"""`pack.py FOLDER PYTHON`: puts the kit, what it measures, and wheels into a folder (make gpu-kit).

The folder runs on a machine without network, wherever it is copied: `bash FOLDER/run.sh`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def copy(folder: Path) -> None:
    """Copies this repository's part."""
    shutil.rmtree(folder, ignore_errors=True)
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("services", "tools/gpu"):
        shutil.copytree(ROOT / name, folder / name, ignore=without)
    shutil.copy(ROOT / "tools/tiny_architectures.py", folder / "tools")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "examples/arithmetic_grpo.py", folder / "examples")
    shutil.copy(ROOT / "tools/gpu/run.sh", folder)


def download(folder: Path, python: str) -> None:
    """Downloads the carried packages for Linux x86-64 and a version of Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [part for each in PLATFORMS for part in ("--platform", each)]
    command += ["--dest", str(folder / "wheels"), "-r", str(ROOT / "tools/gpu/carried.txt")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
    download(Path(sys.argv[1]), sys.argv[2])
