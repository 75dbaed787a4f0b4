"""Is there room where a process writes? A full disk is waited for, not restarted into."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

# (folder) -> bytes that this user may still write there.
FreeBytes = Callable[[Path], int]

# Redis, NATS, logs and a small checkpoint begin to fail at once below this.
LEAST_BYTES = 16 * 1024 * 1024
WAIT_S = 3600.0
"""A disk that stays full for so long is given up."""
LOOK_INTERVAL_S = 1.0
"""Nothing announces free space: it is looked for."""


def free_bytes(folder: Path) -> int:
    """Of the file system that holds `folder`; quotas are not seen."""
    return shutil.disk_usage(folder).free


def is_full(error: OSError) -> bool:
    """Whether this error is for want of space."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
