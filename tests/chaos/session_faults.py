"""Kills everything that serves outside agents, again and again, in a seeded order.

Rollout workers and gateways die at a moment of a call (`mortal.py`), the others at any time. Each
process is started again at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

from tests.chaos import mortal
from tests.integration.gateway_agents import serves
from tests.integration.stack_tools import eventually
from tests.redis_server import RedisServer
from tests.rollout_stack import Stack

MOMENT_S = 10.0
"""A process that no call brings to its moment within this is killed all the same."""
MORTAL = {"rollout": mortal.OF_WORKERS, "gateway": mortal.OF_GATEWAYS}
OTHERS = ("buffer", "weight_sync", "sandbox", "inference-0", "redis")


def under(folder: Path, process: str) -> Sequence[str]:
    """How a process is started so that it dies at the moment that it is told."""
    return ("tests.chaos.mortal", str(_file(folder, process)))


def _file(folder: Path, process: str) -> Path:
    return folder / f"{process}.moment"


class Kills:
    """A series of kills: of each deck, workers and gateways get two, the others one."""

    def __init__(self, whole: Stack, urls: Sequence[str], redis: RedisServer, seed: int) -> None:
        self.done: Counter[str] = Counter()
        """By process, with the moment at which it died."""
        self._whole, self._urls, self._redis = whole, urls, redis
        self._chance = random.Random(seed)
        self._mortals = [name for name in whole.processes if _kind(name) in MORTAL]
        self._moments: dict[str, list[str]] = {kind: [] for kind in MORTAL}

    async def run(self, number: int) -> None:
        """Returns after so many kills."""
        deck: list[str] = []
        for _ in range(number):
            if not deck:
                deck = [*self._mortals, *self._mortals, *OTHERS]
                self._chance.shuffle(deck)
            await asyncio.sleep(self._chance.uniform(0.5, 3.0))
            victim = deck.pop()
            moment = self._moment(_kind(victim))
            self.done[await asyncio.to_thread(self._kill, victim, moment)] += 1
            for url in self._urls:
                await asyncio.to_thread(
                    eventually, lambda url=url: serves(url), f"{url} serves", 120.0
                )

    def _moment(self, kind: str) -> str:
        """The next one: each comes once before any comes again."""
        if kind not in MORTAL:
            return ""
        left = self._moments[kind]
        if not left:
            left += MORTAL[kind]
            self._chance.shuffle(left)
        return left.pop()

    def _kill(self, victim: str, moment: str) -> str:
        """Kills a process and starts it again; returns when it died."""
        whole = self._whole
        if victim == "redis":
            self._redis.kill()
            self._redis.start()
            return victim
        process, file, told = whole.processes[victim], _file(whole.folder, victim), victim
        if moment:
            whole_file = file.with_suffix(".new")
            whole_file.write_text(moment)
            whole_file.rename(file)
            with suppress(TimeoutExpired):
                process.wait(MOMENT_S)
                told = f"{_kind(victim)} {moment}"
            file.unlink()
        process.kill()
        if victim == "inference-0":
            whole.inference(victim, whole.config.endpoints.inference[0])
        else:
            again = under(whole.folder, victim) if moment else ()
            whole.service(_kind(victim), whole.addresses[victim], victim, under=again)
        return told


def _kind(process: str) -> str:
    return process.partition("-")[0]
