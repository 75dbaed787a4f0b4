"""What a display needs of a stack, whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from areal.config.experiment import BaseExperimentConfig
    from areal_launch.processes.supervisor import ProcessState
    from areal_launch.run_folder import RunFolder
    from areal_launch.stack.events import EventLog


class ShownProcess(Protocol):
    """One of its processes."""

    @property
    def state(self) -> ProcessState:
        """Where it is in its life."""
        ...

    @property
    def restarts(self) -> int:
        """So far."""
        ...


class ShownStack(Protocol):
    """A stack: ours (`LocalStack`) or another machine's (`FollowedStack`)."""

    @property
    def config(self) -> BaseExperimentConfig:
        """With endpoints."""
        ...

    @property
    def folder(self) -> RunFolder:
        """Where its files are."""
        ...

    @property
    def events(self) -> EventLog:
        """What happens to it."""
        ...

    @property
    def started(self) -> float:
        """Unix seconds."""
        ...

    @property
    def state(self) -> str:
        """starting, ready, stopping, ..."""
        ...

    @property
    def interrupt_hint(self) -> str:
        """What Ctrl-C does."""
        ...

    @property
    def processes(self) -> Mapping[str, ShownProcess]: ...


class ShownUsage(Protocol):
    """Memory of its processes."""

    @property
    def now_mb(self) -> Mapping[str, float]:
        """By process name; what is not there is not known."""
        ...


class NoUsage:
    """Of processes that run elsewhere."""

    now_mb: Mapping[str, float] = {}
