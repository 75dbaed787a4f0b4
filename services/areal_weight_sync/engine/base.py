"""What the coordinator asks of an inference server; `http.py` sends it in SGLang's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from areal.weights.broadcast import Seat
from areal.weights.manifest import PolicyVersion


class Fault(StrEnum):
    """Kinds of failure: the metric's label; the message carries the details."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"
    GARBAGE = "garbage"
    UPDATE_REFUSED = "update_refused"
    WRONG_VERSION = "wrong_version"
    WRONG_WEIGHTS = "wrong_weights"


class EngineError(Exception):
    """A server did not do what it should have; `str(error)` is the cause people read."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class CannotPullError(EngineError):
    """The server takes versions from folders only: says nothing about the one it was to pull from.

    Another transport may reach it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Fault.UPDATE_REFUSED, message)


@dataclass(frozen=True)
class Fingerprint:
    """Identifies weights: equal ones give equal digests on servers of one layout.

    Example:
        >>> Fingerprint(layout="tp1:290", digest="9f86d081…")
    """

    layout: str
    """How the engine splits the model; digests of different layouts cannot be compared."""
    digest: str


class Engine(Protocol):
    """One inference server. Every call has a deadline and raises EngineError."""

    ranks: int
    """Processes that receive weights, as of the last `boot_id`; 0: the server cannot receive a
    broadcast."""
    lora_rank: int
    """Highest rank of adapters that the server was started for, as of the last `boot_id`; 0:
    none."""
    connections: int
    """Number of connections opened to the server so far. While it does not change, no request can
    have reached another process."""

    async def weight_version(self, timeout: float = 2.0) -> str:
        """Returns the version that the server reports."""

    async def boot_id(self) -> str:
        """Changes whenever the server's process is started again."""

    async def running(self) -> int:
        """Returns the number of requests running or waiting, as the scheduler itself reports."""

    async def stage(self, version: PolicyVersion, *, timeout: float) -> Fingerprint | None:
        """Has a version's files read ahead, while requests run; of the weights read.

        A `load` without flushing then swaps them in between two steps and needs no pause. None:
        the engine cannot (SGLang); then `load` needs the pause and reads the files in it.
        """

    async def receive(
        self, version: PolicyVersion, seat: Seat, *, timeout: float
    ) -> Fingerprint | None:
        """Joins a trainer's group and takes part in its broadcast, while requests run.

        As `stage`: None when the engine can receive only inside `load`, in the pause.
        """

    async def pause(self, mode: str) -> None:
        """Stops generation between two steps; `mode` as in WeightSyncConfig.interrupt."""

    async def load(self, version: PolicyVersion, *, flush_cache: bool, timeout: float) -> None:
        """Makes a version the one that is served."""

    async def fingerprint(self, timeout: float) -> Fingerprint | None:
        """Returns a checksum of the weights in memory; None when the engine has none."""

    async def logprobs(self, prompt: list[int], version: str, adapter: str = "") -> list[float]:
        """Returns the logprob of each prompt token except the first.

        Args:
            prompt: Token ids.
            version: Prompts share a cache only below the same one.
            adapter: Name of the adapter to compute with; empty: none.
        """

    async def adapters(self) -> list[str]:
        """Returns the names of the adapters that are loaded."""

    async def load_adapter(self, version: PolicyVersion, *, timeout: float) -> None:
        """Loads an adapter under its version's own name, while requests run."""

    async def unload_adapter(self, name: str, *, timeout: float) -> None:
        """Forgets an adapter; requests that still name it may have to end first."""

    async def resume(self) -> None:
        """Continues after `pause`; harmless when not paused."""

    async def sleep(self, mark: str) -> None:
        """Ends every request with its tokens so far, takes `mark` as version, releases its memory.

        It stays paused, and answers everything that does not need the memory.
        """

    async def wake(self, mark: str) -> None:
        """Takes the memory back, and `mark` as version: the weights are undefined until `load`.

        It stays paused.
        """

    async def abort_all(self) -> None:
        """Ends every request; its caller gets the tokens so far."""
