"""How many inference servers a training needs: what an HPA, KEDA or a person scales to.

    every few seconds: servers, seconds of generation, step rows ──> Recommender ──> a number
                                                                        │ window: since the number
                                                                        v of servers last changed
                                                        n * (generation busy / training busy) / 0.85

With n servers a step's generation takes A / n seconds and its training T. The slower of both sets
the pace of steps, so the fraction of time in which tokens are sampled, divided by the fraction in
which the trainer trains, is A / (n T), whichever of them waits. Times n it no longer depends on n:
the recommendation is where generation would take 0.85 of the training time, whether it is far or
near, and following it does not change it. That is why it does not oscillate; what is left is noise,
against which a window, a dead band and a delay before going down help. docs/autoscaling.md has the
reasoning and the simulation.

| who     | consumes           | waits for | unblocked by |
|---------|--------------------|-----------|--------------|
| observe | one sample         | nothing   |              |
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

TARGET = 0.85
"""Generation's share of the training time; the rest absorbs stragglers and longer answers."""

# These fit steps of a second to a minute.
_WINDOW_S = 240.0
_LEAST_S = 60.0
"""Fewest seconds of observation from which a number is recommended."""
_DOWN_AFTER_S = 300.0
"""A lower number is recommended if every window for this many seconds says so."""
_BAND = 0.2
"""Relative change below which nothing changes."""
_MAX_FACTOR = 2.0
"""Largest factor by which one recommendation changes the number of servers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals since some start; differences of two of them are what counts.

    Example:
        >>> Sample(at=60.0, servers=2, generating_s=51.0, training_s=44.0, trained_s=58.0)
    """

    at: float
    """Seconds, monotonic."""
    servers: int
    """Servers that take traffic."""
    generating_s: float
    """Seconds in which at least one episode was running."""
    training_s: float
    """Seconds of finished steps, without waiting for batches."""
    trained_s: float
    """Wall time of finished steps."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load in a window of time."""

    servers: int
    generation_busy: float
    """0 to 1."""
    training_busy: float
    """0 to 1; 1 where nothing trains."""

    @property
    def wanted(self) -> float:
        """Returns how many servers generation needs to take `TARGET` of the training time."""
        return self.servers * self.generation_busy / max(self.training_busy, 0.02) / TARGET


class Recommender:
    """Computes a recommendation from samples; does no I/O."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._wanted: deque[tuple[float, int]] = deque()
        self.recommended = 0
        """The recommended number of servers; 0: not known yet."""
        self.load = Load(0, 0.0, 1.0)

    def observe(self, sample: Sample) -> int:
        """Takes one sample; returns the recommendation."""
        samples = self._samples
        if samples and (
            samples[-1].servers != sample.servers  # what was before says nothing of now
            or sample.trained_s < samples[-1].trained_s  # another trainer
        ):
            samples.clear()
        samples.append(sample)
        while sample.at - samples[0].at > _WINDOW_S:
            samples.popleft()
        first, elapsed = samples[0], sample.at - samples[0].at
        if elapsed < _LEAST_S or not sample.servers:
            return self.recommended
        steps_s = sample.trained_s - first.trained_s
        self.load = Load(
            servers=sample.servers,
            generation_busy=_share(sample.generating_s - first.generating_s, elapsed),
            training_busy=_share(sample.training_s - first.training_s, steps_s),
        )
        self._settle(sample.at)
        return self.recommended

    def _settle(self, now: float) -> None:
        servers, wanted = self.load.servers, self.load.wanted
        low, high = servers / _MAX_FACTOR, servers * _MAX_FACTOR
        bounded = max(1, math.ceil(min(max(wanted, low), high) - 0.05))
        self._wanted.append((now, bounded))
        while now - self._wanted[0][0] > _DOWN_AFTER_S:
            self._wanted.popleft()
        held = self.recommended or servers
        if bounded > held and wanted > held * (1 + _BAND):
            self.recommended = bounded
            return
        self.recommended = held
        most = max(number for _, number in self._wanted)
        watched = now - self._wanted[0][0] >= 0.9 * _DOWN_AFTER_S
        if watched and most < held and wanted < held * (1 - _BAND):
            self.recommended = most


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0
