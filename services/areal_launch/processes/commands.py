"""Runs the programs of a cluster: sbatch, helm and their like."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal.errors import ArealError, NotFound

COMMAND_TIMEOUT_S = 60.0


def find_program(name: str, hint: str) -> str:
    """Finds a program on PATH or next to this Python, whose environment need not be active.

    Raises:
        NotFound: There is none; the line ends with `hint`.
    """
    beside = str(Path(sys.executable).parent)
    if found := shutil.which(name) or shutil.which(name, path=beside):
        return found
    raise NotFound(f"no program {name!r} on PATH or in {beside}; {hint}")


def run_command(
    argv: Sequence[str],
    hint: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = COMMAND_TIMEOUT_S,
) -> str:
    """Runs a program to its end; returns what it printed.

    No secret may be in `argv`; `hint` says what to do where there is no such program.

    Raises:
        NotFound: There is no such program.
        ArealError: The command failed (with its own message), or did not answer in time.
    """
    program = find_program(argv[0], hint)
    try:
        done = subprocess.run(  # noqa: S603 - named by us or by the experiment's owner
            [program, *argv[1:]],
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ArealError(f"{argv[0]}: no answer within {timeout:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ArealError(f"{argv[0]}: {said[:2000]}")
    return done.stdout
