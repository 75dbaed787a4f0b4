"""Lets a process say that a restart is pointless when its exit code does not reach the supervisor.

torchrun exits with code 1, whatever the codes of its ranks were. So a rank with bad input, or with
a recipe that fails, writes its one line into the file that `AREAL_VERDICT` names; the supervisor
reads it when the job has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from areal.chassis.files import replacing

VERDICT_VARIABLE = "AREAL_VERDICT"
POD_VERDICT_VARIABLE = "AREAL_POD_VERDICT"
"""A file that outlives the process but not its pod: if Kubernetes restarts a container in place,
the new process reads there what the previous one reported."""
_MOST_BYTES = 4096


def write_verdict(line: str) -> None:
    """Writes that a restart is pointless; does nothing if no file is named."""
    for variable in (VERDICT_VARIABLE, POD_VERDICT_VARIABLE):
        if name := os.environ.get(variable):
            with replacing(Path(name)) as temporary:  # several ranks may say it at once
                temporary.write_bytes(line.encode()[:_MOST_BYTES])


def earlier_verdict() -> str:
    """Returns what an earlier process in this pod's container wrote, or ""."""
    name = os.environ.get(POD_VERDICT_VARIABLE)
    return read_verdict(Path(name)) if name else ""


def read_verdict(file: Path) -> str:
    """Returns the line, or "" if the process wrote none."""
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
