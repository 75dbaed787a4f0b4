"""How a process says that starting it again is pointless, where its exit code cannot get through.

torchrun ends with code 1 whatever its ranks ended with. So a rank with bad input, or with a recipe
that fails, writes its one line into the file that `AREAL_VERDICT` names; the supervisor reads it
when the job has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

VERDICT_VARIABLE = "AREAL_VERDICT"
POD_VERDICT_VARIABLE = "AREAL_POD_VERDICT"
"""A file that outlives the process but not its pod: a container that Kubernetes starts again in
place reads there what its life before said."""
_MOST_BYTES = 4096


def write_verdict(line: str) -> None:
    """Says that starting again is pointless; nothing to do where no one asks."""
    for variable in (VERDICT_VARIABLE, POD_VERDICT_VARIABLE):
        if name := os.environ.get(variable):
            file = Path(name)
            # Several ranks may say it at once.
            temporary = file.with_name(f".{file.name}.{os.getpid()}")
            temporary.write_bytes(line.encode()[:_MOST_BYTES])
            temporary.replace(file)


def earlier_verdict() -> str:
    """What an earlier life of this pod's container said, or ""."""
    name = os.environ.get(POD_VERDICT_VARIABLE)
    return read_verdict(Path(name)) if name else ""


def read_verdict(file: Path) -> str:
    """The line, or "": the process had no such complaint."""
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
