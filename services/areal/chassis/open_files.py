"""How many files and sockets this process may have open at once."""

from __future__ import annotations

import resource

_ENOUGH = 1_048_576


def open_files() -> int:
    """Raises the limit as far as the system lets us (it often starts at 1,024); returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return min(soft, most) if soft != resource.RLIM_INFINITY else most
