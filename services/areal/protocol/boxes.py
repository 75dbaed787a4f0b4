"""What a program in a box may use, and how it ended; both also as messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, cast

from areal.errors import InvalidInput
from areal.v1 import sandbox_service_pb2 as pb

Isolation = Literal["namespaces", "rlimits"]
Cause = Literal["", "time", "memory", "processes", "output", "cpu", "killed"]


@dataclass(frozen=True)
class Limits:
    """What one program may use: all its processes together, unless a field says otherwise."""

    seconds: float = 10.0
    """Wall time."""
    memory_mb: int = 512
    processes: int = 32
    output_kb: int = 256
    """Stdout and stderr together."""
    disk_mb: int = 64
    """Size of /tmp; /dev/shm has the same size."""
    cpu_seconds: float = 600.0
    """CPU time of each process, in whole seconds."""

    def __post_init__(self) -> None:
        """Raises InvalidInput for a limit that is not above zero."""
        for name, value in asdict(self).items():
            if not 0 < value < 1 << 31:
                raise InvalidInput(f"Limits.{name}: {value!r}: expected a number above 0")


@dataclass(frozen=True)
class Ended:
    """How a command ended, without its output."""

    exit_code: int
    """128 plus the signal's number if a signal ended the command."""
    cause: Cause
    """The limit that ended it (`killed`: its whole box was ended); empty: it ended on its own."""
    seconds: float
    memory: int
    """Peak in bytes, as sampled every 20 ms; 0 for a shorter program."""
    failed: str = ""
    """Why the command did not start."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended; see Ended."""

    exit_code: int
    cause: Cause
    stdout: str
    stderr: str
    seconds: float
    memory: int


def limits_to_pb(limits: Limits) -> pb.SandboxLimits:
    """Converts limits to their message."""
    return pb.SandboxLimits(**asdict(limits))


def limits_from_pb(message: pb.SandboxLimits) -> Limits:
    """Returns the limits, defaults where the message has zeros; raises InvalidInput below that."""
    given = {field.name: value for field, value in message.ListFields()}
    return Limits(**given)


def ended_to_pb(ended: Ended) -> pb.CommandEnd:
    """Converts the end of a command to its message."""
    return pb.CommandEnd(
        exit_code=ended.exit_code, cause=ended.cause, seconds=ended.seconds, memory=ended.memory
    )


def ended_from_pb(message: pb.CommandEnd) -> Ended:
    """Returns how a command ended."""
    return Ended(message.exit_code, cast("Cause", message.cause), message.seconds, message.memory)
