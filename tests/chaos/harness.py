"""Breaks a running training at random, seeded, until time is over or the run ends.

A deck holds every process once for each action; it is shuffled, dealt, and shuffled again. So a
short run breaks everything at least once, and the order is the seed's. Several may be broken at
once, a process never twice before it was ready again and training had continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import signal
import time

from tests.chaos.faults import KILL, STOP, Fault, Victims, send

GAP_S = (1.5, 6.0)
STOPPED_S = (1.0, 20.0)
RECOVERY_S = 120.0
"""A process that takes longer than this to come back fails the test."""
RECOVERED_S = 5.0
_LOOK_S = 0.05


class Chaos:
    """One seeded series of faults."""

    def __init__(self, victims: Victims, seed: int, at_once: int) -> None:
        self.faults: list[Fault] = []
        self._victims = victims
        self._random = random.Random(seed)
        self._deck: list[tuple[str, str]] = []
        self._broken: set[str] = set()
        self._at_once = at_once
        # (fault, broken, ready) and finished steps, in Unix seconds.
        self._windows: list[tuple[Fault, float, float]] = []
        self._steps: list[float] = []
        self._began = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Returns when time is over (or the run has ended) and all have recovered."""
        self._began = time.monotonic()
        noting = asyncio.create_task(self._note_steps())
        async with asyncio.TaskGroup() as recoveries:
            while time.monotonic() - self._began < seconds and not self._victims.ended():
                if len(self._broken) < self._at_once and (card := self._deal()):
                    recoveries.create_task(self._break_one(*card))
                await asyncio.sleep(self._random.uniform(*GAP_S))
        # The step after the last recovery ends the last pause.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(noting, RECOVERED_S)
        self._note_pauses()

    def _deal(self) -> tuple[str, str] | None:
        """The next card whose victim is up and not broken already."""
        up = self._victims.pids()
        if not self._deck:
            self._deck = [(name, action) for name in sorted(up) for action in (KILL, STOP)]
            self._random.shuffle(self._deck)
        for card in self._deck:
            if card[0] in up and card[0] not in self._broken:
                self._deck.remove(card)
                return card
        return None

    async def _break_one(self, name: str, action: str) -> None:
        pid = self._victims.pids().get(name, 0)
        length = round(self._random.uniform(*STOPPED_S), 1)
        broken_at = time.time()
        if not pid or not send(pid, signal.SIGKILL if action == KILL else signal.SIGSTOP):
            return  # it has just gone by itself
        fault = Fault(name, action, round(time.monotonic() - self._began, 1))
        self.faults.append(fault)
        self._broken.add(name)
        try:
            if action == STOP:
                await asyncio.sleep(length)
                send(pid, signal.SIGCONT)
                fault.stopped_s = length
            await self._watch(fault, pid if action == KILL else 0, broken_at, time.time())
        finally:
            self._broken.discard(name)

    async def _watch(self, fault: Fault, gone: int, broken_at: float, released: float) -> None:
        """Notes when the victim is ready; returns when training has gone on, too."""
        while fault.ready_s is None or self._victims.stepped_at() < released:
            if self._victims.ended():
                return
            if time.time() - released > RECOVERY_S:
                fault.late = True
                return
            if fault.ready_s is None and await self._victims.ready(fault.victim, gone, released):
                fault.ready_s = round(time.time() - released, 2)
                self._windows.append((fault, broken_at, time.time()))
            await asyncio.sleep(_LOOK_S)

    async def _note_steps(self) -> None:
        """Collects the times at which steps were finished."""
        while True:
            stepped = self._victims.stepped_at()
            if stepped and stepped not in self._steps[-1:]:
                self._steps.append(stepped)
            await asyncio.sleep(_LOOK_S)

    def _note_pauses(self) -> None:
        """The longest time without a step after each fault; what the next one adds is its own."""
        pauses = list(itertools.pairwise(self._steps))
        faults = sorted(broken_at for _, broken_at, _ in self._windows)
        for fault, broken_at, ready_at in self._windows:
            end = min((next_ for next_ in faults if next_ > ready_at), default=math.inf)
            lengths = [
                min(b, end) - max(a, broken_at) for a, b in pauses if a < ready_at and b > broken_at
            ]
            fault.pause_s = round(max(lengths), 2) if lengths else None
