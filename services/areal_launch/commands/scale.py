"""`areal scale inference=N`: asks the launcher of a running stack to scale; prints its progress."""

from __future__ import annotations

import asyncio
from pathlib import Path

from areal.config.experiment import load_service_config
from areal.errors import InvalidInput, NotFound
from areal_launch.run_folder import find_run
from areal_launch.stack.control_socket import ask
from areal_launch.view.output import say

# On top of rollout.setup_timeout_s: time to drain, and for an earlier command to end.
_MARGIN_S = 120.0


def scale_stack(run: Path | None, targets: list[str]) -> int:
    """Returns once there are N servers, all at the current version.

    Raises:
        InvalidInput: `targets` is not `inference=N`, or the launcher could not scale.
        NotFound: No stack is running in that run folder.
    """
    if len(targets) != 1:
        raise InvalidInput(f"{' '.join(targets)!r}: expected inference=N")
    name, _, count = targets[0].partition("=")
    if name != "inference" or not count.isdigit():
        raise InvalidInput(f"{targets[0]!r}: expected inference=N")
    folder = find_run(run)
    if not folder.held():
        raise NotFound(f"{folder.path}: not running")
    timeout = load_service_config(folder.config_file).setup_timeout_s + _MARGIN_S
    request = {"scale": {"inference": int(count)}}
    try:
        done = asyncio.run(ask(folder.control_file, request, say, timeout))
    except NotFound as error:
        if not (job := folder.read_stack().get("launcher", {}).get("slurm_job")):
            raise
        raise NotFound(f"{error}; run it on the first node of Slurm job {job}") from None
    say(done)
    return 0
