"""Asks an environment's torch, in a process of its own, what it can do with this machine's GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROBE_S = 60.0
"""Deadline of the probe in seconds; importing torch from a cold disk takes most of it."""
_DRIVER_S = 20.0
_NVIDIA = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """A GPU as torch sees it."""

    name: str
    free: int = 0
    """Bytes; 0: not asked for."""


@dataclass(frozen=True)
class TorchFound:
    """What the torch of an environment can do."""

    version: str
    """Empty: torch is not installed."""
    build: str = "CPU"
    """CPU, CUDA 13.0, ROCm 7.0."""
    devices: tuple[Device, ...] = ()
    error: str = ""
    """Why CUDA does not start, in torch's words."""
    driver: str = ""
    """Version of the GPU driver; empty: none was found."""

    def __str__(self) -> str:
        """`torch 2.14.1 (built for CUDA 13.0), driver 580.65`."""
        torch = f"torch {self.version} (built for {self.build})" if self.version else "no torch"
        if self.driver or not self.devices:
            return f"{torch}, {f'driver {self.driver}' if self.driver else 'no GPU driver found'}"
        return torch  # its GPUs have a driver, but not NVIDIA's


def probe(
    python: str, environment: Mapping[str, str] | None = None, *, memory: bool = False
) -> TorchFound:
    """Returns what the torch of an interpreter can do; never raises.

    Args:
        python: The environment's interpreter.
        environment: Variables, among them the GPUs to show; None: this process's.
        memory: Ask for the free memory of each GPU, too.
    """
    source = Path(__file__).with_name("torch_probe.py").read_text("utf-8")
    command = [python, "-c", source, *(["memory"] if memory else [])]
    try:
        done = subprocess.run(  # noqa: S603 - our own script
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PROBE_S,
            check=False,
            env=dict(os.environ if environment is None else environment),
        )
    except subprocess.TimeoutExpired:
        return TorchFound("?", "?", error=f"it did not answer within {PROBE_S:.0f} s")
    except OSError as error:
        return TorchFound("", error=f"{python}: {error.strerror}")
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return TorchFound("?", "?", error=said[:300], driver=driver_version())
    found = json.loads(answers[-1])
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU"
    return TorchFound(
        found["version"],
        f"ROCm {found['hip']}" if found["hip"] else build,
        tuple(Device(each["name"], each["free"]) for each in found["devices"]),
        found["error"],
        driver_version(),
    )


def driver_version(file: Path = _NVIDIA) -> str:
    """Returns the version of the GPU driver; empty if there is none.

    The kernel's module says it, or nvidia-smi where the driver is the host's (WSL2).
    """
    try:
        if found := re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8")):
            return found[0]
    except OSError:
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(  # noqa: S603 - what PATH has under that name
            query,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_DRIVER_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.strip().partition("\n")[0].strip()
