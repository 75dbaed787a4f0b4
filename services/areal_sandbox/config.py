"""What one sandbox service lends, and for how long."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from areal.config.experiment import GRPOConfig
from areal.errors import ConfigError
from areal.protocol.boxes import Isolation
from areal.sandbox.launch import hides_files
from areal.security import SECRET_VARIABLES


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of the service; the first two come from the `sandbox:` section."""

    boxes: int = 8
    """Boxes lent at a time."""
    isolation: Isolation = "namespaces"
    """`namespaces`, or `rlimits`, the weaker mode."""
    http: str = ""
    """http://host:port of the E2B-compatible side; empty: none."""
    secrets: tuple[str, ...] = ()
    """Files that no program may read."""
    warm: int = 2
    """Boxes kept ready to be lent."""
    ttl_s: float = 300.0
    """Seconds that a lease lasts if the request does not say."""
    max_ttl_s: float = 86_400.0
    """Longest lease in seconds, from now; a request for more is refused."""
    max_waiting: int = 256
    """Most commands without a lease that may wait for a box; further ones are refused
    (back-pressure)."""
    max_commands: int = 64
    """Most commands that may run at a time in one lent box."""

    @classmethod
    def from_experiment(cls, experiment: GRPOConfig) -> SandboxConfig:
        """Reads the sections `sandbox` and `endpoints`."""
        section = experiment.sandbox
        if not section.boxes:
            raise ConfigError("sandbox.boxes 0: expected the number of boxes to lend at a time")
        return cls(
            boxes=section.boxes,
            isolation=section.isolation,
            http=experiment.endpoints.sandbox_http,
            secrets=tuple(map(str, experiment.security.files())),
            warm=min(cls.warm, section.boxes),
        )


def check_secrets(config: SandboxConfig) -> None:
    """Refuses to run programs that could read the service's secrets.

    Raises:
        ConfigError: They could. The message names the file, and says what to change.
    """
    if config.isolation == "namespaces" or hides_files():
        return
    for file in config.secrets:
        # As root, the programs run as the user `nobody`; otherwise as this process does.
        if Path(file).stat().st_mode & 0o004 if os.getuid() == 0 else os.access(file, os.R_OK):
            raise ConfigError(
                f"sandbox.isolation rlimits: programs in a box could read {file}; expected a "
                "kernel with Landlock, isolation namespaces, or a service without that file (the "
                "token in AREAL_TOKEN, no TLS)"
            )


def forget_secrets() -> None:
    """Removes secrets from this process's environment, which it has read.

    Also from the memory that /proc/PID/environ shows: Linux shows it to root alone (see
    `hide_memory`), but kernels that stand in for it (gVisor) may show it to every process.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in SECRET_VARIABLES:
        if name in os.environ:
            ctypes.memset(libc.getenv(name.encode()), 0, len(os.fsencode(os.environ[name])))
            del os.environ[name]
