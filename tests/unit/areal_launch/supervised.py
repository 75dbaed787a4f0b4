"""Small Python programs to supervise, and what is heard of them."""

from __future__ import annotations

import sys
from pathlib import Path

from areal_launch.processes.probes import Probe
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import RestartPolicy

FAST = RestartPolicy(max_restarts=3, ready_timeout_s=60.0, first_delay_s=0.02, max_delay_s=0.05)


class Recorder:
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []

    def __call__(self, level: str, process: str, text: str) -> None:
        self.events.append((level, process, text))

    def texts(self, level: str) -> list[str]:
        return [text for each, _, text in self.events if each == level]


def python(name: str, code: str, log: Path, **options: object) -> ProcessSpec:
    return ProcessSpec(name, (sys.executable, "-c", code), log / f"{name}.log", **options)  # type: ignore[arg-type]


def file_probe(file: Path) -> Probe:
    async def probe() -> str:
        return "" if file.exists() else f"no {file.name} yet"  # noqa: ASYNC240

    return probe
