"""Machines with GPUs that are not there: what torch, the driver and SGLang's environment show."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal_launch.doctor import gpus as doctor
from areal_launch.gpus.engine import SGLANG, Installed
from areal_launch.gpus.probe import Device, TorchFound
from areal_launch.gpus.visible import MIG, listed

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."
GIB = 1024**3

# A package `torch` as far as the probe looks at it; {…} are filled in by `write_torch`.
_VERSION = "__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n"
_CUDA = """
import os
def init():
    if {error!r}:
        raise RuntimeError({error!r})
def device_count():
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {count} if shown is None else len([each for each in shown.split(",") if each])
def get_device_name(index):
    return f"Fake {{index}}"
def mem_get_info(index):
    return (80 - index) << 30, 80 << 30
"""


def write_torch(
    folder: Path, *, version: str, cuda: str | None, error: str, count: int, hip: str | None = None
) -> Path:
    """Writes the package; its folder goes onto PYTHONPATH."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torch import cuda\n")
    (package / "version.py").write_text(_VERSION.format(version=version, cuda=cuda, hip=hip))
    (package / "cuda.py").write_text(_CUDA.format(error=error, count=count))
    return folder


def write_sglang(root: Path, state: Installed) -> Path:
    """Makes the environment of `make sglang-gpu` in `root`, as far as it came; its interpreter."""
    python = root / SGLANG / "bin" / "python"
    if state is not Installed.ABSENT:
        python.parent.mkdir(parents=True)
        python.touch()
    if state is Installed.WHOLE:
        package = root / SGLANG / "lib/python3.11/site-packages/sglang"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (root / SGLANG / ".set-up").touch()
    return python


def torch_of(kind: str, environment: Mapping[str, str], *, there: int = 8) -> TorchFound:
    """What the probe finds: `cpu build`, `cuda ok` or `driver too old`."""
    if kind == "cpu build":
        return TorchFound("2.14.1+cpu", driver="580.65.06")
    if kind == "driver too old":
        return TorchFound("2.14.1", "CUDA 13.0", error=TOO_OLD, driver="550.54.14")
    names = listed(environment)
    count = there if names is None else min(there, len(names))
    if names and names[0].startswith(MIG):
        count = 1  # CUDA shows a process one slice
    devices = tuple(Device(f"H100 {index}", (79 - index) * GIB) for index in range(count))
    return TorchFound("2.14.1", "CUDA 13.0", devices, driver="580.65.06")


def install(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    *,
    torch: str = "cuda ok",
    sglang: Installed = Installed.WHOLE,
    visible: str | None = None,
    there: int = 8,
    free: int = 0,
) -> None:
    """Makes this machine look so to launcher and doctor; `free`: bytes on every GPU."""
    import os

    write_sglang(root, sglang)
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def probe(python: str, environment: object = None, *, memory: bool = False) -> TorchFound:
        found = torch_of(torch, os.environ, there=there)
        if free:
            devices = tuple(Device(each.name, free) for each in found.devices)
            found = TorchFound(found.version, found.build, devices, found.error, found.driver)
        return found

    monkeypatch.setattr(doctor, "probe", probe)
    monkeypatch.setattr(doctor, "device_files", lambda: there)
