"""Runs the programs of a cluster: sbatch, helm, kubectl and their like."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from areal.errors import ArealError, NotFound

COMMAND_TIMEOUT_S = 60.0


def run_command(
    argv: Sequence[str],
    hint: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = COMMAND_TIMEOUT_S,
    stdin: str = "",
) -> str:
    """Runs a program to its end; returns what it printed.

    Args:
        argv: No secret in it.
        hint: What to do where there is no such program.
        environment: None: ours.
        timeout: Seconds.
        stdin: What it reads.

    Raises:
        NotFound: It is not on PATH.
        ArealError: It failed, in its own words, or gave no answer in time.
    """
    if shutil.which(argv[0]) is None:
        raise NotFound(f"no program {argv[0]!r} on PATH; {hint}")
    try:
        done = subprocess.run(  # noqa: S603 - named by us or by the experiment's owner
            list(argv),
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise ArealError(f"{argv[0]}: no answer within {timeout:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ArealError(f"{argv[0]}: {said[:2000]}")
    return done.stdout
