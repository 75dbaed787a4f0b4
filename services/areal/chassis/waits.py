"""Records what a process waits for, for the watchdog, /metrics, /waits and `areal status`.

with waits.on("batch", "buffer", "step 7"): ...   a wait in the code ──┐
├──> oldest of each kind
waits.watch(function)          a component that keeps its own record ──┘    /metrics, /waits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class Wait:
    """A wait that has not ended yet.

    Example:
        >>> str(Wait("batch", "buffer", 4.24, "step 7: 3 of 64 groups are completed"))
        'batch (step 7: 3 of 64 groups are completed) on buffer for 4.2 s'
    """

    what: str
    """The kind of wait: one of few words, a label of the metric."""
    on: str
    """The service or process that is waited for."""
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.what}{detail} on {self.on} for {self.seconds:.1f} s"


Source = Callable[[], Iterable[Wait]]


class Waits:
    """All waits of a process; they may begin and end in any of its threads."""

    def __init__(self) -> None:
        self._open: dict[object, tuple[str, str, float, str]] = {}
        self._sources: list[Source] = []

    @contextmanager
    def on(self, what: str, whom: str, detail: str = "") -> Iterator[None]:
        """Records a wait for as long as the block runs."""
        ticket = object()
        self._open[ticket] = (what, whom, time.monotonic(), detail)
        try:
            yield
        finally:
            del self._open[ticket]

    def watch(self, source: Source) -> None:
        """Also reads waits from `source` whenever waits are listed."""
        self._sources.append(source)

    def oldest(self) -> list[Wait]:
        """Returns the oldest wait of each kind, the longest wait first."""
        now = time.monotonic()
        found = [
            Wait(what, whom, now - since, detail)
            for what, whom, since, detail in list(self._open.values())
        ]
        for source in self._sources:
            found.extend(source())
        kinds: dict[str, Wait] = {}
        for wait in sorted(found, key=lambda each: -each.seconds):
            kinds.setdefault(wait.what, wait)
        return list(kinds.values())

    def as_json(self, service: str) -> dict[str, Any]:
        """Returns the body of /waits."""
        return {"service": service, "waits": [asdict(wait) for wait in self.oldest()]}


class WaitsCollector(Collector):
    """Collects the gauge `areal_<service>_oldest_wait_seconds{what}`."""

    def __init__(self, service: str, waits: Waits, registry: CollectorRegistry | None = None):
        self._name = f"areal_{service.replace('-', '_')}_oldest_wait_seconds"
        self._waits = waits
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields one sample for each kind of wait that is in progress."""
        gauge = GaugeMetricFamily(
            self._name, "Age of the oldest wait, by kind; /waits has the details.", labels=["what"]
        )
        for wait in self._waits.oldest():
            gauge.add_metric([wait.what], wait.seconds)
        yield gauge
